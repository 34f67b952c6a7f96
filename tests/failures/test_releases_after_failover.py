"""A server takes the place of another one and lacks its last writes: the releases that it lacks are sent to it again,
and no other id is released (HAZARDS F21)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Lease, Lock, Redlock
from asynclock.rules.model import ID_LENGTH, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis import pending
from asynclock.stores.redis.handlers import IgnoredReply
from asynclock.stores.redis.pending import LATELY, PendingReleases, release_again
from tests.support.cut_servers import Clocked
from tests.support.default_keys import key_of, keys_of
from tests.support.fake_clock import FakeClock
from tests.support.probes import acquisitions_of, id_of, lose, nodes_of, pauses, tickets_of
from tests.support.servers import Servers
from tests.support.standby import Standby, released_ids, standby
from tests.support.still_clock import idle
from tests.support.waiters import LONG, holder, in_queue, reconnected, until


@pytest.fixture
async def pair(servers: Servers) -> AsyncIterator[Standby]:
    async with standby(servers) as found:
        yield found


KINDS: dict[str, Callable[[Redlock, str], Any]] = {
    "mutex": lambda client, name: client(name),
    "plain": lambda client, name: client(name, fencing=False),
    "semaphore": lambda client, name: client.semaphore(name, 1),
    "writer": lambda client, name: client.write(name),
    "multi": lambda client, name: client.multi(name, f"{name}:2"),
}


# -- the releases that a new server lacks ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_f21_a_release_is_sent_again_to_a_new_server(pair: Standby, name: str, kind: str) -> None:
    """The release was acknowledged by the server that is gone. The name is free at the new one before any other client
    can ask, and not when the lease ends. An acquire that asks at once gets it."""
    async with Redlock(pair.url, lease=LONG) as client:
        lock: Lock = KINDS[kind](client, name)
        async with lock:
            pair.replicate()
        await pair.fail_over(nodes_of(client)[0])
        lease = await lock.acquire(timeout=0)
        assert lease is not None
        await lease.release()


async def test_f21_the_releases_are_sent_before_the_tickets(pair: Standby, name: str) -> None:
    """A task waits behind another client, which released just before the failover: the new server grants the name to
    the waiter as soon as the two clients are connected."""
    async with Redlock(pair.url, lease=LONG) as one, Redlock(pair.url, lease=LONG) as two:
        lease = await one(name).acquire(timeout=None)
        waiting = asyncio.create_task(two(name).acquire(timeout=None))
        await until(lambda: in_queue([pair.main], name, 1)() and idle(two))
        pair.replicate()
        await lease.release()
        first = await waiting
        await first.release()
        await asyncio.gather(pair.fail_over(nodes_of(one)[0]), reconnected(nodes_of(two)[0]))
        again = await two(name).acquire(timeout=5.0)
        assert again is not None
        await again.release()


async def test_f21_min_hold_counts_from_the_first_release(pair: Standby, name: str) -> None:
    """The name rests for what is left of min_hold, on the server that lacks the release."""
    clock = FakeClock()
    async with Redlock(Clocked(pair.url, clock), lease=LONG, min_hold=20.0) as client:
        async with client(name):
            pair.replicate()
        clock.advance(LATELY / 2)
        await pair.fail_over(nodes_of(client)[0])
        with pair.spare.cli() as cli:
            await until(lambda: 0 < cli.pttl(key_of(name)) <= 1000 * (20.0 - LATELY / 2))  # type: ignore[operator]


async def test_f21_a_release_of_long_ago_is_not_sent_again(
    pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two releases only the one of the last two seconds is."""
    clock = FakeClock()
    async with Redlock(Clocked(pair.url, clock), lease=LONG) as client:
        async with client(f"{name}:old"):
            pass
        clock.advance(LATELY)
        async with client(f"{name}:new") as lease:
            own = id_of(lease)
        clock.advance(0.1)
        ids = released_ids(monkeypatch)
        await pair.fail_over(nodes_of(client)[0])
        await client.health()
        assert ids == [own]
        with pair.spare.cli() as cli:
            assert cli.exists(keys_of(f"{name}:new").undone + own[:ID_LENGTH])


