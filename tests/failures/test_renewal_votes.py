"""What the nodes' answers do to a hold: which nodes count for its validity and until when, which are healed, and which
get the release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from asynclock import Lease, LockLost, QuorumUnavailable, Redlock
from asynclock.quorum.ballot import drift
from asynclock.rules.model import ID_LENGTH
from tests.support.cancelled_waits import sent
from tests.support.default_keys import key_of, keys_of
from tests.support.distant_stores import Beyond
from tests.support.memory_probes import forget_all
from tests.support.probes import check, grant_of, id_of, nodes_of, ping, release_by_script
from tests.support.proxied_clients import behind_proxies, forget, learn, unknown
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, back, calls, holder, until, urls_of


def forgets(server: Server, name: str) -> None:
    """The server loses the key."""
    with server.cli() as cli:
        assert cli.delete(key_of(name))


# -- what counts -----------------------------------------------------------------------------------------------------


async def test_a_node_that_did_not_answer_does_not_count(five: list[Server], name: str) -> None:
    """Two of five are down as the lock is taken, and one of the other three loses the key. As soon as it says so, the
    lease is over, for with it and those two a rival has a majority."""
    async with Redlock(*urls_of(five), lease=LONG, trust_restarts=True, node_timeout=5.0) as client:
        await client.health()
        for server in five[3:]:
            server.kill()
        lease = await client(name).acquire(timeout=LIMIT)
        assert lease is not None
        forgets(five[0], name)
        with pytest.raises(LockLost):
            await lease.extend()
        for server in five[3:]:
            server.restart()
        async with Redlock(*urls_of(five), lease=LONG, trust_restarts=True) as rival:
            await back(rival)
            got = await rival(name).acquire(timeout=LIMIT)
            assert got is not None
            assert not lease.held
            async with asyncio.timeout(LIMIT):
                assert await lease.wait_lost()
            await got.release()


@pytest.mark.filterwarnings("ignore:2 nodes survive")
@pytest.mark.parametrize("call", [Lease.extend, Lease.detach])
async def test_extend_says_that_the_lease_is_over(
    five: list[Server], name: str, call: Callable[[Lease], Awaitable[object]]
) -> None:
    """One of two nodes has lost the key, and no node has failed. The lease is over: that is no outage."""
    async with Redlock(*urls_of(five[:2]), lease=LONG, node_timeout=5.0) as client:
        lease = await client(name).acquire(timeout=LIMIT)
        forgets(five[0], name)
        with pytest.raises(LockLost) as lost:
            await call(lease)
        assert not lease.held
        assert lost.value.reason == "expired"
        assert "the key is gone" in str(lost.value)


@pytest.mark.parametrize("nodes", [3, 5])
async def test_a_no_counts_while_the_round_is_undecided(name: str, nodes: int) -> None:
    """A majority holds, without a node to spare. One of these nodes has lost the key; it refuses a renewal, and the
    others have not answered yet. The lease is over at that reply, and not at the end of the round."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(renew=False) as client:
        await client.health()
        spare = beyond.far[nodes // 2 + 1 :]
        for store in spare:
            store.silent = True
        lease = await beyond.lease(client)
        beyond.disconnect()
        for store in beyond.far[1:]:
            store.silent = True
        forget_all(beyond.far[0])
        extending = asyncio.create_task(lease.extend())
        await beyond.pass_time(0.003, 0.0005)
        assert not extending.done()
        assert not lease.held
        lost = asyncio.create_task(lease.wait_lost())
        await beyond.finish(lost)
        beyond.disconnect()
        with suppress(LockLost, QuorumUnavailable):
            await extending


@pytest.mark.parametrize("nodes", [1, 3, 5])
async def test_a_renewal_leaves_room_for_drift(name: str, nodes: int) -> None:
    """After each renewal the lease ends before the keys do, by as much as clocks may differ; and so it does after a
    hand-made extend to another length."""
    still = Still(nodes, name)
    async with still.held(lease=30.0) as (_, lease):
        for length in (30.0, 50.0):
            still.clock.advance(7.0)
            await turns()
            await lease.extend(lease=length)
            for store in still.stores:
                assert [hold.ends for hold in state_of(store, name).holds] == [pytest.approx(store.now() + length)]
            assert lease.remaining == pytest.approx(length - drift(length))


@pytest.mark.parametrize("cause", ["forgotten", "max_hold"])
async def test_the_body_is_cancelled_when_the_lease_ends_sooner(name: str, cause: str) -> None:
    """The lease is not renewed, so the watchdog is to look at its end. A node forgets it: without a spare node the body
    is cancelled at once; with one it goes on, up to max_hold and no longer."""
    spare = cause == "max_hold"
    beyond = Beyond(3, name, way=0.001)
    async with beyond.opened(renew=False, lease=30.0, node_timeout=0.05) as client:
        await client.health()
        beyond.far[2].silent = not spare
        lease = await beyond.lease(client, max_hold=5.0)
        beyond.disconnect()
        reasons: list[str] = []

        async def body() -> None:
            try:
                async with lease:
                    await asyncio.Event().wait()
            except LockLost as lost:
                reasons.append(lost.reason)

        guarded = asyncio.create_task(body())
        await beyond.pass_time(1.0)
        forget_all(beyond.far[0])
        check(lease)
        await beyond.pass_time(0.1)
        assert reasons == ([] if spare else ["expired"])
        await beyond.pass_time(3.85)
        assert guarded.done() is not spare
        await beyond.pass_time(0.1)
        assert reasons == ["max_hold" if spare else "expired"]
        await guarded


# -- which nodes are healed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3, 5])
@pytest.mark.parametrize("kind", ["read", "permit"])
async def test_each_of_several_holds_is_healed(five: list[Server], name: str, nodes: int, kind: str) -> None:
    """A node loses the key of a lock that three clients hold. Each gets its own hold back there with its renewal,
    though by then the others are back already."""
    some = five[:nodes]
    async with (
        Redlock(*urls_of(some), lease=LONG) as first,
        Redlock(*urls_of(some), lease=LONG) as second,
        Redlock(*urls_of(some), lease=LONG) as third,
    ):
        clients = (first, second, third)
        await sent(clients)  # each is connected to all nodes, and not to a majority only
        leases: list[Any] = [
            await (each.read(name) if kind == "read" else each.semaphore(name, 3)).acquire(timeout=None)
            for each in clients
        ]
        await sent(clients)
        forgets(some[0], name)
        for number, lease in enumerate(leases, 1):
            await lease.extend()
            await until(lambda number=number: len(members(some[0], name)) == number)  # type: ignore[misc]
        assert members(some[0], name) == {id_of(lease).encode() for lease in leases}
        for lease in leases:
            await lease.release()
        await sent(clients)
        assert not any(members(server, name) for server in some)


@pytest.mark.parametrize("nodes", [3, 5])
async def test_a_node_that_was_healed_is_not_counted_out(name: str, nodes: int) -> None:
    """A minority loses the key, one node after the other, and gets it again. Then one more node loses it, and says so
    before those that were healed have answered: with them there is a majority, and the lease goes on."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(renew=False) as client:
        lease = await beyond.lease(client)
        for index in range(nodes // 2 + 1):
            for store in beyond.far:
                store.way = 0.003
            beyond.far[index].way = 0.001
            forget_all(beyond.far[index])
            await beyond.finish(asyncio.create_task(lease.extend()))
            await beyond.pass_time(0.05)
            assert lease.held
        assert all(state_of(store, name).holds for store in beyond.far)
        await beyond.finish(asyncio.create_task(lease.release()))


async def test_a_hold_without_a_fence_is_not_healed(five: list[Server], name: str) -> None:
    """A heal carries a fence, which a lock without fencing must not get."""
    some = five[:3]
    async with Redlock(*urls_of(some), lease=LONG) as client:
        lease = await client(name, fencing=False).acquire(timeout=None)
        await sent([client])
        forgets(some[0], name)
        await lease.extend()
        await sent([client])
        assert [bool(holder(server, name)) for server in some] == [False, True, True]
        with some[0].cli() as cli:
            assert not cli.exists(keys_of(name).fence)
        await lease.release()


def members(server: Server, name: str) -> set[bytes]:
    with server.cli() as cli:
        found: Any = cli.zrange(key_of(name), 0, -1)
    return set(found)


# -- nothing comes back after the release ----------------------------------------------------------------------------


async def held_through(proxies: list[Proxy], client: Redlock, name: str) -> Lease:
    """A lease that all three nodes have granted."""
    lease = await client(name, renew=False).acquire(timeout=None)
    assert lease is not None
    release_by_script(client)
    await sent([client])
    return lease


async def released(lease: Lease, odd: Server) -> None:
    """And the third server, too, has carried that out."""
    before = calls(odd)
    await lease.release()
    await until(lambda: calls(odd) > before)


@pytest.mark.parametrize("slow", [1, 2], ids=["grants-late", "refuses-late"])
async def test_a4_a_reply_after_the_release_heals_nothing(servers: Any, name: str, slow: int) -> None:
    """The third server has lost the key. It is slow to say so, or the second one is slow to renew the lease: the reply
    that shows that the third one needs the key comes after the release. No key is created there."""
    some = [servers.start() for _ in range(3)]
    odd = some[2]
    async with behind_proxies(some, lease=LONG, node_timeout=5.0) as (client, proxies):
        lease = await held_through(proxies, client, name)
        forgets(odd, name)
        proxies[slow].hold_replies()
        before = calls(odd)
        extending = asyncio.create_task(lease.extend())
        if slow == 2:
            await extending
        await until(lambda: calls(odd) > before)
        before = calls(odd)
        releasing = asyncio.create_task(lease.release())
        await until(lambda: calls(odd) > before)
        if slow == 1:
            await ping(nodes_of(client)[2], name)
        proxies[slow].let_go()
        await asyncio.gather(extending, releasing, return_exceptions=True)
        await sent([client])
        assert not any(holder(server, name) for server in some)


async def test_c16_a_heal_is_not_sent_again(servers: Any, name: str) -> None:
    """The third server has lost the key, and the script as it is healed. Another client loads the script, and the lock
    is released; only then comes the reply that the heal met no script."""
    some = [servers.start() for _ in range(3)]
    odd = some[2]
    async with behind_proxies(some, lease=LONG, node_timeout=5.0) as (client, proxies):
        lease = await held_through(proxies, client, name)
        forgets(odd, name)
        proxies[2].hold_replies()
        before = calls(odd)
        await lease.extend()
        await until(lambda: calls(odd) > before and proxies[2].held)
        forget(odd)
        proxies[2].let_go()
        proxies[2].hold_replies()  # but for the one that waited
        await until(lambda: unknown(odd))
        learn(odd)
        await released(lease, odd)
        proxies[2].let_go()
        await sent([client])
        assert not any(holder(server, name) for server in some)


async def test_c16_an_acquire_is_not_sent_again_after_the_release(servers: Any, name: str) -> None:
    """The third server does not know the script as the lock is taken by the other two. Another client loads it, and the
    lock is released; only then comes the reply that the acquire met no script."""
    some = [servers.start() for _ in range(3)]
    odd = some[2]
    async with behind_proxies(some, lease=LONG, node_timeout=5.0) as (client, proxies):
        await client.health()
        release_by_script(client)
        forget(odd)
        proxies[2].hold_replies()
        lease = await client(name, renew=False).acquire(timeout=None)
        await until(lambda: unknown(odd))
        learn(odd)
        await released(lease, odd)
        proxies[2].let_go()
        await sent([client])
        assert not any(holder(server, name) for server in some)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c16_an_acquire_is_not_sent_again_after_its_undo(servers: Any, name: str, nodes: int) -> None:
    """No server knows the script. Another client loads it, the acquiring task is cancelled, and its undo is carried out
    everywhere; only then come the replies that the acquire met no script."""
    some = [servers.start() for _ in range(nodes)]
    async with behind_proxies(some, lease=LONG, node_timeout=5.0) as (client, proxies):
        await client.health()
        release_by_script(client)
        for server, proxy in zip(some, proxies, strict=True):
            forget(server)
            proxy.hold_replies()
        asking = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: all(unknown(server) for server in some))
        before = [calls(server) for server in some]
        for server in some:
            learn(server)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: all(calls(server) > was for server, was in zip(some, before, strict=True)))
        for proxy in proxies:
            proxy.let_go()
        await sent([client])
        assert not any(holder(server, name) for server in some)


# -- which nodes get the release -------------------------------------------------------------------------------------


async def test_a_node_that_has_not_answered_gets_the_release(five: list[Server], name: str) -> None:
    """One of five is down, and the grant of another has not arrived: that node gets the release with the rest."""
    async with Proxy(five[3].path.with_suffix(".p"), five[3].path) as proxy:
        urls = [*urls_of(five[:3]), proxy.url, five[4].url]
        async with Redlock(*urls, lease=LONG, node_timeout=5.0) as client:
            await client.health()
            node = nodes_of(client)[4]
            five[4].kill()
            await until(lambda: node.error is not None)
            proxy.hold_replies()
            lease = await client(name, renew=False).acquire(timeout=None)
            assert grant_of(lease).failed
            await until(lambda: holder(five[3], name))
            await lease.release()
            proxy.let_go()
            await sent_to(client, 4)
            assert not any(holder(server, name) for server in five[:4])


async def sent_to(client: Redlock, nodes: int) -> None:
    """The first nodes have carried out all that was sent to them."""
    await asyncio.gather(*(node.probe("any") for node in nodes_of(client)[:nodes]))


@pytest.mark.parametrize("nodes", [3, 5])
async def test_a_node_that_was_healed_gets_the_release(five: list[Server], name: str, nodes: int) -> None:
    """It was down as the lock was taken, and got the key with a renewal: it gets the release with the rest."""
    some = five[:nodes]
    async with Redlock(*urls_of(some), lease=LONG, trust_restarts=True) as client:
        await client.health()
        node = nodes_of(client)[-1]
        some[-1].kill()
        await until(lambda: node.error is not None)
        lease = await client(name, renew=False).acquire(timeout=None)
        some[-1].restart()
        await back(client)
        await lease.extend()
        await until(lambda: holder(some[-1], name))
        await lease.release()
        await sent([client])
        assert not any(holder(server, name) for server in some)


# -- messages on our channel -----------------------------------------------------------------------------------------

NOBODY = "0" * ID_LENGTH


@pytest.mark.parametrize("bound", ["validity", "max_hold"])
async def test_a_no_delays_no_loss(name: str, bound: str) -> None:
    """Three nodes with a long node timeout. One says that it has lost the hold, one is silent, and the round stays open
    beyond the end of the lease, or of max_hold: the body is cancelled at that end, not at the end of the round."""
    beyond = Beyond(3, name, way=0.001)
    options = {"max_hold": 29.0} if bound == "max_hold" else {}
    async with beyond.opened(renew=False, lease=30.0, node_timeout=10.0) as client:
        await client.health()
        lease = await beyond.lease(client, **options)
        began, ended = beyond.clock.now(), []

        async def body() -> None:
            with pytest.raises(LockLost):
                async with lease:
                    await asyncio.Event().wait()
            ended.append(beyond.clock.now() - began)

        running = asyncio.create_task(body())
        await beyond.pass_time(28.0, 0.1)
        forget_all(beyond.far[0])
        for far in beyond.far[1:]:
            far.silent = True
        extending = asyncio.create_task(lease.extend())
        await beyond.pass_time(3.0, 0.05)
        assert running.done()
        assert ended[0] <= (29.2 if bound == "max_hold" else 29.9)
        beyond.disconnect()
        await asyncio.gather(running, extending, return_exceptions=True)
