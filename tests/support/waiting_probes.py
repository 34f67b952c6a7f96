"""More of `probes.py`: private parts of the package that only tests of waiting read or change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asynclock import Redlock
from asynclock.events import Event
from asynclock.quorum.limits import Limits
from tests.support.probes import session_of


def late_waiters_of(client: Redlock, name: str) -> int:
    """How many tasks wait in the local queue of the name for a late answer."""
    return len(session_of(client).machine.queues.by_name.get(name)._late or ())


def limits_of(client: Redlock) -> Limits:
    """What the nodes have measured."""
    found: Limits = session_of(client).quorum.limits
    return found


def node_timeout_of(client: Redlock, **options: Any) -> float:
    """That of a lock with these options."""
    session = session_of(client)
    settings = replace(session.settings.lock, **options) if options else session.settings.lock
    return float(session.within(settings))


def report(client: Redlock, event: Event) -> None:
    """As if a node had reported it."""
    session_of(client)._reported(event)
