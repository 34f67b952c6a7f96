"""The running asyncio event loop, or a clear error where there is none; how asyncio knows coroutine functions; and the
context of what the library does by itself.

asyncio runs a task, a timer and the reader of a connection in the context of the code that made it. This is often the
request that used the client first. Its request id would be in the log lines about all later requests, and the objects
in its context would live as long as the client. So what outlives a call begins in an empty context.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Coroutine

_F = TypeVar("_F", bound="Callable[..., Any]")
_T = TypeVar("_T")

AGAIN = 0.25
"""Seconds after which work in the background begins again if the program cancels all tasks of its loop, as after
Ctrl-C, and goes on. Not at once: the program may cancel tasks until none is left."""


def no_loop() -> ConfigError:
    """For a caller that caught asyncio's RuntimeError: on hot paths a `try` costs less than `running_loop`."""
    return ConfigError(
        "asynclock needs a running asyncio event loop, and there is none: call it from a coroutine that asyncio runs "
        "(asyncio.run, or anyio.run with the asyncio backend; trio is not supported)"
    )


def running_loop() -> asyncio.AbstractEventLoop:
    """The running event loop. Raises ConfigError where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise no_loop() from None


def running_task() -> asyncio.Task[Any] | None:
    """The running task; None where there is none, as in a callback or in a thread without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def start_thread(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> None:
    """Start the thread that will run this loop. Raises RuntimeError if the system gives no thread; then the loop is
    closed."""
    try:
        Context().run(thread.start)  # a thread of Python 3.14 may inherit the context of its starter
    except RuntimeError:
        loop.close()
        raise


def coroutine_function(function: _F) -> _F:
    """Mark a plain function that returns a coroutine, as `asyncio.iscoroutinefunction` and autospec mocks read it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined] # noqa: SLF001
    return function


def own_task(
    work: Coroutine[Any, Any, _T], name: str | None = None, ended: Callable[[asyncio.Task[_T]], object] | None = None
) -> asyncio.Task[_T]:
    """A task of the library, in a context of its own. `ended` is called at its end."""

    def begin() -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        if ended is not None:
            task.add_done_callback(ended)
        return task

    # Not `create_task(context=)`, which a task factory of the program may not know.
    return Context().run(begin)


def retrieve(done: asyncio.Future[Any]) -> None:
    """For `add_done_callback`: read its error, else asyncio logs one that no caller has waited for."""
    if not done.cancelled():
        done.exception()
