"""`asynclock doctor` before real servers that are set up wrong."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import redis

from asynclock import ConfigError, Redlock
from asynclock.cli.doctor.facts import facts_of
from asynclock.stores.redis.replies import ACL_COMMANDS
from asynclock.stores.redis.store import RedisStore
from tests.support.commands import answered, examined, json_of
from tests.support.proxy import Proxy, RewritingProxy
from tests.support.servers import Server, Servers
from tests.support.waiters import until

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def test_a_good_quorum(five: list[Server]) -> None:
    """Nothing is found; the text shows each server; no key is made."""
    assert examined(five) == (0, {})
    done = answered("doctor", "--node-timeout", "2s", on=five)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for server in five:
        assert str(server.path) in done.stdout
        assert server.cli().dbsize() == 0
    assert done.stdout.endswith("0 errors, 0 warnings\n")


def test_persistence_of_a_single_server(servers: Servers) -> None:
    """A restart within a lease would free the locks, unless each command is on disk first."""
    code, found = examined(servers.start())
    assert (code, [*found]) == (1, ["persistence"])
    assert examined(servers.start("--appendonly", "yes", "--appenddirname", "other"))[0] == 1
    assert examined(servers.start(*DURABLE)) == (0, {})


def test_persistence_with_trust_restarts(five: list[Server]) -> None:
    """Then a quorum relies on it, too."""
    for options, env in ((["--trust-restarts"], {}), ([], {"ASYNCLOCK_TRUST_RESTARTS": "1"})):
        code, found = examined(five[:3], *options, **env)
        assert (code, [*found]) == (2, ["persistence"])


def test_d1_one_server_twice(servers: Servers) -> None:
    """Under two names."""
    server, other = servers.start(), servers.start()
    link = server.path.with_suffix(".link")
    link.symlink_to(server.path)
    code, found = examined((), ASYNCLOCK_URLS=f"{server.url},{other.url},unix://{link}")
    assert (code, [*found]) == (2, ["same-server"])
    assert len(found["same-server"]["nodes"]) == 2


def test_an_even_number(five: list[Server]) -> None:
    """A fourth server survives no more failures than three do."""
    code, found = examined(five[:4])
    assert (code, [*found]) == (1, ["even"])


def test_servers_that_do_not_answer(five: list[Server]) -> None:
    """A minority is a warning, a majority an error. It says when no other server may fail."""
    for server, code, without_spare in zip(five[:3], (1, 1, 2), (False, True, False), strict=True):
        server.freeze() if code == 2 else server.kill()
        found = examined(five)
        assert (found[0], "spare" in found[1]) == (code, without_spare)


def test_a_single_server_with_too_few_replicas(servers: Servers) -> None:
    """It confirms no hold with min_replicas."""
    server = servers.start(*DURABLE)
    code, found = examined((), ASYNCLOCK_URLS=f"{server.url}?min_replicas=1")
    assert (code, [*found]) == (2, ["replicas"])


def test_a_server_with_a_password(servers: Servers) -> None:
    """Only the user can solve that, so the finding names user and password, and ConfigError."""
    server = servers.start()
    with server.cli() as cli:
        cli.config_set("requirepass", "secret")
    code, found = examined(server)
    assert (code, [*found]) == (2, ["reachable"])
    said = found["reachable"]
    assert "user and password" in said["what"]
    assert "ConfigError" in said["risk"]
    assert "password" in said["advice"]


def test_other_keys_at_each_server(five: list[Server]) -> None:
    """One finding for all of them."""
    for server in five:
        server.cli().set("lock:other", "by the application")
    done = answered("doctor", "--json", on=five)
    (found,) = [each for each in json_of(done)["findings"] if each["check"] == "prefix"]
    assert len(found["nodes"]) == 5
    assert found["what"].startswith("Of 5 keys with the prefix 'lock:', 5 are not of asynclock (5 string)")


def test_a_replica(servers: Servers) -> None:
    """It refuses writes. The table shows its role."""
    server = servers.start("--replicaof", "127.0.0.1", "1")
    code, found = examined(server)
    assert code == 2
    assert "replica" in found
    _, row, *_ = answered("doctor", on=server).stdout.splitlines()
    assert " replica " in row


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
def test_d6_an_eviction_policy(servers: Servers, policy: str) -> None:
    """A full server would delete locks, for they have an expiry."""
    server = servers.start(*DURABLE, "--maxmemory", "100mb", "--maxmemory-policy", policy)
    code, found = examined(server)
    assert (code, [*found]) == (2, ["eviction"])
    assert policy in found["eviction"]["what"]


def test_d6_no_eviction(servers: Servers) -> None:
    """With noeviction a full server refuses new locks; and without a limit nothing is evicted."""
    server = servers.start(*DURABLE, "--maxmemory-policy", "allkeys-lru")
    assert examined(server) == (0, {})
    cli = server.cli()
    cli.config_set("maxmemory-policy", "noeviction")
    used: Any = cli.info("memory")
    cli.config_set("maxmemory", int(used["used_memory"] * 1.04))
    code, found = examined(server)
    assert (code, [*found]) == (1, ["memory"])
    cli.config_set("maxmemory", int(used["used_memory"] / 2))
    code, found = examined(server)
    assert (code, [*found]) == (2, ["memory"])
    assert found["memory"]["risk"].startswith("It refuses")


def test_a_slow_server(five: list[Server]) -> None:
    """Slower than node_timeout."""
    code, found = examined(five[:3], "--node-timeout", "0.001ms")
    assert (code, [*found]) == (2, ["latency"])
    assert examined(five[:3], "--node-timeout", "5s", "--lease", "30s")[0] == 0


def test_the_node_timeout_of_the_deployment(server: Server) -> None:
    """It counts as in a program, unless the command has another one."""
    done = answered("doctor", on=server, ASYNCLOCK_NODE_TIMEOUT="15")
    assert done.returncode == 64
    assert "at least 45 s" in done.stderr
    assert examined(server, ASYNCLOCK_NODE_TIMEOUT="15")[0] != 64


async def test_clients_of_unequal_max_lease(five: list[Server]) -> None:
    """The quarantine of a restarted server would end too early. It is a warning, since clients with another prefix may
    have another one. Clients of the max_lease of the command are no finding, whatever it is."""
    five[0].since(7, 2)  # CLIENT SETINFO
    urls = [server.url for server in five[:3]]
    async with Redlock(*urls, max_lease=120), Redlock(*urls, max_lease=120):
        assert (await asyncio.to_thread(examined, five[:3], "--max-lease", "2m"))[0] == 0
        async with Redlock(*urls):
            code, found = await asyncio.to_thread(examined, five[:3])
    assert (code, [*found]) == (1, ["max-lease"])
    assert "Clients with another prefix" in found["max-lease"]["advice"]
    assert "1 with 1m00s, 2 with 2m00s" in found["max-lease"]["what"]


def test_f11_a_client_with_a_name_that_is_no_max_lease(servers: Servers) -> None:
    """Any program can name its client so. It is not counted."""
    server = servers.start(*DURABLE)
    server.since(7, 2)  # CLIENT SETINFO
    for name in ("1.2.3", "1e999", "e", "."):
        with server.cli() as cli:
            cli.execute_command("CLIENT", "SETINFO", "LIB-NAME", f"asynclock(max_lease={name})")
            assert examined(server) == (0, {})


async def test_a_restarted_server(five: list[Server], name: str) -> None:
    """It casts no vote for max_lease + 1 s."""
    async with Redlock(*(server.url for server in five[:3])) as redlock, redlock(name):
        pass
    five[1].restart()
    code, found = examined(five[:3])
    assert (code, [*found]) == (1, ["quarantine", "spare"])
    assert found["quarantine"]["nodes"] == [f"unix://{five[1].path}"]


@pytest.mark.parametrize("prefix", ["", "lock:"])
def test_a_user_without_rights(server: Server, prefix: str) -> None:
    """The advice is a line to copy: with it nothing is found."""
    cli = server.cli()
    cli.config_set("appendonly", "yes")
    cli.config_set("appendfsync", "always")
    cli.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "+ping", "+info", "+acl|whoami", "+config|get")
    url = f"unix://worker:secret@{server.path}"
    code, found = examined((), "--prefix", prefix, ASYNCLOCK_URLS=url)
    assert code == 2
    advice = found["acl"]["advice"]
    assert "secret" not in str(found)
    cli.execute_command(*advice.split())
    code, found = examined((), "--prefix", prefix, ASYNCLOCK_URLS=url)
    assert (code, [*found]) == (0, ["unchecked"])
    assert "CLIENT LIST" in found["unchecked"]["what"]
    cli.execute_command("ACL", "SETUSER", "worker", "+client|list")
    assert examined((), "--prefix", prefix, ASYNCLOCK_URLS=url) == (0, {})


@pytest.mark.parametrize("command", ["wait", "publish"])
async def test_a_user_without_a_right_for_min_replicas(servers: Servers, command: str) -> None:
    """No hold is confirmed then: every acquire raises ConfigError. The advice is a line to copy."""
    master = servers.start(*DURABLE)
    url = f"{master.user(f'-{command}')}?min_replicas=1"
    code, found = examined((), ASYNCLOCK_URLS=url)
    assert (code, found["acl"]["severity"]) == (2, "error")
    assert f"forbids {command.upper()} " in found["acl"]["what"]
    async with aclosing(Redlock(url, node_timeout=5.0)) as redlock:
        with pytest.raises(ConfigError, match="min_replicas needs"):
            await redlock("a").acquire(timeout=0)
    master.allow("reset", "on", ">secret", "+ping", "+info", "+acl|whoami", "+config|get")
    with master.cli() as cli:
        cli.execute_command(*examined((), ASYNCLOCK_URLS=url)[1]["acl"]["advice"].split())
    assert [*examined((), ASYNCLOCK_URLS=url)[1]] == ["replicas", "unchecked"]


async def test_each_command_is_tried(server: Server) -> None:
    """Whichever is forbidden is found. SELECT comes with the connection."""
    store = RedisStore(f"unix://worker:secret@{server.path}")
    with server.cli() as cli:
        for command in set(ACL_COMMANDS) - {"select"}:
            rule = f"reset on >secret ~* &* +@all -{command}"
            cli.execute_command("ACL", "SETUSER", "worker", *rule.split())
            assert (await facts_of(store, "lock:", connect=5.0)).refused == (command,)
        cli.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "+@all")
        assert (await facts_of(store, "lock:", connect=5.0)).refused == ("publish", "subscribe")
        cli.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~other:*", "&*", "+@all")
        assert {"set", "get", "zadd"} <= {*(await facts_of(store, "lock:", connect=5.0)).refused}
        assert cli.dbsize() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--min-replicas-to-write", "1"), "NOREPLICAS"),
        (("--maxmemory", "1", "--maxmemory-policy", "volatile-lru"), "OOM"),
    ],
)
def test_a_server_that_refuses_each_write(servers: Servers, options: tuple[str, ...], says: str) -> None:
    """It casts no vote, whatever its reason is. The finding has the error of the server."""
    code, found = examined(servers.start(*DURABLE, *options))
    assert (code, found["writes"]["severity"]) == (2, "error")
    assert f"refuses writes: {says}" in found["writes"]["what"]
    assert not {"unchecked", "commands", "acl"} & {*found}


async def test_a_server_that_cannot_append_to_its_file(servers: Servers) -> None:
    """As with a full disk: INFO says that the last write has failed."""
    server = servers.start(*DURABLE)
    failed = (b"aof_last_write_status:ok\r\n", b"aof_last_write_status:err\n")
    async with RewritingProxy(servers.folder / "full", server.path, failed) as proxy:
        facts = await facts_of(RedisStore(proxy.url), "lock:", connect=5.0)
    assert facts.appends_fail


async def test_a_server_that_loads_its_data(servers: Servers) -> None:
    """It answers, so it can be reached; it casts no vote until the data is there."""
    server = servers.start("--dbfilename", "loads.rdb")
    with server.cli() as cli:
        cli.mset({f"key{number}": os.urandom(1000) for number in range(2000)})
        cli.save()
    server.kill()
    slow = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
    loads = Server(server.path.parent, "loads", "--dbfilename", "loads.rdb", *slow)
    try:
        await until(lambda: _is_loading(loads))
        code, found = examined(loads)
    finally:
        loads.kill()
    assert code == 2
    assert not {"reachable", "unchecked", "mode", "prefix"} & {*found}
    assert found["writes"]["what"] == f"{loads.url} loads its data."


def _is_loading(server: Server) -> bool:
    try:
        server.cli(retry=None).ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:  # not yet
        return False
    raise AssertionError("it has loaded its data already")


async def test_a_server_that_hangs_up_meanwhile(servers: Servers) -> None:
    """The error names it."""
    server = servers.start()
    async with HangsUp(servers.folder / "cut", server.path) as proxy:
        facts = await facts_of(RedisStore(proxy.url), "lock:", connect=5.0)
    assert facts.error.startswith(proxy.url)


class HangsUp(Proxy):
    """It ends a connection at the question for the time."""

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b"TIME" in data:
                return
            writer.write(data)


@pytest.mark.parametrize("forbidden", ["getrange", "pttl", "zrange", "type"])
async def test_locks_that_the_user_may_not_read(server: Server, forbidden: str) -> None:
    """They are not taken for keys of another program."""
    async with Redlock(server.url) as redlock, redlock("a"), redlock.semaphore("b", 3):
        found = await facts_of(RedisStore(server.user(f"-{forbidden}")), "lock:", connect=5.0)
        assert (found.keys, found.foreign, found.refused) == (2, {}, (forbidden,))


async def test_locks_below_a_longer_prefix(servers: Servers) -> None:
    """Their fences, tickets and marks are no keys of another program either."""
    server = servers.start(*DURABLE)
    async with Redlock(server.url, prefix="lock:app:") as redlock, redlock("a"):
        for prefix in ("", "lock:"):
            assert examined(server, "--prefix", prefix) == (0, {})


async def test_numbers_that_a_server_does_not_know(server: Server, tmp_path: Path) -> None:
    """Fields of INFO, a setting and a time that are no numbers are unknown, and the others count."""
    odd = [
        (b"connected_slaves:0", b"connected_slaves:x"),
        (b"maxmemory:0", b"maxmemory:-"),
        (b"min-replicas-to-write\r\n$1\r\n0", b"min-replicas-to-write\r\n$1\r\nx"),
        (b"*2\r\n$10\r\n1", b"*2\r\n$10\r\nx"),  # TIME
    ]
    async with RewritingProxy(tmp_path / "odd", server.path, *odd) as proxy:
        facts = await facts_of(RedisStore(proxy.url), "lock:", connect=5.0)
    assert (facts.error, facts.role, facts.replicas) == ("", "master", 0)
    assert (facts.maxmemory, facts.min_replicas_to_write, facts.offset) == (None, None, None)


def test_a_renamed_command(servers: Servers) -> None:
    """A release that keeps a fence would fail."""
    code, found = examined(servers.start(*DURABLE, "--rename-command", "PEXPIRE", ""))
    assert (code, [*found]) == (2, ["commands"])
    assert "PEXPIRE" in found["commands"]["what"]


@pytest.mark.parametrize(("command", "shown"), [("SUBSCRIBE", "SUBSCRIBE"), ("HELLO", "HELLO 3")])
def test_a_server_without_notices(servers: Servers, command: str, shown: str) -> None:
    """Locks work, and waiters poll: a warning."""
    code, found = examined(servers.start(*DURABLE, "--rename-command", command, ""))
    assert (code, [*found]) == (1, ["commands"])
    assert f"does not know {shown}." in found["commands"]["what"]
    assert found["commands"]["risk"] == "Waiters are not notified, and poll."


def test_f15_a_full_server(servers: Servers) -> None:
    """It runs, so the advice is not to start it."""
    server = servers.start()
    with server.cli() as cli:
        cli.config_set("maxclients", 1)
        code, found = examined(server)
    assert (code, [*found]) == (2, ["reachable"])
    assert "max number of clients reached" in found["reachable"]["what"]
    assert found["reachable"]["advice"] == "Raise its maxclients, or close connections to it that nobody needs."


async def nothing() -> None: ...


async def test_the_prefix_of_other_keys(servers: Servers) -> None:
    """Keys of the application; but not locks of any kind, whether held, resting or done."""
    server = servers.start(*DURABLE)
    async with Redlock(server.url, prefix="app:") as redlock, AsyncExitStack() as stack:
        async with redlock("resting", min_hold=10):
            pass
        await redlock.once("done", within=10)(nothing)()
        for lock in (redlock("a"), redlock.read("b"), redlock.semaphore("c", 3)):
            await stack.enter_async_context(lock)
        assert examined(server, "--prefix", "app:") == (0, {})
    cli = server.cli()
    cli.set("app:token", "of another library", ex=60)
    assert examined(server, "--prefix", "app:")[0] == 0
    cli.hset("app:order", "total", "42")
    code, found = examined(server, "--prefix", "app:")
    assert (code, [*found]) == (1, ["prefix"])
    assert re.search("1 hash, 1 string with expiry", found["prefix"]["what"])
    assert examined(server, "--prefix", "locks:")[0] == 0


def test_a_store_that_is_no_server() -> None:
    """64: there is nothing to examine."""
    done = answered("doctor", "--url", "memory:")
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1
