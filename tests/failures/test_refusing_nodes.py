"""Nodes that accept connections and refuse every op, as their user may not send what locks need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from asynclock import ConfigError, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.stores.port import PROBE
from asynclock.stores.redis import rights
from tests.support.default_keys import key_of
from tests.support.probes import connection_of, never_granted, nodes_of
from tests.support.proxied_clients import behind_proxies
from tests.support.servers import Server
from tests.support.services.cluster import Cluster
from tests.support.told import told
from tests.support.waiters import LIMIT, PATIENT, in_queue, until, urls_of


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "LOOK", 0.02)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines of WARNING and above."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def ups(client: Redlock) -> list[bool]:
    """Which of its nodes count as up, in metrics."""
    (counts,) = client._counts_of_sessions()
    return [node.up for node in counts.nodes]


async def test_f22_a_node_that_refuses_every_op_is_told_as_down(
    five: Sequence[Server], name: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """One of three, from the first connection on. One line says what it refuses. It is up once it votes."""
    urls = [five[0].user("-@scripting"), *urls_of(five[1:3])]
    async with aclosing(Redlock(*urls, **PATIENT)) as client:
        with told(client) as seen:
            async with client(name):
                await until(lambda: len(seen.of(NodeUp)) == 2)
            (down,) = seen.of(NodeDown)
            assert "NOPERM" in down.error
            assert "evalsha" in down.error
            assert down.node not in {each.node for each in seen.of(NodeUp)}
            five[0].allow("+@all")
            await until(lambda: len(seen.of(NodeUp)) == 3)
            assert seen.of(NodeDown) == [down]
    assert len(reports(caplog)) == 1
    assert [str(each.message) for each in recwarn if each.category is RuntimeWarning] == []


async def test_f22_a_node_that_refuses_every_op_counts_as_down(five: Sequence[Server], name: str) -> None:
    """Metrics say the same as the events: it is down, although it is connected, until it votes."""
    async with aclosing(Redlock(five[0].user("-@scripting"), *urls_of(five[1:3]), **PATIENT)) as client:
        with told(client) as seen:
            async with client(name):
                await until(lambda: len(seen.of(NodeUp)) == 2 and seen.of(NodeDown))
            assert ups(client) == [False, True, True]
            five[0].allow("+@all")
            await until(lambda: len(seen.of(NodeUp)) == 3)
            assert ups(client) == [True, True, True]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_f22_a_right_that_is_taken_is_told(five: Sequence[Server], name: str, nodes: int) -> None:
    """The client was connected before. The op that is refused makes it look, and it looks until the right is back."""
    urls = [five[0].user(), *urls_of(five[1:nodes])]
    async with aclosing(Redlock(*urls, **PATIENT)) as client:
        with told(client) as seen:
            async with client(name):
                await until(lambda: len(seen.of(NodeUp)) == nodes)
            five[0].allow("-evalsha", "-eval")
            if nodes == 1:
                with pytest.raises(ConfigError, match="NOPERM"):
                    await client(name).acquire(timeout=0)
            else:
                async with client(name):
                    pass
            await until(lambda: seen.of(NodeDown))
            assert not (await client.health()).nodes[0].ok
            five[0].allow("+evalsha", "+eval")
            await until(lambda: len(seen.of(NodeUp)) == nodes + 1)
            assert len(seen.of(NodeDown)) == 1
            async with client(name):
                pass


async def test_f22_two_checks_find_that_a_right_is_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends the connection, for a new handshake. The other one, which fails with it, does not take the
    node for connected."""
    monkeypatch.setattr(rights, "LOOK", 2 * LIMIT)
    async with aclosing(Redlock(server.user("-@scripting"), **PATIENT)) as client:
        await until_refused(client)
        (node,) = nodes_of(client)
        server.allow("+@all")
        old = connection_of(node)
        checks = asyncio.gather(client.health(), client.health())
        async with asyncio.timeout(LIMIT):
            while connection_of(node) in (old, None):
                assert node.error is not None or connection_of(node) is old
                await asyncio.sleep(0)
        await checks


async def until_refused(client: Redlock) -> None:
    """Return once it is connected, and knows that it is refused."""
    async with asyncio.timeout(LIMIT):
        while "NOPERM" not in (await client.health()).reason:
            pass


