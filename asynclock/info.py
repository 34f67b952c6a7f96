"""The results of `health`, `inspect` and `holders`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One node."""

    node: str
    """Its address, without a password."""
    ok: bool
    """Whether it would vote now: a hold was taken and given back there."""
    latency: float | None
    """Seconds that this took; None if the node would not vote."""
    error: str
    """Why it would not vote; for a node that votes, what does not work beside that (no notices); "" if nothing is
    wrong."""


@dataclass(frozen=True, slots=True)
class Health:
    """All nodes of a client."""

    ok: bool
    """Whether an acquire would be decided now: a majority would vote."""
    reason: str
    """Why not; "" if it would."""
    nodes: tuple[NodeHealth, ...]
    spare: int = 0
    """How many of the nodes that vote may fail, and a majority still votes; 0 on one node, and if `ok` is False."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One hold of a name. For a hold of another program, host, pid and since are unknown ("", 0 and 0.0). The texts are
    as their writers wrote them: print them with repr()."""

    name: str
    host: str
    pid: int
    since: float
    """Unix time of its first request, in seconds, by its holder's clock."""
    remaining: float | None
    """Seconds until it ends by itself; None: a key without expiry, which must be deleted by hand."""
    metadata: str
    """The note of its holder. "(resting)" while the name stays taken after a release (min_hold); "(done)" after a run
    of `once`."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One process that waits for a name, with one client or several."""

    host: str
    pid: int
    since: float
    """Unix time of its first request, in seconds, by its own clock; of several tasks, that of the first."""
    tasks: int
    """Its tasks that waited for the name when it sent its ticket last, at most a third of a lease ago."""


@dataclass(frozen=True, slots=True)
class LockInfo:
    """What the servers know of a name."""

    name: str
    kind: str
    """The kind of its hold; "" while the name is free."""
    fence: int
    """The greatest fencing token that was given out; 0: none, or forgotten."""
    holders: tuple[Holder, ...]
    """The holders on a majority of the nodes."""
    waiters: tuple[Waiter, ...]
    """In the order of the servers' queue, by the first ticket of each process."""
    free: int | None
    """Of a semaphore: the largest number of permits among its holders, less the holders. None while nobody holds it,
    and of other kinds."""
    nodes: Mapping[str, str]
    """What each node says, or why it does not answer, by its address."""
