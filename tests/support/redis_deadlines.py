"""When the client looks for overdue commands at a Redis server."""

from __future__ import annotations

from asynclock import Redlock
from tests.support.probes import nodes_of


def next_look(client: Redlock) -> float:
    """On the clock of its first node; math.inf: nothing has a deadline."""
    when: float = nodes_of(client)[0]._deadlines.next
    return when
