"""Failover of a Sentinel deployment: what holders and waiters get, and what it may lose (HAZARDS D5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from asynclock import ConfigError, LockLost, Redlock
from asynclock.events import Event, NodeDown, NodeUp
from tests.support.default_keys import key_of
from tests.support.probes import connection_of, in_quarantine, nodes_of, socket_of, valid_until
from tests.support.services.sentinels import Deployment, Part, wait
from tests.support.waiters import LIMIT, LONG, PATIENT, healthy, until, works


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


async def replaced(deployment: Deployment, client: Redlock) -> tuple[Part, Part]:
    """A failover after which the old master goes on as a master: only the sentinels tell of it. Returns both masters
    once the client has moved."""
    old = deployment.master
    with old.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "default", "-replicaof", "-slaveof")  # it cannot be made a replica
    new = await asyncio.to_thread(deployment.failover)
    await moved(client, new)
    return old, new


async def test_d5_a_hold_that_the_failover_lost(deployment: Deployment, name: str) -> None:
    """The body is cancelled when the new master says that it has no such hold; the block raises LockLost. The client
    asks it as soon as it is connected, long before the next renewal."""
    async with Redlock(deployment.url, lease=600.0, max_lease=600.0) as client:
        await works(client, "first")
        deployment.unlink_replicas()
        replicas = deployment.replicas
        cancelled = False
        with pytest.raises(LockLost) as caught:
            async with client(name) as lease:
                deployment.master.kill()
                for each in replicas:
                    each.thaw()
                try:
                    await asyncio.sleep(LIMIT)
                except asyncio.CancelledError:
                    cancelled = True
                    raise
        assert cancelled
        assert not lease.held
        assert caught.value.reason == "broken"


async def test_f21_a_release_that_the_failover_lost(deployment: Deployment, name: str) -> None:
    """The new master has the hold, and lacks its release, which the old one had acknowledged. It gets the release
    again: the lease would not end while this test waits."""
    options: dict[str, Any] = {"lease": 600.0, "max_lease": 600.0, "patience": 2 * LIMIT}
    async with Redlock(deployment.url, **options) as client, Redlock(deployment.url, **options) as other:
        lease = await client(name).acquire()
        assert await other(name).acquire(timeout=0) is None
        wait(lambda: all(value(each, name) for each in deployment.servers), "the hold is replicated")
        deployment.unlink_replicas()
        replicas, old = deployment.replicas, deployment.master
        await lease.release()
        old.kill()
        for each in replicas:
            each.thaw()
        new = await asyncio.to_thread(deployment.switched_from, old)
        await moved(other, new)
        got = await other(name).acquire(timeout=LIMIT)
        assert got is not None
        await got.release()


@every_failover
async def test_d5_the_new_master_takes_over(deployment: Deployment, fail: Failover, name: str) -> None:
    """The hold was replicated: the next renewal goes to the new master, and extends it there. 100 tasks of three
    clients waited meanwhile: after the release each of them gets the lock, one after the other, and not when its ticket
    is renewed."""
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"lease": 600.0, "max_lease": 600.0, "patience": 2 * LIMIT}
        clients = [await stack.enter_async_context(Redlock(deployment.url, **options)) for _ in range(3)]
        held = await clients[0](name).acquire()
        assert held is not None
        inside, fences = 0, [held.fence]

        async def work(client: Redlock) -> None:
            nonlocal inside
            async with client(name) as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

        tasks = [asyncio.create_task(work(clients[i % 3])) for i in range(100)]
        old = deployment.master
        with old.cli() as cli:
            await until(lambda: cli.keys("*queue"))
        wait(lambda: all(value(each, name) for each in deployment.servers), "the hold is replicated")
        before = valid_until(held)
        new = await asyncio.to_thread(fail, deployment)
        assert new is not old
        for client in clients:
            await moved(client, new)
        await held.extend()
        assert valid_until(held) > before
        await held.release()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
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
        old, new = await replaced(deployment, client)
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
        await replaced(deployment, client)
        await works(client, name)


async def test_the_sentinels_are_followed_after_the_program_has_cancelled_all_tasks(
    deployment: Deployment, name: str
) -> None:
    """As asyncio.run does after Ctrl-C, in a program that goes on. The client hears of the next failover."""
    async with Redlock(deployment.url, lease=LONG) as client:
        await works(client, name)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await replaced(deployment, client)
        await works(client, name)


# -- a quorum of Sentinel deployments ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three() -> Iterator[list[Deployment]]:
    """Three small deployments, for a quorum."""
    found: list[Deployment] = []
    try:
        found.extend(Deployment(replicas=1, sentinels=1, down_after=3_600_000) for _ in range(3))
        yield found
    finally:
        for each in found:
            each.stop()


def uptime(server: Part) -> int:
    with server.cli() as cli:
        said: Any = cli.info("server")
    return int(said["uptime_in_seconds"])


async def test_a_quorum_of_deployments(three: list[Deployment], name: str) -> None:
    """It is new, so it votes at once: sentinels that have never switched say nothing about a promotion."""
    async with Redlock(*[each.url for each in three], **PATIENT) as client:
        assert not any(map(in_quarantine, nodes_of(client)))
        await works(client, name)


async def test_d1_one_deployment_twice(three: list[Deployment], name: str) -> None:
    """By another spelling of its url: the server would have two votes."""
    other = three[0].url.replace("127.0.0.1", "localhost")
    async with aclosing(Redlock(three[0].url, other, three[1].url, **PATIENT)) as client:
        with pytest.raises(ConfigError, match="are the same server"):
            await client(name).acquire(timeout=0)


async def test_d5_a_promoted_replica_casts_no_vote(three: list[Deployment], name: str) -> None:
    """In a quorum it is like a server that restarted: it may lack holds. So it is in quarantine, although it has run
    for longer than that: for a client that met the old master, and for one that did not. To that one the sentinels tell
    for how long the master has been one."""
    options: dict[str, Any] = {"lease": 8.0, "max_lease": 8.0, "node_timeout": 2.0}
    urls = [each.url for each in three]
    await until(lambda: all(uptime(server) > 9 for each in three for server in each.servers))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Redlock(*urls, **options))
        assert not any(map(in_quarantine, nodes_of(first)))
        new = await asyncio.to_thread(three[0].failover)
        second = await stack.enter_async_context(Redlock(*urls, **options))
        for client in (first, second):
            await moved(client, new)
            assert [in_quarantine(each) for each in nodes_of(client)] == [True, False, False]
        for client in (first, second):
            await works(client, name)
            await healthy(client)
