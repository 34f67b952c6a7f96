"""Waiting is cut short at random: one holder at a time, no waiter is forgotten, nothing is left (HAZARDS E3, E5,
E15)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.port import Notice
from tests.support.cancelled_waits import SOON, Make, kept, known, nothing_is_left, sent, three
from tests.support.default_keys import keys_of
from tests.support.gates import behind_gates
from tests.support.probes import intercept_notices, reconnected, stores_of
from tests.support.proxy import cancelled_at
from tests.support.servers import Server
from tests.support.still_clock import turns
from tests.support.waiters import LONG


class Crowd:
    """Tasks of several clients that want one name, and may be cancelled anywhere. Checks that one task at a time has
    it, with a greater fence than all before."""

    def __init__(self, clients: list[Redlock], name: str, chance: random.Random) -> None:
        self.served = 0
        self._clients = clients
        self._name = name
        self._chance = chance
        self._inside = 0
        self._fence = 0

    async def round(self, many: int = 8, limit: float = SOON) -> None:
        """Some tasks come, one after the other; all are served, cancelled, or timed out, within so many seconds."""
        chance = self._chance
        fair = chance.random() < 0.5
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(chance.randint(2, many)):
            want = partial(self._want, chance.choice(self._clients), fair, chance.choice([None, None, None, 0, 0.002]))
            tasks.append(asyncio.create_task(self._cut(want) if chance.random() < 0.6 else want()))
            await turns(chance.choice([0, 0, 1, 2, 5]))
        async with asyncio.timeout(limit):
            await asyncio.gather(*tasks)
        assert not self._inside

    async def _cut(self, want: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel it at one of its awaits, or after so many turns of the loop."""
        chance = self._chance
        if chance.random() < 0.5:
            await cancelled_at(want, chance.randrange(6), late=chance.random() < 0.5)
            return
        task = asyncio.create_task(want())
        await turns(chance.randrange(40))
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _want(self, redlock: Redlock, fair: bool, timeout: float | None) -> None:
        try:
            lease = await redlock(self._name, fair=fair).acquire(timeout=timeout)
        except QuorumUnavailable:  # no word in so short a time
            assert timeout is not None
            return
        if lease is None:
            return
        async with lease:
            assert not self._inside
            assert lease.fence > self._fence
            self._inside, self._fence = 1, lease.fence
            self.served += 1
            try:
                await turns(self._chance.choice([0, 0, 1, 5]))
            finally:
                self._inside = 0


async def test_e5_cancelled_at_random(make: Make, name: str, chance: random.Random) -> None:
    """Round after round: one holder, rising fences, no waiter forgotten, nothing left."""
    clients = await three(make)
    crowd = Crowd(clients, f"{name}.", chance)
    rounds = 50 if len(stores_of(clients[0])) > 1 else 150
    for number in range(rounds):
        await crowd.round()
        await sent(clients)
        assert [kept(client) for client in clients] == [{}] * 3
        if number % 50 == 0:
            assert not await known(clients[0], f"{name}.")
    await nothing_is_left(clients, f"{name}.")
    assert crowd.served > rounds


async def test_e15_cancelled_at_random_where_notices_get_lost(make: Make, name: str, chance: random.Random) -> None:
    """A third of all notices is lost, and tickets are sent again at odd moments, so that many are renewed as the grant
    comes. The next renewal finds such a grant: one holder, rising fences, no waiter forgotten, nothing left."""
    clients = await three(make, lease=9.0, node_timeout=3.0)
    lost: list[Notice] = []

    def receives_two_thirds(client: Redlock) -> None:
        def unsure(index: int, notice: bytes) -> None:
            if chance.random() < 1 / 3:
                lost.append(notice)
            else:
                receive(index, notice)

        receive = intercept_notices(client, unsure)

    for client in clients:
        receives_two_thirds(client)
    crowds = [Crowd(clients, f"{name}:{number}.", chance) for number in range(40)]

    async def rounds(crowd: Crowd) -> None:
        for _ in range(3):
            await crowd.round(many=5, limit=2 * SOON)  # some wait for the renewals of several tickets

    async def listen_again() -> None:
        while True:
            await asyncio.sleep(chance.uniform(0, 0.3))
            reconnected(chance.choice(clients), 0)

    again = asyncio.create_task(listen_again())
    await asyncio.gather(*map(rounds, crowds))
    again.cancel()
    await asyncio.wait({again})
    for number in range(len(crowds)):
        await nothing_is_left(clients, f"{name}:{number}.")
    assert sum(crowd.served for crowd in crowds) > 100
    assert sum(notice.number != 0 for notice in lost) > 10  # notices for tickets, not those for holders


async def test_e3_cancelled_at_random_while_votes_are_split(
    five: list[Server], name: str, chance: random.Random
) -> None:
    """Each node grants to a random client first, and any client may be cancelled meanwhile: the others are served, and
    nothing is left."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(behind_gates(five, who, lease=LONG, node_timeout=5.0)) for who in range(3)
        ]
        clients = [client for client, _ in made]
        for client in clients:
            await client.health()
        crowd = Crowd(clients, f"{name}.", chance)
        for _ in range(75):
            playing = asyncio.create_task(crowd.round())
            for index in range(len(five)):
                first = chance.randrange(3)
                for who, (_, gates) in enumerate(made):
                    if who != first:
                        gates[index].open.clear()
            await turns(chance.randrange(40))
            for _, gates in made:
                for gate in gates:
                    gate.open.set()
            await playing
            await sent(clients)
            assert [kept(client) for client in clients] == [{}] * 3
        for each in five:
            with each.cli() as cli:
                assert cli.keys(f"*{name}.*") == [keys_of(f"{name}.").fence.encode()]
        assert crowd.served > 75
