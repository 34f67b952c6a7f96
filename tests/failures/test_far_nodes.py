"""Nodes that are far: the default node_timeout on a quorum follows the round trips (HAZARDS F17)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

import pytest

from asynclock import QuorumUnavailable, Redlock, _options
from asynclock._options import ClientSettings, LockSettings, longest_node_timeout, node_timeout
from asynclock.quorum.limits import Limits
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import Notice
from asynclock.runtime.opening import quorum_over, too_late
from asynclock.stores import Checked, MemoryStore, NodeConfig, distance
from asynclock.stores.redis.connection import Connection
from asynclock.stores.transactional import TransactionalNode
from tests.support.fake_clock import FakeClock
from tests.support.far_servers import FarProxy, far_servers
from tests.support.probes import nodes_of, ping
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, PATIENT, healthy
from tests.support.waiting_probes import limits_of, node_timeout_of

TOO_FAR = r"its answers take 0\.[45]\d* s; set node_timeout to [12][.\d]* or more, with a lease of at least [56]"


def go_away(proxies: Iterable[FarProxy], round_trip: float) -> None:
    for each in proxies:
        each.way = round_trip / 2


async def test_f17_the_default_follows_the_round_trip(
    five: list[Server], name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A round trip takes longer than the shortest node_timeout. After some answers, which may be late, acquires with
    timeout=0 win, releases say nothing, and health is ok."""
    monkeypatch.setattr(distance, "QUORUM_TIMEOUT", 1.0)
    async with far_servers(five[:3]) as proxies, Redlock(*(each.url for each in proxies), patience=LIMIT) as client:
        await client.health()
        go_away(proxies, 1.2)
        async with asyncio.timeout(LIMIT):  # on a busy machine most answers are read late, and do not count
            while node_timeout_of(client) < 2.4:  # twice the round trip
                await asyncio.gather(*map(ping, nodes_of(client)))
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        await lease.extend()
        await lease.release()
        health = await client.health()
        assert health.ok
        assert all(node.ok for node in health.nodes)
        assert not caplog.records


