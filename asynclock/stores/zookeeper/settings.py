"""What a url of ZooKeeper and its options say. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from kazoo.hosts import collect_hosts
from kazoo.security import CREATOR_ALL_ACL

from asynclock._errors import ConfigError, brief
from asynclock.stores.zookeeper.connection import Address
from asynclock.stores.zookeeper.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kazoo.security import ACL

_SHORTEST = 1.0
"""Seconds. kazoo sends its pings up to 0.4 s late."""

_LONGEST = 2147483
"""Seconds. kazoo sends it as ms, in 32 bits."""

_DEFAULT_PATH = "/asynclock"

_HOW = "write it as zookeeper://host:2181,host2:2181/path?session_timeout=30"


class Settings(NamedTuple):
    """Of one store: its ensemble, and the path below which the locks are."""

    label: str  # has no password
    root: str
    layout: Layout
    session_timeout: float  # seconds
    ttl_nodes: bool
    address: Address

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


def settings_of(url: str, layout: str, session_timeout: float, acl: Sequence[ACL] | None, ttl_nodes: bool) -> Settings:
    """The settings of a url. An option in the url counts before the argument. Raises ConfigError."""
    hosts, root, user, options = _parts_of(url)
    known_layout = _layout(options.pop("layout", layout))
    seconds = _timeout(options.pop("session_timeout", session_timeout))
    has_ttl_nodes = _flag(options.pop("ttl_nodes", ttl_nodes))
    if options:
        raise ConfigError(f"{brief(next(iter(options)))} is no option of a zookeeper url: {_HOW}&layout=kazoo")
    given = list(acl) if acl is not None else CREATOR_ALL_ACL if user else None
    address = Address(hosts, seconds, user, given)
    return Settings(f"zookeeper://{hosts}{root}", root, known_layout, seconds, has_ttl_nodes, address)


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
    odd = odd or "@" in query  # of a password with a ? in it, which would be shown
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
        if isinstance(value, bool):
            raise TypeError
        seconds = float(value)  # type: ignore[arg-type]  # a text of the url, or a number
    except (TypeError, ValueError):
        raise ConfigError(f"session_timeout is a number of seconds, not {brief(str(value))}") from None
    except OverflowError:
        seconds = float("inf")
    if not _SHORTEST <= seconds <= _LONGEST:
        raise ConfigError(
            f"session_timeout={seconds:g} s is out of range: give at least {_SHORTEST:g} s, and at most {_LONGEST} s"
        )
    return seconds
