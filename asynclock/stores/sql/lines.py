"""Connections to the database, as the store uses them: statements with named parameters, and short transactions.

    CoreLine       any driver, through SQLAlchemy
    MySQLCoreLine  the same, over a session of MySQL or MariaDB of the user, which it sets up
    AsyncpgLine    asyncpg itself, below SQLAlchemy: a statement costs the client a third
    AsyncmyLine    asyncmy itself, which can send several statements in one packet

A line is in autocommit mode: transactions begin and end by statements.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sqlalchemy import text
from sqlalchemy.exc import StatementError

from asynclock.stores.sql.errors import Demoted, Unconfirmed, ends_connection, is_answer, is_unprepared
from asynclock.stores.sql.limits import CLOSING, LIMIT, STOPPING, WAITING, cut, in_background, is_cut, limited

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.ext.asyncio import AsyncConnection

    from asynclock.stores.sql.files import OpenFile

_WAYS = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "enable_material", "jit")
"""Each statement looks up a few rows by the index. A server that plans it while the table is small would read all of
the table, and go on with that while the table grows. A bitmap reads all versions of a row (see `latest` in
`dialects.py`). To compile a statement would take longer than to run it."""

_STATEMENT = LIMIT + 1
"""Seconds for which a statement runs on whose client cannot tell the server that it is overdue."""

SET_UP = dict.fromkeys(_WAYS, "off") | {
    "default_transaction_isolation": "read committed",
    "lock_timeout": f"{int(WAITING * 1000)}ms",  # of the whole table: these statements wait for no row of it
    "statement_timeout": f"{_STATEMENT:g}s",
}
"""For a session of PostgreSQL, which hold for a statement that is a transaction of its own. Other transactions say so
themselves."""

_SET_UP_NOW = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SET_UP)

_STATEMENTS = 100
"""Prepared statements of a session, at most."""

_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")
_NOTHING: dict[str, Any] = {}

SERVED = "SELECT 1"
"""A pooler accepts a login before it has a connection of the server for it: then only a statement shows that it has."""

IDLE = 3.0
"""Seconds after which a server ends the transaction of a client that stands still: its row locks stop all others."""

SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
"""Of our sessions on MySQL and MariaDB: a value that does not fit is an error."""

MYSQL_SETTINGS = {
    "innodb_lock_wait_timeout": "1",  # seconds, for rows: the least that MySQL knows, so that others get their turn
    "lock_wait_timeout": f"{IDLE:.0f}",  # for the table: as a dump locks it
    "completion_type": "0",  # else each COMMIT might begin a transaction, in which a single statement would be lost
    "sql_mode": SQL_MODE,  # else '' might be NULL
}
"""For a session of MySQL or MariaDB."""

_ISOLATION = ("tx_isolation", "transaction_isolation")
"""A server has one of these variables, or both."""

READ_ONLY = "@@global.read_only"
"""Of MariaDB and MySQL; also set where super_read_only is. Its values are 0 and 1; of a newer MariaDB OFF, ON and
others."""

_CONFIRMING = -1
"""In place of the index of a change: the statement behind the COMMIT."""

HIDDEN = -1
"""In place of what LAST_INSERT_ID(value) has left: rows were found, and a trigger of the table has hidden the value."""


Change: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""A statement, and its parameters."""


