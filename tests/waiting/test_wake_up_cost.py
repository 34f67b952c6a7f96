"""The cost of waiting, and of waking a waiter (HAZARDS E2)."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest

from asynclock import Lease, LockLost, Redlock
from asynclock.rules.model import Verb
from asynclock.stores.port import Notice
from asynclock.stores.redis.handlers import IgnoredCommand
from tests.support.default_keys import key_of
from tests.support.probes import connection_of, contended, intercept_notices, nodes_of, ping, unanswered
from tests.support.servers import Server
from tests.support.still_clock import Still, idle, numbers, turns
from tests.support.waiters import LIMIT, LONG, SHORT, calls, in_queue, rise, until, urls_of

both = pytest.mark.parametrize("nodes", [1, 5])


def counted(servers: list[Server]) -> Counter[str]:
    """How many commands of each sort the servers have carried out, those of scripts included, without the test's
    own."""
    found = sum(map(stats, servers), Counter[str]())
    for ours in ("info", "client|setinfo", "hello", "zrange", "get", "ping", "pttl", "hvals", "exists"):
        del found[ours]
    return found


def stats(server: Server) -> Counter[str]:
    """How many commands of each sort the server has carried out."""
    with server.cli() as cli:
        found: Any = cli.info("commandstats")
    return Counter({command.removeprefix("cmdstat_"): int(its["calls"]) for command, its in found.items()})


class ReceivedNotices:
    """Notes which client receives which notice: (client, number, fence)."""

    def __init__(self, clients: list[Redlock]) -> None:
        self.notices: list[tuple[int, int, int]] = []
        for who, client in enumerate(clients):
            self._listen(who, client)

    def _listen(self, who: int, client: Redlock) -> None:
        def receive(index: int, notice: Notice) -> None:
            self.notices.append((who, notice.number, notice.fence))
            forward(index, notice)

        forward = intercept_notices(client, receive)


class Crowd:
    """Clients whose tasks all want a name that one more client holds. A client that gets it keeps it."""

    def __init__(self, name: str, clients: list[Redlock], each: int) -> None:
        self.served: asyncio.Queue[Lease] = asyncio.Queue()
        self._clients = clients
        self._each = each
        self._name = name
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._wait(client)) for client in self._clients for _ in range(self._each)]
        return self

    async def _wait(self, client: Redlock) -> None:
        self.served.put_nowait(await client(self._name).acquire(timeout=None))

    @property
    def waiting(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for client in self._clients:
            await client.release_all()


async def handed_over(servers: list[Server], name: str, clients: int, each: int) -> tuple[Counter[str], list[Any]]:
    """The cost of a release where so many wait: the commands, and the clients that receive a notice."""
    async with AsyncExitStack() as stack:
        made = [Redlock(*urls_of(servers), lease=LONG, node_timeout=5.0) for _ in range(clients + 1)]
        for client in made:
            await stack.enter_async_context(client)
        lease = await made[0](name).acquire(timeout=None)
        crowd = await stack.enter_async_context(Crowd(name, made[1:], each))
        await until(in_queue(servers, name, clients))
        await until(lambda: all(map(idle, made[1:])) and contended(lease))
        received = ReceivedNotices(made)
        before = counted(servers)
        await lease.release()
        got = await crowd.served.get()
        assert got.held
        for client in made:  # what they have sent is carried out by now
            await asyncio.gather(*(ping(node) for node in nodes_of(client)))
        assert crowd.waiting == clients * each - 1
        cost = counted(servers) - before
        return cost, received.notices


async def test_a_release_that_grants_follows_a_ping(server: Server, name: str) -> None:
    """So the server writes the notice to the next holder before the reply (`Connection.send_after_ping`)."""
    async with Redlock(server.url, lease=LONG) as holder, Redlock(server.url, lease=LONG) as other:
        lease = await holder(name).acquire(timeout=None)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until(lambda: contended(lease))
        server.freeze()
        try:
            releasing = asyncio.create_task(lease.release())
            await turns()
            ping_before, its_release = unanswered(connection_of(nodes_of(holder)[0]))
            assert isinstance(ping_before, IgnoredCommand)
            assert its_release.op.verb is Verb.RELEASE
        finally:
            server.thaw()
        await releasing
        assert (await waiting).held


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("each", [1, 10])
async def test_e2_one_node_a_release_wakes_one(server: Server, name: str, each: int) -> None:
    """Fifty clients wait, or ten, with one task each or ten: one of them receives a notice, and not one command
    differs."""
    costs = []
    for clients in (10, 50):
        cost, notices = await handed_over([server], f"{name}:{clients}", clients, each)
        assert [(number, fence > 0) for _, number, fence in notices if number] == [(1, True)]
        costs.append(cost)
    assert costs[0] == costs[1]
    assert costs[0]["publish"] <= 2  # to the waiter; and the new holder may be notified of waiters
    assert costs[0]["evalsha"] <= 2


@pytest.mark.usefixtures("no_looks")
async def test_e2_five_nodes_a_release_wakes_one(five: list[Server], name: str) -> None:
    """The same over five nodes: each node notifies the same client, and the others send nothing."""
    for clients in (5, 25):
        cost, notices = await handed_over(five, f"{name}:{clients}", clients, 2)
        assert len({who for who, number, _ in notices if number}) == 1
        # A release, a try, and the ticket that goes; some more where a call came long before the others.
        assert cost["evalsha"] / len(five) <= 10
        assert cost["publish"] / len(five) <= 10


@both
async def test_e2_a_thousand_tasks(five: list[Server], name: str, nodes: int) -> None:
    """A thousand tasks of twenty clients: the servers know of twenty tickets, and a release grants to one task."""
    servers = five[:nodes]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Redlock(*urls_of(servers), lease=LONG, node_timeout=5.0)) for _ in range(20)
        ]
        first = await clients[0](f"{name}").acquire(timeout=None)
        crowd = await stack.enter_async_context(Crowd(name, clients[1:], 50))
        await until(in_queue(servers, name, 19))
        await until(lambda: all(map(idle, clients[1:])))
        fences = [first.fence]
        lease = first
        for round_number in range(1, 21):
            await lease.release()
            async with asyncio.timeout(LIMIT):
                lease = await crowd.served.get()
            fences.append(lease.fence)
            assert crowd.waiting == 950 - round_number
            assert crowd.served.empty()
        assert rise(fences)
        await lease.release()


@both
@pytest.mark.parametrize("tasks", [1, 5])
async def test_e2_a_waiting_client_sends_only_renewals(name: str, nodes: int, tasks: int) -> None:
    """The servers get a command from a waiting client only once per renewal, between 0.8 and 1 times a third of its
    ticket's lifetime after the last one, however many of its tasks wait."""
    still = Still(nodes, name)
    async with still.held(lease=60.0, renew=False), still.client(lease=6.0) as other:
        waiting = [asyncio.create_task(other(name).acquire(timeout=None)) for _ in range(tasks)]
        await turns()
        sent = still.clock.now()
        still.asked()
        for _ in range(10):
            while not (asked := still.asked()):
                still.clock.advance(0.01)
                await turns()
                assert still.clock.now() <= sent + 2.0 + 0.02
            assert len(asked) == 1
            assert asked[0][1] - sent >= 2.0 * 0.8 - 1e-6
            sent = asked[0][1]
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)


