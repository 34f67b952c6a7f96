"""What a SQLStore was made with: a url or an engine, and the table."""

from __future__ import annotations

import logging
import re
from functools import cached_property
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import StaticPool

from asynclock._errors import ConfigError, brief
from asynclock.stores.sql.dialects import DIALECTS
from asynclock.stores.sql.engines import TABLE_OPTION, EngineSource, engine_of, label_of, url_of
from asynclock.stores.sql.errors import Meaning, is_syntax, meaning, reason
from asynclock.stores.sql.file_lines import FileSource
from asynclock.stores.sql.files import absolute, check_file, check_library, path_of
from asynclock.stores.sql.remedies import remedy
from asynclock.stores.sql.schema import ddl, lock_table
from asynclock.stores.sql.set_up import check_session, hiding_policy
from asynclock.stores.sql.table_check import explain, faults
from asynclock.stores.sql.table_facts import table_facts
from asynclock.stores.urls import trimmed

if TYPE_CHECKING:
    from sqlalchemy.engine import URL
    from sqlalchemy.engine import Dialect as SQLAlchemyDialect

    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.pool import Pool
    from asynclock.stores.sql.table_check import TableFacts

log = logging.getLogger("asynclock")

_TABLE = re.compile(r"[a-z_][a-z0-9_]{0,62}(?:\.[a-z_][a-z0-9_]{0,62})?")


_OURS = {"c", "m", "mine", "made", "q", "t", "taken"}
"""What a statement for PostgreSQL calls its own parts (`single.py`, `compare_and_set.py`). They would hide a table of
that name."""


def _check_word(url: URL, table: str) -> None:
    """Raise ConfigError for a name that a statement for PostgreSQL cannot have without quotes. Some, such as user, are
    functions of the server, so it would not always say so. What follows a schema may be any word."""
    if url.get_backend_name() != "postgresql":  # they say so (`exists`)
        return
    schema, _, name = table.rpartition(".")
    reserved: set[str] = url.get_dialect()().identifier_preparer.reserved_words
    if (schema or name) in (reserved if schema else reserved | _OURS):
        raise ConfigError(f"table={brief(table)} is a reserved word: give another name, such as locks")


