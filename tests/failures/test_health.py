"""health() takes a hold on each node and gives it back, so it is not ok where PING succeeds and no lock can be acquired
(HAZARDS D12)."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from asynclock import ConfigError, Health, NodeHealth, Redlock
from asynclock.rules.model import State
from asynclock.stores.embedded import server as valkey
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import PROBE
from asynclock.stores.redis.checks import Mode, mode_of
from asynclock.stores.redis.scripts import PROBE_SCRIPT, SCRIPTS
from tests.support.commands import examined
from tests.support.ports import free_port
from tests.support.probes import listens
from tests.support.servers import START, Server, Servers, run
from tests.support.user_store import DictStore, state_of
from tests.support.waiters import LATE, LIMIT, back, healthy, until, urls_of


async def checked(*nodes: object, **options: object) -> Health:
    """The health in the eyes of a new client, of nodes that all answer."""
    options = {"connect_timeout": LIMIT, **options}
    async with aclosing(Redlock(*nodes, **options)) as client:  # type: ignore[arg-type]
        return await in_time(client)


async def in_time(client: Redlock) -> Health:
    """Its health, once no node was late in the check."""
    async with asyncio.timeout(LIMIT):
        while True:
            health = await client.health()
            if not any(LATE.search(node.error) for node in health.nodes):
                return health
            await asyncio.sleep(0.01)


async def one(*nodes: object, **options: object) -> NodeHealth:
    """The health of the only node. That of the client says the same."""
    health = await checked(*nodes, **options)
    (node,) = health.nodes
    assert health.ok is node.ok
    assert (health.reason == "") is node.ok
    assert node.error in health.reason or node.ok
    assert (node.latency is not None) is node.ok
    return node


async def test_spare_counts_the_nodes_that_may_still_fail(five: list[Server]) -> None:
    """Two of five; then one, then none; below a majority none, too."""
    async with aclosing(Redlock(*urls_of(five), trust_restarts=True)) as client:
        await client.health()
        await back(client)
        for spare, server in zip((2, 1, 0, 0), five[:4], strict=True):
            health = await in_time(client)
            assert (health.ok, health.spare) == (sum(each.ok for each in health.nodes) > 2, spare)
            server.kill()


# -- what a check does -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "lock:", "{app}:", "a}b"])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_d12_a_check_leaves_no_key(servers: Servers, prefix: str, nodes: int) -> None:
    """A hold, a ticket, a fence and a tombstone are written and deleted in one step."""
    some = [servers.start() for _ in range(nodes)]
    async with aclosing(Redlock(*urls_of(some), prefix=prefix, trust_restarts=True)) as client:
        await client.health()
        await back(client)  # the last of three nodes may have been late
        health = await in_time(client)
    nodes_are_well = tuple(NodeHealth(each.node, True, each.latency, "") for each in health.nodes)
    assert health == Health(True, "", nodes_are_well, nodes // 2)
    for server in some:
        with server.cli() as cli:
            assert [key for key in cli.scan_iter() if b"used" not in key] == []
            stats = cli.info("commandstats")
            if nodes == 1:  # a quorum sets its mark, too
                assert stats["cmdstat_set"]["calls"] == 3 * stats["cmdstat_zadd"]["calls"] > 0


@pytest.mark.parametrize("command", ["zadd", "pexpire", "del", "hset", "hdel", "publish"])
async def test_d12_a_check_that_is_cut_off_leaves_no_key_for_long(server: Server, command: str) -> None:
    """Wherever the script ends, what it wrote expires."""
    await one(server.user(f"-{command}"))
    with server.cli() as cli:
        assert all(0 < cli.pttl(key) <= 1000 for key in cli.scan_iter())


def test_d12_a_check_uses_each_command_of_a_mutex() -> None:
    """So the rights to all of them are checked. The text that all kinds share calls ZSCORE for the others only."""
    mutex, probe = ({*re.findall(r"redis\.p?call\('(\w+)'", text)} for text in (SCRIPTS[""], PROBE_SCRIPT))
    assert mutex - {"ZSCORE"} == probe


async def test_d12_a_server_that_forgot_its_scripts(server: Server) -> None:
    """The check sends its script again."""
    async with aclosing(Redlock(server.url)) as client:
        await healthy(client)
        with server.cli() as cli:
            cli.script_flush()
        assert (await client.health()).ok


async def test_d12_many_checks_at_once(server: Server) -> None:
    """They do not exclude each other."""
    async with aclosing(Redlock(server.url)) as client:
        await healthy(client)
        assert all(each.ok for each in await asyncio.gather(*(client.health() for _ in range(50))))


@pytest.mark.parametrize("make", [MemoryStore, DictStore])
async def test_d12_a_check_of_a_store_without_a_server(make: type[MemoryStore | DictStore]) -> None:
    """It takes and gives back a hold, too, and leaves nothing."""
    store = make()
    async with aclosing(Redlock(store, prefix="p:")) as client:
        assert all(each.ok for each in await asyncio.gather(*(client.health() for _ in range(9))))
        assert (await client.health()).ok
    assert state_of(store, f"p:{PROBE}") == State()


class ReadOnlyStore(DictStore):
    """As a database that lost its master: it can be read."""

    async def transact(self, keys: object, step: object) -> None:
        before = {key: state for key, state in self.states.items() if state != State()}
        await super().transact(keys, step)  # type: ignore[arg-type]
        if {key: state for key, state in self.states.items() if state != State()} != before:
            self.states = before
            raise ConnectionError("read-only")


async def test_d12_a_store_that_can_only_be_read() -> None:
    """Its error is the reason."""
    assert await one(ReadOnlyStore()) == NodeHealth("dict", False, None, "read-only")


# -- servers that do not vote ------------------------------------------------------------------------------------------


async def test_d12_quarantine(servers: Servers, name: str) -> None:
    """A majority restarted: the health says so, and for how long."""
    some = [servers.start() for _ in range(3)]
    async with Redlock(*urls_of(some)) as client, client(name):
        pass
    for each in some[:2]:
        each.restart()
    health = await checked(*urls_of(some))
    assert not health.ok
    assert [node.ok for node in health.nodes] == [False, False, True]
    for node in health.nodes[:2]:
        assert "restarted a short while ago" in node.error
        assert "for another " in node.error
        assert node.error in health.reason


async def test_d12_a_replica(servers: Servers) -> None:
    """It answers PING and each script that only reads."""
    port = free_port()
    servers.start("--port", str(port), "--bind", "127.0.0.1")
    replica = servers.start("--replicaof", "127.0.0.1", str(port))
    with replica.cli() as cli:
        assert cli.ping()
    error = (await one(replica.url)).error
    assert "READONLY" in error
    assert error.endswith("; it is a replica: name its master, or use Sentinel")


async def test_d12_a_replica_without_its_master(server: Server) -> None:
    """It serves no data at all."""
    with server.cli() as cli:
        cli.config_set("replica-serve-stale-data", "no")
        cli.replicaof("127.0.0.1", free_port())
    assert "MASTERDOWN" in (await one(server.url)).error


@pytest.mark.parametrize(
    ("options", "says", "advice"),
    [
        (["--maxmemory", "1"], "OOM", "raise maxmemory"),
        (["--min-replicas-to-write", "1"], "NOREPLICAS", "start them"),
        (["--rename-command", "EVALSHA", ""], "does not know EVALSHA", "under their own names"),
        (["--rename-command", "ZADD", ""], "does not know ZADD", "under their own names"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
async def test_d12_a_server_that_refuses_to_write(servers: Servers, options: list[str], says: str, advice: str) -> None:
    """It answers PING and its error, which says what to do."""
    server = servers.start(*options)
    error = (await one(server.url)).error
    assert says in error
    assert advice in error


async def test_d12_a_server_that_loads_its_data(servers: Servers) -> None:
    """The health is not ok, and says LOADING; it is ok once the data is there."""
    server = servers.start("--dbfilename", "loads.rdb")
    with server.cli() as cli, cli.pipeline() as pipe:
        for number in range(2000):
            pipe.set(f"key{number}", "x" * 1000)
        pipe.execute()
        cli.save()
    server.kill()
    slow = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
    loads = Server(server.path.parent, "loads", "--dbfilename", "loads.rdb", *slow)
    try:
        await until(lambda: b"LOADING" in _ping(loads))
        assert "LOADING" in (await one(loads.url)).error
        with loads.cli() as cli:
            cli.config_set("key-load-delay", 0)
        loads.ready()
        assert (await one(loads.url)).ok
    finally:
        loads.kill()


def _ping(server: Server) -> bytes:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(1.0)
        try:
            plain.connect(str(server.path))
            plain.sendall(b"PING\r\n")
            return plain.recv(64)
        except OSError:
            return b""


@pytest.mark.parametrize(
    "rules",
    ["-evalsha", "-set", "-zadd", "-zrank", "-hget", "resetkeys ~asynclock~probe", "resetkeys ~asynclock~{*"],
)
async def test_d12_missing_rights(server: Server, rules: str) -> None:
    """Of a command or of a key that an acquire needs: the error contains the rule to paste."""
    node = await one(server.user(*rules.split()))
    assert not node.ok
    assert "ACL SETUSER" in node.error
    assert "secret" not in node.error


@pytest.mark.parametrize("rules", ["-publish", "-subscribe", "resetchannels"])
async def test_d12_a_server_that_sends_no_notices_votes(
    server: Server, name: str, rules: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks work there, and waiters poll: it is ok, and the error of the node says what is missing."""
    async with aclosing(Redlock(server.user(*rules.split()))) as client:
        health = await healthy(client)
        assert health.reason == ""
        assert health.nodes[0].ok
        assert "no notices" in health.nodes[0].error
        async with client(name) as lease:
            assert lease.held
        assert not listens(client)
    assert "no notices" in caplog.text


