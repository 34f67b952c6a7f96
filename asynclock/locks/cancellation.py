"""The body of `async with`, and its cancellation on a loss. The counting of cancels is that of asyncio.timeout.

The block takes back each cancel that it made, and turns the CancelledError of that cancel into LockLost. A cancel from
outside takes precedence, whether it came before or after: then the task's count of cancels stays above its value at the
entry.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock._loop import running_task

if TYPE_CHECKING:
    from types import CodeType
    from typing import TypeAlias

    from asynclock._errors import Reason

    Caller: TypeAlias = tuple[int, CodeType, int]
    """A frame that calls a method: its id, its code, and the index of the instruction that calls."""


class Block:
    """Made when a body is entered, and called when the tenure is lost. It refers to the task only, so that a Lease that
    the program has dropped can be collected."""

    __slots__ = ("_cancelling", "_cancels", "caller", "cancelled", "task")

    def __init__(self, task: asyncio.Task[Any] | None, cancels: bool, caller: Caller | None) -> None:
        self.task = task
        self.caller = caller  # of `Lock.__aenter__`; None: the block is that of a Lease
        self._cancels = cancels  # the option cancel_on_lost
        self._cancelling = task.cancelling() if task else 0
        self.cancelled = False  # by this block, and not taken back yet

    def __call__(self, loss: Reason) -> None:
        """Cancel the body, unless its own task is the caller: that task gets an exception."""
        del loss
        if not self._cancels:
            return
        if self.task is not None and not self.task.done() and self.task is not running_task():
            self.cancelled = True
            self.task.cancel()

    async def leave(
        self, e: BaseException | None, cancel: asyncio.CancelledError | None
    ) -> tuple[bool, asyncio.CancelledError | None]:
        """Take the block's own cancel back, if there was one. `cancel`: a CancelledError that arrived after the body.
        Returns two values: whether the block's own cancel alone caused `e`; and the CancelledError of an outside cancel
        that came after the body, or None. The caller raises it at the end."""
        task = self.task
        if not self.cancelled or task is None or task is not asyncio.current_task():
            return False, cancel
        self.cancelled = False
        # If the body starts an eager task, and that task finds the loss, the body is cancelled while it runs. If it
        # then ends without an await, the CancelledError is still to come, and `uncancel` drops it only since Python
        # 3.13. This await raises it here, so that no await after the block does.
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            cancel = error
        outside = task.uncancel() > self._cancelling
        if isinstance(e, asyncio.CancelledError):
            return not outside, None
        return False, cancel if outside else None
