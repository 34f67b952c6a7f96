"""HAZARDS C: the client and its connections, against real servers, frozen, cut and refusing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis as redis_py
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.rules.model import Op, Verb
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.default_keys import key_of, keys_of
from tests.support.probes import (
    ask_nodes,
    break_connection,
    clock_of,
    connection_of,
    kind_of,
    new_id,
    nodes_of,
    pending_releases_of,
    release_by_script,
    run_on,
    settled,
    undo,
    when_connected,
)
from tests.support.proxy import RELEASE, Proxy
from tests.support.servers import Server
from tests.support.told import told
from tests.support.waiters import LIMIT, back, until, works

pytestmark = pytest.mark.both_loops("the loop has the transports")


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    """A proxy before the test's own server."""
    async with Proxy(server.path.with_suffix(".p"), server.path) as between:
        yield between


async def gone(server: Server, key: str) -> None:
    """Return once the server has no such key; only work in the background may still have to delete it."""
    while server.cli().exists(key):
        await asyncio.sleep(0.005)


async def test_c1_replies_stay_in_step(server: Server, proxy: Proxy, name: str) -> None:
    """Calls that were cancelled or timed out leave their replies to no other call."""
    async with Redlock(proxy.url, lease=30.0, node_timeout=1.0) as redlock:
        held = await redlock(f"{name}:held").acquire(timeout=None)
        sent = proxy.request(b"PX-never")
        proxy.hold_replies()
        cancelled = [asyncio.create_task(redlock(f"{name}:{i}").acquire()) for i in range(10)]
        timed_out = asyncio.create_task(redlock(f"{name}:late").acquire(timeout=0))
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        with pytest.raises(QuorumUnavailable):
            await timed_out
        proxy.let_go()
        assert not sent.is_set()
        fences = []
        for i in range(10):
            async with redlock(f"{name}:{i}") as lease:
                fences.append(lease.fence)
                assert server.cli().get(key_of(f"{name}:{i}")).split(b"|")[1] != b"0"  # type: ignore[union-attr]
            assert int(server.cli().get(keys_of(f"{name}:{i}").fence)) == lease.fence  # type: ignore[arg-type]
        assert fences == sorted(set(fences))
        assert held.held
        await held.release()


async def test_c2_the_reply_was_lost(server: Server, proxy: Proxy, name: str) -> None:
    """The SET was carried out and its reply lost: the caller gets the lock, not a None because of its own key."""
    async with Redlock(proxy.url) as redlock:
        sent = proxy.request(b"acquire")
        proxy.drop_replies = True
        caller = asyncio.create_task(redlock(name).acquire(timeout=10))
        await sent.wait()
        while not server.cli().exists(key_of(name)):
            await asyncio.sleep(0)
        proxy.drop_replies = False
        proxy.cut()
        lease = await caller
        assert lease is not None
        assert lease.held
        await lease.release()


async def test_c2_a_clients_retry_policy_is_off(server: Server, proxy: Proxy, name: str) -> None:
    """A handed-in client that retries ten times sends no command of a lock twice."""
    theirs = Redis(unix_socket_path=str(proxy.path), retry=Retry(NoBackoff(), 10))
    async with theirs, Redlock(theirs) as redlock:
        before = server.cli().info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        proxy.drop_replies = True
        caller = asyncio.create_task(redlock(name).acquire(timeout=0))
        sent = proxy.request(b"acquire")
        await sent.wait()
        while server.cli().info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"] == before:
            await asyncio.sleep(0)
        proxy.cut()
        with pytest.raises(QuorumUnavailable):
            await caller
        proxy.drop_replies = False
        await back(redlock)
        calls = server.cli().info("commandstats")["cmdstat_evalsha"]["calls"]
        assert calls == before + 3  # the acquire, the check of the new connection, and the undo
        await gone(server, key_of(name))


async def test_c3_a_set_frozen_in_a_stopped_server(server: Server, proxy: Proxy, name: str) -> None:
    """It executes after its undo, from the socket of a connection that was closed long ago: no key is left."""
    async with Redlock(proxy.url, lease=30.0, node_timeout=0.1) as redlock:
        server.freeze()
        sent = proxy.request(b"acquire")
        caller = asyncio.create_task(redlock(name).acquire(timeout=0))
        await sent.wait()
        proxy.drop_requests = True  # the undo on the same connection never arrives
        with pytest.raises(QuorumUnavailable):
            await caller
        proxy.cut()
        proxy.drop_requests = False
        released = proxy.request(*RELEASE)
        server.thaw()
        await back(redlock)
        assert released.is_set()
        assert server.cli().keys("*undone*")
        assert not server.cli().exists(key_of(name))
        assert not await redlock(name).locked()


