"""More of `probes.py`: private parts of the package that only tests of waiting read or change."""

from __future__ import annotations

from asynclock import Redlock
from asynclock.events import Event
from tests.support.probes import session_of


def late_waiters_of(client: Redlock, name: str) -> int:
    """How many tasks wait in the local queue of the name for a late answer."""
    return len(session_of(client).local_queues.get(name)._late or ())


def report(client: Redlock, event: Event) -> None:
    """As if a node had reported it."""
    session_of(client)._reported(event)
