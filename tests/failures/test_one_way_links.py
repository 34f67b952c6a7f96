"""Links between one client and one node that are cut in one direction (HAZARDS F16)."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from tests.support.proxy import OneWayProxy
from tests.support.servers import Servers
from tests.support.waiters import LIMIT

ROUNDS, CLIENTS, NODES = 6, 3, 3
OPTIONS: Any = {"lease": 6, "node_timeout": 0.5, "patience": 0.3}


class Entries:
    """What the holders of one name did. All of them run in this loop, so the order is exact."""

    def __init__(self) -> None:
        self.fences: list[int] = []
        self.unavailable = [0] * CLIENTS
        self._inside = 0

    async def work(self, number: int, client: Redlock, name: str) -> None:
        """Enter again and again."""
        while True:
            try:
                async with client(name, timeout=1.0) as lease:
                    assert self._inside == 0, "two holders"
                    assert lease.fence > max(self.fences, default=0), "a token that does not rise"
                    self.fences.append(lease.fence)
                    self._inside += 1
                    try:
                        await asyncio.sleep(0.001)
                    finally:
                        self._inside -= 1
            except (QuorumUnavailable, LockLost):
                self.unavailable[number] += 1
            except TimeoutError:
                pass  # another client may hold the name, and its release cannot reach a majority

    async def more(self, entries: int) -> None:
        """Return after so many further entries."""
        wanted = len(self.fences) + entries
        async with asyncio.timeout(LIMIT):
            while len(self.fences) < wanted:
                await asyncio.sleep(0.005)


@pytest.mark.timeout(120)
async def test_f16_links_cut_in_one_direction(servers: Servers, name: str, chance: random.Random) -> None:
    """Of each client at most one link is cut, so the clients go on. Then links of all clients to two nodes are cut:
    after they heal, by a reset or with all that was held back, the clients go on. No two hold the name at the same
    time, and the tokens rise."""
    some = [servers.start() for _ in range(NODES)]
    entries = Entries()
    async with AsyncExitStack() as stack:
        links = [[OneWayProxy.before(each, number) for each in some] for number in range(CLIENTS)]
        for each in itertools.chain(*links):
            await stack.enter_async_context(each)
        clients = [
            await stack.enter_async_context(
                Redlock(*(link.url for link in mine), lease=6, node_timeout=0.5, patience=1)
            )
            for mine in links
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(entries.work(i, client, name)) for i, client in enumerate(clients)]
            await entries.more(10)
            for _ in range(ROUNDS):
                cut = [chance.choice(mine) for mine in links]
                for link in cut:
                    link.cut_one_way(chance.choice(["requests", "replies"]))
                await entries.more(5)
                for mine in links:
                    for link in chance.sample(mine, 2):
                        link.cut_one_way(chance.choice(["requests", "replies"]))
                before = list(entries.unavailable)
                async with asyncio.timeout(LIMIT):
                    while entries.unavailable[0] == before[0]:
                        await asyncio.sleep(0.01)
                for link in itertools.chain(*links):
                    link.heal(reset=chance.random() < 0.5)
                await entries.more(5)
            for task in tasks:
                task.cancel()
    assert len(entries.fences) >= 10 * (ROUNDS + 1)
