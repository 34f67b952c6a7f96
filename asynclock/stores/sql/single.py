"""One statement for an op, on PostgreSQL: an acquire of a free name, a release or an extend by its only holder.
A release that others wait for has a statement of its own (`serving.py`).

Such a statement finds a plain row (`rows.py`) or none, does what `decide` would do, and returns the fence. For another
row it returns nothing; then the op is decided in a transaction. Ops of several names that are ready at the same time
leave in one statement. It waits for the lock of no row.

The commit of such a release waits for no disk and no standby (`synchronous_commit = off`). If the server crashes before
its log is on the disk, the hold is there again, as if the release had never arrived (`unflushed.py` sends it again).
Each later grant comes after the release in the log, and is not kept without it. A release that raises the fence must
last, and is committed as usual; so is that of a lock without fencing, whose grants `unflushed.py` does not see.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock.rules.model import ACQUIRE, CLOCK_SKEW, EXTEND, RELEASE
from asynclock.stores.sql.dialects import latest
from asynclock.stores.sql.errors import Delayed, Meaning, ends_connection, is_answer, is_of_one, meaning, was_not_sent
from asynclock.stores.sql.limits import LIMIT, LOCKED
from asynclock.stores.sql.pool import Overdue
from asynclock.stores.sql.rows import FLOOR, fits, node_info
from asynclock.stores.sql.sending import Asked, Known, Sending, Single, fail, tell
from asynclock.stores.sql.serving import NEEDED, SERVE, Served, may_serve, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from asynclock.rules.model import Op
    from asynclock.stores.jobs import Left
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.pool import Pool

TOGETHER = 64
"""Ops of one statement, at most."""


def single_of(key: str, op: Op) -> tuple[str, Single] | None:
    """The statement for an op, and its values; None: it needs a transaction. Pure."""
    queueing = op.queueing
    if op.kind.parts or not _fit(key, op):
        return None
    if op.verb is ACQUIRE:
        if op.plain or queueing.number > 1:  # it was refused before: others wait, or hold it
            return None
        group = f"acquire {queueing.span or 1}"
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


def serving_of(key: str, op: Op) -> Single | None:
    """The values of the statement that releases a name and serves its queue; None: the op needs another way. Pure."""
    return Single(key, op.id, op.name, op.fence, 0.0, op.memory) if may_serve(op) and _fit(key, op) else None


def _fit(key: str, op: Op) -> bool:
    """Whether every database keeps both as they are."""
    return fits(key) and fits(op.id[:255]) and "\x00" not in op.id and bool(op.id)


def statement(table: str, now: str, group: str) -> str:
    """The text of a statement. It locks the rows that are there and skips those that another session has locked: one of
    them would stop the ops of all other names. An INSERT may still meet a row that another session has inserted and not
    committed. For that the statement waits as long as a transaction does at first, and no op of it is carried out.

    Each row is looked up in the same way, and updated at its place (ctid, which is unique in its partition). If the row
    has moved since the statement began, nothing is found there, and the op is decided in a transaction."""
    verb, _, span = group.partition(" ")
    more, found = "", _FOUND
    if verb == "acquire":
        more = f", {_first(table, int(span))} AS first"
    elif verb == "release":
        more, found = (
            f", CASE WHEN bool_and(q.number BETWEEN 1 AND t.fence) OVER () THEN {_UNFLUSHED} END",
            f"{_FOUND}, fence",
        )
    elif verb == SERVE:
        found = f"{_FOUND}, {NEEDED}"
    mine = f"""WITH c AS MATERIALIZED (SELECT {now} AS now, {_LOCK_TIMEOUT} AS at_most),
        mine AS MATERIALIZED (
            SELECT q.*, c.now, t.*{more} FROM c CROSS JOIN {_GIVEN} LEFT JOIN LATERAL (
                {latest(table, "q.name", found)}
                FOR UPDATE SKIP LOCKED) AS t ON true)"""  # noqa: S608
    if verb == "acquire":
        return f"{mine}, {_acquire(table, int(span))}"
    return f"{mine}, {serving(table)}" if verb == SERVE else f"{mine} {_change(table, group)}"


def statement_of_one(table: str, now: str, group: str) -> str:
    """The same for one op, which costs the server a third less. A release or an extend waits for no lock of a row."""
    verb, _, span = group.partition(" ")
    if verb == "acquire":
        return f"""WITH c AS MATERIALIZED (SELECT {now} AS now, {_LOCK_TIMEOUT} AS at_most, {_VALUES}),
            t AS MATERIALIZED ({latest(table, ":name", _FOUND)} FOR UPDATE SKIP LOCKED),
            mine AS MATERIALIZED (
                SELECT c.*, t.*, {_first(table, int(span))} AS first, {_REFUSED} FROM c LEFT JOIN t ON true),
            {_acquire(table, int(span))}"""  # noqa: S608
    found = f"{now} AS now, {_VALUES}, {_FOUND}"
    if verb == "reacquire":
        found += f", {_REFUSED}"
    elif verb == "release":
        found += f", CASE WHEN CAST(:number AS bigint) BETWEEN 1 AND fence THEN {_UNFLUSHED} END"
    elif verb == SERVE:
        found += f", {NEEDED}"
    mine = f"{latest(table, ':name', found)} FOR UPDATE SKIP LOCKED"
    if verb == SERVE:
        return f"WITH mine AS ({mine}), {serving(table)}"
    return f"WITH mine AS ({mine}) {_change(table, group)}"


def _change(table: str, group: str) -> str:
    """The UPDATE of a row that is there: of a hold by its only holder, or of a free name by the next one. The fence of
    such a row is not below the floor, so a grant need not read that."""
    verb, _, span = group.partition(" ")
    if verb == "reacquire":
        changes = _TAKEN.format(fence=f"greatest(l.fence + {int(span)}, {_clocked('m.now', 'm.number')} + {span} - 1)")
        plain = "l.fence > 0 AND (m.count = 0 OR m.ends <= m.now)"
    else:
        changes, plain = _CHANGES[verb], "m.count = 1 AND m.holder = m.owner AND m.ends > m.now"
    return f"""UPDATE {table} AS l SET {changes} FROM mine AS m
        WHERE l.ctid = m.at AND l.tableoid = m.part AND m.state IS NULL AND {plain}
        RETURNING l.resource_name, l.fence"""  # noqa: S608


def _first(table: str, span: int) -> str:
    """The least fence of a grant of a name that may have no row."""
    floor = f"(SELECT fence FROM {table} WHERE resource_name = :floor)"  # noqa: S608
    return f"greatest(coalesce({floor}, 0) + 1, {_clocked('now', 'number')}) + {span} - 1"


def _clocked(now: str, number: str) -> str:
    """The client's clock in us, as far as that of the server agrees."""
    least, most = (f"CAST(trunc(({now} {sign} {CLOCK_SKEW}) * 1000000) AS bigint)" for sign in "-+")
    return f"least(greatest({number}, {least}), {most})"


