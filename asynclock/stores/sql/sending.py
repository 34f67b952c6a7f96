"""The statements of one event loop, of one op or of several, that are transactions of their own (`single.py`,
`mysql_single.py`).

An op costs the client no task: its statement goes to a connection that is idle, and the answer comes back in a callback
(`Pool.begin`). Only where there is no such connection, or after an error, a task sends it. An op that leaves alone, as
the one before did, leaves at once. Others wait for those of the same turn of the event loop, or for a statement under
way, and leave together.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from asynclock._loop import own_task
from asynclock.stores.jobs import Begun
from asynclock.stores.sql.limits import CLOSING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from asynclock.stores.jobs import Left
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.pool import Pool

_STATEMENTS = 2
"""Statements, or packets, under way at the same time. The other connections are left for transactions."""


_KNOWN = 4096
"""Names that are remembered, at most."""


class Single(NamedTuple):
    """The values of an op."""

    name: str  # the resource_name
    owner: str
    info: str  # acquire: the node_info; of `serving.py`: the name of the lock
    number: int  # acquire: the client's clock in us; else the token
    lease: float
    memory: float


class Asked(Begun):
    """An op that waits for its statement, or for the answer. `told` is called with its fence (None: the row is not
    plain, or not free; nothing was done) or with its error, and says what is left to do. An op of `serving.py` gets a
    `Served` in place of the fence."""

    __slots__ = ("_told", "group", "values")

    def __init__(self, group: str, values: Single, told: Callable[[Any, Exception | None], Left]) -> None:
        super().__init__()
        self.group = group
        self.values = values
        self._told = told

    def answer(self, found: Any, error: Exception | None = None) -> None:
        if not self.is_over:
            self.end(self._told(found, error))


class Known:
    """Names that have a row, as far as is known: an acquire of such a name is an UPDATE."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def group(self, group: str, name: str) -> str:
        """The group of the statement for an op. The name is forgotten until it succeeds: the row may be gone."""
        if name in self._names and group.startswith("acquire"):
            del self._names[name]
            return f"re{group}"
        return group

    def add(self, name: str) -> None:
        """An op of this name has found its row, or has made it."""
        self._names[name] = None
        if len(self._names) > _KNOWN:
            del self._names[next(iter(self._names))]


_Asked = TypeVar("_Asked", bound=Asked)


class Sending(ABC, Generic[_Asked]):
    """See the module."""

    def __init__(self, label: str, pool: Pool) -> None:
        self._label = label
        self._pool = pool
        self._under_way = 0
        self._alone_before = False  # the last statement was that of one op, and no op waited at its end
        self._begins = False  # more begin soon
        self._workers: set[asyncio.Task[None]] = set()

    @abstractmethod
    def put(self, asked: _Asked) -> None:
        """Let an op wait."""

    @abstractmethod
    def take(self) -> Sequence[_Asked]:
        """Those of the next statement, without those that are over; () if none waits."""

    @abstractmethod
    def send(self, taken: Sequence[_Asked], line: Line) -> Coroutine[Any, Any, Callable[[], object]]:
        """Send their statement, and return what gives them their answers. Raises an error that concerns all of them,
        after which the connection is of no use."""

    @abstractmethod
    async def send_in_task(self, taken: Sequence[_Asked], error: Exception | None) -> None:
        """The same with a connection of its own, until each has its answer. `error`: that of the first attempt."""

    @abstractmethod
    def add(self, group: str, values: Single, told: Callable[[Any, Exception | None], Left]) -> Asked:
        """Carry an op out; see `Asked`."""

    def begin(self, asked: _Asked) -> None:
        """Send an op in its turn."""
        if self._alone_before and not self._under_way and not self._begins:  # none waits
            self._send((asked,))
            return
        self.put(asked)
        if not self._begins and self._under_way < _STATEMENTS:
            self._begins = True
            asyncio.get_running_loop().call_soon(self._begin, context=Context())

    def _begin(self) -> None:
        self._begins = False
        self._send_more()

    def _send_more(self) -> None:
        while self._under_way < _STATEMENTS and (taken := self.take()):
            self._send(taken)

    def _send(self, taken: Sequence[_Asked]) -> None:
        self._under_way += 1
        if not self._pool.begin(partial(self.send, taken), partial(self._ended, taken)):
            self._send_in_task(taken, None)

    def _ended(self, taken: Sequence[_Asked], settle: Callable[[], object], error: Exception | None) -> None:
        if error is None:
            self._end(taken, settle)
        else:
            self._send_in_task(taken, error)

    def _send_in_task(self, taken: Sequence[_Asked], error: Exception | None) -> None:
        work = self.send_in_task(taken, error)
        self._workers.add(own_task(work, "asynclock sends statements", partial(self._worker_ended, taken)))

    def send_again(self, taken: Sequence[_Asked], error: Exception | None = None) -> None:
        """Of some that have no answer yet, at the end of their statement."""
        self._under_way += 1
        self._send_in_task(taken, error)

    def _worker_ended(self, taken: Sequence[_Asked], worker: asyncio.Task[None]) -> None:
        """The program may have cancelled it, even before its first step."""
        self._workers.discard(worker)
        error = ConnectionError("closed") if worker.cancelled() else worker.exception()
        failed = error if error is None or isinstance(error, Exception) else ConnectionError("closed")
        self._end(taken, lambda: None if failed is None else fail(taken, failed))

    def _end(self, taken: Sequence[_Asked], settle: Callable[[], object]) -> None:
        """What the handlers of the answers send begins afterwards, together."""
        self._under_way -= 1
        before, self._begins = self._begins, True
        try:
            settle()
        finally:
            self._begins = before
            self._send_more()
            self._alone_before = len(taken) == 1 and not self._under_way

    async def aclose(self) -> None:
        while self.take():
            pass
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(set(self._workers), timeout=CLOSING)


def tell(answers: Iterable[tuple[Asked, Any, Exception | None]]) -> None:
    """Give each what was found, or its error."""
    left = deque(answers)
    try:
        while left:
            asked, found, error = left.popleft()
            asked.answer(found, error)
    finally:
        if left:  # a handler has raised an exception
            asyncio.get_running_loop().call_soon(tell, left, context=Context())


def fail(asked: Iterable[Asked], error: Exception) -> None:
    """All have failed."""
    tell((each, None, error) for each in asked)
