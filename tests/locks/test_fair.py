"""Fair locks: in order of arrival, over clients and processes, whatever order single nodes have (HAZARDS E9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.stores.transactional import TransactionalStore
from asynclock.stores.zookeeper import ZooKeeperStore
from tests.support.default_keys import keys_of
from tests.support.probes import nodes_of, stores_of
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.stored_keys import members_at
from tests.support.user_store import state_of
from tests.support.waiters import LONG, in_order, in_queue, processes, queue, rise, until

both = pytest.mark.parametrize("nodes", [1, 5])


class Arrivals:
    """Waiters that arrive one after the other; the order in which they are served, and their fences."""

    def __init__(self, name: str) -> None:
        self.order: list[int] = []
        self._name = name
        self._fences: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def join(self, redlock: Redlock) -> None:
        """The next arrives."""
        self._tasks.append(asyncio.create_task(self._wait(redlock, len(self))))

    async def _wait(self, redlock: Redlock, number: int) -> None:
        async with redlock(self._name, fair=True) as lease:
            self.order.append(number)
            self._fences.append(lease.fence)

    async def all_served(self) -> list[int]:
        """Their numbers, in the order of service."""
        async with asyncio.timeout(20):
            await asyncio.gather(*self._tasks)
        assert rise(self._fences)
        return self.order


async def tickets_everywhere(redlock: Redlock, name: str) -> int:
    """How many waiters the node with the fewest tickets knows."""
    known = []
    for store in stores_of(redlock):
        if isinstance(store, TransactionalStore):
            known.append(len(state_of(store, name).queue))
        elif isinstance(store, ZooKeeperStore):
            await redlock.health()  # connected
            known.append(len((await nodes_of(redlock)[0].probe(name)).waiters))
        else:
            known.append(await members_at(store, keys_of(name).queue))
    return min(known)


def number_of(server: Server, name: str, ticket: bytes) -> int:
    """How often that ticket was sent to the server."""
    with server.cli() as cli:
        known: Any = cli.hget(keys_of(name).tickets, ticket[:32].decode())
    return int(known.split()[0]) if known else 0


async def arrive(arrivals: Arrivals, clients: list[Redlock], servers: list[Server], name: str) -> None:
    """One waiter of each client, the next once all servers know of the one before."""
    for each in clients:
        arrivals.join(each)
        await until(in_queue(servers, name, len(arrivals)))


def tamper(server: Server, name: str, order: list[bytes]) -> None:
    """Give this server another order of arrival."""
    with server.cli() as cli:
        cli.zadd(keys_of(name).queue, {ticket: 1e15 + place for place, ticket in enumerate(order)})


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.every_store
async def test_in_order_of_arrival(make: Callable[..., Redlock], name: str) -> None:
    """Tasks are served in the order in which they came, whichever client's they are; a newcomer does not overtake
    them."""
    clients = [make(), make(), make()]
    arrivals = Arrivals(name)
    async with clients[0](name, fair=True):
        for client in clients * 4:
            arrivals.join(client)
            while await tickets_everywhere(client, name) < len(arrivals):
                await asyncio.sleep(0.005)
    arrivals.join(clients[0])
    assert await arrivals.all_served() == list(range(13))


@both
async def test_in_order_of_arrival_over_processes(five: list[Server], name: str, nodes: int) -> None:
    """The same where the waiters are tasks of other processes."""
    servers = five[:nodes]
    urls = [each.url for each in servers]
    async with Redlock(*urls, node_timeout=5.0) as redlock, processes(3, urls) as started:
        async with redlock(name, fair=True):
            for number in range(9):
                started[number % 3].wait(name, who=str(number), fair=True)
                await until(in_queue(servers, name, number + 1))
        await until(lambda: len(in_order(started)) == 9)
    assert [each.who for each in in_order(started)] == [str(number) for number in range(9)]
    assert rise(each.fence for each in in_order(started))


@both
async def test_a_try_without_a_ticket_takes_no_waiters_turn(five: list[Server], name: str, nodes: int) -> None:
    """A fair try with timeout=0, again and again while others wait, gets nothing before them."""
    urls = [each.url for each in five[:nodes]]
    arrivals = Arrivals(name)
    async with (
        Redlock(*urls, node_timeout=5.0) as first,
        Redlock(*urls, node_timeout=5.0) as second,
        Redlock(*urls, node_timeout=5.0) as hasty,
    ):
        async with first(name, fair=True):
            await arrive(arrivals, [second, first] * 4, five[:nodes], name)
        while len(arrivals.order) < 8:
            lease = await hasty(name, fair=True).acquire(timeout=0)
            if lease is not None:
                served = len(arrivals.order)
                await lease.release()
                assert served == 8
        assert await arrivals.all_served() == list(range(8))


@both
async def test_a_live_waiter_keeps_its_place(name: str, nodes: int) -> None:
    """The holder holds for several ticket lifetimes; the waiters renew their tickets and keep their places."""
    still, arrivals = Still(nodes, name), Arrivals(name)
    async with still.client(lease=9.0) as first, still.client(lease=9.0) as second:
        async with first(name, fair=True):
            for each in (second, first, second, first):
                arrivals.join(each)
                await turns()
                still.clock.advance(0.001)
            places = [[waiter.id for waiter in state_of(store, name).queue] for store in still.stores]
            assert [len(each) for each in places] == [4] * nodes
            await still.until(still.clock.now() + 30.0)
            assert [[waiter.id for waiter in state_of(store, name).queue] for store in still.stores] == places
        assert await arrivals.all_served() == [0, 1, 2, 3]


# -- heads that differ -----------------------------------------------------------------------------------------------


async def test_e9_nodes_agree_after_one_renewal(five: list[Server], name: str) -> None:
    """A ticket carries its order key: nodes with another order correct it at its renewal."""
    urls = [each.url for each in five]
    arrivals = Arrivals(name)
    async with Redlock(*urls, lease=9.0) as first, Redlock(*urls, lease=9.0) as second:
        async with first(name, fair=True):
            await arrive(arrivals, [second, first, second, first], five, name)
            right = queue(five[0], name)
            sent = {(each, ticket): number_of(each, name, ticket) for each in five for ticket in right}
            tamper(five[1], name, right[::-1])
            tamper(five[2], name, [right[2], right[0], right[3], right[1]])
            # Two sendings later at the most: the one may have been on its way already.
            await until(lambda: all(number_of(*(each, name, t)) > n + 1 for (each, t), n in sent.items()))
            assert [queue(each, name) for each in five] == [right] * 5
        assert await arrivals.all_served() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [1, 2, 4])
async def test_e9_no_deadlock_where_heads_differ(five: list[Server], name: str, wrong: int) -> None:
    """The lock is free, and so many nodes have heads of their own, no two the same: all waiters are served."""
    urls = [each.url for each in five]
    arrivals = Arrivals(name)
    async with Redlock(*urls, lease=4.5) as first, Redlock(*urls, lease=4.5) as second:
        lease = await first(name, fair=True, lease=LONG).acquire(timeout=None)
        await arrive(arrivals, [second, first, second, first, second], five, name)
        right = queue(five[0], name)
        for shift, each in enumerate(five[:wrong], 1):
            tamper(each, name, right[shift:] + right[:shift])
        await lease.release()
        assert sorted(await arrivals.all_served()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("missing", [1, 2])
async def test_e9_nodes_that_missed_tickets(five: list[Server], name: str, missing: int) -> None:
    """A minority never received the first two tickets: the others keep the order, and no waiter waits for a lease to
    end."""
    urls = [each.url for each in five]
    arrivals = Arrivals(name)
    async with Redlock(*urls, lease=30.0) as first, Redlock(*urls, lease=30.0) as second:
        lease = await first(name, fair=True).acquire(timeout=None)
        await arrive(arrivals, [second, first, second, first], five, name)
        right = queue(five[0], name)
        for each in five[:missing]:
            with each.cli() as cli:
                cli.zrem(keys_of(name).queue, *right[:2])
                cli.hdel(keys_of(name).tickets, *(ticket[:32].decode() for ticket in right[:2]))
        await lease.release()
        assert await arrivals.all_served() == [0, 1, 2, 3]
