"""The database, as one event loop uses it: opening and closing, and the notices of the clients of that loop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError
from asynclock.stores.port import Reconnecting
from asynclock.stores.sql.cleaning import Cleaning
from asynclock.stores.sql.dialects import SQLite
from asynclock.stores.sql.engines import CONNECTIONS, EngineSource
from asynclock.stores.sql.errors import Meaning, explained, meaning, read_only, reason, refusal
from asynclock.stores.sql.files import FileReplaced
from asynclock.stores.sql.inbox import Inbox, put
from asynclock.stores.sql.limits import CLOSING, in_background, limited, rest
from asynclock.stores.sql.listening import Listening, channel, message_of
from asynclock.stores.sql.machine_clock import boot, boottime, clock_with, read_clock
from asynclock.stores.sql.pool import LIMIT, Pool
from asynclock.stores.sql.single import Singles
from asynclock.stores.sql.transactions import Transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from sqlalchemy.ext.asyncio import AsyncEngine

    from asynclock.rules.model import Notice
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.settings import Settings
    from asynclock.stores.transactional import Step

_PUSH = 0.25
"""Seconds within which a push message must arrive when it is tried out, at most."""


class Database:
    """See the module. Several clients of one loop may use it."""

    def __init__(self, settings: Settings, connect_timeout: float) -> None:
        self.settings = settings
        self.dialect: Dialect = settings.dialect()
        self.pushes = False  # notices come by LISTEN
        self.transactions: Transactions | None = None  # None: not connected yet
        self.cleaning: Cleaning | None = None
        self.singles: Singles | None = None  # None: each op is a transaction
        self._inbox: Inbox | None = None
        self._timeout = connect_timeout
        self._receivers: dict[str, Callable[[Notice], object]] = {}  # by the tag of the client
        self._lost: dict[str, Callable[[Exception], object]] = {}  # by the same
        self._opening = asyncio.Lock()
        self._listening: Listening | None = None

    # -- opening and closing -------------------------------------------------------------------------------------

    async def listen(self, tag: str, receive: Callable[[Notice], object], lost: Callable[[Exception], object]) -> None:
        """Connect, if that is not done, and receive the notices of a client. `lost` is called when they cannot come any
        more. Raises ConfigError, or the error of the database."""
        self._receivers[tag], self._lost[tag] = receive, lost
        async with self._opening:
            try:
                await self._open()
                if self._listening is not None:
                    await self._listening.add(tag)
                elif self._inbox is not None:
                    self._inbox.add(tag)
            except ConfigError:
                raise
            except Exception as error:
                raise self._error(error) from error

    def _error(self, error: Exception) -> Exception:
        label = self.settings.label
        if meaning(error) is Meaning.REFUSED:
            return refusal(label, error)
        if meaning(error) is Meaning.READ_ONLY:
            return read_only(label, error)
        if isinstance(error, TimeoutError):
            return TimeoutError(f"{label} did not answer within {self._timeout:g} s")
        return OSError(f"{label}: {reason(error)}")

    async def _open(self) -> None:
        if self._listening is not None and not await self._listening.answers():
            self._listening = None
        if self.transactions is None:
            await self._connect()
        elif self.pushes and self._listening is None:
            await self._listen_again(self.transactions.pool)
        elif isinstance(self.dialect, SQLite):  # it may be another file
            self.transactions.pool.drop_idle()
            await self._prepare(self.transactions)
        elif not self.pushes:
            async with self.transactions.pool.line() as line:
                await line.run("SELECT 1")

    async def _connect(self) -> None:
        """The first time: try out whether push messages come, make the table if it is absent, read the clock of a
        file."""
        settings, timeout = self.settings, self._timeout
        size = 1 if settings.backend == "sqlite" else CONNECTIONS
        listens = settings.driver == "asyncpg"
        source = settings.new_source(timeout, pooler=listens)
        pool, listening = Pool(source, size=size, pooler=listens), None
        try:
            if listens and isinstance(source, EngineSource):
                listening = await self._new_listening(source.engine, pool)
            if listening is not None:  # no pooler: statements may be prepared for more than one transaction
                in_background(pool.aclose())
                pool = Pool(settings.new_source(timeout, pooler=False), size=size, pooler=False)
            transactions = Transactions(settings.label, self.dialect, pool, self._send)
            await self._prepare(transactions)
        except BaseException:  # not awaited: other clients wait for the lock of this
            for each in (listening, pool):
                if each is not None:
                    in_background(each.aclose())
            raise
        self._listening, self.pushes = listening, listening is not None
        if self.dialect.single_statements and listening is not None:
            self.singles = Singles(settings.label, settings.table, self.dialect.now, pool)
        if listening is None:
            self._inbox = Inbox(self.dialect, pool, self._received)
        self.cleaning = Cleaning(self.dialect, transactions)
        self.transactions = transactions

    async def _new_listening(self, engine: AsyncEngine, pool: Pool) -> Listening | None:
        """A connection that listens; None: no messages arrive."""
        connecting = Listening.connect(engine, self._received, self._silent)
        listening = await limited(connecting, self._timeout, late=lambda late: in_background(late.aclose()))
        within = min(_PUSH, self._timeout / 2)
        try:
            async with pool.line() as line:
                if await listening.works(line, within):
                    return listening
        except BaseException:
            in_background(listening.aclose())
            raise
        in_background(listening.aclose())
        return None

    async def _listen_again(self, pool: Pool) -> None:
        if isinstance(pool.source, EngineSource):
            self._listening = await self._new_listening(pool.source.engine, pool)
        if self._listening is None:
            raise OSError("its push messages do not arrive any more")
        for tag in self._receivers:
            await self._listening.add(tag)

    async def _prepare(self, transactions: Transactions) -> None:
        async with asyncio.timeout(LIMIT), transactions.pool.line() as line:
            while not await self.settings.is_prepared(line):  # noqa: ASYNC110 - other processes tell nothing
                await asyncio.sleep(0.01)
        if isinstance(self.dialect, SQLite):
            dialect = self.dialect

            async def read(line: Line) -> float:
                return await read_clock(dialect, line, boot(), boottime(), time.time())

            dialect.offset = await transactions.repeated(read, checked=False)
            dialect.clock = clock_with(dialect.offset)

    def forget(self, tag: str) -> bool:
        """A client has closed. Whether it was the last one: then nobody may use this any more, and it must be
        closed."""
        self._receivers.pop(tag, None)
        self._lost.pop(tag, None)
        if self._inbox is not None:
            self._inbox.remove(tag)
        return not self._receivers

    async def unlisten(self, tag: str) -> None:
        """A client has closed, and was not the last one."""
        if self._listening is not None:
            await self._listening.remove(tag)

    async def aclose(self) -> None:
        """Ends within a second or two, whatever the server does."""
        for each in (self.cleaning, self._inbox, self.singles):
            if each is not None:
                await each.aclose()
        pool = self.transactions.pool if self.transactions is not None else None
        await asyncio.gather(*(each.aclose() for each in (self._listening, pool) if each is not None))
        await rest(CLOSING)

    # -- ops and notices -----------------------------------------------------------------------------------------

    async def transact(self, keys: Sequence[str], step: Step, *, checked: bool = True) -> None:
        """See `TransactionalStore.transact`, and `Transactions.repeated`."""
        try:
            with explained(self.settings.label):
                change, now = await self.connected.step(keys, step, self._looking, checked=checked)
        except FileReplaced as error:  # of a look, too, after which nothing else would open the new file
            for lost in list(self._lost.values()):
                lost(error)
            raise
        if self._inbox is not None:
            for key, state in zip(keys, change.states, strict=True):
                self._inbox.seen(key, state, now)
        for notice in change.notices:
            self._received(notice)

    @property
    def connected(self) -> Transactions:
        """Raises OSError."""
        if self.transactions is None:
            raise OSError(f"{self.settings.label} is not connected")
        return self.transactions

    @property
    def _looking(self) -> Collection[str]:
        return self._inbox.tags if self._inbox is not None else ()

    async def _send(self, line: Line, notice: Notice, now: float, looks: Collection[str]) -> None:
        """Send a notice to another client, in the transaction of the op. A message comes out of PostgreSQL only with
        its commit, and takes a lock of the whole database there: clients of this loop need none."""
        if notice.tag in self._receivers:
            return
        if self.dialect.mixes and notice.tag not in looks:
            params: dict[str, Any] = {"channel": channel(notice.tag), "message": message_of(notice)}
            await line.fetch("SELECT pg_notify(:channel, :message)", params)
        else:
            await put(self.dialect, line, notice, now)

    def _received(self, notice: Notice) -> None:
        if receive := self._receivers.get(notice.tag):
            receive(notice)

    def _silent(self) -> None:
        """The connection that listens is gone."""
        self._listening = None
        for lost in list(self._lost.values()):
            lost(Reconnecting(f"{self.settings.label} closed the connection"))