async def test_d12_publish_is_forbidden_later(server: Server) -> None:
    """The check publishes by the same path as a release, so it sees that."""
    async with aclosing(Redlock(server.user())) as client:
        assert (await healthy(client)).nodes[0].error == ""
        server.user("-publish")
        (node,) = (await healthy(client)).nodes
        assert node.ok
        assert "no notices" in node.error


# -- what is no independent server -------------------------------------------------------------------------------------


@pytest.fixture
def sentinel(servers: Servers) -> Iterator[str]:
    """The url of a Sentinel."""
    conf = servers.folder / "sentinel.conf"
    path = servers.folder / "sentinel.sock"
    conf.write_text(f"port {free_port()}\nunixsocket {path}\n")
    process = run(None, str(conf), "--sentinel")
    valkey.wait_ready(path, process, START)
    yield f"unix://{path}"
    valkey.stop([process])


async def test_d12_a_sentinel(sentinel: str, name: str) -> None:
    """It keeps no locks; the advice says what to pass instead."""
    assert "is a Sentinel" in (await one(sentinel)).error
    async with aclosing(Redlock(sentinel)) as client:
        with pytest.raises(ConfigError, match="master_for"):
            await client(name).acquire(timeout=0)


@pytest.mark.parametrize(
    ("hello", "mode"),
    [
        ([b"server", b"redis", b"mode", b"standalone", b"modules", []], Mode.STANDALONE),
        ({b"server": b"redis", b"mode": b"cluster"}, Mode.CLUSTER),
        ([b"server", b"redis"], Mode.UNKNOWN),
        ({b"mode": b"other"}, Mode.UNKNOWN),
        (None, Mode.UNKNOWN),
    ],
)
def test_the_mode_of_a_server(hello: object, mode: Mode) -> None:
    """By its reply to HELLO, in both protocols."""
    assert mode_of(hello, "a:6379") is mode


