"""Failover of a Sentinel deployment: what holders and waiters get, and what it may lose (HAZARDS D5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from asynclock import LockLost, Redlock
from asynclock.events import Event, NodeDown, NodeUp
from tests.support.default_keys import key_of
from tests.support.probes import connection_of, in_quarantine, nodes_of, socket_of, valid_until
from tests.support.services.sentinels import NAME, Deployment, Part, wait
from tests.support.waiters import LIMIT, LONG, until, works

pytestmark = pytest.mark.one_loop("it waits for servers most of the time")


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    """A deployment that the test harms."""
    found = Deployment()
    yield found
    found.stop()


def by_command(deployment: Deployment) -> Part:
    return deployment.failover()


def by_kill(deployment: Deployment) -> Part:
    master = deployment.master
    master.kill()
    return deployment.switched_from(master)


def by_freeze(deployment: Deployment) -> Part:
    master = deployment.master
    master.freeze()
    return deployment.switched_from(master)


FAILOVERS = {"SENTINEL FAILOVER": by_command, "kill -9": by_kill, "SIGSTOP": by_freeze}

every_failover = pytest.mark.parametrize("fail", FAILOVERS.values(), ids=FAILOVERS)

Failover = Callable[[Deployment], Part]


def port_of(client: Redlock) -> int:
    """The port of the server to which the client is connected; 0: none."""
    connection = connection_of(nodes_of(client)[0])
    return 0 if connection is None else int(socket_of(connection).getpeername()[1])


def value(server: Part, name: str) -> bytes:
    """The hold at that server; b"": none."""
    with server.cli() as cli:
        found = cli.get(key_of(name))
    assert found is None or isinstance(found, bytes)
    return found or b""


async def moved(client: Redlock, to: Part) -> None:
    """Return once the client uses that server."""
    await until(lambda: port_of(client) == to.port)


@every_failover
async def test_d5_a_replicated_hold_is_kept(deployment: Deployment, fail: Failover, name: str) -> None:
    """The next renewal goes to the new master, and extends the key there; the release deletes it."""
    async with Redlock(deployment.url, lease=LONG) as client, client(name) as lease:
        master = deployment.master
        wait(lambda: all(value(each, name) for each in deployment.servers), "the hold is replicated")
        before = valid_until(lease)
        new = await asyncio.to_thread(fail, deployment)
        assert new is not master
        await moved(client, new)
        await lease.extend()
        assert valid_until(lease) > before
        assert lease.held
        await lease.release()
        assert not value(new, name)


@pytest.mark.parametrize("fail", [by_kill, by_freeze])
async def test_d5_a_hold_that_the_failover_lost(deployment: Deployment, fail: Failover, name: str) -> None:
    """The body is cancelled when the new master says that it has no such hold; the block raises LockLost."""
    async with Redlock(deployment.url, lease=3.0, max_lease=3.0) as client:
        await works(client, "first")
        deployment.unlink_replicas()
        replicas = deployment.replicas
        cancelled = False
        with pytest.raises(LockLost) as caught:
            async with client(name) as lease:
                deployment.master.kill() if fail is by_kill else deployment.master.freeze()
                for each in replicas:
                    each.thaw()
                try:
                    await asyncio.sleep(LIMIT)
                except asyncio.CancelledError:
                    cancelled = True
                    raise
        assert cancelled
        assert not lease.held
        assert caught.value.reason in ("broken", "taken", "expired")


@every_failover
async def test_waiters_are_served_by_the_new_master(deployment: Deployment, fail: Failover, name: str) -> None:
    """100 tasks of three clients wait while the master changes; the holder releases after that. Each task gets the
    lock, one after the other, within seconds."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redlock(deployment.url, lease=LONG)) for _ in range(3)]
        held = await clients[0](name).acquire()
        assert held is not None
        inside, fences = 0, list[int]()

        async def work(client: Redlock) -> None:
            nonlocal inside
            async with client(name) as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

        tasks = [asyncio.create_task(work(clients[i % 3])) for i in range(100)]
        with deployment.master.cli() as cli:
            await until(lambda: cli.exists(key_of(name)) and cli.keys("*queue"))
        new = await asyncio.to_thread(fail, deployment)
        for client in clients:
            await moved(client, new)
        began = time.monotonic()
        await held.release()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
        assert time.monotonic() - began < 10.0
        assert fences == sorted(set(fences))
        assert not value(new, name)


async def test_c12_the_old_master_that_comes_back_counts_for_nothing(deployment: Deployment, name: str) -> None:
    """It was frozen with an acquire in its socket, and carries that out when it wakes. The client has the lock at the
    new master by then, does not count that, and does not go back."""
    async with Redlock(deployment.url, lease=LONG, patience=LIMIT) as client:
        await works(client, "first")
        old = deployment.master
        old.freeze()
        task = asyncio.create_task(client(name).acquire())
        new = await asyncio.to_thread(deployment.switched_from, old)
        lease = await asyncio.wait_for(task, LIMIT)
        assert lease is not None
        assert port_of(client) == new.port
        theirs = value(new, name)
        assert theirs
        old.thaw()
        wait(lambda: old.role == "slave", "the old master follows the new one")
        assert port_of(client) == new.port
        await lease.extend()
        assert value(new, name) == theirs
        await lease.release()
        assert not value(new, name)


