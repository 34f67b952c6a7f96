"""A store whose transactions wait while a test wants that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from asynclock import Redlock
from asynclock.rules.model import Op, Verb
from asynclock.stores.transactional import Step
from tests.support.fake_clock import FakeClock
from tests.support.still_clock import turns
from tests.support.user_store import DictStore
from tests.support.waiters import LIMIT, LONG


class Gated(DictStore):
    """Its transactions wait while its gate is shut: one at a time, of each client. It notes the ops that begin."""

    limits_transactions = True  # they wait for as long as a test wants

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.begun: list[tuple[Verb, str]] = []
        self.error: Exception | None = None
        self._gate = asyncio.Event()
        self._gate.set()

    def decide(self, prefix: str, op: Op, answer: Callable[..., object]) -> Any:
        self.begun.append((op.verb, op.name))
        return super().decide(prefix, op, answer)

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        await self._gate.wait()
        await super().transact(keys, step)

    def listen(self, tag: str, receive: Any) -> None:
        if self.error is not None:
            raise self.error
        super().listen(tag, receive)

    @contextmanager
    def slow(self) -> Iterator[None]:
        """The gate is shut."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    @asynccontextmanager
    async def busy(self, client: Redlock) -> AsyncIterator[None]:
        """The gate is shut, and another transaction of that client waits before it."""
        with self.slow():
            looking = asyncio.create_task(client.inspect("another"))
            await turns()
            self.begun.clear()
            yield
        await asyncio.wait({looking})


def patient(store: Gated, **options: Any) -> Redlock:
    return Redlock(store, **{"node_timeout": LIMIT, "lease": LONG, "max_lease": LONG, **options})
