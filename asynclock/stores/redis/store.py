"""Redis, Valkey and servers with their protocol, over TCP, TLS or unix sockets, with ACL users and Sentinel."""

from __future__ import annotations

from os.path import isfile
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from asynclock._errors import ConfigError
from asynclock.stores.redis.login import stream_of
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.stages import followed

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
"""The url schemes of this store, and the schemes of redis-py for them."""

_SPEAK = {
    "protocol": 2,
    "decode_responses": False,
    "encoding": "utf-8",
    "encoding_errors": "strict",
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "retry_on_error": [],
    "maint_notifications_config": None,
    "himport_registry": None,
    "event_dispatcher": None,
}
"""Settings that replace those of the user's client: redis-py must not retry by itself, and replies stay bytes."""


class RedisStore:
    """One server, by url or by the user's own `redis.asyncio.Redis`."""

    clock = None
    thread_safe = True

    def __init__(self, server: str | Redis) -> None:
        self.run_id = ""
        self.replaced = "", 0.0
        self._pool = server.connection_pool if isinstance(server, Redis) else _pool(server)
        self._tokens = stream_of(self._pool)  # a reference, so that it lives as long as this store
        self.label = _label(self._pool)
        unknown = ""
        try:
            self._connection()
        except TypeError as error:
            unknown = str(error)
        if unknown and isinstance(server, str) and "@" in server.partition("?")[2]:  # a password with a ? in it
            raise ConfigError(f"redis-py does not know a setting of a url: {_ENCODED}")
        if unknown:
            raise ConfigError(f"{self.label}: redis-py does not know a setting of this url ({unknown})")

    def __repr__(self) -> str:
        return f"<RedisStore {self.label}>"

    def open(self, config: NodeConfig) -> RedisNode:
        return RedisNode(self, config)

    async def dial(self) -> AbstractConnection:
        """Make a new connection with the settings of the user's pool."""
        for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            file = self._pool.connection_kwargs.get(option)
            if file and not isfile(file):  # noqa: ASYNC240 - once per connection, and local
                raise ConfigError(f"{self.label}: there is no file {file}: correct {option}")
        return self._connection()

    def _connection(self) -> AbstractConnection:
        theirs = self._pool.connection_kwargs
        ours = {key: value for key, value in theirs.items() if not key.startswith(("maint_", "orig_"))}
        ours |= {key: value for key, value in _SPEAK.items() if key in theirs or value is not None}
        ours["retry"] = Retry(NoBackoff(), 0)
        connection: AbstractConnection = followed(self._pool.connection_class)(**ours)
        return connection


_ENCODED = "user and secret are percent-encoded (%2C for a comma), and each of several urls begins with its scheme"


def _pool(url: str) -> ConnectionPool:
    scheme, _, rest = url.partition("://")
    how = f"write it as {scheme}://{'path' if scheme == 'unix' else 'host:port/db'}; {_ENCODED}"
    try:
        pool = ConnectionPool.from_url(f"{SCHEMES[scheme.lower()]}://{rest}")
        parts = urlsplit(url)
    except (ValueError, TypeError):  # their messages may contain the password
        pool = None
    if pool is None:  # not in the except block, so that their error is not the __context__ of this one
        raise ConfigError(f"a {scheme} url could not be read: {how}")
    if scheme.lower() in ("rediss", "valkeys") and pool.connection_kwargs.get("ssl_cert_reqs") != "none":
        pool.connection_kwargs.setdefault("ssl_check_hostname", True)  # the default of redis-py since 6.0
    db = parts.path.strip("/")
    odd = not parts.path if scheme == "unix" else bool(db) and not db.isdigit()
    # An unencoded character in a password ends it early. The rest must not be used, and shown, as the host.
    odd = odd or bool(parts.fragment) or "," in (parts.hostname or "")
    if odd or any("=" not in each for each in parts.query.split("&") if each):
        raise ConfigError(f"a {scheme} url has no path, or a db that is not a number, or an unknown part: {how}")
    return pool


def _label(pool: ConnectionPool) -> str:
    """The address of the server, without user and password."""
    said = pool.connection_kwargs
    db = f"/{said['db']}" if said.get("db") else ""
    if "path" in said:
        return f"unix://{said['path']}{db}"
    if hasattr(pool, "service_name"):
        return f"sentinel://{pool.service_name}{db}"
    return f"{said.get('host', 'localhost')}:{said.get('port', 6379)}{db}"
