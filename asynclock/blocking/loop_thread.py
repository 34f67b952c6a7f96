"""LoopThread: the background thread of this process, with the event loop of all clients of `asynclock.blocking`.

It starts with the first call. A forked child starts its own: no thread survives a fork, and the loop is the parent's.

At the exit of the interpreter the clients are closed, so that their holds are released. This is a function of `atexit`:
it runs when all threads have ended that are no daemons, those of `concurrent.futures` among them, and until then they
may use their locks. The thread is a daemon, since the interpreter would wait for any other one before that.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
from asyncio import _get_running_loop
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from asynclock._errors import ConfigError
from asynclock._loop import own_task, start_thread
from asynclock.blocking.callbacks import Callbacks
from asynclock.blocking.calls import Call, quietly
from asynclock.blocking.selector import EventSelector
from asynclock.blocking.thread_wait import HAS_EVENTFD, close_inherited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import ParamSpec

    from asynclock.blocking.calls import Undo
    from asynclock.client import Redlock
    from asynclock.events import Event

    _P = ParamSpec("_P")

log = logging.getLogger("asynclock")

_T = TypeVar("_T")

_CLOSING = 5.0
"""Seconds for which the exit of the interpreter waits for the clients. A close has shorter limits of its own."""

_JOINING = 1.0
"""Seconds for which it waits for the thread after that."""


class LoopThread:
    """See the module."""

    def __init__(self) -> None:
        self._selector = EventSelector() if HAS_EVENTFD else None
        self.loop = asyncio.SelectorEventLoop(self._selector)  # whatever the policy: uvloop has no selector
        self.exits = False  # the interpreter exits
        self._runs_in = 0  # the process in which the thread runs
        self.listeners = Callbacks("asynclock listeners", 1)
        self.losses = Callbacks("asynclock on_lost", 8)
        self._thread = threading.Thread(target=self._run, name="asynclock loop", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError: the system gives no thread."""
        self._runs_in = os.getpid()
        start_thread(self._thread, self.loop)

    def begin(self, call: Call[Any]) -> None:
        """Run the first step of a call in the loop. Any thread calls it."""
        if self._selector is None:
            self.loop.call_soon_threadsafe(call.begin, context=call.context)
        else:
            self._selector.begin(call)

    def is_alive(self) -> bool:
        """Whether the thread has not ended. In a forked child that of the parent does not exist. A signal handler that
        raises in `Thread.is_alive` can make the thread count as ended (CPython 3.11)."""
        return self._runs_in == os.getpid()

    def is_here(self) -> bool:
        """Whether it is the thread of this process. In a forked child that of the parent is not, and none is one once
        the interpreter exits."""
        return self is _current

    def tell(self, listener: Callable[[Event], object], event: Event) -> None:
        """Tell an event in a thread of the library. The loop calls it."""
        self.listeners.put(copy_context(), listener, event)

    def close(self) -> None:
        """Close all clients, and end the thread. For the exit of the process."""
        self.listeners.exits = self.losses.exits = True
        with contextlib.suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(_close_clients(), self.loop).result(_CLOSING)
        self.end()

    def end(self) -> None:
        """End the thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._end)
            self._thread.join(_JOINING)

    def _end(self) -> None:
        self.loop.stop()
        self.listeners.call_rest()
        self.losses.call_rest()

    def _run(self) -> None:
        _here.thread = self
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            _forget(self)
            with contextlib.suppress(Exception):
                left = asyncio.all_tasks(self.loop)
                for task in left:
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
                self.loop.close()
            self._runs_in = 0


async def _close_clients() -> None:
    results = await asyncio.gather(*[client.aclose() for client in _all_clients()], return_exceptions=True)
    for error in results:
        if isinstance(error, Exception):
            log.error("asynclock: a client did not close", exc_info=error)


def _all_clients() -> list[Redlock]:
    while True:
        try:
            return list(_clients)
        except RuntimeError:  # a daemon thread has made one meanwhile
            continue


_clients: WeakSet[Redlock] = WeakSet()
_background: set[asyncio.Task[object]] = set()
_guard = threading.RLock()  # a signal handler may use a client while its thread has this
_here = threading.local()
_current: LoopThread | None = None
_inherited: list[LoopThread] = []
"""Of a forked child: loops of its parent. They are kept, since closing them would change the parent's selector."""
_exited = False


def has_exited() -> bool:
    """Whether the interpreter exits, and all clients are closed."""
    return _exited


def register(client: Redlock) -> None:
    """Close that client at the exit of the interpreter, if it was not closed before."""
    _clients.add(client)


def loop_thread() -> LoopThread:
    """The thread of this process; started if there is none. Raises ConfigError."""
    return _current or _started()


def thread_here() -> LoopThread:
    """For code that runs in the loop: its thread, also while that closes its clients and is no longer current."""
    thread: LoopThread | None = getattr(_here, "thread", None)
    return thread or loop_thread()


