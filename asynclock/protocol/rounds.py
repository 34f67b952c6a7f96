"""The rounds that one acquisition sends to the nodes, its ticket, and the undo of both.

The rules:

1. Each grant becomes part of a hold or is undone.
2. At a single node all rounds and the ticket have one id, so that one release ends them all (`RoundsAtOne`). Once that
   is sent, the next round has a new id.
3. Over N nodes each round has a new id, and is undone before the next begins (`RoundsAtMany`). The ticket has an id of
   its own. A round may take the ticket's place at a node; its undo puts the ticket back.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from asynclock._options import QUORUM_TIMEOUT, RELEASE_TIMEOUT
from asynclock.protocol.core import any_slot
from asynclock.protocol.local_queue import SPAN
from asynclock.protocol.planner import FRESH
from asynclock.quorum.ballot import REFUSED, Ballot
from asynclock.rules.model import ACQUIRE, ID_LENGTH, RELEASE, WAIT, Op, Queueing, Serve, polls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.protocol.core import Core
    from asynclock.protocol.terms import Terms
    from asynclock.stores.port import Notice


# -- the ticket --------------------------------------------------------------------------------------------------------


_NUMBERS = 8
"""This many sendings are remembered. A grant of an older one is no longer fresh."""

POLLED = 1.0
"""Seconds for which a single node serves the ticket of a client that polls. Such a client pauses for 0.25 s at most, so
it asks several times in this period. If it is dead, the name is taken until the ticket ends."""


@lru_cache(maxsize=256)  # many ops share it, so that a store encodes it once
def no_ticket(serve: Serve, fair: bool, span: int) -> Queueing:
    """For a round that leaves no ticket."""
    return Queueing(serve, fair, span)


@lru_cache(maxsize=256)
def first_ticket(serve: Serve, fair: bool, fresh: float) -> Queueing:
    """The ticket that the first round at a single node leaves if it is refused."""
    return Queueing(serve, fair, number=1, fresh=fresh)


def fresh_for(lease: float, left: float) -> float:
    """Seconds for which the servers serve a ticket that is sent now, `left` seconds before its owner gives up."""
    return min(lease * FRESH, max(left, 0.001))


class Ticket:
    """A place in the servers' queue: sent, renewed, withdrawn. At a single node `id` is that of the rounds.

    The rules:

    1. At a single node the ticket and the rounds have one id, and a release of that id ends them. Over N nodes each
       round has a new id, and the ticket has one of its own for as long as its owner waits.
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
        self.has_own_id = has_own_id  # the id is the ticket's own, not that of a round
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
        """The sending that puts the ticket back when a round over N nodes that took its place is undone."""
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

    def drop_grant(self) -> None:
        """A later notice says that the hold has ended."""
        self._granted = None

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

    terms: Terms

    def notified(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice for it."""

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone."""

    def settled(self, ballot: Ballot) -> None:
        """A round has its outcome."""


class Tickets:
    """The acquisitions of one session that left a ticket, by the random part of the ticket's id.

    A client that closes withdraws all of them. If a release or a withdrawal served the queue meanwhile, it would notify
    waiters of this client: over N nodes up to 64, because none of them takes the name. So over N nodes only the last
    withdrawal of a name serves the queue, and with it the waiters of other clients (`serve_at`)."""

    __slots__ = ("_by_id", "_left")

    def __init__(self) -> None:
        self._by_id: dict[str, TicketOwner] = {}
        self._left: dict[str, int] | None = None  # name -> the number of its tickets; None: the client does not close

    def add(self, id: str, acquisition: TicketOwner) -> None:
        if self._left is not None and id[:ID_LENGTH] not in self._by_id:
            self._left[acquisition.terms.name] = self._left.get(acquisition.terms.name, 0) + 1
        self._by_id[id[:ID_LENGTH]] = acquisition

    def remove(self, id: str) -> None:
        """Harmless for an id that is not there."""
        acquisition = self._by_id.pop(id[:ID_LENGTH], None)
        if self._left is not None and acquisition is not None:
            self._left[acquisition.terms.name] -= 1
            if not self._left[acquisition.terms.name]:
                del self._left[acquisition.terms.name]

    def close(self) -> None:
        """The client closes: all of them are withdrawn from now on."""
        self._left = dict(Counter(acquisition.terms.name for acquisition in self._by_id.values()))

    def serve_at(self, name: str, serve: Serve) -> Serve:
        """What a release or an undo of that name does for the next waiter, if it is usually `serve`: nothing, while
        tickets of that name are still to be withdrawn by a client that closes."""
        return Serve.NOBODY if self._left and serve is Serve.WAKE and name in self._left else serve

    def get(self, id: str) -> TicketOwner | None:
        """The acquisition whose ticket has an id with the random part `id`; None: there is none."""
        return self._by_id.get(id)

    def all(self) -> list[TicketOwner]:
        return list(self._by_id.values())


def withdraw(
    core: Core,
    terms: Terms,
    id: str,
    *,
    since: float = 0.0,
    nodes: Sequence[int] | None = None,
    serve: Serve | None = None,
    lease: float | None = None,
) -> None:
    """Remove the hold and the ticket of that id at these nodes (None: all). If a notice has reached the ticket, the
    next waiter is served, unless `serve` says otherwise. `lease`: the longest that a node may keep it for; None: the
    lock's lease."""
    if nodes is not None and not nodes:
        return
    settings = terms.settings
    memory = settings.lease + core.settings.fence_memory
    queueing = Queueing(core.quorum.serve if serve is None else serve, contended=True)
    longest = settings.lease if lease is None else lease
    op = Op(RELEASE, terms.kind, terms.name, id, longest, 0, memory, queueing=queueing, since=since)
    within = min(max(core.within(settings), QUORUM_TIMEOUT), RELEASE_TIMEOUT)
    core.quorum.ask(op, within, only=nodes)


# -- the rounds --------------------------------------------------------------------------------------------------------


class Rounds:
    """See the module. `owner` receives the notices for its ticket."""

    __slots__ = ("_core", "_order", "_owner", "_span", "_terms", "_tickets", "ballot", "op", "ticket")

    def __init__(self, core: Core, tickets: Tickets, terms: Terms, owner: TicketOwner) -> None:
        self._core = core
        self._tickets = tickets
        self._terms = terms
        self._owner = owner
        self.op: Op | None = None  # of the last round; None: the next one has a new id
        self.ballot: Ballot | None = None  # the last round; None once that was undone or became a hold
        self.ticket: Ticket | None = None
        self._order = 0  # the order key that the next ticket begins with
        self._span: int  # fences for the local queue; each `send` sets it before it makes a ticket

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, give_up: float, ends: float, refused: bool, probe: bool, behind: int, slot: int | None) -> Ballot:
        """Ask for the hold. With `probe`, over N nodes and for one name, only renew the ticket, and ask whether its
        owner can enter. `give_up`: when the time of its owner ends, and with it the ticket; `ends`: when its owner
        stops waiting for this round, which is later if it asks late; `refused`: a majority has refused before;
        `behind`: so many tasks of this process wait behind this one; `slot`: the one to ask for over N nodes, of a kind
        that has slots; None: any."""
        raise NotImplementedError

    def _span_for_queue(self) -> int:
        """Fences for the local queue. Their number is fixed with the id: any ticket of this id may be granted."""
        return SPAN if not self._terms.kind.fair and not self._terms.settings.min_hold else 1

    def on_reply(self, ballot: Ballot) -> None:
        """A round has its outcome, which is no grant."""

    def set_queue_order(self, ballot: Ballot) -> None:
        """Take over the order key under which the nodes keep the ticket."""
        if self.ticket is not None:
            self.ticket.set_queue_order(ballot.orders())
            self._order = self.ticket.order

    # -- the end of a round --------------------------------------------------------------------------------------

    def grant(self, number: int, top: int) -> None:
        """A notice says that the sending of that number became the hold, with the fences up to `top`. Over N nodes the
        notice of one node decides nothing."""

    def drop_grant(self) -> None:
        """A notice says that the hold of its id has ended: a grant that was not taken yet is void."""

    def take_grant(self) -> tuple[Ballot, int] | None:
        """The ballot that a notice has won, and its token; None: there is none, or its ticket was sent too long ago."""
        return None

    def end_round(self, ballot: Ballot) -> None:
        """It brought no hold, and the ticket stays. Another round follows."""

    def leave(self) -> None:
        """Undo the round under way and withdraw the ticket. The next round has another id. A second call does
        nothing."""
        raise NotImplementedError

    def withdraw_ticket(self, ticket: Ticket, won: Ballot) -> None:
        """Its owner has won: the ticket is not sent again, and notices for it are ignored."""
        del won
        ticket.stop()
        self._tickets.remove(ticket.id)

    def use_new_id(self) -> None:
        """The next round has another id."""
        self.op = self.ballot = None

    def continue_batch(self) -> None:
        """Its ticket was one of the last that one op could serve (`SERVED` in `rules/model.py`). The release of an
        unused id makes the server serve the next ones."""
        withdraw(self._core, self._terms, self._core.new_id(0, "", self._terms.kind.mode))

    def _undo(self, ballot: Ballot, back: Queueing | None = None) -> None:
        """Undo a round in the background, at each node where it took effect or still may. A close of the client waits
        for the reply (`Node.aclose`). `back`: the ticket that is put back there."""
        self.ballot = None
        within = min(max(ballot.deadline - ballot.sent, QUORUM_TIMEOUT), RELEASE_TIMEOUT)
        self._core.quorum.undo(ballot, within, back, self._serve)

    @property
    def _serve(self) -> Serve:
        """What an undo or a withdrawal does for the next waiter."""
        return self._tickets.serve_at(self._terms.name, self._core.quorum.serve)


