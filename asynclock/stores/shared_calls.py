"""Calls that block and cannot be cancelled, as a lookup of a host name, in threads of their own.

In the default executor of the event loop they would take the threads that the program needs for `asyncio.to_thread`,
and `asyncio.run` would wait for them. So

- each call has a daemon thread, which does not hold up the end of the program;
- there is one call per key at a time. All that want its result wait for the same one, in any thread and event loop. A
  caller that is cancelled, or has waited for long enough, leaves the call to the others;
- a forked child starts its own calls, because it has no copy of the threads of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from asynclock._clock import wait_ended, wake

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Call(Future[T], Generic[T]):
    """A call that blocks, and its result."""

    thread_name = "asynclock"

    purpose = "a call"

    def work(self) -> T:
        """Runs in a thread of its own."""
        raise NotImplementedError


C = TypeVar("C", bound=Call)  # type: ignore[type-arg]  # of any result


class SharedCalls(Generic[C]):
    """Those of this process that are under way, by a key."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._guard = threading.Lock()  # the one of the parent may be held by a thread that the child does not have
        self._running: dict[str, C] = {}

    def get(self, key: str) -> C | None:
        return self._running.get(key)

    def start(self, key: str, make: Callable[[], C]) -> C:
        """The call that is under way, or a new one. Without a thread it has failed already, with a ConnectionError."""
        with self._guard:
            call = self._running.get(key)
            if call is None:
                call = make()
                try:
                    threading.Thread(target=self._run, args=(key, call), name=call.thread_name, daemon=True).start()
                except RuntimeError as error:
                    call.set_exception(ConnectionError(f"no thread for {call.purpose}: {error}"))
                    return call
                self._running[key] = call
            return call

    def _run(self, key: str, call: C) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(call.set_result, call.work())
        except Exception as error:  # it is raised to those that wait
            settle = partial(call.set_exception, error)
        with self._guard:
            self._running.pop(key, None)  # absent if an interrupt hit `start`
        settle()


async def wait_for_call(call: Call[T], limit: float | None = None) -> None:
    """Wait until it has ended, for `limit` seconds at most."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake, ended)

    call.add_done_callback(tell)
    if limit is None:
        await ended
    else:
        await wait_ended(ended, limit)


def result_of(call: Call[T]) -> T:
    """Raises its error, or TimeoutError for one that has not ended. Each caller has an exception of its own: in one
    that several tasks raise, their tracebacks would grow without end."""
    error = call.exception(0.0)
    if error is not None:
        raise copy.copy(error) from error
    return call.result()
