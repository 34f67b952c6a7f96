"""A SQLite file without an asyncio driver: the sqlite3 of Python, in a thread.

A transaction is four statements. Through an asyncio driver each of them is a trip to a thread and back. Here the whole
transaction is one trip: the coroutine that sends the statements runs in the thread, where no statement waits.

A child that is forked while the library of SQLite has the file open would take the locks of its parent for its own: it
would lock nothing, and its parent could delete the log into which it writes. So each connection is closed before a
fork, and opens again at its next use in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asynclock.stores.forks import Origin
from asynclock.stores.sql.files import OPENS_ALL, FileReplaced, OpenFile, inode_of, reason_of, why_not_read

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from asynclock.stores.sql.lines import Line

_NOTHING: dict[str, Any] = {}

_TRIES = 10
"""To open a file that is replaced meanwhile."""

_OPENING = 0.25
"""Seconds for which a new connection waits for the file, which another client may be setting up. Less than a check of
the health takes, so that this can say that the file is locked."""

_Result = TypeVar("_Result")


class FileLine:
    """One connection. Only its thread uses it."""

    is_closed = False
    is_set_up = True
    needs_no_task = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asynclock-sqlite")
        self._inline: Inline | None = None

    @property
    def file(self) -> OpenFile | None:
        return None if self._inline is None else self._inline.file

    async def open(self) -> FileLine:
        """Raises the error of sqlite3."""
        opening = self._thread.submit(_opened, self._path)
        try:
            self._inline = await asyncio.wrap_future(opening)
        except BaseException:
            self._thread.submit(_closed, opening)  # its thread may be opening it just now
            self._thread.shutdown(wait=False)
            raise
        return self

    async def whole(self, run: Callable[[Line], Awaitable[_Result]]) -> _Result:
        """Run a coroutine function that awaits nothing but statements of the line that it gets."""
        if self._inline is None:
            raise OSError("this connection is closed")
        return await self._call(_driven, run, self._inline)

    def send(self, work: Callable[[Inline], _Result], done: Callable[[_Result], object]) -> None:
        """Run `work` in the thread, and then `done` in the event loop, with what it returned. It must not raise.
        Raises OSError if this connection is closed."""
        if (inline := self._inline) is None:
            raise OSError("this connection is closed")
        call = asyncio.get_running_loop().call_soon_threadsafe
        context = Context()

        def run() -> None:
            with inline.busy:
                result = work(inline)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                call(done, result, context=context)

        self._thread.submit(run)

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        return await self.whole(lambda line: line.fetch(sql, params))

    async def run(self, sql: str) -> None:
        await self.whole(lambda line: line.run(sql))

    async def stopped(self) -> bool | None:
        return None

    async def give_back(self) -> None:
        inline, self._inline = self._inline, None
        if inline is not None:
            await self._call(inline.close)
        self._thread.shutdown(wait=False)

    def abandon(self) -> None:
        """The thread may be in a transaction: it closes the connection after that."""
        inline, self._inline = self._inline, None
        if inline is not None:
            self._thread.submit(inline.close)
        self._thread.shutdown(wait=False)

    def desert(self) -> None:
        self.abandon()

    async def _call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class Inline:
    """The connection, inside its thread: nothing waits."""

    is_closed = False
    is_set_up = True
    needs_no_task = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self.file: OpenFile | None = None
        self._origin = Origin()
        self.busy = threading.Lock()  # held by a transaction, by a close, and during a fork
        with _FORKS.registering:
            _FORKS.connections.add(self)

    def opened(self) -> sqlite3.Connection:
        """The connection; a new one after a fork. Raises the error of sqlite3; ConnectionError in a forked child."""
        if self._connection is None:
            self._origin.check()
            self._connection, self.file = _connected(self._path)
        return self._connection

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        return self.opened().execute(sql, params).fetchall()

    async def run(self, sql: str) -> None:
        for each in sql.split(";"):
            self.opened().execute(each)

    async def stopped(self) -> bool | None:
        return None

    async def give_back(self) -> None:
        self.close_now()

    def abandon(self) -> None:
        self.close_now()

    def desert(self) -> None:
        self.close_now()

    def close(self) -> None:
        """Not during a fork: in the child the file would stay locked."""
        with self.busy:
            self.close_now()

    def close_now(self) -> None:
        """The caller has `busy`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Forks:
    """Closes the connections of this process before a fork. No transaction runs meanwhile."""

    def __init__(self) -> None:
        self.registering = threading.Lock()
        self.connections: weakref.WeakSet[Inline] = weakref.WeakSet()
        self._closed: list[Inline] = []

    def before(self) -> None:
        self.registering.acquire()
        for each in list(self.connections):
            each.busy.acquire()
            self._closed.append(each)
            each.close_now()

    def after(self) -> None:
        """In the parent, and in the child."""
        for each in self._closed:
            each.busy.release()
        self._closed = []
        self.registering.release()


_FORKS = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FORKS.before, after_in_parent=_FORKS.after, after_in_child=_FORKS.after)


def _opened(path: str) -> Inline:
    inline = Inline(path)
    with inline.busy:
        inline.opened()
    return inline


def _closed(opening: Future[Inline]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _connected(path: str) -> tuple[sqlite3.Connection, OpenFile]:
    """Open the file. If the path had another file before, or none, the connection may have a file open that is at the
    path no more: then it is opened again."""
    for _ in range(_TRIES):
        before = inode_of(path)
        connection = _opened_at(path)
        if before is not None and (file := OpenFile(path)).inode == before:
            return connection, file
        connection.close()
    raise FileReplaced("the file is replaced again and again")


def _opened_at(path: str) -> sqlite3.Connection:
    if (why := why_not_read(path)) is not None:
        raise sqlite3.OperationalError(f"unable to open database file: {why}")
    try:
        connection = sqlite3.connect(path, timeout=_OPENING, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise sqlite3.OperationalError(f"{error}: {reason_of(Path(path))}") from error
    connection.execute("PRAGMA synchronous = NORMAL")  # in WAL mode a crash of the program loses nothing
    connection.execute(OPENS_ALL).fetchall()
    # It would sleep up to 100 ms while the file is locked; the store asks again after a shorter pause.
    connection.execute("PRAGMA busy_timeout = 0")
    return connection


def _driven(run: Callable[[Line], Awaitable[_Result]], inline: Inline) -> _Result:
    """Run a transaction. No fork happens meanwhile."""
    with inline.busy:
        return driven(run(inline))


def driven(coroutine: Awaitable[_Result]) -> _Result:
    """Run a coroutine to its end, without an event loop."""
    running: Any = coroutine
    try:
        running.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    running.close()
    raise RuntimeError("a transaction in a thread waited for something else than the file")


class FileSource:
    """Connections to a file."""

    own = False
    shortage = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._origin = Origin()

    async def connect(self, *, further: bool = False) -> FileLine:
        del further  # there is one
        self._origin.check()
        return await FileLine(self._path).open()

    async def answers(self, line: Line) -> bool:
        del line
        return True

    async def aclose(self) -> None: ...

    def desert(self) -> None: ...
