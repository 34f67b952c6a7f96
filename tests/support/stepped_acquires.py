"""Acquires with options, by the clients of stepped_quorum.py, and what they send."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from asynclock._options import LockSettings
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.handover import Adoption
from asynclock.protocol.hold import Tenure
from asynclock.protocol.terms import Terms
from asynclock.rules.model import Entry, Op, State, Ticket, Verb
from asynclock.rules.mutex import MUTEX
from spec.machine import Task
from tests.support.stepped_quorum import NAME, SteppedClient, settle

LEASE = 30.0


def terms_of(
    kind: Any = MUTEX,
    timeout: float | None = None,
    *,
    task: Task | None = None,
    owner: Hashable = None,
    **options: Any,
) -> Terms:
    """The request of one caller."""
    return Terms(NAME, kind, LockSettings(**{"lease": LEASE, **options}), task or Task(), timeout, owner)


def acquiring(client: SteppedClient, timeout: float | None = None, *, kind: Any = MUTEX, **options: Any) -> Acquisition:
    """A task of that client asks for the name. `options`: as those of `terms_of`."""
    give_up = client.clock.now() + timeout if timeout else math.inf
    acquisition = Acquisition(client.machine, terms_of(kind, timeout, **options), give_up)
    acquisition.start()
    return acquisition


def holds(client: SteppedClient, **options: Any) -> Tenure:
    """A task of the client has the name, which is free."""
    acquisition = acquiring(client, **options)
    settle(client)
    return tenure_of(acquisition)


def tenure_of(claim: Acquisition | Adoption) -> Tenure:
    """What it has got."""
    tenure = claim.take()
    assert isinstance(tenure, Tenure)
    return tenure


def waits(client: SteppedClient, **options: Any) -> Acquisition:
    """A task of the client waits for a name that another client holds."""
    acquisition = acquiring(client, **options)
    settle(client)
    assert not acquisition.future.done()
    return acquisition


def take_away(servers: list[dict[str, State]], until: float | None, holder: str = "another's") -> None:
    """From now on that id has the name at these servers, until that time of their clock. It notifies nobody."""
    for each in servers:
        each[NAME] = State(holds=(Entry(holder, until),))


def under_way(client: SteppedClient, *verbs: Verb) -> list[Op]:
    """The ops of these verbs, or all, that no server has carried out yet."""
    return [op for node in client.nodes for op, _ in node.sent if op.verb in verbs or not verbs]


def tickets(server: dict[str, State]) -> tuple[Ticket, ...]:
    """Those that the server keeps for the name, the first in the queue first."""
    return server.get(NAME, State()).queue
