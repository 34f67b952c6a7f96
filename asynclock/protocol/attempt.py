"""Attempt: the rounds that one acquisition sends to the nodes, its ticket, and the undo of both.

The rules:

1. Each grant becomes part of a hold or is undone.
2. At a single node all rounds and the ticket have one id, so that one release ends them all. Then the next round has a
   new id. Over N nodes each round has a fresh id, and is undone before the next begins. The ticket has an id of its own
   (`Ticket`). A round may take the ticket's place at a node; its undo puts the ticket back.
3. A hold counts once a majority are witnesses of its fencing token, and while it has validity left.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from asynclock._options import QUORUM_TIMEOUT, RELEASE_TIMEOUT
from asynclock.protocol.local_queue import SPAN
from asynclock.protocol.planner import FRESH
from asynclock.quorum.ballot import REFUSED, UNREACHABLE, Ballot
from asynclock.rules.model import ACQUIRE, EXTEND, ID_LENGTH, RELEASE, WAIT, Op, Queueing, polls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.protocol.core import Core
    from asynclock.protocol.hold import Hold, Holds
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Outcome
    from asynclock.rules.model import Kind, Serve
    from asynclock.stores.port import Notice


# -- the ticket --------------------------------------------------------------------------------------------------------


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
    """A place in the servers' queue: sent, renewed, withdrawn. At a single node `id` is the attempt's.

    The rules:

    1. At a single node the ticket and the attempt have one id, and a release of that id ends both. Over N nodes each
       attempt has a fresh id, and the ticket has one of its own for as long as its owner waits.
    2. Each sending of a ticket has a number. At a single node a grant names the number of the ticket that became the
       hold, and validity counts from the time at which that number was sent.
    3. A sending is not repeated (after NOSCRIPT) once a later one was sent, because the node may have granted the later
       one by then.
    4. A release of its id withdraws a ticket. If a notice has reached the ticket meanwhile, that release serves the
       next waiter.
    """

    __slots__ = ("_granted", "_last", "_sent_at", "has_own_id", "id", "number", "order")

    def __init__(self, id: str, *, has_own_id: bool, order: int = 0, number: int = 0) -> None:
        self.id = id
        self.has_own_id = has_own_id  # the id is the ticket's own, not an attempt's
        self.order = order  # its order key; 0: the node's clock decides
        self.number = number  # of the last sending
        self._last: Queueing | None = None  # the last sending; None for the first one at a single node
        self._sent_at: dict[int, float] = {}  # at a single node: number -> when
        self._granted: tuple[int, int] | None = None

    def send(self, serve: Serve, fair: bool, span: int, fresh: float, tasks: int) -> Queueing:
        """The next sending. `tasks` of this process wait for the name."""
        self.number += 1
        waiter = self.id if self.has_own_id else ""
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


class Wake(Enum):
    """Why an acquisition that waits asks again."""

    MISSED = "notices may be lost"  # a node is connected again: all tickets are sent again
    BACK = "a majority is connected"  # of interest in an outage
    GONE = "no majority is left"  # no notice will come, and the patience begins


class TicketOwner(Protocol):
    """The acquisition that left a ticket."""

    def notified(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice for it."""

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone."""


class Tickets:
    """The acquisitions of one session that left a ticket, by the random part of the ticket's id."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, TicketOwner] = {}

    def add(self, id: str, acquisition: TicketOwner) -> None:
        self._by_id[id[:ID_LENGTH]] = acquisition

    def remove(self, id: str) -> None:
        """Harmless for an id that is not there."""
        self._by_id.pop(id[:ID_LENGTH], None)

    def get(self, id: str) -> TicketOwner | None:
        """The acquisition that a notice for the random part `id` is for."""
        return self._by_id.get(id)

    def all(self) -> list[TicketOwner]:
        return list(self._by_id.values())


