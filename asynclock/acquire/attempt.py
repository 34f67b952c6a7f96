"""What one acquire sends and takes back: attempts, tickets, and their undoing. When it does so, `acquisition.py` says.

The rules:

1. What an attempt was granted becomes a Lease or is undone; there is no third way. So is a ticket: it is taken back,
   and passes on what reached it meanwhile. (Who has won waits, behind the caller's back, for what the last nodes say:
   most let it in, and keep no ticket.)
2. At a node alone waiter and attempt have one id, spent by its release. Over N nodes each attempt has a fresh id,
   undone before the next begins, and the ticket one of its own; an attempt that is let in at some nodes only is undone
   there and gets its ticket back.
3. A lease counts once a majority are witnesses of its fencing token, and while it has validity left.
4. The number of a ticket tells when it was sent: a grant says which one became the hold, and validity counts from then.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from asynclock._options import QUORUM_TIMEOUT, RELEASE_TIMEOUT
from asynclock.acquire.backoff import FRESH
from asynclock.acquire.hold import Hold
from asynclock.acquire.local_queue import SPAN
from asynclock.acquire.obstacles import Obstacles
from asynclock.locks.lease import Lease
from asynclock.quorum.ballot import REFUSED, Ballot
from asynclock.rules.model import ACQUIRE, EXTEND, ID_LENGTH, RELEASE, WAIT, Op, Queueing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session, Wait
    from asynclock.rules.model import Kind, Serve

_NUMBERS = 8
"""So many sendings of a ticket are remembered: a grant by an older one is no more fresh."""


class Recipe(Protocol):
    """The Lock that is acquired."""

    @property
    def name(self) -> str: ...
    @property
    def _kind(self) -> Kind: ...
    def _forget(self, lease: Lease) -> None: ...


@lru_cache(maxsize=256)  # shared by many ops: a store encodes it once
def _without_ticket(serve: Serve, fair: bool, span: int) -> Queueing:
    """A try that leaves none."""
    return Queueing(serve, fair, span)


@lru_cache(maxsize=256)
def _first_ticket(serve: Serve, fair: bool, fresh: float) -> Queueing:
    """What the first try at a node alone brings along."""
    return Queueing(serve, fair, number=1, fresh=fresh)


class Tries:
    """What one acquire has under way. It is the lower half of a Wait; who adopts a hold makes do with it."""

    # Most acquires win at once: what they do not need is not set for each of them.
    op: Op | None = None  # of the last try
    ballot: Ballot | None = None  # of the last try; None once it was undone or became a lease
    _awaited: Ballot | None = None  # the last round that it waited for
    number = 0  # of the last ticket; 0: none was left
    _ticket = ""  # its id, where that is one of its own
    _order = 0  # its order key
    _since = 0.0  # when the first such id was made
    _span = 1
    _obstacles: Obstacles | None = None
    _slot: int | None = None  # the one to ask for next; None: any
    _sends: dict[int, float] | None = None  # number of a ticket -> when it was sent
    _grant: tuple[int, int] | None = None
    goes_on = False  # it was the last of many that were served at once
    _sent: Queueing | None = None  # the last sending of the ticket, but for the first at a node alone

    def __init__(
        self,
        session: Session,
        lock: Recipe,
        settings: LockSettings,
        task: asyncio.Task[Any] | None,
        timeout: float | None,
    ) -> None:
        self.lock = lock
        self.name = lock.name
        self.settings = settings
        self.task = task
        self._session = session
        self._quorum = session.quorum
        self._timeout = timeout
        self._give_up = session.clock.now() + timeout if timeout else math.inf

    def cut_short(self) -> None:
        """Wait no longer for the round under way."""
        if self._awaited is not None:
            self._awaited.expire()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, refused: bool, looks: bool, behind: bool) -> Ballot:
        """A try: an attempt; or with `looks`, where we wait already, a mere renewal of the ticket. `behind`: others of
        this process stand in line behind us. At a node alone one Op serves for all tries of an id, so that its release
        ends them all (`revoke`)."""
        session, settings, quorum = self._session, self.settings, self._quorum
        seed = int(session.clock.wall() * 1_000_000)
        alone = len(quorum.nodes) == 1
        kind = self.lock._kind if alone else self._kind()
        if self.op is None or not alone:
            self.op = Op(
                ACQUIRE, kind, self.name, session.new_id(seed, settings.metadata, kind.mode),
                settings.lease, seed, settings.lease + session.settings.fence_memory,
            )  # fmt: skip
            # Fences for who stands behind us; fixed with the id, for a grant may come for any of its tickets.
            passes = behind and not kind.fair and not settings.min_hold
            self._span = SPAN if passes else 1
        else:
            self.op.renew_seed(seed)
        op = self.op
        plain = not settings.fencing and not refused
        if self._timeout != 0 and (alone or refused) and not plain and quorum.listens:
            self._order = self._order or (0 if alone else seed)
            op.set_queueing(self._new_ticket(alone))
            if looks and not alone and not kind.parts:  # who waits for several names looks by trying
                op.ask_with_ticket(self._ticket)
        elif self._ticket:  # no notices come any more; the ticket that was left is not sent again, but is ours still
            op.set_queueing(Queueing(quorum.serve, kind.fair, self._span, self._ticket), plain=plain)
        else:
            op.set_queueing(_without_ticket(quorum.serve, kind.fair, self._span), plain=plain)
        renewal = op.verb is WAIT
        stays = self._stays if alone and op.queueing.number else None
        within = session.within(settings)
        again = self.number > renewal  # who looks before it ever tried is kept up by no node that is silent
        called = refused and not looks  # the name is free while this is under way
        self.ballot = quorum.ask(
            op, within, on_settled=stays, everyone=renewal and again, certain=again, at_once=called
        )
        return self.ballot

    def _stays(self, ballot: Ballot) -> None:
        """A try at a node alone was answered, and left a ticket. That may be served at once: the notice may come in the
        same read, before any task runs."""
        op = ballot.op
        if ballot.outcome is REFUSED and op is self.op and not op.revoked:
            self._listen(op.id)
            self._sends = self._sends or {}
            self._sends[self.number] = ballot.sent

    def _listen(self, ticket: str) -> None:
        """What is told to the ticket reaches us; only a Wait leaves any."""
        self._session.waiting[ticket[:ID_LENGTH]] = cast("Wait", self)

    def _kind(self) -> Kind:
        """What the next attempt asks for over N nodes: a slot, of a kind that has them."""
        kind = self.lock._kind
        if not kind.slots:
            return kind
        if self._slot is None:
            self._slot = random.randrange(kind.slots)  # noqa: S311 - no secret
        slot, self._slot = self._slot, None
        return kind.at(slot)

    def obstacles(self) -> Obstacles:
        """What keeps us out, of a kind that several may hold over N nodes."""
        self._obstacles = self._obstacles or Obstacles(2 * self._session.within(self.settings))
        return self._obstacles

    def choose(self, ballot: Ballot) -> bool:
        """The next attempt asks for a slot that a majority may give; False: there is none, as far as is known."""
        self._slot = self.lock._kind.choose(self.obstacles().taken(ballot), ballot.nodes - ballot.nodes // 2 - 1)
        return self._slot is not None

    def _new_ticket(self, alone: bool) -> Queueing:
        """The next sending of our ticket."""
        self.number += 1
        settings, serve = self.settings, self._quorum.serve
        fresh = settings.lease * FRESH
        if alone and self.number == 1 and not self._order and self._span == 1:
            return _first_ticket(serve, self.lock._kind.fair, min(fresh, self._timeout or fresh))
        if not alone and not self._ticket:
            self._ticket = self._session.new_id(self._order, settings.metadata, self.lock._kind.mode)
            self._since = self._since or self._session.clock.now()
            self._listen(self._ticket)
        left = max(self._give_up - self._session.clock.now(), 0.001)
        fair, fresh = self.lock._kind.fair, min(fresh, left)
        return self._noted(Queueing(serve, fair, self._span, self._ticket, self.number, fresh, self._order))

    def _noted(self, ticket: Queueing) -> Queueing:
        """A ticket that is sent. The sending before it leaves none if it has to come again (NOSCRIPT), for this one may
        have been let in by then."""
        self._unsend()
        self._sent = ticket
        return ticket

    def _unsend(self) -> None:
        if self._sent is not None:
            self._sent.revoke()

    def stands(self, order: int) -> None:
        """A node alone keeps the ticket, in that place."""
        self._order = order
        sends = self._sends or {}
        self._sends = {number: when for number, when in sends.items() if number > self.number - _NUMBERS}

    def placed(self, orders: list[int]) -> None:
        """The nodes keep the ticket in those places: a clock that is far off was clamped, by each to its own. From its
        next sending on it stands in one."""
        if orders:
            self._order = orders[len(orders) // 2]

    # -- what was won --------------------------------------------------------------------------------------------

    def confirm(self, ballot: Ballot, top: int) -> Ballot:
        """A second round, where the counters differed: raise F to the token on a majority that holds for us."""
        op = ballot.op
        raised = Op(EXTEND, op.kind, op.name, op.id, op.lease, top, op.memory)
        return self._quorum.ask(raised, ballot.deadline - ballot.sent)

    def begun(self, ballot: Ballot, top: int, contended: bool = False) -> Lease | None:
        """The lease of a ballot that was won, its token `top` being witnessed; None where no validity is left."""
        settings = self.settings
        hold = Hold(self._session, settings, ballot, top, contended)
        # max_hold and min_hold count from now: a ticket may have been sent long before it was granted.
        lease = Lease(hold, self.lock, self.task, settings, top + 1 - ballot.op.queueing.span, hold.tripped)
        self.ballot = None
        if hold.tripped < hold.valid_until:
            return lease
        lease._close()
        self.spend()
        return None

    def told(self, number: int, top: int) -> None:
        """A notice: our ticket of that number became the hold, with the fences up to `top`."""
        self._grant = number, top

    @property
    def granted(self) -> bool:
        """Whether we were told so, and have not looked yet."""
        return self._grant is not None

    def grant(self) -> Lease | None:
        """The lease that we were told of, if its ticket is one that we sent lately."""
        if self._grant is None or self.op is None:
            return None
        number, top = self._grant
        self._grant = None
        sent = self._sends.get(number) if self._sends else None
        if sent is None:
            return None
        ballot = Ballot(self.op, 1, sent, sent)
        ballot.answer(0, (top, False))
        return self.begun(ballot, top, contended=True)

    # -- taking back ---------------------------------------------------------------------------------------------

    def undo(self, ballot: Ballot) -> None:
        """Give an attempt over N nodes back; where it was let in, its ticket takes its place again."""
        self.ballot = None
        sent = ballot.op.queueing
        if sent.number:
            again = Queueing(span=sent.span, waiter=sent.waiter, number=sent.number, fresh=sent.fresh, order=sent.order)
            self._session.undo(ballot, self._noted(again))
        else:
            self._session.undo(ballot)

    def leave(self) -> None:
        """Undo the try under way, take the tickets back, pass on what reached us; the next try has another id.
        Callable twice."""
        ballot, op = self.ballot, self.op
        self.ballot = None
        if op is not None and self.number and not self._ticket:  # alone: one id for all
            op.revoke()
            self.take_back(op.id)
        elif ballot is not None and ballot.op.verb is ACQUIRE:
            self._session.undo(ballot)
        self.withdraw()
        self.spend()

    def withdraw(self, won: Ballot | None = None) -> None:
        """No ticket of ours stays at any node, and nobody calls us any more. Where we were let in none is left; from
        nodes that have not answered we hear later."""
        if self._ticket:
            self._session.waiting.pop(self._ticket[:ID_LENGTH], None)
            self._unsend()
            ticket, self._ticket = self._ticket, ""
            if won is None:
                self.take_back(ticket)
            elif won.yes < won.nodes:
                self.take_back(ticket, won.refused_nodes())
                won.on_late_vote(partial(self._answered_late, ticket))
        elif self._sends and self.op is not None:
            self._session.waiting.pop(self.op.id[:ID_LENGTH], None)
        if won is not None and self.goes_on:
            self.serve_on()

    def _answered_late(self, ticket: str, won: Ballot, index: int) -> None:
        if index in won.refused_nodes():
            self.take_back(ticket, [index])

    def serve_on(self) -> None:
        """It came in as the last of those who could be served at once: the next are. (Who is not let in serves by its
        leaving.)"""
        self.take_back(self._session.new_id(0, ""))

    def spend(self) -> None:
        """The next try has another id."""
        if self.op is not None:
            self._session.waiting.pop(self.op.id[:ID_LENGTH], None)
        self.op = self.ballot = self._sends = self._grant = None
        self.number = 0

    def take_back(self, id: str, where: Sequence[int] | None = None) -> None:
        """No hold and no ticket of that id shall stay; what reached it is passed on."""
        if where == []:
            return
        settings, session = self.settings, self._session
        memory = settings.lease + session.settings.fence_memory
        queueing = Queueing(self._quorum.serve, contended=True)
        op = Op(
            RELEASE, self.lock._kind, self.name, id, settings.lease, 0, memory, queueing=queueing, since=self._since
        )
        within = min(max(session.within(settings), QUORUM_TIMEOUT), RELEASE_TIMEOUT)
        self._quorum.ask(op, within, everyone=True, only=where)
