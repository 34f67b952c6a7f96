"""Limits for what a driver does. Behind a network that drops packets, or before a server that stands still, a driver
may wait for ever, even after a cancel: some ask the server to end the statement, and wait for its answer.

So a call that may hang runs in a task of its own. When its time is up, its connection is cut, the task is cancelled
again and again, and no other task waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import weakref
from contextlib import asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from asynclock._clock import reading_time
from asynclock._loop import own_task, retrieve
from asynclock.stores.forks import Kept, descriptor_of, keep_from_children

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Coroutine

_Result = TypeVar("_Result")

LIMIT = 5.0
"""Seconds for one use of a connection: behind a network that drops packets, no answer would ever come."""

STOPPING = 1.0
"""Seconds for which the client waits for the answer of a server that it has asked to end a statement."""

LOCKED = 0.02
"""Seconds for which PostgreSQL waits for a lock that another session has, while others may need the connection. Ops
that meet at a name have its row for a millisecond or two."""

WAITING = 0.25
"""The same where only some connections wait at a time: others that wait get their turn."""

CLOSING = 0.3
"""Seconds for which a close waits for the answer of the server, at most. Then the connection is cut."""

_AGAIN = 0.02
"""Seconds until an abandoned task is cancelled again; doubled each time."""

_TIMES = 12
"""How often an abandoned task is cancelled, over some 80 s."""

_left: set[asyncio.Task[Any]] = set()
"""Strong references to the abandoned tasks, and to those in the background."""

_threads: weakref.WeakKeyDictionary[threading.Thread, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
"""Those of aiosqlite that were told to close their file, with the event loop to which each reports."""


@asynccontextmanager
async def ending_at(when: float) -> AsyncIterator[asyncio.Timeout]:
    """As asyncio.timeout_at. After the loop was blocked it goes on for `reading_time`, once."""
    loop = asyncio.get_running_loop()
    due = max(when, loop.time())
    timer: asyncio.TimerHandle

    def end() -> None:
        nonlocal timer
        if more := reading_time(loop.time() - due):
            timer = loop.call_later(more, expire, context=Context())
        else:
            expire()

    def expire() -> None:
        scope.reschedule(loop.time())

    async with asyncio.timeout(None) as scope:
        timer = loop.call_at(due, end, context=Context())
        try:
            yield scope
        finally:
            timer.cancel()


async def limited(
    work: Coroutine[Any, Any, _Result],
    seconds: float | None,
    *,
    cut: Callable[[], object] = lambda: None,
    late: Callable[[_Result], object] | None = None,
) -> _Result:
    """Await `work` for at most `seconds`, if that is not None; after the loop was blocked for `reading_time` more. When
    the time is up, or the caller is cancelled, `cut` is called. `late` is called with a result that comes afterwards;
    then `work` gets a moment to end by itself. Raises TimeoutError, or the exception of `work`."""
    task, loop = own_task(work), asyncio.get_running_loop()
    due = loop.time() + (seconds or 0.0)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done and (more := reading_time(loop.time() - due)):
            done, _ = await asyncio.wait({task}, timeout=more)
    except BaseException:
        abandon_task(task, cut, late)
        raise
    if not done:
        abandon_task(task, cut, late)
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


def abandon_task(
    task: asyncio.Task[_Result],
    cut: Callable[[], object] = lambda: None,
    late: Callable[[_Result], object] | None = None,
) -> None:
    """Cut the connection of a task, and cancel the task until it ends. No other task waits for it.

    With `late` it is a connect. In an engine of the user asyncpg leaves a future with an error if it is cancelled in
    the turn in which the connection comes up, and asyncio logs that. So a connect gets a moment to end well, and is
    ended afterwards."""

    def ended(task: asyncio.Task[_Result]) -> None:
        _left.discard(task)
        if not task.cancelled() and task.exception() is None and late is not None:
            late(task.result())

    cut()
    if task.get_loop().is_closed():  # a garbage collector ends the caller: nothing of that loop runs again
        return
    _left.add(task)
    task.add_done_callback(ended)
    if late is None:
        _cancel(task, _AGAIN, _TIMES)
    else:
        task.get_loop().call_later(CLOSING, _cancel, task, _AGAIN, _TIMES)


def _cancel(task: asyncio.Task[Any], pause: float, times: int) -> None:
    if not task.done() and times:
        task.cancel()
        task.get_loop().call_later(pause, _cancel, task, 2 * pause, times - 1)


def forget_closed_loops() -> None:
    """Forget the tasks of event loops that were closed, so that they and their connections can be collected."""
    _left.difference_update([task for task in list(_left) if task.get_loop().is_closed()])


def in_background(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    """Run it, and wait for it only when the client closes (`rest`). It has a limit of its own."""
    task: asyncio.Task[object] = own_task(work, ended=_ended)
    _left.add(task)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    retrieve(task)


async def rest(seconds: float) -> None:
    """Wait for the abandoned tasks of this event loop, and for those in the background, for at most `seconds`."""
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    until = loop.time() + seconds
    while left := {task for task in list(_left) if task.get_loop() is loop and task is not here}:
        done, _ = await asyncio.wait(left, timeout=max(0.0, until - loop.time()))
        if not done:
            return


async def threads_ended() -> None:
    """Wait until the threads of aiosqlite that serve this event loop have closed their files, for LIMIT at most. A
    thread that reports to a closed event loop prints a traceback, and a disk may be slow."""
    loop = asyncio.get_running_loop()
    if threads := [thread for thread, its in list(_threads.items()) if its is loop and thread.is_alive()]:
        until = time.monotonic() + LIMIT

        def join() -> None:
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

        await asyncio.to_thread(join)


def cut(driver: Any) -> None:
    """Close the connection of a driver at once, and send nothing to the server. Tasks that wait for an answer get an
    error. Never raises."""
    with contextlib.suppress(Exception):
        if hasattr(driver, "terminate"):  # asyncpg
            driver.terminate()
        elif (transport := _transport(driver)) is not None:  # asyncmy, aiomysql
            transport.abort()
            if type(driver).__module__.startswith("aiomysql"):  # else it warns of an open connection later
                driver.close()
        elif hasattr(driver, "pgconn"):  # psycopg
            with socket.socket(fileno=driver.pgconn.socket) as sock:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()  # it belongs to the driver
        elif hasattr(driver, "stop"):  # aiosqlite
            # Its thread closes the file, in its turn. If SQLAlchemy calls close() before that, it fails, and aiosqlite
            # forgets the file. The file would stay locked for as long as anything refers to it.
            with contextlib.suppress(AttributeError):
                for end in (driver._connection.rollback, driver._connection.close):  # noqa: SLF001 - no other name
                    driver._tx.put_nowait((None, end))  # noqa: SLF001 - as SQLAlchemy does
            with contextlib.suppress(AttributeError, RuntimeError):  # no event loop runs here: the collector cuts
                _threads[driver._thread] = asyncio.get_running_loop()  # noqa: SLF001 - as SQLAlchemy does
            driver.stop()


def discard(driver: Any) -> None:
    """As `cut`, of a connection that came too late: nothing uses it. Never raises."""
    cut(driver)
    with contextlib.suppress(Exception):
        if hasattr(driver, "pgconn"):  # else psycopg warns of an open connection later
            driver.pgconn.finish()


def is_cut(driver: Any) -> bool:
    """Whether the connection of asyncmy is known to be closed: by the server, too."""
    transport = _transport(driver)
    return transport is None or bool(transport.is_closing())


def keep_socket(driver: Any) -> Kept | None:
    """No forked child has the socket of this connection. None: it has none."""
    return keep_from_children(_descriptor(driver))


def _descriptor(driver: Any) -> int:
    """Of its socket; -1: it has none, or it is closed."""
    if (transport := _transport(driver)) is not None:
        return descriptor_of(transport)
    return int(driver.pgconn.socket) if hasattr(driver, "pgconn") else -1  # psycopg


def _transport(driver: Any) -> Any:
    writer = getattr(driver, "_writer", None)
    return writer.transport if writer is not None else getattr(driver, "_transport", None)