async def test_f21_connections_that_break_again_and_again(
    pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new connection gets the release once more, for two seconds from its first sending."""
    clock = FakeClock()
    async with Redlock(Clocked(pair.url, clock), lease=LONG) as client:
        async with client(name) as lease:
            own = id_of(lease)
        ids = released_ids(monkeypatch)
        for _ in range(4):
            clock.advance(LATELY * 0.4)
            await pair.fail_over(nodes_of(client)[0])
            await client.health()
        assert ids == [own, own]


# -- what is never released --------------------------------------------------------------------------------------------


async def still_there(pair: Standby, name: str, client: Redlock, id: str, ids: list[str]) -> None:
    """After the failover the new server has the hold of that id, and no release of it was sent."""
    await pair.fail_over(nodes_of(client)[0])
    await client.health()
    assert holder(pair.spare, name).decode() == id
    assert id not in ids


async def held_again(client: Redlock, name: str) -> Lease:
    """A lease of a name that this client has released before."""
    async with client(name):
        pass
    return await client(name).acquire(timeout=None)


async def test_f21_a_hold_is_not_released(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold that follows one that was released. The new server has it already."""
    ids = released_ids(monkeypatch)
    async with Redlock(Clocked(pair.url, FakeClock()), lease=LONG) as client:
        async with client(name) as first:
            before = id_of(first)
        lease = await client(name).acquire(timeout=None)
        pair.replicate()
        await still_there(pair, name, client, id_of(lease), ids)
        assert ids == [before, before]
        await lease.extend()
        await lease.release()


async def test_f21_a_hold_of_another_client_is_not_released(
    pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got the name after this client released it."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client, Redlock(pair.main.url, lease=LONG) as other:
        async with client(name):
            pass
        lease = await other(name).acquire(timeout=None)
        pair.replicate()
        await still_there(pair, name, client, id_of(lease), ids)
        await lease.release()


async def test_f21_an_attempt_in_flight(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new server has its hold, and the client has no answer. It undoes the attempt, and holds the name under
    another id, or it asks with the same id: whichever it holds in the end is not released."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client:
        async with client(name):
            pass
        pair.proxy.hold_on = key_of(name).encode()
        asking = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: holder(pair.main, name))
        pair.replicate()
        await pair.fail_over(nodes_of(client)[0])
        lease = await asking
        await client.health()
        assert holder(pair.spare, name).decode() == id_of(lease)
        assert id_of(lease) not in ids
        await lease.release()


@pytest.mark.parametrize("notified", [True, False])
async def test_f21_a_granted_ticket(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch, notified: bool) -> None:
    """A ticket became the hold. The new server has that, and the notice of it may be lost."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client, Redlock(pair.main.url, lease=LONG) as other:
        async with client(name):
            pass
        theirs = await other(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: in_queue([pair.main], name, 1)() and all(map(pauses, acquisitions_of(client))))
        (ticket,) = tickets_of(client)
        if not notified:
            pair.proxy.hold_replies()
        await theirs.release()
        await until(lambda: holder(pair.main, name).decode().startswith(ticket))
        if notified:
            await waiting
        pair.replicate()
        if not notified:
            pair.proxy.drop_replies = True
            pair.proxy.let_go()
            await until(lambda: not pair.proxy.held)
            pair.proxy.drop_replies = False
        await pair.fail_over(nodes_of(client)[0])
        lease = await waiting
        await client.health()
        assert id_of(lease).startswith(ticket)
        assert holder(pair.spare, name).decode() == id_of(lease)
        assert id_of(lease) not in ids
        await lease.release()


async def test_f21_a_second_round(servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over three nodes with different counters. The second round is under way as one of them gets another server."""
    ids = released_ids(monkeypatch)
    others = servers.start_together(2)
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(standby(servers))
        urls = [pair.url, *(each.url for each in others)]
        client = await stack.enter_async_context(Redlock(*urls, lease=LONG, node_timeout=10.0))
        async with client(name) as lease:
            token = lease.fence
        for nth, each in enumerate([pair.main, *others]):
            with each.cli() as cli:
                cli.set(keys_of(name).fence, token + 10_000_000 + nth)
        pair.proxy.hold_on = b"\r\nextend\r\n"
        lease = await client(name).acquire(timeout=None)
        await until(lambda: pair.proxy.held)  # the answer of the first node to the second round
        pair.replicate()
        await still_there(pair, name, client, id_of(lease), ids)
        await lease.extend()
        await lease.release()


async def test_f21_a_detached_hold(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client adopts it from the new server."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client, Redlock(pair.spare.url, lease=LONG) as other:
        lease = await held_again(client, name)
        own = id_of(lease)
        handle = await lease.detach()
        pair.replicate()
        await still_there(pair, name, client, own, ids)
        adopted = await other.adopt(handle)
        await adopted.release()


async def test_f21_a_dropped_hold(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by time."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client:
        lease = await held_again(client, name)
        own = id_of(lease)
        with pytest.warns(ResourceWarning):
            del lease
            gc.collect()
        pair.replicate()
        await still_there(pair, name, client, own, ids)


async def test_f21_a_lost_hold(pair: Standby, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner has not ended its block yet. Its release is sent then, and only then."""
    ids = released_ids(monkeypatch)
    async with Redlock(pair.url, lease=LONG) as client:
        lease = await held_again(client, name)
        lose(lease)
        pair.replicate()
        await still_there(pair, name, client, id_of(lease), ids)


# -- how many are kept -------------------------------------------------------------------------------------------------


def release(number: int, sent: float = 0.0) -> Op:
    op = Op(Verb.RELEASE, MUTEX, f"x{number % 2}", f"{number:032}", 30.0)
    op.sent = sent
    return op


def sent_again(releases: PendingReleases, now: float) -> list[int]:
    return [int(each.id) for each in releases.drain(now, 1000)]


def test_f21_the_releases_that_are_kept_are_bounded() -> None:
    """The newest are kept."""
    releases = PendingReleases()
    for i in range(pending.MOST_SENT + 10):
        releases.sent.append(release(i))
    releases.cut_off([], 0.0)
    assert releases.to_send == pending.MOST_SENT
    assert sent_again(releases, 0.0)[0] == 10


def test_f21_an_undo_is_sent_again_without_its_ticket() -> None:
    """Over N nodes the undo of an attempt puts the ticket back. The owner of the ticket sends that again by itself."""
    back = Queueing(Serve.WAKE, waiter="w" * ID_LENGTH, number=3, fresh=9.0)
    again = release_again(Op(Verb.RELEASE, MUTEX, "x", "a" * ID_LENGTH, 30.0, queueing=back))
    assert (again.id, again.queueing.number, again.queueing.waiter) == ("a" * ID_LENGTH, 0, "")


def test_f21_a_server_that_stood_still() -> None:
    """It answered nothing for five seconds, and is replaced: what it acknowledged in its last two seconds counts."""
    releases = PendingReleases()
    for i, sent in enumerate((97.0, 98.5, 99.9)):
        releases.sent.append(release(i, sent))
    renewal = IgnoredReply(Op(Verb.EXTEND, MUTEX, "x", "", 30.0), 100.0, 100.0)
    releases.cut_off([renewal], 105.0, 100.0)
    assert sent_again(releases, 105.0) == [1, 2]


def test_f21_a_release_without_an_answer_is_sent_once_more() -> None:
    """It is pending, and not among the releases of the last moments as well."""
    releases, op = PendingReleases(), release(7, 0.5)
    releases.sent.append(op)

    releases.cut_off([IgnoredReply(op, 0.5, 0.5)], 1.0)
    assert sent_again(releases, 1.0) == [7]


def test_f21_a_release_that_was_refused_is_sent_once_more() -> None:
    """As by a server that turned out to be a replica: on each connection that follows it is sent once."""
    releases, op = PendingReleases(), release(7, 0.5)
    releases.sent.append(op)
    for now in (1.0, 1.1, 1.2):
        releases.add(op, now, op.sent)
        releases.cut_off([], now)
        assert sent_again(releases, now) == [7]


def test_f21_what_is_not_sent_in_time_is_dropped() -> None:
    """The keys have expired by then."""
    releases = PendingReleases()
    releases.sent.append(release(1))
    releases.cut_off([], 1.0)
    releases.prune(30.0)
    assert releases.to_send == 1
    releases.prune(200.0)
    assert releases.to_send == 0


def test_f21_another_master_gets_the_releases_of_its_slots() -> None:
    """They are not sent to the old one."""
    releases = PendingReleases()
    for i in range(4):
        releases.sent.append(release(i))
    releases.cut_off([], 1.0)
    assert [int(each.id) for each in releases.take(lambda op: op.name == "x1")] == [1, 3]
    assert sent_again(releases, 1.0) == [0, 2]