class RoundsAtOne(Rounds):
    """At a single node: one id for all of them (rule 2)."""

    __slots__ = ()

    def send(self, give_up: float, ends: float, refused: bool, probe: bool, behind: int, slot: int | None) -> Ballot:
        del slot  # the node chooses it
        core, terms, quorum = self._core, self._terms, self._core.quorum
        settings, listens = terms.settings, quorum.nodes[0].listens
        if self.ticket is not None and not listens and not quorum.nodes[0].error:
            self._poll_from_now_on()
        op, seed = self.op, int(core.clock.wall() * 1_000_000)
        if op is None:
            self._span = self._span_for_queue() if behind else 1
            op_id = core.new_id(seed, settings.metadata, terms.kind.mode)
        else:
            op_id = op.id
        plain = not settings.fencing and not refused
        if plain or terms.timeout == 0:
            queueing = no_ticket(quorum.serve, terms.kind.fair, self._span)
        elif op is None and listens and not (behind or self._order):
            fresh = min(settings.lease * FRESH, terms.timeout or math.inf)
            queueing = first_ticket(quorum.serve, terms.kind.fair, fresh)
        else:
            queueing = self._next_ticket(op_id, give_up, behind, listens)
        if op is None:
            memory = settings.lease + core.settings.fence_memory
            op = self.op = Op(
                ACQUIRE, terms.kind, terms.name, op_id, settings.lease, seed, memory, plain=plain, queueing=queueing
            )
        else:
            op.renew(seed, queueing, plain=plain)
        at_once = refused and not probe  # the name may be free for a moment only
        self.ballot = quorum.ask(
            op,
            core.within(settings),
            on_settled=self._owner.settled,
            at_once=at_once,
            gives_up=ends,
        )
        return self.ballot

    def _poll_from_now_on(self) -> None:
        """Its client gets no notices any more, but the id of its ticket says that it does. When the turn of that
        ticket came, the node would find no listener, drop the ticket, and make the next waiter the holder. The next
        ticket has another id, in the same place of the queue."""
        if self.op is not None and not polls(self.op.id):
            self.leave()

    def _next_ticket(self, id: str, give_up: float, behind: int, listens: bool) -> Queueing:
        """The ticket to send with the next round, which has that id. Without notices (not `listens`) the node makes its
        owner the holder all the same, and the next poll finds that."""
        core, terms = self._core, self._terms
        serve, fair, lease = core.quorum.serve, terms.kind.fair, terms.settings.lease
        if not listens:  # a mutex enters only in queue order, since its release may not notify the waiters before it
            fair, lease = fair or not terms.kind.shared or bool(terms.kind.parts), min(lease, POLLED / FRESH)
        if self.ticket is None and not self._order and not behind:
            return first_ticket(serve, fair, min(lease * FRESH, terms.timeout or math.inf))
        if self.ticket is None:
            self.ticket = Ticket(id, has_own_id=False, order=self._order)
        fresh = fresh_for(lease, give_up - core.clock.now())
        return self.ticket.send(serve, fair, self._span, fresh, tasks=1 + behind)

    def on_reply(self, ballot: Ballot) -> None:
        """If the round was refused, it left a ticket. That is registered here, in the turn of the reply: it may be
        granted at once, and the notice may arrive in the same read."""
        op = ballot.op
        if op.queueing.number and ballot.outcome is REFUSED and op is self.op and not op.revoked:
            if self.ticket is None:
                self.ticket = Ticket(op.id, has_own_id=False, number=1)  # the number of `first_ticket`
            self._tickets.add(op.id, self._owner)
            self.ticket.was_sent(ballot.sent)

    def grant(self, number: int, top: int) -> None:
        if self.ticket is not None:
            self.ticket.grant(number, top)

    def drop_grant(self) -> None:
        if self.ticket is not None:
            self.ticket.drop_grant()

    def take_grant(self) -> tuple[Ballot, int] | None:
        grant = self.ticket.take_grant() if self.ticket is not None else None
        if grant is None or self.op is None:
            return None
        sent, top = grant
        ballot = Ballot(self.op, 1, sent, sent)
        ballot.answer(0, (top, False))
        return ballot, top

    def leave(self) -> None:
        op, ticket = self.op, self.ticket
        if op is not None and (ticket is not None or op.queueing.number):
            op.revoke()  # before the release: the op must not be sent after it
            # No release if it is certain that the node has neither hold nor ticket: in an outage each try would leave a
            # pending one. Else there is always one: a hold or a ticket that stays would block other clients.
            only_round = ticket is None or op.queueing.number == ticket.number == 1  # that has sent a ticket of this id
            if self.ballot is None or not (only_round and self.ballot.left_nothing):
                withdraw(self._core, self._terms, op.id)
        elif self.ballot is not None:
            self._undo(self.ballot)
        self.use_new_id()  # the release may leave a tombstone of this id, or be sent again later

    def use_new_id(self) -> None:
        if self.op is not None:
            self._tickets.remove(self.op.id)
        self.ticket = None
        super().use_new_id()


