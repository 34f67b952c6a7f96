"""Rows that say nothing any more are removed in the background, by one client at a time.

A name keeps its counter for `fence_memory` after its last hold. Then its row may go. Fences never fall: first the row
FLOOR is raised to the counter, and only a later turn removes the row. A name without a row begins above the floor.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from asynclock.stores.sql.limits import CLOSING
from asynclock.stores.sql.rows import CLEANER, FLOOR, Row

if TYPE_CHECKING:
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.transactions import Transactions

TURN = 5.0
"""Seconds between two turns."""

ROWS = 10_000
"""Rows that a turn looks at. A row needs two turns, so the table does not grow for ever while up to 1,000 new names a
second are locked."""

_TOGETHER = 500
"""Rows that one statement deletes."""


class Cleaning:
    """The background task of one event loop."""

    def __init__(self, dialect: Dialect, transactions: Transactions) -> None:
        self._dialect = dialect
        self._transactions = transactions
        self._task = asyncio.get_running_loop().create_task(self._run(), name="asynclock removes rows")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TURN * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
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
        """Look at the next rows; the number of those that were removed."""
        removed: int = await self._transactions.repeated(self._turn)
        return removed

    async def _turn(self, line: Line) -> int:
        dialect, table = self._dialect, self._dialect.table
        now, _, rows = await dialect.read(line, sorted((CLEANER, FLOOR)))
        cleaner, floor = rows.get(CLEANER), rows.get(FLOOR)
        if cleaner is not None and (cleaner.expires_at or 0.0) > now:
            return 0
        after = cleaner.owner if cleaner is not None else ""
        ((number, last),) = await line.fetch(
            f"SELECT count(*), max(resource_name) FROM (SELECT resource_name FROM {table} "  # noqa: S608
            f"WHERE resource_name > :after ORDER BY resource_name LIMIT {ROWS}) AS page",
            {"after": after},
        )
        over = await line.fetch(
            f"SELECT resource_name, fence FROM {table} WHERE resource_name > :after AND resource_name <= :last "  # noqa: S608
            "AND expires_at <= :now AND keep_until <= :now ORDER BY resource_name",
            {"after": after, "last": last or "", "now": now},
        )
        known = floor.fence if floor is not None else 0
        top = max((fence for _, fence in over), default=0)
        gone = [name for name, fence in over if fence <= known]
        for first in range(0, len(gone), _TOGETHER):
            await self._delete(line, gone[first : first + _TOGETHER], known, now)
        if top > known:
            await self._put(line, floor, Row(FLOOR, fence=top, keep_until=None), now)
        else:
            after = last if number == ROWS else ""
        await self._put(line, cleaner, Row(CLEANER, owner=after, expires_at=now + TURN, keep_until=None), now)
        return len(gone)

    async def _delete(self, line: Line, names: list[str], floor: int, now: float) -> None:
        """Delete these rows, unless one was locked again meanwhile. It names each, because a server may wait for the
        locks of all rows of a range."""
        params: dict[str, Any] = {f"k{each}": names[min(each, len(names) - 1)] for each in range(_TOGETHER)}
        await line.fetch(
            f"DELETE FROM {self._dialect.table} WHERE resource_name IN ({', '.join(f':{each}' for each in params)}) "  # noqa: S608
            "AND fence <= :floor AND expires_at <= :now AND keep_until <= :now",
            {**params, "floor": floor, "now": now},
        )

    async def _put(self, line: Line, before: Row | None, row: Row, now: float) -> None:
        await (self._dialect.insert if before is None else self._dialect.update)(line, row, now)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSING)