class Settings:
    """Checked when the store is made. Raises ConfigError."""

    def __init__(self, url_or_engine: str | AsyncEngine, table: str) -> None:
        self.engine = url_or_engine if isinstance(url_or_engine, AsyncEngine) else None
        if self.engine is not None:
            self.url = self.engine.url
            if self.url.get_backend_name() not in DIALECTS:
                raise ConfigError(
                    f"no statements for {self.url.get_backend_name()}: there are {', '.join(sorted(DIALECTS))}"
                )
            if isinstance(self.engine.pool, StaticPool) and self.url.get_backend_name() != "sqlite":
                raise ConfigError(
                    "this AsyncEngine has poolclass=StaticPool, which lends one connection to all at the same time, so "
                    "transactions of the store and of the program would mix: give it another pool, or give the url"
                )
        elif isinstance(url_or_engine, str):
            url_or_engine = trimmed(url_or_engine)
            self.url = url_of(url_or_engine)
            named = self.url.query.get(TABLE_OPTION)
            self.url = self.url.difference_update_query([TABLE_OPTION])
            table = named if isinstance(named, str) else table
        else:
            raise ConfigError("SQLStore takes a url or an AsyncEngine of SQLAlchemy (create_async_engine)")
        if not isinstance(table, str) or not _TABLE.fullmatch(table):
            raise ConfigError(
                f"table={brief(str(table))}: give a name of small letters, digits and _, with its schema if need be"
            )
        _check_word(self.url, table)
        self.table = table
        self.makes = True  # the table, where it is absent
        self.backend = self.url.get_backend_name()
        self.driver = self.url.get_driver_name()
        self.path: str | None = None  # of a SQLite file
        if self.backend == "sqlite":
            self._set_path()
        self.label = label_of(self.url, table)
        # A url that names no driver: the file is used without SQLAlchemy's engine.
        self.is_plain_file = isinstance(url_or_engine, str) and url_or_engine.startswith("sqlite:")
        self._told = set[str]()  # what was logged about the table

    def _set_path(self) -> None:
        """Raises ConfigError."""
        check_library()
        if self.engine is not None:
            self.path = path_of(self.url)
            return
        check_file(self.url.database)
        self.path = absolute(str(self.url.database))
        self.url = self.url.set(database=self.path)

    def dialect(self) -> Dialect:
        return DIALECTS[self.backend](self.table)

    def new_source(self, connect_timeout: float, *, pooler: bool) -> EngineSource | FileSource:
        """Where the connections of one event loop come from. `pooler`: see `engine_of`."""
        if self.engine is not None:
            return EngineSource(self.engine, connect_timeout, own=False, path=self.path, settings=not pooler)
        if self.is_plain_file:
            return FileSource(str(self.path))
        engine = engine_of(self.url, connect_timeout, pooler=pooler)
        return EngineSource(engine, connect_timeout, own=True, path=self.path, settings=not pooler)

    async def obstacle(self, line: Line, *, exists: bool) -> Exception | None:
        """Prepare the table. Returns the error if another client is just doing something that excludes this one. Raises
        ConfigError."""
        try:
            await self.prepare(line, exists=exists)
        except Exception as error:
            if meaning(error) is Meaning.AGAIN:
                return error
            raise
        return None

    async def check_session(self, pool: Pool) -> None:
        """Raise ConfigError for settings of a session with which no lock works. With a url they are ours."""
        if self.backend in ("mysql", "mariadb") and self.engine is not None:
            async with pool.line() as line:
                await check_session(line, self.label)

    async def prepare(self, line: Line, *, exists: bool) -> None:
        """Make the table unless it exists. Raises ConfigError if that is not permitted."""
        if self.is_plain_file:
            await line.run("PRAGMA journal_mode = WAL")
        if exists:
            return
        try:
            await self.create(line)
        except Exception as error:
            if await self.exists(line):  # another client was first
                return
            if meaning(error) not in (Meaning.REFUSED, Meaning.FAILED) or remedy(reason(error)):
                raise
            raise self.absent(f", and it cannot be made ({reason(error)})") from error

    def absent(self, why: str = ", which the first program that takes a lock makes, if its user may") -> ConfigError:
        """The error where the table is absent: who makes it."""
        store = "SQLStore(url)" if self.table == "asynclock" else f"SQLStore(url, {self.table!r})"
        return ConfigError(
            f"{self.label} has no table {self.table}{why}: with the url of its owner, run "
            f"asyncio.run({store}.create_schema()), or the statement of docs/stores/sql.md"
        )

    async def create(self, line: Line) -> None:
        """Make the table, unless it exists."""
        schema, _, name = self.table.rpartition(".")
        table = lock_table(name, schema=schema or None)
        await line.run(ddl(self.url.get_dialect()(), table, if_absent=True))

    @cached_property
    def _compiler(self) -> SQLAlchemyDialect:
        """It knows how the types of columns are written."""
        return self.url.get_dialect()()

    async def fault(self, line: Line) -> ConfigError | None:
        """What keeps the table from excluding, or from fencing; None: nothing that is known. Raises the error of a
        database that does not answer."""
        facts = await table_facts(line, self.dialect())
        if found := faults(self._compiler, self.table, facts):
            what, mend = explain(self._compiler, self.table, found)
            return ConfigError(f"{self.label}: {what}; {mend}")
        self._tell(facts)
        return await hiding_policy(line, self.dialect(), self.label) if self.backend == "postgresql" else None

    def _tell(self, facts: TableFacts) -> None:
        """Log what is not known, and what makes waiters slow, once."""
        if facts.hidden and "hidden" not in self._told:
            self._told.add("hidden")
            log.warning(
                "asynclock: %s does not show its user the %s of the table: they are not checked",
                self.label,
                ", ".join(facts.hidden),
            )
        if facts.is_ordered is False and "order" not in self._told:
            self._told.add("order")
            log.warning(
                "asynclock: the names in %s are not in the order of their bytes: clients without push messages may not "
                'learn that it is their turn. Run: ALTER TABLE %s ALTER COLUMN resource_name TYPE TEXT COLLATE "C"',
                self.label,
                self.table,
            )

    async def exists(self, line: Line) -> bool:
        """Whether there is a table of that name. Raises ConfigError for a name that is a word of the database."""
        try:
            await line.run(f"SELECT 1 FROM {self.table} WHERE 1 = 0")  # noqa: S608
        except Exception as error:
            if meaning(error) is Meaning.ABSENT:
                return False
            if not is_syntax(error):
                raise
            raise ConfigError(
                f"{self.label}: the name of the table may be a reserved word ({reason(error)}): give another one, with "
                "?asynclock_table=locks in the url, or SQLStore(url, table='locks')"
            ) from error
        return True