async def test_a_master_that_still_answers_is_left_at_once(deployment: Deployment, name: str) -> None:
    """The client follows the word of the sentinels, before the old master is a replica: without that it would go on
    there, although others lock the name at the new master."""
    told: list[Event] = []
    async with Redlock(deployment.url, lease=LONG) as client:
        client.subscribe(told.append)
        await works(client, name)
        old = deployment.master
        with old.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "default", "-replicaof", "-slaveof")  # it cannot be made a replica
        new = await asyncio.to_thread(deployment.failover)
        await moved(client, new)
        assert old.role == "master"
        await works(client, name)
        await until(lambda: [type(each) for each in told if isinstance(each, NodeDown | NodeUp)] == [NodeDown, NodeUp])
        (down,) = [each for each in told if isinstance(each, NodeDown)]
        assert f"the sentinels have switched to the master 127.0.0.1:{new.port}" in down.error
        assert deployment.url.split("/")[2] in down.node


async def test_c12_a_replica_that_a_sentinel_names(deployment: Deployment, name: str) -> None:
    """Its role is checked before it is used. The error says so, and the next attempt asks the sentinels again."""
    master = deployment.master
    async with Redlock(deployment.url, lease=LONG, patience=LIMIT) as client:
        await works(client, name)
        for each in deployment.sentinels:
            each.freeze()
        with master.cli() as cli:
            cli.replicaof("127.0.0.1", str(deployment.servers[1].port))
        nodes_of(client)[0].lost(connection_of(nodes_of(client)[0]), ConnectionError("cut by the test"))
        for each in deployment.sentinels:
            each.thaw()
        await until(lambda: "whose role is slave" in str(nodes_of(client)[0].error))
        with master.cli() as cli:
            cli.replicaof("NO", "ONE")
        await works(client, name)


async def test_the_sentinels_are_followed_after_their_restart(deployment: Deployment, name: str) -> None:
    """The client listens to them again, so that it hears of the next failover."""
    async with Redlock(deployment.url, lease=LONG) as client:
        await works(client, name)
        for each in deployment.sentinels:
            each.restart()
        deployment.ready()
        old = deployment.master
        with old.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "default", "-replicaof", "-slaveof")
        new = await asyncio.to_thread(deployment.failover)
        await moved(client, new)
        await works(client, name)


# -- a quorum of Sentinel deployments ----------------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[list[Deployment]]:
    """Three small deployments, for a quorum."""
    found: list[Deployment] = []
    try:
        found.extend(Deployment(replicas=1, sentinels=1) for _ in range(3))
        yield found
    finally:
        for each in found:
            each.stop()


@pytest.mark.parametrize("met", [True, False], ids=["that met the old master", "that is new"])
async def test_d5_a_promoted_replica_casts_no_vote(three: list[Deployment], name: str, met: bool) -> None:
    """In a quorum it is like a server that restarted: it may lack holds. So it is in quarantine, for a client that met
    the old master, and for one that did not, too: the sentinels tell it for how long the master has been one."""
    urls = [each.url for each in three]
    options = {"lease": 20.0, "max_lease": 20.0, "node_timeout": 1.0}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Redlock(*urls, **options))
        await works(first, name)
        new = await asyncio.to_thread(three[0].failover)
        client = first if met else await stack.enter_async_context(Redlock(*urls, **options))
        await moved(client, new)
        await until(lambda: in_quarantine(nodes_of(client)[0]))
        assert [in_quarantine(each) for each in nodes_of(client)] == [True, False, False]
        await works(client, name)
        assert (await client.health()).ok


async def test_a_new_quorum_of_deployments_votes_at_once(three: list[Deployment], name: str) -> None:
    """Sentinels that have never switched say nothing about a promotion."""
    async with Redlock(*[each.url for each in three], lease=20.0, max_lease=20.0, node_timeout=1.0) as client:
        assert not any(map(in_quarantine, nodes_of(client)))
        await works(client, name)


async def test_d1_one_deployment_twice(three: list[Deployment], name: str) -> None:
    """By another spelling of its url: the server would have two votes."""
    other = three[0].url.replace("127.0.0.1", "localhost")
    assert NAME in other
    async with AsyncExitStack() as stack:
        client = Redlock(three[0].url, other, three[1].url)
        stack.push_async_callback(client.aclose)
        with pytest.raises(Exception, match="are the same server"):
            await client(name).acquire(timeout=0)