class RoundsAtMany(Rounds):
    """Over N nodes: an id for each round, and one for the ticket (rule 3)."""

    __slots__ = ("_since",)

    def __init__(self, core: Core, tickets: Tickets, terms: Terms, owner: TicketOwner) -> None:
        super().__init__(core, tickets, terms, owner)
        self._since = 0.0  # when the first ticket was made

    def send(self, give_up: float, ends: float, refused: bool, probe: bool, behind: int, slot: int | None) -> Ballot:
        core, terms, quorum = self._core, self._terms, self._core.quorum
        settings, kind, seed = terms.settings, terms.kind, int(core.clock.wall() * 1_000_000)
        self._span = self._span_for_queue() if behind else 1
        if kind.slots:
            kind = kind.at(any_slot(core.random, kind.slots) if slot is None else slot)
        op_id = core.new_id(seed, settings.metadata, kind.mode)
        plain = not settings.fencing and not refused
        if terms.timeout != 0 and refused and quorum.listens:
            queueing = self._next_ticket(seed, give_up, behind)
        else:
            queueing = self._no_next_ticket(kind.fair)
        memory = settings.lease + core.settings.fence_memory
        op = self.op = Op(
            ACQUIRE, kind, terms.name, op_id, settings.lease, seed, memory, plain=plain, queueing=queueing
        )
        if probe and queueing.number and not kind.parts:  # a waiter for several names probes by trying
            op.ask_with_ticket(queueing.waiter)
        renewal = op.verb is WAIT
        # Each try with a ticket is certain, and each probe whose ticket was sent before (`renewal` counts as 0 or 1).
        certain = self.ticket is not None and self.ticket.number > renewal
        self.ballot = quorum.ask(
            op,
            core.within(settings),
            on_settled=self._owner.settled,
            everyone=renewal and certain,  # a first probe does not wait for unresponsive nodes
            certain=certain,
            at_once=refused and not probe,  # the name may be free for a moment only
            gives_up=ends,
        )
        return self.ballot

    def _next_ticket(self, seed: int, give_up: float, behind: int) -> Queueing:
        """The ticket to send with the next round."""
        core, terms = self._core, self._terms
        if self.ticket is None:
            self._order = self._order or seed
            self._since = self._since or core.clock.now()
            own_id = core.new_id(self._order, terms.settings.metadata, terms.kind.mode)
            self.ticket = Ticket(own_id, has_own_id=True, order=self._order)
            self._tickets.add(own_id, self._owner)
        fresh = fresh_for(terms.settings.lease, give_up - core.clock.now())
        return self.ticket.send(core.quorum.serve, terms.kind.fair, self._span, fresh, tasks=1 + behind)

    def _no_next_ticket(self, fair: bool) -> Queueing:
        """For a round that sends no ticket. Without notices an earlier ticket is not renewed. The round names it, since
        the nodes may still keep it."""
        serve = self._core.quorum.serve
        if self.ticket is not None:
            return Queueing(serve, fair, self._span, self.ticket.id)
        return no_ticket(serve, fair, self._span)

    def set_queue_order(self, ballot: Ballot) -> None:
        """From the first reply only: a ticket has one order key at all nodes."""
        if self.ticket is not None and self.ticket.number == 1:
            super().set_queue_order(ballot)

    def end_round(self, ballot: Ballot) -> None:
        """It is undone, before the next one begins. While a node is down, an undo that followed the next attempt would
        come too late each time, and the client would split the votes with itself (UNDO_FIRST in spec/)."""
        if ballot.op.verb is ACQUIRE:
            sent = ballot.op.queueing
            back = self.ticket.put_back(sent) if self.ticket is not None and sent.number else None
            self._undo(ballot, back)

    def leave(self) -> None:
        if self.ballot is not None and self.ballot.op.verb is ACQUIRE:
            self._undo(self.ballot)
        if (ticket := self.ticket) is not None:
            ticket.stop()
            self._tickets.remove(ticket.id)
            withdraw(self._core, self._terms, ticket.id, since=self._since, serve=self._serve)
            self.ticket = None
        self.use_new_id()

    def withdraw_ticket(self, ticket: Ticket, won: Ballot) -> None:
        """Remove it from the nodes that did not grant, too: now where they have voted, later after each late vote that
        is no grant. A node that grants keeps no ticket."""
        super().withdraw_ticket(ticket, won)
        if won.yes < won.nodes:
            withdraw_at = partial(withdraw, self._core, self._terms, ticket.id, since=self._since)
            withdraw_at(nodes=won.nodes_without_grant())
            won.on_late_vote(
                lambda ballot, index: withdraw_at(nodes=[index]) if index in ballot.nodes_without_grant() else None
            )
