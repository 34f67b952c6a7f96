"""Ticket: a place in the servers' queue: sent, renewed, withdrawn.

The rules:

1. At a single node the ticket and the attempt have one id, and a release of that id ends both. Over N nodes each
   attempt has a fresh id, and the ticket has one of its own for as long as its owner waits.
2. Each sending of a ticket has a number. At a single node a grant names the number of the ticket that became the hold,
   and validity counts from the time at which that number was sent.
3. A sending is not repeated (after NOSCRIPT) once a later one was sent, because the node may have granted the later one
   by then.
4. A release of its id withdraws a ticket. If a notice has reached the ticket meanwhile, that release serves the next
   waiter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from asynclock._options import QUORUM_TIMEOUT, RELEASE_TIMEOUT
from asynclock.acquire.backoff import FRESH
from asynclock.rules.model import ID_LENGTH, RELEASE, Op, Queueing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.acquire.acquisition import Acquisition
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Terms
    from asynclock.rules.model import Serve

_NUMBERS = 8
"""This many sendings are remembered. A grant of an older one is no longer fresh."""

POLLED = 1.0
"""Seconds for which a single node serves the ticket of a client that polls. Such a client asks four times in this time.
If it is dead, the name is taken until the ticket ends."""


@lru_cache(maxsize=256)  # many ops share it, so that a store encodes it once
def no_ticket(serve: Serve, fair: bool, span: int) -> Queueing:
    """For an attempt that leaves no ticket."""
    return Queueing(serve, fair, span)


@lru_cache(maxsize=256)
def first_ticket(serve: Serve, fair: bool, fresh: float) -> Queueing:
    """The ticket that the first attempt at a single node leaves if it is refused."""
    return Queueing(serve, fair, number=1, fresh=fresh)


def fresh_for(lease: float, left: float) -> float:
    """Seconds for which the servers serve a ticket that is sent now, `left` seconds before its owner gives up."""
    return min(lease * FRESH, max(left, 0.001))


class Ticket:
    """See the module. At a single node `id` is the attempt's."""

    __slots__ = ("_granted", "_last", "_sent_at", "id", "number", "order", "own")

    def __init__(self, id: str, *, own: bool, order: int = 0, number: int = 0) -> None:
        self.id = id
        self.own = own  # the id is the ticket's own, not an attempt's
        self.order = order  # its order key; 0: the node's clock decides
        self.number = number  # of the last sending
        self._last: Queueing | None = None  # the last sending; None for the first one at a single node
        self._sent_at: dict[int, float] = {}  # at a single node: number -> when
        self._granted: tuple[int, int] | None = None

    def send(self, serve: Serve, fair: bool, span: int, fresh: float, tasks: int) -> Queueing:
        """The next sending. `tasks` of this process wait for the name."""
        self.number += 1
        waiter = self.id if self.own else ""
        return self.replace(Queueing(serve, fair, span, waiter, self.number, fresh, self.order, tasks=tasks))

    def replace(self, sending: Queueing) -> Queueing:
        """This sending takes the place of the one before (rule 3)."""
        self.stop()
        self._last = sending
        return sending

    def put_back(self, undone: Queueing) -> Queueing:
        """The sending that puts the ticket back, where an attempt over N nodes is undone that took its place."""
        return self.replace(
            Queueing(
                span=undone.span,
                waiter=undone.waiter,
                number=undone.number,
                fresh=undone.fresh,
                order=undone.order,
                tasks=undone.tasks,
            )
        )

    def stop(self) -> None:
        """Its last sending is not sent again."""
        if self._last is not None:
            self._last.revoke()

    def was_sent(self, at: float) -> None:
        """The single node has the last sending, which was sent at that time."""
        self._sent_at[self.number] = at
        if len(self._sent_at) > _NUMBERS:
            self._sent_at = {number: when for number, when in self._sent_at.items() if number > self.number - _NUMBERS}

    def set_queue_order(self, orders: Sequence[int]) -> None:
        """The nodes keep the ticket under these order keys. They limit how far a client's clock may be from their own,
        so each may have changed it. From its next sending on, the ticket has one order key at all nodes."""
        if orders:
            self.order = orders[len(orders) // 2]

    def grant(self, number: int, top: int) -> None:
        """A notice says that the sending of that number became the hold, with the fences up to `top`."""
        self._granted = number, top

    @property
    def granted(self) -> bool:
        """Whether such a notice has come, and `take_grant` was not called since."""
        return self._granted is not None

    def take_grant(self) -> tuple[float, int] | None:
        """When the granted sending was sent, and `top`; None: there is no grant, or its sending is too old."""
        if self._granted is None:
            return None
        (number, top), self._granted = self._granted, None
        sent = self._sent_at.get(number)
        return None if sent is None else (sent, top)


def withdraw(
    session: Session, terms: Terms, id: str, *, since: float = 0.0, nodes: Sequence[int] | None = None
) -> None:
    """Remove the hold and the ticket of that id at these nodes (None: all). If a notice has reached the ticket, the
    next waiter is served."""
    if nodes is not None and not nodes:
        return
    settings = terms.settings
    memory = settings.lease + session.settings.fence_memory
    queueing = Queueing(session.quorum.serve, contended=True)
    op = Op(RELEASE, terms.kind, terms.name, id, settings.lease, 0, memory, queueing=queueing, since=since)
    within = min(max(session.within(settings), QUORUM_TIMEOUT), RELEASE_TIMEOUT)
    session.quorum.ask(op, within, everyone=True, only=nodes)


class Tickets:
    """The acquisitions of one session that left a ticket, by the random part of the ticket's id."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, Acquisition] = {}

    def add(self, id: str, acquisition: Acquisition) -> None:
        self._by_id[id[:ID_LENGTH]] = acquisition

    def remove(self, id: str) -> None:
        """Harmless for an id that is not there."""
        self._by_id.pop(id[:ID_LENGTH], None)

    def get(self, id: str) -> Acquisition | None:
        """The acquisition that a notice for the random part `id` is for."""
        return self._by_id.get(id)

    def all(self) -> list[Acquisition]:
        return list(self._by_id.values())
