"""A node that is away has pending releases only for commands that may have reached it; they are sent in slices
(C19). Releases that are in flight when a connection breaks are delivered later (F7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.rules.model import ID_LENGTH, Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores import undelivered
from asynclock.stores.redis import delivery as _delivery
from asynclock.stores.redis import pending
from asynclock.stores.redis.connection import Connection
from asynclock.stores.redis.delivery import Delivery
from asynclock.stores.redis.handlers import IgnoredReply
from asynclock.stores.redis.pending import PendingReleases
from tests.support.cut_servers import Clocked, cut_proxies, heal_proxies, proxies_to, swallow
from tests.support.default_keys import key_of, keys_of
from tests.support.fake_clock import FakeClock
from tests.support.probes import id_of, node_of, nodes_of, pending_releases_of, tickets_of
from tests.support.proxy import RELEASE
from tests.support.servers import Servers
from tests.support.still_clock import idle
from tests.support.waiters import LONG, PATIENT, back, holder, in_queue, until, urls_of


def release(id: str, lease: float = 30.0) -> Op:
    return Op(Verb.RELEASE, MUTEX, "x", id * 32, lease)


def test_pending_releases_are_bounded_by_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three times as many as are kept, the newest are kept; a warning says so, once."""
    monkeypatch.setattr(undelivered, "MOST", 20)
    releases = PendingReleases()
    for i in range(3 * undelivered.MOST):
        releases.add(Op(Verb.RELEASE, MUTEX, "x", f"{i:032}", 30.0), 0.0, 0.0)
    assert len(releases) == undelivered.MOST
    assert releases.drain(0.0, 1)[0].id == f"{2 * undelivered.MOST:032}"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_releases_of_all_leases_of_a_process_are_kept() -> None:
    """100,000 leases are released while their server is away: no release is dropped."""
    releases = PendingReleases()
    for i in range(100_000):
        releases.add(Op(Verb.RELEASE, MUTEX, "x", f"{i:032}", 30.0), 0.0, 0.0)
    assert len(releases) == 100_000


def test_unanswered_ids_are_bounded_by_number_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids whose acquire may still arrive are kept no longer than the hold that it would leave, and only up to a
    number."""
    monkeypatch.setattr(pending, "MOST", 20)
    releases = PendingReleases()

    class Asked:
        op = Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0)
        sent = deadline = 0.0

    def cut(number: int, now: float) -> None:
        handler: Any = Asked()
        handler.op = Op(Verb.ACQUIRE, MUTEX, "x", f"{number:032}", 30.0)
        releases.cut_off([handler], now)

    for i in range(60):
        cut(i, 0.0)
    assert len(releases.unanswered) == 20
    cut(-1, 1000.0)
    assert len(releases.unanswered) == 1


def test_unanswered_ids_are_dropped_after_the_last_outage() -> None:
    """No connection is lost any more. The next releases drop the ids that have expired, some of them each."""
    releases = PendingReleases()
    handlers = [IgnoredReply(Op(Verb.ACQUIRE, MUTEX, "x", f"{each:032}", 30.0), 0.0, 1.0) for each in range(200)]
    releases.cut_off(handlers, 0.0)
    assert releases.was_unanswered(f"{7:032}", 1.0)
    assert len(releases.unanswered) == 200
    assert not any(releases.was_unanswered("new", 1000.0) for _ in range(5))
    assert not releases.unanswered


async def test_a_pending_release_expires_while_the_node_is_down(servers: Servers, name: str) -> None:
    """The key that a release would delete has expired long ago: the release is dropped although the node did not come
    back."""
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


async def test_the_release_of_an_extended_lease_waits_as_long_as_its_key(servers: Servers, name: str) -> None:
    """The program has extended the lease to twenty times its length. The node is away as it is released, and comes back
    long after the first lease and a minute: the release is still sent, and frees the name."""
    clock = FakeClock()
    server = servers.start()
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, [server])
        store = Clocked(proxies[0].url, clock)
        client = await stack.enter_async_context(Redlock(store, lease=10.0, max_lease=200.0))
        lease = await client(name).acquire(timeout=None)
        await lease.extend(lease=200.0)
        (node,) = nodes_of(client)
        cut_proxies(proxies)
        await until(lambda: node.error is not None)
        await lease.release()
        clock.advance(150.0)
        heal_proxies(proxies)
        await until(lambda: not holder(server, name))


async def gives_up(client: Redlock, name: str) -> None:
    """It waits for the name with tickets at all nodes that it reaches, and is cancelled."""
    waiting = asyncio.create_task(client(name).acquire(timeout=None))
    await until(lambda: idle(client))
    waiting.cancel()
    await asyncio.wait({waiting})


@pytest.mark.parametrize("how", ["wins", "gives up"])
async def test_c19_a_dead_node_collects_no_releases(servers: Servers, name: str, how: str) -> None:
    """One of three is dead, and two clients contend for one name. After many waited turns as many releases are pending
    as after some: each turn left a ticket at the live nodes only."""
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

        def pending_now() -> list[tuple[int, int]]:
            pending = [pending_releases_of(nodes_of(each)[2]) for each in (one, two)]
            return [(len(each), len(each.unanswered)) for each in pending]

        await waited_turns(5)
        after_some = pending_now()
        await waited_turns(30)
        assert pending_now() == after_some


@pytest.mark.parametrize("nodes", [1, 3])
async def test_f7_releases_in_flight_when_the_connections_break(servers: Servers, name: str, nodes: int) -> None:
    """Of forty locks. The servers have read none of the releases. They are kept and delivered: the names are free long
    before a lease ends."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), **PATIENT))
        names = [f"{name}:{i}" for i in range(40)]
        leases = [await client(each).acquire(timeout=None) for each in names]
        for each in proxies:
            each.drop_requests = True
        seen = [each.request(*RELEASE) for each in proxies]
        releasing = asyncio.gather(*(lease.release() for lease in leases))
        await asyncio.gather(*(each.wait() for each in seen))
        heal_proxies(proxies)
        await releasing
        await until(lambda: not any(holder(each, one) for one in names for each in some))


