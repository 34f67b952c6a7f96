"""What `asynclock doctor` asks a SQL database, on a connection of its own with the settings of the url.

It makes no table and no file, and the statements that could change rows are sent in a form that changes none. An answer
that the database refuses leaves its fact unknown.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import ConfigError
from asynclock.cli.doctor.severity import CONNECT
from asynclock.cli.doctor.standalone import StoreFacts
from asynclock.stores.lookups import lookup_under_way
from asynclock.stores.sql.engines import CONNECTIONS, EngineSource
from asynclock.stores.sql.errors import Meaning, Queued, is_of_options, meaning, reason
from asynclock.stores.sql.limits import in_background
from asynclock.stores.sql.listening import Listening
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.remedies import remedy
from asynclock.stores.sql.settings import Settings
from asynclock.stores.sql.table_check import explain, faults
from asynclock.stores.sql.table_facts import table_facts, table_triggers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.stores.sql.lines import Line

_ANSWER = 2.0  # seconds for one answer; less than a use of a connection may take
_PUSH = 0.5  # seconds within which a push message must arrive
_CLOCK_SAMPLES = 5

_POSTGRESQL = ("fsync", "synchronous_commit", "full_page_writes", "synchronous_standby_names")
_MYSQL = (
    *("version", "innodb_flush_log_at_trx_commit", "read_only", "super_read_only", "innodb_read_only", "log_bin"),
    "binlog_format",
    *("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled", "idle_transaction_timeout"),
)
OLD = 60.0
"""Seconds for which a transaction may be open before it is reported."""

_BEHIND = 100_000
"""Transactions by which a replication slot may be behind before it is reported."""

_STANDBYS = (
    "SELECT count(*) FROM pg_stat_replication r WHERE r.state IS DISTINCT FROM 'backup' AND NOT EXISTS "
    "(SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')"
)
"""The number of standbys. No failover promotes a subscriber of logical replication. A user without rights sees that
there is a replica, and not its state."""

_KEEPERS = {
    "open transactions": (
        "SELECT 'session', CAST(pid AS text), concat_ws(', ', usename, state), "
        "extract(epoch FROM clock_timestamp() - xact_start) FROM pg_stat_activity "
        "WHERE coalesce(backend_xmin, backend_xid) IS NOT NULL AND datname = current_database() "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend' "
        "AND clock_timestamp() - xact_start > make_interval(secs => {old}) "
        "ORDER BY xact_start LIMIT 1"
    ),
    "prepared transactions": (
        "SELECT 'prepared', gid, owner, extract(epoch FROM clock_timestamp() - prepared) FROM pg_prepared_xacts "
        "WHERE database = current_database() AND clock_timestamp() - prepared > make_interval(secs => {old}) "
        "ORDER BY prepared LIMIT 1"
    ),
    "replication slots": (
        "SELECT 'slot', slot_name, CASE WHEN active THEN 'in use' ELSE 'not in use' END, age(xmin) "
        "FROM pg_replication_slots WHERE age(xmin) > {behind} ORDER BY age(xmin) DESC LIMIT 1"
    ),
}
"""By question: what keeps the old versions of rows on PostgreSQL, the worst of each. A user without pg_read_all_stats
sees the sessions of its own role only."""

_REPLICAS = ("SHOW REPLICAS", "SHOW REPLICA HOSTS", "SHOW SLAVE HOSTS")  # MySQL 8.0.22, MariaDB 10.5, older ones
_SYNTAX = 1064

OFF = ("", "OFF", "0", "NO")
"""The values of a setting of MySQL and MariaDB that is off, or that there is not."""


class Keeper(NamedTuple):
    """What keeps the old versions of rows on PostgreSQL."""

    kind: str  # session, prepared, or slot
    name: str
    detail: str
    age: float  # seconds; of a slot: transactions


@dataclass(slots=True)
class DatabaseFacts(StoreFacts):
    """One database. Empty or None: unknown."""

    backend: str = ""
    table: str = ""
    user: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    """Those settings of the server, or of the file, that matter to locks."""
    has_table: bool | None = None
    may_create: bool | None = None
    """Whether the user may make the table; known of PostgreSQL only."""
    missing: tuple[str, ...] = ()
    """The rights on the table that the user does not have."""
    refuses_writes: bool = False
    """It is read-only for this user. A MariaDB or MySQL with `read_only` lets some users write."""
    kept: str = ""
    """How the table is kept: of PostgreSQL its persistence (p, u or t), of MySQL and MariaDB its engine."""
    fault: str = ""
    """Why the table cannot keep locks; "" if it can."""
    mend: str = ""
    """What to do about that."""
    is_ordered: bool | None = None
    """The names in the table are in the order of their bytes."""
    triggers: tuple[str, ...] = ()
    """Of the table, with the rules of PostgreSQL."""
    standby: bool | None = None
    """It is a PostgreSQL in recovery: a replica."""
    replicas: int | None = None
    pushes: bool | None = None
    """Whether waiters get push messages; None: the database or its driver has none."""
    connections: int | None = None
    """How many it gives at the same time, up to as many as a client takes; None: of a file."""
    keepers: tuple[Keeper, ...] = ()
    file: str = ""
    """The path of a SQLite file."""
    has_folder: bool = True
    exists: bool = True
    writable: bool = True
    """The user may write the file and its folder."""
    free: int | None = None
    """Bytes that are free on its disk."""


async def database_facts(url: str, *, connect: float = CONNECT) -> DatabaseFacts:
    """Ask it. `connect`: the connect_timeout of the clients. Raises ConfigError for the url, and nothing for what the
    database says or does."""
    settings = Settings(url, "asynclock")
    facts = DatabaseFacts(settings.label, f"table {settings.table}", backend=settings.backend, table=settings.table)
    if settings.backend == "sqlite":
        _look_at_file(facts, Path(str(settings.url.database)))
        if not facts.exists:
            facts.has_table = False
            return facts
    source = settings.new_source(connect, pooler=True)
    pool = Pool(source, size=1, pooler=True)
    try:
        async with pool.line() as line:
            await _Questions(line, settings, facts).ask_all()
            await _try_transaction(line, settings, facts)
            if isinstance(source, EngineSource) and settings.backend != "sqlite":
                facts.connections = 1 + await _further(source)
                # A standby sends no messages, and accepts no LISTEN.
                if settings.driver == "asyncpg" and not facts.standby:
                    facts.pushes = facts.connections > 1 and await _pushes(source, line)
    except Exception as error:
        facts.error = str(error) if isinstance(error, ConfigError) else _error(settings, error, connect)
        facts.misconfigured = (
            isinstance(error, ConfigError) or meaning(error) is Meaning.REFUSED or is_of_options(error)
        )
        facts.remedy = remedy(facts.error)
    finally:
        await pool.aclose()
    return facts


async def _try_transaction(line: Line, settings: Settings, facts: DatabaseFacts) -> None:
    """Raises the error that each client would get: of a pooler that takes no transactions, or for a table whose name is
    a reserved word."""
    if settings.backend != "sqlite":
        for each in (settings.dialect().begin, "ROLLBACK"):
            await line.run(each)
    if facts.has_table is None and not facts.missing:
        await settings.exists(line)


def _error(settings: Settings, error: Exception, connect: float) -> str:
    label = settings.label
    if isinstance(error, TimeoutError) and not isinstance(error, Queued):
        return f"{label} did not answer within {connect:g} s{lookup_under_way(settings.url.host)}"
    return f"{label}{' refuses' if meaning(error) is Meaning.REFUSED else ''}: {reason(error)}"


def _look_at_file(facts: DatabaseFacts, path: Path) -> None:
    facts.file, facts.product, facts.exists = str(path), "sqlite", os.path.exists(path)  # False, too: out of reach
    folder = path.resolve().parent
    facts.has_folder = _is_folder(folder)
    facts.writable = os.access(folder, os.W_OK | os.X_OK) and (not facts.exists or os.access(path, os.W_OK))
    try:
        facts.free = shutil.disk_usage(folder).free
    except OSError:  # there is no such folder
        facts.free = None


def _is_folder(path: Path) -> bool:
    """Also where the user may not enter a folder above it: then it may be there, and nothing in it can be written."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, PermissionError)


