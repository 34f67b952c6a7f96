"""The events of a client, as `redlock.subscribe(listener)` tells them. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """The base of all events."""


@dataclass(frozen=True, slots=True)
class LockEvent(Event):
    """An event of one lock."""

    name: str
    """The name of the lock, without the client's prefix; of a multi lock all its names."""
    kind: str
    """mutex, read, write, semaphore or multi. A fair and a reentrant lock are mutexes."""
    label: str
    """The option `label` of the lock; "" if it has none."""


@dataclass(frozen=True, slots=True)
class Acquired(LockEvent):
    """An acquire has returned a lease. Each entry of a reentrant lock is told, and each adoption."""

    waited: float
    """Seconds from the call to the lease."""
    had_to_wait: bool = False
    """Whether the first request was not enough: it waited for another owner, for its turn, or for the nodes."""


@dataclass(frozen=True, slots=True)
class TimedOut(LockEvent):
    """An acquire has ended without a lease: another owner held the lock for the whole timeout."""

    waited: float
    """Seconds from the call to its end."""
    had_to_wait: bool = False
    """Whether the first request was not enough: it waited for another owner, for its turn, or for the nodes."""


@dataclass(frozen=True, slots=True)
class Unavailable(LockEvent):
    """An acquire has raised QuorumUnavailable."""

    waited: float
    """Seconds from the call to its end."""
    had_to_wait: bool = False
    """Whether the first request was not enough: it waited for another owner, for its turn, or for the nodes."""


@dataclass(frozen=True, slots=True)
class Released(LockEvent):
    """A lease was released. The servers may not have answered the release yet."""

    held_for: float
    """Seconds from the grant to the release."""


@dataclass(frozen=True, slots=True)
class Detached(LockEvent):
    """A lease was detached: the name stays taken until another process adopts the hold, or until it expires."""

    held_for: float
    """Seconds from the grant to the detach."""


@dataclass(frozen=True, slots=True)
class Lost(LockEvent):
    """A lease was lost: it ended before its release."""

    reason: str
    """expired, taken, broken, max_hold or closed: LockLost.reason."""
    held_for: float
    """Seconds from the grant to the loss."""


@dataclass(frozen=True, slots=True)
class Renewed(LockEvent):
    """A renewal was sent to the servers, and its outcome is known."""

    outcome: str
    """"ok"; or "failed": no majority of the nodes renewed it. It is sent again until the lease ends."""


@dataclass(frozen=True, slots=True)
class ReleaseFailed(LockEvent):
    """No majority of the nodes has answered a release. The hold ends by itself, at the end of its lease."""

    error: str
    """What each node said."""


@dataclass(frozen=True, slots=True)
class Broken(Event):
    """This client broke a lock, by `break_lock`. The holder's client tells Lost."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeDown(Event):
    """A node cannot be asked any more, or could not be asked at the first attempt. The client goes on connecting."""

    node: str
    """Its address, without a password."""
    error: str


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    """A node is connected: for the first time, or again."""

    node: str


@dataclass(frozen=True, slots=True)
class Quarantined(Event):
    """The server of a node has restarted, or has been replaced, and casts no vote for a time (docs/safety.md)."""

    node: str
    seconds: float
    """How long it casts no vote."""


@dataclass(frozen=True, slots=True)
class QuarantineEnded(Event):
    """A node votes again after its quarantine."""

    node: str


@dataclass(frozen=True, slots=True)
class LoopLagged(Event):
    """The event loop did not run for longer than a third of a lease. No renewal is sent in such a time, unless the lock
    has renew="thread"."""

    seconds: float
