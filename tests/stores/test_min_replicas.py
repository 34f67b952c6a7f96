"""`min_replicas`: a hold counts once so many replicas have it (HAZARDS D5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.sentinel.node import SentinelNode
from asynclock.stores.redis.store import RedisStore
from tests.support.default_keys import key_of
from tests.support.ports import free_port
from tests.support.probes import (
    acquisitions_of,
    break_connection,
    connection_of,
    left_over,
    nodes_of,
    resends,
    waits_for_notice,
)
from tests.support.servers import Servers
from tests.support.services.sentinels import Deployment, Part, wait
from tests.support.waiters import LIMIT, LONG, until, works


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    """A master with two replicas; its sentinels take none for dead."""
    deployment = Deployment(down_after=3_600_000)
    yield deployment
    deployment.stop()


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    """All its replicas run again after the test."""
    yield shared
    for each in shared.replicas:
        each.thaw()
    shared.settle()


def url_of(server: Part) -> str:
    return f"redis://{server.host}:{server.port}"


def client_of(deployment: Deployment, replicas: int, **options: Any) -> Redlock:
    return Redlock(RedisStore(url_of(deployment.master), min_replicas=replicas), **options)


def value(server: Part, name: str) -> Any:
    """The hold at that server; None: none."""
    with server.cli() as cli:
        return cli.get(key_of(name))


def holds(server: Part, name: str) -> bool:
    return value(server, name) is not None


async def test_a_grant_waits_for_the_replicas(deployment: Deployment, name: str) -> None:
    """One of two replicas stands still: the lock is acquired once it runs on, and it has the hold by then."""
    slow = deployment.replicas[0]
    async with client_of(deployment, 2, lease=LONG) as client:
        await works(client, "any")
        slow.freeze()
        task = asyncio.create_task(client(name).acquire())
        await until(lambda: holds(deployment.master, name))
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()
        slow.thaw()
        lease = await task
        assert lease is not None
        assert all(holds(each, name) for each in deployment.servers)
        await lease.release()


async def test_an_idle_connection_for_the_replicas_that_was_closed(deployment: Deployment, name: str) -> None:
    """A server with a `timeout` closes connections that are idle, but not those that subscribe. That is no outage: the
    next try is granted."""
    async with client_of(deployment, 1, lease=LONG) as client:
        await works(client, "any")
        with deployment.master.cli() as cli:
            asked = [each for each in cli.client_list() if each["cmd"] == "wait"]
            assert len(asked) == 1
            cli.client_kill_filter(_id=asked[0]["id"])
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        await lease.release()


async def test_fewer_replicas_are_enough(deployment: Deployment, name: str) -> None:
    """With two replicas and min_replicas=1, one of them may fail."""
    deployment.replicas[0].freeze()
    async with client_of(deployment, 1, lease=LONG) as client, client(name) as lease:
        await lease.extend()


async def test_too_few_replicas(deployment: Deployment, name: str) -> None:
    """The grant is undone, and the error says why; another client may have the name at once."""
    for each in deployment.replicas:
        each.freeze()
    async with aclosing(
        client_of(deployment, 1, node_timeout=2.0, lease=LONG, patience=0.5, connect_timeout=LIMIT)
    ) as client:
        with pytest.raises(QuorumUnavailable, match=r"min_replicas=1\), so it does not count"):
            await client(name).acquire(timeout=0)
        await until(lambda: not holds(deployment.master, name))
        async with asyncio.timeout(LIMIT):
            while "replicas" not in (health := await client.health()).reason:
                await asyncio.sleep(0.01)
        assert not health.ok
        async with Redlock(url_of(deployment.master)) as other:
            await works(other, name)
        await until(lambda: not left_over(client))


@pytest.mark.parametrize("timeout", [2.0, None])
async def test_f3_several_callers_and_no_replica(deployment: Deployment, name: str, timeout: float | None) -> None:
    """Each tries, and gives back what no replica confirms. None takes the try of another one for a hold: each gets the
    error with the reason. Where the master itself was too busy to answer, the client tries again."""

    async def try_in_vain(client: Redlock) -> str:
        said = "did not answer"
        while "did not answer" in said:
            with pytest.raises(QuorumUnavailable) as caught:
                await client(name).acquire(timeout=timeout)
            said = str(caught.value)
        return said

    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"lease": LONG, "patience": 2.0, "node_timeout": 0.5}
        clients = [await stack.enter_async_context(client_of(deployment, 1, **options)) for _ in range(3)]
        for client in clients:
            await client.health()
        for each in deployment.replicas:
            each.freeze()
        async with asyncio.timeout(LIMIT):
            for said in await asyncio.gather(*map(try_in_vain, clients)):
                assert "replicas confirmed the hold in time" in said


async def test_f19_the_replicas_fail_while_a_task_waits(deployment: Deployment, name: str) -> None:
    """Another client holds the name, and no replica confirms that to the waiter at the end of its time."""
    async with client_of(deployment, 1, lease=LONG) as other, client_of(deployment, 1, lease=LONG) as client:
        held = await other(name).acquire(timeout=None)
        task = asyncio.create_task(client(name).acquire(timeout=3.0))
        await until(lambda: any(map(waits_for_notice, acquisitions_of(client))))
        for each in deployment.replicas:
            each.freeze()
        with pytest.raises(QuorumUnavailable, match="1 of 1 nodes"):
            await task
        for each in deployment.replicas:
            each.thaw()
        await held.release()


async def test_a_renewal_that_no_replica_has_does_not_count(deployment: Deployment, name: str) -> None:
    """The lease ends by the clock, as if the server were out of reach: a replica that is promoted would not know that
    it was renewed."""
    async with client_of(deployment, 1, lease=3.0, node_timeout=1.0, patience=LIMIT) as client:
        with pytest.raises(LockLost) as caught:
            async with client(name):
                for each in deployment.replicas:
                    each.freeze()
                await asyncio.sleep(LIMIT)
        assert caught.value.reason == "expired"


async def test_the_notice_of_a_grant_waits_for_the_replicas(deployment: Deployment, name: str) -> None:
    """The release of another client makes the waiter the holder. It enters once the replicas know that."""
    async with (
        Redlock(url_of(deployment.master), lease=LONG) as other,
        client_of(deployment, 2, lease=LONG) as client,
    ):
        first = await other(name).acquire()
        task = asyncio.create_task(client(name).acquire())
        await until(lambda: any(map(waits_for_notice, acquisitions_of(client))))
        deployment.replicas[0].freeze()
        assert first is not None
        await first.release()
        await until(lambda: holds(deployment.master, name))
        await asyncio.wait({task}, timeout=0.3)
        assert not task.done()
        deployment.replicas[0].thaw()
        lease = await asyncio.wait_for(task, LIMIT)
        assert lease is not None
        assert all(holds(each, name) for each in deployment.servers)
        await lease.release()


async def test_a_grant_by_notice_that_is_not_confirmed(deployment: Deployment, name: str) -> None:
    """The waiter gives it back, and goes on waiting: once the replicas are there, it enters."""
    async with (
        Redlock(url_of(deployment.master), lease=LONG) as other,
        client_of(deployment, 2, lease=LONG, node_timeout=1.0, patience=LIMIT) as client,
    ):
        first = await other(name).acquire()
        task = asyncio.create_task(client(name).acquire())
        await until(lambda: any(map(waits_for_notice, acquisitions_of(client))))
        deployment.replicas[0].freeze()
        assert first is not None
        await first.release()
        await until(lambda: holds(deployment.master, name))
        given = value(deployment.master, name)
        await until(lambda: value(deployment.master, name) != given)  # it is undone, and the next attempt may be there
        assert not task.done()
        deployment.replicas[0].thaw()
        lease = await asyncio.wait_for(task, LIMIT)
        assert lease is not None
        await lease.release()


async def test_many_notices_that_are_not_confirmed(
    deployment: Deployment, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holds of 100 waiters fail together: all tickets are sent again once, and not 100 times. All enter once the
    replicas are there."""
    async with (
        Redlock(url_of(deployment.master), lease=LONG) as other,
        client_of(deployment, 2, lease=LONG, node_timeout=1.0, patience=LIMIT) as client,
    ):
        names = [f"{name}:{n}" for n in range(100)]
        first = [await other(each).acquire(timeout=None) for each in names]
        tasks = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names]
        await until(lambda: sum(map(waits_for_notice, acquisitions_of(client))) == len(names))
        deployment.replicas[0].freeze()
        again = resends(client, monkeypatch)
        await asyncio.gather(*(each.release() for each in first))
        await until(lambda: again)
        deployment.replicas[0].thaw()
        async with asyncio.timeout(LIMIT):
            leases = await asyncio.gather(*tasks)
        assert len(again) < 20
        await asyncio.gather(*(each.release() for each in leases))


