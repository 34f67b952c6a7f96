"""The engine of a store: the user's, or one for each event loop, since an AsyncEngine belongs to one loop."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from asynclock._errors import ConfigError, brief
from asynclock.stores.forks import Origin
from asynclock.stores.lookups import lookup_under_way
from asynclock.stores.sql.dialects import DIALECTS
from asynclock.stores.sql.drivers import creator_of
from asynclock.stores.sql.errors import (
    Queued,
    UsedUp,
    all_said,
    is_of_certificates,
    is_of_files,
    is_of_options,
    is_unprepared,
)
from asynclock.stores.sql.files import OPENS_ALL, FileReplaced, OpenFile, inode_of
from asynclock.stores.sql.limits import CLOSING, cut, in_background, keep_socket, limited, rest, threads_ended
from asynclock.stores.sql.lines import (
    MYSQL_SETTINGS,
    SERVED,
    AsyncmyLine,
    AsyncpgLine,
    CoreLine,
    MySQLCoreLine,
    closed,
    mysql_settings,
)
from asynclock.stores.sql.set_up import CHARSET

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from sqlalchemy.ext.asyncio import AsyncConnection

    from asynclock.stores.forks import Kept
    from asynclock.stores.sql.lines import Line

_Result = TypeVar("_Result")

_LOGGER = "asynclock"
"""The end of the name of the logger of our pools. SQLAlchemy logs each connection whose close was interrupted, with a
traceback: the store itself interrupts those that a silent server would hold up."""

logging.getLogger(f"sqlalchemy.pool.impl.NullPool.{_LOGGER}").setLevel(logging.CRITICAL)

DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
    "sqlite": "sqlite+aiosqlite",
}
"""The driver of a url that names none."""

PACKAGES = {"psycopg": "psycopg[binary]"}
"""Of drivers that no extra brings, if the package has another name."""

EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}

TABLE_OPTION = "asynclock_table"
"""The option of a url that names the table."""

_OPTION = re.compile(r"(?:^|&)([^&=]+)")

_LOGIN = re.compile(r"[\w+]+://([^:/]*(?::[^@]*)?@)?")
"""The begin of a url, as SQLAlchemy reads it."""

CONNECTIONS = 4
"""For transactions, of one event loop."""


def url_of(text: str) -> URL:
    """A checked url. Raises ConfigError, without a part of the url: it may be one of the password."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # their messages may contain the password
        url = None
    # Not in the except block, so that their error is not the __context__ of this one.
    if url is None or (not url.drivername.startswith("sqlite") and _is_cut(text)):
        raise ConfigError(
            "this is not the url of a database: write it as postgresql://user:password@host:port/database (or mysql:, "
            "mariadb:, or sqlite:///path); user and password are percent-encoded (%40 for @)"
        )
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    backend = url.get_backend_name()
    if backend not in DIALECTS:
        raise ConfigError(f"no statements for {backend}: there are {', '.join(DIALECTS)}")
    if backend == "sqlite" and url.host:
        raise ConfigError(
            "a url of SQLite has three slashes before a relative path, and four before an absolute one: "
            "sqlite:////var/lib/app/locks.db"
        )
    _check_options(url, backend, text)
    _check_driver(url, backend)
    return url


def _check_options(url: URL, backend: str, text: str) -> None:
    """Raise ConfigError for an option that would be ignored: with another table there is no exclusion."""
    named = set(_OPTION.findall(text.partition("?")[2]))
    odd = url.query.keys() | named if backend == "sqlite" else {name for name in named if name.startswith("asynclock_")}
    if odd - {TABLE_OPTION} or (TABLE_OPTION in odd and not isinstance(url.query.get(TABLE_OPTION), str)):
        whose = "a url of SQLite" if backend == "sqlite" else "asynclock"
        wrong = _listed(odd - {TABLE_OPTION} or odd)
        raise ConfigError(
            f"the wrong option {wrong}: {whose} has one option, once and with a value, ?{TABLE_OPTION}=locks"
        )
    if backend in ("mysql", "mariadb"):
        _check_sessions(url)


def _check_sessions(url: URL) -> None:
    """Raise ConfigError for an option of MySQL or MariaDB that would change the sessions of the store."""
    for name, value in url.query.items():
        if name in _SESSION and value != _SESSION[name]:
            raise ConfigError(
                f"the option {name} of the url: leave it out, the store sets up its sessions itself (with {CHARSET})"
            )
        if url.get_driver_name() == "aiomysql" and name.startswith(_NOT_OF_AIOMYSQL):
            raise ConfigError(f"the option {name} of the url, with aiomysql: {HINTS['aiomysql']} (docs/stores/sql.md)")