def _acquire(table: str, span: int) -> str:
    """Rows that are free are taken, and those that are absent are made: they are not found without a lock either."""
    return f"""taken AS (
            UPDATE {table} AS l SET {_TAKEN.format(fence=f"greatest(l.fence + {span}, m.first)")} FROM mine AS m
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

_UNFLUSHED = "set_config('synchronous_commit', 'off', true)"
"""The same: the commit of this statement returns before it is on a disk."""

_REFUSED = f"CASE WHEN state IS NOT NULL THEN {_UNFLUSHED} END"
"""Of an acquire of one name: it does nothing there, but its lock of the row would be flushed."""

_TAKEN = (
    "owner = m.owner, node_info = m.info, count = 1, fence = {fence}, expires_at = m.now + m.lease, "
    "keep_until = m.now + m.memory, update_time = m.now"
)

_CHANGES = {
    "release": "owner = '', node_info = '', count = 0, expires_at = 0, fence = greatest(l.fence, m.number), "
    "keep_until = CASE WHEN l.fence < m.number THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
    "extend": "expires_at = CASE WHEN m.lease > 0 THEN greatest(l.expires_at, m.now + m.lease) ELSE l.expires_at "
    "END, fence = greatest(l.fence, m.number), "
    "keep_until = CASE WHEN m.number > 0 THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
}


class Singles(Sending[Asked]):
    """The statements of one event loop."""

    def __init__(self, label: str, table: str, now: str, pool: Pool, here: Collection[str] = ()) -> None:
        """`here`: the tags of the clients of this event loop. A statement sends them no messages."""
        super().__init__(label, pool)
        self._here = here
        self._table = table
        self._now = now
        self._known = Known()
        self._waiting: dict[str, deque[Asked]] = {}  # by group
        self._texts: dict[tuple[object, str], str] = {}  # by what builds them, and group

    def add(self, group: str, values: Single, told: Callable[[Any, Exception | None], Left]) -> Asked:
        def answered(found: Any, error: Exception | None) -> Left:
            if found is not None:
                self._known.add(values.name)
            return told(found, error)

        asked = Asked(self._known.group(group, values.name), values, answered)
        self.begin(asked)
        return asked

    def put(self, asked: Asked) -> None:
        self._waiting.setdefault(asked.group, deque()).append(asked)

    def take(self) -> Sequence[Asked]:
        """Ops of a group, at most one for each name."""
        while self._waiting:
            group = next(iter(self._waiting))
            waiting, taken, left = self._waiting.pop(group), dict[str, Asked](), deque[Asked]()
            while waiting and len(taken) < TOGETHER:
                asked = waiting.popleft()
                if asked.is_over:  # its caller has gone
                    continue
                if taken.setdefault(asked.values.name, asked) is not asked:
                    left.append(asked)
            left.extend(waiting)
            if left:
                self._waiting[group] = left  # at the end: other groups come first
            if taken:
                return list(taken.values())
        return ()

    async def send(self, taken: Sequence[Asked], line: Line) -> Callable[[], object]:
        found = await _answered(line, *self._statement(taken))
        if isinstance(found, Exception):
            if not _is_left_to_transactions(taken, found):
                return partial(self._refused, taken, found)
            found = {}
        if len(taken) == 1:
            return partial(taken[0].answer, found.get(taken[0].values.name))
        return partial(tell, [(each, found.get(each.values.name), None) for each in taken])

    def _refused(self, taken: Sequence[Asked], error: Exception) -> None:
        """The server has carried out nothing. What one op writes may be the reason: then each is sent alone."""
        if len(taken) == 1 or not is_of_one(error):
            fail(taken, error)
            return
        self.send_again(taken, error)

    async def send_in_task(self, taken: Sequence[Asked], error: Exception | None) -> None:
        try:
            found = await self._fetch(taken, error)
        except Exception as failed:
            if len(taken) > 1 and is_of_one(failed):
                for each in taken:
                    if not each.is_over:
                        await self.send_in_task([each], None)
                return
            fail(taken, failed)
        else:
            tell((each, found.get(each.values.name), None) for each in taken)

    def _statement(self, taken: Sequence[Asked]) -> tuple[str, dict[str, Any]]:
        """The text, and its parameters."""
        if len(taken) > 1:
            return self._of_several(taken)
        (asked,) = taken
        return self._text(statement_of_one, asked.group), {**asked.values._asdict(), **self._shared}

    def _of_several(self, taken: Sequence[Asked]) -> tuple[str, dict[str, Any]]:
        values = sorted((each.values for each in taken), key=lambda each: each.name.encode())
        columns = zip(Single._fields, map(list, zip(*values, strict=True)), strict=True)
        return self._text(statement, taken[0].group), {**dict(columns), **self._shared}

    @property
    def _shared(self) -> dict[str, Any]:
        """Parameters that do not depend on the ops."""
        return {"floor": FLOOR, "here": list(self._here)}

    def _text(self, build: Callable[[str, str, str], str], group: str) -> str:
        if (text := self._texts.get((build, group))) is None:
            text = self._texts[build, group] = build(self._table, self._now, group)
        return text

    async def _fetch(self, taken: Sequence[Asked], error: Exception | None) -> dict[str, Any]:
        """As `_answered`. Empty if a lock was not free: then each op goes its own way. `error`: that of an attempt
        before. Raises the error of the database."""
        until, stale = asyncio.get_running_loop().time() + LIMIT, True
        while True:
            try:
                if error is not None:
                    failed, error = error, None
                    raise failed
                async with self._pool.line(until) as line:
                    found = await _answered(line, *self._statement(taken))
                if not isinstance(found, Exception):
                    return found
                raise found
            except Overdue as failed:
                said = f"{self._label} did not end a statement within {LIMIT:g} s"
                raise (Delayed(said) if failed.ended else TimeoutError(said)) from failed
            except Exception as failed:
                if _is_left_to_transactions(taken, failed):
                    return {}
                # A release that is repeated would not find its hold. An acquire may arrive twice, the second time after
                # its undo. Only an extend does no harm.
                again = taken[0].group == "extend" or was_not_sent(failed)
                if meaning(failed) is not Meaning.LOST or not stale or not again:
                    raise
                stale = False
                self._pool.drop_idle()


async def _answered(line: Line, text: str, params: Mapping[str, Any]) -> dict[str, Any] | Exception:
    """By name: the fences, or what was served; or the error with which the server has answered. The connection is good
    after that."""
    try:
        found = await line.fetch(text, params)
    except Exception as error:
        if ends_connection(error) or not is_answer(error):
            raise
        return error
    return {str(name): Served(fence, *more[:-1]) if more else int(fence) for name, fence, *more in found}


def _is_left_to_transactions(taken: Sequence[Asked], error: Exception) -> bool:
    """Whether the statement has done nothing, and each op of it goes its own way. A queue that another program has
    written is an error of any kind: the transaction says what is wrong with it."""
    if meaning(error) is Meaning.AGAIN:
        return True
    return taken[0].group == SERVE and is_answer(error) and not ends_connection(error)
