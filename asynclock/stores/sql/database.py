"""The database, as one event loop uses it: opening and closing, and the notices of the clients of that loop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, TypeVar

from asynclock._errors import ConfigError
from asynclock.rules.model import Verb
from asynclock.stores.lookups import lookup_under_way
from asynclock.stores.port import OLD, Busy, Reconnecting
from asynclock.stores.sql.cleaning import Cleaning
from asynclock.stores.sql.compare_and_set import CompareAndSet, Pauses
from asynclock.stores.sql.delays import CONNECT, Delays
from asynclock.stores.sql.dialects import SQLite
from asynclock.stores.sql.engines import CONNECTIONS, EngineSource, is_of_mariadb
from asynclock.stores.sql.errors import (
    Meaning,
    Queued,
    ReadOnly,
    UsedUp,
    explained,
    is_of_table,
    meaning,
    read_only,
    refusal,
    remedied,
    unsaid,
)
from asynclock.stores.sql.file_batches import FileBatches
from asynclock.stores.sql.file_lines import FileSource
from asynclock.stores.sql.files import FileReplaced, inode_of
from asynclock.stores.sql.inbox import Inbox, put
from asynclock.stores.sql.limits import CLOSING, LIMIT, forget_closed_loops, in_background, rest
from asynclock.stores.sql.lines import AsyncpgLine
from asynclock.stores.sql.listening import channel, message_of
from asynclock.stores.sql.machine_clock import boot, boottime, clock_with, read_clock
from asynclock.stores.sql.mysql_single import MySQLSingles
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.push import FEW, Push
from asynclock.stores.sql.rows import resource_name
from asynclock.stores.sql.single import Singles
from asynclock.stores.sql.table_watch import TableWatch
from asynclock.stores.sql.transactions import Transactions
from asynclock.stores.sql.unflushed import Unflushed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from asynclock.rules.model import Notice, Op
    from asynclock.stores.deciding import Change
    from asynclock.stores.sql.charsets import Charset
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.serving import Served
    from asynclock.stores.sql.settings import Settings
    from asynclock.stores.transactional import Step

log = logging.getLogger("asynclock")

_Result = TypeVar("_Result")

_UNSERVED = 1.0
"""Seconds for which no release of a name tries to serve its queue by one statement, after one could not."""


class Database:
    """See the module. Several clients of one loop may use it."""

    def __init__(self, settings: Settings, connect_timeout: float) -> None:
        self.settings = settings
        self.dialect: Dialect = settings.dialect()
        # A file that is locked repeats many ops, often; and it is never the table.
        self.delays = Delays() if settings.backend == "sqlite" else Delays(self.failed)
        self.transactions: Transactions | None = None  # None: not connected yet
        self.cleaning: Cleaning | None = None  # None: no op of this loop has written yet
        self.singles: Singles | MySQLSingles | None = None  # None: each op is a transaction
        self.unflushed: Unflushed | None = None  # None: each commit is awaited
        self.batches: FileBatches | None = None  # of a file: transactions that ops share
        self._charset: Charset | None = None  # of names and labels; None: it has all of Unicode
        self._watch: TableWatch | None = None
        self._unserved = Pauses(_UNSERVED)  # no statement can serve their queue
        self._doubt: Exception | None = None  # of the table: it must be prepared before the next op
        self._inbox: Inbox | None = None
        self._pool: Pool | None = None  # also while it is tried out
        self._timeout = connect_timeout
        self._receivers: dict[str, Callable[[Notice], object]] = {}  # by the tag of the client
        self._lost: dict[str, Callable[[Exception], object]] = {}  # by the same
        self.push = Push(settings.label, connect_timeout, self._received, self._lose, self._push_changed)
        self._is_prepared = False  # for ops that write
        self._preparing: asyncio.Task[object] | None = None
        self._closing: set[asyncio.Task[object]] = set()  # of the connections of a first connect that has failed
        self.is_replica = False  # of PostgreSQL: a standby has answered the last look
        self._was_standby = False  # it was one at the first connect

    # -- opening and closing -------------------------------------------------------------------------------------

    async def listen(self, tag: str, receive: Callable[[Notice], object], lost: Callable[[Exception], object]) -> None:
        """Connect, if that is not done, and receive the notices of a client. `lost` is called when they cannot come any
        more. Raises ConfigError, or the error of the database."""
        self._receivers[tag], self._lost[tag] = receive, lost
        async with self.push.opening:
            try:
                await self._open()
                await self.push.add(tag)
                if self._inbox is not None:
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
        if isinstance(error, UsedUp):
            return Busy(f"{label}: {remedied(error)}")
        if isinstance(error, TimeoutError) and not isinstance(error, Queued):
            lookup = lookup_under_way(self.settings.url.host)
            return TimeoutError(f"{label} did not answer within {self._timeout:g} s{lookup}")
        return OSError(f"{label}: {remedied(error)}")

    async def _open(self) -> None:
        if self.transactions is None:
            await self._connect()
            return
        pool = self.transactions.pool
        if self.pushes and isinstance(pool.source, EngineSource):
            await self.push.ensure(pool.source, pool)
        elif isinstance(self.dialect, SQLite):  # it may be another file
            pool.drop_idle()
            if self._is_prepared:
                await self._prepare(self.transactions)
        else:
            await pool.used(lambda line: line.run("SELECT 1"))
        while self._doubt is not None:
            await self._prepare(self.transactions)

    async def _connect(self) -> None:
        """The first time: try out whether push messages come. The table, or the file, may be absent: the first op makes
        it (`_prepared`)."""
        settings, timeout = self.settings, self._timeout
        size = 1 if settings.backend == "sqlite" else CONNECTIONS
        listens = settings.driver == "asyncpg"
        source = settings.new_source(timeout, pooler=listens)
        pool = Pool(source, size=size, pooler=listens)
        self._pool = pool
        try:
            if listens and isinstance(source, EngineSource) and await self._tries_push(source, pool):
                await self._set_up_sessions(source, pool)
            elif settings.path is None:  # a file is opened by its first op, which waits while another session locks it
                await pool.used(lambda line: line.run("SELECT 1"))
            transactions = Transactions(settings.label, self.dialect, pool, self._send, self.delays)
        except BaseException:  # not awaited: other clients wait for the lock of this
            self._closing = {in_background(each.aclose()) for each in (self.push, pool)}
            raise
        self.transactions = transactions
        self._push_changed()
        if isinstance(source, EngineSource):
            self.push.go_on(source, pool)

    async def _tries_push(self, source: EngineSource, pool: Pool) -> bool:
        """Whether push messages come. False also for a standby, which sends none, and can be read."""
        try:
            return await self.push.begin(source, pool)
        except Exception as error:
            if meaning(error) is not Meaning.READ_ONLY:
                raise
        self.is_replica = self._was_standby = True
        log.warning(
            "asynclock: %s is a standby: what it shows may be behind its primary, and no lock can be taken there "
            "before it is promoted",
            self.settings.label,
            extra={"asynclock_node": self.settings.label, "asynclock_reason": OLD},
        )
        return False

    async def _set_up_sessions(self, source: EngineSource, pool: Pool) -> None:
        """Push messages come, so no pooler shares them. One is set up now, so that there is always a line; the others
        are replaced, those that are in use at the end of that."""

        async def set_up(line: Line) -> None:
            if isinstance(line, AsyncpgLine):
                await line.set_up()

        source.settings, pool.pooler = True, False
        await pool.used(set_up)
        pool.return_old()

    @property
    def remark(self) -> str:
        """See `TransactionalStore.remark`."""
        return FEW if self.push.has_few else ""

    def why(self, keys: Sequence[str], since: float) -> str:
        """Why ops of these keys that were sent at `since` have no answer; "": unknown."""
        shortage = self._pool.shortage if self._pool is not None else ""
        return self.delays.why([*keys, *CONNECT], since) or shortage

    @property
    def pushes(self) -> bool:
        """Whether notices come by LISTEN."""
        return self.push.comes

    def _push_changed(self) -> None:
        """Push messages come now, or clients look for their notices."""
        if self.transactions is None:
            return
        pool = self.transactions.pool
        if not self.pushes and self._inbox is None:
            self._inbox = Inbox(self.dialect, pool, self._received)
            for tag in self._receivers:
                self._inbox.add(tag)
        if self.pushes and isinstance(pool.source, EngineSource) and not pool.source.settings:
            in_background(self._set_up_sessions(pool.source, pool))
            if self.cleaning is not None:
                self._use_fewer_statements(self.transactions)

    # -- the first op that writes --------------------------------------------------------------------------------

    async def _prepared(self) -> None:
        """Before an op that writes, or a read where the table is absent: make it, and store the clock of a file. Not
        before, for a client that only reads needs no right to do so. Raises ConfigError, or the error of the
        database."""
        if self._preparing is None or self._preparing.done():  # all that come meanwhile wait for this one
            self._preparing = in_background(self._prepare(self.connected))
        await asyncio.shield(self._preparing)
        self._is_prepared = True

    def _has_written(self, transactions: Transactions) -> None:
        """The first op has written: there are the rights and the server for it."""
        pool = transactions.pool
        self.cleaning = Cleaning(self.dialect, transactions)
        self._watch = TableWatch(self.look_at_table)
        self._use_fewer_statements(transactions)
        if isinstance(pool.source, FileSource) and isinstance(self.dialect, SQLite):
            self.batches = FileBatches(self.settings.label, self, transactions, self.dialect)
        if self._was_standby and isinstance(pool.source, EngineSource):
            self.push.try_soon(pool.source, pool, 0.0)

    def _use_fewer_statements(self, transactions: Transactions) -> None:
        """Carry ops out without a transaction of several statements, as far as this database and its driver can.
        PostgreSQL can where push messages have arrived, which shows that its sessions are its own."""
        settings, pool = self.settings, transactions.pool
        if self.push.has_come:
            self.singles = Singles(settings.label, settings.table, self.dialect.now, pool, self._receivers)
            self.unflushed = self.unflushed or Unflushed()
            transactions.compare_and_set = CompareAndSet(settings.table, self.dialect.now, self._messages)
        elif is_of_mariadb(pool.source) and settings.driver == "asyncmy":
            self.singles = MySQLSingles(settings.label, settings.table, pool)

    async def _prepare(self, transactions: Transactions) -> None:
        """Make the table if it is absent, and check it. Raises ConfigError."""
        makes, doubt = self.settings.makes, self._doubt
        await self.settings.check_session(transactions.pool)
        exists = (makes or self._has_file) and await transactions.has_table(self.settings.exists)
        if not (exists or makes):
            raise self.settings.absent()
        async with asyncio.timeout(LIMIT), transactions.pool.line() as line:
            while (obstacle := await self.settings.obstacle(line, exists=exists)) is not None:
                self.delays.repeated(CONNECT, obstacle)
                await asyncio.sleep(0.01)
            self._charset = await self.dialect.charset(line)
            fault = await self.settings.fault(line)
        self.delays.ended(CONNECT)
        if fault is not None:
            self._doubt = fault
            raise fault
        if isinstance(self.dialect, SQLite):
            dialect = self.dialect

            async def read(line: Line) -> float:
                return await read_clock(dialect, line, boot(), boottime(), time.time())

            offset = await transactions.repeated(read, checked=False, keys=CONNECT)
            # In this order: a transaction that runs meanwhile in its thread must not be checked against the new offset,
            # and take the time of the old clock.
            dialect.clock = clock_with(offset)
            dialect.offset = offset
        if self._doubt is doubt:  # else somebody has changed the table since it was checked
            self._doubt = None

    async def look_at_table(self) -> None:
        """Whether the table is there, and still excludes. If not, no client is granted or keeps a lock until it has
        been prepared again, which each of them tries from now on. Raises the error of the database."""
        settings = self.settings
        fault: Exception | None
        try:
            async with self.connected.pool.line() as line:
                fault = await settings.fault(line) if await settings.exists(line) else self._gone()
        except ConfigError as error:
            fault = error
        if fault is not None:
            self._doubt_table(fault)

    def _gone(self) -> Exception:
        return Reconnecting(f"{self.settings.label} has no table {self.settings.table} any more")

    def _doubt_table(self, error: Exception) -> None:
        self._doubt = error
        self._lose(error)

    def _lose(self, error: Exception) -> None:
        """No client may go on as it does."""
        for lost in list(self._lost.values()):
            lost(error)

    def failed(self, error: Exception) -> None:
        """An op has failed, or is repeated. The table may be the reason."""
        if meaning(error) is Meaning.ABSENT:
            self._doubt_table(self._gone())
        elif self._watch is not None and is_of_table(error):
            self._watch.suspect()

    def forget(self, tag: str) -> bool:
        """A client has closed. Whether it was the last one: then nobody may use this any more, and it must be
        closed."""
        self._receivers.pop(tag, None)
        self._lost.pop(tag, None)
        self.push.forget(tag)
        if self._inbox is not None:
            self._inbox.remove(tag)
        return not self._receivers

    async def unlisten(self, tag: str) -> None:
        """A client has closed, and was not the last one."""
        await self.push.remove(tag)

    async def aclose(self) -> None:
        """Ends within a second or two, whatever the server does."""
        if self._preparing is not None:
            self._preparing.cancel()
        background = (self._watch, self.cleaning, self._inbox, self.singles, self.batches)
        await asyncio.gather(*(each.aclose() for each in background if each is not None))
        if self._preparing is not None:  # else it would connect again
            await asyncio.wait({self._preparing}, timeout=CLOSING)
        if self._closing:  # each has limits of its own
            await asyncio.wait(self._closing, timeout=3 * CLOSING)
        pool = self.transactions.pool if self.transactions is not None else None
        await asyncio.gather(*(each.aclose() for each in (self.push, pool) if each is not None))
        await rest(CLOSING)

    def desert(self) -> None:
        """Its event loop was closed before the clients: end the connections without it."""
        self.push.desert()
        if self._pool is not None:
            self._pool.desert()
        forget_closed_loops()

    # -- ops and notices -----------------------------------------------------------------------------------------

    async def transact(
        self, keys: Sequence[str], step: Step, *, checked: bool = True, brief: bool = False, locks: bool = False
    ) -> None:
        """See `TransactionalStore.transact`, and `Transactions.step`; `brief`: `Transactions.brief_step`."""
        try:
            with explained(self.settings.label):
                looking, transactions = self.looking, self.connected
                if not self._is_prepared:
                    await self._prepared()
                if brief:
                    change, now = await transactions.brief_step(keys, step, looking)
                else:
                    change, now = await transactions.step(keys, step, looking, checked=checked, locks=locks)
        except FileReplaced as error:  # of a look, too, after which nothing else would open the new file
            self.replaced(error)
            raise
        except Exception as error:
            self.failed(error)
            raise
        self.committed(keys, change, now, looking)
        if self.cleaning is None:
            self._has_written(transactions)

    async def read(self, keys: Sequence[str], step: Step) -> None:
        """As `transact`, for a step that changes nothing: it locks no row, and needs SELECT only."""
        self.is_replica = await self._reading(lambda transactions: transactions.read(keys, step))

    async def names(self, begin: str, after: str) -> tuple[str, list[str]]:
        """See `Transactions.names`."""
        return await self._reading(lambda transactions: transactions.names(begin, after))

    async def _reading(self, read: Callable[[Transactions], Awaitable[_Result]]) -> _Result:
        """Read, once the table is there. Raises ConfigError if it is not, and cannot be made."""
        transactions = self.connected
        try:
            with explained(self.settings.label):
                if self._is_prepared or self._has_file:
                    try:
                        return await read(transactions)
                    except Exception as error:
                        if meaning(error) is not Meaning.ABSENT:
                            raise
                await self._prepared()
                return await read(transactions)
        except FileReplaced as error:
            self.replaced(error)
            raise
        except ReadOnly as error:  # a look writes nothing, so this server should make the table
            raise self.settings.absent(f", and cannot make it ({error})") from error

    @property
    def _has_file(self) -> bool:
        """False: there is no file, and to open it would make it."""
        return self.settings.path is None or inode_of(self.settings.path) is not None

    def replaced(self, error: FileReplaced) -> None:
        """The file is not the one at its path any more."""
        self._lose(error)

    def committed(self, keys: Sequence[str], change: Change, now: float, looking: Collection[str]) -> None:
        """A transaction has left these states, at `now` of the server."""
        if self._inbox is not None:
            for key, state in zip(keys, change.states, strict=True):
                self._inbox.seen(key, state, now, looking)
        for notice in change.notices:
            self._received(notice)

    def committed_plain(self, key: str, op: Op, answered: int = 0) -> None:
        """An op was carried out on a plain row: nobody waits for that name. `answered`: see Unflushed."""
        if self.unflushed is not None:
            if op.verb is Verb.RELEASE:
                if op.fence:  # else it is flushed
                    self.unflushed.released(op, asyncio.get_running_loop().time())
            elif op.lease > 0:  # else it may have changed nothing
                self.unflushed.flushed(answered)
        if self._inbox is not None and (not self.pushes or self._inbox.looks_for(key)):
            self._inbox.seen_plain(key, "" if op.verb is Verb.RELEASE else op.id, op.lease)

    def serves(self, key: str) -> bool:
        """Whether a release is to serve the queue of that name by one statement (`serving.py`). Where clients of this
        loop look, or have looked, for their notices, they must see the new state."""
        ways = self.transactions.compare_and_set if self.transactions is not None else None
        return ways is not None and self._inbox is None and key not in self._unserved and not ways.rests

    def served(self, op: Op, key: str, served: Served) -> int | None:
        """That statement has found the row. The fence; None: it could not serve the queue."""
        if served.fence is None:
            self._unserved.add(key)
        for notice in served.notices(op.name):
            self._received(notice)
        return served.fence

    def check_text(self, keys: Sequence[str], op: Op) -> None:
        """Raises Unfit for an op that cannot be written here."""
        if self._charset is not None and (lacks := self._charset.lacks([*map(resource_name, keys), op.id])):
            raise unsaid(self.settings.label, f"{self._charset.name} has no {lacks!r}")

    def failed_single(self, error: Exception) -> Exception:
        """A statement has failed: the error to tell."""
        try:
            with explained(self.settings.label):
                raise error
        except Exception as told:
            self.failed(told)
            return told

    @property
    def connected(self) -> Transactions:
        """Raises OSError."""
        if self.transactions is None:
            raise OSError(f"{self.settings.label} is not connected")
        return self.transactions

    @property
    def looking(self) -> Collection[str]:
        """The tags of the clients of this loop that look for their notices."""
        return () if self._inbox is None or self.pushes else self._inbox.tags

    def writes_looks(self, op: Op) -> bool:
        """Whether the row must say that a client of this loop looks for its notices: a holder that ceased to listen
        would learn at its next renewal only that its hold was broken. A single statement cannot write that."""
        return self.dialect.mixes and bool(self.looking) and op.verb in (Verb.ACQUIRE, Verb.EXTEND)

    async def _send(self, line: Line, notice: Notice, now: float, looks: Collection[str], *, brief: bool) -> None:
        """Send a notice to another client, in the transaction of the op. A message comes out of PostgreSQL only with
        its commit, and takes a lock of the whole database there: clients of this loop need none."""
        if (messages := self._messages([notice], looks)) is None:
            await put(self.dialect, line, notice, now, brief=brief)
            return
        for where, message in messages:
            await line.fetch("SELECT pg_notify(:channel, :message)", {"channel": where, "message": message})

    def _messages(self, notices: Sequence[Notice], looks: Collection[str]) -> list[tuple[str, str]] | None:
        """The channels and the texts of messages for clients of other loops; None: one of them looks for its
        notices."""
        others = [each for each in notices if each.tag not in self._receivers]
        if any(not self.dialect.mixes or each.tag in looks for each in others):
            return None
        return [(channel(each.tag), message_of(each)) for each in others]

    def _received(self, notice: Notice) -> None:
        if receive := self._receivers.get(notice.tag):
            receive(notice)