class Stopped(Exception):
    """The server has answered one of several statements by an error. `at`: the index of the change; None: it was the
    COMMIT, or `begun` is False. `begun`: False if no statement was carried out: the driver could not send them, or the
    server refused all of them."""

    def __init__(self, error: Exception, at: int | None, *, begun: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.at = at
        self.begun = begun


class Line(Protocol):
    """One connection. A statement is text with parameters such as :name."""

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        """The rows of a statement; () if it has none."""

    async def run(self, sql: str) -> None:
        """One or several statements without parameters, separated by semicolons."""

    @property
    def file(self) -> OpenFile | None:
        """Of SQLite."""

    @property
    def needs_no_task(self) -> bool:
        """Whether its coroutines await plain futures only (`driven.py`)."""

    @property
    def is_set_up(self) -> bool:
        """False: its session is to be set up once it is known that no pooler shares it."""

    @property
    def is_closed(self) -> bool:
        """Whether it is known to be closed."""

    async def stopped(self) -> bool | None:
        """Tell the server to end the statement under way, and to roll back. Whether it has confirmed the end; None:
        this driver cannot ask. Ends within STOPPING, and never raises. The line is as good as new if that is confirmed
        and it is not closed; else it is to be abandoned."""

    async def give_back(self) -> None:
        """To the pool of its engine; our own engines have none, so it is closed. No transaction is open. Raises the
        error of a connection that is broken."""

    def abandon(self) -> None:
        """Close it at once: its state is unknown. Waits for nothing, and never raises."""

    def desert(self) -> None:
        """Its event loop is closed: forget it, and wait for nothing. Its source ends the connection. Never raises."""


class _EngineLine:
    """A connection of SQLAlchemy, and the connection of the driver in it."""

    is_closed = False  # not known
    is_set_up = True
    needs_no_task = False
    own = False  # of an engine of our own

    def __init__(self, connection: AsyncConnection, driver: Any, file: OpenFile | None = None) -> None:
        self._connection = connection
        self.driver = driver
        self.file = file

    async def run(self, sql: str) -> None:
        raise NotImplementedError

    async def stopped(self) -> bool | None:
        return None

    async def give_back(self) -> None:
        if self.own:
            await closed(self._connection)
            self._cut()  # aiomysql leaves one open that the server has closed
        else:
            # The engine would never get the place of a connection back that was cut while it returned.
            await limited(self._give_back(), LIMIT, cut=self._cut)

    async def _give_back(self) -> None:
        await self.run(self._restoring())
        await self._connection.close()

    def _restoring(self) -> str:
        """The statements that give the session its settings back; "SELECT 1" if it has them. SQLAlchemy logs an error
        for each broken connection that it gets back: this finds it before."""
        return SERVED

    def abandon(self) -> None:
        self._cut()
        in_background(closed(self._connection))

    def desert(self) -> None:
        with contextlib.suppress(Exception):  # else SQLAlchemy warns when it is collected
            self._connection.sync_connection.detach()  # type: ignore[union-attr]

    def _cut(self) -> None:
        cut(self.driver)


class CoreLine(_EngineLine):
    """See the module. A driver may wait for the server although it was cancelled, so each statement has a task."""

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        try:
            result = await limited(self._connection.execute(_clause(sql), dict(params)), None, cut=self._cut)
        except StatementError as error:
            error.hide_parameters = True  # they have ids of holders, which are secret
            raise
        return result.all() if result.returns_rows else ()

    async def run(self, sql: str) -> None:
        for each in sql.split(";"):
            await limited(self._connection.exec_driver_sql(each), None, cut=self._cut)


class MySQLCoreLine(CoreLine):
    """The same over a session of MySQL or MariaDB that belongs to an engine of the user."""

    _settings: Mapping[str, str] = {}

    async def set_up(self) -> None:
        """Set up the session, which has its own settings again when it goes back."""
        self._settings = await _lent(self)

    def _restoring(self) -> str:
        return mysql_settings(self._settings) if self._settings else SERVED


class AsyncmyLine(_EngineLine):
    """See the module. `driver` is the connection of asyncmy in `connection`. The session is set up once, so that a
    transaction begins with one statement."""

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        super().__init__(connection, driver)
        self._settings: Mapping[str, str] = {}  # of a user's session, to send when it goes back
        self._prepared: dict[str, str] = {}  # the names of the statements that the server has prepared, by their text
        self._prepares = True
        self._most = 0  # see `_longest`; 0: not known yet

    async def set_up(self) -> None:
        """Set up the session. That of a user's engine has its own settings again when it goes back."""
        if self.own:
            await self.fetch("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            return
        self._settings = await _lent(self)

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        return is_cut(self.driver)

    @property
    def needs_no_task(self) -> bool:  # type: ignore[override]
        return not getattr(self.driver, "_read_timeout", None)  # else it waits as a task does

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        compiled, names = _formatted(sql)
        async with self.driver.cursor() as cursor:
            await cursor.execute(compiled, [params[name] for name in names])
            return [] if cursor.description is None else await cursor.fetchall()

    async def change(self, sql: str, params: Mapping[str, Any]) -> int:
        """What LAST_INSERT_ID(value) has left in the answer to a statement; 0: nothing; or HIDDEN. The server keeps the
        statement for the next time."""
        if self._prepares and (name := self._prepared.get(sql)) is not None:
            try:
                await self.driver.query(self._execute(name, _formatted(sql)[1], params))
                return self._left()
            except Exception as error:
                if not is_unprepared(error):
                    raise
                self._prepares = False
        try:
            (found,) = await self._changed([(sql, params)])
        except Stopped as stopped:
            raise stopped.error from None
        return found

    async def change_all(self, changes: Sequence[Change]) -> list[int]:
        """The same for the first of several, as many as the server takes in one packet, as one transaction in one round
        trip. Raises Stopped, if nothing was done. Raises Demoted, or Unconfirmed, if it is committed and must not
        count."""
        try:
            return await self._changed(changes)
        except Stopped as stopped:
            if stopped.begun:
                await self.run("ROLLBACK")
            raise

    async def _changed(self, changes: Sequence[Change]) -> list[int]:
        packet = self._packet(changes)
        query = ";".join([sql for sql, _ in packet])
        while len(changes) > 1 and len(query.encode(errors="replace")) >= await self._longest():
            changes = changes[: len(changes) // 2]
            packet = self._packet(changes)
            query = ";".join([sql for sql, _ in packet])
        found, index = [0] * len(changes), 0
        try:
            for index, (_, place) in enumerate(packet):
                await (self.driver.next_result() if index else self.driver.query(query))
                if isinstance(place, str):
                    self._prepared[place] = _name(len(self._prepared))
                elif place is not None and place != _CONFIRMING:
                    found[place] = self._left()
        except Exception as error:
            place = packet[index][1]
            if place == _CONFIRMING:
                raise Unconfirmed from error
            if ends_connection(error):
                raise
            if not self._prepares or not (isinstance(place, str) or is_unprepared(error)):
                raise Stopped(error, place if isinstance(place, int) else None, begun=index > 0) from error
        else:
            if len(changes) > 1 and is_read_only(self.driver._result.rows[0][0]):  # noqa: SLF001 - as its cursors do
                raise Demoted
            return found
        self._prepares = False  # the server has no room for more, or a proxy between has another session now
        await self.driver.query("ROLLBACK")
        return await self._changed(changes)

    async def _longest(self) -> int:
        """Bytes that the server takes in one packet, for as long as the session lasts."""
        if not self._most:
            ((most,),) = await self.fetch("SELECT @@max_allowed_packet")
            self._most = int(most)
        return self._most

    def _left(self) -> int:
        return int(self.driver.insert_id() or 0) or (HIDDEN if self.driver.affected_rows() else 0)

    def _packet(self, changes: Sequence[Change]) -> list[tuple[str, int | str | None]]:
        """The statements for these. Each with the index of its change, or with the text that it prepares. After a
        commit, which may come after the server was demoted, it says whether it was; one statement alone commits itself,
        before a SET GLOBAL read_only that comes meanwhile."""
        # Not BEGIN: with sql_mode = ORACLE that is the begin of a block.
        packet: list[tuple[str, int | str | None]] = [] if len(changes) == 1 else [("START TRANSACTION", None)]
        literal, new = self.driver.literal, dict[str, str]()
        for index, (sql, params) in enumerate(changes):
            compiled, names = _formatted(sql)
            if not self._prepares:
                packet.append((compiled % tuple([literal(params[each]) for each in names]), index))
                continue
            name = self._prepared.get(sql) or new.get(sql)
            if name is None:
                name = new[sql] = _name(len(self._prepared) + len(new))
                packet.append((f"PREPARE {name} FROM {literal(compiled % (('?',) * len(names)))}", sql))
            packet.append((self._execute(name, names, params), index))
        if len(changes) > 1:
            packet += [("COMMIT", None), (f"SELECT {READ_ONLY}", _CONFIRMING)]
        return packet

    async def committed(self, then: str) -> Sequence[Any]:
        """COMMIT, and the rows of a statement behind it in the same packet; see `committed`."""
        await self.driver.query(f"COMMIT;{then}")
        with _unconfirmed():
            await self.driver.next_result()
        rows: Sequence[Any] = self.driver._result.rows  # noqa: SLF001 - as its cursors do
        return rows

    def _execute(self, name: str, names: Sequence[str], params: Mapping[str, Any]) -> str:
        literal = self.driver.literal
        return f"EXECUTE {name} USING {','.join([literal(params[each]) for each in names])}"

    async def run(self, sql: str) -> None:
        for each in sql.split(";"):
            if "ISOLATION" not in each:  # the session has it
                await self.driver.query(each)

    def _restoring(self) -> str:
        return mysql_settings(self._settings) if self._settings else SERVED


class AsyncpgLine(_EngineLine):
    """See the module. `driver` is the connection of asyncpg in `connection`."""

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        super().__init__(connection, driver)
        self.is_set_up = False
        self._settings = ""  # to send when it goes back

    async def set_up(self) -> None:
        """Set up the session, which no pooler shares. That of a user's engine has its own settings again when it goes
        back."""
        if self.own:
            self._keep_statements()
        else:
            (found,) = await self.fetch(_SET_UP_NOW)
            self._settings = _set(dict(zip(SET_UP, found, strict=True)))
        await self.run(_set(SET_UP))
        self.is_set_up = True

    def _keep_statements(self) -> None:
        """The driver connected without a cache for prepared statements, for there might have been a pooler."""
        with contextlib.suppress(AttributeError):  # else statements take longer
            self.driver._stmt_cache.set_max_size(_STATEMENTS)  # noqa: SLF001 - asyncpg has no other name for it
            self.driver._stmt_cache_enabled = True  # noqa: SLF001 - the same

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        return bool(self.driver.is_closed())

    needs_no_task = True

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        compiled, names = _numbered(sql)
        rows: Sequence[Any] = await self.driver.fetch(compiled, *[params[name] for name in names])
        return rows

    async def run(self, sql: str) -> None:
        await self.driver.execute(sql)

    def _restoring(self) -> str:
        return self._settings or SERVED

    async def stopped(self) -> bool | None:
        # Once a statement is cancelled here, asyncpg tells the server so, over a connection of its own, and sends
        # nothing more until the server has answered the statement. To close the connection would end that.
        try:
            await limited(self.run("ROLLBACK"), STOPPING)
        except Exception as error:
            if ended := is_answer(error):
                self._cut()  # the transaction may be open still
            return ended
        return True


def _set(settings: Mapping[str, str]) -> str:
    return "; ".join(f"SET {name} = '{value}'" for name, value in settings.items())


async def _lent(line: Line) -> Mapping[str, str]:
    """Set up a session of MySQL or MariaDB that belongs to an engine of the user; its settings before."""
    ours = {**MYSQL_SETTINGS, **dict.fromkeys(_ISOLATION, "READ-COMMITTED")}
    names = ", ".join(map(repr, ours))
    before = dict(await line.fetch(f"SHOW SESSION VARIABLES WHERE Variable_name IN ({names})"))
    await line.run(mysql_settings({name: ours[name] for name in before}))
    await line.run("ROLLBACK")  # where each transaction begins the next one, one is open
    return before


def mysql_settings(settings: Mapping[str, str]) -> str:
    """The statement that sets them."""
    pairs = [f"{name} = {each}" if each.isdigit() else f"{name} = '{each}'" for name, each in settings.items()]
    return f"SET SESSION {', '.join(pairs)}"


@contextmanager
def _unconfirmed() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Unconfirmed from error


async def committed(line: Line, then: str, alone: str) -> Sequence[Any]:
    """COMMIT, and the rows of `then` right behind it; of `alone` in its place where it is sent by itself. Raises
    Unconfirmed if only that has failed."""
    if isinstance(line, AsyncmyLine):
        return await line.committed(then)
    await line.run("COMMIT")
    with _unconfirmed():
        return await line.fetch(alone)


async def closed(connection: AsyncConnection) -> None:
    """Close a connection that nothing uses any more; it does not go back to its pool. Ends within two of CLOSING, and
    never raises."""
    with contextlib.suppress(Exception):  # it is closed already, or half open
        await limited(connection.invalidate(), CLOSING)
    with contextlib.suppress(Exception):
        await limited(connection.close(), CLOSING)


@lru_cache(maxsize=256)
def _clause(sql: str) -> TextClause:
    return text(sql)


def is_read_only(found: Any) -> bool:
    """Of READ_ONLY."""
    return str(found) not in ("0", "OFF")


def _name(number: int) -> str:
    """Of a statement that a session of MariaDB has prepared."""
    return f"asynclock_{number}"


@lru_cache(maxsize=256)
def _formatted(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with %s, and the names of these parameters in their order."""
    return _PARAMETER.sub("%s", sql.replace("%", "%%")), tuple(_PARAMETER.findall(sql))


@lru_cache(maxsize=256)
def _numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with $1, $2, ..., and the names of these parameters."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return _PARAMETER.sub(number, sql), tuple(names)
