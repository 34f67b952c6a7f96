"""Ops on plain rows of a SQLite file: an acquire of a free name, a release or an extend by its only holder.

As `single.py` has them for PostgreSQL, but inside a transaction that has the whole file. So the row is read and then
written, by two prepared statements of the sqlite3 of Python. Another row is left as it is; the op is decided by the
rules then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from asynclock.rules.decide import clamped
from asynclock.stores.sql.rows import FLOOR

if TYPE_CHECKING:
    import sqlite3

    from asynclock.stores.sql.sending import Single


_Found: TypeAlias = tuple[int, str | None, str, float | None, int, float]
"""A plain row: count, state, owner, expires_at, fence, keep_until."""


class _Texts(NamedTuple):
    """The statements for one table."""

    find: str
    floor: str
    make: str
    take: str
    release: str
    extend: str


@lru_cache(maxsize=16)
def _texts(table: str) -> _Texts:
    where = "WHERE resource_name = ?"
    return _Texts(
        f"SELECT count, state, owner, expires_at, fence, keep_until FROM {table} {where}",  # noqa: S608
        f"SELECT fence FROM {table} {where}",  # noqa: S608
        f"INSERT INTO {table} (owner, node_info, count, fence, expires_at, keep_until, update_time, create_time, "  # noqa: S608
        "resource_name) VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?)",
        f"UPDATE {table} SET owner = ?, node_info = ?, count = 1, fence = ?, expires_at = ?, keep_until = ?, "  # noqa: S608
        f"update_time = ? {where}",
        f"UPDATE {table} SET owner = '', node_info = '', count = 0, expires_at = 0, fence = ?, keep_until = ?, "  # noqa: S608
        f"update_time = ? {where}",
        f"UPDATE {table} SET fence = ?, keep_until = ?, update_time = ?, expires_at = ? {where}",  # noqa: S608
    )


class FileSingles:
    """The ops of one transaction, at `now` of the file's clock. It is open already."""

    def __init__(self, connection: sqlite3.Connection, table: str, now: float) -> None:
        self._execute = connection.execute
        self._texts = _texts(table)
        self._now = now
        self._floor: int | None = None  # not read yet

    def carry_out(self, group: str, values: Single) -> int | None:
        """The fence of an op; see `single_of`. None: the row is not plain, or not free, or a trigger has left the write
        out; nothing was done."""
        row: _Found | None = self._execute(self._texts.find, (values.name,)).fetchone()
        if row is not None and row[1] is not None:
            return None
        if group.startswith("acquire"):
            return self._acquire(int(group[8:]), values, row)
        if row is None:
            return None
        count, _, owner, ends, before, keep = row
        if count != 1 or owner != values.owner or ends is None or ends <= self._now:
            return None
        fence = max(before, values.number)
        if before < values.number or (group == "extend" and values.number > 0):
            keep = self._now + values.memory
        if group == "release":
            written = self._execute(self._texts.release, (fence, keep, self._now, values.name))
        else:
            ends = max(ends, self._now + values.lease) if values.lease > 0 else ends
            written = self._execute(self._texts.extend, (fence, keep, self._now, ends, values.name))
        return fence if written.rowcount == 1 else None

    def _acquire(self, span: int, values: Single, row: _Found | None) -> int | None:
        name, owner, info, number, lease, memory = values
        now = self._now
        if row is not None and row[0] and (row[3] is None or row[3] > now):  # None: it is held without an end
            return None
        first = clamped(number, now)
        if row is None or row[4] <= 0:  # that of another row is not below the floor
            first = max(first, self._least())
        first += span - 1
        if row is None:
            fence = first
            written = self._execute(self._texts.make, (owner, info, first, now + lease, now + memory, now, now, name))
        else:
            fence = max(row[4] + span, first)
            written = self._execute(self._texts.take, (owner, info, fence, now + lease, now + memory, now, name))
        return fence if written.rowcount == 1 else None

    def _least(self) -> int:
        """The least fence of a name without a row."""
        if self._floor is None:
            row = self._execute(self._texts.floor, (FLOOR,)).fetchone()
            self._floor = 0 if row is None else row[0]
        return self._floor + 1
