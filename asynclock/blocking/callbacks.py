"""Callbacks: functions of the program that the library calls in threads of its own, so that they may block."""

from __future__ import annotations

import logging
import threading
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Work: TypeAlias = tuple[Context, Callable[..., object], tuple[Any, ...]]

log = logging.getLogger("asynclock")

_MOST = 10_000
"""So many calls wait, at most. A function that never returns would otherwise take all memory."""


class Callbacks:
    """Calls of functions, in up to `most` threads. With one thread they come in the order of `put`. The background loop
    alone calls `put`."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        # A garbage collector may run code of the program between any two steps, so nothing here takes a lock.
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._threads = 0
        self._full = False
        self.exits = False
        """The process exits: since Python 3.12 no thread can be started then. `call_rest` makes the calls."""

    def put(self, context: Context, function: Callable[..., object], *args: Any) -> None:
        """Call it soon, in that context."""
        if self._work.qsize() >= _MOST:
            if not self._full:
                self._full = True
                log.error("asynclock: %d calls wait for a thread %r: further ones are left out", _MOST, self._name)
            return
        self._full = False
        self._work.put((context, function, args))
        if self._threads < self._most and not self.exits:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                Context().run(thread.start)
            except RuntimeError as error:  # no more threads, or the interpreter exits
                log.warning("asynclock: no thread %r can be started: %s", self._name, error)
            else:
                self._threads += 1

    def call_rest(self) -> None:
        """Make the calls that no thread has begun."""
        while True:
            try:
                work = self._work.get_nowait()
            except Empty:
                return
            self._call(*work)

    def _run(self) -> None:
        while True:
            self._call(*self._work.get())

    def _call(self, context: Context, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            context.run(function, *args)
        except BaseException:  # SystemExit, too: it would end the thread, and the next calls would wait
            log.exception("asynclock: a call of %r in a thread %r raised an exception", function, self._name)