def withdraw(core: Core, terms: Terms, id: str, *, since: float = 0.0, nodes: Sequence[int] | None = None) -> None:
    """Remove the hold and the ticket of that id at these nodes (None: all). If a notice has reached the ticket, the
    next waiter is served."""
    if nodes is not None and not nodes:
        return
    settings = terms.settings
    memory = settings.lease + core.settings.fence_memory
    queueing = Queueing(core.quorum.serve, contended=True)
    op = Op(RELEASE, terms.kind, terms.name, id, settings.lease, 0, memory, queueing=queueing, since=since)
    within = min(max(core.within(settings), QUORUM_TIMEOUT), RELEASE_TIMEOUT)
    core.quorum.ask(op, within, everyone=True, only=nodes)


# -- the rounds --------------------------------------------------------------------------------------------------------


class Attempt:
    """See the module. `owner` receives the notices for its ticket."""

    # Most attempts win at once: what they do not need is not set for each of them.
    ballot: Ballot | None = None  # the last round; None once that was undone or became a hold
    ticket: Ticket | None = None
    _order = 0  # the order key that the next ticket begins with
    _since = 0.0  # when the first ticket over N nodes was made
    _span = 1  # fences for the local queue

    def __init__(self, holds: Holds, tickets: Tickets, terms: Terms, owner: TicketOwner | None) -> None:
        self._holds = holds
        self._core = core = holds.core
        self._tickets = tickets
        self._terms = terms
        self._owner = owner
        self._alone = len(core.quorum.nodes) == 1
        self.op: Op | None = None  # of the last round; None: the next one has a fresh id

    # -- sending -------------------------------------------------------------------------------------------------

    def ask(self, op: Op) -> Ballot:
        """Send an op that the caller made."""
        self.ballot = self._core.quorum.ask(op, self._core.within(self._terms.settings))
        return self.ballot

    def send(self, give_up: float, refused: bool, probe: bool, behind: int, slot: int | None) -> Ballot:
        """Ask for the hold, or with `probe` renew the ticket and see. `refused`: a majority has refused before;
        `behind`: so many tasks of this process wait behind this one; `slot`: the one to ask for, of a kind that has
        slots."""
        core, terms, quorum, alone = self._core, self._terms, self._core.quorum, self._alone
        settings, kind = terms.settings, terms.kind
        if alone and self.ticket is not None and not quorum.listens and not quorum.nodes[0].error:
            self._poll_from_now_on()
        op = self.op
        seed = int(core.clock.wall() * 1_000_000)
        if op is None or not alone:
            # Fences for the local queue. Their number is fixed with the id: any ticket of this id may be granted.
            self._span = SPAN if behind and not kind.fair and not settings.min_hold else 1
            if not alone and kind.slots:
                kind = self._kind_of_slot(slot)
            op_id, op = core.new_id(seed, settings.metadata, kind.mode), None
        else:
            op_id = op.id
        plain = not settings.fencing and not refused
        if terms.timeout != 0 and not plain and (alone or refused) and ((listens := quorum.listens) or alone):
            queueing = self._next_ticket(op_id, seed, give_up, behind, listens)
        else:
            queueing = self._no_next_ticket(kind.fair)
        if op is None:
            memory = settings.lease + core.settings.fence_memory
            op = Op(ACQUIRE, kind, terms.name, op_id, settings.lease, seed, memory, plain=plain, queueing=queueing)
            self.op = op
        else:
            op.renew(seed, queueing, plain=plain)
        if probe and not alone and queueing.number and not kind.parts:  # a waiter for several names probes by trying
            op.ask_with_ticket(queueing.waiter)
        renewal = op.verb is WAIT
        certain = self.ticket is not None and self.ticket.number > renewal
        self.ballot = quorum.ask(
            op,
            core.within(terms.settings),
            everyone=renewal and certain,  # a first probe does not wait for unresponsive nodes
            certain=certain,
            at_once=refused and not probe,  # the name may be free for a moment only
            gives_up=give_up,
        )
        return self.ballot

    def _poll_from_now_on(self) -> None:
        """Its client gets no notices any more, but the id of its ticket says that it does. So the node would drop that
        ticket, and make the next waiter the holder. The next ticket has another id, in the same place of the queue."""
        if self.op is not None and not polls(self.op.id):
            self.leave()

    def _kind_of_slot(self, slot: int | None) -> Kind:
        """The kind to ask for over N nodes, if it has slots: one slot (None: any)."""
        kind = self._terms.kind
        return kind.at(int(self._core.random() * kind.slots) if slot is None else slot)

    def _next_ticket(self, id: str, seed: int, give_up: float, behind: int, listens: bool) -> Queueing:
        """The ticket to send with the next round, which has that id. Without notices (not `listens`) a single node
        makes its owner the holder all the same, and the next poll finds that."""
        core, terms, alone = self._core, self._terms, self._alone
        serve, fair, lease = core.quorum.serve, terms.kind.fair, terms.settings.lease
        if not listens:  # it enters in its turn only: its release may not be able to notify those before it
            fair, lease = True, min(lease, POLLED / FRESH)
        if self.ticket is None and alone and not self._order and not behind:
            return first_ticket(serve, fair, min(lease * FRESH, terms.timeout or math.inf))
        if self.ticket is None and alone:
            self.ticket = Ticket(id, has_own_id=False, order=self._order)
        elif self.ticket is None:
            self._order = self._order or seed
            self._since = self._since or core.clock.now()
            own_id = core.new_id(self._order, terms.settings.metadata, terms.kind.mode)
            self.ticket = Ticket(own_id, has_own_id=True, order=self._order)
            self._register(own_id)
        fresh = fresh_for(lease, give_up - core.clock.now())
        return self.ticket.send(serve, fair, self._span, fresh, tasks=1 + behind)

    def _no_next_ticket(self, fair: bool) -> Queueing:
        """For a round that sends no ticket. An earlier ticket is not renewed without notices, but the nodes may have
        it."""
        serve = self._core.quorum.serve
        if self.ticket is not None and self.ticket.has_own_id:
            return Queueing(serve, fair, self._span, self.ticket.id)
        return no_ticket(serve, fair, self._span)

    def on_reply(self, ballot: Ballot) -> None:
        """A round at a single node has its reply. If it was refused, it left a ticket. The ticket is registered here,
        in the turn of the reply: it may be granted at once, and the notice may arrive in the same read."""
        op = ballot.op
        if self._alone and op.queueing.number and ballot.outcome is REFUSED and op is self.op and not op.revoked:
            if self.ticket is None:
                self.ticket = Ticket(op.id, has_own_id=False, number=1)
            self._register(op.id)
            self.ticket.was_sent(ballot.sent)

    def _register(self, id: str) -> None:
        if self._owner is not None:
            self._tickets.add(id, self._owner)

    def set_queue_order(self, ballot: Ballot) -> None:
        """Take over the order key under which the nodes keep the ticket: at a single node from each reply, over N
        nodes from the first one."""
        ticket = self.ticket
        if ticket is not None and (self._alone or ticket.number == 1):
            ticket.set_queue_order(ballot.orders())
            self._order = ticket.order

    # -- the grant ----------------------------------------------------------------------------------------------

    def hold(self, ballot: Ballot, top: int, contended: bool = False) -> Hold | None:
        """The hold of a won ballot; `top` is its token, and a majority are witnesses of it. None: no validity is left,
        and the hold was released."""
        settings = self._terms.settings
        hold = self._holds.make(settings, ballot, top, contended)
        self.ballot = None
        if hold.round_trip_at < hold.valid_until:
            return hold
        hold.release()
        return None

    def ask_to_raise(self, ballot: Ballot) -> Ballot:
        """A ballot was won at nodes with different counters: raise F to the token on a majority of those that granted
        it. Until then the token is not certain."""
        op, (top, _) = ballot.op, ballot.token()
        raised = Op(EXTEND, op.kind, op.name, op.id, op.lease, top, op.memory)
        return self._core.quorum.ask(raised, ballot.deadline - ballot.sent)

    def confirmed(self, won: Ballot, raised: Ballot, contended: bool = False) -> tuple[Hold | None, Ballot, Outcome]:
        """The hold of a ballot that was won, after that second round. If there is none: the round that failed, and
        how. The token is the one that was raised: votes that came late may have greater counters."""
        top = raised.op.fence
        if raised.witnesses(top):
            return self.hold(won, top, contended), won, REFUSED
        unreachable = raised.outcome is UNREACHABLE and not raised.denied
        return (None, raised, UNREACHABLE) if unreachable else (None, won, REFUSED)

    def hold_granted(self) -> Hold | None:
        """The hold that a notice has granted; None: there is no grant, or its ticket was sent too long ago."""
        grant = self.ticket.take_grant() if self.ticket is not None else None
        if grant is None or self.op is None:
            return None
        sent, top = grant
        ballot = Ballot(self.op, 1, sent, sent)
        ballot.answer(0, (top, False))
        hold = self.hold(ballot, top, contended=True)
        if hold is None:
            self.use_new_id()
        return hold

    # -- undo ----------------------------------------------------------------------------------------------------

    def undo(self, ballot: Ballot, keep_ticket: bool) -> None:
        """Undo a round in the background, at each node where it took effect or still may. A node that closes waits for
        the reply first."""
        self.ballot = None
        sent = ballot.op.queueing
        back = self.ticket.put_back(sent) if keep_ticket and self.ticket is not None and sent.number else None
        within = min(max(ballot.deadline - ballot.sent, QUORUM_TIMEOUT), RELEASE_TIMEOUT)
        self._core.quorum.undo(ballot, within, back)

    def leave(self) -> None:
        """Undo the round under way and withdraw the ticket. The next round has another id. A second call does
        nothing."""
        op, ticket = self.op, self.ticket
        if op is not None and self._alone and (ticket is not None or op.queueing.number):  # one id for both
            op.revoke()
            if ticket is not None or self.ballot is None or not self.ballot.left_nothing:
                withdraw(self._core, self._terms, op.id)
        elif self.ballot is not None and self.ballot.op.verb is ACQUIRE:
            self.undo(self.ballot, keep_ticket=False)
        if ticket is not None and ticket.has_own_id:
            self._end_ticket(ticket)
            withdraw(self._core, self._terms, ticket.id, since=self._since)
            self.ticket = None
        self.use_new_id()

    def withdraw_ticket(self, ticket: Ticket, won: Ballot) -> None:
        """Remove the ticket from all nodes after a win. Late votes are handled in the background. Most of them are
        grants, and a node that grants keeps no ticket."""
        self._end_ticket(ticket)
        if ticket.has_own_id and won.yes < won.nodes:
            withdraw_at = partial(withdraw, self._core, self._terms, ticket.id, since=self._since)
            withdraw_at(nodes=won.refused_nodes())
            won.on_late_vote(
                lambda ballot, index: withdraw_at(nodes=[index]) if index in ballot.refused_nodes() else None
            )

    def continue_batch(self) -> None:
        """Its ticket was the last that one step of the server could serve. The release of an unused id makes the server
        serve the next ones."""
        withdraw(self._core, self._terms, self._core.new_id(0, ""))

    def _end_ticket(self, ticket: Ticket) -> None:
        """The ticket is not sent again, and notices for it are ignored."""
        ticket.stop()
        self._tickets.remove(ticket.id)

    def use_new_id(self) -> None:
        """The next round has another id."""
        if self.op is not None:
            self._tickets.remove(self.op.id)
        self.op = self.ballot = None
        if self.ticket is not None and not self.ticket.has_own_id:
            self.ticket = None
