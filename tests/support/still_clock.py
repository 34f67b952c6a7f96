"""Stores whose clock stands still until a test moves it; and checks for tests of waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from typing import Any

from asynclock import Lease, Redlock
from asynclock.protocol.hold import Hold
from asynclock.rules.model import Op, Verb
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Grant, Refused, Undone
from tests.support.default_keys import keys_of
from tests.support.fake_clock import FakeClock
from tests.support.probes import acquisitions_of, hold_of, local_queues_of, settings_of, tickets_of, waits_for_notice
from tests.support.servers import Server
from tests.support.waiters import LIMIT


async def turns(number: int = 10) -> None:
    """So many turns of the loop."""
    for _ in range(number):
        await asyncio.sleep(0)


def idle(client: Redlock) -> bool:
    """Whether all tasks of this client that want a lock wait for a notice, or in the local queue."""
    found = acquisitions_of(client)
    return bool(found) and all(map(waits_for_notice, found))


def forgotten(client: Redlock) -> bool:
    """Whether the client has no waiter and no ticket."""
    return not (acquisitions_of(client) or tickets_of(client) or local_queues_of(client))


class Memory(MemoryStore):
    """A memory store on a clock that the test moves; notes each op, and its time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.asked: list[tuple[Verb, float]] = []

    def decide(self, key: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]) -> None:
        self.asked.append((op.verb, self._time.now()))
        super().decide(key, op, answer)


class Far(Memory):
    """A memory store whose answers take `rtt` seconds."""

    rtt = 0.0

    def decide(self, key: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]) -> None:
        if self.rtt:
            self._time.call_at(self._time.now() + self.rtt, partial(super().decide, key, op, answer))
        else:
            super().decide(key, op, answer)


class Still:
    """Stores whose clock the test moves, and a name in them."""

    def __init__(self, nodes: int, name: str, early: float = 0.0) -> None:
        self.clock = FakeClock(early=early)
        self.stores = [Memory(self.clock) for _ in range(nodes)]
        self.name = name

    def client(self, **options: Any) -> Redlock:
        if len(self.stores) > 1:
            options.setdefault("node_timeout", 0.05)  # as a client by default: a busy machine does not move this clock
        return Redlock(*self.stores, **options)

    @asynccontextmanager
    async def held(self, **options: Any) -> AsyncIterator[tuple[Redlock, Lease]]:
        """A client that holds the name, and its lease."""
        async with self.client(**options) as client:
            lease = await client(self.name).acquire(timeout=None)
            yield client, lease

    async def until(self, when: float) -> None:
        """Let time pass, a second at a time, with turns for what wakes."""
        while self.clock.now() < when:
            self.clock.advance(min(1.0, when - self.clock.now()))
            await turns()

    def asked(self) -> list[tuple[Verb, float]]:
        """The ops at the first store since the last call."""
        found = list(self.stores[0].asked)
        for store in self.stores:
            store.asked.clear()
        return found


def numbers(server: Server, name: str) -> list[int]:
    """How often each ticket there was sent."""
    with server.cli() as cli:
        known: Any = cli.hvals(keys_of(name).tickets)
    return [int(ticket.split()[0]) for ticket in known]


class TenureRecord(Still):
    """Notes all tenures, in order."""

    def __init__(self, nodes: int, name: str = "") -> None:
        super().__init__(nodes, name)
        self.tenures: list[tuple[Hold, int, object]] = []
        self.inside = 0

    def tried(self) -> int:
        """How often the first node was asked for the lock since the last call."""
        return [verb for verb, _ in self.asked()].count(Verb.ACQUIRE)

    def tenure(self, client: Redlock, name: str, who: object = None, takes: float = 0.0, **options: Any) -> Any:
        """A task that has the name once, for so many seconds."""
        return asyncio.create_task(self._tenure(client, name, who, takes, options))

    async def _tenure(self, client: Redlock, name: str, who: object, takes: float, options: dict[str, Any]) -> None:
        async with client(name, **options) as lease:
            self.began(lease, who)
            self.inside += 1
            await asyncio.sleep(0)
            assert self.inside == 1
            self.inside -= 1
            self.clock.advance(takes)

    def began(self, lease: Lease, who: object = None) -> None:
        self.tenures.append((hold_of(lease), lease.fence if settings_of(lease).fencing else 0, who))

    @property
    def fences(self) -> list[int]:
        return [fence for _, fence, _ in self.tenures]

    @property
    def runs(self) -> list[int]:
        """How many tenures each hold had, one after the other."""
        return lengths(hold for hold, _, _ in self.tenures)


def lengths(items: Iterable[object]) -> list[int]:
    return [len(list(same)) for _, same in groupby(items)]


async def all_of(tasks: Iterable[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*tasks)
