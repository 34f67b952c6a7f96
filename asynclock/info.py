"""What `health`, `inspect` and `holders` answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One node."""

    node: str
    """Where it is, without a password."""
    ok: bool
    latency: float | None
    """Seconds for one round trip; None where there was none."""
    error: str
    """What is wrong; "" where nothing is."""


@dataclass(frozen=True, slots=True)
class Health:
    """A client's nodes."""

    ok: bool
    """Whether a majority answers."""
    nodes: tuple[NodeHealth, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """One hold of a name. Of another program's, host, pid and since are not known ("", 0 and 0.0)."""

    name: str
    host: str
    pid: int
    since: float
    """Unix time of its first request, by its holder's clock."""
    remaining: float | None
    """Seconds until it ends by itself; None: a key without expiry, which ends only by hand."""
    metadata: str
    """What its holder noted; for a name that rests after its release, "(resting)"; after a
    run of `once`, "(done)"."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One who waits."""

    host: str
    pid: int
    since: float
    """Unix time of its first request, by its own clock."""


@dataclass(frozen=True, slots=True)
class LockInfo:
    """What the servers know of a name."""

    name: str
    kind: str
    """"" where nobody holds it."""
    fence: int
    """The greatest token that was given; 0: none, or forgotten."""
    holders: tuple[Holder, ...]
    """Who holds it on a majority of the nodes."""
    waiters: tuple[Waiter, ...]
    """In order, as far as the servers know: tasks that stand in a line of their own process behind one are not seen."""
    nodes: Mapping[str, str]
    """What each node says, or why it says nothing."""
