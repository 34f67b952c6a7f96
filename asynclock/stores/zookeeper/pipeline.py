"""Between an event loop and the thread of kazoo: requests in one direction, answers and events in the other.

Neither side blocks the other one. The thread only puts into an inbox, and never calls into kazoo: that may wait for the
thread itself. Few requests are under way, and the others wait here, where the client may still drop them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kazoo.exceptions import ConnectionLoss

from asynclock.stores.backlog import SLICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST = 100
"""Requests under way: more do not make a server faster, and only add to the wait of those that are sent later."""


_Item = TypeVar("_Item")


def for_each(
    act: Callable[[_Item], object], items: Sequence[_Item], then: Callable[[], object] | None = None, *, begin: int = 0
) -> None:
    """Some of them in each turn of the loop, and `then` after the last one."""
    end = begin + SLICE
    for item in items[begin:end]:
        act(item)
    if end < len(items):
        asyncio.get_running_loop().call_soon(partial(for_each, act, items, then, begin=end))
    elif then is not None:
        then()


class Inbox:
    """What the thread has for the loop, in order, some of it in each turn: when many nodes are deleted at once, many
    watches fire. `abandoned` is called in the thread if the loop is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abandoned: Callable[[], object]) -> None:
        self._loop = loop
        self._abandoned = abandoned
        self._items: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waking = False

    def put(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it in the loop. From any thread. Many calls wake the loop once."""
        self._items.append((callback, args))
        if self._waking:  # it is set back before the loop takes anything out
            return
        self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            self._waking = False
            self._abandoned()

    def _empty(self) -> None:
        self._waking = False
        for _ in range(min(len(self._items), SLICE)):
            callback, args = self._items.popleft()
            self._loop.call_soon(callback, *args)
        if self._items and not self._waking:
            self._waking = True
            self._loop.call_soon(self._empty)  # behind those


class Requests:
    """Of one connection. `send` gives a request to kazoo, with the object that gets its answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, send: Callable[[Any, Answer], object]) -> None:
        self._loop = loop
        self._inbox = inbox
        self._send = send
        self._under_way = 0
        self._waiting: deque[tuple[Any, asyncio.Future[Any], Callable[[], object] | None]] = deque()

    def ask(self, request: Any, leaves: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        """Send it, in the order of the calls. Its answer, or an exception of kazoo. `leaves` is called when kazoo gets
        it, perhaps in this call; it is not if the connection is lost before."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._under_way < MOST:
            self._begin(request, future, leaves)
        else:
            self._waiting.append((request, future, leaves))
        return future

    def fail(self) -> None:
        """The connection is lost: those that wait fail, as kazoo fails those that are under way."""
        waiting, self._waiting = self._waiting, deque()
        for_each(_fail, [future for _, future, _ in waiting])

    def _begin(self, request: Any, future: asyncio.Future[Any], leaves: Callable[[], object] | None) -> None:
        self._under_way += 1
        if leaves is not None:
            leaves()
        answer = Answer(partial(self._inbox.put, self._end, future))
        try:
            self._send(request, answer)
        except Exception as error:  # else its place would be taken for ever, and its op would have no answer
            answer.set_exception(error)

    def _end(self, future: asyncio.Future[Any], answer: Answer) -> None:
        """kazoo may answer twice: only the first answer ends a request."""
        if answer.taken:
            return
        answer.taken = True
        self._under_way -= 1
        if not future.done():
            if answer.error is None:
                future.set_result(answer.value)
            else:
                future.set_exception(answer.error)
        if isinstance(answer.error, ConnectionLoss):  # kazoo would keep the next ones until it is connected again
            self.fail()
        while self._waiting and self._under_way < MOST:
            request, next_future, leaves = self._waiting.popleft()
            if not next_future.done():  # else its task was cancelled
                self._begin(request, next_future, leaves)


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(ConnectionLoss())


class Answer:
    """What kazoo sets with the answer to a request, from its thread; or at once, if it does not take the request. It
    does as kazoo's own AsyncResult does, without a lock and a queue for each request."""

    __slots__ = ("_arrived", "error", "taken", "value")

    def __init__(self, arrived: Callable[[Answer], object]) -> None:
        self._arrived = arrived
        self.value: Any = None
        self.error: Exception | None = None
        self.taken = False

    def set(self, value: Any = None) -> None:
        """The answer."""
        self.value = value
        self._arrived(self)

    def set_exception(self, error: Exception) -> None:
        """The request failed."""
        self.error = error
        self._arrived(self)
