"""Call: a coroutine that runs in the background loop while the thread that wants its result waits.

It is a task in the sense of https://docs.python.org/3/library/asyncio-extending.html, and not an asyncio.Task, for
three reasons. Its owner is the thread: a Call equals each other Call of its thread, and it is done when the thread has
ended. So a lock knows the thread again that holds it. It begins in the turn of the loop in which it arrives, where a
Task needs one more turn. And a thread that stops to wait (KeyboardInterrupt, a signal handler that raises) leaves a
Call behind that ends by itself, and gives back what it still gets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio.tasks import _enter_task, _leave_task
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from asynclock._errors import ConfigError
from asynclock._loop import own_task
from asynclock.blocking.thread_wait import thread_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from asynclock.blocking.callbacks import Callbacks
    from asynclock.events import Event

    Undo = Callable[["_T"], Coroutine[Any, Any, object]]

log = logging.getLogger("asynclock")

_T = TypeVar("_T")

_SLICE = 1.0
"""Seconds. A thread that waits looks up so often. Exceptions that another thread raises in it (the time limits of
task queues) arrive then; on Windows Ctrl-C, too."""

_giving_back: set[asyncio.Task[object]] = set()


class Home(Protocol):
    """The thread in which calls run (`loop_thread.py`)."""

    exits: bool  # the interpreter exits
    listeners: Callbacks

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def begin(self, call: Call[Any]) -> None:
        """Run the first step of a call in the loop. Any thread calls it."""

    def is_alive(self) -> bool: ...


class Call(Generic[_T]):
    """See the module. `undo` gives back a result that nobody takes any more. With `completes`, the coroutine runs to
    its end even if nobody waits for it."""

    __slots__ = (
        "__weakref__", "_abandoned", "_begun", "_cancels", "_completes", "_coroutine", "_error", "_fut_waiter", "_home",
        "_loop", "_must_cancel", "_over", "_result", "_reused", "_thread", "_told", "_undo", "_wait", "context",
    )  # fmt: skip

    owner_is = "thread"
    """What messages call the owner of a lease."""

    def __init__(
        self,
        home: Home,
        coroutine: Coroutine[Any, Any, _T],
        undo: Undo[_T] | None,
        completes: bool,
    ) -> None:
        self._home = home
        self._loop = home.loop
        self._coroutine: Coroutine[Any, Any, _T] | None = coroutine
        self._undo = undo
        self._completes = completes
        self.context = copy_context()  # the steps run in it
        self._thread = threading.current_thread()
        self._wait = thread_wait()
        self._begun = False
        self._reused = False  # another call may have it
        self._over = False  # its thread may go on
        self._told: list[tuple[Context, Callable[[Event], object], Event]] | None = None
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._cancels = 0
        self._must_cancel = False
        self._fut_waiter: asyncio.Future[Any] | None = None  # anyio reads this name and the one above

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and other._thread is self._thread

    def __hash__(self) -> int:
        return hash(self._thread)

    def __repr__(self) -> str:
        return f"<Call of {self._thread.name!r}>"

    # -- in the thread that waits --------------------------------------------------------------------------------

    def run(self) -> _T:
        """Run it in the loop, and wait for its result. Events that happen in it are told here, before the return."""
        try:
            self._home.begin(self)
            while not self._over:
                self._wait.wait(_SLICE)
                if not (self._over or self._home.is_alive() or self._home.exits):
                    raise ConfigError("the background thread of asynclock has ended: the next call starts another one")
            while self._told:
                context, listener, event = self._told.pop(0)  # first: if it raises, `_ended` tells the others
                context.run(listener, event)
            self._reuse_wait()
            result, error = cast("_T", self._result), self._error
        except BaseException:
            self._abandon()
            raise
        # From here on nothing is called: a signal handler could raise there, and nobody would give the result back.
        self._result = self._error = None  # the loop may refer to this object for a moment
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _reuse_wait(self) -> None:
        """Once: two calls that have the same one would wake each other."""
        if not self._reused:
            self._reused = True
            self._wait.reuse()

    def _abandon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._end_alone, context=self.context)
        except RuntimeError:  # the loop is closed: its sessions are, too
            log.debug("asynclock: a call was left behind in a loop that is closed")

    # -- in the loop ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first step, once. `context` is entered. It raises nothing: that would end the loop."""
        if self._begun:
            return
        self._begun = True
        try:
            self._step()
        except BaseException as error:
            self._error = error
            self._finish()

    def tell(self, listener: Callable[[Event], object], event: Event) -> None:
        """Tell that event in the thread that waits, in the context in which it happens."""
        if self._told is None:
            self._told = []
        self._told.append((copy_context(), listener, event))

    def _end_alone(self) -> None:
        """The thread does not wait any more."""
        self._abandoned = True
        if self._coroutine is None:
            self._ended()
            return
        if not self._completes:
            self.cancel()
        self.begin()  # an exception in the thread may have come before `_home.begin`, or in it

    def _ended(self) -> None:
        """It has ended after its thread stopped to wait."""
        self._reuse_wait()
        told, self._told = self._told, None
        for context, listener, event in told or ():
            self._home.listeners.put(context, listener, event)
        if self._undo is not None and self._error is None and self._result is not None:
            task = own_task(quietly(self._undo(self._result)), "asynclock give back", _giving_back.discard)
            _giving_back.add(task)
        self._result = self._error = None

    def _step(self, error: BaseException | None = None) -> None:
        coroutine, self._fut_waiter = self._coroutine, None
        if coroutine is None:
            return
        if self._must_cancel:
            self._must_cancel = False
            error = error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError()
        ended = False
        _enter_task(self._loop, self)  # type: ignore[arg-type]  # a task in the sense of the module
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            self._result, ended = stop.value, True
        except BaseException as raised:  # also a KeyboardInterrupt of a listener: the caller gets it
            self._error, ended = raised, True
        else:
            self._wait_for(awaited)
        finally:
            _leave_task(self._loop, self)  # type: ignore[arg-type]
            error = None
        if ended:  # nothing here refers to the result any more when the thread goes on: it may drop it
            self._finish()

    def _wait_for(self, awaited: Any) -> None:
        if awaited is None:  # asyncio.sleep(0)
            self._loop.call_soon(self._step, context=self.context)
            return
        awaited._asyncio_future_blocking = False  # noqa: SLF001 - a task does this, also one of third parties
        awaited.add_done_callback(self._wake, context=self.context)
        self._fut_waiter = awaited
        if self._must_cancel and awaited.cancel():
            self._must_cancel = False

    def _wake(self, awaited: asyncio.Future[Any]) -> None:
        try:
            awaited.result()
        except BaseException as error:
            self._step(error)
        else:
            self._step()

    def _finish(self) -> None:
        """Let its thread go on. At the exit of the interpreter that is a daemon, which ends where it waits: the error
        of a client that was closed would be printed, for nobody."""
        self._coroutine = None
        if self._abandoned:
            self._ended()
        elif not self._home.exits:
            self._over = True
            self._wait.wake()

    # -- what asyncio and anyio ask of a task --------------------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def get_coro(self) -> Coroutine[Any, Any, _T] | None:
        return self._coroutine

    def get_name(self) -> str:
        return self._thread.name

    def done(self) -> bool:
        """Whether the thread has ended, which is the owner."""
        return not self._thread.is_alive()

    def cancel(self, msg: object = None) -> bool:
        del msg
        if self._coroutine is None:
            return False
        self._cancels += 1
        if self._fut_waiter is None or not self._fut_waiter.cancel():
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels = max(0, self._cancels - 1)
        if not self._cancels:
            self._must_cancel = False
        return self._cancels


async def quietly(work: Coroutine[Any, Any, object]) -> object:
    try:
        return await work
    except Exception as error:  # a lease that is lost meanwhile; nobody waits to be told
        log.debug("asynclock: what a thread left behind could not be given back", exc_info=error)
        return None
