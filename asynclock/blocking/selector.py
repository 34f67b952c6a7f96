"""EventSelector: the selector of the background loop, on Linux.

It begins the calls of threads by itself: an eventfd tells it of them. It also calls the readers of files that can be
read. So what the first step of a call schedules, and what an answer wakes, runs in the same turn of the loop. Of the
polls that would not wait, since callbacks are ready, it makes one in four. Each call of the system gives the GIL away
and has to get it back, and each turn of the loop takes time (docs/decisions.md).
"""

from __future__ import annotations

import os
import select
import selectors
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynclock.blocking.calls import Call

_LEFT_OUT = 3
"""So many polls in a row."""

_AT_ONCE = 64
"""So many files that one poll finds ready. The next poll finds the others."""


class EventSelector(selectors.DefaultSelector):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: deque[Call[Any]] = deque()
        self._left_out = 0
        self._keys = self.get_map()
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))  # that of the class above
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)  # by edges: it is never read

    def begin(self, call: Call[Any]) -> None:
        """Run the first step of a call in the loop. Any thread calls it."""
        self._begun.append(call)
        os.eventfd_write(self._bell, 1)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0 and self._left_out < _LEFT_OUT:
            self._left_out += 1
            return []
        self._left_out = 0
        found = self._epoll.poll(None if timeout is None else max(timeout, 0.0), _AT_ONCE)
        for _ in range(len(self._begun)):  # those that come meanwhile ring again, and timers are due in between
            call = self._begun.popleft()
            call.context.run(call.begin)
        ready = list[tuple[selectors.SelectorKey, int]]()
        for fd, mask in found:  # only now: a call may have closed a file whose number is in the list
            if fd != self._bell and (key := self._keys.get(fd)) is not None:
                reader = key.data[0]
                if mask == select.EPOLLIN and reader is not None and not reader.cancelled():
                    reader._run()  # noqa: SLF001 - what it schedules runs in the same turn of the loop
                    continue
                # An error or a hang-up is both of them, since a read or a write finds it.
                read = selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0
                ready.append((key, (read | selectors.EVENT_WRITE if mask & ~select.EPOLLIN else read) & key.events))
        return ready

    def close(self) -> None:
        """All but the eventfd: a thread that comes late would write to another file of that number."""
        self._epoll.close()
        super().close()
