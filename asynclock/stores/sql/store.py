"""SQLStore: the locks in one table of a database."""

from __future__ import annotations

import asyncio
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy.pool import NullPool

from asynclock._errors import ConfigError
from asynclock.rules.model import PEEK, RELEASE
from asynclock.stores.deciding import copy_of, keys_of
from asynclock.stores.sql.database import Database
from asynclock.stores.sql.errors import Meaning, meaning
from asynclock.stores.sql.file_batches import FileOp
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.serving import SERVE
from asynclock.stores.sql.settings import Settings
from asynclock.stores.sql.single import serving_of, single_of
from asynclock.stores.transactional import TransactionalNode, TransactionalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from sqlalchemy.ext.asyncio import AsyncEngine

    from asynclock.rules.model import Notice, Op
    from asynclock.stores.jobs import Left, Running
    from asynclock.stores.port import Grant, NodeConfig, Refused, Undone
    from asynclock.stores.sql.serving import Served
    from asynclock.stores.transactional import Step
    from asynclock.stores.undelivered import PendingRelease

_INHERITED: list[Any] = []
"""Of a forked child: what belongs to its parent, and must not be closed."""


class SQLStore(TransactionalStore):
    """Locks in the table `table` of a database. It takes a url (`postgresql://`, `mysql://`, `mariadb://`,
    `sqlite:///path`, each with `+driver` as well), or an AsyncEngine of SQLAlchemy, which is used as it is and never
    disposed of.

    With a url each event loop gets an engine of its own. Raises ConfigError."""

    standalone = True
    concurrency = 64
    limits_transactions = True
    why_not_thread_safe = "has an AsyncEngine, which belongs to one event loop: give the url in place of the engine"
    """What an error says of a store that threads cannot share."""

    def __init__(self, url_or_engine: str | AsyncEngine, table: str = "asynclock") -> None:
        self._settings = Settings(url_or_engine, table)
        self.label = self._settings.label
        self.thread_safe = self._settings.engine is None
        self._databases: dict[asyncio.AbstractEventLoop, Database] = {}
        self._nodes: weakref.WeakValueDictionary[str, TransactionalNode] = weakref.WeakValueDictionary()  # by tag
        self._connect_timeout = 1.0
        self._pid = os.getpid()

    @property
    def makes(self) -> bool:
        """See `Making`."""
        return self._settings.makes

    @makes.setter
    def makes(self, makes: bool) -> None:
        self._settings.makes = makes

    def __repr__(self) -> str:
        return f"<SQLStore {self.label}>"

    async def create_schema(self) -> None:
        """Make the table, unless it exists: for a user who may, where the clients may not. Raises ConfigError, also for
        a table that cannot keep locks, or the error of the database."""
        settings = self._settings
        pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
        try:
            async with pool.line() as line:
                if not await settings.exists(line):
                    await settings.create(line)
                fault = await settings.fault(line)
        finally:
            await pool.aclose()
        if fault is not None:
            raise fault

    # -- for the floors above ------------------------------------------------------------------------------------

    def open(self, config: NodeConfig) -> TransactionalNode:
        self._forget_parent()
        self._connect_timeout = config.connect_timeout
        node = super().open(config)
        self._nodes[config.listener.tag] = node
        return node

    async def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
        loop = asyncio.get_running_loop()
        database = self._databases.get(loop)
        if database is None:
            self._desert_closed_loops()
            self._check_loop()
            database = self._databases[loop] = Database(self._settings, self._connect_timeout)
        await database.listen(tag, receive, self._nodes[tag].lost)

    async def unlisten(self, tag: str) -> None:
        loop = asyncio.get_running_loop()
        if (database := self._databases.get(loop)) is None:
            return
        if database.forget(tag):  # a client that begins meanwhile makes another one
            del self._databases[loop]
            await database.aclose()
        else:
            await database.unlisten(tag)

    def decide(
        self, prefix: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]
    ) -> tuple[Running, list[Grant | Refused | Undone]]:
        del answer
        database, keys = self._database, keys_of(prefix, op)
        if database.batches is None and op.verb is not PEEK:
            database.check_text(keys, op)
            singles = None if database.writes_looks(op) else database.singles
            if singles is not None and (single := single_of(keys[0], op)) is not None:
                statement = _Statement(self, database, keys)
                begun = singles.add(*single, statement.told)
                statement.op = copy_of(op)  # while the server works
                return begun, statement.votes
            if singles is not None and database.serves(keys[0]) and (values := serving_of(keys[0], op)) is not None:
                statement = _Statement(self, database, keys)
                begun = singles.add(SERVE, values, statement.served)
                statement.op = copy_of(op)
                return begun, statement.votes
        asked = copy_of(op)
        step, votes = self.step_of([asked])
        if asked.verb is PEEK:
            return database.read(keys, step), votes
        if database.batches is not None:
            return database.batches.add(FileOp(asked, keys, step, votes)), votes
        return database.transact(keys, step, checked=asked.verb is not RELEASE), votes

    def deliver(
        self, prefix: str, release: PendingRelease, answer: Callable[[Grant | Refused | Undone], object]
    ) -> tuple[Coroutine[Any, Any, None], list[Grant | Refused | Undone]]:
        del answer
        step, votes = self.step_of([release])
        return self._database.transact(keys_of(prefix, release), step, brief=True), votes

    def transact(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None]:
        return self._database.transact(keys, step)

    def read(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None]:
        return self._database.read(keys, step)

    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        after, found = await self._database.names(begin, "" if cursor == "0" else cursor.removeprefix(">"))
        return f">{after}" if after else "0", found

    def delay(self, keys: Sequence[str], since: float) -> str:
        database = self._databases.get(asyncio.get_running_loop())
        return "" if database is None else database.why(keys, since)

    def undone(self, tag: str) -> Sequence[Op]:
        database = self._databases.get(asyncio.get_running_loop())
        if database is None or database.unflushed is None:
            return ()
        return database.unflushed.take(tag, asyncio.get_running_loop().time())

    def view(self) -> str:
        database = self._databases.get(asyncio.get_running_loop())
        return "of a standby, which may be behind its primary" if database is not None and database.is_replica else ""

    def remark(self) -> str:
        database = self._databases.get(asyncio.get_running_loop())
        return "" if database is None else database.remark

    def is_down(self, error: Exception) -> bool:
        return meaning(error) in (Meaning.LOST, Meaning.ABSENT)  # the table is made again

    @property
    def _database(self) -> Database:
        database = self._databases.get(asyncio.get_running_loop())
        if database is None:
            raise OSError(f"{self.label} is not connected")
        return database

    def _desert_closed_loops(self) -> None:
        """A loop that was closed without `shutdown_asyncgens` has closed no client: its connections are still open."""
        for loop in [each for each in list(self._databases) if each.is_closed()]:
            if (database := self._databases.pop(loop, None)) is not None:
                database.desert()

    def _check_loop(self) -> None:
        """Raise ConfigError if the engine of the user is in use in another event loop: its connections belong there."""
        engine = self._settings.engine
        if engine is None or isinstance(engine.pool, NullPool):
            return
        if any(not loop.is_closed() for loop in self._databases):
            raise ConfigError(
                f"{self.label}: this AsyncEngine is in use in another event loop, and it belongs to one: "
                "give the url, or an engine for each loop, or one with poolclass=NullPool, or close the client at the "
                "end of each loop"
            )

    def _forget_parent(self) -> None:
        """After a fork: the connections are those of the parent process."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            _INHERITED.append((self._databases, self._nodes))
            self._databases = {}
            self._nodes = weakref.WeakValueDictionary()


class _Statement:
    """An op that is one statement. Where that is not enough, it is a transaction."""

    __slots__ = ("_answered", "_database", "_keys", "_store", "op", "votes")

    op: Op  # a copy

    def __init__(self, store: SQLStore, database: Database, keys: Sequence[str]) -> None:
        self._store = store
        self._database = database
        self._keys = keys
        self._answered = 0 if database.unflushed is None else database.unflushed.answered
        self.votes: list[Grant | Refused | Undone] = []

    def told(self, fence: int | None, error: Exception | None) -> Left:
        """The answer to the statement."""
        if error is not None:
            return self._database.failed_single(error)
        if fence is None:
            return self._transact
        self._database.committed_plain(self._keys[0], self.op, self._answered)
        self.votes.append((fence, False))
        return None

    def served(self, served: Served | None, error: Exception | None) -> Left:
        """The same of a release that serves the queue."""
        if error is not None:
            return self._database.failed_single(error)
        if served is None:  # the row was locked, or has changed meanwhile
            return partial(self._transact, locks=True)
        if (fence := self._database.served(self.op, self._keys[0], served)) is None:
            return self._transact
        self.votes.append((fence, False))
        return None

    async def _transact(self, *, locks: bool = False) -> None:
        step, votes = self._store.step_of([self.op])
        await self._database.transact(self._keys, step, checked=self.op.verb is not RELEASE, locks=locks)
        self.votes[:] = votes
