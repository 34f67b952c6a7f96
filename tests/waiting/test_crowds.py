"""Many tasks wait, and then the servers fail, the holder dies, or the holder is a program that notifies nobody."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import redis.asyncio

from asynclock import QuorumUnavailable, Redlock
from asynclock._clock import now
from asynclock.stores.port import Node
from tests.support.default_keys import key_of
from tests.support.probes import acquisitions_of, in_outage, nodes_of, tickets_of
from tests.support.servers import Server
from tests.support.still_clock import idle
from tests.support.waiters import (
    LIMIT,
    LOADED,
    LONG,
    RENEWED_AFTER,
    SHORT,
    calls,
    holder,
    in_order,
    in_queue,
    processes,
    queue,
    rise,
    until,
    urls_of,
)

EARLY = 0.002
"""A timer of a loop may come so many seconds early."""

both = pytest.mark.parametrize("nodes", [1, 5])

Fault: TypeAlias = Callable[[list[Server], list[Redlock]], Awaitable[None]]


def left(server: Server, name: str) -> float:
    """Seconds until its hold ends there."""
    with server.cli() as cli:
        ends: Any = cli.pttl(key_of(name))
    return int(ends) / 1000


# -- servers that fail -----------------------------------------------------------------------------------------------


async def connections_are_cut(servers: list[Server], clients: list[Redlock]) -> None:
    """At each server all connections are cut: those for commands and those for notices."""
    del clients
    for each in servers:
        with each.cli() as cli:
            for kind in ("normal", "pubsub"):
                cli.client_kill_filter(_type=kind)


async def shut_down_for_a_while(servers: list[Server], clients: list[Redlock]) -> None:
    """The servers shut down cleanly with nothing on disk: the only one, or two of five one after the other. All clients
    notice it."""
    for index, each in enumerate(servers[: max(1, len(servers) // 2)]):
        each.process.terminate()
        each.process.wait()
        if len(servers) == 1:
            await until(lambda: not any(map(tickets_of, clients)))  # the waiters know of the outage
        nodes = [nodes_of(client)[index] for client in clients]
        await until(partial(noticed, nodes))
        each.restart()


def noticed(nodes: list[Node]) -> bool:
    return all(node.error is not None for node in nodes)


async def replaced(servers: list[Server], clients: list[Redlock]) -> None:
    """A failover to a replica that knows nothing: kill -9, and an empty server at the same address at once."""
    del clients
    servers[0].restart()


@pytest.mark.parametrize("fair", [False, True], ids=["", "fair"])
@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        (1, connections_are_cut),
        (1, shut_down_for_a_while),
        (1, replaced),
        (5, connections_are_cut),
        (5, shut_down_for_a_while),
    ],
)
async def test_a_hundred_wait_through_a_fault(
    five: list[Server], name: str, nodes: int, fair: bool, fault: Fault
) -> None:
    """Holder and servers fail together while a hundred tasks wait. All are served, none later than the holder's lease
    plus a ticket's lifetime, and fences rise although counters were lost."""
    servers, lease = five[:nodes], SHORT
    urls = urls_of(servers)
    served: list[tuple[float, int]] = []

    async def wait(client: Redlock) -> None:
        async with client(name, fair=fair) as tenure:
            served.append((time.monotonic(), tenure.fence))

    async with AsyncExitStack() as stack:
        (doomed,) = await stack.enter_async_context(processes(1, urls, lease=lease))
        clients = [await stack.enter_async_context(Redlock(*urls, lease=lease)) for _ in range(4)]
        doomed.wait(name, ever=True)
        await until(lambda: doomed.served)
        tasks = [asyncio.create_task(wait(client)) for client in clients * 25]
        await until(in_queue(servers, name, 100 if fair else 4))
        assert not served
        await doomed.kill()
        await fault(servers, clients)
        began = time.monotonic()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
    assert len(served) == 100
    assert max(at for at, _ in served) - began < 2 * lease + LOADED
    assert rise([doomed.served[0].fence, *(fence for _, fence in served)])


@both
@pytest.mark.parametrize("free", [False, True])
async def test_e2_in_an_outage_one_task_asks(five: list[Server], name: str, nodes: int, free: bool) -> None:
    """Twenty tasks of a client meet an outage: one of them tries again, and the others wait behind it. After it the
    servers know of one ticket at most, whether another client holds the name or none does. All are served."""
    servers, count = five[:nodes], 20
    served: list[int] = []
    settled = asyncio.Event()

    async def use(client: Redlock) -> None:
        async with client(name, timeout=LIMIT) as lease:
            served.append(lease.fence)
            await settled.wait()

    async with AsyncExitStack() as stack:
        made = [Redlock(*urls_of(servers), lease=LONG, node_timeout=1.0, patience=LIMIT) for _ in range(2)]
        client, other = [await stack.enter_async_context(each) for each in made]
        await client.health()
        held = None if free else await other(name).acquire()
        for each in servers:
            each.freeze()
        tasks = [asyncio.create_task(use(client)) for _ in range(count)]
        await until(lambda: len(acquisitions_of(client)) == count and any(map(in_outage, acquisitions_of(client))))
        for each in servers:
            each.thaw()
        await until(lambda: not any(map(in_outage, acquisitions_of(client))) and idle(client))
        assert len(acquisitions_of(client)) == count - free
        assert len(tickets_of(client)) == (not free)
        # A server that was too busy for the round gets the ticket with the next connection.
        await until(lambda: all(queue(each, name) for each in servers) or free)
        assert [len(queue(each, name)) for each in servers] == [not free] * nodes
        settled.set()
        if held is not None:
            await held.release()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
        assert len(served) == count
        assert rise(served)