@asynccontextmanager
async def _cluster(servers: Servers, shares: list[tuple[int, int]]) -> AsyncIterator[list[Server]]:
    """Nodes of one cluster, with these slots."""
    nodes = []
    for number in range(len(shares)):
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-port", str(free_port())]
        options += ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes{number}.conf"]
        nodes.append((servers.start(*options), options))
    for (node, _), (first, last) in zip(nodes, shares, strict=True):
        with node.cli() as cli:
            cli.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            for _, options in nodes[1:] if len(nodes) > 1 else []:
                cli.execute_command("CLUSTER", "MEET", "127.0.0.1", options[1], options[5])

    def is_up() -> bool:
        return all(b"cluster_state:ok" in node.cli().execute_command("CLUSTER", "INFO") for node, _ in nodes)

    async with asyncio.timeout(20):
        while not is_up():
            await asyncio.sleep(0.05)
    yield [node for node, _ in nodes]


@pytest.mark.parametrize("prefix", ["", "lock:"])
async def test_d12_one_node_of_a_cluster(servers: Servers, prefix: str) -> None:
    """It keeps the names of its own slots only, so it is not ok, whichever share it has."""
    async with _cluster(servers, [(0, 8191), (8192, 16383)]) as nodes:
        for node in nodes:
            assert "one node of a cluster" in (await one(node.url, prefix=prefix)).error


async def test_d12_a_cluster_of_one_node(servers: Servers) -> None:
    """It keeps each name, so it votes."""
    async with _cluster(servers, [(0, 16383)]) as (node,):
        assert (await one(node.url)).ok


