"""The keys of locks in Redis, as another program sees them: on one server, or on all masters of a cluster."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode

from asynclock.stores.redis.cluster import ClusterStore
from tests.support.probes import pool_of


async def keys_at(store: Any, pattern: str) -> list[str]:
    """All keys that match."""
    found: Any
    if isinstance(store, ClusterStore):
        async with _cluster(store) as cluster:
            found = await cluster.keys(pattern, target_nodes=RedisCluster.PRIMARIES)
    else:
        pool = pool_of(store)
        found = await Redis(connection_pool=pool).keys(pattern)
        await pool.disconnect()
    return [key.decode() for key in found]


async def members_at(store: Any, key: str) -> int:
    """The size of a sorted set."""
    count: Any
    if isinstance(store, ClusterStore):
        async with _cluster(store) as cluster:
            count = await cluster.zcard(key)
    else:
        pool = pool_of(store)
        count = await Redis(connection_pool=pool).zcard(key)
        await pool.disconnect()
    return int(count)


def _cluster(store: ClusterStore) -> Any:
    return RedisCluster(startup_nodes=[ClusterNode(*address) for address in store.seeds])
