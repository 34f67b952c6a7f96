"""Reads that lock no row and write nothing, for `locked`, `inspect` and `holders`: SELECT on the table is enough for
them, a lock of a row does not stop them, and a standby carries them out.

The rows of all names are read by one statement, so they are of one moment. The clock is that of the begin of the
statement, which is before that moment: a hold that is extended meanwhile is not taken for one that has ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.stores.sql.dialects import begin_with, latest
from asynclock.stores.sql.limits import LOCKED, WAITING
from asynclock.stores.sql.machine_clock import boot, boottime, offset_of
from asynclock.stores.sql.rows import COLUMNS, FLOOR, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line


class Seen(NamedTuple):
    """What was read."""

    now: float  # Unix time, of the server
    floor: int  # see `Read`
    rows: Mapping[str, Row]  # those that exist, by resource_name
    is_replica: bool = False  # a standby has answered, which may be behind its primary


class Reader:
    """The statements for one table. The base is PostgreSQL."""

    began = "CAST(extract(epoch FROM statement_timestamp()) AS double precision)"
    begin = begin_with(LOCKED, " READ ONLY")
    begin_waiting = begin_with(WAITING, " READ ONLY")  # the same once its lock was not free

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._table = dialect.table

    async def read(self, line: Line, names: Sequence[str]) -> Seen:
        """The rows of these names."""
        params: dict[str, Any] = {f"k{number}": name for number, name in enumerate(names)} | {"floor": FLOOR}
        wanted = ", ".join(f"(:k{each})" for each in range(len(names))) or "(NULL)"
        found = await line.fetch(
            f"SELECT {self.began}, (SELECT fence FROM {self._table} WHERE resource_name = :floor), "  # noqa: S608
            "pg_is_in_recovery(), r.* "
            f"FROM (SELECT 1 AS one) AS o LEFT JOIN (SELECT t.* FROM (VALUES {wanted}) AS q(name) CROSS JOIN LATERAL "
            f"({latest(self._table, 'q.name', COLUMNS)}) AS t) AS r ON true",
            params,
        )
        now, floor, is_replica = found[0][:3]
        rows = {each[3]: Row(*each[3:]) for each in found if each[3] is not None}
        return Seen(float(now), int(floor or 0), rows, bool(is_replica))

    async def time(self, line: Line) -> float:
        return await self._dialect.time(line)

    async def check(self, line: Line) -> None:
        """Whether this reads what all others use. Raises FileReplaced."""

    async def commit(self, line: Line) -> None:
        await line.run("COMMIT")


class _PlainReader(Reader):
    """Of a database that reads the last commit without a lock. The clock is read before the rows."""

    async def read(self, line: Line, names: Sequence[str]) -> Seen:
        now, params = await self.time(line), {f"k{number}": name for number, name in enumerate((*names, FLOOR))}
        wanted = ", ".join(f":{each}" for each in params)
        found = await line.fetch(
            f"SELECT {COLUMNS} FROM {self._table} WHERE resource_name IN ({wanted})",  # noqa: S608
            params,
        )
        rows = {each[0]: Row(*each) for each in found}
        floor = rows.get(FLOOR)
        return Seen(now, floor.fence if floor is not None else 0, rows)


class MySQLReader(_PlainReader):
    """MySQL and MariaDB."""

    # With SERIALIZABLE a SELECT would lock the rows that it reads.
    begin = begin_waiting = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION READ ONLY"


class FileReader(_PlainReader):
    """SQLite. The clock is that of the file. A client that writes stores it at its first use; one that only reads works
    it out."""

    begin = begin_waiting = "BEGIN"

    async def time(self, line: Line) -> float:
        since = boottime()
        return since + (await offset_of(self._table, line, boot(), since, time.time())).seconds

    async def check(self, line: Line) -> None:
        if line.file is not None:
            line.file.check()


def reader_of(dialect: Dialect) -> Reader:
    """The reader for the table of that dialect."""
    return {"mysql": MySQLReader, "sqlite": FileReader}.get(dialect.name, Reader)(dialect)
