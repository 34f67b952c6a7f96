"""One statement for an op, on PostgreSQL: an acquire of a free name, a release or an extend by its only holder.

Such a statement finds a plain row (`rows.py`) or none, does what `decide` would do, and returns the fence. For another
row it returns nothing; then the op is decided in a transaction. Ops of several names that are ready at the same time
leave in one statement. It waits for the lock of no row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._loop import own_task
from asynclock.rules.model import ACQUIRE, CLOCK_SKEW, EXTEND, RELEASE
from asynclock.stores.sql.dialects import LOCKED, latest
from asynclock.stores.sql.errors import Delayed, Meaning, ends_connection, is_answer, is_of_one, meaning, was_not_sent
from asynclock.stores.sql.limits import CLOSING
from asynclock.stores.sql.pool import LIMIT, Overdue, Pool
from asynclock.stores.sql.rows import FLOOR, fits, node_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asynclock.rules.model import Op
    from asynclock.stores.sql.lines import Line

TOGETHER = 64
"""Ops of one statement, at most."""

_STATEMENTS = 2
"""Statements under way at the same time."""


class Single(NamedTuple):
    """The values of an op."""

    name: str  # the resource_name
    owner: str
    info: str
    number: int  # acquire: the client's clock in us; else the token
    lease: float
    memory: float


def single_of(key: str, op: Op) -> tuple[str, Single] | None:
    """The statement for an op, and its values; None: it needs a transaction. Pure."""
    queueing = op.queueing
    if op.kind.parts or not fits(key) or not fits(op.id[:255]) or "\x00" in op.id or not op.id:
        return None
    if op.verb is ACQUIRE:
        if op.plain or queueing.number > 1:  # it was refused before: others wait, or hold it
            return None
        group = f"acquire {queueing.span}"
    elif op.verb is RELEASE:
        if op.rest or op.tombstone or queueing.number or queueing.contended:
            return None
        group = "release"
    elif op.verb is EXTEND:
        group = "extend"
    else:
        return None
    info = node_info(op.id) if op.verb is ACQUIRE else ""
    return group, Single(key, op.id, info, op.fence, op.lease, op.memory)


def statement(table: str, now: str, group: str) -> str:
    """The text of a statement. It locks the rows that are there and skips those that another session has locked: one of
    them would stop the ops of all other names. An INSERT may still meet a row that another session has inserted and not
    committed. For that the statement waits as long as a transaction does at first, and no op of it is carried out.

    Each row is looked up in the same way, and updated at its place (ctid, which is unique in its partition). If the row
    has moved since the statement began, nothing is found there, and the op is decided in a transaction."""
    verb, _, span = group.partition(" ")
    first = f", {_first(table, int(span))} AS first" if verb == "acquire" else ""
    mine = f"""WITH c AS MATERIALIZED (SELECT {now} AS now, {_LOCK_TIMEOUT} AS at_most),
        mine AS MATERIALIZED (
            SELECT q.*, c.now, t.*{first} FROM c CROSS JOIN {_GIVEN} LEFT JOIN LATERAL (
                {latest(table, "q.name", _FOUND)}
                FOR UPDATE SKIP LOCKED) AS t ON true)"""  # noqa: S608
    if verb == "acquire":
        return f"{mine}, {_acquire(table, int(span))}"
    return f"{mine} {_change(table, verb)}"


def statement_of_one(table: str, now: str, group: str) -> str:
    """The same for one op, which costs the server a third less. A release or an extend waits for no lock of a row."""
    verb, _, span = group.partition(" ")
    if verb == "acquire":
        return f"""WITH c AS MATERIALIZED (SELECT {now} AS now, {_LOCK_TIMEOUT} AS at_most, {_VALUES}),
            t AS MATERIALIZED ({latest(table, ":name", _FOUND)} FOR UPDATE SKIP LOCKED),
            mine AS MATERIALIZED (SELECT c.*, t.*, {_first(table, int(span))} AS first FROM c LEFT JOIN t ON true),
            {_acquire(table, int(span))}"""  # noqa: S608
    mine = f"{latest(table, ':name', f'{now} AS now, {_VALUES}, {_FOUND}')} FOR UPDATE SKIP LOCKED"
    return f"WITH mine AS ({mine}) {_change(table, verb)}"


def _change(table: str, verb: str) -> str:
    """The UPDATE of a hold, by its only holder."""
    return f"""UPDATE {table} AS l SET {_CHANGES[verb]} FROM mine AS m
        WHERE l.ctid = m.at AND l.tableoid = m.part AND m.state IS NULL AND m.count = 1 AND m.holder = m.owner
            AND m.ends > m.now
        RETURNING l.resource_name, l.fence"""  # noqa: S608


def _first(table: str, span: int) -> str:
    """The least fence of a grant."""
    least, most = (f"CAST(trunc((now {sign} {CLOCK_SKEW}) * 1000000) AS bigint)" for sign in "-+")
    floor = f"(SELECT fence FROM {table} WHERE resource_name = :floor)"  # noqa: S608
    return f"greatest(coalesce({floor}, 0) + 1, least(greatest(number, {least}), {most})) + {span} - 1"


def _acquire(table: str, span: int) -> str:
    """Rows that are free are taken, and those that are absent are made: they are not found without a lock either."""
    return f"""taken AS (
            UPDATE {table} AS l SET owner = m.owner, node_info = m.info, count = 1,
                fence = greatest(l.fence + {span}, m.first), expires_at = m.now + m.lease,
                keep_until = m.now + m.memory, update_time = m.now FROM mine AS m
            WHERE l.ctid = m.at AND l.tableoid = m.part AND m.state IS NULL AND (m.count = 0 OR m.ends <= m.now)
            RETURNING l.resource_name, l.fence),
        made AS (
            INSERT INTO {table} AS l (resource_name, owner, node_info, count, fence, expires_at, keep_until,
                create_time, update_time)
            SELECT m.name, m.owner, m.info, 1, m.first, m.now + m.lease, m.now + m.memory, m.now, m.now
            FROM mine AS m WHERE m.at IS NULL AND ({latest(table, "m.name", "count")}) IS NULL
            ON CONFLICT (resource_name) DO NOTHING RETURNING l.resource_name, l.fence)
        SELECT * FROM taken UNION ALL SELECT * FROM made"""  # noqa: S608


_GIVEN = (
    # The arrays are subqueries, so that a plan does not depend on their length: else the server would make a plan for
    # each statement, which takes longer than the statement.
    "unnest((SELECT CAST(:name AS text[])), (SELECT CAST(:owner AS text[])), (SELECT CAST(:info AS text[])), "
    "(SELECT CAST(:number AS bigint[])), (SELECT CAST(:lease AS float8[])), (SELECT CAST(:memory AS float8[]))) "
    "AS q(name, owner, info, number, lease, memory)"
)

_TYPES = {"name": "text", "owner": "text", "info": "text", "number": "bigint", "lease": "float8", "memory": "float8"}

_VALUES = ", ".join(f"CAST(:{name} AS {kind}) AS {name}" for name, kind in _TYPES.items())
"""Of one op."""

_FOUND = "tableoid AS part, ctid AS at, owner AS holder, count, expires_at AS ends, state"

_LOCK_TIMEOUT = f"set_config('lock_timeout', '{int(LOCKED * 1000)}', true)"
"""As SET LOCAL, which would be a statement of its own."""

_CHANGES = {
    "release": "owner = '', node_info = '', count = 0, expires_at = 0, fence = greatest(l.fence, m.number), "
    "keep_until = CASE WHEN l.fence < m.number THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
    "extend": "expires_at = CASE WHEN m.lease > 0 THEN greatest(l.expires_at, m.now + m.lease) ELSE l.expires_at "
    "END, fence = greatest(l.fence, m.number), "
    "keep_until = CASE WHEN m.number > 0 THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
}


class Singles:
    """The statements of one event loop."""

    def __init__(self, label: str, table: str, now: str, pool: Pool) -> None:
        self._label = label
        self._table = table
        self._now = now
        self._pool = pool
        self._waiting: dict[str, deque[tuple[Single, asyncio.Future[int | None]]]] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._active = 0
        self._texts: dict[tuple[object, str], str] = {}  # by what builds them, and group

    async def ask(self, group: str, values: Single) -> int | None:
        """The fence; None: the row is not plain, or not free. Raises the error of the database."""
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append((values, answer))
        if self._active < _STATEMENTS:
            self._active += 1
            self._workers.add(own_task(self._work(), "asynclock sends statements", self._workers.discard))
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                group = next(iter(self._waiting))
                if taken := self._take(group):
                    await self._send(group, taken)
        finally:
            self._active -= 1

    def _take(self, group: str) -> dict[str, tuple[Single, asyncio.Future[int | None]]]:
        """The next ops of a group, at most one for each name."""
        waiting, taken, left = self._waiting.pop(group), dict[str, Any](), deque[Any]()
        while waiting and len(taken) < TOGETHER:
            each = waiting.popleft()
            if each[1].done():  # its caller was cancelled
                continue
            if each[0].name in taken:
                left.append(each)
            else:
                taken[each[0].name] = each
        left.extend(waiting)
        if left:
            self._waiting[group] = left  # at the end: other groups come first
        return taken

    async def _send(self, group: str, taken: dict[str, tuple[Single, asyncio.Future[int | None]]]) -> None:
        values = [each for each, _ in sorted(taken.values(), key=lambda each: each[0].name.encode())]
        try:
            if len(values) == 1:
                fences = await self._fetch(statement_of_one, group, values[0]._asdict())
            else:
                columns = dict(zip(Single._fields, map(list, zip(*values, strict=True)), strict=True))
                fences = await self._fetch(statement, group, columns)
        except BaseException as error:
            if len(taken) > 1 and isinstance(error, Exception) and is_of_one(error):
                for name, asked in taken.items():  # nothing was carried out
                    if not asked[1].done():
                        await self._send(group, {name: asked})
                return
            said = error if isinstance(error, Exception) else ConnectionError("closed")
            for _, answer in taken.values():
                if not answer.done():
                    answer.set_exception(said)
            if not isinstance(error, Exception):
                raise
            return
        for name, (_, answer) in taken.items():
            if not answer.done():
                answer.set_result(fences.get(name))

    async def _fetch(
        self, build: Callable[[str, str, str], str], group: str, params: Mapping[str, Any]
    ) -> dict[str, int]:
        """The fences, by name. Empty if a lock was not free: then each op goes its own way. Raises the error of the
        database."""
        text = self._texts.get((build, group)) or self._texts.setdefault(
            (build, group), build(self._table, self._now, group)
        )
        until, stale = asyncio.get_running_loop().time() + LIMIT, True
        while True:
            try:
                async with self._pool.line(until) as line:
                    found = await _answered(line, text, {**params, "floor": FLOOR})
                if not isinstance(found, Exception):
                    return found
                raise found
            except Overdue as error:
                said = f"{self._label} did not end a statement within {LIMIT:g} s"
                raise (Delayed(said) if error.ended else TimeoutError(said)) from error
            except Exception as error:
                means = meaning(error)
                if means is Meaning.AGAIN:
                    return {}
                # A release that is repeated would not find its hold. An acquire may arrive twice, the second time after
                # its undo. Only an extend does no harm.
                again = group == "extend" or was_not_sent(error)
                if means is not Meaning.LOST or not stale or not again:
                    raise
                stale = False
                self._pool.drop_idle()

    async def aclose(self) -> None:
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(set(self._workers), timeout=CLOSING)


async def _answered(line: Line, text: str, params: Mapping[str, Any]) -> dict[str, int] | Exception:
    """The fences, by name; or the error with which the server has answered. The connection is good after that."""
    try:
        return {str(name): int(fence) for name, fence in await line.fetch(text, params)}
    except Exception as error:
        if ends_connection(error) or not is_answer(error):
            raise
        return error