@pytest.mark.parametrize("nodes", [1, 3])
async def test_the_release_of_a_command_sent_before_the_break_stays_pending(
    servers: Servers, name: str, nodes: int
) -> None:
    """A ticket was left at each node, then the last one is cut off. The waiter leaves, and comes again with another
    ticket, which never reaches that node. Once the node is back it has neither; the first left a tombstone."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), lease=LONG))
        holds = await stack.enter_async_context(Redlock(*urls_of(some), lease=LONG))
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(client))
        await client.health()  # behind all that was sent before: nothing is in flight
        (ticket,) = tickets_of(client)
        node = nodes_of(client)[-1]
        cut_proxies(proxies[-1:])
        await until(lambda: node.error is not None)
        waiting.cancel()
        await asyncio.wait({waiting})
        if nodes > 1:
            await gives_up(client, name)
        assert len(pending_releases_of(node)) == 1
        heal_proxies(proxies)
        await back(client)
        await until(in_queue(some, name, 0))
        with some[-1].cli() as cli:
            assert cli.exists(keys_of(name).undone + ticket[:ID_LENGTH])
        await lease.release()


async def test_c3_a_set_frozen_in_one_of_three(servers: Servers, name: str) -> None:
    """An attempt that two nodes granted is in the socket of the third, which is frozen. It is released, the third is
    found down and wakes: its hold is gone, and a tombstone is there whichever command it read first."""
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
            await until(lambda: cli.exists(keys_of(name).undone + id_of(lease)[:ID_LENGTH]))
        await until(lambda: not holder(some[2], name))


# -- paying ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c19_pending_releases_are_sent_in_slices(
    servers: Servers, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node comes back, with the releases of a hundred locks pending. Each turn of the loop sends a slice of them at
    most, and no other command is sent to that node before all of them."""
    monkeypatch.setattr(_delivery, "SLICE", 10)
    some = [servers.start() for _ in range(nodes)]
    turn = 0
    sent: list[tuple[int, bytes]] = []
    send = Connection.send

    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), lease=LONG))
        node = nodes_of(client)[-1]
        names = [f"{name}:{i}" for i in range(100)]
        leases = [await client(each).acquire(timeout=None) for each in names]
        cut_proxies(proxies[-1:])
        await until(lambda: node.error is not None)
        await asyncio.gather(*(lease.release() for lease in leases))
        assert len(pending_releases_of(node)) == 100

        def watched(connection: Connection, wire: bytes, handler: Any) -> None:
            if node_of(connection) is node:
                sent.append((turn, wire))
            send(connection, wire, handler)

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(Connection, "send", watched)
        counting = asyncio.create_task(count_turns())
        again = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names[:5]]
        heal_proxies(proxies)
        await back(client)
        for each in again:
            await (await each).release()
        counting.cancel()
        releases = [
            index for index, (_, wire) in enumerate(sent) if b"release" in wire and releases_one_of(wire, leases)
        ]
        attempts = [index for index, (_, wire) in enumerate(sent) if b"\r\nacquire\r\n" in wire]
        assert len(releases) == 100
        assert not attempts or max(releases) < min(attempts)
        turns = [sent[index][0] for index in releases]
        assert max(turns.count(each) for each in turns) <= 10
        assert not any(holder(each, one) for one in names for each in some)


