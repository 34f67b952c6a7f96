"""Ops of a SQLite file that share a transaction: those that are ready at the same time.

A transaction is one trip to the thread of the connection and back, and one commit. Each op is decided on its own: its
answer, or an error that comes before it has written, is its own. If the file refuses the transaction, it is rolled
back; then each op has a transaction of its own, so that the error of one is not that of the others. If it is not known
whether the transaction was rolled back, all its ops have failed, and may have been carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import deque
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynclock._loop import own_task
from asynclock.rules.model import RELEASE
from asynclock.stores.jobs import Begun
from asynclock.stores.sql.errors import Delayed, Meaning, ends_connection, explained, meaning
from asynclock.stores.sql.file_lines import FileLine, driven
from asynclock.stores.sql.file_single import FileSingles
from asynclock.stores.sql.files import FileReplaced
from asynclock.stores.sql.limits import CLOSING, LIMIT
from asynclock.stores.sql.single import single_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from asynclock.rules.model import Op
    from asynclock.stores.deciding import Change
    from asynclock.stores.port import Grant, Refused, Undone
    from asynclock.stores.sql.delays import Delays
    from asynclock.stores.sql.dialects import SQLite
    from asynclock.stores.sql.file_lines import Inline
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.transactions import Transactions
    from asynclock.stores.transactional import Step

TOGETHER = 256
"""Ops of one transaction, at most: others wait meanwhile, those of other processes, too."""

_PAUSE = 0.0005
"""Seconds until a file that is locked is asked again."""


class Owner(Protocol):
    """Whose transactions they are (`database.py`)."""

    delays: Delays

    @property
    def looking(self) -> Collection[str]:
        """The tags of the clients of this loop that look for their notices."""

    async def transact(self, keys: Sequence[str], step: Step, *, checked: bool = True) -> None:
        """A transaction for one op alone."""

    def committed(self, keys: Sequence[str], change: Change, now: float, looking: Collection[str]) -> None:
        """A transaction has left these states, at `now` of the file."""

    def committed_plain(self, key: str, op: Op) -> None:
        """A transaction has carried out an op on a plain row."""

    def replaced(self, error: FileReplaced) -> None:
        """The file is not the one at its path any more."""

    def failed(self, error: Exception) -> None:
        """An op has failed. The table may be the reason."""


class FileOp(Begun):
    """An op, and what became of it."""

    __slots__ = (
        "change",
        "error",
        "fence",
        "first",
        "keys",
        "now",
        "op",
        "single",
        "step",
        "votes",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        keys: Sequence[str],
        step: Step,
        votes: list[Grant | Refused | Undone],
    ) -> None:
        super().__init__()
        self.op = op
        self.keys = keys
        self.step = step
        self.votes = votes  # the answer, once it is carried out
        self.single = single_of(keys[0], op)
        self.first = 0.0  # when it was first tried, on the clock of the loop
        self.clear()

    def clear(self) -> None:
        """Nothing of it is carried out."""
        self.fence: int | None = None  # of one that needed no rules
        self.change: Change | None = None
        self.now = 0.0
        self.error: Exception | None = None  # its own

    @property
    def checked(self) -> bool:
        """Whether the file must be the one at its path: not for what only frees a name."""
        return self.op.verb is not RELEASE


class _Failed(NamedTuple):
    """A transaction that was not committed, as far as is known."""

    error: Exception
    began: bool = False
    committing: bool = False  # the commit itself has failed
    rolled_back: bool = False


class _Batch:
    """A transaction under way."""

    def __init__(self, line: FileLine, ops: Sequence[FileOp], looking: Collection[str], now: float) -> None:
        self.line = line
        self.ops = ops
        self.looking = looking
        self.until = now + LIMIT
        self.replaced: FileReplaced | None = None  # the file is another one: only releases were carried out


class FileBatches:
    """The transactions of one event loop, one at a time."""

    def __init__(self, label: str, owner: Owner, transactions: Transactions, dialect: SQLite) -> None:
        self._label = label
        self._owner = owner
        self._transactions = transactions
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[FileOp] = deque()
        self._batch: _Batch | None = None
        self._begins = False  # a transaction begins soon
        self._alone_before = False  # the last transaction was that of one op, and no other op waited at its end
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()

    def add(self, op: FileOp) -> FileOp:
        """Carry an op out, together with those that are added in the same turn of the loop, and those that wait."""
        self._waiting.append(op)
        if not self._begins and self._batch is None:
            self._begins = True
            if self._alone_before:  # and so is this one, probably: it need not wait for the next turn
                self._begin()
            else:
                self._loop.call_soon(self._begin, context=Context())
        return op

    def _begin(self, line: Line | None = None) -> None:
        ops = list[FileOp]()
        now = self._loop.time()
        while self._waiting and len(ops) < TOGETHER:
            if (op := self._waiting.popleft()).is_over:
                self._owner.delays.ended(op.keys)
                continue
            op.first = op.first or now
            ops.append(op)
        if not ops or self._closed:
            self._begins = False
            if line is not None:
                self._transactions.pool.put_back(line)
            for op in ops:
                self._loop.call_soon(self._fail, op, OSError(f"{self._label} is closed"))
            return
        line = line or self._transactions.pool.take()
        if not isinstance(line, FileLine):
            self._waiting.extendleft(reversed(ops))
            self._run(self._connect(), self._not_connected)
            return
        self._begins = False
        self._batch = batch = _Batch(line, ops, self._owner.looking, now)
        self._idle.clear()
        if self._watch is None:
            self._watch = self._loop.call_later(LIMIT, self._look, context=Context())
        try:
            line.send(lambda inline: self._carry_out(batch, inline), lambda failed: self._ended(batch, failed))
        except (OSError, RuntimeError) as error:  # the connection is closed, or the interpreter ends
            self._loop.call_soon(self._ended, batch, _Failed(error))

    async def _connect(self) -> None:
        """Wait for the connection, which others use, or make it. It is used at once: those who wait for it by then
        would get it before the next `take`, and ops would wait for as long as there are such."""
        try:
            line = await self._transactions.pool.taken()
        except Exception:  # each op finds it out, and says so
            self._begins = False
            self._one_by_one(self._all_waiting())
            return
        self._begin(line)

    def _not_connected(self) -> None:
        self._begins = False
        for op in self._all_waiting():
            self._cancelled(op)

    def _all_waiting(self) -> Sequence[FileOp]:
        waiting, self._waiting = self._waiting, deque()
        return waiting

    def _begin_again(self) -> None:
        if self._waiting and not self._begins and self._batch is None:
            self._begins = True
            self._loop.call_soon(self._begin)

    # -- in the thread -------------------------------------------------------------------------------------------

    def _carry_out(self, batch: _Batch, inline: Inline) -> _Failed | None:
        began = committing = rolled_back = False
        try:
            connection = inline.opened()
            connection.execute("BEGIN IMMEDIATE")
            began = True
            self._check(batch, inline)
            now = driven(self._dialect.time(inline))
            singles = FileSingles(connection, self._dialect.table, now)
            for op in batch.ops:
                if op.checked and batch.replaced is not None:
                    op.error = batch.replaced
                else:
                    self._decide(op, batch, inline, singles)
            committing = True
            connection.execute("COMMIT")
        except Exception as error:  # any failure of the file
            if began:
                with contextlib.suppress(Exception):
                    inline.opened().execute("ROLLBACK")
                    rolled_back = True
            return _Failed(error, began, committing, rolled_back)
        return None

    def _check(self, batch: _Batch, inline: Inline) -> None:
        if any(op.checked for op in batch.ops):
            try:
                driven(self._dialect.check(inline))
            except FileReplaced as error:
                batch.replaced = error

    def _decide(self, op: FileOp, batch: _Batch, inline: Inline, singles: FileSingles) -> None:
        """Raises an error that is not that of the op alone."""
        written = inline.opened().total_changes
        try:
            if op.single is not None:
                op.fence = singles.carry_out(*op.single)
            if op.fence is None:
                op.change, op.now = driven(self._transactions.decide(inline, op.keys, op.step, batch.looking))
        except Exception as error:
            if isinstance(error, sqlite3.Error | OSError) or inline.opened().total_changes != written:
                raise
            op.error = error  # of the rules, or of its row

    # -- in the loop ---------------------------------------------------------------------------------------------

    def _ended(self, batch: _Batch, failed: _Failed | None) -> None:
        if self._batch is not batch:
            return  # it was overdue
        self._batch = None
        self._idle.set()
        self._alone_before = len(batch.ops) == 1 and not self._waiting
        pool, ops = self._transactions.pool, batch.ops
        is_broken = batch.replaced is not None if failed is None else _is_broken(failed)
        (pool.give_up if is_broken else pool.put_back)(batch.line)
        if failed is None:
            self._owner.delays.answered()
            if batch.replaced is not None:  # first: that is an outage, and not an idle connection that was closed
                self._owner.replaced(batch.replaced)
            self._finish_all(deque(ops), batch)
        else:
            self._failed(ops, failed, is_broken=is_broken)
        self._begin_again()

    def _failed(self, ops: Sequence[FileOp], failed: _Failed, *, is_broken: bool) -> None:
        for op in ops:
            op.clear()
        if not is_broken and meaning(failed.error) is Meaning.AGAIN:
            self._repeat(ops, failed.error)
            return
        if not failed.began or (not is_broken and not failed.committing and len(ops) > 1):
            self._one_by_one(ops)
            return
        if isinstance(failed.error, FileReplaced):
            self._owner.replaced(failed.error)
        for op in ops:
            self._fail(op, failed.error)

    def _finish_all(self, ops: deque[FileOp], batch: _Batch) -> None:
        """Their transaction is committed. What their handlers send meanwhile begins afterwards, together."""
        before, self._begins = self._begins, True
        try:
            while ops:
                self._finish(ops.popleft(), batch)
        finally:
            self._begins = before
            if ops:  # a handler has raised an exception
                self._loop.call_soon(self._finish_all, ops, batch)
            self._begin_again()  # and that of the last op may, too

    def _finish(self, op: FileOp, batch: _Batch) -> None:
        self._owner.delays.ended(op.keys)
        if op.error is not None:
            self._fail(op, op.error)
            return
        if op.fence is not None:
            op.votes[:] = [(op.fence, False)]
            self._owner.committed_plain(op.keys[0], op.op)
        elif op.change is not None:
            self._owner.committed(op.keys, op.change, op.now, batch.looking)
        op.end(None)

    def _fail(self, op: FileOp, error: Exception) -> None:
        self._owner.delays.ended(op.keys)
        self._owner.failed(error)
        try:
            with explained(self._label):
                raise error
        except Exception as told:  # with the remedy
            op.end(told)

    def _repeat(self, ops: Sequence[FileOp], error: Exception) -> None:
        """The file is locked by another process: ask again soon."""
        latest = self._loop.time() - LIMIT
        for op in reversed(ops):
            if op.first > latest:
                self._owner.delays.repeated(op.keys, error)
                self._waiting.appendleft(op)
            else:
                self._fail(op, Delayed(f"{self._label} did not end a transaction within {LIMIT:g} s"))
        self._begins = True
        self._loop.call_later(_PAUSE * random.uniform(0.5, 1.5), self._begin)  # noqa: S311 - jitter

    def _one_by_one(self, ops: Sequence[FileOp]) -> None:
        for op in ops:
            self._run(self._alone(op), partial(self._cancelled, op))

    async def _alone(self, op: FileOp) -> None:
        """In a transaction of its own, with all that one needs when the file makes trouble."""
        try:
            await self._owner.transact(op.keys, op.step, checked=op.checked)
        except Exception as error:
            op.end(error)
        else:
            op.end(None)

    def _cancelled(self, op: FileOp) -> None:
        self._fail(op, ConnectionError(f"{self._label}: the task of this request was cancelled"))

    def _run(self, work: Coroutine[Any, Any, None], cancelled: Callable[[], object]) -> None:
        """`cancelled` is called if the program cancels it, which may be before its first step."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                cancelled()

        self._tasks.add(own_task(work, "asynclock writes to a file", ended))

    def _look(self) -> None:
        """Give a transaction up that is overdue: its thread closes the connection, if it ever ends."""
        self._watch, batch, now = None, self._batch, self._loop.time()
        if batch is None:
            return
        if now < batch.until:
            self._watch = self._loop.call_later(batch.until - now, self._look)
            return
        self._batch = None
        self._idle.set()
        self._transactions.pool.give_up(batch.line)
        for op in batch.ops:
            self._fail(op, TimeoutError(f"{self._label} did not end a transaction within {LIMIT:g} s"))
        self._begin_again()

    async def aclose(self) -> None:
        """Wait a moment for the transaction under way. The ops that wait belong to clients that have closed."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSING)
        if self._batch is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await self._idle.wait()
        if (batch := self._batch) is not None:
            self._batch = None
            self._transactions.pool.give_up(batch.line)
        if self._watch is not None:
            self._watch.cancel()


def _is_broken(failed: _Failed) -> bool:
    """Whether its connection must be closed."""
    return ends_connection(failed.error) or (failed.began and not failed.rolled_back)