_SESSION = {"charset": CHARSET, "use_unicode": "1", "init_command": None, "sql_mode": None}
"""Options that a url cannot have, but with the value that it has anyway."""

_NOT_OF_AIOMYSQL = ("ssl", "read_default_")
"""The begins of options that aiomysql takes in a dangerous way: it asks a server for TLS that has none, and goes on
without it; and a character set in that file replaces the one of the store."""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(brief, sorted(names)))


def _check_driver(url: URL, backend: str) -> None:
    """Raise ConfigError for a driver that is not asyncio's, or not installed."""
    try:
        plain = url.get_dialect()
        dialect = plain.get_async_dialect_cls(url)  # one scheme may have two: that of psycopg
    except NoSuchModuleError:
        dialect = None
    if dialect is None or not dialect.is_async:
        raise ConfigError(
            f"{url.drivername} is not an asyncio driver: use {backend}://, which means {DRIVERS[backend]}://"
        )
    try:
        dialect.import_dbapi()
    except ImportError as error:
        extra, name = f"asynclock[{EXTRAS[backend]}]", url.get_driver_name()
        need = extra if url.drivername == DRIVERS[backend] else PACKAGES.get(name, name)
        raise ConfigError(f"{url.drivername}:// needs a driver ({error}): pip install '{need}'") from None


def _is_cut(text: str) -> bool:
    """Whether an @ follows the login: it was meant as a part of the password. Without a login the options may have
    one."""
    found = _LOGIN.match(text)
    if found is None:
        return True
    rest = text[found.end() :]
    return "@" in (rest if found[1] else rest.partition("?")[0])


_PLACES = ("host", "hostaddr", "port", "unix_socket", "service", "dbname", "database", "db", "target_session_attrs")
"""Options of a url that say which server, or which database, is meant."""


def label_of(url: URL, table: str) -> str:
    """The name of the store in messages: no user, no password, no options but those that tell two servers apart."""
    where = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
    places = [f"{name}={value}" for name in _PLACES for value in url.normalized_query.get(name, ())]
    shown = where.render_as_string() + (f"?{'&'.join(places)}" if places else "")
    return shown if table == "asynclock" else f"{shown} (table {table})"


def engine_of(url: URL, connect_timeout: float, *, pooler: bool) -> AsyncEngine:
    """An engine of our own. `pooler`: no prepared statement may outlive its transaction, because the next transaction
    may run on another connection of the server."""
    backend, driver = url.get_backend_name(), url.get_driver_name()
    # No transaction is open when a connection comes back, so the pool sends no ROLLBACK.
    options: dict[str, Any] = {"pool_reset_on_return": None, "pool_logging_name": _LOGGER, "poolclass": NullPool}
    options |= {"isolation_level": "AUTOCOMMIT", "hide_parameters": True}  # they have ids of holders
    arguments: dict[str, Any] = {}
    if driver == "asyncpg":
        arguments = {"timeout": connect_timeout, "prepared_statement_cache_size": 0}
        arguments["prepared_statement_name_func"] = lambda: f"__asynclock_{uuid.uuid4()}__"
        if pooler:
            arguments["statement_cache_size"] = 0
    elif driver == "psycopg":
        arguments = {"prepare_threshold": None}  # whether there is a pooler is not found out for this driver
    elif driver in ("asyncmy", "aiomysql"):
        arguments = {"connect_timeout": connect_timeout, "init_command": mysql_settings(MYSQL_SETTINGS)}
    elif backend == "sqlite":
        arguments = {"timeout": 0.0}  # it would sleep up to 100 ms; the store asks again after a shorter pause
    if (creator := creator_of(driver, connect_timeout)) is not None:
        arguments["async_creator_fn"] = creator
    with _options_checked(url):
        return create_async_engine(url, connect_args=arguments, **options)


HINTS = {
    "asyncpg": "TLS is ?ssl=require, or ssl=verify-full with $PGSSLROOTCERT, not sslmode",
    "psycopg": "its options are those of libpq",
    "asyncmy": "TLS is ?ssl_ca=/path/ca.pem, not ssl",
    "aiomysql": "TLS, and a file of defaults, need an engine of your own, with connect_args={'ssl': context}",
}
"""About the options of a url, by driver."""


@contextmanager
def _options_checked(url: URL) -> Iterator[None]:
    """Raise ConfigError where a driver refuses an option. Its own message may show the value, which may be secret."""
    try:
        yield
    except Exception as error:
        if wrong := _wrong_files(url, error):
            raise ConfigError(f"{label_of(url, 'asynclock')}: {wrong}") from error
        if not is_of_options(error):
            raise
        which = refused_option(url, error)
    else:
        return
    label, driver = label_of(url, "asynclock"), url.get_driver_name()
    hint = HINTS.get(driver, "they are the arguments of its connect()")
    told = ConfigError(f"{label}: {driver} refuses {which}, or its value: {hint} (docs/stores/sql.md)")
    raise told from None  # a `with` statement has the other error still