async def test_other_commands_do_not_wait_behind_it(deployment: Deployment, name: str) -> None:
    """A release and a look at a lock are answered while an acquire still waits for the replicas, for 20 s at most."""
    async with client_of(deployment, 1, lease=LONG, node_timeout=LONG / 3) as client:
        held = await client(f"{name}:held").acquire()
        assert held is not None
        for each in deployment.replicas:
            each.freeze()
        task = asyncio.create_task(client(name).acquire())
        await until(lambda: holds(deployment.master, name))
        async with asyncio.timeout(LIMIT):
            assert await client(name).locked()
            await held.release()
        assert not task.done()
        for each in deployment.replicas:
            each.thaw()
        lease = await asyncio.wait_for(task, LIMIT)
        assert lease is not None
        await lease.release()


async def test_many_grants_share_a_wait(deployment: Deployment, name: str) -> None:
    """200 tasks: far fewer WAITs."""

    def waits() -> int:
        with deployment.master.cli() as cli:
            stats: Any = cli.info("commandstats")
        return int(stats["cmdstat_wait"]["calls"])

    async with client_of(deployment, 2, lease=LONG) as client:
        await works(client, name)
        before = waits()
        leases = await asyncio.gather(*(client(f"{name}:{i}").acquire() for i in range(200)))
        assert waits() - before < 50
        await asyncio.gather(*(lease.release() for lease in leases if lease is not None))