@both
async def test_c20_a_thousand_tasks_in_an_outage(five: list[Server], name: str, nodes: int) -> None:
    """Each gets QuorumUnavailable when its patience ends, or its time before that. They do not all get it in one
    turn of the loop, and a task that comes later is as patient."""
    servers, patience, ended = five[:nodes], 1.0, Counter[int]()
    turn, began = 0, now()
    late: asyncio.Task[None] | None = None

    async def fail(timeout: float) -> None:
        start = now()
        with pytest.raises(QuorumUnavailable, match=name):
            await client(name).acquire(timeout=timeout)
        assert min(timeout, patience) - EARLY <= now() - start < LIMIT
        ended[turn] += 1

    async with Redlock(*urls_of(servers), patience=patience, node_timeout=0.1) as client:
        await client.health()
        for each in servers:
            each.freeze()
        tasks = [asyncio.create_task(fail(0.6 if number % 10 == 9 else LIMIT)) for number in range(1_000)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1
            if late is None and now() - began > patience / 2:
                late = asyncio.create_task(fail(LIMIT))
        await (late or fail(LIMIT))  # no turn came in time on a busy machine: it meets the outage alone
        for each in servers:
            each.thaw()
    assert max(ended.values()) <= 600
    assert ended.total() == 1_001


async def test_c20_the_next_task_that_asks_has_no_more_patience(server: Server, name: str) -> None:
    """The task that asks in an outage gives up. The one that asks in its place has waited as long as it has."""
    async with Redlock(server.url, node_timeout=0.1, patience=LIMIT) as client:
        await client.health()
        server.freeze()
        first, second = [asyncio.create_task(client(name).acquire(timeout=timeout)) for timeout in (3.0, LIMIT)]
        await until(lambda: any(map(in_outage, acquisitions_of(client))))
        (ends,) = [each.planner.patience_ends for each in acquisitions_of(client) if in_outage(each)]
        with pytest.raises(QuorumUnavailable):
            await first
        (asks,) = acquisitions_of(client)
        assert in_outage(asks)
        assert asks.planner.patience_ends == pytest.approx(ends, abs=1.0)  # it began a moment later
        server.thaw()
        assert (await second).held


# -- holders that notify nobody ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "fair"), [(1, False), (1, True), (5, True)])
async def test_a_crowd_waits_for_a_dead_holder(five: list[Server], name: str, nodes: int, fair: bool) -> None:
    """A dead holder notifies nobody. Until its lease ends the waiters send nothing but ticket renewals. Then the first
    one is served, and the rest follow it at once."""
    servers, lease = five[:nodes], SHORT
    urls, tickets = urls_of(servers), 60 if fair else 4
    async with processes(1, urls, lease=lease) as (doomed,), processes(2, urls, clients=2, lease=lease) as waiting:
        doomed.wait(name, ever=True)
        await until(lambda: doomed.served)
        for each in waiting:
            each.wait(name, count=15, fair=fair)
        await until(in_queue(servers, name, tickets))
        await doomed.kill()
        began = time.monotonic()
        rests = [left(server, name) for server in servers]  # they may have read the last renewal at different times
        asked, first = time.monotonic(), servers[rests.index(min(rests))]
        dead, before, spent = holder(first, name), calls(first), 0

        def over() -> bool:
            nonlocal spent
            now = calls(first)
            if holder(first, name) != dead:
                return True
            spent = now - before
            return False

        await until(over)
        await until(lambda: len(in_order(waiting)) == 60)
        served = in_order(waiting)
    assert began + min(rests) - 0.1 < served[0].at < asked + max(rests) + LOADED
    assert max(b.at - a.at for a, b in pairwise(served)) < lease
    assert rise([doomed.served[0].fence, *(each.fence for each in served)])
    assert spent < tickets * (1 / RENEWED_AFTER + 1) + 30


@both
@pytest.mark.parametrize("fair", [False, True], ids=["", "fair"])
async def test_no_wake_up_is_lost(five: list[Server], name: str, nodes: int, fair: bool) -> None:
    """Eighty tasks of four clients in two processes hand over again and again. No pause is as long as a lost
    notice would cost, since only the next renewal finds that out."""
    urls, rounds = urls_of(five[:nodes]), 4 if nodes == 1 else 2
    async with processes(2, urls, clients=2, lease=LONG) as started:
        for each in started:
            each.wait(name, count=20, fair=fair, rounds=rounds)
        await until(lambda: len(in_order(started)) == 80 * rounds)
    served = in_order(started)
    assert max(b.at - a.at for a, b in pairwise(served)) < LONG * RENEWED_AFTER / 2
    assert rise(each.fence for each in served)


@both
async def test_another_librarys_release_is_noticed(five: list[Server], name: str, nodes: int) -> None:
    """redis-py's own Lock notifies nobody when it releases, so the first waiters probe it every 50 to 250 ms. They
    notice the release long before a renewal of their tickets is due."""
    strangers = [redis.asyncio.Redis(unix_socket_path=str(each.path)) for each in five[:nodes]]
    locks = [each.lock(key_of(name), timeout=LONG) for each in strangers]
    async with AsyncExitStack() as stack:
        for each in strangers:
            await stack.enter_async_context(each)
        for lock in locks:
            assert await lock.acquire(blocking=False)
        redlock = await stack.enter_async_context(Redlock(*urls_of(five[:nodes]), lease=LONG))
        waiting = asyncio.create_task(redlock(name).acquire(timeout=None))
        await until(in_queue(five[:nodes], name, 1))
        assert not waiting.done()
        for lock in locks:
            await lock.release()
        began = time.monotonic()
        async with asyncio.timeout(LIMIT), await waiting:
            assert time.monotonic() - began < LONG * RENEWED_AFTER / 2
