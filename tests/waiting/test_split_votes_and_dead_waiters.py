"""Waiting where votes are split, notices come at odd moments, and waiters die (HAZARDS E3, E6, E13 to E15, E17)."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.rules.model import Verb
from asynclock.stores.memory import MemoryStore
from tests.support.default_keys import key_of, keys_of
from tests.support.fake_clock import FakeClock
from tests.support.gates import behind_gates
from tests.support.probes import acquisitions_of, send_ticket_again
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.still_clock import Still, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import (
    LIMIT,
    LOADED,
    LONG,
    RENEWED_AFTER,
    SHORT,
    calls,
    holder,
    in_queue,
    processes,
    queue,
    rise,
    until,
    urls_of,
)

both = pytest.mark.parametrize("nodes", [1, 5])


def client_of(servers: list[Server]) -> Redlock:
    """Its servers are slow on a busy machine, and not silent."""
    return Redlock(*urls_of(servers), lease=LONG, node_timeout=5.0)


# -- split votes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contenders", "up", "firsts"),
    [
        (2, 4, [{0, 1}, {2, 3}]),
        (3, 5, [{0, 1}, {2, 3}, {4}]),
        (5, 5, [{0}, {1}, {2}, {3}, {4}]),
        (8, 5, [{0}, {1}, {2}, {3}, {4}, set(), set(), set()]),
    ],
)
async def test_e3_split_votes(five: list[Server], name: str, contenders: int, up: int, firsts: list[set[int]]) -> None:
    """Each client is granted by some nodes, and none by a majority. They undo it, and all are served before a lease
    ends."""
    for each in five[up:]:
        each.kill()
    fences: list[int] = []

    async def contend(client: Redlock) -> None:
        async with client(name) as lease:
            fences.append(lease.fence)

    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(behind_gates(five, who, lease=LONG, node_timeout=5.0))
            for who in range(contenders)
        ]
        for (_, gates), first in zip(made, firsts, strict=True):
            for index, gate in enumerate(gates):
                if index not in first:
                    gate.open.clear()
        tasks = [asyncio.create_task(contend(client)) for client, _ in made]
        await until(lambda: all(holder(each, name) for each in five[:up]))
        for _, gates in made:
            for gate in gates:
                gate.open.set()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
    assert len(fences) == contenders
    assert rise(fences)


async def test_e3_an_undo_puts_the_ticket_back(name: str) -> None:
    """Three of five nodes have another holder. At the other two an attempt takes the place of its ticket, and the undo
    puts the ticket back there."""
    still = Still(5, name)
    async with Redlock(*still.stores[2:], lease=LONG) as holder, still.client(lease=LONG) as other:
        lease = await holder(name).acquire(timeout=None)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns(30)
        assert [len(state_of(store, name).queue) for store in still.stores] == [1] * 5
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


async def test_e3_the_undo_of_a_minority_wakes_nobody(name: str) -> None:
    """Three of five nodes have a holder, and a client waits for it. Another client tries once, and undoes what the
    other two nodes granted: the waiter is not notified, since the name is not free."""
    still = Still(5, name)
    async with (
        Redlock(*still.stores[2:], lease=LONG) as holder,
        still.client(lease=LONG) as waiter,
        still.client() as other,
    ):
        lease = await holder(name).acquire(timeout=None)
        waiting = asyncio.create_task(waiter(name).acquire(timeout=None))
        await turns(30)
        still.asked()
        assert await other(name).acquire(timeout=0) is None
        await turns(30)
        still.clock.advance(0.1)  # a notice of one node would count after a round trip
        await turns(30)
        assert [verb for verb, _ in still.asked()] == [Verb.ACQUIRE, Verb.RELEASE]
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


@pytest.mark.parametrize("contenders", [2, 8])
async def test_e3_a_minority_is_taken_by_a_stranger(five: list[Server], name: str, contenders: int) -> None:
    """The leftover of another program on two nodes lives for a minute: the other three nodes decide, for all
    contenders. No ticket stays at the two, where it would absorb the notice for another waiter."""
    for each in five[:2]:
        with each.cli() as cli:
            cli.set(key_of(name), "somebody else's", px=60_000)
    fences: list[int] = []

    async def contend(client: Redlock) -> None:
        for _ in range(3):
            async with client(name) as lease:
                fences.append(lease.fence)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(five)) for _ in range(contenders)]
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*map(contend, clients))
        await until(in_queue(five, name, 0))
    assert len(fences) == 3 * contenders
    assert rise(fences)


async def test_e14_exactly_a_majority_is_up(five: list[Server], name: str) -> None:
    """Two of five are dead: two contenders hand over a hundred times, each time in a few commands, and none waits
    for a lease to end."""
    rounds, up = 50, five[:3]
    fences: list[int] = []

    async def contend(client: Redlock) -> None:
        for _ in range(rounds):
            async with client(name) as lease:
                fences.append(lease.fence)
                await asyncio.sleep(0)

    async with client_of(five) as first, client_of(five) as second:
        for each in five[3:]:
            each.kill()
        before = sum(map(calls, up))
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(contend(first), contend(second))
        spent = sum(map(calls, up)) - before
    assert rise(fences)
    assert len(fences) == 2 * rounds
    assert spent / len(fences) / len(up) < 12  # a try, a ticket, a try, two releases; and again where votes split


# -- notices ---------------------------------------------------------------------------------------------------------


def sent(server: Server, name: str) -> int:
    """How often the one ticket there was sent; 0: there is none."""
    with server.cli() as cli:
        known: Any = cli.hvals(keys_of(name).tickets)
    return int(known[0].split()[0]) if known else 0


@pytest.mark.parametrize("sending", [1, 2])
async def test_e15_a_grant_right_behind_a_refusal(server: Server, name: str, sending: int) -> None:
    """The refusal and the grant a moment later arrive together. The grant counts, whichever sending of the ticket it
    answers, and the waiter does not need its next renewal to find it."""
    front = server.path.with_name("proxy.sock")
    async with Proxy(front, server.path) as proxy, Redlock(server.url, lease=LONG) as holds:
        # A reply that is held is not overdue while the test looks at the server.
        async with Redlock(proxy.url, lease=LONG, node_timeout=LIMIT) as waits:
            async with holds(name):
                if sending == 1:
                    proxy.hold_replies()
                waiting = asyncio.create_task(waits(name).acquire(timeout=None))
                await until(lambda: sent(server, name) == 1)
                if sending == 2:
                    await until(lambda: idle(waits))
                    proxy.hold_replies()
                    (wait,) = acquisitions_of(waits)
                    send_ticket_again(wait)
                    await until(lambda: sent(server, name) == 2)
            await until(lambda: holder(server, name) and not sent(server, name))
            number = calls(server)
            proxy.let_go()
            async with asyncio.timeout(LIMIT), await waiting:
                assert calls(server) == number


@both
async def test_e1_released_before_the_holder_knows_of_a_waiter(five: list[Server], name: str, nodes: int) -> None:
    """The notice that a client waits is still on its way to the holder as it releases. The waiter is served all the
    same, at once, and not when its ticket is renewed."""
    servers = five[:nodes]
    async with behind_gates(servers, 0, lease=LONG, node_timeout=5.0) as (holds, gates):
        async with Redlock(*urls_of(servers), lease=LONG) as waits:
            lease = await holds(name).acquire(timeout=None)
            for gate in gates:
                gate.hold_replies()
                gate.passed.clear()  # its handshake spoke of releases, too
            waiting = asyncio.create_task(waits(name).acquire(timeout=None))
            await until(in_queue(servers, name, 1))
            released = asyncio.create_task(lease.release())
            await until(lambda: all(gate.releases for gate in gates))
            for gate in gates:
                gate.let_go()
            await released
            began = time.monotonic()
            async with asyncio.timeout(LIMIT), await waiting:
                assert time.monotonic() - began < LONG * RENEWED_AFTER / 2


class Standing(FakeClock):
    """Its timers never fire; yet, as a real one, it never says the same twice."""

    def now(self) -> float:
        self._now += 1e-9
        return self._now


async def test_notices_of_a_majority_are_enough(name: str) -> None:
    """Over five nodes the waiter tries once three have notified it, and not a round trip later: no timer is needed."""
    clock = Standing()
    stores = [MemoryStore(clock) for _ in range(5)]
    async with Redlock(*stores) as first, Redlock(*stores) as second:
        async with first(name):
            waiting = asyncio.create_task(second(name).acquire(timeout=None))
            await until(lambda: all(state_of(store, name).queue for store in stores) and clock.armed)
        async with asyncio.timeout(LIMIT), await waiting as lease:
            assert lease.held


# -- waiters that die ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_e6_e17_dead_at_the_head(five: list[Server], name: str, nodes: int, how: str) -> None:
    """The first ten in the queue are dead: the next is served within one ticket's lifetime, and ten dead ones cost no
    more than one. Frozen is the harder case: its connections stay open, so a server believes that it
    receives notices."""
    servers, many = five[:nodes], 10
    urls = urls_of(servers)
    async with Redlock(*urls, lease=SHORT) as first, Redlock(*urls, lease=SHORT) as second:
        async with processes(1, urls, clients=many, lease=SHORT) as (doomed,):
            async with first(name, fair=True) as held:
                doomed.wait(name, fair=True)
                await until(in_queue(servers, name, many))
                waiting = asyncio.create_task(second(name, fair=True).acquire(timeout=None))
                await until(in_queue(servers, name, many + 1))
                doomed.freeze() if how == "frozen" else await doomed.kill()
            began = time.monotonic()
            async with asyncio.timeout(LIMIT), await waiting as lease:
                took = time.monotonic() - began
                assert lease.fence > held.fence
    assert took < 2 * SHORT + LOADED  # one life; ten would be ten


@pytest.mark.parametrize("knows", [True, False])
async def test_e13_a_waiter_with_a_minority_blocks_nobody(five: list[Server], name: str, knows: bool) -> None:
    """The head of a fair queue is cut off from three of five nodes, and `knows` it or not when its turn comes. The next
    one is served; and while the head tries on, the two nodes that it reaches keep no ticket of it."""
    urls = urls_of(five)
    async with Redlock(*urls, lease=SHORT) as first, Redlock(*urls, lease=SHORT) as next_one:
        async with behind_gates(five, 0, lease=SHORT, patience=LONG) as (lonely, gates):
            async with first(name, fair=True):
                alone = asyncio.create_task(lonely(name, fair=True).acquire(timeout=None))
                await until(in_queue(five, name, 1))
                waiting = asyncio.create_task(next_one(name, fair=True).acquire(timeout=None))
                await until(in_queue(five, name, 2))
                ticket = queue(five[0], name)[0]
                for gate in gates[2:]:
                    gate.drop_requests = True
                if knows:
                    await until(lambda: all(ticket not in queue(each, name) for each in five[:2]))
                assert not waiting.done()
            began = time.monotonic()
            async with asyncio.timeout(LIMIT), await waiting:
                assert time.monotonic() - began < 2 * SHORT + LOADED
                await until(lambda: all(ticket not in queue(each, name) for each in five[:2]))
            assert not alone.done()
            alone.cancel()
            await asyncio.wait({alone})
