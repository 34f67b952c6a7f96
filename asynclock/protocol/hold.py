"""Hold: what the nodes keep under one id, from grant to release. Tasks of this process may have it one after the other,
each as a Tenure of its own (`local_queue.py`).

The rules:

1. At each node the hold ends one lease, less the drift, after the send of the last command that the node granted. The
   hold as a whole ends when it is left at less than a majority of the nodes.
2. A node that refuses a renewal no longer counts, even while the round is undecided. Once a majority has refused, the
   hold is lost. A node that lost its key gets it again ("is healed", before the waiters there) after a round that was
   won without that node, and counts from the next round. After a server has said that an operator broke the hold, no
   node is healed: the key that the operator deleted would come back.
3. A node that does not have the token gets it in the background.
4. After a release no command is sent that could bring the key back. So renewal stops before the release is sent.
5. A contested win may have a bare majority: the other nodes had another attempt, whose undo comes later. If one of that
   majority loses its data, a second client could win. So a hold that is older than a round trip asks the other nodes
   again, with pauses that double, until each has it or the first renewal is sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from asynclock._errors import OF_PARENT, LockNotHeld, brief
from asynclock._options import RELEASE_TIMEOUT, same_terms
from asynclock.events import Detached, Released, Renewed
from asynclock.protocol.causes import Cause, lock_lost_error
from asynclock.protocol.local_queue import may_pass
from asynclock.protocol.states import DETACHED, GIVEN_BACK, HELD, LOST, OPEN, RELEASED, UNKNOWN
from asynclock.protocol.watchdog import RENEW_BELOW, RENEWED, Due, Lacking, due, retry_after
from asynclock.quorum.ballot import WON, Ballot, drift, valid_until
from asynclock.quorum.denials import lost_to
from asynclock.rules.model import ACQUIRE, CONTENDED, EXTEND, LOOKING, QUIET, RELEASE, Op, Serve, Verb
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asynclock._errors import LockLost, Reason
    from asynclock._options import LockSettings
    from asynclock.protocol.core import Core
    from asynclock.protocol.done_marks import DoneMarks
    from asynclock.protocol.local_queue import LocalQueues, LocalWaiter, YieldedNames
    from asynclock.protocol.states import TenureState
    from asynclock.protocol.terms import Terms
    from asynclock.protocol.watchdog import LoopLag, Watchdog
    from asynclock.quorum.ballot import Waiter
    from asynclock.stores.port import Grant


class Tenure:
    """What belongs to one owner of a hold, from its grant to its end. `Hold.begin` makes it. Times are seconds of the
    client's clock.

    A hold has one tenure at a time, or several of one owner that entered again. The Lock and the Lease keep the tenure;
    the hold refers to it weakly. So a tenure that the program has dropped is collected, warns, and is renewed no
    more."""

    __slots__ = (
        "__weakref__", "_tell_owner", "_untaken", "_waiters", "block", "done_for", "fence", "hold", "loss",
        "since", "state", "task", "terms", "unattended", "until", "weak_self",
    )  # fmt: skip

    _untaken: bool  # without a value, unless its task was cancelled before it had the tenure
    _tell_owner: Callable[[LockLost], None]  # without a value, unless its owner is a thread that asked to be notified

    def __init__(self, hold: Hold, terms: Terms, fence: int, since: float) -> None:
        self.state = HELD
        self.hold = hold
        self.terms = terms
        self.fence = fence
        self.since = since
        max_hold = terms.settings.max_hold
        self.until = math.inf if max_hold is None else since + max_hold  # when max_hold ends it
        self.task = terms.task  # the task that took it, then the task that entered it
        self.loss: Reason | None = None
        self.done_for = 0.0  # seconds for which the name is marked as done after the release (`once`)
        self.block: Callable[[Reason], None] | None = None  # its call interrupts the body that it guards
        self.unattended = False  # the log already reports that its task has ended
        self.weak_self = ref(self)
        self._waiters: dict[Waiter, None] | None = None  # most tenures have none

    def __repr__(self) -> str:
        return f"<Tenure {brief(self.hold.name)} {self.state.value}>"

    @property
    def open(self) -> bool:
        """Whether it was neither released, nor detached, nor lost, as far as this client knows."""
        return self.state in OPEN

    @property
    def held(self) -> bool:
        """Whether it is held now, by the clock."""
        hold = self.hold
        if self.state not in OPEN or hold.core.forked:
            return False
        now = hold.core.clock.now()
        return now < hold.valid_until and now < self.until

    @property
    def ended_early(self) -> bool:
        """Whether it has ended before its task took it: its hold was lost, or `release_all` has released it. The end of
        max_hold is no such end: it counts from the grant, and may be shorter than a turn of the loop."""
        ended = self.state not in OPEN and self.loss != "max_hold"
        return ended or self.hold.core.clock.now() >= self.hold.valid_until

    @property
    def ends(self) -> float:
        """When it ends, unless it is renewed."""
        return min(self.hold.valid_until, self.until)

    @property
    def held_for(self) -> float:
        """Seconds since it began."""
        return self.hold.core.clock.now() - self.since

    def check_clock(self) -> None:
        """Lose it if its time is over. After a loop was blocked beyond the lease, this runs before any timer."""
        now = self.hold.core.clock.now()
        if self.state in OPEN and (now >= self.hold.valid_until or now >= self.until):
            self.hold.lose(self._over(now))

    def error(self) -> LockLost | LockNotHeld:
        """The error for the use of a tenure that has ended."""
        name = self.hold.name
        if self.hold.core.forked:
            return LockNotHeld(
                f"{brief(name)} was acquired before a fork: {OF_PARENT}",
                name=name,
            )
        if self.state in GIVEN_BACK:
            how = "detached" if self.state is DETACHED else "released already"
            return LockNotHeld(f"{brief(name)} was {how}", name=name)
        return self.hold.lost_error(self.loss or self._over(self.hold.core.clock.now()))

    def _over(self, now: float) -> Reason:
        return "max_hold" if now >= self.until else "expired"

    def add_waiter(self, waiter: Waiter) -> None:
        """Complete it at the end of the tenure."""
        self._waiters = self._waiters or {}
        self._waiters[waiter] = None

    def remove_waiter(self, waiter: Waiter) -> None:
        """Nobody waits for it any more."""
        if self._waiters is not None:
            self._waiters.pop(waiter, None)

    def enter(self, task: Any, block: Callable[[Reason], None]) -> None:
        """The body that it guards begins, in that task."""
        if task is not self.task:
            self.task = task
            self.hold.task_changed()
        self.block = block

    def leave(self) -> None:
        """The body has ended."""
        self.block = None

    def renewed(self, answered: bool) -> None:
        """A renewal has its outcome. `answered`: a majority granted it."""
        self.state = HELD if answered else UNKNOWN

    def mark_untaken(self) -> None:
        """Its task was cancelled before it had the tenure: no Acquired event was emitted, so no event is emitted for
        its release."""
        self._untaken = True

    def mark_done(self, within: float) -> None:
        """A run of `once` has returned: the name stays taken for `within` seconds after the release."""
        self.done_for = within

    def call_on_loss(self, call: Callable[[LockLost], None]) -> None:
        """Call it in the event loop when the tenure is lost; now, if it is lost already."""
        self._tell_owner = call
        if self.state is LOST:
            call(self.hold.lost_error(self.loss or "expired"))

    def end(self, state: TenureState, loss: Reason | None = None) -> None:
        """End it in that state. Tasks in `wait_lost` wake, and a loss interrupts the body."""
        self.state = state
        self.loss = loss
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
        observers = self.hold.core.observers
        if observers.active and loss is None and not getattr(self, "_untaken", False):
            ended = Detached if state is DETACHED else Released
            observers.tell(ended(*self.terms.described, self.held_for))
        if loss is not None and self.block is not None:
            self.block(loss)
        if loss is not None and (call := getattr(self, "_tell_owner", None)) is not None:
            call(self.hold.lost_error(loss))

    def rest(self) -> float:
        """Seconds for which the name stays taken after a release now."""
        settings = self.terms.settings
        if not settings.min_hold or getattr(self, "_untaken", False):
            return self.done_for
        return max(self.done_for, self.since + settings.min_hold - self.hold.core.clock.now())

    def keep_min_hold(self, until: float) -> None:
        """Its owner has left another block of the hold, for which the name stays taken until then."""
        if until > self.since + self.terms.settings.min_hold:
            self.terms = self.terms.with_min_hold(until - self.since)

    def mark_unattended(self) -> bool:
        """Whether its task has ended without a release. True at most once."""
        if self.unattended or self.block is not None or self.task is None or not self.task.done():
            return False
        self.unattended = True
        return True

    def __del__(self) -> None:
        if self.state in OPEN:
            self.hold.core.dropped(self)


class Shared(Protocol):
    """What the holds of one session share, as a hold sees it (`holds.py`)."""

    core: Core
    watchdog: Watchdog
    lag: LoopLag
    queues: LocalQueues
    yielded: YieldedNames
    done_marks: DoneMarks

    def add(self, hold: Hold) -> None: ...

    def remove(self, hold: Hold) -> None: ...

    def task_changed(self, hold: Hold) -> None: ...


class Hold:
    """See the module. Made of the ballot that won it. Times are seconds of the client's clock."""

    __slots__ = (
        "_ballot", "_broken", "_cause", "_denials", "_ends", "_errors", "_healed", "_holds", "_lacking", "_longest",
        "_promised", "_renewal", "_renewed_at", "_settings", "_tenures", "_watched_at", "contended", "core",
        "last_fence", "names", "next_fence", "op", "over", "renew_at", "round_trip_at", "valid_until",
    )  # fmt: skip

    def __init__(
        self, holds: Shared, settings: LockSettings, grant: Ballot, token: int, contended: bool = False
    ) -> None:
        self._holds = holds
        self.core = core = holds.core
        self.op = op = grant.op
        parts = op.kind.parts
        self.names = tuple([part.name for part in parts]) if parts else (op.name,)  # most holds have one name
        self.last_fence = token  # the last fence of the span that came with it, and the only one that the nodes know
        self.next_fence = token + 1 - op.queueing.span
        self.contended = contended  # another client waits for it, as far as this client knows
        self.round_trip_at = core.clock.now()  # it may be passed on for PASSING seconds from here
        self.over = False  # released, detached or lost
        self._tenures: list[ref[Tenure]] = []  # one, or those of an owner that entered again
        self._settings = settings
        # The longest lease that a node may keep it for. An adoption does not shorten what the detached hold had left.
        self._longest = settings.lease if op.verb is ACQUIRE else core.settings.max_lease
        self._watched_at = -math.inf  # when the watchdog checks it
        self._ballot: Ballot | None = grant  # None: each node has answered, and none failed
        self._lacking: Lacking | None = None  # the nodes of rule 5; None: no node lacks it
        self._healed = 0  # bit i: node i may have it by another round than the one that won it
        self._broken: str | None = None  # who broke it, as a server reported; "": the server does not know
        # Its end before the last refusal of a renewal. A refusal that comes when the hold is already left at no
        # majority (`valid_until` is -math.inf) does not change this. math.inf: there was no refusal.
        self._promised = math.inf
        self._denials: dict[int, Refused] | None = None  # node -> its last refusal, unless it granted or was healed
        self._errors: dict[int, Exception] | None = None  # node -> its last error, if it has not renewed since
        self._renewal: Ballot | None = None  # by the watchdog, while it is not decided
        self._renewed_at = grant.sent  # when the last renewal was sent that a majority granted
        self._cause: Cause | None = None  # of its loss
        self.valid_until = -math.inf
        self._ends = [-math.inf] * grant.nodes  # at each node
        self._count_grant(grant, token)

    def _count_grant(self, grant: Ballot, token: int) -> None:
        """A majority has granted. All these grants end at the same time, which counts from the one send."""
        settings, lease = self._settings, self._settings.lease
        end = grant.sent + lease - drift(lease)
        if grant.votes == [(token, False)]:  # a single node, and nobody waits
            self._ends[0] = end
        else:
            for index, vote in enumerate(grant.votes):
                if vote == (token, False):
                    self._ends[index] = end
                elif vote is not None:
                    self.count(grant, index)
        self.valid_until = end
        self.renew_at = end - lease * RENEW_BELOW if settings.renew else math.inf
        if grant.yes == grant.nodes:  # as `_forget_grant`, with two calls less
            self.op.forget_packed()
            self._ballot = None
        elif grant.complete:
            self._forget_grant(grant)
        else:
            grant.on_late_vote(self._count_late)

    def _count_late(self, grant: Ballot, index: int) -> None:
        """A node has replied to the grant after its outcome."""
        self.count(grant, index)
        if grant.complete:
            self._forget_grant(grant)

    def _forget_grant(self, grant: Ballot) -> None:
        """All nodes have voted. Drop the data that is no longer needed: a client may have many holds."""
        grant.op.forget_packed()
        if not grant.failed:
            self._ballot = None

    @property
    def name(self) -> str:
        return self.op.name

    # -- its tenures ---------------------------------------------------------------------------------------------

    @property
    def tenures(self) -> list[Tenure]:
        """The tenures that have not ended."""
        return [tenure for known in self._tenures if (tenure := known()) is not None]

    def begin(self, terms: Terms) -> Tenure:
        """The tenure of its next owner, with the next fence of the span."""
        fence, self.next_fence = self.next_fence, self.next_fence + 1
        first = self._watched_at == -math.inf  # then the hold was made a moment ago
        # max_hold and min_hold count from here. A ticket may have been sent long before it was granted.
        tenure = Tenure(self, terms, fence, self.round_trip_at if first else self.core.clock.now())
        self._tenures.append(tenure.weak_self)
        if first:
            self._holds.add(self)
            at = self.renew_at if self.renew_at < self.valid_until else self.valid_until
            if tenure.until < at or self._lacking is not None:
                at = min(at, tenure.until, self._heals_at)
            self._watched_at = at
            self._holds.watchdog.watch(self, at)
        return tenure

    def task_changed(self) -> None:
        """Another task has its tenure."""
        self._holds.task_changed(self)

    def enter_again(self, tenure: Tenure, terms: Terms) -> Tenure:
        """One more tenure for the same owner, with the same fence. The hold ends with the last of them."""
        again = Tenure(self, terms, tenure.fence, self.core.clock.now())
        self._tenures.append(again.weak_self)
        if again.until < self._watched_at:
            self.watch_at(again.until)
        return again

    def end(self, tenure: Tenure) -> Ballot | None:
        """The owner releases its tenure. Returns the ballot of the release; None: the hold continues, with another
        tenure of this owner or of the task to which it was passed. A lost tenure is released, too, since some node may
        still have the hold."""
        queues, is_open = self._holds.queues, tenure.state in OPEN
        if is_open:
            goes_on = len(self._tenures) > 1 and self._others_go_on(tenure)
            if queues.by_name and not (goes_on or self.op.kind.shared):
                goes_on = self._pass_on(tenure, queues.first_waiter(self.op.name))
            if goes_on:
                self._tenures.remove(tenure.weak_self)
                tenure.end(RELEASED)
                return None
        if self.contended:
            ballot = self._release_contended(tenure)
        else:
            ballot = self.release(tenure.rest(), done=tenure.done_for > 0)
        if is_open:
            self._give_up()
            tenure.end(RELEASED)
        if queues.by_name:
            queues.next_turn(self.names)
        return ballot

    def _others_go_on(self, tenure: Tenure) -> bool:
        """Whether its owner has other tenures of this hold. The last of them then keeps the min_hold of this one."""
        others, rest = [each for each in self.tenures if each is not tenure], tenure.rest()
        if rest > 0:
            for each in others:
                each.keep_min_hold(self.core.clock.now() + rest)
        return bool(others)

    def _pass_on(self, tenure: Tenure, waiter: LocalWaiter | None) -> bool:
        """Pass it on to that waiter, if the hold may still be passed on and the waiter has the same settings. Returns
        whether it did. A hold that an operator broke may be another client's by now."""
        settings, now = tenure.terms.settings, self.core.clock.now()
        if waiter is None or tenure.done_for or now >= tenure.until or self._broken is not None:
            return False
        if not same_terms(settings, waiter.acquisition.terms.settings):
            return False
        left = self.last_fence - self.next_fence + 1
        if not may_pass(now, self.round_trip_at, self.valid_until, settings.lease, left):
            return False
        waiter.take(self)
        return True

    def _release_contended(self, tenure: Tenure) -> Ballot:
        """Clients elsewhere wait for the hold, so the release is sent before anything else. The next attempt of this
        process is in the same write, and queues behind those clients."""
        local = bool(self._holds.queues.by_name)
        ballot = self.release(tenure.rest(), at_once=not local, done=tenure.done_for > 0)
        if tenure.open:
            self._holds.yielded.add(self.op.kind, self.name)
        if local:
            self._holds.queues.next_turn(self.names)
            self.core.quorum.flush()
        return ballot

    def detach(self, tenure: Tenure) -> None:
        """Another process may adopt it from now on. This one neither renews nor releases it any more."""
        self._give_up()
        tenure.end(DETACHED)
        self._holds.queues.next_turn(self.names)

    def lose(self, loss: Reason) -> None:
        """It is lost, with all its tenures. Their owners are notified."""
        if self.over:
            return
        tenures = self.tenures
        if loss != "closed":  # a close reports no facts, and there may be many holds: make no Cause
            self._cause = self._why(loss)
        self._give_up()
        for tenure in tenures:
            tenure.end(LOST, loss)
        self._holds.queues.next_turn(self.names)
        for tenure in tenures:
            self.core.tell_lost(tenure.terms, loss, tenure.held_for, tenure.error)

    def lost_error(self, loss: Reason, release: Ballot | None = None) -> LockLost:
        """The error for a tenure that was lost, or whose time is over, or whose `release` a majority refused."""
        cause = self._cause or self._why(loss)
        cause = cause if release is None else cause.after(release)
        return lock_lost_error(self.name, cause, [node.label for node in self.core.quorum.nodes])

    def _why(self, loss: Reason) -> Cause:
        """The facts about its loss, as they are now."""
        clock, errors, denials = self.core.clock, self._errors or {}, self._denials or {}
        now, renewed = clock.now(), self._renewed_at
        late = self._holds.lag.late(now, self._watched_at, renewed)
        settings = self._settings
        if loss == "max_hold" and (tenures := self.tenures):  # inner blocks of its owner have options of their own
            settings = min(tenures, key=lambda each: each.until).terms.settings
        return Cause(loss, settings, clock.wall(), now - renewed, late, self._broken, errors, denials)

    def close(self, serve: Serve) -> Ballot:
        """The client closes: release it, and notify its owners that it is lost. Returns the ballot of the release."""
        owners = self.tenures
        self.contended |= serve is Serve.NOBODY  # own waiters may have marked it; see `Quorum.undo`
        for each in owners:  # after a blocked loop this may run before the watchdog: those that are over have expired
            each.check_clock()
        self.lose("closed")
        rest = max((each.rest() for each in owners), default=0.0)
        return self.release(rest, done=any(each.done_for for each in owners), serve=serve)

    def dropped(self, weak_self: ref[Tenure]) -> None:
        """The program no longer refers to that tenure. Without another one, it is renewed no more, and expires."""
        self._tenures = [known for known in self._tenures if known is not weak_self and known() is not None]
        if not (self._tenures or self.over):
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Nobody refers to it any more: it is renewed no more, and expires."""
        self._give_up()
        self._holds.queues.next_turn(self.names)

    def _give_up(self) -> None:
        """This client no longer has it."""
        self.over = True
        self._tenures.clear()
        self._holds.remove(self)
        if self._watched_at > -math.inf:
            self._holds.watchdog.forget(self, self._watched_at)

    # -- for the watchdog ----------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Do what is due. Nothing is due for a hold that is over, even if the watchdog still has it."""
        if self.over:
            return
        match due(now, self.valid_until, self.renew_at, self._until):
            case Due.MAX_HOLD:
                self.lose("max_hold")
            case Due.EXPIRED:
                self.lose("expired")
            case Due.RENEWAL if self._tenures and not self.tenures:
                self._leave_alone()  # a signal handler that raised has stopped `Tenure.__del__`
            case Due.RENEWAL:
                self.renew(now)
        if self._lacking is not None and now >= self._heals_at and not self.over:
            self._heal_lacking(self._lacking, now)
        self.watch()

    @property
    def _until(self) -> float:
        """When max_hold ends the first of its tenures."""
        return min([tenure.until for tenure in self.tenures], default=math.inf)

    def renew(self, now: float) -> None:
        """Ask for another lease. Without a reply it asks again after lease/12; but not while the renewal waits in the
        queue of this client, which a second one would only make longer."""
        self.core.renews(self.tenures)
        self.renew_at = now + retry_after(self._settings.lease, self.core.random)
        self._lacking = RENEWED
        if self._renewal is None or self._renewal.deferred is None:
            self._renewal = self.extend(self._settings.lease)

    def renew_soon(self, at: float) -> None:
        """Renew it at that moment at the latest, if it is renewed at all: its only node may lack it by now."""
        if self.renew_at < math.inf:
            self.renew_at = min(self.renew_at, at)
            self.watch()

    def watch(self) -> None:
        """Let the watchdog check it when an action may be due next."""
        if not self.over:
            at = min(self.renew_at, self.valid_until, self._until, self._heals_at)
            # -math.inf: the renewal thread has found the loss, and the loop has not ended the hold yet.
            self.watch_at(at if at > -math.inf else self.core.clock.now())

    def watch_at(self, at: float) -> None:
        if self._watched_at > -math.inf:
            self._holds.watchdog.forget(self, self._watched_at)
        self._holds.watchdog.watch(self, at)
        self._watched_at = at

    # -- asking the nodes ----------------------------------------------------------------------------------------

    def extend(self, length: float) -> Ballot:
        """Move its end to `length` seconds from now, but never to an earlier time: 0.0 only asks. Its tenures learn the
        outcome."""
        grant, within = self.op, self.core.within(self._settings)
        if length > self._longest:
            self._longest = length
        op = Op(EXTEND, grant.kind, grant.name, grant.id, length, 0 if grant.plain else self.last_fence, grant.memory)
        return self.core.quorum.ask(op, within, on_settled=self._extended, on_vote=self.count)

    def broken(self, by: str = "") -> None:
        """A server says that an operator deleted it there. The operator may have reached only a minority of the nodes,
        so all nodes are asked. `by`: who it was. This client does not ask after a notice with `by`, because one without
        `by` follows."""
        self._broken = by or self._broken or ""
        if not (by or self.over):
            self.extend(0.0)

    def release(self, rest: float = 0, at_once: bool = False, done: bool = False, serve: Serve | None = None) -> Ballot:
        """Release it. The name stays taken for `rest` seconds, marked as done (`once`) or as resting (min_hold).
        `at_once`: see Quorum.ask. `serve`: what it does for the next waiter, if that is not the usual."""
        kept = done and not self.over and self._broken is None  # to the end
        self.over = True
        grant, quorum = self.op, self.core.quorum
        grant.revoke()
        queueing = CONTENDED if self.contended else LOOKING if grant.plain else QUIET
        op = Op(
            RELEASE, grant.kind, grant.name, grant.id, self._longest, 0 if grant.plain else self.last_fence,
            grant.memory, rest, queueing=queueing[quorum.serve if serve is None else serve], done=done,
        )  # fmt: skip
        within = min(self.core.within(self._settings), RELEASE_TIMEOUT)
        ask, ballot = self._holds.done_marks.ask if kept else quorum.ask, self._ballot
        only = self._where(ballot) if ballot is not None and ballot.failed else None
        return ask(op, within, only=only, at_once=at_once)

    def may_be_at(self, nodes: Iterable[int]) -> None:
        """These nodes may have it, too: its release goes to them as well."""
        for index in nodes:
            self._healed |= 1 << index

    def _where(self, grant: Ballot) -> Sequence[int]:
        """The nodes that may have it: those that granted it or may have done so, and those that were healed. The others
        get no release: a node that is down would leave one pending for each lock."""
        granted = grant.traces()
        return [i for i in range(len(self._ends)) if i in granted or self._healed >> i & 1]

    # -- counting their votes ------------------------------------------------------------------------------------

    def _extended(self, ballot: Ballot) -> None:
        """A renewal is decided. Some nodes may answer later."""
        if ballot is self._renewal:
            self._renewal = None
        if self.over:
            return
        if ballot.outcome is WON:
            self._renewed_at, self._errors = ballot.sent, None
            self.renew_at = self.valid_until - self._settings.lease * RENEW_BELOW if self._settings.renew else math.inf
            for index in range(ballot.nodes):
                self._repair(ballot, index)
        observers = self.core.observers
        # `count` has seen each refusal. If a majority refused, the hold is lost already, and `over`.
        for tenure in self.tenures:
            tenure.renewed(ballot.outcome is WON)
            if observers.active and ballot.op.lease:
                observers.tell(Renewed(*tenure.terms.described, "ok" if ballot.outcome is WON else "failed"))

    def count(self, ballot: Ballot, index: int) -> None:
        """Count one node's vote: store until when the node has the hold. `_repair` sends what the node lacks."""
        vote, op = ballot.votes[index], ballot.op
        if isinstance(vote, tuple):
            if not self.over:
                self._granted_by(ballot, index, vote)
        elif isinstance(vote, Exception):
            if op.verb is EXTEND:
                self._errors = {**(self._errors or {}), index: vote}
        elif isinstance(vote, Refused) and not self.over:
            if op.verb is EXTEND:
                self._refused_by(ballot, index, vote)
            elif not op.plain:
                self._was_refused_by(index)
            self._repair(ballot, index)

    def _granted_by(self, ballot: Ballot, index: int, vote: Grant) -> None:
        self.contended = self.contended or vote[1] is True
        if self._denials:
            self._denials.pop(index, None)
        if errors := self._errors:  # read once: the renewal thread may set it to None
            errors.pop(index, None)
        if self._lacking is not None:
            self._lacking.nodes &= ~(1 << index)
        end = ballot.sent + ballot.op.lease - drift(ballot.op.lease)
        if end > self._ends[index]:
            self._ends[index] = end
            if end > self.valid_until:
                self._recount()
        if vote[0] < self.last_fence:
            self._repair(ballot, index)

    def _recount(self) -> None:
        self.valid_until = valid_until(self._ends)

    def _refused_by(self, ballot: Ballot, index: int, refusal: Refused) -> None:
        """Rule 2. The lease may now end sooner than the watchdog expects, so the watchdog gets a new time for its
        check: the next renewal, or the new end if that is earlier. If the round is still open, the check waits for the
        deadline of the round, since a grant that is still to come may make up for the refusal. The check comes no later
        than the end that the lease had before this refusal."""
        if self.valid_until > -math.inf:  # an earlier refusal may have left it at no majority
            self._promised = self.valid_until
        self._ends[index] = -math.inf
        self._recount()
        self._denials = denials = self._denials or {}
        denials[index] = refusal
        now = self.core.clock.now()
        if len(denials) > len(self._ends) // 2 or (self._broken is not None and self.valid_until <= now):
            self.lose(lost_to(denials.values(), len(self._ends), self._broken is not None))
            return
        soonest = ballot.deadline if ballot.outcome is None else now
        at = max(min(self.renew_at, self.valid_until, self._heals_at), soonest)
        self.watch_at(max(now, min(at, self._promised, self._until)))

    def _repair(self, ballot: Ballot, index: int) -> None:
        """Rules 2 and 3: send a node the token or the key that it lacks."""
        vote, op = ballot.votes[index], ballot.op
        if self.over or self.op.plain:
            return
        if isinstance(vote, Refused):
            if op.verb is not EXTEND:
                self._send_to(index, EXTEND)
            elif ballot.outcome is WON and self._broken is None and (vote.left is None or op.kind.shared):
                # A shared kind is healed beside other holders. `extend` may have asked for more than one lease.
                self._send_to(index, ACQUIRE, max(self.op.lease, self._left(self.core.clock.now())))
        elif isinstance(vote, tuple) and op.verb is not EXTEND and vote[0] < self.last_fence:
            self._send_to(index, EXTEND)

    def _was_refused_by(self, index: int) -> None:
        """Rule 5. The node refused the round that this hold won at other nodes."""
        if self._lacking is RENEWED:
            return
        if self._lacking is None:
            self._lacking = Lacking(self.core.clock.now(), self.round_trip_at - self._renewed_at)
        self._lacking.nodes |= 1 << index
        if self._watched_at > self._lacking.at and self.valid_until > -math.inf:  # else a check would lose it now
            self.watch_at(self._lacking.at)

    @property
    def _heals_at(self) -> float:
        """When the nodes that refused it are asked again; math.inf: none is, also after an operator broke the hold."""
        return math.inf if self._lacking is None or self._broken is not None else self._lacking.at

    def _heal_lacking(self, lacking: Lacking, now: float) -> None:
        left = self._left(now)
        if left <= drift(0.0):  # over: the renewal thread has counted a refusal meanwhile
            return  # a lease of 0 or less would fail, or leave a key without expiry
        for index in range(len(self._ends)):
            if lacking.nodes >> index & 1:
                self._send_to(index, ACQUIRE, left, counts=True)
        self._lacking = lacking.later(now)

    def _left(self, now: float) -> float:
        """The lease that a node needs to keep it no shorter than the other nodes. It includes the drift that its count
        takes off."""
        left = self.valid_until - now
        return left + drift(left)

    def _count_healed(self, ballot: Ballot, index: int) -> None:
        """A node has the hold now: it counts from the send of this op."""
        if isinstance(ballot.votes[index], tuple):
            self.count(ballot, index)

    def _send_to(self, index: int, verb: Verb, lease: float = 0.0, *, counts: bool = False) -> None:
        """Send the token to one node (extend), or heal it for so many seconds: an acquire that serves nobody (rule 11
        in `rules/decide.py`). Unless it `counts` at once, a healed node counts from the next round on."""
        grant, core = self.op, self.core
        op = Op(verb, grant.kind, grant.name, grant.id, lease, self.last_fence, grant.memory)
        if verb is ACQUIRE:
            self._healed |= 1 << index
            if self._denials and not counts:  # it may have the key again: its next reply decides
                self._denials.pop(index, None)
        op.revoke()  # so that the node does not send it again: a release may have been sent by then
        now, nodes, on_vote = core.clock.now(), core.quorum.nodes, self._count_healed if counts else None
        nodes[index].send(op, Ballot(op, len(nodes), now, now + core.within(self._settings), on_vote=on_vote))
