"""ZooKeeper: the servers of one ensemble, and a path below which the locks are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from kazoo.hosts import collect_hosts
from kazoo.security import CREATOR_ALL_ACL

from asynclock._errors import ConfigError, brief
from asynclock.stores.port import Use
from asynclock.stores.zookeeper.connection import Address
from asynclock.stores.zookeeper.layout import Layout, escaped, knows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kazoo.security import ACL

    from asynclock.stores.port import NodeConfig, Wish
    from asynclock.stores.zookeeper.node import ZooKeeperNode

SESSION_TIMEOUT = 30.0
"""Seconds. It is also the default of `lease`."""

_SHORTEST = 1.0
"""Seconds. kazoo sends its pings up to 0.4 s late."""

_DEFAULT_PATH = "/asynclock"

_LONGEST = 65_536
"""Bytes of a name. A server closes the connection of a client whose request is longer than its jute.maxbuffer, and then
nothing is known about the holds of that client for a moment."""

_HOW = "write it as zookeeper://host:2181,host2:2181/path?session_timeout=30"


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
        hosts, self.root, user, options = _parts_of(url)
        self.layout = _layout(options.pop("layout", layout))
        self.session_timeout = _timeout(options.pop("session_timeout", session_timeout))
        self.ttl_nodes = _flag(options.pop("ttl_nodes", ttl_nodes))
        if options:
            raise ConfigError(f"{brief(next(iter(options)))} is no option of a zookeeper url: {_HOW}&layout=kazoo")
        self.label = f"zookeeper://{hosts}{self.root}"
        given = list(acl) if acl is not None else CREATOR_ALL_ACL if user else None
        self.address = Address(hosts, self.session_timeout, user, given)

    def __repr__(self) -> str:
        return f"<ZooKeeperStore {self.label}>"

    def open(self, config: NodeConfig) -> ZooKeeperNode:
        """Make its node for one event loop, which has a session of its own."""
        from asynclock.stores.zookeeper.node import ZooKeeperNode  # they know each other

        return ZooKeeperNode(self, config)

    def refuses(self, timeout: float) -> ConfigError | None:
        """The error for a session timeout that the servers give; None: it is long enough. A longer one is safe: the
        client stops earlier than the servers."""
        if timeout >= self.session_timeout - 0.001:
            return None
        return ConfigError(
            f"{self.label}: the servers give sessions of {timeout:g} s at most (maxSessionTimeout), and the lease is "
            f"{self.session_timeout:g} s: give session_timeout={timeout:g} to the store and lease={timeout:g} to the "
            "client, or raise maxSessionTimeout of the servers"
        )

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
        if any(len(escaped(name).encode()) > _LONGEST for name in wish.names):
            return f"a name may have {_LONGEST} bytes in a path of ZooKeeper: give a shorter one"
        return None


def _parts_of(url: str) -> tuple[str, str, str, dict[str, str]]:
    """The hosts, the path, the user with its password, and the options of a url. Raises ConfigError, which shows
    nothing of the url: it may contain a password."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    user, _, rest = rest.rpartition("@")
    hosts, slash, path = rest.partition("/")
    path = f"{slash}{path}".rstrip("/") or _DEFAULT_PATH
    try:
        known, _ = collect_hosts(hosts)
        options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError:
        known, options = [], {}
    odd = scheme.lower() != "zookeeper" or not hosts or not known or (bool(user) and ":" not in user)
    if odd or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise ConfigError(f"a zookeeper url could not be read: {_HOW}; user and password are percent-encoded")
    return hosts, path, unquote(user), options


def _layout(name: str) -> Layout:
    try:
        return Layout(name)
    except ValueError:
        raise ConfigError(f"layout is 'kazoo' or 'curator', not {brief(str(name))}") from None


def _flag(value: object) -> bool:
    known = {True: True, False: False, "true": True, "1": True, "false": False, "0": False}
    if not isinstance(value, (bool, str)) or value not in known:
        raise ConfigError(f"ttl_nodes is true or false, not {brief(str(value))}")
    return known[value]


def _timeout(value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]  # a text of the url, or a number
    except (TypeError, ValueError):
        raise ConfigError(f"session_timeout is a number of seconds, not {brief(str(value))}") from None
    if not _SHORTEST <= seconds < float("inf"):
        raise ConfigError(f"session_timeout={seconds:g} s is out of range: give at least {_SHORTEST:g} s")
    return seconds
