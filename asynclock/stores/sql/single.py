"""One statement for an op, on PostgreSQL: an acquire of a free name, a release or an extend by its only holder.

Such a statement finds a plain row (`rows.py`) or none, does what `decide` would do, and returns the fence. For another
row it returns nothing; then the op is decided in a transaction. Ops of several names that are ready at the same time
leave in one statement. It locks its rows in the order of their names, as all transactions do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.rules.model import ACQUIRE, CLOCK_SKEW, EXTEND, RELEASE
from asynclock.stores.sql.errors import Meaning, meaning, was_not_sent
from asynclock.stores.sql.limits import CLOSING
from asynclock.stores.sql.pool import LIMIT, Pool
from asynclock.stores.sql.rows import FLOOR, fits, node_info

if TYPE_CHECKING:
    from asynclock.rules.model import Op

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
    """The text of a statement."""
    verb, _, span = group.partition(" ")
    given = (
        "unnest(CAST(:name AS text[]), CAST(:owner AS text[]), CAST(:info AS text[]), CAST(:number AS bigint[]), "
        "CAST(:lease AS float8[]), CAST(:memory AS float8[])) AS q(name, owner, info, number, lease, memory)"
    )
    clock = f"(SELECT {now} AS now) AS c"
    if verb == "acquire":
        least, most = (f"CAST(trunc((c.now {sign} {CLOCK_SKEW}) * 1000000) AS bigint)" for sign in "-+")
        first = f"least(greatest(q.number, {least}), {most})"
        return f"""
            INSERT INTO {table} AS l (resource_name, owner, node_info, count, fence, expires_at, keep_until,
                create_time, update_time)
            SELECT q.name, q.owner, q.info, 1,
                greatest(coalesce((SELECT fence FROM {table} WHERE resource_name = :floor), 0) + 1, {first})
                    + {int(span)} - 1,
                c.now + q.lease, c.now + q.memory, c.now, c.now
            FROM {given}, {clock} ORDER BY q.name COLLATE "C"
            ON CONFLICT (resource_name) DO UPDATE SET owner = excluded.owner, node_info = excluded.node_info, count = 1,
                fence = greatest(l.fence + {int(span)}, excluded.fence), expires_at = excluded.expires_at,
                keep_until = excluded.keep_until, update_time = excluded.update_time
            WHERE l.state IS NULL AND (l.count = 0 OR l.expires_at <= excluded.update_time)
            RETURNING l.resource_name, l.fence"""  # noqa: S608
    changes = {
        "release": "owner = '', node_info = '', count = 0, expires_at = 0, fence = greatest(l.fence, m.number), "
        "keep_until = CASE WHEN l.fence < m.number THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
        "extend": "expires_at = CASE WHEN m.lease > 0 THEN greatest(l.expires_at, m.now + m.lease) ELSE l.expires_at "
        "END, fence = greatest(l.fence, m.number), "
        "keep_until = CASE WHEN m.number > 0 THEN m.now + m.memory ELSE l.keep_until END, update_time = m.now",
    }[verb]
    return f"""
        WITH mine AS MATERIALIZED (
            SELECT q.*, c.now FROM {given}, {clock}, {table} AS t
            WHERE t.resource_name = q.name AND t.state IS NULL AND t.count = 1 AND t.owner = q.owner
                AND t.expires_at > c.now AND CAST(:floor AS text) IS NOT NULL
            ORDER BY t.resource_name FOR UPDATE OF t)
        UPDATE {table} AS l SET {changes} FROM mine AS m WHERE l.resource_name = m.name
        RETURNING l.resource_name, l.fence"""  # noqa: S608


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
        self._texts: dict[str, str] = {}  # by group

    async def ask(self, group: str, values: Single) -> int | None:
        """The fence; None: the row is not plain, or not free. Raises the error of the database."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int | None] = loop.create_future()
        self._waiting.setdefault(group, deque()).append((values, answer))
        if self._active < _STATEMENTS:
            self._active += 1
            worker = loop.create_task(self._work(), name="asynclock sends statements")
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                group = next(iter(self._waiting))
                await self._send(group, self._take(group))
        finally:
            self._active -= 1

    def _take(self, group: str) -> dict[str, tuple[Single, asyncio.Future[int | None]]]:
        """The next ops of a group, at most one for each name."""
        waiting, taken, left = self._waiting.pop(group), dict[str, Any](), deque[Any]()
        while waiting and len(taken) < TOGETHER:
            each = waiting.popleft()
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
        columns: dict[str, Any] = dict(zip(Single._fields, map(list, zip(*values, strict=True)), strict=True))
        text = self._texts.get(group) or self._texts.setdefault(group, statement(self._table, self._now, group))
        try:
            async with asyncio.timeout(LIMIT) as limit:
                # A release that is repeated would not find its hold. An acquire may arrive twice, the second time after
                # its undo. Only an extend does no harm.
                found = await self._fetch(text, {**columns, "floor": FLOOR}, again=group == "extend")
        except BaseException as error:
            said = error if isinstance(error, Exception) else ConnectionError("closed")
            if isinstance(error, TimeoutError) and limit.expired():
                said = TimeoutError(f"{self._label} did not end a statement within {LIMIT:g} s")
            for _, answer in taken.values():
                if not answer.done():
                    answer.set_exception(said)
            if not isinstance(error, Exception):
                raise
            return
        fences = dict(found)
        for name, (_, answer) in taken.items():
            if not answer.done():
                answer.set_result(fences.get(name))

    async def _fetch(self, text: str, params: dict[str, Any], *, again: bool) -> list[tuple[str, int]]:
        stale = True
        while True:
            try:
                async with self._pool.line() as line:
                    return [(str(name), int(fence)) for name, fence in await line.fetch(text, params)]
            except Exception as error:
                found = meaning(error)
                if found is Meaning.LOST and stale and (again or was_not_sent(error)):
                    stale = False
                    self._pool.drop_idle()
                elif found is not Meaning.AGAIN:
                    raise
            await asyncio.sleep(0.001)

    async def aclose(self) -> None:
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(set(self._workers), timeout=CLOSING)