async def test_grants_of_a_connection_that_is_lost(deployment: Deployment, name: str) -> None:
    """They fail at once, and not after a minute, although the replicas may still answer on the second connection: the
    next server may not have them."""
    async with client_of(
        deployment, 1, lease=3 * LONG, max_lease=3 * LONG, node_timeout=LONG, patience=LIMIT
    ) as client:
        await works(client, "any")
        for each in deployment.replicas:
            each.freeze()
        task = asyncio.create_task(client(name).acquire())
        await until(lambda: holds(deployment.master, name))
        first = value(deployment.master, name)
        break_connection(connection_of(nodes_of(client)[0]))
        await until(lambda: value(deployment.master, name) != first)  # it is undone, and the next attempt may be there
        for each in deployment.replicas:
            each.thaw()
        lease = await asyncio.wait_for(task, LIMIT)
        assert lease is not None
        await lease.release()


async def test_a_second_connection_that_reaches_another_server(deployment: Deployment, name: str) -> None:
    """Behind an address that moves. Its replicas say nothing about the first server."""
    store = RedisStore(url_of(deployment.master), min_replicas=0)
    elsewhere = RedisStore(url_of(deployment.replicas[0]))

    class Moving(RedisStore):
        dialled = 0

        async def dial(self) -> Any:
            self.dialled += 1
            return await (store if self.dialled == 1 else elsewhere).dial()

    moving = Moving(url_of(deployment.master), min_replicas=1)
    async with aclosing(Redlock(moving, lease=LONG, patience=0.2, connect_timeout=LIMIT)) as client:
        with pytest.raises(QuorumUnavailable, match="reached another server"):
            await client(name).acquire(timeout=0)
    assert moving.dialled > 1


async def test_c13_wait_is_forbidden(deployment: Deployment, name: str) -> None:
    """Only the user can solve that; the message names the permission."""
    master = deployment.master
    with master.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "locks", "on", "nopass", "~*", "&*", "+@all", "-wait")
    url = f"redis://locks:any@{master.host}:{master.port}"
    async with aclosing(Redlock(RedisStore(url, min_replicas=1), connect_timeout=LIMIT)) as client:
        with pytest.raises(ConfigError, match=r"\+wait"):
            await client(name).acquire(timeout=0)


async def test_c13_a_server_in_cluster_mode(servers: Servers, name: str) -> None:
    """Its WAIT would confirm holds that no replica has: a ConfigError says so."""
    bus = ("--bind", "127.0.0.1", "--cluster-port", str(free_port()), "--cluster-config-file", "nodes")
    server = servers.start("--cluster-enabled", "yes", *bus)
    async with aclosing(Redlock(f"{server.url}?min_replicas=1", connect_timeout=LIMIT)) as client:
        with pytest.raises(ConfigError, match="in cluster mode, where min_replicas is not supported"):
            await client(name).acquire(timeout=0)


async def test_as_an_option_of_urls(deployment: Deployment, name: str) -> None:
    """Of servers and of sentinels."""
    for url in (f"{url_of(deployment.master)}/0?min_replicas=2&socket_timeout=5", f"{deployment.url}?min_replicas=2"):
        async with Redlock(url, lease=LONG) as client, client(name):
            assert all(holds(each, name) for each in deployment.servers)


@pytest.mark.parametrize("value", ["-1", "x", "1.5", ""])
def test_a_wrong_number(value: str) -> None:
    """A ConfigError at once."""
    with pytest.raises(ConfigError, match="min_replicas is a whole number"):
        RedisStore(f"redis://a?min_replicas={value}")


@pytest.mark.parametrize("value", [-1, True, 1.5, None])
def test_a_wrong_number_as_an_option(value: Any) -> None:
    """A ConfigError at once."""
    with pytest.raises(ConfigError, match="min_replicas is a whole number"):
        RedisStore("redis://a", min_replicas=value)


async def test_without_it_nothing_is_between(deployment: Deployment) -> None:
    """The node is the usual one: the option costs nothing where it is not used."""
    async with Redlock(url_of(deployment.master)) as client:
        assert type(nodes_of(client)[0]) is RedisNode
    async with Redlock(deployment.url) as client:
        assert type(nodes_of(client)[0]) is SentinelNode


async def test_d5_a_failover_keeps_what_was_confirmed(name: str) -> None:
    """The master dies right after the grant: the replica that takes over has the hold."""
    deployment = Deployment()
    try:
        async with Redlock(f"{deployment.url}?min_replicas=2", lease=LONG, patience=LIMIT) as client:
            await works(client, "any")
            old = deployment.master
            lease = await client(name).acquire()
            old.kill()
            assert lease is not None
            new = await asyncio.to_thread(deployment.switched_from, old)
            assert holds(new, name)
            wait(lambda: lease.held, "the lease is held")
    finally:
        deployment.stop()
