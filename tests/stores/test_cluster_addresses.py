"""A cluster whose masters say something else about it than before: other addresses, or nothing. Real servers."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import aclosing
from types import SimpleNamespace
from weakref import ref

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.redis.cluster import masters
from asynclock.stores.redis.cluster.store import ClusterStore
from asynclock.stores.redis.cluster.topology import Address
from asynclock.stores.redis.keys import slot_of
from tests.support.probes import look, nodes_of
from tests.support.services.cluster import Cluster
from tests.support.waiters import LIMIT, PATIENT, until, works


def name_at(name: str, cluster: Cluster, master: int) -> str:
    """A name in a slot that this master had at the start."""
    names = (f"{name}:{number}" for number in range(1000))
    return next(each for each in names if slot_of("lock:", each) * len(cluster.masters) // 16384 == master)


async def test_f15_masters_that_get_other_addresses(name: str) -> None:
    """A cluster of a quorum is told to give host names to its clients, while a client works. Its server was known by
    another address to this client, and is named once all the same: it is taken for a new
    master, which casts no vote for a time."""
    clusters = [Cluster(1, 0) for _ in range(3)]
    try:
        members = [each.ready().members[0] for each in clusters]
        async with aclosing(Redlock(*(f"redis+cluster://{each.address}" for each in members), **PATIENT)) as client:
            await works(client, name)
            first, (node, *_) = members[0], nodes_of(client)
            first.cli("CONFIG", "SET", "cluster-announce-hostname", "localhost")
            first.cli("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname")
            await look(node)
            assert [str(each.address) for each in node.shards] == [f"localhost:{first.port}"]
            async with asyncio.timeout(LIMIT):
                while "for another" not in (await client.health()).nodes[0].error:
                    await asyncio.sleep(0.05)
            await works(client, name)
    finally:
        for each in clusters:
            each.stop()


async def test_f15_a_master_that_has_lost_its_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, and knows no slot. The locks of the names at the other masters go on, although it is the one that is
    asked for the slots."""
    cluster = Cluster(3, 0, "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "15000")
    try:
        first, *_ = cluster.ready().members
        lost, *others = (name_at(name, cluster, each) for each in range(3))
        async with aclosing(Redlock(cluster.url, **PATIENT)) as client:
            for each in (lost, *others):
                await works(client, each)
            asked = SimpleNamespace(
                sample=lambda up, _: [each for each in up if each.address.port == first.port], uniform=random.uniform
            )
            monkeypatch.setattr(masters, "random", asked)
            first.cli("FLUSHALL")
            first.cli("CLUSTER", "RESET", "HARD")
            for _ in range(5):
                with pytest.raises(QuorumUnavailable):
                    await client(lost).acquire(timeout=0.2)
                for each in others:
                    await works(client, each)
    finally:
        cluster.stop()


async def test_f15_masters_that_announce_one_address(name: str) -> None:
    """A master sends ops to the others, and names its own address. The client asks it again after a pause only, and the
    error says what to set."""
    cluster = Cluster(2, 0)
    try:
        first, second = cluster.ready().members
        there = name_at(name, cluster, 1)
        second.cli("CONFIG", "SET", "cluster-announce-port", first.port)
        await until(lambda: {each[2][1] for each in first.cli("CLUSTER", "SLOTS")} == {first.port})
        async with aclosing(Redlock(f"redis+cluster://{first.address}", patience=1.0)) as client:
            with pytest.raises(QuorumUnavailable, match="set cluster-announce-ip and cluster-announce-port"):
                await client(there).acquire()
            assert cluster.refusals("MOVED") < 200
            here = name_at(name, cluster, 0)
            first.cli("CLUSTER", "SETSLOT", slot_of("lock:", here), "MIGRATING", second.id)
            with pytest.raises(QuorumUnavailable):
                await client(here).acquire()
            assert 0 < cluster.refusals("ASK") < 200
    finally:
        cluster.stop()


def test_addresses_that_come_and_go() -> None:
    """Those of pods are new each time. What a client needs for connections to old ones is forgotten."""
    store = ClusterStore("redis+cluster://a:6379")
    first = ref(store.dialer(Address("10.0.0.1", 6379)))
    for number in range(1100):
        store.dialer(Address(f"10.1.{number // 256}.{number % 256}", 6379))
    gc.collect()
    assert first() is None
