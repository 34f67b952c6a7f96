"""The options that several commands share, and the client that they make."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from asynclock._errors import ConfigError
from asynclock._options import ENVIRONMENT, ClientSettings, LockSettings, written_options
from asynclock.client import Redlock
from asynclock.stores import URLS, store_for
from asynclock.stores.port import Making
from asynclock.stores.urls import urls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._options import ClientOptions

PREFIX = "ASYNCLOCK_PREFIX"
"""The environment variable with the prefix. An empty one is an empty prefix."""

MAX_LEASE, NODE_TIMEOUT = ENVIRONMENT["max_lease"], ENVIRONMENT["node_timeout"]
TRUST_RESTARTS = ENVIRONMENT["trust_restarts"]
_OF_THE_DEPLOYMENT = ("max_lease", "node_timeout", "connect_timeout", "trust_restarts")
"""These options count as in the programs of this environment. With another max_lease or trust_restarts a command would
see a quarantine where a program sees none, or the reverse."""

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)")


def duration(text: str | float) -> float:
    """Seconds of a duration: 90, 90s, 5m, 1h, 1d, 250ms. Raises BadParameter. Pure."""
    if isinstance(text, (int, float)):  # a default
        return float(text)
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a duration: write 90, 90s, 5m, 1h or 1d")
    return float(found[1]) * _UNITS[found[2]]


Urls: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        show_default=False,
        help=f"A server. Repeat it, or separate urls by commas, for a quorum. Default: ${URLS}.",
    ),
]
Prefix: TypeAlias = Annotated[
    str | None,
    typer.Option(show_default=False, help=f"The prefix of the keys, as in the program. Default: ${PREFIX}, if set."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seconds: TypeAlias = Annotated[float, typer.Option(parser=duration, metavar="DURATION")]
MaxLease: TypeAlias = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        envvar=MAX_LEASE,
        show_default=False,
        help="The max_lease of the deployment, as in the program.",
    ),
]


def named_urls(given: Sequence[str] | None) -> tuple[str, ...]:
    """The urls of the command line, or else of the environment. Raises ConfigError."""
    urls = tuple(url for each in given or () for url in urls_of(each)) or urls_of(os.environ.get(URLS, ""))
    if not urls:
        raise ConfigError(f"no servers are named: give --url redis://host:6379, or set {URLS}")
    return urls


def prefix_of(given: str | None) -> str | None:
    """The prefix of the command line, or else of the environment; None: the default of the library."""
    return os.environ.get(PREFIX) if given is None else given


def client(
    urls: Sequence[str], prefix: str | None, options: ClientOptions | None = None, *, looks: bool = False
) -> Redlock:
    """The client of a command. `looks`: it makes no table, and no file. Raises ConfigError."""
    own = {**written_options(os.environ, _OF_THE_DEPLOYMENT), **(options or {})}
    if (known := prefix_of(prefix)) is not None:
        own["prefix"] = known
    if "lease" not in own:  # it holds no lock: any lease that fits the other options will do
        least = 3 * (own.get("node_timeout") or 0.0)
        own["lease"] = min(max(LockSettings().lease, least), own.get("max_lease", ClientSettings().max_lease))
    stores = [store_for(url) for url in urls]  # the client looks at them together, and may warn
    for store in stores:
        if looks and isinstance(store, Making):
            store.makes = False
    return Redlock(*stores, **own)


def is_terminal() -> bool:
    """Whether the command can ask a question and read the answer."""
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stderr))