_FILES = ("ssl_ca", "ssl_cert", "ssl_key", "sslrootcert", "sslcert", "sslkey")
"""Options of a url that name a file."""

_VARIABLES = ("PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY")
"""The same, for asyncpg, in the environment."""


def _wrong_files(url: URL, error: BaseException) -> str:
    """What to say if the files of options are the reason for an error; "" if they are not."""
    text, options = all_said(error), url.normalized_query
    named = [(f"the option {brief(name)}", path) for name in _FILES for path in options.get(name, ())]
    if "ssl" in options:
        named += [(f"${name}", os.environ[name]) for name in _VARIABLES if os.environ.get(name)]
    is_of_file = is_of_files(error)
    for name, path in named:
        if (is_of_file or path in text) and not os.access(path, os.R_OK):
            return f"the program cannot read the file of {name}"
    if named and is_of_certificates(error):
        return f"the file of {' or of '.join(name for name, _ in named)} has no certificate, or no key for it"
    return ""


def refused_option(url: URL, error: BaseException) -> str:
    """The option that a driver refuses, by what its error names: the option, or its value. Pure."""
    text, options = all_said(error), url.normalized_query
    named = [name for name in options if re.search(rf"(?<!\w){re.escape(name)}", text)]
    named = named or [name for name, values in options.items() if any(repr(each) in text for each in values)]
    if not (named := named or list(options)):
        return "an option of the engine"
    return f"the option {_listed(named)} of the url" if len(named) == 1 else f"one of the options {_listed(named)}"


_CONNECTS = 3
"""How often a connect is repeated. SQLAlchemy asks a new server for its version by a prepared statement, which fails
where a pooler carries it out in another session than that which has prepared it."""


async def connection_of(engine: AsyncEngine) -> AsyncConnection:
    """A connection of its pool. Raises ConfigError, or the error of the database."""
    with _options_checked(engine.url):
        for _ in range(_CONNECTS):
            try:
                return await engine.connect()
            except Exception as error:
                if not is_unprepared(error):
                    raise
        return await engine.connect()


_FILE = "asynclock_file"
"""In the `info` of a connection: its OpenFile, or the error with which SQLite did not open it."""

_WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()

_STALE = 100
"""Connections of a pool that may have another file open, at most."""


def _watch(engine: AsyncEngine, path: str) -> None:
    """From now on each new connection opens its files at once, before the program uses it, and notes which they are."""

    def opened(connection: Any, record: Any) -> None:
        try:
            cursor = connection.cursor()
            cursor.execute(OPENS_ALL)
            cursor.close()
            connection.rollback()  # a driver may begin a transaction for any statement
        except Exception as error:  # the file may be locked; the program may use the connection nevertheless
            record.info[_FILE] = error
        else:
            record.info[_FILE] = OpenFile(path)

    if engine.sync_engine not in _WATCHED:
        _WATCHED.add(engine.sync_engine)
        event.listen(engine.sync_engine, "connect", opened)


def used_up(engine: AsyncEngine) -> str:
    """What to say if all connections of its pool are in use; "" if they are not."""
    pool: Any = engine.pool
    try:
        most = pool.size() + max(pool._max_overflow, 0)  # noqa: SLF001 - SQLAlchemy has no other name for it
        full = pool._max_overflow >= 0 and pool.checkedout() >= most  # noqa: SLF001 - the same
    except AttributeError:  # a pool without a limit
        return ""
    return _USED_UP.replace("all", f"all {most}") if full else ""


_USED_UP = "all connections of the engine are in use, mostly by the program"


_LOGGED_IN: ContextVar[list[Any]] = ContextVar("asynclock_logged_in")
"""Of a connect that is under way: the connection of the driver, once the server has accepted the login."""


