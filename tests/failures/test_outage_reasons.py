"""The error of an acquire in an outage: the real reason of each node that failed, and no healthy node (HAZARDS C20)."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock._clock import now
from asynclock.protocol import planner
from tests.support.probes import acquisitions_of, nodes_of, sleeps_until
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, until

TIMEOUT = 0.4

REFUSALS: dict[str, list[str]] = {
    "OOM": ["--maxmemory", "1"],
    "NOREPLICAS": ["--min-replicas-to-write", "1"],
    "CLUSTERDOWN": ["--cluster-enabled", "yes"],
}
"""Servers that accept a connection, answer at once, and grant nothing."""


def _cluster_files(number: int) -> list[str]:
    """A file and a port of its own for each server of one folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["--cluster-config-file", f"nodes{number}.conf", "--cluster-port", str(port)]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("code", REFUSALS)
async def test_c20_the_reason_of_a_server_that_answers(servers: Servers, name: str, code: str, nodes: int) -> None:
    """It answers each try with an error: that error is reported, not a silence of the last moment."""
    urls = [servers.start(*REFUSALS[code], *_cluster_files(n)).url for n in range(nodes)]
    async with asyncio.timeout(20):
        for timeout in (0, 2.0):
            # The mark of first use cannot be read here.
            client = Redlock(*urls, trust_restarts=True, connect_timeout=LIMIT)
            late = True
            while late:  # one of the servers may connect late
                with pytest.raises(QuorumUnavailable, match=code) as caught:
                    await client(name).acquire(timeout=timeout)
                late = any("not connected yet" in str(error) for error in caught.value.errors.values())
            assert len(caught.value.errors) > nodes // 2
            assert all(code in str(error) for error in caught.value.errors.values())
            await client.aclose()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_a_forbidden_command(servers: Servers, name: str, nodes: int) -> None:
    """A user that may run no script needs the operator: ConfigError at once, whatever the timeout."""
    started = [servers.start() for _ in range(nodes)]
    for each in started:
        with each.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-eval", "-evalsha")  # type: ignore[no-untyped-call]
    async with aclosing(Redlock(*(f"unix://limited:secret@{each.path}" for each in started))) as client:
        for timeout in (LIMIT, 3600):
            async with asyncio.timeout(LIMIT):
                with pytest.raises(ConfigError, match="evalsha"):
                    await client(name).acquire(timeout=timeout)


async def test_c20_a_healthy_node_is_not_called_silent(servers: Servers, name: str) -> None:
    """Two of three nodes are down: the error is about these two."""
    nodes = [servers.start() for _ in range(3)]
    async with Redlock(*(each.url for each in nodes)) as client:
        for each in nodes[:2]:
            each.kill()
        for timeout in (0, TIMEOUT):
            with pytest.raises(QuorumUnavailable, match="2 of 3 nodes") as caught:
                await client(name).acquire(timeout=timeout)
            assert set(caught.value.errors) == {each.url for each in nodes[:2]}


async def test_c20_silent_nodes_are_named(five: list[Server], name: str) -> None:
    """Three of five nodes hang: the error is about these three, and says so of each."""
    async with Redlock(*(each.url for each in five)) as client:
        for each in five[:3]:
            each.freeze()
        for timeout in (0, TIMEOUT):
            with pytest.raises(QuorumUnavailable) as caught:
                await client(name).acquire(timeout=timeout)
            assert set(caught.value.errors) == {each.url for each in five[:3]}
            assert all(url in str(error) for url, error in caught.value.errors.items())
        for each in five[:3]:
            each.thaw()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_no_patience_is_one_try(servers: Servers, name: str, nodes: int) -> None:
    """patience=0 gives a first use the time to connect, and ends at the first round without a majority."""
    started = [servers.start() for _ in range(nodes)]
    urls = [each.url for each in started]
    options: dict[str, Any] = {"patience": 0, "connect_timeout": LIMIT}
    async with Redlock(*urls, **options) as client, client(name) as lease:
        assert lease.held
    fresh = Redlock(*urls, **options)
    async with fresh(name) as lease:
        assert lease.held
    for each in started:
        each.kill()
    with pytest.raises(QuorumUnavailable):
        await fresh(name).acquire(timeout=None)
    await fresh.aclose()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c20_patience_bounds_a_longer_timeout(servers: Servers, name: str, nodes: int) -> None:
    """An outage ends an acquire after `patience`, though its timeout is an hour."""
    started = [servers.start() for _ in range(nodes)]
    async with Redlock(*(each.url for each in started), patience=TIMEOUT) as client:
        for each in started:
            each.kill()
        async with asyncio.timeout(20):
            with pytest.raises(QuorumUnavailable):
                await client(name).acquire(timeout=3600)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c20_the_end_of_an_outage_wakes_those_who_wait_for_it(
    servers: Servers, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tasks pause for long between two tries: here for a minute. They do not sleep on once a majority is
    connected again."""
    started = [servers.start() for _ in range(nodes)]
    urls = [each.url for each in started]
    async with Redlock(*urls, patience=600, trust_restarts=True) as client, asyncio.timeout(LIMIT):
        for each in started:
            each.kill()
        await until(lambda: all(node.error is not None for node in nodes_of(client)))
        monkeypatch.setattr(planner, "_OUTAGE_RATE", 1 / 120)
        waiting = [asyncio.create_task(client(f"{name}:{number}").acquire(timeout=None)) for number in range(3)]
        await until(lambda: sum(sleeps_until(each) > now() + 30 for each in acquisitions_of(client)) == len(waiting))
        for each in started[: nodes // 2 + 1]:
            each.restart()
        for lease in await asyncio.gather(*waiting):
            await lease.release()