def _started() -> LoopThread:
    global _current  # noqa: PLW0603 - one process, one thread
    _check_threads()
    with _guard:
        if _exited:
            raise ConfigError("the interpreter exits, and asynclock has closed its clients: use locks before that")
        if _current is None:
            thread = LoopThread()
            try:
                thread.start()
            except RuntimeError as error:
                raise ConfigError(f"asynclock cannot start its background thread: {error}") from error
            if _current is None:
                _current = thread
                _end_with_child()
            else:  # a signal handler of this thread has started another one meanwhile, and clients use that
                thread.end()
        return _current


def _forget(thread: LoopThread) -> None:
    """It ends, perhaps by an exception that another thread has raised in it: the next call starts another one."""
    global _current  # noqa: PLW0603
    if _current is thread:
        _current = None


def call(function: Callable[_P, Coroutine[Any, Any, _T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a coroutine function in the loop, and wait for its result. If the wait ends by an exception, such as a
    KeyboardInterrupt, the coroutine is cancelled. Raises ConfigError in a thread that runs an event loop."""
    check_thread()
    return Call(loop_thread(), function(*args, **kwargs), None, False).run()


def call_and_undo(
    function: Callable[_P, Coroutine[Any, Any, _T]], undo: Undo[_T], /, *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """As `call`. If the thread waits no more when the result comes, `undo` gets it."""
    check_thread()
    return Call(loop_thread(), function(*args, **kwargs), undo, False).run()


def call_to_its_end(function: Callable[_P, Coroutine[Any, Any, _T]], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """As `call`, but the coroutine runs to its end, whether or not the thread waits: it releases something."""
    check_thread()
    return Call(loop_thread(), function(*args, **kwargs), None, True).run()


def check_thread() -> None:
    """Raise ConfigError in a thread that runs an event loop: a wait would block it."""
    if _get_running_loop() is None:
        return
    if _current is not None and asyncio.get_running_loop() is _current.loop:
        raise ConfigError("this is the background thread of asynclock, which must not wait for itself")
    raise ConfigError(
        "this thread runs an event loop, which a wait would block: use the async API there, asynclock.Redlock with "
        "`async with` and `await`; or call this function in a thread, with asyncio.to_thread"
    )


def is_collected_here() -> bool:
    """Whether this is a thread that must not wait: then a garbage collector ends a generator here."""
    return _get_running_loop() is not None


def run_in_background(
    thread: LoopThread, function: Callable[_P, Coroutine[Any, Any, object]], /, *args: _P.args, **kwargs: _P.kwargs
) -> threading.Lock:
    """Run a coroutine function in the loop, some time, and wait for nothing. Returns a lock that is released at its
    end. A signal handler that raises in the `wait` of an Event could leave that locked, and the loop would hang in its
    `set`."""
    ended = threading.Lock()
    ended.acquire()

    def begin() -> None:
        _background.add(own_task(quietly(function(*args, **kwargs)), "asynclock give back", end))

    def end(task: asyncio.Task[object]) -> None:
        _background.discard(task)
        ended.release()

    try:
        if thread.is_here():
            thread.loop.call_soon_threadsafe(begin, context=Context())
            return ended
    except RuntimeError:  # the loop is closed
        pass
    ended.release()
    return ended


def abandon(undo: Undo[_T], result: _T) -> None:
    """Nobody takes the result of a call that is over: `undo` gets it, in the background."""
    if (thread := _current) is not None:
        run_in_background(thread, undo, result)


def _check_threads() -> None:
    """Raise ConfigError where threads are greenlets: a wait would block them all. Where only sockets or `select` are
    patched, the loop could not wait."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and any(map(gevent.is_module_patched, ("threading", "socket", "select"))):
        patched = "gevent"
    elif eventlet is not None and any(map(eventlet.is_monkey_patched, ("thread", "socket", "select"))):
        patched = "eventlet"
    else:
        return
    raise ConfigError(
        f"asynclock.blocking needs the threads and sockets of the system, and {patched} has replaced them by its own: "
        "use another kind of worker (threads or processes), or do not patch them"
    )


def _end_with_child() -> None:
    """A child of multiprocessing that was forked, also by a forkserver, ends without `atexit`."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _exit_of_child, exitpriority=0)


def _exit_of_child() -> None:
    """multiprocessing joins the threads of a child after it has called the finalizers. A thread that is still in its
    block would work on without its lock, so this joins them first, as an interpreter does before `atexit`. The later
    call of `_shutdown` has no effect. If a signal ends the wait, nothing is released: the leases end by themselves."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - nothing public ends the threads of idle pools
    _exit()


def _close() -> None:
    """Of the process: close its clients. The next use starts again."""
    global _current
    thread, _current = _current, None
    if thread is not None and thread.is_alive():
        thread.exits = _exited
        thread.close()


def _exit() -> None:
    global _exited  # noqa: PLW0603
    _exited = True
    _close()


def _after_fork() -> None:
    global _current, _guard  # noqa: PLW0603
    _guard = threading.RLock()
    close_inherited()
    if _current is not None:
        _inherited.append(_current)
        _current = None


atexit.register(_exit)
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