async def test_f17_a_connect_takes_few_round_trips(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is sent when all others are answered begins a round trip. All of them, with those of TCP, TLS and
    login, take at most connect_timeout."""
    sent: list[bool] = []
    send = Connection.send

    def noted(connection: Connection, wire: bytes, handler: Any) -> None:
        sent.append(not connection.waiting)
        send(connection, wire, handler)

    monkeypatch.setattr(Connection, "send", noted)
    async with aclosing(Redlock(server.url, **PATIENT)) as client:
        (node,) = nodes_of(client)
        await node.open()
        assert sum(sent) == 3


@pytest.mark.parametrize("kind", ["mutex", "write", "semaphore"])
async def test_f17_a_near_and_a_far_client_on_one_name(five: list[Server], name: str, kind: str) -> None:
    """Both get it again and again, and never together."""
    some, counts, inside = five[:3], Counter[str](), set[str]()

    async def work(client: Redlock, who: str) -> None:
        lock = {"mutex": client(name), "write": client.write(name), "semaphore": client.semaphore(name, 1)}[kind]
        while min(counts["near"], counts["far"]) < 3:
            async with lock:
                assert not inside
                inside.add(who)
                await asyncio.sleep(0.01)
                inside.remove(who)
                counts[who] += 1

    async with far_servers(some) as proxies, asyncio.timeout(2 * LIMIT):
        near = Redlock(*(each.url for each in some), lease=20.0)
        far = Redlock(*(each.url for each in proxies), lease=20.0, patience=LIMIT)
        async with near, far:
            await far.health()
            go_away(proxies, 0.1)
            await asyncio.gather(work(near, "near"), work(far, "far"))


@pytest.mark.usefixtures("patient_connections")
async def test_f17_a_node_timeout_that_is_given_stays(servers: Servers, name: str) -> None:
    """The nodes are too far for it. The error of an acquire says how far they are, and what to set. Health is not ok:
    it judges as an acquire does, although the nodes answer it."""
    some = servers.start_together(3)
    async with far_servers(some) as proxies, Redlock(*(each.url for each in proxies), node_timeout=0.3) as client:
        await healthy(client)
        for node in nodes_of(client):
            for _ in range(50):
                node.distance.add(0.5)
        go_away(proxies, 0.5)
        health = await client.health()
        assert not health.ok
        assert re.search(TOO_FAR.replace("; ", ", and node_timeout is 0.3 s; "), health.reason)
        go_away(proxies, 3.0)
        with pytest.raises(QuorumUnavailable, match=TOO_FAR):
            await client(name).acquire(timeout=0)


async def test_f17_a_node_that_answers_late_once_is_not_far(five: list[Server]) -> None:
    """The program may have been busy: its round trips say whether it is far."""
    async with Redlock(*(each.url for each in five[:3])) as client:
        node = nodes_of(client)[0]
        node.distance.add(0.001)
        found = Checked(2 * LIMIT)
        assert node.distance.usual < LIMIT
        assert too_late(node, found, LIMIT) is found
        for _ in range(50):
            node.distance.add(2 * LIMIT)
        assert isinstance(too_late(node, found, LIMIT), TimeoutError)


async def test_f17_the_limits_of_the_nodes(five: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The farthest node counts, up to a tenth of the lease."""
    monkeypatch.setattr(_options, "QUORUM_TIMEOUT", 0.05)
    async with Redlock(*(each.url for each in five[:3]), lease=5.0) as client:
        await client.health()
        limits = limits_of(client)
        for index, limit in [(0, 0.0), (1, 0.3), (2, 0.1)]:
            limits.measured(index, limit)
        assert node_timeout_of(client) == 0.3
        assert node_timeout_of(client, lease=2.0) == 0.2
        assert node_timeout_of(client, lease=0.3) == 0.05
        limits.measured(1, 0.05)
        assert node_timeout_of(client) == 0.1


@pytest.mark.parametrize(
    ("given", "nodes", "lease", "measured", "limit"),
    [
        (None, 1, 30.0, 9.0, 3.0),  # a single node is not measured
        (None, 5, 30.0, 0.0, 0.05),
        (None, 5, 30.0, 0.02, 0.05),
        (None, 5, 30.0, 0.3, 0.3),
        (None, 5, 30.0, 9.0, 3.0),
        (None, 5, 0.2, 0.3, 0.05),
        (0.07, 5, 30.0, 0.3, 0.07),
    ],
)
def test_f17_node_timeout(
    monkeypatch: pytest.MonkeyPatch, given: float | None, nodes: int, lease: float, measured: float, limit: float
) -> None:
    """The default, and one that is given."""
    monkeypatch.setattr(_options, "QUORUM_TIMEOUT", 0.05)
    client, lock = ClientSettings(node_timeout=given), LockSettings(lease=lease)
    assert node_timeout(client, lock, nodes, measured=measured) == limit
    assert longest_node_timeout(client, lock) >= limit


def test_f17_the_longest_limit_of_any_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt of a client that is farther away takes longer: a client that is near counts with it."""
    monkeypatch.setattr(_options, "QUORUM_TIMEOUT", 0.05)
    near: dict[str, Any] = {"client": ClientSettings(), "lock": LockSettings(lease=30.0)}
    assert longest_node_timeout(**near) == node_timeout(**near, nodes=5, measured=99.0)


def test_limits_without_measures() -> None:
    """Stores that measure nothing."""
    assert Limits(3).longest == 0.0


def test_the_farthest_node_decides_the_limit() -> None:
    """By what each node measured last."""
    limits = Limits(3)
    for index, limit, longest in [(1, 0.3, 0.3), (0, 0.1, 0.3), (2, 0.2, 0.3), (1, 0.05, 0.2)]:
        limits.measured(index, limit)
        assert limits.longest == longest


async def test_f17_what_a_node_measures_is_a_limit_of_its_quorum() -> None:
    """Of several nodes. A single one need not measure, since its limit is long anyway."""
    configs, clock, listener = list[NodeConfig](), FakeClock(), Nobody()

    class Watched(MemoryStore):
        def open(self, config: NodeConfig) -> TransactionalNode:
            configs.append(config)
            return super().open(config)

    def over(nodes: int) -> Quorum:
        configs.clear()
        return quorum_over([Watched(clock) for _ in range(nodes)], ClientSettings(), clock, listener, lambda _: None)

    quorum = over(3)
    assert configs[1].measured is not None
    configs[1].measured(0.3)
    assert quorum.limits.longest == 0.3
    over(1)
    assert configs[0].measured is None


class Nobody:
    """A listener of nodes that send nothing."""

    tag = "nobody"

    def received(self, index: int, notice: Notice) -> None: ...

    def connected(self, index: int, *, missed: bool = True) -> None: ...
