"""ThreadWait: how a thread waits for its call, and how the background loop wakes it.

On Linux it is an eventfd. The write gives the GIL away, so the thread that wakes gets it at once. A `threading.Lock` is
released with the GIL held: the thread wakes, finds the GIL taken, and sleeps a second time (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from typing import Protocol

HAS_EVENTFD = hasattr(os, "eventfd") and hasattr(select, "epoll")
"""Linux, where nobody has patched `select`."""

_MOST = 32
"""So many of them use an eventfd, and two file descriptors each. Further threads that wait use locks."""


class ThreadWait(Protocol):
    """`wake` is called at most once. `wait` may return early: its caller looks whether what it waits for is there."""

    def wait(self, seconds: float) -> None:
        """Return after `wake`, or after so many seconds."""

    def wake(self) -> None:
        """Let the thread go on."""

    def reuse(self) -> None:
        """Nobody waits here any more: another call may have it."""


class _LockWait:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.wake = self._lock.release

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)

    def reuse(self) -> None:
        """It is cheaper to make a new one."""


class _EventWait:
    def __init__(self) -> None:
        self._epoll = select.epoll()  # first: the collector closes it if there are no more descriptors
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._epoll.register(self._event, select.EPOLLIN | select.EPOLLET)  # by edges: it is never read
        except BaseException:
            os.close(self._event)
            raise

    def wait(self, seconds: float) -> None:
        try:
            self._epoll.poll(seconds, 1)
        except (OSError, ValueError):
            if self._event >= 0:  # of a signal handler; else a child was forked in the middle of this, and closed it
                raise

    def wake(self) -> None:
        try:  # noqa: SIM105 - `suppress` takes longer than all the rest in Python
            os.eventfd_write(self._event, 1)
        except OSError:  # the program has closed all descriptors: the thread looks up by itself
            pass

    def reuse(self) -> None:
        if self._event >= 0:
            _free.append(self)

    def close(self) -> None:
        event, self._event = self._event, -1
        with contextlib.suppress(OSError):  # the same
            self._epoll.close()
            os.close(event)


# Any thread may use these two between any two steps of another one. Their operations are atomic.
_free: deque[_EventWait] = deque()
_all: deque[_EventWait] = deque()


def thread_wait() -> ThreadWait:
    """One for the next call of this thread."""
    try:
        return _free.pop()
    except IndexError:
        return _new()


def _new() -> ThreadWait:
    if HAS_EVENTFD and len(_all) < _MOST:
        with contextlib.suppress(OSError):  # there are no more file descriptors
            wait = _EventWait()
            _all.append(wait)
            return wait
    return _LockWait()


def close_inherited() -> None:
    """In a forked child: those of its parent would wake the threads of the parent."""
    _free.clear()
    while _all:
        _all.pop().close()
