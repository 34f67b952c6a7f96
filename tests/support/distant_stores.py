"""Stores at a distance: each request and reply takes its time on the clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from typing import Any

from asynclock import Redlock
from asynclock.rules.model import Op
from asynclock.stores.port import Grant, NodeConfig, Notice, Refused, ReplyHandler, Undone, WrongKind
from asynclock.stores.transactional import TransactionalNode
from tests.support.fake_clock import FakeClock
from tests.support.still_clock import Memory, Still, turns


class FarNode(TransactionalNode):
    """Each request arrives later, with its state at the time of sending; its reply is later by as much."""

    def __init__(self, store: Far, config: NodeConfig) -> None:
        super().__init__(store, config)
        self._far = store

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if self._far.silent:
            self._far.unanswered.append(
                lambda: handler.fail(self._index, ConnectionError("it disconnected"), maybe=True)
            )
            return
        sent = copy(op)
        sent.queueing = replace(op.queueing)
        self._later(lambda: self._arrives(sent, handler))

    def _later(self, what: Callable[[], object]) -> None:
        self._far.later(what, self._listener.tag)

    def _arrives(self, op: Op, handler: ReplyHandler) -> None:
        def answer(reply: Grant | Refused | Undone) -> None:
            self._later(lambda: handler.answer(self._index, reply))

        try:
            self._far.decide(self._prefix, op, answer)
        except WrongKind as error:
            wrong = error
            self._later(lambda: handler.fail(self._index, wrong, maybe=False))


class Far(Memory):
    """A store each way to which takes `way` seconds, or the time in `ways` for the client's tag. While it is `silent`
    it neither answers nor fails, like a busy connection on which other commands are answered."""

    def __init__(self, clock: FakeClock, way: float) -> None:
        super().__init__(clock)
        self.way = way
        self.ways: dict[str, float] = {}
        self.silent = False
        self.unanswered: list[Callable[[], object]] = []

    def open(self, config: NodeConfig) -> FarNode:
        return FarNode(self, config)

    def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
        super().listen(tag, lambda notice: self.later(lambda: receive(notice), tag))

    def disconnect(self) -> None:
        """Requests without a reply fail now."""
        unanswered, self.unanswered = self.unanswered, []
        for fail in unanswered:
            fail()

    def later(self, what: Callable[[], object], tag: str) -> None:
        self._time.call_at(self._time.now() + self.ways.get(tag, self.way), what)


class Beyond(Still):
    """Such stores, and a name in them."""

    def __init__(self, nodes: int, name: str, way: float, early: float = 0.0) -> None:
        super().__init__(nodes, name, early)
        self.far = [Far(self.clock, way) for _ in range(nodes)]
        self.stores = list(self.far)

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[Redlock]:
        """A client, which gets the time that it needs to close."""
        client = self.client(**options)
        try:
            yield client
        finally:
            self.set_answering(True)
            self.disconnect()
            await self.finish(asyncio.create_task(client.aclose()))

    def set_answering(self, answers: bool) -> None:
        """Whether requests are answered from now on."""
        for store in self.far:
            store.silent = not answers

    def disconnect(self) -> None:
        """Requests without a reply fail now, at all stores."""
        for store in self.far:
            store.disconnect()

    async def pass_time(self, seconds: float, step: float = 0.005) -> None:
        """Let time pass in small steps, with turns for the tasks that wake."""
        end = self.clock.now() + seconds
        while self.clock.now() < end - 1e-9:
            self.clock.advance(min(step, end - self.clock.now()))
            await turns(5)

    async def finish(self, *tasks: asyncio.Task[Any], within: float = 5.0) -> None:
        """Let time pass until all of them are done; an error if it takes longer."""
        end = self.clock.now() + within
        while not all(task.done() for task in tasks):
            assert self.clock.now() < end, "it takes too long"
            await self.pass_time(0.005)

    async def lease(self, client: Redlock, **options: Any) -> Any:
        """The lease of the name, which must be free."""
        task = asyncio.create_task(client(self.name, **options).acquire(timeout=None))
        await self.finish(task)
        return task.result()
