"""Rows that say nothing any more are removed in the background, by one client at a time.

A name keeps its counter for `fence_memory` after its last hold. Then its row may go. Fences never fall: first the row
FLOOR is raised to the counters of a page of the table, and only the next turn removes the rows of that page. A name
without a row begins above the floor.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.stores.sql.background import Background
from asynclock.stores.sql.errors import is_lock_wait
from asynclock.stores.sql.rows import CLEANER, FLOOR, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.transactions import Transactions

TURN = 5.0
"""Seconds between two turns."""

ROWS = 10_000
"""Rows of a page. Each turn looks at the next page, whatever it has found: at some 1,500 rows a second. So the
table does not grow for ever while up to 1,000 new names a second are locked, in any order."""

_TOGETHER = 500
"""Rows that one statement deletes."""


_LOCKED = 16
"""Locked rows that a turn finds, at most. More are a session that has locked the table."""


class _Found(NamedTuple):
    """What a turn may remove."""

    names: Sequence[str]
    floor: int  # none of them has a greater fence
    now: float


class Cleaning:
    """The background task of one event loop."""

    def __init__(self, dialect: Dialect, transactions: Transactions) -> None:
        self._dialect = dialect
        self._transactions = transactions
        self._background = Background(self._run, "asynclock removes rows")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TURN * random.uniform(1.05, 1.5))  # noqa: S311 - jitter
            try:
                if await self._is_due():
                    await self.turn()
            except Exception:  # noqa: S112 - rows stay for a while longer; ops report what is wrong
                continue

    async def _is_due(self) -> bool:
        """Whether no client has had a turn a moment ago."""
        pool = self._transactions.pool
        async with pool.line() as line:
            now = await self._dialect.time(line)
            found = await pool.alone(
                line,
                f"SELECT expires_at FROM {self._dialect.table} WHERE resource_name = :name",  # noqa: S608
                {"name": CLEANER},
            )
        return not found or found[0][0] <= now

    async def turn(self) -> int:
        """Remove rows of the page that the last turn has looked at, and look at the next page; the number of rows that
        were removed. A row that another session has locked stays; those beside it are found by halves."""
        found: _Found = await self._transactions.repeated(self._look)
        batches = [found.names[first : first + _TOGETHER] for first in range(0, len(found.names), _TOGETHER)]
        locked = 0
        while batches and locked < _LOCKED:  # short transactions: other clients wait for each
            batch = batches.pop()
            try:
                await self._transactions.repeated(partial(self._delete, batch, found.floor, found.now), locked_for=0.0)
            except Exception as error:
                if not is_lock_wait(error):
                    raise
                half = len(batch) // 2
                batches += (batch[:half], batch[half:]) if half else ()
                locked += not half
        return len(found.names) - locked - sum(map(len, batches))

    async def _look(self, line: Line) -> _Found:
        """Raise the floor to the counters of the next page; the rows to remove."""
        now, _, rows = await self._dialect.read(line, sorted((CLEANER, FLOOR)))
        cleaner, floor = rows.get(CLEANER), rows.get(FLOOR)
        if cleaner is not None and (cleaner.expires_at or 0.0) > now:
            return _Found([], 0, now)
        before, after = (cleaner.node_info, cleaner.owner) if cleaner is not None else ("", "")
        known = floor.fence if floor is not None else 0
        # A row whose counter the floor reaches only now stays: an op that has just read the old floor may not find it.
        _, ended = await self._page(line, before, now)
        names = [name for name, fence in ended if fence <= known]
        last, ended = await self._page(line, after, now)
        top = max((fence for _, fence in ended), default=0)
        if top > known:
            await self._put(line, floor, Row(FLOOR, fence=top, keep_until=None), now)
        place = Row(CLEANER, owner=last, node_info=after, expires_at=now + TURN, keep_until=None)
        await self._put(line, cleaner, place, now)
        return _Found(names, known, now)

    async def _page(self, line: Line, after: str, now: float) -> tuple[str, Sequence[tuple[str, int]]]:
        """The last name of the page behind `after`, "" if it is the last page; and the names of the page that have
        ended, with their fences."""
        table = self._dialect.table
        ((number, last),) = await line.fetch(
            f"SELECT count(*), max(resource_name) FROM (SELECT resource_name FROM {table} "  # noqa: S608
            f"WHERE resource_name > :after ORDER BY resource_name LIMIT {ROWS}) AS page",
            {"after": after},
        )
        ended = await line.fetch(
            f"SELECT resource_name, fence FROM {table} WHERE resource_name > :after AND resource_name <= :last "  # noqa: S608
            "AND expires_at <= :now AND keep_until <= :now ORDER BY resource_name",
            {"after": after, "last": last or "", "now": now},
        )
        return last if number == ROWS else "", ended

    async def _delete(self, names: Sequence[str], floor: int, now: float, line: Line) -> None:
        """Delete these rows, unless one was locked again meanwhile. It names each, because a server may wait for the
        locks of all rows of a range."""
        params: dict[str, Any] = {f"k{each}": names[min(each, len(names) - 1)] for each in range(_TOGETHER)}
        these = f"FROM {self._dialect.table} WHERE resource_name IN ({', '.join(f':{each}' for each in params)})"
        if self._dialect.name == "mysql":  # its sessions wait for whole seconds, with the rows before locked
            await line.fetch(f"SELECT resource_name {these} FOR UPDATE NOWAIT", params)
        await line.fetch(
            f"DELETE {these} AND fence <= :floor AND expires_at <= :now AND keep_until <= :now",
            {**params, "floor": floor, "now": now},
        )

    async def _put(self, line: Line, before: Row | None, row: Row, now: float) -> None:
        await (self._dialect.insert if before is None else self._dialect.update)(line, row, now)

    async def aclose(self) -> None:
        await self._background.aclose()
