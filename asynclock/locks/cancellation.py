"""The body of `async with`, and its cancellation on a loss. The counting of cancels is that of asyncio.timeout.

The block takes back each cancel that it made, and turns the CancelledError of that cancel into LockLost. A cancel from
outside takes precedence, whether it came before or after: then the task's count of cancels stays above its value at the
entry.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynclock.acquire.tenure import Loss


class Block:
    """Made when a body is entered, and called when the tenure is lost. It refers to the task only, so that a Lease that
    the program has dropped can be collected."""

    __slots__ = ("_cancelling", "_cancels", "cancelled", "task")

    def __init__(self, task: asyncio.Task[Any] | None, cancels: bool) -> None:
        self.task = task
        self._cancels = cancels  # the option cancel_on_lost
        self._cancelling = task.cancelling() if task else 0
        self.cancelled = False  # by this block, and not taken back yet

    def __call__(self, loss: Loss) -> None:
        """Cancel the body, unless its own task is the caller: that task gets an exception."""
        del loss
        if not self._cancels:
            return
        if self.task is not None and not self.task.done() and self.task is not _running_task():
            self.cancelled = True
            self.task.cancel()

    async def leave(self, e: BaseException | None) -> bool:
        """Take the block's own cancel back, if there was one. True: `e` is the result of that cancel alone."""
        task = self.task
        if not self.cancelled or task is None or task is not asyncio.current_task():
            return False
        self.cancelled = False
        if e is None:
            # The body ended in the turn of the loop in which it was cancelled. On 3.11 and 3.12 the next await raises
            # the CancelledError. This await takes it, so that no await after the block raises it.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if task.uncancel() > self._cancelling:
                task.cancel()  # a cancel from outside came with it: the next await raises it
                task.uncancel()
            return False
        return task.uncancel() <= self._cancelling and isinstance(e, asyncio.CancelledError)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
