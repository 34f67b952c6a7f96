"""Reads the urls of Sentinel deployments, and the clients that redis-py's `Sentinel.master_for` returns.

    redis+sentinel://user:password@host:26379,host2:26379/mymaster/0?sentinel_username=...&sentinel_password=...

User and password are those of the master. The sentinels get the settings of the connection (TLS, timeouts), and the
user and password of the query.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from asynclock._errors import ConfigError
from asynclock.stores.redis.pools import ENCODED, connection_of, pool_of, shown, without_options
from asynclock.stores.redis.sentinel.masters import Endpoint, Sentinels

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool
    from redis.asyncio.sentinel import SentinelConnectionPool

    from asynclock.stores.redis.sentinel.masters import Address

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?")
_NAME = re.compile(r"[\w.-]+")
_OWN = {"sentinel_username": "username", "sentinel_password": "password"}
_OF_THE_MASTER = {"username", "password", "credential_provider", "db", "host", "port", "client_name"}
"""Settings of the master's connection that the sentinels do not get."""


class MasterAt:
    """Stands in for the pool of a Sentinel-managed connection, which it asks for the master."""

    is_master = True
    check_connection = False

    def __init__(self, address: Address) -> None:
        self._address = address

    async def get_master_address(self) -> Address:
        return self._address


def is_sentinel_url(url: str) -> bool:
    """Whether the url names sentinels."""
    return url.partition("://")[0].lower() in _SCHEMES


def read_sentinel_url(url: str) -> tuple[ConnectionPool, Sentinels]:
    """The settings for the master, and its sentinels. Raises ConfigError, which shows no part of the url."""
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    authority, _, path = where.partition("/")
    login, at, hosts = authority.rpartition("@")
    name, _, db = path.strip("/").partition("/")
    found = [_HOST.fullmatch(each.strip()) for each in hosts.split(",") if each.strip()]
    ports = [int(each[3] or _PORT) for each in found if each is not None]
    wrong = not found or not all(found) or not all(0 < each < 65536 for each in ports)
    if wrong or not _NAME.fullmatch(unquote(name)) or (db and not db.isdigit()):
        how = f"write it as {scheme}://host:{_PORT},host2:{_PORT}/mastername/db; {ENCODED}"
        raise ConfigError(f"a {scheme} url could not be read: {how}")
    plain, said = without_options(f"{_SCHEMES[scheme.lower()]}://{login}{at}localhost/{db}?{query}", *_OWN)
    own = {_OWN[option]: value for option, value in said.items()}
    pool = pool_of(plain)
    settings = {key: value for key, value in pool.connection_kwargs.items() if key not in _OF_THE_MASTER}
    addresses = zip([each[1] or each[2] for each in found if each is not None], ports, strict=True)
    return pool, Sentinels(
        unquote(name),
        [
            Endpoint(shown(each), partial(connection_of, pool, settings | own | {"host": each[0], "port": each[1]}))
            for each in addresses
        ],
    )


def sentinels_of(pool: SentinelConnectionPool) -> Sentinels:
    """The sentinels of a client that redis-py's Sentinel made. Raises ConfigError."""
    manager: Any = pool.sentinel_manager
    if not pool.is_master:
        raise ConfigError(f"locks are kept by the master: pass Sentinel(...).master_for({pool.service_name!r})")
    endpoints = []
    for each in manager.sentinels:
        its = each.connection_pool
        address = its.connection_kwargs.get("host", "localhost"), int(its.connection_kwargs.get("port", _PORT))
        endpoints.append(Endpoint(shown(address), partial(connection_of, its)))
    forced = getattr(manager, "_force_master_ip", None)  # it has no public name
    return Sentinels(pool.service_name, endpoints, others=manager.min_other_sentinels, forced_host=forced)


def label_of_master(sentinels: Sentinels, pool: ConnectionPool) -> str:
    """The name of the deployment in messages, without user and password."""
    db = f"/{pool.connection_kwargs['db']}" if pool.connection_kwargs.get("db") else ""
    return f"sentinel://{','.join(each.label for each in sentinels.endpoints)}/{sentinels.name}{db}"
