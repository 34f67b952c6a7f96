"""ZooKeeper: the servers of one ensemble, and a path below which the locks are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.stores.port import Use
from asynclock.stores.urls import trimmed
from asynclock.stores.zookeeper.layout import Layout, escaped, knows
from asynclock.stores.zookeeper.node import ZooKeeperNode
from asynclock.stores.zookeeper.settings import settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kazoo.security import ACL

    from asynclock.stores.port import NodeConfig, Wish

SESSION_TIMEOUT = 30.0
"""Seconds. It is also the default of `lease`."""

_LONGEST = 65_536
"""Bytes of a name. A server closes the connection of a client whose request is longer than its jute.maxbuffer, and then
nothing is known about the holds of that client for a moment."""

_LONGEST_TOGETHER = 524_288
"""Bytes of the paths of all names of a `multi`, which are in one request. jute.maxbuffer is 1 MB by default, and the
request also has the data of each node, with its metadata."""


class ZooKeeperStore:
    """Locks below a path of one ensemble. `session_timeout` is in seconds, and is the lease of each lock. `layout` is
    "kazoo" or "curator": whose recipe the nodes look like. `acl` are kazoo's ACLs for the nodes that are created; by
    default the user of the url has all permissions, and without a user everybody has. `ttl_nodes`: the servers have TTL
    nodes, which `once` needs.

    An option in the url, such as ?session_timeout=10, counts before the argument. Does no I/O. Raises ConfigError."""

    clock = None
    standalone = True
    thread_safe = False
    why_not_thread_safe = (
        "cannot be one, because its session is the lease: use renew=True, and run code that blocks in a thread "
        "(asyncio.to_thread)"
    )

    def __init__(
        self,
        url: str,
        *,
        layout: str = Layout.KAZOO,
        session_timeout: float = SESSION_TIMEOUT,
        acl: Sequence[ACL] | None = None,
        ttl_nodes: bool = False,
    ) -> None:
        settings = self._settings = settings_of(trimmed(url), layout, session_timeout, acl, ttl_nodes)
        self.label, self.root, self.layout, self.session_timeout, self.ttl_nodes, self.address = settings

    def __repr__(self) -> str:
        return f"<ZooKeeperStore {self.label}>"

    def open(self, config: NodeConfig) -> ZooKeeperNode:
        """Make its node for one event loop, which has a session of its own."""
        return ZooKeeperNode(self._settings, config)

    def cannot(self, wish: Wish) -> str | None:
        """Why it cannot keep such a lock; None: it can."""
        letters = [each.kind.letter for each in wish.kind.parts] or [wish.kind.letter]
        if not all(knows(each) for each in letters):
            return "its layouts have no nodes for this kind of lock"
        if wish.use in (Use.DETACH, Use.ADOPT):
            return "a lock belongs to the session of its client, and no other process can take it over"
        if wish.use is Use.ONCE and not self.ttl_nodes:
            return (
                "once() needs nodes that outlive their session and then end by themselves (TTL nodes): if the servers "
                "have zookeeper.extendedTypesEnabled=true, give ttl_nodes=True to the store, or ?ttl_nodes=true in the "
                "url"
            )
        if abs(wish.lease - self.session_timeout) > 0.001:
            return (
                f"the session is the lease: give lease={self.session_timeout:g}, the session_timeout of "
                f"the store, or session_timeout={wish.lease:g} to the store"
            )
        if wish.min_hold:
            return "a released node is gone at once, so min_hold cannot be kept"
        lengths = [len(escaped(name).encode()) for name in wish.names]
        if any(length > _LONGEST for length in lengths):
            return f"a name may have {_LONGEST} bytes in a path of ZooKeeper: give a shorter one"
        if sum(lengths) + len(lengths) * len(self.root.encode()) > _LONGEST_TOGETHER:
            return f"the paths of its names may have {_LONGEST_TOGETHER} bytes together: give shorter or fewer names"
        return None
