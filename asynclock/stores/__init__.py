"""Where locks are kept. A store is shared by all event loops and opens a `Node` in each; no store imports another.

A client takes urls, `redis.asyncio.Redis` clients and stores. A user writes a store in one of two ways (docs/stores.md
has a complete example):

    transactional.TransactionalStore    over anything that has transactions: the subclass implements `transact`,
                                        `listen`, `unlisten` and `keys`, and inherits the rules of all kinds of locks
    port.Store and port.Node            over anything else: the two protocols to implement, and the values they use

All times that cross the port are in seconds.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from asynclock._errors import ConfigError, Unsupported, brief
from asynclock.stores.port import is_thread_safe
from asynclock.stores.redis.store import SCHEMES, RedisStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.stores.port import Store

URLS = "ASYNCLOCK_URLS"
"""The environment variable with the urls of a client that was given no nodes: comma-separated (`urls_of`)."""

_ALL = ", ".join([*SCHEMES, "embedded", "memory"])

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_BETWEEN = re.compile(r",\s*(?=[a-z][a-z0-9+.-]*://|(?:embedded|memory):)", re.IGNORECASE)
_MAY_BE_SECRET = re.compile(r"[@?#=]")


def store_for(node: str | Redis | Store) -> Store:
    """The store for a url, a `redis.asyncio.Redis` client, or a store, which is returned as it is. Raises
    ConfigError."""
    if isinstance(node, str):
        return _by_url(node)
    if isinstance(node, Redis):
        return RedisStore(node)
    if callable(getattr(node, "open", None)) and hasattr(node, "label"):
        return node
    raise ConfigError(f"a node is a url, a redis.asyncio.Redis or a Store, not {_kind_of(node)}")


def stores_for(nodes: Sequence[str | Redis | Store]) -> tuple[Store, ...]:
    """The stores of a quorum. Warns of an even number. Raises ConfigError."""
    stores = tuple(store_for(node) for node in nodes)
    labels = [store.label for store in stores]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{label} is named twice: a quorum needs independent servers, each named once")
    if len(stores) > 1 and len(stores) % 2 == 0:
        warnings.warn(
            f"{len(stores)} nodes survive no more lost nodes than {len(stores) - 1} do: use an odd number of nodes",
            stacklevel=4,
        )
    return stores


def check_thread_safe(stores: Sequence[Store]) -> None:
    """Raise Unsupported for a store that threads cannot share: no thread can renew its leases."""
    for store in stores:
        if not is_thread_safe(store):
            raise Unsupported(
                f"renew='thread' needs a store that threads can share, and {store.label} does not say that it is one: "
                "set its thread_safe to True if it is, or use renew=True"
            )


def stores_of(environ: Mapping[str, str]) -> tuple[Store, ...]:
    """The stores that $ASYNCLOCK_URLS names. Raises ConfigError."""
    urls = urls_of(environ.get(URLS, ""))
    if not urls:
        raise ConfigError(
            f"no servers are named: set {URLS}=redis://host:6379 (or {URLS}=embedded: on one machine), "
            "or call redlock.configure('redis://host:6379') first"
        )
    return stores_for(urls)


def urls_of(text: str) -> tuple[str, ...]:
    """The urls of a comma-separated list. A comma separates two urls only where a scheme follows it: passwords and
    paths have commas, too."""
    return tuple(url for each in _BETWEEN.split(text) if (url := each.strip(" ,")))


def _by_url(url: str) -> Store:
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower()
    if len(urls_of(url)) > 1:
        raise ConfigError(
            "one url names several nodes: give each as an argument of its own; "
            "a comma that is part of a secret is written %2C"
        )
    if scheme == "embedded" and colon:
        return _embedded(url)
    if scheme == "memory" and colon:
        from asynclock.stores.memory import MemoryStore  # only where it is used

        return MemoryStore()
    if "://" in url and scheme in SCHEMES:
        return RedisStore(url)
    if "://" in url and _SCHEME.fullmatch(scheme):
        raise ConfigError(f"no store for the scheme {brief(scheme)}: there are {_ALL}")
    # If it may contain a user, a password or a query, the message shows nothing of it.
    shown = "what was given" if _MAY_BE_SECRET.search(url) else brief(url)
    raise ConfigError(
        f"{shown} is not a url: a client takes servers, such as Redlock('redis://host:6379'); "
        "a lock's name goes into the client's call, redlock('order:42')"
    )


def _embedded(url: str) -> Store:
    try:
        from asynclock.stores.embedded.store import EmbeddedStore  # only where it is used
    except ModuleNotFoundError as error:  # fcntl
        why = f"{brief(url)} needs Linux or macOS ({error}): name a server, such as redis://host:6379"
    else:
        return EmbeddedStore(url)
    raise ConfigError(why)


def _kind_of(node: Any) -> str:
    kind = type(node)
    if kind.__module__.startswith("redis."):
        return f"a {kind.__module__}.{kind.__qualname__}: it must be the asyncio client of one server"
    return f"a {kind.__name__}"
