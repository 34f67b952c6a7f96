"""Redis, Valkey and servers with their protocol, over TCP, TLS or unix sockets, with ACL users and Sentinel."""

from __future__ import annotations

from os.path import isfile
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import RedisError

from asynclock._errors import ConfigError, brief
from asynclock.stores.redis.identity import Identity
from asynclock.stores.redis.login import stream_of
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.pools import ENCODED, connection_of, label_of, pool_of, without_options
from asynclock.stores.redis.replicated import ReplicatedNode, ReplicatedSentinelNode
from asynclock.stores.redis.sentinel.node import SentinelNode
from asynclock.stores.redis.sentinel.urls import (
    MasterAt,
    is_sentinel_url,
    label_of_master,
    read_sentinel_url,
    sentinels_of,
)
from asynclock.stores.urls import trimmed

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.sentinel.masters import Address, Sentinels


class RedisStore:
    """One server, by url or by the user's own `redis.asyncio.Redis`; or the master of a Sentinel deployment, by a url
    of its sentinels or by the client that `Sentinel.master_for` returns."""

    clock = None
    thread_safe = True

    def __init__(self, server: str | Redis, *, min_replicas: int = 0) -> None:
        """`min_replicas`: a hold counts once so many replicas have it (`replicated.py`); a url may have it as an option
        as well. Raises ConfigError."""
        if isinstance(server, str):
            server, options = without_options(trimmed(server), "min_replicas")
            min_replicas = number_of(options.get("min_replicas", min_replicas))
        self.min_replicas = number_of(min_replicas)
        self.run_id = ""
        self.replaced = "", 0.0
        self.identity = Identity()
        self.sentinels: Sentinels | None = None
        if isinstance(server, Redis):
            self._pool = server.connection_pool
            if isinstance(self._pool, SentinelConnectionPool):
                self.sentinels = sentinels_of(self._pool)
        elif not isinstance(server, str):
            raise ConfigError(f"RedisStore takes a url or a redis.asyncio.Redis, not a {type(server).__name__}")
        elif is_sentinel_url(server):
            self._pool, self.sentinels = read_sentinel_url(server)
        else:
            self._pool = pool_of(server)
        self._tokens = stream_of(self._pool)  # a reference, so that it lives as long as this store
        self.label = label_of(self._pool) if self.sentinels is None else label_of_master(self.sentinels, self._pool)
        unknown = ""
        try:
            self._connection()
        except TypeError as error:
            unknown = str(error)
        except RedisError:  # its message has the value
            unknown = "or its value"
        if unknown and isinstance(server, str) and "@" in server.partition("?")[2]:  # a password with a ? in it
            raise ConfigError(f"redis-py does not know a setting of a url: {ENCODED}")
        if unknown:
            raise ConfigError(f"{self.label}: redis-py does not know a setting of this url ({unknown})")

    def __repr__(self) -> str:
        return f"<RedisStore {self.label}>"

    def open(self, config: NodeConfig) -> RedisNode:
        kinds = (RedisNode, SentinelNode) if not self.min_replicas else (ReplicatedNode, ReplicatedSentinelNode)
        return kinds[self.sentinels is not None](self, config)

    async def dial(self) -> AbstractConnection:
        """Make a new connection with the settings of the user's pool, to the master that the sentinels name."""
        return await self.dial_to(None if self.sentinels is None else (await self.sentinels.find()).address)

    async def dial_to(self, address: Address | None) -> AbstractConnection:
        """Make a new connection to the master that the sentinels name so; None: to the server of the settings."""
        for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            file = self._pool.connection_kwargs.get(option)
            if file and not isfile(file):  # noqa: ASYNC240 - once per connection, and local
                raise ConfigError(f"{self.label}: there is no file {file}: correct {option}")
        if address is not None and self.sentinels is not None:
            address = self.sentinels.dialed(address)
        return self._connection(address)

    def _connection(self, address: Address | None = None) -> AbstractConnection:
        settings: dict[str, Any] = dict(self._pool.connection_kwargs)
        if address is not None and "connection_pool" in settings:  # redis-py's connection asks it for the master
            settings["connection_pool"] = MasterAt(address)
        elif address is not None:
            settings |= {"host": address[0], "port": address[1]}
        return connection_of(self._pool, settings)


def number_of(value: object) -> int:
    """The number of replicas that an option names. Raises ConfigError."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"min_replicas is a whole number, 0 or more, not {brief(str(value))}")
    return value
