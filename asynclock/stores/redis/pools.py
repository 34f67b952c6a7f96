"""What the stores take from redis-py: the pool of a url, and single connections with the settings of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from asynclock._errors import ConfigError
from asynclock._untrusted import number_of
from asynclock.stores.redis.connecting import followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from redis.asyncio.connection import AbstractConnection

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
"""The url schemes of one server, and the schemes of redis-py for them."""

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


def without_options(url: str, *names: str) -> tuple[str, dict[str, str]]:
    """A url without these options of its query, and their values. The rest of it stays as it was written."""
    head, mark, query = url.partition("?")
    said = query.split("&")
    ours = "&".join(each for each in said if each.partition("=")[0] in names)
    found = dict(parse_qsl(ours, keep_blank_values=True))
    others = "&".join(each for each in said if each.partition("=")[0] not in found)
    return f"{head}{mark if others else ''}{others}", found


def connection_of(pool: ConnectionPool, settings: Mapping[str, Any] | None = None) -> AbstractConnection:
    """A new connection, not yet connected, of the class of a pool, and with its settings or with these."""
    theirs = pool.connection_kwargs if settings is None else settings
    ours = {key: value for key, value in theirs.items() if not key.startswith(("maint_", "orig_"))}
    ours |= {key: value for key, value in _SPEAK.items() if key in theirs or value is not None}
    ours["retry"] = Retry(NoBackoff(), 0)
    connection: AbstractConnection = followed(pool.connection_class)(**ours)
    return connection


ENCODED = "user and secret are percent-encoded (%2C for a comma), and each of several urls begins with its scheme"


def pool_of(url: str) -> ConnectionPool:
    """The pool of redis-py for a url. Raises ConfigError."""
    scheme, colon, rest = url.partition("://")
    if not colon or scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"this is no url of one Redis server ({', '.join(f'{each}://' for each in SCHEMES)}), or of its sentinels "
            "(redis+sentinel://): give the url of another store to Redlock itself"
        )
    how = f"write it as {scheme}://{'path' if scheme == 'unix' else 'host:port/db'}; {ENCODED}"
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
    unix = scheme.lower() == "unix"
    odd = not parts.path or bool(parts.netloc.rpartition("@")[2]) if unix else bool(db) and number_of(db) is None
    # An unencoded character in a password ends it early. The rest must not be used, and shown, as the host.
    odd = odd or bool(parts.fragment) or "," in (parts.hostname or "")
    if odd or any("=" not in each for each in parts.query.split("&") if each):
        raise ConfigError(f"a {scheme} url has no path, or a db that is not a number, or an unknown part: {how}")
    return pool


def label_of(pool: ConnectionPool) -> str:
    """The address of the server, without user and password."""
    said = pool.connection_kwargs
    db = said.get("db")
    if "path" in said:
        return f"unix://{said['path']}{f'?db={db}' if db else ''}"
    return f"{shown((said.get('host', 'localhost'), said.get('port', 6379)))}{f'/{db}' if db else ''}"


def shown(address: tuple[str, int]) -> str:
    """An address in messages."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
