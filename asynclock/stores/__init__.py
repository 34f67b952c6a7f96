"""Where locks are kept. A store is shared by all event loops and opens a `Node` in each; no store imports another.

A client takes urls, `redis.asyncio.Redis` clients and stores. A user writes a store in one of two ways (docs/stores.md
has a complete example):

    transactional.TransactionalStore    over anything that has transactions: the subclass implements `transact`,
                                        `listen`, `unlisten` and `keys`, and inherits the rules of all kinds of locks
    port.Store and port.Node            over anything else: the two protocols to implement, and the values they use

All times that cross the port are in seconds.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol, cast

from asynclock._errors import ConfigError, Unsupported, brief
from asynclock.stores.port import Limited, Store, Use, is_standalone, is_thread_safe
from asynclock.stores.urls import store_of_client, store_of_url, urls_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from redis.asyncio import Redis

    from asynclock.stores.port import Wish

URLS = "ASYNCLOCK_URLS"
"""The environment variable with the urls of a client that was given no nodes: comma-separated (`urls_of`)."""

_ENGINE = "sqlalchemy.ext.asyncio.engine.AsyncEngine"

_MIXED = ("asynclock.stores.redis", "asynclock.stores.embedded", "asynclock.stores.memory")
"""The stores of these packages vote in one quorum: all their nodes count leases and fences alike."""


def store_for(node: str | Redis | Store) -> Store:
    """The store for a url, a client of Redis, or a store, which is returned as it is. Raises ConfigError."""
    if isinstance(node, str):
        return store_of_url(node)
    if (store := store_of_client(node)) is not None:
        return store
    if callable(getattr(node, "open", None)) and hasattr(node, "label"):
        return node  # type: ignore[return-value]  # not a client, as was seen above
    raise ConfigError(f"a node is a url, a redis.asyncio.Redis or a Store, not {_kind_of(node)}")


def stores_for(nodes: Sequence[str | Redis | Store]) -> tuple[Store, ...]:
    """The stores of a quorum. Warns of an even number. Raises ConfigError."""
    stores = tuple(store_for(node) for node in nodes)
    if len(stores) == 1:
        return stores
    labels = [store.label for store in stores]
    for store in stores:
        if is_standalone(store):
            raise ConfigError(f"{store.label} is always the only node of a client: make one client for each store")
        if labels.count(store.label) > 1:
            raise ConfigError(f"{store.label} is named twice: a quorum needs independent servers, each named once")
    if len({_family(store) for store in stores}) > 1:
        raise ConfigError(f"{', '.join(labels)}: a quorum of different stores is made of Redis servers only")
    if len(stores) % 2 == 0:
        warnings.warn(
            f"{len(stores)} nodes survive no more lost nodes than {len(stores) - 1} do: use an odd number of nodes",
            stacklevel=4,
        )
    return stores


def _family(store: Store) -> object:
    """Stores of one family can vote in one quorum."""
    for kind in type(store).__mro__:
        if kind.__module__.startswith(_MIXED):
            return _MIXED
    return type(store)


class LimitedStore(Store, Limited, Protocol):
    """A store that cannot keep every lock."""


def limited_of(stores: Sequence[Store]) -> tuple[LimitedStore, ...]:
    """The stores that cannot keep every lock. Looked up once for a client: it takes 50 us."""
    return tuple(cast("LimitedStore", store) for store in stores if isinstance(store, Limited))


def check_supported(limited: Sequence[LimitedStore], wish: Wish) -> None:
    """Raise Unsupported for a lock that one of these stores cannot keep."""
    for store in limited:
        if reason := store.cannot(wish):
            name = ", ".join(wish.names)
            what = wish.kind.name if wish.use is Use.LOCK else wish.use.value
            about = f"{what} of {brief(name)}" if name else what
            raise Unsupported(f"{store.label} cannot keep this ({about}): {reason}", name=name)


def check_thread_safe(stores: Sequence[Store]) -> None:
    """Raise Unsupported for a store that threads cannot share: no thread can renew its leases."""
    for store in stores:
        if not is_thread_safe(store):
            why = getattr(store, "why_not_thread_safe", None) or (
                "does not say that it is one: set its thread_safe to True if it is, or use renew=True"
            )
            raise Unsupported(f"renew='thread' needs a store that threads can share, and {store.label} {why}")


def stores_of(environ: Mapping[str, str]) -> tuple[Store, ...]:
    """The stores that $ASYNCLOCK_URLS names. Raises ConfigError."""
    urls = urls_of(environ.get(URLS, ""))
    if not urls:
        raise ConfigError(
            f"no servers are named: set {URLS}=redis://host:6379 (or {URLS}=embedded: on one machine), "
            "or call redlock.configure('redis://host:6379') first"
        )
    return stores_for(urls)


def _kind_of(node: Any) -> str:
    kind = type(node)
    if kind.__module__.startswith("redis."):
        return f"a {kind.__module__}.{kind.__qualname__}: it must be the asyncio client of one server"
    if any(f"{base.__module__}.{base.__name__}" == _ENGINE for base in kind.__mro__):
        return "an AsyncEngine: write Redlock(SQLStore(engine)), with SQLStore of asynclock.stores.sql"
    return f"a {kind.__name__}"
