"""Where locks are kept. One store is one file; none imports another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from asynclock._errors import ConfigError, brief
from asynclock.stores.redis import SCHEMES, RedisStore

if TYPE_CHECKING:
    from asynclock._ports import Store

_ALL = ", ".join([*SCHEMES, "embedded", "memory"])


def store_for(node: str | Redis | Store) -> Store:
    """The store that a url, a client or a store means. Raises ConfigError."""
    if isinstance(node, str):
        return _by_url(node)
    if isinstance(node, Redis):
        return RedisStore(node)
    if callable(getattr(node, "open", None)) and hasattr(node, "label"):
        return node
    raise ConfigError(f"a node is a url, a redis.asyncio.Redis or a Store, not {_kind_of(node)}")


def _by_url(url: str) -> Store:
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower()
    shown = brief(url.rpartition("@")[2])  # never a password, wherever it was put
    if "," in url:
        raise ConfigError(f"{shown} names several nodes: give each as an argument of its own")
    if scheme == "embedded" and colon:
        from asynclock.stores.embedded import EmbeddedStore  # only where it is used

        return EmbeddedStore(url)
    if scheme == "memory" and colon:
        from asynclock.stores.memory import MemoryStore  # only where it is used

        return MemoryStore()
    if "://" in url and scheme in SCHEMES:
        return RedisStore(url)
    if "://" in url:
        raise ConfigError(f"no store for the scheme {brief(scheme.rpartition('@')[2])}: there are {_ALL}")
    raise ConfigError(
        f"{shown} is no url: a client takes servers, such as Redlock('redis://host:6379'); "
        "a lock's name goes into the client's call, redlock('order:42')"
    )


def _kind_of(node: Any) -> str:
    kind = type(node)
    if kind.__module__.startswith("redis."):
        return f"a {kind.__module__}.{kind.__qualname__}: it must be the asyncio client of one server"
    return f"a {kind.__name__}"
