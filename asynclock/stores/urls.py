"""The url table: which store a url or a client of another library stands for. A store is imported only where it is
used, so that its packages are needed only there."""

from __future__ import annotations

import re
import string
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import ConfigError, brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.port import Store

_REDIS = "asynclock.stores.redis.store:RedisStore"
_CLUSTER = "asynclock.stores.redis.cluster.store:ClusterStore"
_SQL = "asynclock.stores.sql.store:SQLStore"

_EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
"""The databases that a SQLStore knows, and the extra of each. Its url may name a driver: postgresql+psycopg://."""


class Entry(NamedTuple):
    """How a store is made."""

    maker: str  # "module:callable"
    needs: str = ""  # what to have if its import fails
    remedy: str = ""  # what to do then


STORES = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), Entry(_REDIS)),
    **dict.fromkeys(("redis+sentinel", "rediss+sentinel"), Entry(_REDIS)),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "valkey+cluster", "valkeys+cluster"), Entry(_CLUSTER)),
    **{scheme: Entry(_SQL, "SQLAlchemy", f"pip install 'asynclock[{extra}]'") for scheme, extra in _EXTRAS.items()},
    "embedded": Entry("asynclock.stores.embedded.store:EmbeddedStore", "Linux or macOS", "name a server, redis://host"),
    "memory": Entry("asynclock.stores.memory:store_of_url"),
    "zookeeper": Entry(
        "asynclock.stores.zookeeper.store:ZooKeeperStore", "kazoo", "pip install 'asynclock[zookeeper]'"
    ),
}
"""By the scheme of a url, which the callable takes."""

CLIENTS = {
    "redis.asyncio.client.Redis": Entry(_REDIS),
    "redis.asyncio.cluster.RedisCluster": Entry(_CLUSTER),
}
"""By the class of a client, or of a base of it. The callable takes the client."""

_WITHOUT_SLASHES = ("embedded", "memory")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_BETWEEN = re.compile(r",\s*(?=[a-z][a-z0-9+.-]*://|(?:embedded|memory):)", re.IGNORECASE)
_WHITE = string.whitespace
_RAW = (*_EXTRAS, "zookeeper")
"""The schemes in whose passwords `/`, `#`, and in SQL `?`, may stand as they are."""

_USER = re.compile(r"[^:@/?#]*:[^@]*@")
_USER_OF_ZOOKEEPER = re.compile(r"[^:@/?#]*:[^@?]*@")
_INVISIBLE = re.compile(r"[\t\n\r\v\f]")
_MAY_BE_SECRET = re.compile(r"[@?#=]")


def urls_of(text: str) -> tuple[str, ...]:
    """The urls of a comma-separated list. A comma separates two urls only where a scheme follows it: passwords and
    paths have commas, and a url may name several hosts."""
    return tuple(url for each in _BETWEEN.split(text) if (url := each.strip(f"{_WHITE},")))


def store_of_url(url: str) -> Store:
    """The store for a url. White space around it is ignored, as a line feed at the end of a file. Raises
    ConfigError."""
    url = trimmed(url)
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower()
    if len(urls_of(url)) > 1:
        raise ConfigError(
            "one url names several nodes: give each as an argument of its own; "
            "a comma that is part of a secret is written %2C"
        )
    if (url.startswith("://", len(scheme)) or (colon and scheme in _WITHOUT_SLASHES)) and (entry := _entry(scheme)):
        return _made(entry, url, f"{scheme}:")
    if "://" in url and (driver := re.fullmatch(r"postgres(\+[a-z0-9_]+)?", scheme)):  # as Heroku writes it
        raise ConfigError(f"no store for the scheme {brief(scheme)}: write postgresql{driver[1] or ''}://")
    if "://" in url and _SCHEME.fullmatch(scheme):
        raise ConfigError(f"no store for the scheme {brief(scheme)}: there are {', '.join(STORES)}")
    # If it may contain a user, a password or a query, the message shows nothing of it.
    shown = "what was given" if _MAY_BE_SECRET.search(url) else brief(url)
    raise ConfigError(
        f"{shown} is not a url: a client takes servers, such as Redlock('redis://host:6379'); "
        "a lock's name goes into the client's call, redlock('order:42')"
    )


def trimmed(url: str) -> str:
    """A url without the white space around it. Each store that takes a url calls this. Raises ConfigError for white
    space inside: Python drops line feeds and tabs within a url in silence, and two lines would be one host. Paths and
    secrets may have spaces, and hosts have none. Nor does it pass characters that no system takes."""
    url = url.strip()
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme.partition("+")[0] in _RAW:
        user = (_USER_OF_ZOOKEEPER if scheme == "zookeeper" else _USER).match(rest)
        rest = rest[user.end() :] if user else rest
    hosts = re.split("[/?#]", rest)[0].rpartition("@")[2]
    if _INVISIBLE.search(url) or (scheme != "unix" and any(" " in each.strip() for each in hosts.split(","))):
        raise ConfigError("a url has white space inside: separate urls with commas, and write %20 for a space")
    if "%00" in url or any(each == "\0" or "\ud800" <= each <= "\udfff" for each in url):
        raise ConfigError("a url has a NUL or a lone surrogate, which no server, path or secret can have")
    return url


def _entry(scheme: str) -> Entry | None:
    """With a driver, `scheme` is that of a database and its driver."""
    return STORES.get(scheme) or (STORES.get(found) if (found := scheme.partition("+")[0]) in _EXTRAS else None)


def store_of_client(client: object) -> Store | None:
    """The store for a client of another library; None: it is not one of `CLIENTS`. Raises ConfigError."""
    if any(base.__module__.startswith("fakeredis.") for base in type(client).__mro__):
        raise ConfigError(
            "fakeredis cannot keep locks: it lacks commands that they need (INFO, WAIT). In unit tests take "
            "asynclock.testing.FakeStore, whose time a test moves, or the real server of asynclock.testing.plugin "
            "(docs/testing.md)"
        )
    for base in type(client).__mro__:
        if entry := CLIENTS.get(f"{base.__module__}.{base.__qualname__}"):
            return _made(entry, client, base.__qualname__)
    return None


def _made(entry: Entry, server: Any, shown: str) -> Store:
    module, _, name = entry.maker.partition(":")
    try:
        make: Callable[[Any], Store] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not entry.needs:
            raise
        why = f"{brief(shown)} needs {entry.needs} ({error}): {entry.remedy}"
    else:
        return make(server)
    raise ConfigError(why)
