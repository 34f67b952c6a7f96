"""Acquisition: one acquire, from its first round until it has a tenure or gives up.

It is a machine (`machine.py`). The rules:

1. If it is cancelled at any point, each request that it sent is undone, or its hold is given back (`rounds.py`).
2. "Held by another owner" and "out of reach" never mix. After a refusal by a majority it waits for the holder, asks
   again shortly before its time ends, and then returns the refusal. Without a majority it tries again with back-off,
   and withdraws its ticket unless the store keeps tickets in an outage. At the end of its time, or patience, it raises
   QuorumUnavailable.
3. It does not poll while a notice can come. A refused round leaves a ticket, and the servers notify its owner. The
   waiter renews its ticket each time a third of the lease has passed. It also asks at the end of the holder's lease,
   since a dead holder notifies nobody. The first few waiters ask at that moment, and each later waiter a little after
   the one before it. The first few also poll while another program holds the name, since no notice comes when that hold
   ends.
4. A single node serves a ticket by granting it: the notice names the number of the ticket that became the hold.
5. Over N nodes the notice grants nothing. The waiter tries when a majority has sent one, or a round trip after the
   first. If it is refused, the votes name the holders. It waits for one holder on a majority, or for several that hold
   the name together (`Obstacles`). Split votes are undone, and it tries again after a pause, which is shortest for
   the first in the queue. After a release that notified remote waiters, a new local caller first takes a ticket behind
   them, and tries later. So it does not overtake them.
6. Tasks of one process wait in a local queue, and only the first of them asks (`local_queue.py`).

`planner.py` says what a refusal and a notice mean, and when to ask next.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING

from asynclock._errors import QuorumUnavailable, SelfDeadlock, brief
from asynclock.protocol.causes import NoLease
from asynclock.protocol.core import uniform
from asynclock.protocol.local_queue import LocalWaiter
from asynclock.protocol.machine import Claim
from asynclock.protocol.planner import MIN_TO_YIELD, Next, Plan, Planner, after_notice, answer_from, round_trip
from asynclock.protocol.rounds import Wake
from asynclock.protocol.states import (
    BEGAN,
    DONE,
    Asking,
    BackingOff,
    ClaimState,
    OwnerEntering,
    Pausing,
    Queued,
    Waiting,
)
from asynclock.quorum.ballot import REFUSED, UNREACHABLE
from asynclock.rules.model import parts_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from asynclock._errors import LockError
    from asynclock.protocol.hold import Hold
    from asynclock.protocol.local_queue import LocalQueue
    from asynclock.protocol.machine import Machine
    from asynclock.protocol.rounds import Rounds
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot, Outcome
    from asynclock.rules.model import Part
    from asynclock.stores.port import Notice


class Heard:
    """The notices that the nodes have sent since the last round was sent. The next round forgets them."""

    __slots__ = ("free_at", "nodes")

    def __init__(self) -> None:
        self.nodes = 0  # bit i: node i has sent one that says that the name is free
        self.free_at = math.inf  # when the name will be free, as one says


class Acquisition(Claim):
    """See the module. The events that only an acquisition has are `followed_by`, `turn_to_ask`, `passed`,
    `renew_ticket_at` and `time_up_in_queue` of the local queue, `owner_entered`, `owner_time_up`, and `notified`."""

    __slots__ = (
        "_by_itself", "_continues_batch", "_full", "_heard", "_held_at", "_late_by", "_queue", "_rounds", "_yields",
        "asked_late",
        "planner",
    )  # fmt: skip

    def __init__(self, machine: Machine, terms: Terms, give_up: float = math.inf) -> None:
        # The lines of `Claim.__init__`, because `super().__init__` would be one more call for each acquire.
        self.state = BEGAN
        self.terms = terms
        self._contended = False
        self._machine = machine
        self._core = core = machine.core
        self.future = core.result()
        self._result = None
        self._give_up = give_up
        # Its own.
        self._rounds: Rounds | None = None
        self._queue: LocalQueue | None = None
        self.planner: Planner | None = None
        self._heard: Heard | None = None  # the notices since the last round was sent; None: there were none
        # The last time that the previous asker or holder in this process knew the name to be held. Reset by an outage.
        self._held_at = -math.inf
        # Its time was up before the last question was sent (by itself, or by the asker of its local queue): the loop
        # was blocked, or the one try beside its own holds took all of the time. So it asks once more, and waits for the
        # answer for as long as a last question may take. Then it gives up. Never reset before its end.
        self.asked_late = False
        self._late_by = 0.0  # seconds by which its end was moved, so that it can wait for that answer
        self._yields = False  # remote waiters were notified just before it began
        self._continues_batch = False  # its ticket was one of the last that one op could serve; see `Rounds`
        self._by_itself = False  # it asks again, and no notice said so: perhaps none went to those behind it, either
        # Its full terms and the end of its time, kept during the one try beside the holds of its task; else None.
        # During that try `terms` and `_give_up` are those of the try. So `_refuse`, and `fail` in an outage, go on with
        # `_begin_full`: else the acquire would end without the waiting that its caller asks for.
        self._full: tuple[Terms, float] | None = None

    # -- its begin and its end -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask, or wait for other tasks of this process. Raises ConfigError, SelfDeadlock."""
        self._machine.under_way[self] = None
        if self.terms.owner is None or self._begin_entry(self.terms.owner):
            self._begin()

    def again(self) -> Acquisition:
        terms, give_up = self._full or (self.terms, self._give_up)
        acquisition = Acquisition(self._machine, terms, give_up)
        acquisition.asked_late, acquisition._late_by = self._core.clock.now() >= give_up, self._late_by
        return acquisition

    def _begin(self) -> None:
        terms, holds = self.terms, self._machine.holds
        kind, name = terms.kind, terms.name
        may_hold = kind.parts or (holds.get(name) is not None and holds.has_of_task(name, terms.task))
        if may_hold and terms.timeout != 0 and self._begin_beside():
            return
        if terms.timeout != 0 and not kind.fair and not kind.shared and not self._is_first():
            # Validate now, so that ConfigError is raised in this task and not in the one that serves the queue.
            self._core.within(terms.settings)
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
        tenure, rounds = hold.begin(self.terms), self._rounds
        if rounds is not None and rounds.ticket is not None:
            rounds.withdraw_ticket(rounds.ticket, ballot)
        by_itself = self._by_itself and len(self._core.quorum.nodes) > 1 and self._is_shared
        if rounds is not None and (self._continues_batch or by_itself):
            rounds.continue_batch()
        self._succeed(tenure)

    @property
    def _is_shared(self) -> bool:
        """Whether others may be able to enter beside it."""
        return any(part.kind.shared for part in parts_of(self.terms))

    def _refuse(self, ballot: Ballot | None = None) -> None:
        """Its time is up: end with what is known of the holder. `ballot`: its last round; None: it waited in the local
        queue, and the task that asks may know the holder."""
        if self._full is not None:
            self._begin_full(self._full)
            return
        now, timeout, planner = self._core.clock.now(), self.terms.timeout or 0.0, self.planner
        called = self._give_up - self._late_by - timeout
        waited = now - (called if timeout or planner is None else planner.began)
        if ballot is None and self._queue is not None:
            planner = self._queue.asker.planner if self._queue.asker is not None else None
        self._end_without(planner.no_lease(now, waited, ballot) if planner is not None else NoLease(waited=waited))

    def _finish(self, has_it: bool) -> None:
        """It no longer asks, so the next task of this process may ask. If it has no hold, its future is completed
        before this call: the next task asks inside this call, and a KeyboardInterrupt may end it there."""
        machine, queue = self._machine, self._queue
        self._enter(DONE)
        machine.under_way.pop(self, None)
        if self.terms.owner is not None:
            machine.entries.end(self)
        self._rounds = self._queue = None  # they refer to this object, or to an error whose traceback does: a cycle
        if queue is None:
            machine.queues.end_alone(self)
        elif queue.asker is self:
            queue.end_asking(has_it)

    def _leave(self) -> None:
        """Undo its round and withdraw its ticket. A second call does nothing."""
        if self._rounds is not None:
            self._rounds.leave()

    # -- other holds of the same owner -----------------------------------------------------------------------------

    def _begin_entry(self, owner: Hashable) -> bool:
        """For a reentrant lock. True: no task of its owner has the hold or asks for it, so this one asks."""
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
        """The acquire of the other task of its owner has ended: with the hold, or without."""
        try:
            if isinstance(self.state, OwnerEntering) and self._begin_entry(self.terms.owner):
                self._begin()
        except BaseException as error:
            self._failed(error)

    def owner_time_up(self) -> None:
        """Its time is up, and another task of its owner still asks. In an outage that task has put its error into the
        local queue of the name."""
        if isinstance(self.state, OwnerEntering):
            queue = self._machine.queues.by_name.get(self.terms.name)
            if queue is not None and queue.outage is not None:
                self.fail(copy(queue.outage))
            else:
                self._end_without(NoLease(waited=self.terms.timeout or 0.0))

    def _begin_beside(self) -> bool:
        """The task may hold some of these names. Then it may get one more hold beside its own, if several ids may hold
        them. First it tries once, without waiting. If that is in vain, `_begin_full` checks whether the task would wait
        for itself, and otherwise waits. Raises SelfDeadlock."""
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
            self._rounds = self.planner = None
            self.asked_late = self._core.clock.now() >= self._give_up  # the one try took all of its time
            self._check_deadlock(self._held_by_task())
            self._ask(probe=False)
        except BaseException as error:
            self._failed(error)

    def _held_by_task(self) -> dict[Part, int]:
        """The number of tenures of its task, for each name."""
        task, holds = self.terms.task, self._machine.holds
        return {part: holds.number_of_task(part.name, task) for part in parts_of(self.terms)}

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
        queues = machine.queues
        if name not in queues.by_name and machine.holds.get(name) is None and queues.begin_alone(self):
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
        """Wait in the local queue; if its time is over, for the next answer, and for as long as that may take. Raises
        ConfigError."""
        machine, name = self._machine, self.terms.name
        machine.check_kind(name, self.terms.kind)
        queue = self._queue = machine.queues.of(name)
        self.terms.mark_waiting()
        if self.asked_late:
            within = self._core.within(self.terms.settings)
            late_by = self._core.clock.now() - answer_from(self._give_up, self.terms.timeout, within, queue.rtt)
            self._give_up, self._late_by = self._give_up + late_by, self._late_by + late_by
        self._enter(Queued(LocalWaiter(self, queue, self._core, self._give_up)))

    def turn_to_ask(self, outage: LockError | None, patience_ends: float) -> None:
        """It is the first of its queue: ask. `outage`: the error of the asker before it, if no majority answered that
        one; None: there is no outage."""
        queue = self._queue
        self._held_at = queue.answered_at if queue is not None and queue.outage is None else -math.inf
        try:
            if outage is not None:
                self.planner = Planner(self._core, self.terms, self._core.clock.now())
                self.planner.join_outage(outage, patience_ends)
            self._yield_to_remote()
            self._ask(probe=self._yields)
        except BaseException as error:  # fail in the next turn: here it would start the next waiter inside this call
            self._core.later(self.fail, error)
            if not isinstance(error, Exception):
                raise

    def time_up_in_queue(self, waiter: LocalWaiter) -> None:
        """Its time is up, or the answer has come that it waited for."""
        try:
            if waiter.check_knows_enough(again=not self.asked_late):
                self._refuse()
            else:
                self.asked_late = True
                self._queue_locally()
        except BaseException as error:
            self._failed(error)

    @property
    def unanswered_round(self) -> Ballot | None:
        """The round under way."""
        return self.state.ballot if isinstance(self.state, Asking) and self.state.ballot.outcome is None else None

    def renew_ticket_at(self, at: float) -> None:
        """A task behind it must know whether the name is still held: renew the ticket at that time."""
        state = self.state
        if isinstance(state, Pausing) and at < state.until and not (self.planner and self.planner.interrupted):
            self._move(state, at, probe=True)

    # -- asking --------------------------------------------------------------------------------------------------

    def _ask(self, *, probe: bool) -> None:
        """Send a round. `probe`: see `Rounds.send`. While the client closes, end instead: its holds are released, so a
        round would have the servers notify its waiters that have not ended yet."""
        if self._machine.queues.closed:
            self.close()
            return
        rounds, planner, queue = self._rounds, self.planner, self._queue
        if rounds is None:
            rounds = self._rounds = self._machine.rounds(self._core, self._machine.tickets, self.terms, self)
        refused, slot = self._yields, None
        if planner is not None:  # not the first round
            refused, slot = refused or planner.refused is not None, planner.take_slot()
            if not planner.met_attempt:  # else the notice of the try before counts
                self._by_itself = self._heard is None or not self._heard.nodes
            self._heard = None
        behind = queue.waiting if queue is not None else 0
        core, ends = self._core, self._give_up
        if self.asked_late:
            ends = self._late_end(core.clock.now(), core.within(self.terms.settings))
        ballot = rounds.send(self._give_up, ends, refused, probe, behind, slot)
        self._await(Asking(ballot))

    def _late_end(self, sent: float, within: float) -> float:
        """When to stop waiting for a late question: after the time that a last answer may take. It was sent at `sent`,
        and each node has `within` seconds."""
        return sent - answer_from(0.0, self.terms.timeout, within)  # which is minus that time

    def _await(self, state: Asking) -> None:
        """Also limit the round: it ends when the caller's time ends, or when the patience for an outage ends if that is
        earlier. A late question has a time of its own (`_late_end`)."""
        self._enter(state)
        ballot, clock, timeout = state.ballot, self._core.clock, self.terms.timeout
        patience_ends = math.inf if self.planner is None else self.planner.patience_ends
        if self._full is not None and self._full[1] < math.inf:
            state.timer = clock.call_at(self._full[1], self._expire)
        elif patience_ends < self._give_up:
            state.timer = clock.call_at(patience_ends, self._expire)
        elif self._give_up < math.inf:
            late = self._late_end(ballot.sent, ballot.deadline - ballot.sent)
            state.timer = clock.call_at(late if self.asked_late else self._give_up, self._time_up)
        elif ballot.deferred is not None and timeout is not None:
            state.timer = clock.call_at(ballot.deadline, self._expire_deferred)

    def _time_up(self) -> None:
        self._give_up = min(self._give_up, self._core.clock.now())  # a timer may come early by a clock tick
        self._expire()

    def _expire_deferred(self) -> None:
        """End the round if it still waits in the queue of its node (`Ballot.deferred`). Once it leaves that queue, its
        time counts from then."""
        if (ballot := self.unanswered_round) is not None and ballot.deferred is not None:
            self._expire()

    def _expire(self) -> None:
        """Stop waiting for the round. It can no longer be won, but refusals and errors that come in this turn of the
        loop still count."""
        if (ballot := self.unanswered_round) is not None:
            ballot.when_settled(None)
            ballot.expire()
            self._core.later(self.settled, ballot)

    def _without_grant(self, ballot: Ballot) -> None:
        rounds = self._rounds
        assert rounds is not None  # noqa: S101 - it has asked
        rounds.on_reply(ballot)
        if not self._take_grant(rounds):
            self._ask_later(rounds, ballot, ballot.outcome or REFUSED)

    def _without_hold(self, won: Ballot, last: Ballot, outcome: Outcome) -> None:
        assert self._rounds is not None  # noqa: S101 - it has asked
        self._ask_later(self._rounds, last, outcome)

    def _take_grant(self, rounds: Rounds) -> bool:
        """Take the hold that a notice has granted; False: there is none."""
        granted = rounds.take_grant()
        if granted is None:
            return False
        ballot, token = granted
        hold = self._machine.holds.hold_of(self.terms.settings, ballot, token, True)
        if hold is None:
            rounds.use_new_id()
            return False
        self._win(hold, ballot)
        return True

    def _ask_later(self, rounds: Rounds, ballot: Ballot, outcome: Outcome) -> None:
        """A round brought no hold: pause before the next one, or give up."""
        if (plan := self._plan(rounds, ballot, outcome)) is not None:
            self._pause(plan, ballot)
        else:
            self._refuse(ballot)

    def _plan(self, rounds: Rounds, ballot: Ballot, outcome: Outcome) -> Plan | None:
        """When to ask next; None: not again. Raises QuorumUnavailable if an outage lasts too long, and ConfigError at
        once.

        The order of the calls matters. `held` is about earlier rounds, and `after_refusal` sets `answered_at` to now.
        `answered` may end other waiters inside this call: they report the holder that `after_refusal` has stored.
        `set_queue_order` keeps the place of the ticket for the next one, and `use_new_id` forgets the ticket."""
        now = self._core.clock.now()
        planner = self.planner = self.planner or Planner(self._core, self.terms, ballot.sent)
        held = not planner.in_outage and max(planner.answered_at, self._held_at) >= planner.answer_from(self._give_up)
        if outcome is UNREACHABLE and not ballot.denied and not (held and now >= self._give_up):
            return self._plan_without_majority(planner, rounds, ballot, now)
        step = planner.after_refusal(ballot, now, self._give_up)
        if self._queue is not None and not planner.in_outage:
            self._queue.answered(max(planner.answered_at, self._held_at), planner.rtt)
        if step is Next.STOP:
            return None
        rounds.end_round(ballot)
        rounds.set_queue_order(ballot)
        if step in (Next.TRY_WITH_NEW_ID, Next.POLL_WITH_NEW_ID):
            rounds.use_new_id()
        plan = planner.plan(step, ballot, now)
        return Plan(min(plan.at, self._give_up), plan.probe)

    def _plan_without_majority(self, planner: Planner, rounds: Rounds, ballot: Ballot, now: float) -> Plan:
        """The same, after a round that no majority answered."""
        core, queues, error = self._core, self._machine.queues, planner.error(ballot)
        if planner.may_be_interrupted(now) and ballot.may_be_reached_soon:
            if rounds.ticket is None:
                self._leave()
            else:
                rounds.end_round(rounds.ballot or ballot)  # a second round has the one before it undone
            return planner.after_interruption(error, now, self._give_up)
        core.judge_again()
        if not core.quorum.keeps_tickets or rounds.ticket is None:
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
        ticket = self._rounds.ticket if self._rounds is not None else None
        if (heard := self._heard) is not None:
            if heard.free_at < at:
                at, probe = heard.free_at, False
            if heard.nodes:
                at, probe = min(at, self._after_notices(heard)), False
        if self.planner is not None and (by := self.planner.must_ask_by(self._give_up)) < at:
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

    def _go_on(self, state: ClaimState) -> None:
        """The pause `state` is over: take the hold that a notice has granted, stop, or ask."""
        if state is not self.state or not isinstance(state, Pausing):
            return
        try:
            if self._rounds is not None and self._take_grant(self._rounds):
                return
            if self._is_time_up():
                self._refuse(state.last)
            else:
                self._ask(probe=state.probe)
        except BaseException as error:
            self._failed(error)

    def _is_time_up(self) -> bool:
        """Whether to stop without another try. Raises QuorumUnavailable if an outage is the reason."""
        now, planner = self._core.clock.now(), self.planner
        if planner is None:
            return False
        planner.check_outage(now, self._give_up)
        if planner.refused is not None and now >= self._give_up:
            self.asked_late = not self.asked_late and planner.answered_at < planner.answer_from(self._give_up)
            return not self.asked_late
        return False

    def _after_notices(self, heard: Heard) -> float:
        """When to try after notices of some nodes: at once after a majority, else a round trip later."""
        now = self._core.clock.now()
        return now if self._is_majority(heard) else now + round_trip(self.planner.rtt if self.planner else 0.0)

    def _is_majority(self, heard: Heard) -> bool:
        return heard.nodes.bit_count() > len(self._core.quorum.nodes) // 2

    def notified(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice: the ticket became the hold (`fence`), or that hold has ended (`broken`,
        `expired`), or the name is free, or it will be (`left`). While a round is under way it is kept for later."""
        state, heard = self.state, self._heard or Heard()
        self._heard, first = heard, not heard.nodes
        free_now = notice.left <= 0
        # One waiter alone is notified of the end of a rest.
        self._continues_batch |= notice.continue_batch or (not free_now and self._is_shared)
        if notice.fence:
            if self._rounds is not None:
                self._rounds.grant(notice.number, notice.fence)
        elif free_now:
            heard.nodes |= 1 << index
            if self._rounds is not None and (notice.broken or notice.expired):
                self._rounds.drop_grant()
        else:
            heard.free_at = min(heard.free_at, self._core.clock.now() + notice.left)
        if not isinstance(state, Pausing):
            return
        match after_notice(first, self._is_majority(heard), notice.fence > 0, free_now):
            case Next.TAKE_GRANT:
                self._go_on(state)
            case Next.TRY:
                state.probe = False
                self._go_on(state)
            case Next.TRY_WHEN_FREE if heard.free_at < state.until:
                self._move(state, heard.free_at, probe=False)
            case Next.TRY_AFTER_ROUND_TRIP:
                self._move(state, min(self._after_notices(heard), self._give_up), probe=False)

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone. Ask within so many seconds, with jitter. If a majority has refused it, it renews
        its ticket; else it tries."""
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