async def test_d12_doctor_and_nodes_of_a_cluster(servers: Servers, name: str) -> None:
    """A node that lacks slots is an error. One that has all slots, or that of a prefix with a hash tag, keeps locks: a
    warning, as a slot can move."""

    def mode(node: Server, prefix: str) -> str:
        return str(examined(node, "--prefix", prefix)[1]["mode"]["severity"])

    async with _cluster(servers, [(0, 8191), (8192, 16383)]) as nodes:
        assert [mode(each, "lock:") for each in nodes] == ["error", "error"]
        assert [mode(each, "{3}:") for each in nodes] == ["warning", "error"]  # the tag 3 has the slot 1584
        async with Redlock(nodes[0].url, prefix="{3}:") as client, client(name):
            pass
        with nodes[0].cli() as cli:
            cli.execute_command("CLUSTER", "DELSLOTS", 0)
        await until(lambda: b"cluster_state:fail" in nodes[0].cli().execute_command("CLUSTER", "INFO"))
        assert mode(nodes[0], "{3}:") == "error"


async def test_d12_doctor_and_a_cluster_of_one_node(servers: Servers) -> None:
    """It votes, so it is no node that casts no vote."""
    async with _cluster(servers, [(0, 16383)]) as (node,):
        code, found = examined(node)
        assert code == 1
        assert found["mode"]["severity"] == "warning"
        assert "redis+cluster" in found["mode"]["advice"]


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_d12_a_silent_server(five: list[Server], name: str) -> None:
    """Before the first use and after it, health waits for it for a second only, and its error names it."""
    some = five[:3]
    async with aclosing(Redlock(*urls_of(some))) as client:
        async with client(name):
            pass
        some[0].freeze()
        for each in (client, Redlock(*urls_of(some))):
            health = await healthy(each)
            assert [node.ok for node in health.nodes] == [False, True, True]
            assert some[0].url in health.nodes[0].error
            await each.aclose()
        some[0].thaw()


async def test_d12_health_never_raises(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without nodes, not with the same server twice, and not after the client was closed."""
    monkeypatch.delenv("ASYNCLOCK_URLS", raising=False)
    without = await checked()
    assert not without.ok
    assert "ASYNCLOCK_URLS" in without.reason
    same = [f"unix://{server.path.parent}/{way}{server.path.name}" for way in ("", "./", "././")]
    twice = await checked(*same)
    assert not twice.ok
    assert "same server" in twice.reason
    closed = Redlock(server.url)
    await healthy(closed)
    await closed.aclose()
    after = await closed.health()
    assert not after.ok
    assert "closed" in after.reason
    assert [(node.node, node.ok) for node in after.nodes] == [(server.url, False)]


async def test_d12_an_error_of_the_users_store() -> None:
    """Whatever it raises."""

    class Broken(DictStore):
        def listen(self, tag: object, receive: object) -> None:
            raise ZeroDivisionError("broken")

    assert await one(Broken()) == NodeHealth("dict", False, None, "broken")

    class Unusable(DictStore):
        def open(self, config: object) -> Any:
            raise ZeroDivisionError("unusable")

    assert await one(Unusable()) == NodeHealth("dict", False, None, "ZeroDivisionError('unusable')")


def test_no_user_can_lock_the_name_of_the_check() -> None:
    """It is reserved."""
    with pytest.raises(ConfigError, match="reserved"):
        Redlock("redis://a")(PROBE)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("call", [Redlock.health, Redlock.__aenter__])
async def test_a_program_that_cancels_the_checks(
    five: list[Server], nodes: int, call: Callable[[Redlock], Coroutine[Any, Any, Any]]
) -> None:
    """As one does that cancels all tasks but its own. That is no cancel of the caller: it gets an answer."""
    some = five[:nodes]
    async with aclosing(Redlock(*urls_of(some), patience=0, trust_restarts=True)) as client:
        await healthy(client)
        await back(client)  # a node that is not connected yet would fail before its check could be cancelled
        for server in some:
            server.freeze()
        caller = asyncio.create_task(call(client))
        while not caller.done():
            for task in asyncio.all_tasks():
                if getattr(task.get_coro(), "__name__", "") == "check_vote":
                    task.cancel()
            await asyncio.sleep(0)
        error = caller.result().reason if call is Redlock.health else str(caller.exception())
        assert f"the check of {some[0].url} was cancelled" in error
        for server in some:
            server.thaw()
        await healthy(client)