@both
async def test_e2_a_waiter_costs_its_renewals(five: list[Server], name: str, nodes: int) -> None:
    """By the counters of real servers: while a client waits, as many scripts run at a node as its ticket was
    renewed."""
    servers = five[:nodes]
    async with (
        Redlock(*urls_of(servers), lease=LONG, node_timeout=5.0) as first,
        Redlock(*urls_of(servers), lease=SHORT) as second,
    ):
        async with first(name):
            waiting = asyncio.create_task(second(name).acquire(timeout=None))
            await until(in_queue(servers, name, 1))
            await until(lambda: idle(second))
            began = [(calls(each), numbers(each, name)[0]) for each in servers]
            await until(lambda: all(numbers(each, name)[0] >= began[i][1] + 2 for i, each in enumerate(servers)))
            for each, (called, number) in zip(servers, began, strict=True):
                renewed = numbers(each, name)[0] - number
                assert renewed <= calls(each) - called <= renewed + 2  # one may come while we look
            waiting.cancel()
            await asyncio.wait({waiting})


async def test_a_cycle_without_fencing_is_two_commands(server: Server, name: str) -> None:
    """fencing=False: a SET, and the script of the release. No PING goes before it, unless a client is known to wait."""
    async with Redlock(server.url, lease=LONG) as client:
        async with client(name, fencing=False):
            pass  # the server may not know the script yet
        before = stats(server)
        for _ in range(10):
            async with client(name, fencing=False):
                pass
        cost = stats(server) - before
    assert (cost["evalsha"], cost["ping"]) == (10, 0)


async def test_a_release_without_fencing_wakes_who_waited_before(server: Server, name: str) -> None:
    """A plain SET does not look at the queue, so it may pass a waiter without knowing of it. Its release looks."""
    async with Redlock(server.url, lease=LONG) as first, Redlock(server.url, lease=LONG) as second:
        held = await first(name).acquire(timeout=None)
        waiter = asyncio.create_task(second(name).acquire(timeout=None))
        await until(in_queue([server], name, 1))
        with server.cli() as cli:
            cli.delete(key_of(name))  # nobody is notified of that
        passed = await first(name, fencing=False).acquire(timeout=0)
        assert passed is not None
        await passed.release()
        async with asyncio.timeout(LIMIT / 2):  # the waiter would ask by itself after a third of LONG
            lease = await waiter
        await lease.release()
        with pytest.raises(LockLost):
            await held.release()
