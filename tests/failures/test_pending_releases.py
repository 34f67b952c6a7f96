"""A node that is away is owed the releases of what it may have, no others, and is paid a little at a time (C19)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.rules.model import ID_LENGTH, Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis import delivery as _delivery
from asynclock.stores.redis import pending
from asynclock.stores.redis.connection import Connection
from asynclock.stores.redis.keys import keys
from asynclock.stores.redis.pending import PendingReleases
from tests.support.cut_servers import Clocked, cut_lines, heal_lines, lines_to, swallow
from tests.support.fake_clock import FakeClock
from tests.support.probes import id_of, node_of, nodes_of, pending_releases_of, tickets_of
from tests.support.servers import Servers
from tests.support.still_clock import idle
from tests.support.waiters import LONG, back, holder, in_queue, until, urls_of


def release(id: str, lease: float = 30.0) -> Op:
    return Op(Verb.RELEASE, MUTEX, "x", id * 32, lease)


def test_what_is_owed_is_bounded_by_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of three times as many as are kept, the newest are; a warning says so, once."""
    monkeypatch.setattr(pending, "MOST", 20)
    releases = PendingReleases()
    for i in range(3 * pending.MOST):
        releases.add(Op(Verb.RELEASE, MUTEX, "x", f"{i:032}", 30.0), 0.0, 0.0)
    assert len(releases) == pending.MOST
    assert releases.drain(0.0, 1)[0].id == f"{2 * pending.MOST:032}"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_as_many_as_a_process_holds_are_all_owed() -> None:
    """100,000 leases, given back while their server is away: no release is dropped."""
    releases = PendingReleases()
    for i in range(100_000):
        releases.add(Op(Verb.RELEASE, MUTEX, "x", f"{i:032}", 30.0), 0.0, 0.0)
    assert len(releases) == 100_000


def test_orphans_are_bounded_by_number_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids whose acquire may still come are kept no longer than what it would leave lives, and not more than so many."""
    monkeypatch.setattr(pending, "MOST", 20)
    releases = PendingReleases()

    class Asked:
        op = Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0)
        sent = deadline = 0.0

    def cut(number: int, now: float) -> None:
        handler: Any = Asked()
        handler.op = Op(Verb.ACQUIRE, MUTEX, "x", f"{number:032}", 30.0)
        releases.cut_off([handler], now)

    for i in range(3 * pending.MOST):
        cut(i, 0.0)
    assert len(releases.unanswered) == pending.MOST
    cut(-1, 1000.0)
    assert len(releases.unanswered) == 1


async def test_what_is_owed_lapses_while_the_node_is_down(servers: Servers, name: str) -> None:
    """The key that a release would delete has expired long ago: the release is dropped although nobody came back."""
    clock = FakeClock()
    server = servers.start()
    async with Redlock(Clocked(server.url, clock), lease=LONG) as client:
        leases = [await client(f"{name}:{i}").acquire(timeout=None) for i in range(5)]
        (node,) = nodes_of(client)
        server.kill()
        await until(lambda: node.error is not None)
        await asyncio.gather(*(lease.release() for lease in leases))
        assert len(pending_releases_of(node)) == 5
        clock.advance(2 * LONG + 60.0)
        await until(lambda: not pending_releases_of(node))


async def gives_up(client: Redlock, name: str) -> None:
    """It waits for the name, its tickets at all nodes that it reaches; and is cancelled."""
    waiting = asyncio.create_task(client(name).acquire(timeout=None))
    await until(lambda: idle(client))
    waiting.cancel()
    await asyncio.wait({waiting})


@pytest.mark.parametrize("how", ["wins", "gives up"])
async def test_c19_a_dead_node_is_not_owed_what_never_reached_it(servers: Servers, name: str, how: str) -> None:
    """One of three is dead, and two clients contend for one name. After many waited turns as much is owed as after
    some: each turn left a ticket at the live nodes only."""
    some = [servers.start() for _ in range(3)]
    options: dict[str, Any] = {"lease": LONG, "node_timeout": 5.0}
    async with Redlock(*urls_of(some), **options) as one, Redlock(*urls_of(some), **options) as two:
        some[2].kill()
        await until(lambda: all(nodes_of(each)[2].error is not None for each in (one, two)))

        async def waited_turns(count: int) -> None:
            if how == "gives up":
                async with two(name):
                    for _ in range(count):
                        await gives_up(one, name)
                return

            async def turns_of(client: Redlock) -> None:
                for _ in range(count):
                    async with client(name):
                        await until(lambda: bool(rival_waits(client)))

            def rival_waits(client: Redlock) -> bool:
                rival = two if client is one else one
                return idle(rival) or done[rival]

            done = {one: False, two: False}

            async def play(client: Redlock) -> None:
                await turns_of(client)
                done[client] = True

            await asyncio.gather(play(one), play(two))

        def owed() -> list[tuple[int, int]]:
            pending = [pending_releases_of(nodes_of(each)[2]) for each in (one, two)]
            return [(len(each), len(each.unanswered)) for each in pending]

        await waited_turns(5)
        after_some = owed()
        await waited_turns(30)
        assert owed() == after_some


@pytest.mark.parametrize("nodes", [1, 3])
async def test_what_was_sent_before_the_connection_broke_stays_owed(servers: Servers, name: str, nodes: int) -> None:
    """A ticket was left at each node, then the last one is cut off. The waiter leaves, and comes again there with
    another ticket, which never reaches that node. Once it is back it has neither; the first left a tombstone."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        lines = await lines_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in lines), lease=LONG))
        holds = await stack.enter_async_context(Redlock(*urls_of(some), lease=LONG))
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(client))
        await client.health()  # behind all that was sent before: nothing is in flight
        (ticket,) = tickets_of(client)
        node = nodes_of(client)[-1]
        cut_lines(lines[-1:])
        await until(lambda: node.error is not None)
        waiting.cancel()
        await asyncio.wait({waiting})
        if nodes > 1:
            await gives_up(client, name)
        assert len(pending_releases_of(node)) == 1
        heal_lines(lines)
        await back(client)
        await until(in_queue(some, name, 0))
        with some[-1].cli() as cli:
            assert cli.exists(keys("", name).undone + ticket[:ID_LENGTH])
        await lease.release()


