"""Machine: what the claims of one client in one event loop share, and what a claim is.

A claim is an acquire or an adoption, from its first round until it has a tenure or gives up. Events move it from one
state to the next (`states.py`), and its caller waits for one future, which the last event completes. No method of it
waits. A round never reports its outcome inside the call that sends it: if it fails at once, its outcome is an event of
the next turn. Else one release could make all waiters of a queue fail, each inside the call of the one before.

The objects of the machine keep no set: its order is that of hashes, so `fingerprint.py` refuses it. Use a dict.

A caller can be cancelled only while it awaits that future. A claim that is under way is then undone. If the claim is
done, its tenure is passed on or released.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._errors import brief, client_closed
from asynclock._options import BROKEN_BY
from asynclock.events import NodeDown, NodeUp
from asynclock.protocol.core import SLICE, uniform
from asynclock.protocol.hold import Hold, Tenure
from asynclock.protocol.holds import Holds
from asynclock.protocol.local_queue import Entries, LocalQueues, YieldedNames
from asynclock.protocol.planner import waking_time
from asynclock.protocol.rounds import RoundsAtMany, RoundsAtOne, Tickets, Wake
from asynclock.protocol.states import BEGAN, DONE, NEXT, RELEASED, Asking, ClaimState, Confirming
from asynclock.protocol.watchdog import Watchdog
from asynclock.quorum.ballot import REFUSED, UNREACHABLE, WON
from asynclock.rules.model import EXTEND, Op
from asynclock.rules.registry import FAMILIES
from asynclock.stores.port import Refused, WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asynclock.events import Event
    from asynclock.protocol.causes import NoLease
    from asynclock.protocol.core import Core
    from asynclock.protocol.rounds import TicketOwner
    from asynclock.protocol.terms import Terms
    from asynclock.protocol.watchdog import LoopLag
    from asynclock.quorum.ballot import Ballot, Outcome
    from asynclock.rules.model import Kind
    from asynclock.stores.port import Notice


class Machine:
    """See the module. It receives the notices and the reports of all nodes."""

    def __init__(self, core: Core, lag: LoopLag, nodes: int, threaded: Callable[..., Hold] | None = None) -> None:
        self.core = core
        self.watchdog = Watchdog(core.clock, lag, core.spent, core.fault)
        self.queues = LocalQueues()
        self.yielded = YieldedNames(core.clock.now, used=nodes > 1)
        self.holds = Holds(core, self.watchdog, lag, self.queues, self.yielded, threaded)
        self.tickets = Tickets()
        self.rounds = RoundsAtOne if nodes == 1 else RoundsAtMany  # the strategy of its acquisitions
        self.entries = Entries(core)
        self.under_way: dict[Claim, None] = {}  # in the order in which they began
        self._nodes = nodes
        self._down: dict[str, None] = {}  # the labels of the nodes that are down
        self._renewals: Iterator[Hold | None] | None = None  # those that follow a new connection

    # -- the end -------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """The client closes: `close_hold` and `Claim.close` follow for all that there is."""
        self.queues.close()
        self.tickets.close()

    def close_hold(self, hold: Hold) -> Ballot:
        """Release it, and notify its owners that it is lost. Holds end before claims: their releases are what other
        clients need most. Returns the ballot of the release."""
        return hold.close(self.tickets.serve_at(hold.name, self.core.quorum.serve))

    # -- notices -------------------------------------------------------------------------------------------------

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice."""
        waiter = self.tickets.get(notice.id)
        if waiter is not None:
            waiter.notified(index, notice)
        elif notice.number == 0:
            if notice.broken:
                self.holds.done_marks.broken(notice.name, notice.id)
            if (hold := self.holds.with_id(notice.name, notice.id)) is not None:
                if notice.broken:
                    hold.broken()
                elif notice.expired:
                    hold.lose("expired")
                else:
                    hold.contended = True
            name, marked, by = notice.name.rpartition(BROKEN_BY)
            if marked and notice.broken and (hold := self.holds.with_id(name, notice.id)) is not None:
                hold.broken(by)

    def check_kind(self, name: str, kind: Kind) -> None:
        """Raise WrongKind where a task of this process holds the name as another kind. The server would refuse it, too,
        but a task in the local queue does not ask the server."""
        found = self.holds.get(name)
        if isinstance(found, Hold) and found.op.kind is kind:
            return
        held = next((hold for hold in self.holds.of(name) if any(tenure.held for tenure in hold.tenures)), None)
        if held is not None:  # and so are all others, as the nodes see to it
            theirs = next((part.kind for part in held.op.kind.parts if part.name == name), held.op.kind)
            if FAMILIES[theirs.letter] != FAMILIES[kind.letter]:
                raise WrongKind(f"{brief(name)} is in use as another kind", name=name)

    # -- nodes that go down and come back ------------------------------------------------------------------------

    def reported(self, event: Event) -> None:
        """A node reports an event. The node counts as down once it has reported NodeDown: after an attempt to connect
        has failed, or after it was silent for too long. A connection that was lost a moment ago is no outage. If no
        majority is left, the claims that wait for a notice ask now: no notice will come, and their patience begins."""
        if isinstance(event, NodeUp):
            self._down.pop(event.node, None)
        elif isinstance(event, NodeDown):
            self._down[event.node] = None
            self._wake_all(Wake.GONE)

    def connected(self, missed: bool) -> None:
        """A node is connected again. If its notices may have been lost meanwhile (`missed`), all tickets are sent
        again. If a majority is connected, the claims whose last round had no majority ask again."""
        self._renew_soon()
        tickets = self.tickets.all() if missed else []
        self._wake(list(reversed(tickets)), waking_time(len(tickets)), Wake.MISSED)
        self._wake_all(Wake.BACK)

    def _holds_true(self, why: Wake) -> bool:
        if why is Wake.GONE:
            return len(self._down) >= self._nodes - self._nodes // 2
        return why is Wake.MISSED or self.core.quorum.is_up

    def _wake_all(self, why: Wake) -> None:
        if self._holds_true(why):
            self._wake(list(reversed(self.under_way)), waking_time(len(self.under_way)), why)

    def _wake(self, left: list[Claim] | list[TicketOwner], within: float, why: Wake) -> None:
        """They ask within so many seconds. They are woken in slices, for as long as the reason holds: other tasks of
        the loop run in between."""
        began = self.core.spent()
        while left and self._holds_true(why):
            left.pop().wake(within, why)
            if self.core.spent() - began > SLICE:
                self.core.later(self._wake, left, within, why)
                return

    def _renew_soon(self) -> None:
        """The only node is connected again, perhaps to another server that lacks holds, such as a replica that was
        promoted. Renew all holds, so that the owners of the missing ones learn it now, and not after a third of the
        lease."""
        if self._nodes == 1 and self.holds and self._renewals is None:
            self._renewals = self.holds.in_slices()
            self.core.later(self._renew_slice, waking_time(len(self.holds)))

    def _renew_slice(self, within: float) -> None:
        renewals, self._renewals = self._renewals, None
        for hold in renewals if renewals is not None and not self.core.closed else ():
            if hold is None:
                self._renewals = renewals
                self.core.later(self._renew_slice, within)
                return
            hold.renew_soon(self.core.clock.now() + uniform(self.core.random, 0.0, within))


