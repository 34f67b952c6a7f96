"""A Redis or Valkey cluster: `redis+cluster://host:port,host2:port2`, or a `redis.asyncio.RedisCluster` client.

The cluster is one node of a client. Its masters share the names by slots; each master has replicas, and one of them
takes its place when it fails. Replication is asynchronous, so such a failover may lose holds: docs/stores/cluster.md.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from asynclock._clock import running_for
from asynclock._errors import ConfigError
from asynclock.stores.redis.cluster.node import ClusterNode
from asynclock.stores.redis.cluster.topology import Address, apart, ranges_of
from asynclock.stores.redis.connecting import follow
from asynclock.stores.redis.hang_ups import explained
from asynclock.stores.redis.login import fetch_credentials
from asynclock.stores.redis.pools import ENCODED, pool_of, without_options
from asynclock.stores.redis.replies import ServerError, config_error, connect_error
from asynclock.stores.redis.stages import Stage
from asynclock.stores.redis.store import RedisStore
from asynclock.stores.urls import trimmed

if TYPE_CHECKING:
    from redis.asyncio import RedisCluster

    from asynclock.stores.port import NodeConfig, Wish
    from asynclock.stores.redis.cluster.shard import Shard
    from asynclock.stores.redis.cluster.topology import Range

_SCHEMES = {
    "redis+cluster": "redis",
    "rediss+cluster": "rediss",
    "valkey+cluster": "redis",
    "valkeys+cluster": "rediss",
}

_UNREAD = ("a redis url", "a rediss url")  # the beginning of an error that shows how to write another url

_DIALERS = 1000  # addresses for which connections can be made, at most: those of pods change again and again
_FORM = "write it as redis+cluster://host:port,host2:port2, with one or more nodes of the cluster"


class ClusterStore:
    """A cluster, by url or by the user's own `redis.asyncio.RedisCluster`."""

    clock = None
    thread_safe = True

    def __init__(self, cluster: str | RedisCluster) -> None:
        if isinstance(cluster, str):
            self._read_url(trimmed(cluster))
        else:
            self._read_client(cluster)
        self._dialers: dict[Address, RedisStore] = {}
        self.label = f"cluster://{self.seeds[0]}"
        self.dialer(self.seeds[0])  # raises for a setting that redis-py does not know

    def __repr__(self) -> str:
        return f"<ClusterStore {self.label}>"

    def _read_url(self, url: str) -> None:
        if without_options(url, "min_replicas")[1]:
            raise ConfigError("min_replicas is not supported on a cluster: leave it out, or use Sentinel")
        scheme, _, rest = url.partition("://")
        netloc = rest.partition("/")[0].partition("?")[0]
        user, at, hosts = netloc.rpartition("@")
        tail, options = without_options(rest[len(netloc) :], "min_replicas")
        if options:
            raise ConfigError("min_replicas is not supported on a cluster: leave it out of the url")
        if "@" in tail:  # of a password with a / or a ? in it, which would be shown
            raise ConfigError(f"a {scheme} url could not be read: {_FORM}; {ENCODED}")
        found: list[Address] = []
        # An empty host between commas is no node: to redis-py it is localhost, which may be in another cluster.
        for host in [each.strip() for each in hosts.split(",") if each.strip()] or [""]:
            pool = _pool(f"{_SCHEMES[scheme.lower()]}://{user}{at}{host}{tail}", scheme)
            self._kwargs, self._connection_class = dict(pool.connection_kwargs), pool.connection_class
            found.append(Address(self._kwargs.get("host", "localhost"), int(self._kwargs.get("port", 6379))))
        # Not with urlsplit: some versions of Python refuse brackets behind a comma.
        if tail.partition("?")[0].partition("#")[0].strip("/") not in ("", "0") or self._kwargs.get("db"):
            raise ConfigError(f"a cluster has only the db 0: {_FORM}")
        self._kwargs.pop("db", None)
        self._remap: Any = None
        self.seeds = tuple(dict.fromkeys(found))

    def _read_client(self, client: RedisCluster) -> None:
        manager = client.nodes_manager
        nodes = list(manager.startup_nodes.values())
        self._kwargs, self._connection_class = dict(nodes[0].connection_kwargs), nodes[0].connection_class
        self._kwargs.pop("redis_connect_func", None)  # of read_from_replicas: it sends READONLY
        self._remap = getattr(manager, "address_remap", None)
        self.seeds = tuple(Address(each.host, int(each.port)) for each in nodes)

    def cannot(self, wish: Wish) -> str | None:
        """The names of one lock must be in one slot."""
        return apart(wish.prefix, wish.names)

    def open(self, config: NodeConfig) -> ClusterNode:
        return ClusterNode(self, config)

    def dialer(self, address: Address) -> RedisStore:
        """Makes connections to one node of the cluster, with the settings of the url or client."""
        known = self._dialers.get(address)
        if known is None:
            host, port = self._remap(tuple(address)) if self._remap is not None else address
            kwargs = {**self._kwargs, "host": host, "port": port}
            made = RedisStore(Redis(connection_pool=ConnectionPool(connection_class=self._connection_class, **kwargs)))
            made.label = f"{address} ({self.label})"
            known = self._dialers.setdefault(address, made)  # another thread may have made one
            for old in [each for each in list(self._dialers) if each not in self.seeds][:-_DIALERS]:
                self._dialers.pop(old, None)
        return known

    async def ranges_by(self, shard: Shard) -> tuple[Range, ...]:
        """What a master says about the slots, on its connection. Raises ServerError, ConnectionError, TimeoutError."""
        return ranges_of(await shard.run("CLUSTER", "SLOTS", within=_ANSWER), shard.address)

    async def ranges_at(self, address: Address, limit: float) -> tuple[Range, ...]:
        """What the node at this address says, on a connection of its own, within `limit` seconds. Raises the error to
        show: ConfigError if only the user can solve the problem."""
        dialer, stages = self.dialer(address), [Stage.CONNECT]
        try:
            redis = await dialer.dial()
            try:
                await fetch_credentials(redis, stages.append, limit, lambda: None)
                async with running_for(follow(redis, stages.append, limit)):
                    await redis.connect()  # type: ignore[no-untyped-call]
                    await redis.send_command("CLUSTER", "SLOTS")
                    return ranges_of(await redis.read_response(), address)
            except RedisError as error:
                raise (await explained(redis, error, stages[-1], limit)) from None
            finally:
                await asyncio.shield(redis.disconnect(nowait=True))
        except (OSError, TimeoutError, RedisError, ValueError) as error:
            failed = error
        raise _shown(dialer.label, failed, stages[-1])


def _pool(url: str, scheme: str) -> ConnectionPool:
    """The pool for the url of one node. Raises ConfigError."""
    try:
        return pool_of(url)
    except ConfigError as error:
        why = str(error)
    if why.startswith(_UNREAD):
        why = f"a {scheme} url could not be read: {_FORM}; user and secret are percent-encoded (%2C for a comma)"
    raise ConfigError(why)


_ANSWER = 0.5  # seconds for the answer of a master that is up


def _shown(label: str, error: Exception, stage: Stage) -> Exception:
    """The error to report for a node that did not say which slots there are."""
    if "cluster support disabled" in str(error):
        return ConfigError(f"{label} is no node of a cluster: write redis:// in the url")
    if "unknown command" in str(error) or "NOPERM" in str(error) or "no permissions" in str(error):
        refused = config_error(label, ServerError(str(error)))
        return ConfigError(f"{refused}; and +cluster|slots, +asking for a cluster")
    return connect_error(label, error, stage)
