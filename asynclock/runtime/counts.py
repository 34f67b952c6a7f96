"""Counts of the state of one session, for metrics. Another thread may read them: it copies each container in one step,
and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.holds import HoldsOfName
from asynclock.stores.port import Measured

if TYPE_CHECKING:
    from asynclock.runtime.session import Session


class NodeCounts(NamedTuple):
    """One node."""

    node: str  # its address, without a password
    up: bool  # whether it can be asked now, and was not reported as down; a node in quarantine is up, but does not vote
    rtt: float | None  # seconds of a round trip, measured a short while ago; None: not measured yet


class Counts(NamedTuple):
    """One session."""

    held: int  # the holds; one of several names counts once
    waiting: int  # the acquires that did not win at their first try, and go on
    nodes: tuple[NodeCounts, ...]


def counts(session: Session) -> Counts:
    """The counts of a session now."""
    holds: set[int] = set()
    for found in session.machine.holds.all():
        if isinstance(found, HoldsOfName):
            holds.update(map(id, tuple(found.values())))
        else:
            holds.add(id(found))
    waiting = sum(isinstance(each, Acquisition) and each.terms.had_to_wait for each in list(session.machine.under_way))
    nodes = tuple(
        NodeCounts(
            node.label,
            node.error is None and node.label not in session.down,
            node.rtt() if isinstance(node, Measured) else None,
        )
        for node in session.quorum.nodes
    )
    return Counts(len(holds), waiting, nodes)