async def test_c3_a_set_frozen_in_one_of_three(servers: Servers, name: str) -> None:
    """An attempt that two nodes won sits in the socket of the third, which is frozen. It is released, the third is
    found down and wakes: its hold is gone, and a tombstone is there whichever it read first."""
    some = [servers.start() for _ in range(3)]
    async with Redlock(*urls_of(some), lease=LONG) as client:
        node = nodes_of(client)[2]
        some[2].freeze()
        lease = await client(name).acquire(timeout=None)
        while node.error is None:
            async with client(f"{name}:other"):
                await asyncio.sleep(0)
        await lease.release()
        assert pending_releases_of(node)
        some[2].thaw()
        await back(client)
        with some[2].cli() as cli:
            await until(lambda: cli.exists(keys("", name).undone + id_of(lease)[:ID_LENGTH]))
        await until(lambda: not holder(some[2], name))


# -- paying ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c19_what_is_owed_is_paid_in_slices(
    servers: Servers, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node comes back that is owed the releases of a hundred locks: each turn of the loop sends a slice of them at
    most, and nothing else is asked of that node before all have left."""
    monkeypatch.setattr(_delivery, "SLICE", 10)
    some = [servers.start() for _ in range(nodes)]
    turn = 0
    sent: list[tuple[int, bytes]] = []
    send = Connection.send

    async with AsyncExitStack() as stack:
        lines = await lines_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in lines), lease=LONG))
        node = nodes_of(client)[-1]
        names = [f"{name}:{i}" for i in range(100)]
        leases = [await client(each).acquire(timeout=None) for each in names]
        cut_lines(lines[-1:])
        await until(lambda: node.error is not None)
        await asyncio.gather(*(lease.release() for lease in leases))
        assert len(pending_releases_of(node)) == 100

        def watched(link: Connection, wire: bytes, handler: Any) -> None:
            if node_of(link) is node:
                sent.append((turn, wire))
            send(link, wire, handler)

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(Connection, "send", watched)
        counting = asyncio.create_task(count_turns())
        again = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names[:5]]
        heal_lines(lines)
        await back(client)
        for each in again:
            await (await each).release()
        counting.cancel()
        releases = [index for index, (_, wire) in enumerate(sent) if b"release" in wire and names_owed(wire, leases)]
        attempts = [index for index, (_, wire) in enumerate(sent) if b"\r\nacquire\r\n" in wire]
        assert len(releases) == 100
        assert not attempts or max(releases) < min(attempts)
        turns = [sent[index][0] for index in releases]
        assert max(turns.count(each) for each in turns) <= 10
        assert not any(holder(each, one) for one in names for each in some)


def names_owed(wire: bytes, leases: list[Any]) -> bool:
    """Whether it is the release of one of these."""
    return any(id_of(lease).encode() in wire for lease in leases)


async def test_what_is_cut_off_while_it_is_paid_stays_owed(
    servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slice goes down with the new connection: it is sent once more on the next."""
    monkeypatch.setattr(_delivery, "SLICE", 5)
    server = servers.start()
    async with AsyncExitStack() as stack:
        (line,) = lines = await lines_to(stack, [server])
        client = await stack.enter_async_context(Redlock(line.url, lease=LONG))
        (node,) = nodes_of(client)
        leases = [await client(f"{name}:{i}").acquire(timeout=None) for i in range(12)]
        cut_lines(lines)
        await until(lambda: node.error is not None)
        await asyncio.gather(*(lease.release() for lease in leases))
        cut_again = swallow(line, b"\r\nrelease\r\n")
        heal_lines(lines)
        await cut_again.wait()
        await back(client)
        await until(lambda: not any(holder(server, f"{name}:{i}") for i in range(12)))


@pytest.mark.parametrize("nodes", [1, 3])
async def test_an_owed_rest_counts_from_the_release(servers: Servers, name: str, nodes: int) -> None:
    """min_hold of 20 s; the release reaches the servers 15 s after it was sent: the name rests for 5 s more."""
    clock = FakeClock()
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        lines = await lines_to(stack, some)
        stores = [Clocked(each.url, clock) for each in lines]
        client = await stack.enter_async_context(Redlock(*stores, lease=LONG, min_hold=20.0))
        lease = await client(name).acquire(timeout=None)
        cut_lines(lines)
        await until(lambda: all(node.error is not None for node in nodes_of(client)))
        await lease.release()
        clock.advance(15.0)
        heal_lines(lines)
        await until(lambda: all(node.error is None for node in nodes_of(client)))
        for server in some:
            with server.cli() as cli:
                await until(lambda: 0 < cli.pttl(name) <= 20_000)
                assert cli.pttl(name) <= 5_000
