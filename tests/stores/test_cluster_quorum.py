"""A quorum of independent clusters: each is one node. Real clusters of one master, which the tests kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.events import Event, Quarantined
from tests.support.probes import acquisitions_of, waits_for_notice
from tests.support.services.cluster import Cluster, wait_until
from tests.support.waiters import LIMIT, PATIENT, until


@pytest.fixture(scope="module")
def three() -> Iterator[Sequence[Cluster]]:
    clusters = [Cluster(1, replicas, "--cluster-node-timeout", "15000") for replicas in (1, 0, 0)]
    yield [cluster.ready() for cluster in clusters]
    for cluster in clusters:
        cluster.stop()


@pytest.fixture
def clusters(three: Sequence[Cluster]) -> Sequence[Cluster]:
    """Three clusters of one master each; the first one has a replica."""
    for each in three:
        each.heal()
        each.masters[0].cli("FLUSHALL")
    return three


def urls(clusters: Sequence[Cluster]) -> list[str]:
    return [cluster.all_urls for cluster in clusters]


async def test_one_cluster_of_three_is_down(clusters: Sequence[Cluster], name: str) -> None:
    """A majority of the clusters decides."""
    nodes = urls(clusters)
    async with Redlock(*nodes, **PATIENT) as a, Redlock(*nodes, **PATIENT) as b:
        lease = await a(name).acquire(timeout=LIMIT)
        assert lease
        clusters[1].masters[0].kill()
        await lease.extend()
        assert await b(name).acquire(timeout=0) is None
        waiting = asyncio.create_task(b(name).acquire(timeout=LIMIT))
        await until(lambda: any(map(waits_for_notice, acquisitions_of(b))))
        await lease.release()
        got = await waiting
        assert got
        assert got.fence > lease.fence
        await got.release()


async def test_d1_the_same_cluster_twice(clusters: Sequence[Cluster], name: str) -> None:
    """By other addresses, but the same servers: it would have two votes."""
    first = clusters[0]
    nodes = [f"redis+cluster://{each.address}" for each in (first.masters[0], first.replicas[0])]
    with pytest.raises(ConfigError, match="same server"):
        await Redlock(*nodes, clusters[1].url, **PATIENT)(name).acquire(timeout=LIMIT)


def cut_off(cluster: Cluster) -> None:
    """From now on the replica misses what the master does."""
    master = cluster.masters[0]
    master.cli("ACL", "SETUSER", "default", "-psync", "-sync")
    master.cli("CLIENT", "KILL", "TYPE", "replica")


async def promote(cluster: Cluster) -> None:
    """The replica takes the place of the master."""
    replica = cluster.replicas[0]
    await asyncio.to_thread(cluster.promote, replica, "TAKEOVER")
    await asyncio.to_thread(wait_until, lambda: replica.info()["cluster_state"] == "ok", "it serves")


@pytest.mark.parametrize("trust", [False, True])
async def test_d5_a_promoted_replica_in_a_quorum(clusters: Sequence[Cluster], name: str, trust: bool) -> None:
    """A hold is at two of three clusters. One of them fails over to a replica that does not have it. The new master
    casts no vote, so nobody else gets the lock. With trust_restarts it votes, and the lock has two holders."""
    first, both, _ = clusters
    told: list[Event] = []
    if not trust:  # so old that it would vote, had it not been a replica
        old = first.replicas[0]
        await asyncio.to_thread(wait_until, lambda: int(old.info("server")["uptime_in_seconds"]) > 10, "it is old")
    options = {"trust_restarts": trust, "node_timeout": 1.0, "lease": 8.0, "max_lease": 8.0}
    unreachable = "redis+cluster://127.0.0.1:1"  # for the holder, the third cluster
    reached = [first.all_urls, both.all_urls, unreachable]
    async with Redlock(*reached, **options) as a, Redlock(*urls(clusters), **options) as b:  # type: ignore[arg-type]
        b.subscribe(told.append)
        async with b("other"):  # it knows all masters
            pass
        cut_off(first)
        lease = await a(name).acquire(timeout=5)
        assert lease
        first.masters[0].kill()
        await promote(first)
        if not trust:
            await until(lambda: any(isinstance(each, Quarantined) for each in told))  # it has met the new master
        try:
            second = await b(name).acquire(timeout=LIMIT if trust else 1.0)
        except QuorumUnavailable as error:
            assert "casts no vote" in str(error)  # noqa: PT017 - one of two ways to say no
            second = None
        assert (second is not None) is trust
        assert any(isinstance(each, Quarantined) for each in told) is not trust
        if second is not None:
            await second.release()
        lost = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        lost.cancel()
        await a.release_all()
