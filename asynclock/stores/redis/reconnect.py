"""The pauses between attempts to connect."""

from __future__ import annotations

import asyncio
import math
import random

_PAUSES = (0.05, 2.0)  # seconds: the first and the longest pause
_HOPELESS = 5.0  # seconds between attempts when only the user can solve the problem


class Backoff:
    """The pauses of one node: each is twice as long as the one before, with jitter."""

    def __init__(self) -> None:
        self._pause = _PAUSES[0]
        self._rebuffed_at = -math.inf
        self._rebuff = 0.0

    def begin(self, now: float) -> float:
        """Seconds before the first attempt: 0, unless a server that was reached proved to be a replica just now."""
        self._pause = _PAUSES[0]
        return self._rebuff if now - self._rebuffed_at < self._rebuff else 0.0

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
