"""Rules 2 and 3 of `node.py`: one timer for all commands of a node. It fails those that are overdue, and drops the
connection to a silent server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from asynclock._clock import LATE
from asynclock.stores.redis.handlers import patience

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.redis.connection import Connection, Owner

_READING = 0.001
"""Seconds until it looks again where data has arrived that is not read yet."""

_LEAST = 0.01
"""Seconds between two looks, at least: under load many commands are overdue one after the other."""


class Deadlines:
    """The timer of one node. `connection` returns its connection."""

    def __init__(self, node: Owner, connection: Callable[[], Connection | None]) -> None:
        self.next = math.inf  # when the timer is due; math.inf: there is none
        self._node = node
        self._connection = connection
        self._clock = node.clock
        self._timer: Any = None
        self._second_look = False

    def arm(self, when: float) -> None:
        """Look at that time."""
        self.cancel()
        self.next = when
        self._timer = self._clock.call_at(when, self._due)

    def cancel(self) -> None:
        """The node closes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.next = None, math.inf

    def _due(self) -> None:
        due, self._timer, self.next = self.next, None, math.inf
        if (connection := self._connection()) is None:
            return
        overdue = connection.next_overdue()
        if not connection.waiting:
            return
        now, limit = self._clock.now(), connection.time_limit
        late, silent = now - due, now - connection.moved_at >= patience(limit)
        blocked = late > LATE and not self._second_look
        if blocked or ((silent or overdue <= now) and connection.is_behind):
            self._second_look |= blocked  # first send what the blocked loop has not sent, and read what has come
            self.arm(now + (min(late, limit) if blocked else _READING))
            return
        self._second_look = False
        if silent:
            why = TimeoutError(f"{self._node.label} has been silent for {now - connection.moved_at:.3g} s")
            self._node.lost(connection, why)
            return
        try:
            connection.fail_overdue(now)
        finally:  # a handler may raise an exception
            again = max(min(connection.next_overdue(), connection.moved_at + patience(limit)), now + _LEAST)
            if self._connection() is connection and again < self.next:  # a handler may arm it
                self.arm(again)