async def test_c4_a_late_undo_hits_nothing(server: Server, proxy: Proxy, name: str) -> None:
    """The undo of attempt k-1, delivered after attempt k was granted, deletes nothing."""
    async with Redlock(proxy.url) as redlock, Redlock(server.url) as other:
        sent = proxy.request(b"acquire")
        proxy.drop_replies = True
        caller = asyncio.create_task(redlock(name).acquire(timeout=0))
        await sent.wait()
        await asyncio.sleep(0)
        proxy.hold_replies()
        proxy.cut()  # attempt 1 is ambiguous; its undo is owed
        with pytest.raises(QuorumUnavailable):
            await caller
        server.cli().delete(key_of(name))
        async with other(name) as lease:
            proxy.drop_replies = False
            proxy.let_go()
            await back(redlock)  # by now the undo went, first on the new connection
            assert lease.held
            assert server.cli().exists(key_of(name))
            await lease.extend()


async def test_c5_release_after_expiry(server: Server, name: str) -> None:
    """Another client's lock is never deleted; the caller gets LockLost."""
    async with Redlock(server.url) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        server.cli().set(key_of(name), "somebody else", px=30000)
        with pytest.raises(LockLost) as caught:
            await lease.release()
        assert caught.value.reason == "taken"
        assert server.cli().get(key_of(name)) == b"somebody else"


async def test_c6_script_flush(server: Server, name: str) -> None:
    """NOSCRIPT means that nothing was done: acquire, extend and release go on inside the same call."""
    async with Redlock(server.url) as redlock:
        server.cli().script_flush()
        lease = await redlock(name).acquire(timeout=0)
        assert lease is not None
        server.cli().script_flush()
        await lease.extend()
        server.cli().script_flush()
        await lease.release()
        assert not server.cli().exists(key_of(name))


async def test_c6_restart(server: Server, name: str) -> None:
    """After a restart the client connects again by itself, with its scripts."""
    async with Redlock(server.url) as redlock:
        async with redlock(name):
            pass
        server.restart()
        lease = await redlock(name).acquire(timeout=10)
        assert lease is not None
        await lease.release()


async def test_client_kill_is_survived(server: Server, name: str) -> None:
    """A connection that the server closes costs no lease."""
    async with Redlock(server.url) as redlock, redlock(name) as lease:
        server.cli().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await back(redlock)
        await lease.extend()
        assert lease.held


async def test_a_command_on_a_connection_that_was_closed(server: Server) -> None:
    """As where a server hangs up in the middle of a handshake: the next command of it fails at once. If it waited until
    the time of the attempt is over, the error would say that the server does not answer."""
    async with Redlock(server.url) as redlock:
        await back(redlock)
        (node,) = nodes_of(redlock)
        connection = connection_of(node)
        break_connection(connection)
        await until(lambda: connection_of(node) is not connection)
        async with asyncio.timeout(LIMIT):
            with pytest.raises(ConnectionError, match="hung up"):
                await run_on(connection, "PING")


