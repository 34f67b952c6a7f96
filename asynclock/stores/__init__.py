"""Where locks are kept. A store is shared by all event loops and opens a `Node` in each; no store imports another.

A client takes urls, `redis.asyncio.Redis` clients and stores: `RedisStore`, `SQLStore`, `ZooKeeperStore`, and
`MemoryStore` with a `Clock` that a test can move. A user writes a store in one of two ways (docs/stores.md has a
complete example):

    TransactionalStore    over anything that has transactions: the subclass implements `transact`, `listen`, `unlisten`
                          and `keys`, and inherits the rules of all kinds of locks
    Store and Node        over anything else: the two protocols to implement, and the values they use

The names in `__all__` are public. A store is imported at the first use of its name, because it needs an extra. Without
the extra, an import of the name says what to install, and `__all__` and `dir()` do not have it. All times that cross
the port are in seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from asynclock._errors import ConfigError, Unsupported, brief
from asynclock._time import Clock, Timer
from asynclock.rules.model import Op, State, Verb
from asynclock.stores.port import (
    PROBE,
    UNDONE,
    Buffered,
    Checked,
    Deferrable,
    Facts,
    Grant,
    KeepsTickets,
    Limited,
    Measured,
    Node,
    NodeConfig,
    NodeView,
    Notice,
    NoticeListener,
    Refused,
    ReplyHandler,
    Restartable,
    SameServer,
    Slots,
    Standalone,
    Store,
    ThreadSafe,
    Undone,
    Use,
    Vote,
    WaiterView,
    Wish,
    WrongKind,
    is_standalone,
    is_thread_safe,
)
from asynclock.stores.urls import store_of_client, store_of_url, urls_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from redis.asyncio import Redis, RedisCluster

    from asynclock.stores.memory import MemoryStore
    from asynclock.stores.redis import RedisStore
    from asynclock.stores.sql import SQLStore
    from asynclock.stores.sql.schema import lock_table
    from asynclock.stores.transactional import Change, Step, TransactionalNode, TransactionalStore
    from asynclock.stores.zookeeper import ZooKeeperStore

__all__ = [
    "PROBE",
    "UNDONE",
    "Buffered",
    "Change",
    "Checked",
    "Deferrable",
    "Clock",
    "Facts",
    "Grant",
    "KeepsTickets",
    "Limited",
    "Measured",
    "MemoryStore",
    "Node",
    "NodeConfig",
    "NodeView",
    "Notice",
    "NoticeListener",
    "Op",
    "RedisStore",
    "Refused",
    "ReplyHandler",
    "Restartable",
    "SQLStore",
    "SameServer",
    "Slots",
    "Standalone",
    "State",
    "Step",
    "Store",
    "ThreadSafe",
    "Timer",
    "TransactionalNode",
    "TransactionalStore",
    "Undone",
    "Use",
    "Verb",
    "Vote",
    "WaiterView",
    "Wish",
    "WrongKind",
    "ZooKeeperStore",
    "lock_table",
]

_SQL = "SQLAlchemy: pip install 'asynclock[postgresql]', 'asynclock[mysql]' or 'asynclock[sqlite]'"

_AT_FIRST_USE = {
    "MemoryStore": ("asynclock.stores.memory", ""),
    "RedisStore": ("asynclock.stores.redis", ""),
    "SQLStore": ("asynclock.stores.sql", _SQL),
    "lock_table": ("asynclock.stores.sql.schema", _SQL),
    "ZooKeeperStore": ("asynclock.stores.zookeeper", "kazoo: pip install 'asynclock[zookeeper]'"),
    **dict.fromkeys(
        ("Change", "Step", "TransactionalNode", "TransactionalStore"), ("asynclock.stores.transactional", "")
    ),
}
"""By name: the module that has it, and what to install if its import fails."""

_EXTRAS = {"SQLStore": "sqlalchemy", "ZooKeeperStore": "kazoo", "lock_table": "sqlalchemy"}
"""By name of `__all__`: the package that it needs."""

if not TYPE_CHECKING:  # else a type checker would accept any name
    # So that `from asynclock.stores import *` gives all that is installed.
    __all__[:] = [name for name in __all__ if name not in _EXTRAS or find_spec(_EXTRAS[name]) is not None]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """A name whose module is imported at its first use. If a package is missing, the error is no AttributeError:
        `from asynclock.stores import SQLStore` would replace its message by "cannot import name"."""
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module 'asynclock.stores' has no attribute {name!r}")
        module, needs = _AT_FIRST_USE[name]
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if not needs:
                raise
            raise ModuleNotFoundError(f"asynclock.stores.{name} needs {needs}", name=error.name) from error


URLS = "ASYNCLOCK_URLS"
"""The environment variable with the urls of a client that was given no nodes: comma-separated (`urls_of`)."""

_ENGINE = "sqlalchemy.ext.asyncio.engine.AsyncEngine"

_MIXED = ("asynclock.stores.redis", "asynclock.stores.embedded", "asynclock.stores.memory")
"""The stores of these packages vote in one quorum: all their nodes count leases and fences alike."""


def store_for(node: str | Redis | RedisCluster | Store) -> Store:
    """The store for a url, a client of Redis, or a store, which is returned as it is. Raises ConfigError."""
    if isinstance(node, str):
        return store_of_url(node)
    if isinstance(node, type):
        name = node.__name__
        raise ConfigError(f"{name} is a class, and a node is an object of it: make one: {name}()")
    if (store := store_of_client(node)) is not None:
        return store
    if callable(getattr(node, "open", None)) and hasattr(node, "label"):
        return node  # type: ignore[return-value]  # not a client, as was seen above
    raise ConfigError(f"a node is a url, a redis.asyncio.Redis or a Store, not {_kind_of(node)}")


def stores_for(nodes: Sequence[str | Redis | RedisCluster | Store]) -> tuple[Store, ...]:
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
    """Stores of one family can vote in one quorum: with a clock of their own, only those of one class."""
    if store.clock is not None:
        return type(store)
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


def check_thread_safe(stores: Sequence[Store], name: str = "") -> None:
    """Raise Unsupported for a store that threads cannot share: no thread can renew its leases."""
    for store in stores:
        if not is_thread_safe(store):
            why = getattr(store, "why_not_thread_safe", None) or (
                "does not say that it is one: set its thread_safe to True if it is, or use renew=True"
            )
            raise Unsupported(
                f"renew='thread' needs a store that threads can share, and {store.label} {why}", name=name
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


def _kind_of(node: Any) -> str:
    kind = type(node)
    if isinstance(node, Iterable) and not isinstance(node, (bytes, bytearray)):
        return f"a {kind.__name__}: each node is an argument of its own, write Redlock(*urls)"
    if kind.__module__.startswith("redis."):
        return f"a {kind.__module__}.{kind.__qualname__}: it must be the asyncio client of one server"
    if any(f"{base.__module__}.{base.__name__}" == _ENGINE for base in kind.__mro__):
        return "an AsyncEngine: write Redlock(SQLStore(engine)), with SQLStore of asynclock.stores"
    return f"a {kind.__name__}"