async def _pushes(source: EngineSource, line: Line) -> bool:
    """Whether a message arrives that another connection sends."""
    connecting = Listening.connect(source.engine, lambda notice: None, lambda: None)
    listening = await source.limited(connecting, lambda late: in_background(late.aclose()))
    try:
        return await listening.works(line, _PUSH)
    finally:
        await listening.aclose()


async def _further(source: EngineSource) -> int:
    """How many further connections come, of those that a client takes at most."""
    lines: list[Line] = []
    try:
        while len(lines) < CONNECTIONS:
            lines.append(await source.connect(further=True))
    except Exception:
        return len(lines)
    finally:
        await asyncio.gather(*(each.give_back() for each in lines), return_exceptions=True)
    return len(lines)


def read_only(settings: Mapping[str, str]) -> list[str]:
    """The settings by which a MySQL or MariaDB is read-only. Pure."""
    names = ("read_only", "super_read_only", "innodb_read_only")
    return [each for each in names if settings.get(each, "") not in OFF]


class _Questions:
    """The questions over one connection."""

    def __init__(self, line: Line, settings: Settings, facts: DatabaseFacts) -> None:
        self._line = line
        self._settings = settings
        self._facts = facts

    async def ask_all(self) -> None:
        """The measurement of the clock comes first, so that nothing disturbs it."""
        if self._facts.backend == "sqlite":
            await self._sqlite()
        else:
            await self._clock()
            await (self._postgresql() if self._facts.backend == "postgresql" else self._mysql())
            await self._rights()

    async def _fetch(self, sql: str, **params: Any) -> Sequence[Any]:
        """Raises OSError, which ends the questions, where the database answered before, and does not answer this."""
        try:
            async with asyncio.timeout(_ANSWER):
                return await self._line.fetch(sql, params)
        except TimeoutError as error:
            raise OSError(f"it answers, but this has no answer within {_ANSWER:g} s: {sql[:100]}") from error

    async def _ask(self, question: str, sql: str, **params: Any) -> Sequence[Any]:
        """The rows; none if the database refuses, which is remembered. Raises the error of a lost connection."""
        try:
            return await self._fetch(sql, **params)
        except Exception as error:
            if meaning(error) is Meaning.LOST:
                raise
            self._hide(question)
            return ()

    def _hide(self, question: str) -> None:
        self._facts.hidden += (question,)

    async def _clock(self) -> None:
        """The server read its clock between the question and the answer: the shortest round trip says most."""
        dialect, facts = self._settings.dialect(), self._facts
        for _ in range(_CLOCK_SAMPLES):
            sent = time.time()
            server = await dialect.time(self._line)
            received = time.time()
            error = (received - sent) / 2
            if facts.offset is None or error < facts.offset_error:
                facts.offset, facts.offset_error = server - (sent + received) / 2, error

    # -- each database -------------------------------------------------------------------------------------------

    async def _postgresql(self) -> None:
        facts = self._facts
        values = ", ".join(f"current_setting('{each}', true)" for each in _POSTGRESQL)
        said = await self._ask(
            "settings", f"SELECT current_setting('server_version'), pg_is_in_recovery(), current_user, {values}"
        )
        for version, standby, user, *found in said:
            facts.product, facts.version, facts.user = "postgresql", version.split()[0], str(user)
            facts.standby, facts.role = standby, "standby" if standby else "primary"
            facts.settings = {name: value for name, value in zip(_POSTGRESQL, found, strict=True) if value is not None}
        for (replicas,) in await self._ask("replicas", _STANDBYS):
            facts.replicas = replicas
        schema, _, _ = facts.table.rpartition(".")
        for (may,) in await self._ask(
            "rights on the schema",
            "SELECT has_schema_privilege(coalesce(CAST(:schema AS text), current_schema()), 'CREATE')",
            schema=schema or None,
        ):
            facts.may_create = may
        for (kept,) in await self._ask(
            "table",
            "SELECT CAST(relpersistence AS text) FROM pg_class WHERE oid = to_regclass(CAST(:name AS text))",
            name=facts.table,
        ):
            facts.kept = kept
        for question, sql in _KEEPERS.items():
            for kind, name, detail, age in await self._ask(question, sql.format(old=OLD, behind=_BEHIND)):
                facts.keepers += (Keeper(str(kind), str(name), str(detail), float(age)),)

    async def _mysql(self) -> None:
        facts = self._facts
        names = ", ".join(f"'{each}'" for each in _MYSQL)
        facts.settings = dict(await self._ask("settings", f"SHOW VARIABLES WHERE Variable_name IN ({names})"))
        version = facts.settings.pop("version", "")
        facts.product = "mariadb" if "mariadb" in version.lower() else "mysql"
        facts.version = version.split("-")[0]
        facts.role = "read-only" if read_only(facts.settings) else "writable"
        for (user,) in await self._ask("user", "SELECT current_user()"):
            facts.user = str(user)
        if facts.settings.get("log_bin") == "OFF":
            facts.replicas = 0
        else:
            await self._mysql_replicas()
        schema, _, table = facts.table.rpartition(".")
        for (engine,) in await self._ask(
            "table",
            "SELECT ENGINE FROM information_schema.TABLES "
            "WHERE TABLE_NAME = :name AND TABLE_SCHEMA = coalesce(:schema, database())",
            name=table,
            schema=schema or None,
        ):
            facts.kept = engine or ""

    async def _mysql_replicas(self) -> None:
        for statement in _REPLICAS:
            try:
                self._facts.replicas = len(await self._fetch(statement))
            except Exception as error:
                if meaning(error) is Meaning.LOST:
                    raise
                if (getattr(error, "orig", None) or error).args[:1] == (_SYNTAX,):  # another version
                    continue
                break
            return
        self._hide("replicas")

    async def _sqlite(self) -> None:
        facts = self._facts
        for (version,) in await self._ask("version", "SELECT sqlite_version()"):
            facts.version = version
        if await self._look_for_table():
            await self._table()

    # -- the table -----------------------------------------------------------------------------------------------

    async def _look_for_table(self) -> bool:
        """Whether the user may read it."""
        try:
            await self._fetch(f"SELECT 1 FROM {self._facts.table} WHERE 1 = 0")  # noqa: S608
        except Exception as error:
            found = meaning(error)
            if found is Meaning.LOST:
                raise
            self._facts.has_table = False if found is Meaning.ABSENT else None
            if found is Meaning.REFUSED:
                self._facts.missing += ("SELECT",)
            return False
        self._facts.has_table = True
        return True

    async def _table(self) -> None:
        """What clients check, and what runs inside each of their operations."""
        line, dialect, facts = self._line, self._settings.dialect(), self._facts
        known = await table_facts(line, dialect)
        facts.is_ordered = known.is_ordered
        facts.hidden += tuple(each for each in known.hidden if each not in facts.hidden)
        driver = self._settings.url.get_dialect()()
        if found := faults(driver, facts.table, known):
            facts.fault, facts.mend = explain(driver, facts.table, found)
        triggers = await table_triggers(line, dialect)
        facts.triggers = triggers or ()
        if triggers is None:
            self._hide("triggers")

    async def _rights(self) -> None:
        """Statements that change no row need the same rights as those that do."""
        if not await self._look_for_table():
            return
        await self._table()
        table = self._facts.table
        for right, sql in (
            ("INSERT", f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0"),  # noqa: S608
            ("UPDATE", f"UPDATE {table} SET count = count WHERE 1 = 0"),  # noqa: S608
            ("DELETE", f"DELETE FROM {table} WHERE 1 = 0"),  # noqa: S608
        ):
            try:
                await self._fetch(sql)
            except Exception as error:
                if meaning(error) is Meaning.LOST:
                    raise
                if meaning(error) is Meaning.REFUSED:
                    self._facts.missing += (right,)
                self._facts.refuses_writes |= meaning(error) is Meaning.READ_ONLY
