"""What `health` answers."""

from __future__ import annotations

from dataclasses import dataclass


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
