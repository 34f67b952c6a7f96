"""The statements of each database.

READ COMMITTED is enough: a transaction reads each row that it may change with FOR UPDATE, so it has the newest version,
and no other op changes it before the commit. An absent row cannot be locked. There the INSERT decides: it fails if
another client was first, and the transaction is repeated.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import ConfigError
from asynclock.stores.sql.charsets import narrowest
from asynclock.stores.sql.errors import Conflict, Demoted, Meaning, NotWritten, is_duplicate, meaning
from asynclock.stores.sql.files import FileReplaced
from asynclock.stores.sql.limits import LIMIT, LOCKED, WAITING
from asynclock.stores.sql.lines import IDLE, READ_ONLY, committed, is_read_only
from asynclock.stores.sql.rows import CLOCK, COLUMNS, FLOOR, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock.stores.sql.charsets import Charset
    from asynclock.stores.sql.lines import Line

_COLUMNS = COLUMNS


def begin_with(lock_timeout: float, mode: str = "") -> str:
    """The begin of a transaction of PostgreSQL. The limits hold for it alone: behind a pooler a session is shared.
    Where the client cannot tell the server that a statement is overdue, the server ends it a second later itself."""
    limits = {
        "idle_in_transaction_session_timeout": IDLE,
        "lock_timeout": lock_timeout,
        "statement_timeout": LIMIT + 1,
    }
    said = "; ".join(f"SET LOCAL {name} = {int(seconds * 1000)}" for name, seconds in limits.items())
    return f"BEGIN ISOLATION LEVEL READ COMMITTED{mode}; {said}; SET LOCAL enable_bitmapscan = off"


class Read(NamedTuple):
    """What an op needs to know."""

    now: float  # Unix time, of the server
    floor: int  # a fence that is at least that of each row that was removed
    rows: Mapping[str, Row]  # those that exist, by resource_name


def latest(table: str, name: str, columns: str) -> str:
    """The row of a name, on PostgreSQL. While a transaction of another session is open, the old versions of a row stay,
    each page of them with an entry in the index. From the end of the entries the newest page comes first, and LIMIT
    ends the search there. With = for the range PostgreSQL would begin with the oldest, and a bitmap reads all: a server
    that counts few rows and many pages of the index takes that, unless it is told not to."""
    return (
        f"SELECT {columns} FROM {table} WHERE resource_name >= {name} AND resource_name <= {name} "  # noqa: S608
        "ORDER BY resource_name DESC LIMIT 1"
    )


def assignments() -> str:
    """What an UPDATE writes into a row."""
    pairs = list(zip(_COLUMNS.split(", "), Row._fields, strict=True))[1:]
    return ", ".join([f"{column} = :{field}" for column, field in pairs] + ["update_time = :now"])


class Dialect:
    """The statements for one table. The base is PostgreSQL."""

    name = "postgresql"
    now = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
    begin = begin_with(LOCKED)  # a transaction
    begin_waiting = begin_with(WAITING)  # the same once its lock was not free
    mixes = True  # some clients may get push messages, and others look for theirs
    returns = True  # INSERT ... RETURNING

    def __init__(self, table: str) -> None:
        self.table = table

    async def read(self, line: Line, names: Sequence[str], *, brief: bool = False) -> Read:
        """Lock the rows of these names, in their order, and read them. The clock is read once they are locked. `brief`:
        it does not wait where another session has locked one."""
        del brief
        params: dict[str, Any] = {f"k{number}": name for number, name in enumerate(names)} | {"floor": FLOOR}
        found = await line.fetch(self._reading(len(names)), params)
        now, floor = found[0][0], found[0][1]
        return Read(float(now), int(floor or 0), {each[2]: Row(*each[2:]) for each in found if each[2] is not None})

    def _reading(self, number: int) -> str:
        wanted = ", ".join(f"(:k{each})" for each in range(number)) or "(NULL)"
        return (
            f"SELECT {self.now}, (SELECT fence FROM {self.table} WHERE resource_name = :floor), r.* "  # noqa: S608
            f"FROM (SELECT 1 AS one) AS o LEFT JOIN (SELECT t.* FROM (VALUES {wanted}) AS q(name) CROSS JOIN LATERAL "
            f"({latest(self.table, 'q.name', _COLUMNS)} FOR UPDATE) AS t) AS r ON true"
        )

    def _place(self, name: str) -> str:
        """Of a row that this transaction has locked."""
        place, part = (latest(self.table, f":{name}", column) for column in ("ctid", "tableoid"))
        return f"ctid = ({place}) AND tableoid = ({part})"

    async def insert(self, line: Line, row: Row, now: float, *, brief: bool = False) -> None:
        """Raises Conflict if there is such a row. `brief`: it does not wait where another session has locked the gap
        between two rows."""
        del brief
        if not await line.fetch(self._insert, {**row._asdict(), "now": now}):
            raise Conflict

    @cached_property
    def _insert(self) -> str:
        values = ", ".join(f":{field}" for field in Row._fields)
        inserting = f"INSERT INTO {self.table} ({_COLUMNS}, create_time, update_time) VALUES ({values}, :now, :now)"  # noqa: S608
        return f"{inserting} ON CONFLICT (resource_name) DO NOTHING RETURNING 1" if self.returns else inserting

    async def update(self, line: Line, row: Row, now: float) -> None:
        """Raises NotWritten."""
        if not await line.fetch(self._update, {**row._asdict(), "now": now}) and self.returns:
            raise NotWritten

    @cached_property
    def _update(self) -> str:
        updating = f"UPDATE {self.table} SET {assignments()} WHERE {self._place('resource_name')}"  # noqa: S608
        return f"{updating} RETURNING 1" if self.returns else updating

    async def delete(self, line: Line, name: str) -> None:
        await line.fetch(f"DELETE FROM {self.table} WHERE {self._place('name')}", {"name": name})  # noqa: S608

    async def page(self, line: Line, after: str, limit: int, where: str = "", **params: Any) -> Sequence[Row]:
        """The next rows after that name, in the order of the names."""
        found = await line.fetch(
            f"SELECT {_COLUMNS} FROM {self.table} WHERE resource_name > :after {where} "  # noqa: S608
            f"ORDER BY resource_name LIMIT {int(limit)}",
            {"after": after, **params},
        )
        return [Row(*each) for each in found]

    async def time(self, line: Line) -> float:
        return float((await line.fetch(f"SELECT {self.now}"))[0][0])

    async def charset(self, line: Line) -> Charset | None:
        """That of the text which this connection can write, if it is not all of Unicode."""
        (found,) = await line.fetch("SELECT current_setting('server_encoding'), current_setting('client_encoding')")
        return narrowest([str(each) for each in found])

    async def check(self, line: Line) -> None:
        """Whether what this transaction grants is where all others look. Raises FileReplaced."""

    async def commit(self, line: Line) -> None:
        """End a transaction. Raises Demoted, or Unconfirmed, where it is committed and must not count."""
        await line.run("COMMIT")

    async def check_primary(self, line: Line) -> None:
        """Whether what others have written here counts. Raises Demoted. A standby of PostgreSQL refuses writes itself,
        and its transactions cannot be committed after it was demoted, since it was restarted for that."""


WRITABLE = f"CAST({READ_ONLY} AS CHAR) IN ('0', 'OFF')"
"""False on a server that was demoted. A user with SUPER or READ ONLY ADMIN could still write there."""

_LONGEST_WAIT = 60.0
"""Seconds. A longer wait for a row is none: LIMIT ends the transaction before."""

_CLOCK_TRIES = 3

_AT_ONCE = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ "
"""Before a statement that is not to wait for a lock. Only MariaDB reads it: for MySQL it is a comment, and a statement
waits there for the time of the session, which has a second at least."""


class MySQL(Dialect):
    """MySQL and MariaDB. Their clock in UTC is that of the begin of the statement. SYSDATE is the time at which a row
    is returned, thus after the wait for its lock, but only in local time, which is ambiguous when summer time ends. So
    the time is that of the begin, in UTC, plus the time since then.

    Where the zone changes during a statement, that difference is off by an hour. Then the clock is read by another
    statement. With the option sysdate-is-now of the server it is 0. Then an op is decided at the
    begin of its statement, which is after it was sent, so no client counts on more time than the row has.

    A server that was demoted (read_only) lets privileged users write on. SET GLOBAL read_only waits for the statements
    that write now, and for the commits, but a transaction may write before and commit afterwards. So each transaction
    reads the variable twice: with its rows, and after its commit. What was committed before the variable was set is on
    the replicas that follow; what is committed later counts for nobody."""

    name = "mysql"
    mixes = False
    # Two columns, of which `_time_of` makes the time. SYSDATE has another value at each mention.
    now = (
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6, "
        "TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) / 1e6"
    )
    begin = begin_waiting = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION"
    returns = False

    async def read(self, line: Line, names: Sequence[str], *, brief: bool = False) -> Read:
        # A statement for each name: with several, the server might scan the table, and wait for the locks of others.
        rows, now, floor = dict[str, Row](), None, 0
        reading = f"{self._reading(1)} NOWAIT" if brief else self._reading(1)  # the limits of a session are in seconds
        for name in names:
            for found in await line.fetch(reading, {"k0": name}):
                now = _time_of(found)
                _check_writable(found[2])
                rows[name] = Row(*found[3:])
        if len(rows) < len(names) or not names or not all(row.fence for row in rows.values()):
            (found,) = await line.fetch(
                f"SELECT {self.now}, {READ_ONLY}, (SELECT fence FROM {self.table} WHERE resource_name = :floor)",  # noqa: S608
                {"floor": FLOOR},
            )
            _check_writable(found[2])
            now, floor = _time_of(found), found[3]
        return Read(await self.time(line) if now is None else now, int(floor or 0), rows)

    def _place(self, name: str) -> str:
        return f"resource_name = :{name}"

    async def time(self, line: Line) -> float:
        for _ in range(_CLOCK_TRIES):
            (found,) = await line.fetch(f"SELECT {self.now}")
            if (now := _time_of(found)) is not None:
                return now
        raise ConfigError(
            "the clock of the session stands still: take SET timestamp out of the engine, or of init_connect of the "
            "server"
        )

    def _reading(self, number: int) -> str:
        del number
        return f"SELECT {self.now}, {READ_ONLY}, {_COLUMNS} FROM {self.table} WHERE resource_name = :k0 FOR UPDATE"  # noqa: S608

    async def charset(self, line: Line) -> Charset | None:
        del line  # its session has utf8mb4
        return None

    async def insert(self, line: Line, row: Row, now: float, *, brief: bool = False) -> None:
        try:
            await line.fetch(f"{_AT_ONCE}{self._insert}" if brief else self._insert, {**row._asdict(), "now": now})
        except Exception as error:
            if is_duplicate(error):
                raise Conflict from error
            raise

    async def commit(self, line: Line) -> None:
        _check_writable((await committed(line, f"SELECT {READ_ONLY}", self._at_primary))[0][0])

    async def check_primary(self, line: Line) -> None:
        _check_writable((await line.fetch(self._at_primary))[0][0])

    @cached_property
    def _at_primary(self) -> str:
        """It locks nothing. A proxy that sends reads to the replicas sends this to the primary."""
        return f"SELECT {READ_ONLY}, count(*) FROM {self.table} WHERE resource_name = '' FOR UPDATE"  # noqa: S608


def _check_writable(found: Any) -> None:
    """Of READ_ONLY. Raises Demoted."""
    if is_read_only(found):
        raise Demoted


def _time_of(found: Sequence[Any]) -> float | None:
    """The time, of the columns of `MySQL.now` at the begin of a row; None: the zone changed meanwhile."""
    began, waited = float(found[0]), float(found[1])
    return began + waited if 0 <= waited <= _LONGEST_WAIT else None


class SQLite(Dialect):
    """One writer at a time has the whole file. The clock is that of the machine (`machine_clock.py`)."""

    name = "sqlite"
    mixes = False
    now = ":now"
    begin = begin_waiting = "BEGIN IMMEDIATE"

    async def charset(self, line: Line) -> Charset | None:
        del line
        return None

    def __init__(self, table: str) -> None:
        super().__init__(table)
        self.clock: Callable[[], float] | None = None  # set once the file is open
        self.offset = 0.0  # of that clock

    async def read(self, line: Line, names: Sequence[str], *, brief: bool = False) -> Read:
        del brief
        wanted = ", ".join(f":k{each}" for each in range(len(names)))
        params: dict[str, Any] = {f"k{number}": name for number, name in enumerate(names)} | {"floor": FLOOR}
        found = await line.fetch(
            f"SELECT {_COLUMNS} FROM {self.table} WHERE resource_name IN ({wanted}) OR resource_name = :floor",  # noqa: S608
            params,
        )
        rows = {each[0]: Row(*each) for each in found}
        floor = rows.get(FLOOR)
        return Read(await self.time(line), floor.fence if floor is not None else 0, rows)

    def _place(self, name: str) -> str:
        return f"resource_name = :{name}"

    async def time(self, line: Line) -> float:
        del line
        if self.clock is None:
            raise RuntimeError("the file is not open")
        return self.clock()

    async def check(self, line: Line) -> None:
        """The file is the one at its path; and, once for each connection, it has the clock that the client goes by. The
        inode of a deleted file may be that of a new one."""
        if (file := line.file) is None:
            return
        if file.clock != (self.table, self.offset):
            sql = f"SELECT expires_at FROM {self.table} WHERE resource_name = :name"  # noqa: S608
            try:
                found = await line.fetch(sql, {"name": CLOCK})
            except Exception as error:
                if meaning(error) is Meaning.ABSENT:
                    raise FileReplaced("the file was replaced by one without the table") from error
                raise
            if not found or found[0][0] != self.offset:
                raise FileReplaced("the file was replaced: its clock is another one")
            file.clock = self.table, self.offset
        file.check()


DIALECTS: dict[str, type[Dialect]] = {"postgresql": Dialect, "mysql": MySQL, "mariadb": MySQL, "sqlite": SQLite}
"""By SQLAlchemy's name."""