def end_unwanted(result: Tenure | NoLease) -> None:
    """Its caller does not wait for it any more: the hold is passed on or released. One that was lost is released, too,
    since some node may still have it. One that was released may be another task's hold by now."""
    if isinstance(result, Tenure) and result.loss != "closed" and result.state is not RELEASED:
        result.mark_untaken()
        result.hold.end(result)


class Claim:
    """See the module. The events that each has are `start`, `settled`, the end of a pause, `wake`, `abandon`, `fail`
    and `close`."""

    __slots__ = ("_contended", "_core", "_give_up", "_machine", "_result", "future", "state", "terms")

    def __init__(self, machine: Machine, terms: Terms, give_up: float = math.inf) -> None:
        self.state: ClaimState = BEGAN
        self.terms = terms
        self._contended = False  # another client waits for what it gets, as far as it knows
        self._machine = machine
        self._core = core = machine.core
        self.future = core.result()  # its caller waits for it
        # Not stored in `future`: a loop refers to the future until the caller's task awaits something else, and would
        # keep the tenure until then.
        self._result: Tenure | NoLease | None = None
        self._give_up = give_up

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.terms.name!r}, {self.state!r}>"

    def start(self) -> None:
        """Begin it. Raises ConfigError, SelfDeadlock."""
        raise NotImplementedError

    def again(self) -> Claim:
        """The same claim once more, after its tenure has ended before its caller woke."""
        raise NotImplementedError

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone: ask within so many seconds, if it waits for that."""

    def _leave(self) -> None:
        """Undo what it sent. A second call does nothing."""
        raise NotImplementedError

    def _finish(self, has_it: bool) -> None:
        """It is done."""
        raise NotImplementedError

    # -- its rounds ----------------------------------------------------------------------------------------------

    def _await(self, state: Asking) -> None:
        """A round was sent. Its outcome is an event of a later turn (`settled`)."""
        self._enter(state)

    def settled(self, ballot: Ballot) -> None:
        """A round has its outcome."""
        state = self.state
        if not isinstance(state, Asking) or state.ballot is not ballot:
            return  # it gave up before
        try:
            if isinstance(state, Confirming):
                self._raised(state.won, ballot)
            elif ballot.outcome is WON:
                top, sure = ballot.token()
                if sure:
                    self._granted(ballot, top)
                else:
                    self._await(Confirming(self._ask_to_raise(ballot, top), ballot))
            else:
                self._without_grant(ballot)
        except BaseException as error:
            self._failed(error)

    def _ask_to_raise(self, ballot: Ballot, token: int) -> Ballot:
        """A ballot was won at nodes with different counters. The second round raises the counter F to the token on the
        nodes that granted the ballot. The token is certain once a majority of all nodes are witnesses of it
        (`ballot.py`, rule 4)."""
        op = ballot.op
        raised = Op(EXTEND, op.kind, op.name, op.id, op.lease, token, op.memory)
        return self._core.quorum.ask(raised, ballot.deadline - ballot.sent, on_settled=self.settled)

    def _raised(self, won: Ballot, second: Ballot) -> None:
        """After that second round. The token is that of its op, and not the greatest counter: votes that came late may
        have greater counters. A node that has lost the hold between the two rounds refuses the second one, and does not
        count (rule 5 of `hold.py`)."""
        if second.witnesses(second.op.fence):
            for index, vote in enumerate(second.votes):
                if isinstance(vote, Refused):
                    won.take_back(index, vote)
            self._granted(won, second.op.fence, second)
        elif second.outcome is UNREACHABLE and not second.denied:
            self._without_hold(won, second, UNREACHABLE)
        else:
            self._without_hold(won, won, REFUSED)

    def _granted(self, ballot: Ballot, token: int, second: Ballot | None = None) -> None:
        """The ballot is won, and a majority are witnesses of its token. `second`: the round that raised the counters;
        the hold counts its late votes."""
        hold = self._machine.holds.hold_of(self.terms.settings, ballot, token, self._contended)
        if hold is not None:
            self._win(hold, ballot)
            if second is not None:
                second.on_late_vote(hold.count)
        else:
            self._without_hold(ballot, ballot, REFUSED)

    def _win(self, hold: Hold, ballot: Ballot) -> None:
        """The hold of that ballot is there."""
        raise NotImplementedError

    def _without_grant(self, ballot: Ballot) -> None:
        """A round was not won."""
        raise NotImplementedError

    def _without_hold(self, won: Ballot, last: Ballot, outcome: Outcome) -> None:
        """A round was won, but made no hold: no validity is left, or no majority are witnesses of its token. `last`:
        the round to report, with that outcome."""
        raise NotImplementedError

    # -- its end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Its caller was cancelled, or has failed. What it sent is undone, and what it has is given back."""
        if self.state is not DONE:
            self.future.cancel()
            self._leave_and_finish()
        elif self._result is not None:
            end_unwanted(self.take())
        elif not self.future.cancelled():
            self.future.exception()  # read it, else asyncio logs that the exception was never retrieved

    def take(self) -> Tenure | NoLease:
        """The result, once."""
        result, self._result = self._result, None
        assert result is not None  # noqa: S101 - its future has ended
        return result

    def close(self) -> None:
        """The client closes."""
        if self.state is not DONE:
            self.fail(client_closed())

    def fail(self, error: BaseException) -> None:
        """Give up with that error."""
        if self.state is DONE:
            return
        error.__traceback__ = None  # else it refers to the frames of this object: a cycle
        if not self.future.done():
            self.future.set_exception(error)
        self._leave_and_finish()

    def _failed(self, error: BaseException) -> None:
        """An event has raised that error, which is being handled: the caller gets it. A KeyboardInterrupt also ends the
        turn of the loop."""
        self.fail(error)
        if not isinstance(error, Exception):
            raise  # noqa: PLE0704 - the error that is handled

    def _succeed(self, tenure: Tenure) -> None:
        # This must precede `end_unwanted`. In the other order, the queue would pass nothing on and let no other task
        # ask, because this claim is still the asker. Then `_finish(True)` would start no task either: the waiters of
        # this process would sleep.
        self._finish(True)
        if self.future.done():  # its caller was cancelled in this turn
            end_unwanted(tenure)
        else:
            self._result = tenure
            self.future.set_result(None)

    def _end_without(self, refusal: NoLease) -> None:
        """It gets no lease."""
        if not self.future.done():
            self._result = refusal
            self.future.set_result(None)
        self._leave_and_finish()

    def _leave_and_finish(self) -> None:
        """Even if an error or a KeyboardInterrupt ends `_leave`, the next task may ask."""
        try:
            self._leave()
        finally:
            self._finish(False)

    # -- its states ----------------------------------------------------------------------------------------------

    def _enter(self, state: ClaimState) -> None:
        """The next state."""
        before, self.state = self.state, state
        assert state.__class__ in NEXT[before.__class__], (before, state)  # noqa: S101 - a flaw of this module
        if before is not BEGAN:  # that one has nothing to end
            before.end()
