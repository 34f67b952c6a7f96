"""The pauses between attempts to connect."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock

_PAUSES = (0.05, 2.0)  # seconds: the first and the longest pause
_HOPELESS = 5.0  # seconds between attempts when only the user can solve the problem

LASTING = 1.0
"""Seconds after which a connection counts as lasting: proxies close idle ones after a second or more."""

_STORM = 4  # connections in a row that did not last, after which the node is down


class Backoff:
    """The pauses of one node: each is twice as long as the one before, with jitter, until a connection has lasted."""

    def __init__(self) -> None:
        self._pause = _PAUSES[0]
        self._rebuffed_at = -math.inf
        self._rebuff = 0.0
        self._connected_at = -math.inf
        self._cut_short = 0  # connections in a row that did not last
        self._lasting: Any = None  # the timer of `when_lasting`

    def connected(self, now: float) -> None:
        """An attempt to connect has succeeded."""
        self._connected_at = now

    @property
    def in_storm(self) -> bool:
        """Whether the server accepts each connection, and closes it soon."""
        return self._cut_short >= _STORM

    def when_lasting(self, clock: Clock, call: Callable[[], object]) -> None:
        """Call it now; in a storm, once the new connection has had the time to last."""
        self.stop()
        if self.in_storm:
            self._lasting = clock.call_at(clock.now() + LASTING, call)
        else:
            call()

    def stop(self) -> None:
        """Another connection was made, or the node closes: what waits until the last one has lasted is not called."""
        if self._lasting is not None:
            self._lasting.cancel()
            self._lasting = None

    def begin(self, now: float) -> float:
        """Seconds before the first attempt after a loss: 0, unless the server that was reached proved to be a replica
        just now, or the last connections did not last."""
        self._cut_short = self._cut_short + 1 if now - self._connected_at < LASTING else 0
        if not self._cut_short:
            self._pause = _PAUSES[0]
        rebuff = self._rebuff if now - self._rebuffed_at < self._rebuff else 0.0
        return max(rebuff, self.failed(hopeless=False)) if self._cut_short > 1 else rebuff

    def reset(self) -> None:
        """The next attempts go to another server."""
        self._pause, self._connected_at, self._cut_short = _PAUSES[0], -math.inf, 0

    def failed(self, hopeless: bool) -> float:
        """Seconds before the next attempt."""
        pause = _HOPELESS if hopeless else self._pause
        self._pause = min(2 * self._pause, _PAUSES[1])
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter

    async def pause(self, *, hopeless: bool) -> None:
        """Wait before the next attempt."""
        await pause(self.failed(hopeless))

    def rebuffed(self, now: float) -> None:
        """The server that answers is the wrong one (a replica). The first time the next attempt follows almost at once;
        after that the pause doubles each time."""
        lately = now - self._rebuffed_at < 4 * _PAUSES[1]
        self._rebuff = min(2 * self._rebuff, _PAUSES[1]) if lately else _PAUSES[0] / 2
        self._rebuffed_at = now


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled, and the cancel was lost: redis-py sends with
    asyncio.wait_for, which on Python 3.11 loses a cancel that comes together with its result or its error. Then
    aclose() or asyncio.run would wait for this task for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def pause(seconds: float) -> None:
    """Wait before the next attempt. Raises CancelledError at once if the task was cancelled during the last one."""
    raise_if_cancelled()
    await asyncio.sleep(seconds)
