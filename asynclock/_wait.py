"""One acquire, from its first try to its lease or to its giving up: the one loop in which it waits.

The rules:

1. What an attempt was granted is either handed to the caller as a Lease or undone; there is no third way, whoever is
   cancelled and whenever. So is a ticket: who stops waiting takes it back, and passes on what reached it meanwhile.
2. "Held by somebody" and "out of reach" never mix: a refusal waits for the holder and ends in None; without a
   majority the acquire goes on trying, with back-off, without a ticket, and ends in QuorumUnavailable.
3. A lease counts once a majority are witnesses of its fencing token, and while it has validity left.
4. Nobody polls. A refused try leaves a ticket; then the servers call. What the waiter sends is the ticket's renewal,
   every third of its life, and at the end of the holder's lease, since a dead holder calls nobody: that only from the
   first few of the queue, who alone look also at a stranger's hold, which nobody else can tell the end of.
5. At a node alone waiter and attempt have one id, spent by its release, and serving is granting: a notice says
   that its ticket, of that number, became the hold, so validity counts from when that number was sent.
6. Over N nodes each attempt has a fresh id, undone before the next begins, and serving is a call. The waiter tries
   when a majority has called, or a round trip after the first. Refused, it looks: one holder on a majority is waited
   for; votes that are split are given back, and tried again after a pause that is least for the first in the queue.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynclock._clock import wake
from asynclock._errors import ConfigError
from asynclock._lease import Lease
from asynclock._line import Line
from asynclock._op import Op, Queueing, Verb
from asynclock._options import QUORUM_TIMEOUT
from asynclock._quorum import Ballot, Outcome
from asynclock._state import ID_LENGTH

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from asynclock._op import Kind, Serve
    from asynclock._options import LockSettings
    from asynclock._session import Session

HEADS = 3
"""So many of the queue look when the holder's lease ends."""

RENEW = 1 / 3
"""A ticket is renewed after this share of its life ..."""
FRESH = 1 / 2
"""... and served up to this one."""

_STRANGER = (0.05, 0.25)  # seconds between two looks at the hold of somebody who calls nobody
_PAUSE = (0.002, 0.25)  # the same where no notices come: the first pause, doubled up to the last
_OUTAGE_PAUSE = (0.02, 0.5)  # the same while a majority is out of reach
_SPLIT = (0.0005, 0.25)  # between two tries after split votes: at least, and at most


class Look(NamedTuple):
    """When to ask next, unless somebody calls; and what."""

    at: float
    only: bool = False  # renew the ticket, and see; else try


def next_look(now: float, sent: float, lease: float, rank: int, left: int, ours: bool) -> Look:
    """When to ask next, the ticket having been sent at `sent` and stood at `rank`, and the holder having `left` ms
    (-1: for ever; -2: there is none). Pure, but for its jitter."""
    renewal = sent + lease * RENEW * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
    if rank < HEADS and not (ours and left >= 0) and left != -2:
        return Look(min(renewal, now + random.uniform(*_STRANGER)))  # noqa: S311 - jitter
    end = now + (left + 1) / 1000 + max(0, rank - HEADS + 1) * 0.002
    if left >= 0 and end < renewal:
        return Look(end)
    return Look(renewal, only=True)


class Pace:
    """When to try again where nobody calls. Pure, but for its jitter."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._no_longer: float | None = None  # when an outage has lasted too long
        self._pause = _PAUSE[0]
        self._outage_pause = _OUTAGE_PAUSE[0]

    def after_refusal(self, now: float, soonest: float) -> float:
        """`soonest` is how many seconds from now a holder's lease may end."""
        self._no_longer = None
        pause = min(self._pause * random.uniform(0.5, 1.0), soonest)  # noqa: S311 - jitter
        self._pause = min(2 * self._pause, _PAUSE[1])
        return now + pause

    def after_outage(self, now: float, give_up: float) -> float | None:
        """None: not again."""
        self._no_longer = self._no_longer or now + self._patience
        limit = self._no_longer if give_up == math.inf else give_up
        pause = self._outage_pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._outage_pause = min(2 * self._outage_pause, _OUTAGE_PAUSE[1])
        return min(now + pause, limit) if now < limit else None


class Recipe(Protocol):
    """The Lock that is acquired."""

    @property
    def name(self) -> str: ...
    @property
    def _kind(self) -> Kind: ...
    @property
    def _span(self) -> int: ...
    def _without_ticket(self, serve: Serve, span: int) -> Queueing: ...
    def _first_ticket(self, serve: Serve, timeout: float | None) -> Queueing: ...
    def _forget(self, lease: Lease) -> None: ...


