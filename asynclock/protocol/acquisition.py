"""Acquisition: one acquire, from its first attempt until it has a tenure or gives up.

It is a machine (`machine.py`). The rules:

1. If it is cancelled at any point, each request that it sent is undone, or its hold is given back (`attempt.py`).
2. "Held by another owner" and "out of reach" never mix. After a refusal by a majority it waits for the holder, asks
   again shortly before its time ends, and then returns the refusal. Without a majority it tries again, with back-off
   and, unless the node keeps it, without a ticket. At the end of its time, or patience, it raises QuorumUnavailable.
3. It does not poll while a notice can come. A refused attempt leaves a ticket, and the servers notify its owner. The
   waiter renews its ticket each time a third of the lease has passed. It also asks at the end of the holder's lease,
   since a dead holder notifies nobody. The first few waiters ask at once, and each later waiter a little after the one
   before it. The first few also poll while another program holds the name, since no notice comes when that hold ends.
4. A single node serves a ticket by granting it: the notice says that the ticket with that number became the hold.
5. Over N nodes the notice grants nothing. The waiter tries when a majority has sent one, or a round trip after the
   first. If it is refused, the votes name the holders. It waits for one holder on a majority, or for several that hold
   the name together (`Obstacles`). Split votes are undone, and it tries again after a pause, which is shortest for
   the first in the queue. After a release that notified remote waiters, new local callers enqueue first, so that they
   do not overtake them.
6. Tasks of one process wait in a local queue, and only the first of them asks (`local_queue.py`).

`planner.py` says what a refusal and a notice mean, and when to ask next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._errors import QuorumUnavailable, SelfDeadlock, brief
from asynclock.protocol.attempt import Attempt, Wake
from asynclock.protocol.causes import NoLease
from asynclock.protocol.core import uniform
from asynclock.protocol.local_queue import LocalWaiter
from asynclock.protocol.machine import Claim
from asynclock.protocol.planner import MIN_TO_YIELD, Next, Plan, Planner, after_notice, confirm_from, round_trip
from asynclock.protocol.states import (
    DONE,
    Asking,
    BackingOff,
    Began,
    Confirming,
    OwnerEntering,
    Pausing,
    Queued,
    Waiting,
)
from asynclock.quorum.ballot import REFUSED, UNREACHABLE, WON
from asynclock.rules.model import ACQUIRE, parts_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from asynclock._errors import LockError
    from asynclock.protocol.hold import Hold
    from asynclock.protocol.local_queue import LocalQueue
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot, Outcome
    from asynclock.rules.model import Part
    from asynclock.stores.port import Notice


class Acquisition(Claim):
    """See the module. The events that only an acquisition has are `turn_to_ask`, `passed` and `time_up_in_queue` of the
    local queue, `owner_entered`, `owner_time_up`, and `notified`."""

    # Most acquisitions win at once: what they do not need is not set for each of them.
    _attempt: Attempt | None = None
    _queue: LocalQueue | None = None
    planner: Planner | None = None
    _notified = 0  # bit i: node i has sent a notice since the last round was sent
    _free_at = math.inf  # when the name will be free, by a notice
    # The last time that the previous asker or holder in this process knew the name to be held. Reset by an outage.
    _held_at = -math.inf
    # The loop was blocked, and the time was up before the last question was sent, by itself or by the task that asks
    # for it. So it asks once more, and waits for the answer for as long as a last question may take. Then it gives up.
    # Never reset before its end.
    asked_late = False
    _yields = False  # remote waiters were notified just before it began
    _continues_batch = False  # its ticket was the last that one step of the server served
    # Its terms, and when its time is up, while it tries once beside the holds of its task.
    _full: tuple[Terms, float] | None = None

    # -- its begin and its end -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask, or wait for other tasks of this process. Raises ConfigError, SelfDeadlock."""
        self._machine.under_way[self] = None
        if self.terms.owner is None or self._begin_entry(self.terms.owner):
            self._begin()

    def again(self) -> Acquisition:
        terms, give_up = self._full or (self.terms, self._give_up)
        acquisition = Acquisition(self._machine, terms, give_up)
        acquisition.asked_late = self._core.clock.now() >= give_up
        return acquisition

    def _begin(self) -> None:
        terms = self.terms
        kind = terms.kind
        may_hold = kind.parts or self._machine.holds.get(terms.name) is not None
        if may_hold and terms.timeout != 0 and self._begin_beside():
            return
        if terms.timeout != 0 and not kind.fair and not kind.shared and not self._is_first():
            self._core.within(terms.settings)  # raises in this task, and not in the one that serves the queue
            self._queue_locally()
        elif self._yields:  # notified waiters reach the servers first
            self._pause(Plan(self._core.clock.now() + round_trip(0.0), probe=True), None)
        else:
            self._ask(probe=False)

    def fail(self, error: BaseException) -> None:
        """Give up with that error."""
        if self._full is not None and isinstance(error, QuorumUnavailable):
            self._begin_full(self._full)
        else:
            super().fail(error)

    def passed(self, hold: Hold) -> None:
        """A task of this process has passed the hold on."""
        self._succeed(hold.begin(self.terms))

    def _win(self, hold: Hold, ballot: Ballot) -> None:
        """The hold is there. `ballot` is the last round."""
        tenure, attempt = hold.begin(self.terms), self._attempt
        if attempt is not None and attempt.ticket is not None:
            attempt.withdraw_ticket(attempt.ticket, ballot)
        if attempt is not None and self._continues_batch:
            attempt.continue_batch()
        self._succeed(tenure)

    def _refuse(self, ballot: Ballot | None = None) -> None:
        """Its time is up: what is known of the holder. `ballot`: its last round; None: it waited in the local queue,
        where the task that asks may know."""
        if self._full is not None:
            self._begin_full(self._full)
            return
        now, timeout, planner = self._core.clock.now(), self.terms.timeout or 0.0, self.planner
        waited = now - (self._give_up - timeout if timeout or planner is None else planner.began)
        if ballot is None and self._queue is not None:
            planner = self._queue.asker.planner if self._queue.asker is not None else None
        self._end_without(planner.no_lease(now, waited, ballot) if planner is not None else NoLease(waited=waited))

    def _finish(self, has_it: bool) -> None:
        """It asks no more: the next task of this process may. Its future is completed before, since a KeyboardInterrupt
        may end the turn of the next one."""
        machine, queue = self._machine, self._queue
        self._enter(DONE)
        machine.under_way.pop(self, None)
        if self.terms.owner is not None:
            machine.entries.end(self)
        self._attempt = self._queue = None  # they refer to this object, or to an error whose traceback does: a cycle
        if queue is None:
            machine.queues.end_alone(self)
        elif queue.asker is self:
            queue.end_asking(has_it)

    def _leave(self) -> None:
        """Undo its round and withdraw its ticket. A second call does nothing."""
        if self._attempt is not None:
            self._attempt.leave()

    # -- other holds of the same owner -----------------------------------------------------------------------------

    def _begin_entry(self, owner: Hashable) -> bool:
        """Of a reentrant lock. True: no task of its owner has the hold or asks for it, so this one asks."""
        machine, name = self._machine, self.terms.name
        if (entry := machine.entries.get(name, owner)) is not None:
            if self.terms.timeout == 0:
                self._end_without(NoLease())
            else:
                self._enter(OwnerEntering(entry, self))
                entry.join(self, self._core, self._give_up)
            return False
        held = [each for each in machine.holds.tenures(name) if each.terms.owner == owner and each.held]
        if held:
            self._succeed(held[-1].hold.enter_again(held[-1], self.terms))
            return False
        machine.entries.begin(self)
        return True

    def owner_entered(self) -> None:
        """The task of its owner that asked has ended."""
        try:
            if isinstance(self.state, OwnerEntering) and self._begin_entry(self.terms.owner):
                self._begin()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def owner_time_up(self) -> None:
        """Its time is up, and another task of its owner still asks."""
        if isinstance(self.state, OwnerEntering):
            self._end_without(NoLease(waited=self.terms.timeout or 0.0))

    def _begin_beside(self) -> bool:
        """The task may hold some of these names. Then it may get one more hold beside its own, if several ids may hold
        them; but it must not wait for that, since it would wait for itself. So it tries once. Raises SelfDeadlock."""
        mine = self._held_by_task()
        if any(mine.values()) and all(part.kind.shared for part, count in mine.items() if count):
            self._full, self.terms, self._give_up = (self.terms, self._give_up), self.terms.one_try(), math.inf
            self._ask(probe=False)
            return True
        self._check_deadlock(mine)
        return False

    def _begin_full(self, full: tuple[Terms, float]) -> None:
        """The one try was in vain. If the task would not wait for itself, it asks and waits."""
        (self.terms, self._give_up), self._full = full, None
        try:
            self._leave()
            self._attempt = self.planner = None
            self._notified, self._free_at, self._continues_batch = 0, math.inf, False
            self.asked_late = self._core.clock.now() >= self._give_up  # the one try took all of its time
            self._check_deadlock(self._held_by_task())
            self._ask(probe=False)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def _held_by_task(self) -> dict[Part, int]:
        """The number of holds of its task, for each name."""
        task, holds = self.terms.task, self._machine.holds
        return {
            part: sum(each.task == task and each.held for each in holds.tenures(part.name))  # equal: one thread's calls
            for part in parts_of(self.terms)
        }

    def _check_deadlock(self, mine: Mapping[Part, int]) -> None:
        for part, count in mine.items():
            if count >= part.kind.max_per_task:
                raise SelfDeadlock(
                    f"this {self.terms.owner_is} holds {brief(part.name)} already and would wait for itself: "
                    f"{self.terms.kind.deadlock_hint}",
                    name=part.name,
                )

    # -- in the local queue --------------------------------------------------------------------------------------

    def _is_first(self) -> bool:
        """Whether no task of this process is before it. Then it asks, and later tasks wait behind it."""
        machine, name = self._machine, self.terms.name
        queue = machine.queues.get(name)
        if queue is None and machine.holds.get(name) is None and machine.queues.begin_alone(self):
            self._queue = None
            if len(self._core.quorum.nodes) > 1:
                self._yield_to_remote()
            return True
        return False

    def followed_by(self, queue: LocalQueue) -> None:
        """It asked alone. Another task has come, and waits behind it in this queue."""
        self._queue = queue

    def _yield_to_remote(self) -> None:
        """If remote waiters were notified a moment ago, enqueue behind them, unless the time is too short for that."""
        if self._machine.yielded.take(self.terms.name) and self._give_up - self._core.clock.now() >= MIN_TO_YIELD:
            self._yields = True

    def _queue_locally(self) -> None:
        """Wait in the local queue. Raises ConfigError."""
        machine, name = self._machine, self.terms.name
        machine.check_kind(name, self.terms.kind)
        queue = self._queue = machine.queues.of(name)
        self.terms.mark_waiting()
        self._enter(Queued(LocalWaiter(self, queue, self._core, self._give_up)))

    def turn_to_ask(self, outage: LockError | None, patience_ends: float) -> None:
        """It is the first of its queue: ask. `outage`: why nobody answered the last one."""
        self._learn_from_queue()
        try:
            if outage is not None:
                self.planner = Planner(self._core, self.terms, self._core.clock.now())
                self.planner.join_outage(outage, patience_ends)
            self._yield_to_remote()
            self._ask(probe=self._yields)
        except BaseException as error:  # fail in the next turn: now would start the next waiter inside this call
            self._core.later(self.fail, error)
            if not isinstance(error, Exception):
                raise

    def time_up_in_queue(self, waiter: LocalWaiter) -> None:
        """Its time is up, or the answer has come that it waited for."""
        self._learn_from_queue()
        try:
            if waiter.check_knows_enough(again=not self.asked_late):
                self._refuse()
            else:
                self._give_up, self.asked_late = self._core.clock.now() + self._give_up - waiter.confirm_from, True
                self._queue_locally()
        except Exception as error:
            self.fail(error)

    def _learn_from_queue(self) -> None:
        queue = self._queue
        self._held_at = queue.answered_at if queue is not None and queue.outage is None else -math.inf

    @property
    def unanswered_round(self) -> Ballot | None:
        """The round under way."""
        return self.state.ballot if isinstance(self.state, Asking) and self.state.ballot.outcome is None else None

    def confirm(self, at: float) -> None:
        """A task behind it has to know whether the name is held still: renew the ticket at that time."""
        state = self.state
        if isinstance(state, Pausing) and at < state.until and not (self.planner and self.planner.interrupted):
            self._move(state, at, probe=True)

    # -- asking --------------------------------------------------------------------------------------------------

    def _ask(self, *, probe: bool) -> None:
        """Send a round: ask for the hold, or with `probe` renew the ticket."""
        attempt, planner, queue = self._attempt, self.planner, self._queue
        if attempt is None:
            attempt = self._attempt = Attempt(self._machine.holds, self._machine.tickets, self.terms, self)
        refused, slot = self._yields, None
        if planner is not None:  # not the first round
            refused, slot = refused or planner.refused is not None, planner.take_slot()
            self._notified, self._free_at = 0, math.inf
        behind = queue.waiting if queue is not None else 0
        ballot = attempt.send(self._give_up, refused, probe, behind, slot)
        self._await(Asking(ballot))

    def _await(self, state: Asking) -> None:
        """Go on with the outcome of its round, which comes at the latest when the caller's time is up, or the
        patience."""
        self._enter(state)
        state.ballot.when_settled(self._settled)
        ballot, clock, timeout = state.ballot, self._core.clock, self.terms.timeout
        patience_ends = math.inf if self.planner is None else self.planner.patience_ends
        if patience_ends < self._give_up:
            state.timer = clock.call_at(patience_ends, self._expire)
        elif self._give_up < math.inf:
            late = ballot.sent - confirm_from(0.0, timeout, ballot.deadline - ballot.sent)
            state.timer = clock.call_at(late if self.asked_late else self._give_up, self._time_up)
        elif ballot.deferred is not None and timeout is not None:
            state.timer = clock.call_at(ballot.deadline, self._expire_deferred)

    def _time_up(self) -> None:
        self._give_up = min(self._give_up, self._core.clock.now())  # a timer may come early by a clock tick
        self._expire()

    def _expire_deferred(self) -> None:
        """See `Ballot.deferred`: a round that has left the queue of its node keeps its time since then."""
        if (ballot := self.unanswered_round) is not None and ballot.deferred is not None:
            self._expire()

    def _expire(self) -> None:
        """Wait for the round no longer. What comes in this turn of the loop still counts."""
        if (ballot := self.unanswered_round) is not None:
            ballot.when_settled(None)
            ballot.expire()
            self._core.later(self._settled, ballot)

    def _settled(self, ballot: Ballot) -> None:
        """A round has its outcome."""
        state, attempt = self.state, self._attempt
        if attempt is None or not isinstance(state, Asking) or state.ballot is not ballot:
            return  # it gave up before
        state.end()
        try:
            if isinstance(state, Confirming):
                hold, ballot, outcome = attempt.confirmed(state.won, ballot)
                self._after_round(attempt, hold, ballot, outcome, state.won)
                return
            attempt.on_reply(ballot)
            hold, outcome = None, ballot.outcome or REFUSED
            if outcome is WON:
                top, sure = ballot.token()
                if not sure:
                    self._await(Confirming(attempt.ask_to_raise(ballot), ballot))
                    return
                hold, outcome = attempt.hold(ballot, top), REFUSED
            else:
                hold = attempt.hold_granted()
            self._after_round(attempt, hold, ballot, outcome, ballot)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def _after_round(self, attempt: Attempt, hold: Hold | None, ballot: Ballot, outcome: Outcome, won: Ballot) -> None:
        """What follows a round: its hold, or a pause before the next one."""
        if hold is not None:
            self._win(hold, won)
        elif (plan := self._plan(attempt, ballot, outcome)) is not None:
            self._pause(plan, ballot)
        else:
            self._refuse(ballot)

    def _plan(self, attempt: Attempt, ballot: Ballot, outcome: Outcome) -> Plan | None:
        """When to ask next; None: not again. Raises QuorumUnavailable or ConfigError if an outage lasts too long."""
        now = self._core.clock.now()
        planner = self.planner = self.planner or Planner(self._core, self.terms, ballot.sent)
        held = not planner.in_outage and max(planner.answered_at, self._held_at) >= planner.confirm_from(self._give_up)
        if outcome is UNREACHABLE and not ballot.denied and not (held and now >= self._give_up):
            return self._plan_without_majority(planner, attempt, ballot, now)
        step = planner.after_refusal(ballot, now, self._give_up)
        if self._queue is not None and not planner.in_outage:
            self._queue.answered(max(planner.answered_at, self._held_at), planner.rtt)
        if step is Next.STOP:
            return None
        if ballot.nodes > 1 and ballot.op.verb is ACQUIRE:
            attempt.undo(ballot, keep_ticket=True)
        attempt.set_queue_order(ballot)
        if step in (Next.TRY_WITH_NEW_ID, Next.POLL_WITH_NEW_ID):
            attempt.use_new_id()
        plan = planner.plan(step, ballot, now)
        return Plan(min(plan.at, self._give_up), plan.probe)

    def _plan_without_majority(self, planner: Planner, attempt: Attempt, ballot: Ballot, now: float) -> Plan:
        """The same, after a round that no majority answered."""
        core, queues, error = self._core, self._machine.queues, planner.error(ballot)
        if planner.may_be_interrupted(now) and ballot.may_be_reached_soon:
            if attempt.ticket is None:
                self._leave()
            elif ballot.nodes > 1 and ballot.op.verb is ACQUIRE:
                attempt.undo(ballot, keep_ticket=True)
            return planner.after_interruption(error, now, self._give_up)
        core.judge_again()
        if not core.quorum.keeps_tickets or attempt.ticket is None:
            self._leave()
        self._yields, self._held_at = False, -math.inf
        if queues.is_alone(self):  # later tasks learn of the outage from a queue
            queues.of(self.terms.name)
        if self._queue is not None:
            self._queue.begin_outage(error, ballot.sent)
        try:
            return planner.after_outage(error, ballot, now, self._give_up, len(self._machine.under_way))
        finally:  # it may raise the error, whose traceback refers to this frame: a cycle would stay for the collector
            del error

    # -- pausing -------------------------------------------------------------------------------------------------

    def _pause(self, plan: Plan, last: Ballot | None) -> None:
        """Wait until it is time to ask again. `last`: the last round."""
        clock, (at, probe) = self._core.clock, plan
        ticket = self._attempt.ticket if self._attempt is not None else None
        if self._free_at < at:
            at, probe = self._free_at, False
        if self._notified:
            at, probe = min(at, self._after_notices()), False
        if self.planner is not None and (by := self.planner.must_confirm_by(self._give_up)) < at:
            at, probe = by, True
        state = (Waiting if ticket is not None else BackingOff)(at, probe, last)
        self._enter(state)
        if at > clock.now() and not (ticket is not None and ticket.granted):
            self.terms.mark_waiting()
            state.timer = clock.call_at(at, self._due)
        else:
            self._go_on(state)

    def _move(self, state: Pausing, until: float, *, probe: bool) -> None:
        """Ask at that time."""
        state.end()
        state.until, state.probe = until, probe
        state.timer = self._core.clock.call_at(until, self._due)

    def _due(self) -> None:
        """A timer: the pause is over. After a blocked loop the notices that have come are read first."""
        self._core.later(self._go_on, self.state)

    def _go_on(self, state: Began) -> None:
        """The pause `state` is over: take the hold that a notice has granted, stop, or ask."""
        if state is not self.state or not isinstance(state, Pausing):
            return
        try:
            hold = self._attempt.hold_granted() if self._attempt is not None else None
            if hold is not None and state.last is not None:
                self._win(hold, state.last)
            elif state.last is not None and self._is_time_up():
                self._refuse(state.last)
            else:
                self._ask(probe=state.probe)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def _is_time_up(self) -> bool:
        """Whether to stop without another try. Raises QuorumUnavailable if an outage is the reason."""
        now, planner = self._core.clock.now(), self.planner
        if planner is None:
            return False
        planner.check_outage(now, self._give_up)
        if planner.refused is not None and now >= self._give_up:
            self.asked_late = not self.asked_late and planner.answered_at < planner.confirm_from(self._give_up)
            return not self.asked_late
        return False

    def _after_notices(self) -> float:
        """When to try after notices of some nodes: at once after a majority, else a round trip later."""
        now = self._core.clock.now()
        return now if self._majority_notified else now + round_trip(self.planner.rtt if self.planner else 0.0)

    @property
    def _majority_notified(self) -> bool:
        return self._notified.bit_count() > len(self._core.quorum.nodes) // 2

    def notified(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice: the ticket became the hold (`fence`), or the name is free, or it will be
        (`left`). While a round is under way it is kept for later."""
        state, first = self.state, not self._notified
        self._continues_batch = self._continues_batch or notice.continue_batch
        free_now = notice.left <= 0
        if notice.fence:
            if self._attempt is not None and self._attempt.ticket is not None:
                self._attempt.ticket.grant(notice.number, notice.fence)
        elif free_now:
            self._notified |= 1 << index
        else:
            self._free_at = self._core.clock.now() + notice.left
        if not isinstance(state, Pausing):
            return
        match after_notice(first, self._majority_notified, notice.fence > 0, free_now):
            case Next.TAKE_GRANT:
                self._go_on(state)
            case Next.TRY:
                state.probe = False
                self._go_on(state)
            case Next.TRY_WHEN_FREE if self._free_at < state.until:
                self._move(state, self._free_at, probe=False)
            case Next.TRY_AFTER_ROUND_TRIP:
                self._move(state, min(self._after_notices(), self._give_up), probe=False)

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone. Ask within so many seconds, with jitter: one that a majority has refused renews
        its ticket, and another one tries."""
        state, planner = self.state, self.planner
        if planner is None or not isinstance(state, Pausing):
            return
        if why is Wake.GONE and planner.in_outage:
            return
        if why is Wake.BACK and not (planner.in_outage or planner.interrupted is not None):
            return
        soon = min(self._core.clock.now() + uniform(self._core.random, 0.0, within), self._give_up)
        if soon < state.until:
            self._move(state, soon, probe=planner.refused is not None)
