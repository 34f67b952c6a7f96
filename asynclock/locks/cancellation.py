"""The task inside `async with`, and its cancellation: the arithmetic of asyncio.timeout, for a loss.

What we cancelled we uncancel, and the CancelledError that came of it is ours to turn into LockLost. A cancel from
outside, before or after ours, wins: then the task's count of cancels stays above what it was at the entry.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


class Block:
    """Made when a body is entered."""

    __slots__ = ("_cancelling", "cancelled", "task")

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.task = task
        self._cancelling = task.cancelling() if task else 0
        self.cancelled = False  # by us, and not taken back yet

    def interrupt(self) -> None:
        """Cancel the body, unless this is its own task calling, which is told in another way."""
        if self.task is not None and not self.task.done() and self.task is not _running_task():
            self.cancelled = True
            self.task.cancel()

    async def leave(self, e: BaseException | None) -> bool:
        """Take our cancel back, if there was one. True: `e` came of it alone."""
        task = self.task
        if not self.cancelled or task is None or task is not asyncio.current_task():
            return False
        self.cancelled = False
        if e is None:
            # The body ended in the very turn in which it was cancelled: on 3.11 and 3.12 the CancelledError is still
            # to come, and must not come after the block.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if task.uncancel() > self._cancelling:
                task.cancel()  # one from outside came with it: it goes on at the next await
                task.uncancel()
            return False
        return task.uncancel() <= self._cancelling and isinstance(e, asyncio.CancelledError)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
