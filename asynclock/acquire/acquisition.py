"""One acquire, from its first try to its lease or to its giving up: the one loop in which it waits.

The rules:

1. Whoever is cancelled and whenever: what was sent is taken back, or becomes the lease (`attempt.py`).
2. "Held by somebody" and "out of reach" never mix: a refusal waits for the holder and ends in None; without a
   majority the acquire goes on trying, with back-off, without a ticket, and ends in QuorumUnavailable.
3. Nobody polls. A refused try leaves a ticket; then the servers call. What the waiter sends is the ticket's renewal,
   every third of its life, and a look at the end of the holder's lease, since a dead holder calls nobody: that only
   from the first few of the queue, who alone look also at a stranger's hold, which nobody else can tell the end of.
4. At a node alone serving is granting: a notice says that our ticket, of that number, became the hold.
5. Over N nodes serving is a call. The waiter tries when a majority has called, or a round trip after the first.
   Refused, it looks: one holder on a majority is waited for, and several that hold it together (`obstacles.py`);
   votes that are split are given back, and tried again after a pause that is least for the first in the queue.
   Whoever asks where the name was given back to others just now comes after them: a moment later, with a look.
6. Tasks of one process stand in a line of their own, and only its head asks (`local_queue.py`).
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from asynclock._clock import wake
from asynclock._errors import ConfigError
from asynclock._options import QUORUM_TIMEOUT
from asynclock.acquire.attempt import Tries
from asynclock.acquire.backoff import COLLISIONS, POLITE, Look, Pace, after_call, after_split, next_look, round_trip
from asynclock.acquire.local_queue import Line
from asynclock.acquire.obstacles import hears
from asynclock.locks.lease import Lease
from asynclock.quorum.ballot import UNREACHABLE, WON, Ballot, Outcome
from asynclock.quorum.denials import is_held, soonest
from asynclock.rules.model import ACQUIRE, WAIT
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable

    from asynclock.stores.port import Notice


class Wait(Tries):
    """See the module. Made for one acquire."""

    # Most acquires win at once: what they do not need is not set for each of them.
    _paces: Pace | None = None
    _line: Line | None = None
    _turn: asyncio.Future[Lease | bool] | None = None  # while it stands in line
    _waker: asyncio.Future[None] | None = None  # while it waits to be called
    _timer: Any = None
    _due = math.inf  # when it comes
    _free_at = math.inf  # so we were told
    _stood = -math.inf  # when it began to stand behind a holder of this process
    _started = False  # a try was sent for it before it woke
    _looks = False  # the next try is a renewal
    _calls = 0  # bit i: node i called
    _yields = False  # others were called just before it came
    _refused = False  # the last word of a majority was: somebody holds it
    _rtt = 0.0
    _splits = 0

    def __repr__(self) -> str:
        return f"<Wait for {self.lock!r}, ticket {self.number}>"

    async def run(self) -> Lease | None:
        """The lease; None: somebody held it all the time. Raises QuorumUnavailable, ConfigError."""
        session = self._session
        session.waits.add(self)
        lease: Lease | None = None
        try:
            if self._timeout != 0 and not self.lock._kind.fair and not self.lock._kind.shared:
                while not self._heads():
                    session.check_kind(self.name, self.lock._kind)
                    turn = await self._stand()
                    if turn is False:
                        return None
                    if turn is True:
                        break
                    if turn.held:  # else it was lost in the turn in which it was passed on
                        return turn
            lease = await self._ask()
            return lease
        except BaseException:
            self.leave()
            raise
        finally:
            session.waits.discard(self)
            if self._line is not None and self._line.asker is self:
                self._line.asked(lease is not None, session.lines)

    # -- in line -------------------------------------------------------------------------------------------------

    def _heads(self) -> bool:
        """Whether there is nobody to stand behind: then it asks, and others stand behind it."""
        session, name = self._session, self.name
        line = session.lines.get(name)
        if line is None and name not in session.held:
            self._line = session.lines[name] = Line(name, self)
            if session.ceded:
                self._behind()
            return True
        return line is not None and line.broken

    def _behind(self) -> None:
        """Where others were called just now: not ahead of them, but with a ticket, behind theirs; if there is time."""
        since, now = self._session.ceded.pop(self.name, -math.inf), self._session.clock.now()
        if now - since <= QUORUM_TIMEOUT and self._give_up - now >= POLITE:
            self._yields = self._looks = True

    async def _stand(self) -> Lease | bool:
        """A lease that was passed on; True: it is our turn to ask; False: the time was up before."""
        session = self._session
        session.within(self.settings)  # what cannot be asked is told here, not to who makes us the head
        line = session.lines.setdefault(self.name, Line(self.name))
        self._turn = turn = session.loop.create_future()
        self._line, self._stood = line, session.clock.now()
        line.stand(self)
        timer = session.clock.call_at(self._give_up, self._time_up) if self._timeout else None
        try:
            passed: Lease | bool = await turn
            session.check_open()
        except BaseException:
            if turn.done() and not turn.cancelled() and isinstance(lease := turn.result(), Lease):
                lease._hand_back()
            line.leave(self, session.lines)
            raise
        finally:
            self._turn = None
            if timer is not None:
                timer.cancel()
        if passed is False:
            line.leave(self, session.lines)
            asker = line.asker
            ballot = asker.ballot if isinstance(asker, Wait) and not asker._refused else None
            if ballot is not None and ballot.sent <= self._stood:  # so nobody was seen to hold it
                raise session.quorum.unavailable(ballot, self.name)
        if line.broken:
            self._stood = -math.inf
        return passed

    @property
    def standing(self) -> bool:
        return self._turn is not None and not self._turn.done()

    def take(self, lease: Lease) -> None:
        assert self._turn is not None  # noqa: S101 - only who stands is given something
        self._turn.set_result(lease)

    def ask(self) -> None:
        self._behind()
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
        if self._looks and not self._started:  # the servers have enough to do for those who were called
            await self._idle(Look(session.clock.now() + round_trip(0.0), only=True))
        while True:
            ballot = self.ballot if self._started else self._try()
            self._started = False
            assert ballot is not None  # noqa: S101 - a try that was started has one
            outcome = ballot.outcome or await self._settled(ballot)
            if session.closed:
                session.check_open()
            lease = None
            if outcome is WON:
                top, sure = ballot.token()
                if sure:
                    lease = self.begun(ballot, top)
                else:
                    second = self.confirm(ballot, top)
                    outcome = second.outcome or await self._settled(second)
                    session.check_open()
                    if second.witnesses(top):
                        lease = self.begun(ballot, top)
                    elif outcome is UNREACHABLE:
                        ballot = second
            else:
                lease = self.grant()
            if lease is None:
                look = self._lost(ballot, outcome)
                if look is None:
                    self.leave()
                    return None
                lease = await self._idle(look)
            if lease is not None:
                self.withdraw(ballot)
                return lease
            if self._is_time_up():
                self.leave()
                return None

    def _is_time_up(self) -> bool:
        """Whether to stop without another try. Raises QuorumUnavailable where an outage is why."""
        now, pace = self._session.clock.now(), self._paces
        if pace is None or pace.outage is None:
            return self._refused and now >= self._give_up
        if now >= pace.outage_limit(now, self._give_up):
            raise pace.outage
        return False

    def _try(self) -> Ballot:
        looks, line = self._looks, self._line
        self._looks, self._calls, self._free_at = False, 0, math.inf
        behind = line is not None and line.standers is not None and line.first() is not None
        return self.send(self._refused or self._yields, looks, behind)

    def _settled(self, ballot: Ballot) -> Awaitable[Outcome]:
        """What to await for its outcome, which comes at the latest when the caller's time is up."""
        self._awaited = ballot
        waiter = ballot.waiter(self._session.loop)
        return waiter if self._give_up == math.inf else self._in_time(waiter)

    async def _in_time(self, waiter: Awaitable[Outcome]) -> Outcome:
        timer = self._session.clock.call_at(self._give_up, self._time_is_up)
        try:
            return await waiter
        finally:
            timer.cancel()

    def _time_is_up(self) -> None:
        self._give_up = min(self._give_up, self._session.clock.now())  # a timer may come early by a clock tick
        self.cut_short()

    @property
    def _pace(self) -> Pace:
        """Made where it is needed: most acquires win at once."""
        self._paces = self._paces or Pace(self._session.settings.patience)
        return self._paces

    # -- what a refusal, or silence, means -----------------------------------------------------------------------

    def _lost(self, ballot: Ballot, outcome: Outcome) -> Look | None:
        """When to ask next; None: not again. Raises where the servers are out of reach for too long."""
        now = self._session.clock.now()
        self._rtt = now - ballot.sent
        if outcome is UNREACHABLE and not ((self._refused or self._stood != -math.inf) and now >= self._give_up):
            return self._out_of_reach(ballot, now)
        self._refused = True
        self._pace.reached()
        if self._line is not None:
            self._line.broken = False
        if self._timeout == 0:
            look = self._another_slot(ballot, now) if self._splits < COLLISIONS else None
            if look is not None:
                self.undo(ballot)
            return look
        if now >= self._give_up:
            return None
        look = self._refused_alone(ballot, now) if ballot.nodes == 1 else self._refused_by_many(ballot, now)
        return Look(min(look.at, self._give_up), look.only)

    def _out_of_reach(self, ballot: Ballot, now: float) -> Look:
        error = self._quorum.unavailable(ballot, self.name, self._pace.reasons)
        self._pace.reasons.update(ballot.errors())
        self.leave()
        self._refused, self._yields, self._stood = False, False, -math.inf
        if self._line is not None:
            self._line.dissolve()
        again = None if self._timeout == 0 else self._pace.after_outage(now, self._give_up)
        if again is None or isinstance(error, ConfigError):
            raise error
        self._pace.outage = error
        return again

    def _refused_alone(self, ballot: Ballot, now: float) -> Look:
        vote = ballot.votes[0]
        if not isinstance(vote, Refused):  # undone, or won too late
            self.spend()
            return self._pace.after_refusal(now)
        if vote.rank < 0:
            if ballot.op.plain and self._quorum.listens:  # a ticket needs the script, which shall not know this id
                self.spend()
                return Look(now)
            return self._pace.after_refusal(now, math.inf if vote.left is None else vote.left)
        self.stands(vote.order)
        return next_look(now, ballot.sent, self.settings.lease, vote.rank, vote.left, hears(vote.holder))

    def _refused_by_many(self, ballot: Ballot, now: float) -> Look:
        ticketed = ballot.op.queueing.number
        if ballot.op.verb is ACQUIRE:
            self.undo(ballot)
        if (another := self._another_slot(ballot, now)) is not None:
            return another
        if not self._quorum.listens:
            return self._pace.after_refusal(now, soonest(ballot.denials()))
        if not ticketed:  # now with one
            return Look(now)
        if self.number == 1:
            self.placed(ballot.orders())
        rank = ballot.rank()
        free = ballot.free() > ballot.nodes // 2
        if self.lock._kind.shared and is_held(ballot.denials(), ballot.nodes):
            self._splits = 0
            return self.obstacles().look(ballot, now, self._rtt, rank)
        if (holder := ballot.holder()) is not None:
            self._splits = 0
            return next_look(now, ballot.sent, self.settings.lease, rank, holder.left, hears(holder.holder))
        if self.lock._kind.in_turn(ballot.op.id) and rank > 0 and free:
            return next_look(now, ballot.sent, self.settings.lease, rank, None, ours=True)
        if ballot.op.verb is WAIT and free:
            return Look(now) if rank == 0 else after_call(now, self._rtt)  # who is before us was called
        self._splits += 1
        return after_split(now, self._rtt, rank, self._splits)

    def _another_slot(self, ballot: Ballot, now: float) -> Look | None:
        """When to try again for a slot that may be free, of a kind that has them; None: there is none."""
        if ballot.nodes == 1 or not self.lock._kind.slots or not self.choose(ballot):
            return None
        self._splits += 1
        return Look(now) if self._splits == 1 else after_split(now, self._rtt, 0, self._splits)

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _idle(self, look: Look) -> Lease | None:
        """Wait until it is time to ask again. A lease: that is not needed any more."""
        session, (at, self._looks) = self._session, look
        if self._free_at < at:
            at, self._looks = self._free_at, False
        if self._calls:
            at = min(at, self._after_calls(session.clock.now()))
        if at > session.clock.now() and not self.granted:
            self._waker = session.loop.create_future()
            self._arm(at)
            try:
                await self._waker
            finally:
                self._timer.cancel()
                self._waker = self._timer = None
            session.check_open()
        return self.grant()

    def _arm(self, at: float) -> None:
        self._due = at
        if self._waker is not None:
            if self._timer is not None:
                self._timer.cancel()
            waker = self._waker
            self._timer = self._session.clock.call_at(at, lambda: wake(waker))

    def _after_calls(self, now: float) -> float:
        """When to try, some nodes having called: at once after a majority, else a round trip later."""
        self._looks = False
        if self._calls.bit_count() > len(self._quorum.nodes) // 2:
            return now
        return now + round_trip(self._rtt)

    def called(self, index: int, notice: Notice) -> None:
        """A node calls: our ticket became the hold (fence), the name is free, or will be so in `left` seconds."""
        self.goes_on = self.goes_on or notice.continue_batch
        if notice.fence:
            self.told(notice.number, notice.fence)
            if self._waker is not None:
                wake(self._waker)
            return
        if notice.left:
            self._free_at = self._session.clock.now() + notice.left
            if self._waker is not None and self._free_at < self._due:
                self._looks = False
                self._arm(self._free_at)
            return
        first = not self._calls
        self._calls |= 1 << index
        now = self._session.clock.now()
        at = self._after_calls(now)
        if at <= now and self._waker is not None:
            if not self._started and not self._session.closed:
                self._try()  # now: the task wakes a turn later
                self._started = True
            wake(self._waker)
        elif first:
            self._arm(min(at, self._give_up))

    def renew_soon(self) -> None:
        """A node is connected again: send the ticket anew, the fleet not all at once."""
        soon = min(self._session.clock.now() + random.uniform(0.0, 0.05), self._give_up)  # noqa: S311 - jitter
        if soon < self._due:
            self._looks = True
            self._arm(soon)

    def interrupt(self) -> None:
        """The client closes."""
        self.cut_short()
        if self._waker is not None:
            wake(self._waker)
        self._time_up()
