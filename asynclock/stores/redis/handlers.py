"""The handlers of the replies that are no votes, and when a command is overdue."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from asynclock.stores.port import is_carried_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynclock.rules.model import Op
    from asynclock.stores.port import Grant, Refused, ReplyHandler, Undone

_BACKLOG = 5.0  # seconds for which a command may wait after its deadline while others are being answered
_SILENCE = 0.5  # seconds for which a server on a busy machine may get no CPU time
_LONG_SILENCE = 5.0  # a server that is silent for so many seconds is down, unless its command has a longer time limit


class CommandReply:
    """The reply to a command that is not part of a ballot, for example to a PING. A task can await it."""

    def __init__(self, sent: float, deadline: float) -> None:
        self.sent = sent
        self.deadline = deadline
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, index: int, reply: Any) -> None:
        del index
        if self._answer.done():
            return
        if isinstance(reply, Exception):
            self._answer.set_exception(reply)
            self._answer.exception()  # retrieved here, because asyncio would log it if no task awaits it
        else:
            self._answer.set_result(reply)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        del maybe
        self.answer(index, error)

    async def answer_of(self) -> Any:
        return await self._answer

    @property
    def ended(self) -> bool:
        """Whether the answer has come, or cannot come any more."""
        return self._answer.done()

    async def wait(self, seconds: float) -> None:
        """Wait for that, for at most so long. A second call goes on with it."""
        await asyncio.wait([self._answer], timeout=seconds)


Ask: TypeAlias = Callable[..., "CommandReply"]
"""Sends a command on one connection, and returns the reply to await."""


class IgnoredCommand(CommandReply):
    """Ignores the reply to a command without an op."""

    def __init__(self, sent: float, deadline: float) -> None:
        self.sent = sent
        self.deadline = deadline

    def answer(self, index: int, reply: Any) -> None: ...


class IgnoredReply:
    """Ignores the reply to an op."""

    def __init__(self, op: Op, sent: float, deadline: float) -> None:
        self.op = op
        self.sent = sent
        self.deadline = deadline

    def answer(self, index: int, reply: Any) -> None: ...

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None: ...


class StandIn:
    """A handler in the place of another one. Subclasses do more with the answer than to pass it on."""

    __slots__ = ("deadline", "handler", "op", "sent")

    def __init__(self, handler: ReplyHandler) -> None:
        self.op: Op = handler.op
        self.sent = handler.sent
        self.deadline = handler.deadline
        self.handler = handler

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        self.handler.answer(index, reply)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        self.handler.fail(index, error, maybe=maybe)

    @property
    def carried_out(self) -> bool:
        return is_carried_out(self.handler)


class Doubtful(StandIn):
    """Of an op that is sent again because its first server does not answer, and may have carried it out."""

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        del maybe
        self.handler.fail(index, error, maybe=True)


def overdue_at(handler: ReplyHandler | CommandReply, moved_at: float) -> float:
    """When a command is overdue (rule 2 of `node.py`), if its connection last received data at `moved_at`. Pure."""
    limit = handler.deadline - handler.sent
    return max(handler.deadline, min(moved_at + limit, handler.deadline + _BACKLOG))


def patience(limit: float) -> float:
    """For how many seconds a server may be silent (rule 3 of `node.py`), if its oldest command has a time limit of
    `limit`. Pure."""
    return max(min(3 * limit, _LONG_SILENCE), limit, _SILENCE)


class UnfailedCommands:
    """The commands of a connection that were not failed yet. A silent server may have thousands of commands, which stay
    in the deque after they have failed. While no data arrives, the times at which they are overdue stay as they are. So
    each of them is looked at once, and not each time when another one is overdue."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int, ReplyHandler | CommandReply]] = []  # a heap: when it is overdue, its place
        self._seen = 0  # so many commands of the deque are, or were, in the heap
        self._moved_at = 0.0
        self._oldest: object = None

    def read(self, waiting: deque[ReplyHandler | CommandReply], moved_at: float) -> None:
        """Read the commands that wait now, on a connection that last received data at `moved_at`."""
        oldest = waiting[0] if waiting else None
        if moved_at != self._moved_at or oldest is not self._oldest or len(waiting) < self._seen:
            self._times, self._seen = [], 0
            self._moved_at, self._oldest = moved_at, oldest
        place = len(waiting)
        for handler in islice(reversed(waiting), place - self._seen):
            place -= 1
            heappush(self._times, (overdue_at(handler, moved_at), place, handler))
        self._seen = len(waiting)

    @property
    def next(self) -> float:
        """When the next one is overdue; math.inf: there is none."""
        return self._times[0][0] if self._times else math.inf

    def take_overdue(self, now: float) -> list[ReplyHandler | CommandReply]:
        """Those that are overdue, which are failed now."""
        found = []
        while self._times and self._times[0][0] <= now:
            found.append(heappop(self._times)[2])
        return found


def call_each(calls: Iterable[Callable[[], object]]) -> None:
    """Call all of them, also after one has raised an exception, as a handler of a signal may do at any point: also
    before the first line of a call, so that one is called a second time. Then raise the first of these exceptions."""
    left, again = deque(calls), False
    failure: BaseException | None = None
    while left:
        try:
            while left:
                left[0]()
                left.popleft()
                again = False
        except BaseException as error:
            failure = failure or error
            if again:
                left.popleft()
            again = not again
    if failure is not None:
        raise failure