class WillingServer:
    """A connection, and a server that carries out all releases. What it does with a PING, behind the releases of a
    slice, the test says."""

    def __init__(self, releases: PendingReleases) -> None:
        self.transport = self
        self.sent: list[str] = []
        self.on_ping: list[Callable[[], object]] = []
        loop = asyncio.get_running_loop()
        self.delivery = Delivery(releases, "", loop.time, lambda *words, **options: self)  # type: ignore[arg-type]

    def is_closing(self) -> bool:
        return False

    def send(self, wire: bytes, handler: Any) -> None:
        del wire
        self.sent.append(handler.op.id[0])

    async def answer_of(self) -> None:
        await asyncio.sleep(0)
        if self.on_ping:
            self.on_ping.pop()()


@pytest.mark.parametrize("how", ["late", "refused"])
async def test_releases_that_are_refused_as_the_last_ones_are_delivered(how: str) -> None:
    """A busy server refused a release. It is sent again, and another one is refused: while a slow answer ends the task
    that sends them, or in the turn in which that ends. The connection is good, and gets that release as well."""
    releases, loop = PendingReleases(), asyncio.get_running_loop()
    server = WillingServer(releases)

    def refuse(id: str) -> None:
        releases.add(release(id), loop.time(), loop.time())
        server.delivery.refused(server)  # type: ignore[arg-type]

    def late() -> None:
        refuse("b")
        raise TimeoutError

    server.on_ping = [late if how == "late" else lambda: loop.call_soon(refuse, "b")]
    refuse("a")
    await until(lambda: server.sent == ["a", "b"])


async def test_a_program_that_cancels_all_tasks_leaves_refused_releases_to_be_sent() -> None:
    """A server refused a release for now. The program cancels all tasks of its loop, as after Ctrl-C, and goes on. The
    release is sent again on the same connection."""
    releases, loop = PendingReleases(), asyncio.get_running_loop()
    server = WillingServer(releases)
    releases.add(release("a"), loop.time(), loop.time())
    server.delivery.refused(server)  # type: ignore[arg-type]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await until(lambda: server.sent == ["a"])


def releases_one_of(wire: bytes, leases: list[Any]) -> bool:
    """Whether it is the release of one of these."""
    return any(id_of(lease).encode() in wire for lease in leases)


async def test_f7_a_slice_that_is_cut_off_stays_pending(
    servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slice is lost with the new connection: it is sent once more on the next."""
    monkeypatch.setattr(_delivery, "SLICE", 5)
    server = servers.start()
    async with AsyncExitStack() as stack:
        (proxy,) = proxies = await proxies_to(stack, [server])
        client = await stack.enter_async_context(Redlock(proxy.url, lease=LONG))
        (node,) = nodes_of(client)
        leases = [await client(f"{name}:{i}").acquire(timeout=None) for i in range(12)]
        cut_proxies(proxies)
        await until(lambda: node.error is not None)
        await asyncio.gather(*(lease.release() for lease in leases))
        cut_again = swallow(proxy, b"\r\nrelease\r\n")
        heal_proxies(proxies)
        await cut_again.wait()
        await back(client)
        await until(lambda: not any(holder(server, f"{name}:{i}") for i in range(12)))


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_pending_min_hold_counts_from_the_release(servers: Servers, name: str, nodes: int) -> None:
    """min_hold of 20 s; the release reaches the servers 15 s after it was sent: the name rests for 5 s more."""
    clock = FakeClock()
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        stores = [Clocked(each.url, clock) for each in proxies]
        client = await stack.enter_async_context(Redlock(*stores, lease=LONG, min_hold=20.0))
        lease = await client(name).acquire(timeout=None)
        cut_proxies(proxies)
        await until(lambda: all(node.error is not None for node in nodes_of(client)))
        await lease.release()
        clock.advance(15.0)
        heal_proxies(proxies)
        await until(lambda: all(node.error is None for node in nodes_of(client)))
        for server in some:
            with server.cli() as cli:
                await until(lambda: 0 < cli.pttl(key_of(name)) <= 20_000)
                assert cli.pttl(key_of(name)) <= 5_000
