"""The keys of locks in Redis, as another program sees them: on one server, or on all masters of a cluster."""

from __future__ import annotations

from functools import cache
from typing import Any

import redis
from redis.asyncio import Redis

from asynclock.stores.redis.cluster.store import ClusterStore
from asynclock.stores.redis.cluster.topology import Address, ranges_of
from tests.support.probes import pool_of


async def keys_at(store: Any, pattern: str) -> list[str]:
    """All keys that match."""
    return [key.decode() for found in await _asked(store, "KEYS", pattern) for key in found]


async def members_at(store: Any, key: str) -> int:
    """The size of a sorted set."""
    counts = await _asked(store, "ZCARD", key)
    return sum(count for count in counts if isinstance(count, int))


async def _asked(store: Any, *command: str) -> list[Any]:
    """The answer of each server; of a cluster, those of the masters that do not have the slot are left out."""
    if not isinstance(store, ClusterStore):
        pool = pool_of(store)
        answer = await Redis(connection_pool=pool).execute_command(*command)
        await pool.disconnect()
        return [answer]
    found: list[Any] = []
    for host, port in _masters(store.seeds[0]):
        async with Redis(host=host, port=port) as master:
            try:
                found.append(await master.execute_command(*command))
            except redis.exceptions.MovedError:
                continue
    return found


@cache
def _masters(seed: Address) -> list[Address]:
    """The masters of a cluster whose slots do not move."""
    connection = redis.Connection(host=seed.host, port=seed.port, protocol=2)
    connection.send_command("CLUSTER", "SLOTS")
    ranges = ranges_of(connection.read_response(), seed)
    connection.disconnect()
    return [each.master for each in ranges]
