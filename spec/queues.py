"""Checks of the queues in a world of `machine.py`: a name that is free while somebody waits, and waiters that overtake.

    a free name      nobody has any of the names of a caller that waits, nothing is under way or has gone wrong
    a free place     the same for a single node, where others may have the name: the first of its queue could enter
    overtaken        at a single node a fair lock went to a later waiter
    a place changed  a ticket of a fair lock came back with another order key

The order is judged for names that all callers use as a fair lock, until a connection breaks or a server forgets. The
exceptions are those of `asynclock/rules`: a ticket is served while it is fresh and its client listens, and a waiter for
several names has its ticket only at the name that refused it last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.model import ACQUIRE, RELEASE, TIMED, parts_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asynclock.rules.model import Kind, Op, Part, Rule, State


def parts_of(kind: Kind) -> tuple[Part, ...]:
    """The names of a caller, each with its kind. A caller of one lock uses x."""
    return parts_for("x", kind)


def rules_of(kinds: Iterable[Kind]) -> dict[str, list[Rule]]:
    """For each name: the kinds as which the callers use it."""
    rules: dict[str, list[Rule]] = {}
    for kind in kinds:
        for part in parts_of(kind):
            rules.setdefault(part.name, []).append(part.kind)
    return rules


def could_enter(rule: Rule, state: State, now: float, listens: Callable[[str], bool]) -> bool:
    """Whether the first of the queue that listens could enter. Its client has no reason to ask before it renews its
    ticket. A ticket before it that could not enter holds it back, as a writer does a reader: the node learns that a
    client does not listen only when it serves its ticket."""
    for ticket in state.queue:
        if ticket.fresh > now:
            if not rule.admits(state.holds, ticket.id):
                return False
            if listens(ticket.id):
                return True
    return False


class Place(NamedTuple):
    """Of a waiter in a queue."""

    order: int  # its first order key
    fresh: float
    single: bool  # it waits for this name only


class Queue:
    """The waiters of one fair lock at its only node, in the order of their first tickets there. Unlike the queue of the
    node it does not forget a waiter whose ticket was dropped."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def decided(self, op: Op, before: State, after: State, now: float, listens: Callable[[str], bool]) -> str | None:
        """The node has carried out an op. Returns the flaw."""
        held = {each.id for each in before.at(now).holds}
        flaw = None
        for entry in after.holds:
            if entry.id not in held and entry.id not in TIMED:
                flaw = flaw or self._entered(entry.id, op, now, listens)
        if op.verb is RELEASE:
            self._places.pop(op.id, None)
        return self._renew(after) or flaw

    def _entered(self, id: str, op: Op, now: float, listens: Callable[[str], bool]) -> str | None:
        mine = self._places.pop(id, None)
        order = mine.order if mine is not None else _order_of(op, now) if op.verb is ACQUIRE else 0
        earlier = [
            other
            for other, place in self._places.items()
            if (place.order, other) < (order, id) and place.fresh > now and listens(other)
            if place.single or other != op.id  # it may leave this queue by its own try, for that of another name
        ]
        return "overtaken" if earlier else None

    def _renew(self, after: State) -> str | None:
        flaw, queued = None, {each.id: each for each in after.queue}
        for own, ticket in queued.items():
            known = self._places.get(own)
            if known is not None and known.order != ticket.order:
                flaw = "a place changed"
            order = ticket.order if known is None else known.order
            self._places[own] = Place(order, ticket.fresh, ticket.span > 0)
        for own in [own for own, place in self._places.items() if own not in queued and not place.single]:
            del self._places[own]
        return flaw


def _order_of(op: Op, now: float) -> int:
    return op.queueing.order or int(now * 1_000_000)


def queues_of(rules: Mapping[str, list[Rule]]) -> dict[str, Queue]:
    """Of the names that all callers use as a fair lock."""
    return {name: Queue() for name, kinds in rules.items() if all(kind.fair for kind in kinds)}
