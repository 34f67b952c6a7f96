"""Acquisition: one acquire, from its first attempt until it has a tenure or gives up. It is the one loop that waits.

The rules:

1. If it is cancelled at any point, all that it sent is undone or has become a tenure (`attempt.py`, `ticket.py`).
2. "Held by another owner" and "out of reach" never mix. After a refusal by a majority it waits for the holder, asks
   again shortly before its time ends, and then returns the refusal. Without a majority it tries again, with back-off
   and, unless the node keeps it, without a ticket. At the end of its time, or patience, it raises QuorumUnavailable.
3. It does not poll while a notice can come. A refused attempt leaves a ticket, and the servers notify its owner. The
   waiter renews its ticket each time a third of the lease has passed. It also asks at the end of the holder's lease,
   since a dead holder notifies nobody: the first few waiters at once, each later one a little later. The first few also
   poll while another program holds the name, since no notice comes when that hold ends.
4. A single node serves a ticket by granting it: the notice says that the ticket with that number became the hold.
5. Over N nodes the notice grants nothing. The waiter tries when a majority has sent one, or a round trip after the
   first. If it is refused, the votes name the holders. It waits for one holder on a majority, or for several that hold
   the name together (`obstacles.py`). Split votes are undone, and it tries again after a pause, which is shortest for
   the first in the queue. After a release that notified remote waiters, new local callers enqueue first, so that they
   do not overtake them.
6. Tasks of one process wait in a local queue, and only the first of them asks (`local_queue.py`).

`transitions.py` decides what an event means; this module does the I/O.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from asynclock.acquire.attempt import Attempt, Pause, outcome_by
from asynclock.acquire.backoff import MIN_TO_YIELD, Plan, confirm_from, round_trip
from asynclock.acquire.causes import NoLease
from asynclock.acquire.local_queue import LocalWaiter, Turn
from asynclock.acquire.planner import Planner
from asynclock.acquire.tenure import Tenure
from asynclock.acquire.transitions import Next, State, after_notice
from asynclock.quorum.ballot import UNREACHABLE, WON
from asynclock.rules.model import ACQUIRE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from asynclock._errors import LockError
    from asynclock.acquire.local_queue import LocalQueue
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Terms
    from asynclock.quorum.ballot import Ballot, Outcome
    from asynclock.stores.port import Notice


def acquire(session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | NoLease]:
    """A tenure; or the last refusal, if another owner held the name for the whole timeout. Raises QuorumUnavailable,
    ConfigError."""
    return Acquisition(session, terms).run()


class Acquisition:
    """See the module."""

    # Most acquisitions win at once: what they do not need is not set for each of them.
    state = State.ASKING
    _attempt: Attempt | None = None
    _round: Ballot | None = None  # the last round that was sent
    _sent_ahead = False  # a round was sent for it before its task woke
    _queue: LocalQueue | None = None
    _waiter: LocalWaiter | None = None  # its place in that queue
    _pause: Pause | None = None
    planner: Planner | None = None
    _probes = False  # the next round renews the ticket only
    _notified = 0  # bit i: node i has sent a notice since the last round was sent
    _free_at = math.inf  # when the name will be free, by a notice
    # When the name was held last, as the task knew that asked before it, or held it. Reset by an outage.
    _held_at = -math.inf
    # Its time was up before it, or the task that asks for it, could ask for the last time, as the loop was blocked. So
    # it asks once more, and waits for the answer for as long as a last question may take. After that it gives up. Never
    # reset before its end.
    asked_late = False
    _yields = False  # remote waiters were notified just before it began
    _continues_batch = False  # its ticket was the last that one step of the server served

    def __init__(self, session: Session, terms: Terms) -> None:
        self.terms = terms
        self._session = session
        self._give_up = session.clock.now() + terms.timeout if terms.timeout else math.inf

    def __repr__(self) -> str:
        return f"<Acquisition of {self.terms.name!r}, {self.state.value}>"

    async def run(self) -> Tenure | NoLease:
        """See `acquire`."""
        session, kind = self._session, self.terms.kind
        session.under_way.add(self)
        result: Tenure | NoLease | None = None
        try:
            if self.terms.timeout != 0 and not kind.fair and not kind.shared and not self._is_first():
                result = await self._queue_locally()
            if result is None and self._probes and not self._sent_ahead:  # notified waiters reach the servers first
                await self._idle(Plan(session.clock.now() + round_trip(0.0), probe=True))
            while result is None:
                attempt = self._attempt if self._attempt is not None and self._sent_ahead else self._try()
                self._sent_ahead = False
                ballot: Ballot = attempt.ballot  # type: ignore[assignment]  # it has sent a round
                outcome = ballot.outcome or await self._outcome(ballot)
                if session.closed:
                    session.check_open()
                result = attempt.tenure(ballot) if outcome is WON else None
                if result is None:
                    result = await self._after_round(attempt, ballot, outcome)
                if result.__class__ is Tenure:
                    self._end_asking(attempt, ballot)
        except BaseException:
            self._leave()
            raise
        finally:
            session.under_way.discard(self)
            if self._queue is None:
                session.local_queues.end_alone(self)
            else:
                if self._queue.asker is self:
                    self._queue.end_asking(result.__class__ is Tenure)
                self._queue = None  # it may keep the error that is raised here, whose traceback refers to this object
            self._attempt = None  # it refers to this object: a cycle would stay for the collector
            if self._waiter is not None:
                self._waiter = None  # so does this one
        return result

    # -- in the local queue --------------------------------------------------------------------------------------

    def _is_first(self) -> bool:
        """Whether no task of this process is before it. Then it asks, and later tasks wait behind it."""
        session, name = self._session, self.terms.name
        queue = session.local_queues.get(name)
        if queue is None and session.holds.get(name) is None and session.local_queues.begin_alone(self):
            self._queue = None
            if len(session.quorum.nodes) > 1:
                self._yield_to_remote()
            return True
        return False

    def lead(self, queue: LocalQueue) -> None:
        """It asked alone. Another task has come, and waits behind it in this queue."""
        self._queue = queue

    def _yield_to_remote(self) -> None:
        """If remote waiters were notified a moment ago, enqueue behind them, unless the time is too short for that."""
        if self._session.yielded.take(self.terms.name) and self._give_up - self._session.clock.now() >= MIN_TO_YIELD:
            self._yields = self._probes = True

    async def _queue_locally(self) -> Tenure | NoLease | None:
        """Wait in the local queue: a tenure that was passed on; or a refusal, as its time is up. None: it asks now."""
        session, name = self._session, self.terms.name
        # Validate now, so that ConfigError is raised in this task and not in the one that serves the queue.
        session.within(self.terms.settings)
        while True:
            session.check_kind(name, self.terms.kind)
            queue = self._queue = session.local_queues.of(name)
            waiter = self._waiter = LocalWaiter(self, queue, session)
            self.state = State.QUEUED_LOCALLY
            self.terms.wait()
            try:
                given = await waiter.wait(self._give_up)
            finally:
                self.state = State.ASKING
            self._held_at = queue.answered_at if queue.outage is None else -math.inf
            if given is Turn.TIME_UP:
                if waiter.knows_enough(again=not self.asked_late):
                    return self._refusal()
                self._give_up, self.asked_late = session.clock.now() + self._give_up - waiter.confirm_from, True
                continue
            if given is not Turn.ASK and given.held:
                return given
            # A tenure may be lost in the turn of the loop in which it was passed on. Then it waits or asks again.
            if given is Turn.ASK or self._is_first():
                return None

    @property
    def unanswered_round(self) -> Ballot | None:
        """The round under way."""
        return self._round if self._round is not None and self._round.outcome is None else None

    def confirm(self, at: float) -> None:
        """A task behind it has to know whether the name is held still: renew the ticket at that time."""
        pause = self._pause
        if pause is not None and pause.waits and at < pause.until and not (self.planner and self.planner.interrupted):
            self._probes = True
            pause.move(at)

    def ask_ahead(self, outage: LockError | None, patience_ends: float) -> None:
        """Its turn has come: send the round now, before its task wakes. `outage`: why nobody answered the last one."""
        if outage is not None:
            self.planner = Planner(self._session, self.terms, self._session.clock.now())
            self.planner.join_outage(outage, patience_ends)
        self._yield_to_remote()
        self._try()
        self._sent_ahead = True

    # -- asking --------------------------------------------------------------------------------------------------

    async def _after_round(self, attempt: Attempt, ballot: Ballot, outcome: Outcome) -> Tenure | NoLease | None:
        """What follows a round that did not bring a tenure at once. None: the next round."""
        if outcome is WON:
            hold, ballot, outcome = await attempt.second_round(ballot, self._outcome)
            if hold is not None:
                return hold.begin(self.terms)
        elif (tenure := self._granted()) is not None:
            return tenure
        plan = self._plan(ballot, outcome)
        if plan is not None:
            tenure = await self._idle(plan)
            if tenure is not None or not self._is_time_up():
                return tenure
        self._leave()
        return self._refusal(ballot)

    def _refusal(self, ballot: Ballot | None = None) -> NoLease:
        """Its time is up: what is known of the holder. `ballot`: its last round; None: it waited in the local queue,
        where the task that asks may know."""
        now, timeout, planner = self._session.clock.now(), self.terms.timeout or 0.0, self.planner
        waited = now - (self._give_up - timeout if timeout or planner is None else planner.began)
        if ballot is None and self._queue is not None:
            planner = self._queue.asker.planner if self._queue.asker is not None else None
        return planner.no_lease(now, waited, ballot) if planner is not None else NoLease(waited=waited)

    def _end_asking(self, attempt: Attempt, ballot: Ballot) -> None:
        """It has the tenure."""
        if attempt.ticket is not None:
            attempt.withdraw_ticket(attempt.ticket, ballot)
        if self._continues_batch:
            attempt.continue_batch()

    def _is_time_up(self) -> bool:
        """Whether to stop without another try. Raises QuorumUnavailable if an outage is the reason."""
        now, planner = self._session.clock.now(), self.planner
        if planner is None:
            return False
        planner.check_outage(now, self._give_up)
        if planner.refused is not None and now >= self._give_up:
            self.asked_late = not self.asked_late and planner.answered_at < planner.confirm_from(self._give_up)
            return not self.asked_late
        return False

    def _try(self) -> Attempt:
        """Send a round: ask for the hold; or, where the next round is a probe, renew the ticket."""
        attempt = self._attempt
        if attempt is None:
            attempt = self._attempt = Attempt(self._session, self.terms, self)
        queue, planner, probe = self._queue, self.planner, self._probes
        refused, slot = self._yields, None
        if planner is not None:  # not the first round
            refused, slot = refused or planner.refused is not None, planner.take_slot()
            self._notified, self._free_at, self.state = 0, math.inf, State.ASKING
        self._probes = False
        behind = queue.waiting if queue is not None else 0
        self._round = attempt.send(self._give_up, refused, probe, behind, slot)
        return attempt

    def _outcome(self, ballot: Ballot) -> Awaitable[Outcome]:
        """An awaitable of the outcome. It ends at the latest when the caller's time is up, or the patience."""
        self._round = ballot
        patience_ends = math.inf if self.planner is None else self.planner.patience_ends
        if patience_ends < self._give_up:
            return outcome_by(ballot, self._session, patience_ends, ballot.expire)
        if self._give_up == math.inf:
            if ballot.deferred is None or self.terms.timeout is None:
                return ballot.waiter(self._session.loop)
            return outcome_by(ballot, self._session, ballot.deadline, ballot.expire_deferred)
        late = ballot.sent - confirm_from(0.0, self.terms.timeout, ballot.deadline - ballot.sent)
        return outcome_by(ballot, self._session, late if self.asked_late else self._give_up, self._time_up)

    def _time_up(self) -> None:
        self._give_up = min(self._give_up, self._session.clock.now())  # a timer may come early by a clock tick
        if self._round is not None:
            self._round.expire()

    def _plan(self, ballot: Ballot, outcome: Outcome) -> Plan | None:
        """When to ask next; None: not again. Raises QuorumUnavailable or ConfigError if an outage lasts too long."""
        now = self._session.clock.now()
        planner = self.planner = self.planner or Planner(self._session, self.terms, ballot.sent)
        held = not planner.in_outage and max(planner.answered_at, self._held_at) >= planner.confirm_from(self._give_up)
        if outcome is UNREACHABLE and not ballot.denied and not (held and now >= self._give_up):
            return self._plan_without_majority(planner, ballot, now)
        step = planner.after_refusal(ballot, now, self._give_up)
        if self._queue is not None and not planner.in_outage:
            self._queue.answered(max(planner.answered_at, self._held_at), planner.rtt)
        if step is Next.STOP:
            return None
        if self._attempt is not None:
            if ballot.nodes > 1 and ballot.op.verb is ACQUIRE:
                self._attempt.undo(ballot, keep_ticket=True)
            self._attempt.set_queue_order(ballot)
            if step in (Next.TRY_WITH_NEW_ID, Next.POLL_WITH_NEW_ID):
                self._attempt.use_new_id()
        plan = planner.plan(step, ballot, now)
        return Plan(min(plan.at, self._give_up), plan.probe)

    def _plan_without_majority(self, planner: Planner, ballot: Ballot, now: float) -> Plan:
        """The same, after a round that no majority answered."""
        session, attempt, error = self._session, self._attempt, planner.error(ballot)
        if planner.may_be_interrupted(now) and ballot.may_be_reached_soon:
            if attempt is None or attempt.ticket is None:
                self._leave()
            elif ballot.nodes > 1 and ballot.op.verb is ACQUIRE:
                attempt.undo(ballot, keep_ticket=True)
            return planner.after_interruption(error, now, self._give_up)
        session.judge_again()
        if not session.quorum.keeps_tickets or attempt is None or attempt.ticket is None:
            self._leave()
        self._yields, self._held_at = False, -math.inf
        if session.local_queues.is_alone(self):  # later tasks learn of the outage from a queue
            session.local_queues.of(self.terms.name)
        if self._queue is not None:
            self._queue.begin_outage(error, ballot.sent)
        try:
            return planner.after_outage(error, ballot, now, self._give_up)
        finally:  # it may raise the error, whose traceback refers to this frame: a cycle would stay for the collector
            del error

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _idle(self, plan: Plan) -> Tenure | None:
        """Wait until it is time to ask again. A tenure: a notice has granted one, so no question is needed."""
        session, (at, self._probes) = self._session, plan
        ticket = self._attempt.ticket if self._attempt is not None else None
        if self._free_at < at:
            at, self._probes = self._free_at, False
        if self._notified:
            at, self._probes = min(at, self._after_notices()), False
        if self.planner is not None and (by := self.planner.must_confirm_by(self._give_up)) < at:
            at, self._probes = by, True
        if at > session.clock.now() and not (ticket is not None and ticket.granted):
            self._pause = self._pause or Pause(session)
            self.terms.wait()
            self.state = State.BACKING_OFF if ticket is None else State.WAITING
            try:
                await self._pause.wait(at)
            finally:
                self.state = State.ASKING
            session.check_open()
        return self._granted()

    def _after_notices(self) -> float:
        """When to try after notices of some nodes: at once after a majority, else a round trip later."""
        now = self._session.clock.now()
        return now if self._majority_notified else now + round_trip(self.planner.rtt if self.planner else 0.0)

    @property
    def _majority_notified(self) -> bool:
        return self._notified.bit_count() > len(self._session.quorum.nodes) // 2

    def notified(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice: the ticket became the hold (`fence`), or the name is free, or it will be
        (`left`)."""
        session, pause, first = self._session, self._pause, not self._notified
        self._continues_batch = self._continues_batch or notice.continue_batch
        free_now = notice.left <= 0
        if notice.fence:
            if self._attempt is not None and self._attempt.ticket is not None:
                self._attempt.ticket.grant(notice.number, notice.fence)
        elif free_now:
            self._notified |= 1 << index
        else:
            self._free_at = session.clock.now() + notice.left
        if pause is None:
            return
        match after_notice(self.state, first, self._majority_notified, notice.fence > 0, free_now):
            case Next.TAKE_GRANT:
                pause.end()
            case Next.TRY:
                self._probes = False
                if not session.closed:
                    self._try()  # now, since the task wakes only in the next turn of the loop
                    self._sent_ahead = True
                pause.end()
            case Next.TRY_WHEN_FREE if self._free_at < pause.until:
                self._probes = False
                pause.move(self._free_at)
            case Next.TRY_AFTER_ROUND_TRIP:
                self._probes = False
                pause.move(min(self._after_notices(), self._give_up))

    def ask_soon(self, within: float, *, probe: bool) -> None:
        """A node is connected again: ask within so many seconds, with jitter. `probe`: renew the ticket."""
        pause = self._pause
        soon = min(self._session.clock.now() + random.uniform(0.0, within), self._give_up)  # noqa: S311 - jitter
        if pause is not None and pause.waits and soon < pause.until:
            self._probes = probe
            pause.move(soon)

    def interrupt(self) -> None:
        """The client closes: the task wakes, and finds that out."""
        if self._round is not None:
            self._round.expire()
        if self._pause is not None:
            self._pause.end()
        if self._waiter is not None:
            self._waiter.notify(Turn.TIME_UP)

    def _granted(self) -> Tenure | None:
        """The tenure of a ticket that became the hold."""
        hold = self._attempt.hold_granted() if self._attempt is not None else None
        return None if hold is None else hold.begin(self.terms)

    def _leave(self) -> None:
        """Undo its round and withdraw its ticket. A second call does nothing."""
        if self._attempt is not None:
            self._attempt.leave()