async def test_f22_a_master_of_a_cluster_that_refuses_every_op(shared_cluster: Cluster) -> None:
    """The cluster is reported and counts as down, with the slots that serve no names, until all masters vote."""
    for each in shared_cluster.masters:
        each.cli("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&*", "+@all")
    master = shared_cluster.masters[0]
    master.cli("ACL", "SETUSER", "worker", "-@scripting")
    url = shared_cluster.url.replace("://", "://worker:secret@", 1)
    try:
        async with aclosing(Redlock(url, **PATIENT)) as client:
            with told(client) as seen:
                await client.health()
                await until(lambda: seen.of(NodeDown))
                (down,) = seen.of(NodeDown)
                assert "serves no names in slots 0-" in down.error
                assert "NOPERM" in down.error
                assert ups(client) == [False]
                master.cli("ACL", "SETUSER", "worker", "+@all")
                await until(lambda: seen.of(NodeUp))
                assert ups(client) == [True]
    finally:
        for each in shared_cluster.masters:
            each.cli("ACL", "DELUSER", "worker")


async def test_f22_a_name_that_a_user_may_not_lock_is_no_outage(
    five: Sequence[Server], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server refuses one name, and not every op."""
    url = five[0].user("resetkeys", f"~{name}*", "~asynclock~*", "~free:*")
    async with Redlock(url, prefix="", **PATIENT) as client:
        with told(client) as seen:
            with pytest.raises(ConfigError, match="NOPERM"):
                await client("other").acquire()
            async with client(name):
                pass
            assert (await client.health()).ok
    assert seen.of(NodeDown) == []
    assert reports(caplog) == []


@pytest.mark.parametrize("refused", [True, False])
async def test_f22_a_release_of_what_was_never_granted_is_not_reported(
    five: Sequence[Server], name: str, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """The release leaves before the node has answered the acquire. Where the acquire was granted, it is reported."""
    async with behind_proxies(list(five[:3]), **PATIENT) as (client, proxies):
        await client.health()
        with told(client) as seen:
            if refused:
                _forbid(five[0])
            proxies[0].hold_replies()
            sent = proxies[0].request(b"acquire")
            lease = await client(name).acquire(timeout=LIMIT)
            assert lease
            await sent.wait()
            if not refused:
                await until(lambda: five[0].cli().exists(f"lock:{name}"))
                _forbid(five[0])
            await lease.release()
            proxies[0].let_go()
            await until(lambda: seen.of(NodeDown))
    assert [f"{name!r} was not released" in each for each in reports(caplog)].count(True) == (not refused)


async def test_f22_a_ticket_that_was_never_stored_is_not_reported(
    five: Sequence[Server], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of three refuses every op. A waiter withdraws its ticket at each of them."""
    urls = [five[0].user("-@scripting"), *urls_of(five[1:3])]
    async with aclosing(Redlock(*urls, **PATIENT)) as client, Redlock(*urls_of(five[:3]), **PATIENT) as holder:
        async with holder(name):
            waiting = asyncio.create_task(client(name).acquire(timeout=None))
            await until(in_queue(five[1:3], name, 1))
            waiting.cancel()
            await asyncio.wait({waiting})
            await until(in_queue(five[1:3], name, 0))
            await client.health()  # behind the withdrawal
    assert not any("was not released" in each for each in reports(caplog))


async def test_f22_the_ids_that_a_node_never_granted_are_bounded(
    five: Sequence[Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three refuses every op while more locks are held than it remembers."""
    monkeypatch.setattr(rights, "_REMEMBERED", 3)
    urls = [five[0].user("-@scripting"), *urls_of(five[1:3])]
    async with aclosing(Redlock(*urls, **PATIENT)) as client:
        leases = [await client(f"{name}:{i}").acquire(timeout=None) for i in range(5)]
        await client.health()  # behind the acquires
        assert len(never_granted(nodes_of(client)[0])) == 3
        for lease in leases:
            await lease.release()


async def test_f22_a_key_at_the_name_of_the_check_is_no_outage(server: Server, name: str) -> None:
    """Another program has written it, with another type. Locks work, so the node is not reported as down."""
    async with aclosing(Redlock(server.url, **PATIENT)) as client:
        with told(client) as seen:
            async with client(name):
                pass
            with server.cli() as cli:
                cli.rpush(key_of(PROBE), "theirs")
            assert "WRONGTYPE" in (await client.health()).nodes[0].error
            async with client(name):
                pass
        assert seen.of(NodeDown) == []


def _forbid(server: Server) -> None:
    """The user of all clients may send no script, and nothing that deletes."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "default", "-@scripting", "-del", "-@write")