class EngineSource:
    """Connections of an engine. `own`: it is ours, and disposed of at the end. `path`: of a SQLite file. `settings`: no
    pooler shares the sessions of asyncpg, so they may have settings."""

    def __init__(
        self,
        engine: AsyncEngine,
        connect_timeout: float,
        *,
        own: bool,
        path: str | None = None,
        settings: bool = False,
    ) -> None:
        self.engine = engine
        self._timeout = connect_timeout
        self.own = own
        self._path = path
        self.settings = settings  # of connections that are taken from now on
        self.shortage: UsedUp | None = None  # of an engine of the user: it was used up as the last connect began
        if path is not None:
            _watch(engine, path)
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # the connections of the driver
        self._sockets: set[Kept] = set()  # of these connections
        self._origin = Origin()
        if own:
            event.listen(engine.sync_engine, "connect", self._note, insert=True)  # before the first statement

    def _note(self, connection: Any, record: object) -> None:
        del record
        _LOGGED_IN.get([]).append(connection.driver_connection)
        with contextlib.suppress(AttributeError, TypeError):  # a driver without weak references
            self._made.add(connection.driver_connection)
        if (kept := keep_socket(connection.driver_connection)) is not None:
            self._sockets = {each for each in self._sockets if each.is_open} | {kept}

    async def connect(self, *, further: bool = False) -> Line:
        """A connection of its pool. Raises its error, UsedUp, Queued or TimeoutError."""
        return await self.limited(self._connect(), lambda line: line.abandon(), further=further)

    async def limited(
        self, connecting: Coroutine[Any, Any, _Result], late: Callable[[_Result], object], *, further: bool = False
    ) -> _Result:
        """Await a connect; see `limits.limited`. `further`: others are open, so it has half of the time. Raises UsedUp,
        Queued, TimeoutError, or the error of the connect; ConnectionError in a forked child."""
        try:
            self._origin.check()
        except ConnectionError:
            connecting.close()
            raise
        seconds, logged_in = self._timeout / 2 if further else self._timeout, list[Any]()
        used = "" if self.own else used_up(self.engine)  # before this one counts
        shortage = self.shortage = UsedUp(used) if used else None

        async def noted() -> _Result:
            _LOGGED_IN.set(logged_in)
            connected = await connecting
            if not self._origin.is_here:
                late(connected)
                self._origin.check()
            return connected

        def give_up() -> None:
            for each in logged_in:  # else it would keep its place in the queue of a pooler
                cut(each)

        try:
            connected = await limited(noted(), seconds, cut=give_up, late=late)
        except PoolTimeout as error:
            raise (shortage or UsedUp(_USED_UP)) from error
        except TimeoutError as error:
            label, lookup = label_of(self.engine.url, "asynclock"), lookup_under_way(self.engine.url.host)
            if shortage is not None:
                raise shortage from error
            if logged_in:
                raise Queued(seconds) from error
            raise TimeoutError(f"{label} did not answer a connect within {seconds:g} s{lookup}") from error
        self.shortage = None
        return connected

    async def _connect(self) -> Line:
        if self._path is None:
            return await self._prepared(await connection_of(self.engine))
        for _ in range(_STALE):
            before = inode_of(self._path)
            connection = await connection_of(self.engine)
            file = (await connection.get_raw_connection()).info.get(_FILE)
            if isinstance(file, OpenFile) and file.inode == before and file.is_current:
                return await self._prepared(connection, file)
            # It has another file open, or has just made the file, or is older than the listener of `_watch`.
            await closed(connection)
            if isinstance(file, Exception):
                raise file
        raise FileReplaced("the file is replaced again and again")

    async def _prepared(self, connection: AsyncConnection, file: OpenFile | None = None) -> Line:
        line = await self._line(connection, file)
        line.own = self.own
        return line

    async def _line(self, connection: AsyncConnection, file: OpenFile | None) -> CoreLine | AsyncpgLine | AsyncmyLine:
        try:
            if not self.own:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
            driver = (await connection.get_raw_connection()).driver_connection
            if self.engine.dialect.driver == "asyncpg":
                lent = AsyncpgLine(connection, driver)
                lent.own = self.own
                await (lent.set_up() if self.settings else lent.run(SERVED))
                return lent
            if self.engine.dialect.driver == "asyncmy":
                line = AsyncmyLine(connection, driver)
                line.own = self.own
                await line.set_up()
                return line
            if self.engine.dialect.name in ("mysql", "mariadb") and not self.own:
                session = MySQLCoreLine(connection, driver)
                await session.set_up()
                return session
            core = CoreLine(connection, driver, file)
            if self.engine.dialect.name == "postgresql":
                await core.run(SERVED)
        except BaseException:  # it may be in the middle of a statement, so it does not go back to its pool
            in_background(closed(connection))
            raise
        return core

    async def answers(self, line: Line) -> bool:
        try:
            await limited(line.run(SERVED), self._timeout / 2, cut=line.abandon)
        except Exception:
            return False
        return True

    async def aclose(self) -> None:
        if self.own:
            with contextlib.suppress(Exception):  # of connections that are broken
                await limited(self.engine.dispose(), CLOSING)
            self._cut()
            await rest(CLOSING)
        await threads_ended()

    def desert(self) -> None:
        for each in self._sockets:
            each.end()

    def _cut(self) -> None:
        for driver in list(self._made):
            cut(driver)


def is_of_mariadb(source: object) -> bool:
    """Whether the server is a MariaDB. Known once there was a connection."""
    return isinstance(source, EngineSource) and bool(getattr(source.engine.dialect, "is_mariadb", False))