class Wait:
    """See the module. Made for one acquire."""

    __slots__ = (
        "_ballot", "_calls", "_give_up", "_grant", "_line", "_looks_only", "_number", "_op", "_order", "_pace",
        "_quorum", "_refused", "_rtt", "_sends", "_session", "_span", "_splits", "_started", "_ticket", "_timeout", "_timer",
        "_turn", "_waker", "lock", "settings", "task",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        lock: Recipe,
        settings: LockSettings,
        task: asyncio.Task[Any] | None,
        timeout: float | None,
    ) -> None:
        self.lock = lock
        self.settings = settings
        self.task = task
        self._session = session
        self._quorum = session.quorum
        self._timeout = timeout
        self._give_up = session.clock.now() + timeout if timeout else math.inf
        self._line: Line | None = None
        self._turn: asyncio.Future[Lease | bool] | None = None  # while it stands in line
        self._waker: asyncio.Future[None] | None = None  # while it waits to be called
        self._timer: Any = None
        self._op: Op | None = None  # of the last try
        self._ballot: Ballot | None = None  # of the last try; None once it was undone or became a lease
        self._started = False  # it is still to be heard of
        self._ticket = ""  # the waiter's id, once it has left tickets under one of its own
        self._span = 1
        self._number = 0  # of the last ticket
        self._order = 0
        self._sends: dict[int, float] = {}  # number of a ticket -> when it was sent
        self._grant: tuple[int, int] | None = None
        self._calls = 0  # bit i: node i called
        self._looks_only = False
        self._refused = False  # the last word of a majority was: somebody holds it
        self._rtt = 0.0
        self._splits = 0
        self._pace: Pace | None = None

    def __repr__(self) -> str:
        return f"<Wait for {self.lock!r}, ticket {self._number}>"

    async def run(self) -> Lease | None:
        """The lease; None: somebody held it all the time. Raises QuorumUnavailable, ConfigError."""
        session, name = self._session, self.lock.name
        session.waits.add(self)
        lease: Lease | None = None
        try:
            if self._timeout != 0 and not self.lock._kind.fair:
                line = session.lines.get(name)
                if line is None and name not in session.held:
                    self._line = session.lines[name] = Line(name, self)
                elif line is None or not line.broken:
                    self._line = line or session.lines.setdefault(name, Line(name))
                    turn = await self._stand(self._line)
                    if not isinstance(turn, bool):
                        return turn
                    if not turn:
                        return None
            lease = await self._ask()
            return lease
        except BaseException:
            self._leave()
            raise
        finally:
            session.waits.discard(self)
            if self._line is not None and self._line.asker is self:
                self._line.asked(lease is not None, session.lines)

    # -- in line -------------------------------------------------------------------------------------------------

    async def _stand(self, line: Line) -> Lease | bool:
        """A lease that was passed on; True: it is our turn to ask; False: the time was up before."""
        session = self._session
        self._turn = turn = session.loop.create_future()
        line.stand(self)
        timer = session.clock.call_at(self._give_up, self._time_up) if self._timeout else None
        try:
            passed: Lease | bool = await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and isinstance(lease := turn.result(), Lease):
                lease._hand_back()
            line.leave(self, session.lines)
            raise
        finally:
            self._turn = None
            if timer is not None:
                timer.cancel()
        session.check_open()
        if passed is False:
            line.leave(self, session.lines)
            asker = line.asker
            if isinstance(asker, Wait) and not asker._refused and asker._ballot is not None:
                raise session.quorum.unavailable(asker._ballot, self.lock.name)
        return passed

    @property
    def standing(self) -> bool:
        return self._turn is not None and not self._turn.done()

    def take(self, lease: Lease) -> None:
        assert self._turn is not None  # noqa: S101 - only who stands is given something
        self._turn.set_result(lease)

    def ask(self) -> None:
        self._try()
        self._started = True
        self.ask_alone()

    def ask_alone(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(True)

    def _time_up(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(False)

    # -- asking --------------------------------------------------------------------------------------------------

    async def _ask(self) -> Lease | None:
        session = self._session
        while True:
            ballot = self._ballot if self._started else self._try()
            self._started = False
            assert ballot is not None  # noqa: S101 - a try that was started has one
            outcome = await self._settled(ballot)
            lease = await self._won(ballot) if outcome is Outcome.WON else self._granted()
            if lease is None:
                look = self._lost(ballot, outcome)
                if look is None:
                    self._leave()
                    return None
                lease = await self._idle(look)
            if lease is not None:
                self._withdraw(ballot)
                return lease
            if self._refused and session.clock.now() >= self._give_up:
                self._leave()
                return None

    def _try(self) -> Ballot:
        """Send an attempt, or a mere renewal of the ticket. At a node alone one Op serves for all tries of an id, so
        that its release ends them all (`undone`)."""
        session, settings, quorum = self._session, self.settings, self._quorum
        seed = int(session.clock.wall() * 1_000_000)
        alone = len(quorum.nodes) == 1
        if self._op is None or not alone:
            self._op = Op(
                Verb.ACQUIRE, self.lock._kind, self.lock.name, session.new_id(seed, settings.metadata), settings.lease,
                seed, settings.lease + session.settings.fence_memory,
            )  # fmt: skip
            # Fences for who stands behind us; fixed with the id, for a grant may come for any of its tickets.
            self._span = self.lock._span if self._line is not None and self._line.first() is not None else 1
        else:
            self._op.fence = seed
            self._op.wire = None
        op = self._op
        op.plain = not settings.fencing and not self._refused
        if self._timeout != 0 and (alone or self._refused) and not op.plain and quorum.listens:
            self._order = self._order or (0 if alone else seed)
            op.queueing = self._new_ticket(op, alone)
            if self._looks_only and not alone:
                op.verb, op.id = Verb.WAIT, self._ticket
        else:
            op.queueing = self.lock._without_ticket(quorum.serve, self._span)
        self._looks_only = False
        self._calls = 0
        looks = op.verb is Verb.WAIT
        self._ballot = quorum.ask(op, session.within(settings), everyone=looks, certain=self._number > 0)
        return self._ballot

    def _new_ticket(self, op: Op, alone: bool) -> Queueing:
        """The next sending of our ticket."""
        self._number += 1
        settings, serve = self.settings, self._quorum.serve
        if alone and self._number == 1 and not self._order and self._span == 1:
            return self.lock._first_ticket(serve, self._timeout)
        left = max(self._give_up - self._session.clock.now(), 0.001)
        if not alone and not self._ticket:
            self._ticket = self._session.new_id(self._order, settings.metadata)
            self._session.waiting[self._ticket[:ID_LENGTH]] = self
        fresh = min(settings.lease * FRESH, left)
        return Queueing(
            serve, self.lock._kind.fair, self._span, self._ticket, self._number, fresh, self._order
        )

    async def _settled(self, ballot: Ballot) -> Outcome:
        """The ballot's outcome; where the caller's timeout comes before the nodes', that ends it."""
        session = self._session
        if ballot.outcome is not None or self._give_up >= ballot.deadline:
            outcome = await ballot.settled(session.loop)
        else:
            timer = session.clock.call_at(self._give_up, ballot.expire)
            try:
                outcome = await ballot.settled(session.loop)
            finally:
                timer.cancel()
        session.check_open()
        return outcome

    async def _won(self, ballot: Ballot) -> Lease | None:
        """The lease of a ballot that was won: None where its validity or its fence did not make it."""
        fences = ballot.fences()
        top = max(fences)
        if fences.count(top) <= ballot.nodes // 2 and not await self._witnessed(ballot, top):
            return None
        self._session.check_open()
        return self._begun(ballot, top)

    async def _witnessed(self, ballot: Ballot, top: int) -> bool:
        """A second round, where the counters differed: raise F to the token on a majority that holds for us."""
        op = ballot.op
        raised = Op(Verb.EXTEND, op.kind, op.name, op.id, op.lease, top, op.memory)
        confirm = self._quorum.ask(raised, ballot.deadline - ballot.sent)
        won = await confirm.settled(self._session.loop) is Outcome.WON
        return won and sum(f >= top for f in confirm.fences()) > ballot.nodes // 2

    def _begun(self, ballot: Ballot, top: int) -> Lease | None:
        lease = Lease(self._session, self.lock, self.task, self.settings, ballot, top, contended=self._refused)
        self._ballot = None
        if lease.held:
            return lease
        lease._close()
        self._spend()
        return None

    def _granted(self) -> Lease | None:
        """The lease that a notice told of (rule 5). A later refusal says that it has ended meanwhile."""
        if self._grant is None or self._op is None:
            return None
        number, top = self._grant
        self._grant = None
        sent = self._sends.get(number)
        if sent is None:
            return None
        ballot = Ballot(self._op, 1, sent, sent)
        ballot.answer(0, [1, top])
        return self._begun(ballot, top)

    # -- what a refusal, or silence, means -----------------------------------------------------------------------

    def _lost(self, ballot: Ballot, outcome: Outcome) -> Look | None:
        """When to ask next; None: not again. Raises where the servers are out of reach for too long."""
        session = self._session
        now = session.clock.now()
        self._rtt = now - ballot.sent
        if self._pace is None:
            self._pace = Pace(session.settings.patience)
        if outcome is Outcome.UNREACHABLE and not (self._refused and now >= self._give_up):
            return self._out_of_reach(ballot, now)
        self._refused = True
        if self._line is not None:
            self._line.broken = False
        if self._timeout == 0 or now >= self._give_up:
            return None
        look = self._refused_alone(ballot, now) if ballot.nodes == 1 else self._refused_by_many(ballot, now)
        return Look(min(look.at, self._give_up), look.only)

    def _out_of_reach(self, ballot: Ballot, now: float) -> Look:
        assert self._pace is not None  # noqa: S101 - made by _lost
        error = self._quorum.unavailable(ballot, self.lock.name)
        self._leave()
        self._refused = False
        if self._line is not None:
            self._line.dissolve()
        again = None if self._timeout == 0 else self._pace.after_outage(now, self._give_up)
        if again is None or isinstance(error, ConfigError):
            raise error
        return Look(again)

    def _refused_alone(self, ballot: Ballot, now: float) -> Look:
        assert self._pace is not None and self._op is not None  # noqa: PT018, S101 - made before
        vote = ballot.votes[0]
        if not isinstance(vote, list) or vote[0] != 0:  # undone, or won too late
            self._spend()
            return Look(self._pace.after_refusal(now, math.inf))
        _, left, holder, rank, *order = vote if len(vote) > 3 else [*vote, -1]
        if rank < 0:
            if self._op.plain and self._quorum.listens:  # a ticket needs the script, which shall not know this id
                self._op, self._ballot = None, None
                return Look(now)
            return Look(self._pace.after_refusal(now, (left + 1) / 1000 if left >= 0 else math.inf))
        self._order = order[0]
        self._sends = {number: sent for number, sent in self._sends.items() if number > self._number - 8}
        self._sends[self._number] = ballot.sent
        self._session.waiting[self._op.id[:ID_LENGTH]] = self
        return next_look(now, ballot.sent, self.settings.lease, rank, left, holder[ID_LENGTH : ID_LENGTH + 1] == b"|")

    def _refused_by_many(self, ballot: Ballot, now: float) -> Look:
        assert self._pace is not None  # noqa: S101 - made by _lost
        majority = ballot.nodes // 2 + 1
        if ballot.op.verb is Verb.ACQUIRE:
            self._undo(ballot)
        if not self._number:  # now with a ticket, if notices come; else at leisure
            return Look(now if self._quorum.listens else self._pace.after_refusal(now, _soonest(ballot)))
        ranks = ballot.ranks()
        rank = ranks[len(ranks) // 2] if ranks else 0
        holder = ballot.holder()
        lease = self.settings.lease
        if holder is not None:
            self._splits = 0
            whose, left = holder
            return next_look(now, ballot.sent, lease, rank, left, whose[ID_LENGTH : ID_LENGTH + 1] == b"|")
        if self.lock._kind.fair and rank > 0 and ballot.free() >= majority:
            return next_look(now, ballot.sent, lease, rank, -2, ours=True)
        if ballot.op.verb is Verb.WAIT and ballot.free() >= majority:
            return Look(now)
        self._splits += 1
        rtt = min(max(self._rtt, _SPLIT[0]), QUORUM_TIMEOUT)
        pause = min(rtt * (1 + min(rank, 8)) * 2 ** min(self._splits - 1, 8), _SPLIT[1])
        return Look(now + pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def _undo(self, ballot: Ballot) -> None:
        """Give an attempt over N nodes back; where it was let in, its ticket takes its place again."""
        self._ballot = None
        ticket = ballot.op.queueing
        if ticket.number:
            ticket = Queueing(span=ticket.span, waiter=ticket.waiter, number=ticket.number, fresh=ticket.fresh,
                              order=ticket.order)  # fmt: skip
            self._session.undo(ballot, ticket)
        else:
            self._session.undo(ballot)

    def _leave(self) -> None:
        """Stop waiting: undo the try under way, take the tickets back, pass on what reached us. Callable twice."""
        ballot, op = self._ballot, self._op
        self._ballot = None
        if op is not None and self._number and not self._ticket:  # alone: one id for all
            op.undone = True
            self._release(op.id)
        elif ballot is not None and ballot.op.verb is Verb.ACQUIRE:
            self._session.undo(ballot)
        self._withdraw()
        self._spend()

    def _withdraw(self, won: Ballot | None = None) -> None:
        """No ticket of ours stays at any node, and nobody calls us any more. Where we were let in none is left."""
        if self._ticket:
            self._session.waiting.pop(self._ticket[:ID_LENGTH], None)
            if self._op is not None:
                self._op.undone = self._op.undone or self._op.verb is Verb.WAIT
            let_in = [] if won is None else won.let_in()
            self._release(self._ticket, [i for i in range(len(self._quorum.nodes)) if i not in let_in])
            self._ticket = ""
        elif self._op is not None and self._number:
            self._session.waiting.pop(self._op.id[:ID_LENGTH], None)

    def _spend(self) -> None:
        """The next try has another id."""
        if self._op is not None:
            self._session.waiting.pop(self._op.id[:ID_LENGTH], None)
        self._op = None
        self._number = 0
        self._sends.clear()
        self._grant = None

    def _release(self, id: str, where: Sequence[int] | None = None) -> None:
        if where == []:
            return
        settings, session = self.settings, self._session
        memory = settings.lease + session.settings.fence_memory
        queueing = Queueing(self._quorum.serve, contended=True)
        op = Op(Verb.RELEASE, self.lock._kind, self.lock.name, id, settings.lease, 0, memory, queueing=queueing)
        session.loosen(self._quorum.ask(op, max(session.within(settings), QUORUM_TIMEOUT), everyone=True, only=where))

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _idle(self, look: Look) -> Lease | None:
        """Wait until it is time to ask again. A lease: that is not needed any more."""
        session = self._session
        self._looks_only = look.only
        at = look.at
        if self._calls:
            at = min(at, self._after_calls())
        if at > session.clock.now() and self._grant is None:
            self._waker = session.loop.create_future()
            self._arm(at)
            try:
                await self._waker
            finally:
                self._timer.cancel()
                self._waker = self._timer = None
            session.check_open()
        return self._granted()

    def _arm(self, at: float) -> None:
        if self._waker is not None:
            if self._timer is not None:
                self._timer.cancel()
            waker = self._waker
            self._timer = self._session.clock.call_at(at, lambda: wake(waker))

    def _after_calls(self) -> float:
        """When to try, some nodes having called: a majority, or one round trip later."""
        self._looks_only = False
        now = self._session.clock.now()
        if self._calls.bit_count() > len(self._quorum.nodes) // 2:
            return now
        return now + min(max(self._rtt, _SPLIT[0]), QUORUM_TIMEOUT)

    def called(self, index: int, number: int, fence: int, left: int) -> None:
        """A node calls: our ticket became the hold (fence), the name is free, or will be so in `left` ms."""
        if fence:
            self._grant = number, fence
            if self._waker is not None:
                wake(self._waker)
            return
        if left >= 0:
            self._looks_only = False
            self._arm(self._session.clock.now() + (left + 1) / 1000)
            return
        first = not self._calls
        self._calls |= 1 << index
        now = self._session.clock.now()
        at = self._after_calls()
        if at <= now and self._waker is not None:
            wake(self._waker)
        elif first:
            self._arm(min(at, self._give_up))

    def renew_soon(self) -> None:
        """A node listens again: send the ticket anew, the fleet not all at once."""
        self._looks_only = True
        self._arm(min(self._session.clock.now() + random.uniform(0.0, 0.05), self._give_up))  # noqa: S311 - jitter

    def interrupt(self) -> None:
        """The client closes."""
        if self._ballot is not None:
            self._ballot.expire()
        if self._waker is not None:
            wake(self._waker)
        self._time_up()


def _soonest(ballot: Ballot) -> float:
    """Seconds until the first of the holds that refused us ends; a whole ms more, as Redis rounds."""
    ends = [pttl for pttl, _ in ballot.denials() if pttl >= 0]
    return (min(ends) + 1) / 1000 if ends else math.inf