async def test_a_connection_that_is_lost_as_it_is_made(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the turn in which the attempt to connect ends. The next attempt follows, although no call asks for it."""
    async with Redlock(server.url) as redlock:
        await works(redlock, name)
        await back(redlock)
        (node,) = nodes_of(redlock)
        lost = {first := connection_of(node)}

        def lose(missed: bool) -> None:
            del missed
            if len(lost) == 1:
                lost.add(connection_of(node))
                break_connection(connection_of(node))

        when_connected(redlock, monkeypatch, lose)
        break_connection(first)
        await until(lambda: len(lost) == 2 and connection_of(node) not in {None, *lost})
        await works(redlock, name)


REFUSALS = {
    "READONLY": (["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]),
    "OOM": (["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "SET", "maxmemory", "0"]),
    "NOREPLICAS": (["CONFIG", "SET", "min-replicas-to-write", "1"], ["CONFIG", "SET", "min-replicas-to-write", "0"]),
}


@pytest.mark.parametrize("code", REFUSALS)
async def test_c12_a_server_that_cannot_write_now(server: Server, name: str, code: str) -> None:
    """It counts as down, the error names the reason, and once it can write again the client works again."""
    before, after = REFUSALS[code]
    async with Redlock(server.url) as redlock:
        server.cli().execute_command(*before)
        with pytest.raises(QuorumUnavailable, match=code):
            await redlock(name).acquire(timeout=0)
        waiter = asyncio.create_task(redlock(name).acquire(timeout=20))
        await asyncio.sleep(0)
        server.cli().execute_command(*after)
        lease = await waiter
        assert lease is not None
        await lease.release()


async def test_a_master_that_became_a_replica(server: Server, name: str) -> None:
    """It is down until it is a master again, although it accepts connections: that is told once. The client goes on
    connecting, since a name may lead to a new master by now."""
    async with Redlock(server.url, patience=LIMIT) as client:
        await works(client, name)
        with told(client) as events, server.cli() as cli:
            cli.replicaof("127.0.0.1", "1")
            for _ in range(5):
                assert "READONLY" in (await client.health()).nodes[0].error
                await asyncio.sleep(0.05)
            cli.replicaof("NO", "ONE")
            await works(client, name)
            assert [type(each) for each in events.all if isinstance(each, NodeDown | NodeUp)] == [NodeDown, NodeUp]


async def test_c12_a_busy_server(server: Server, name: str) -> None:
    """A script of another client that does not end: BUSY is an answer, and no reason to drop the connection."""
    async with Redlock(server.url, node_timeout=2.0) as redlock:
        server.cli().config_set("busy-reply-threshold", 1)

        def endless() -> None:
            with pytest.raises(redis_py.ResponseError):
                server.cli().eval("while true do end", 0)

        thread = threading.Thread(target=endless)
        thread.start()
        said: Any = None
        while said is None or "BUSY" not in str(said):
            try:
                lease = await redlock(name).acquire(timeout=0)
                assert lease is not None
                await lease.release()
            except QuorumUnavailable as error:
                said = error
        server.cli().script_kill()
        thread.join()
        async with redlock(name):
            pass


async def test_c12_max_clients(server: Server, name: str) -> None:
    """A server that takes no more clients is tried again."""
    keep = server.cli(single_connection_client=True)
    keep.config_set("maxclients", 1)
    redlock = Redlock(server.url)
    with pytest.raises(QuorumUnavailable, match="out of reach"):
        await redlock(name).acquire(timeout=0)
    keep.config_set("maxclients", 100)
    async with redlock(name):
        pass
    await redlock.aclose()
    keep.close()


async def test_c15_release_and_extend_work_under_oom(server: Server, name: str) -> None:
    """A full server still lets a holder keep its lease, and release it; a min_hold is kept, too."""
    async with Redlock(server.url) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        rests = await redlock(f"{name}:rests", min_hold=20).acquire(timeout=None)
        server.cli().config_set("maxmemory", 1)
        await lease.extend(lease=50)
        assert server.cli().pttl(key_of(name)) > 45_000
        await lease.release()
        assert not server.cli().exists(key_of(name))
        await rests.release()
        assert 0 < server.cli().pttl(key_of(f"{name}:rests")) <= 20_000


async def test_c16_noscript_after_the_undo_was_queued(server: Server, proxy: Proxy, name: str) -> None:
    """The acquire met no script, its undo did: the acquire is not sent again, so no key is left."""
    async with Redlock(proxy.url) as redlock:
        script = SCRIPTS[""]
        release_by_script(redlock)
        server.cli().script_flush()
        sent = proxy.request(b"acquire")
        proxy.hold_replies()
        caller = asyncio.create_task(redlock(name).acquire())
        await sent.wait()
        while not server.cli().info("errorstats").get("errorstat_NOSCRIPT"):
            await asyncio.sleep(0)
        server.cli().script_load(script)
        undone = proxy.request(*RELEASE)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await undone.wait()
        proxy.let_go()
        assert not await redlock(name).locked()
        assert not server.cli().exists(key_of(name))


async def test_c18_the_same_id_is_granted_twice(server: Server, name: str) -> None:
    """Asked again after a lost reply, the node gives the same fence, and the key's end moves with the answer."""
    async with Redlock(server.url, lease=20.0) as redlock:
        seed = int(clock_of(redlock).wall() * 1_000_000)
        op = Op(Verb.ACQUIRE, kind_of(redlock(name)), name, new_id(redlock, seed), 20.0, seed, 60.0)
        first = ask_nodes(redlock, op, 10.0)
        await settled(redlock, first)
        ended: Any = server.cli().pexpiretime(key_of(name))
        while int(server.cli().pttl(key_of(name))) > 19_900:  # type: ignore[arg-type]
            await asyncio.sleep(0.005)
        again = ask_nodes(redlock, op, 10.0)
        await settled(redlock, again)
        assert again.fences() == first.fences()
        assert server.cli().pexpiretime(key_of(name)) > ended
        undo(redlock, again)


async def test_p9_one_connection_however_many_tasks(server: Server, name: str) -> None:
    """A thousand tasks at once are no error and no second connection."""
    async with Redlock(server.url) as redlock:

        async def cycle(i: int) -> None:
            async with redlock(f"{name}:{i}"):
                pass

        await asyncio.gather(*(cycle(i) for i in range(1000)))
        assert server.cli().info("clients")["connected_clients"] <= 2  # ours, and this question's


async def test_releases_are_scripts_where_the_servers_command_is_forbidden(server: Server, name: str) -> None:
    """The user may run scripts and not DELIFEQ: each of many releases at once is carried out."""
    if b"delifeq" not in server.cli().command_list():
        pytest.skip("this server has no release of its own")
    server.cli().acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-delifeq"])
    async with Redlock(server.url.replace("unix://", "unix://app:pw@")) as redlock:
        leases = [await redlock(f"{name}:{i}").acquire(timeout=None) for i in range(5)]
        await asyncio.gather(*(lease.release() for lease in leases))
        assert not server.cli().keys(key_of(f"{name}*"))


async def test_no_release_is_pending_for_commands_that_never_left(five: list[Server], name: str) -> None:
    """However many locks are taken while a node is away, it finds no backlog of releases when it comes back."""
    async with Redlock(*(each.url for each in five[:3])) as redlock:
        five[0].kill()
        node = nodes_of(redlock)[0]
        while node.error is None:
            await asyncio.sleep(0)
        for i in range(50):
            async with redlock(f"{name}:{i}"):
                pass
        assert not pending_releases_of(node)
