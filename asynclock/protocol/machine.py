"""Machine: what the claims of one client in one event loop share, and what a claim is.

A claim is an acquire or an adoption, from its first round until it has a tenure or gives up. Events move it from one
state to the next (`states.py`), and its caller waits for one future, which the last event completes. No method of it
waits, and none delivers its outcome inside the call: a round that fails at once is an event of the next turn. So a
release never runs through all waiters of a queue.

A cancel of the caller can arrive at one place only. What it finds there is under way, and is undone; or it is done, and
the tenure is passed on or released.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._errors import brief, client_closed
from asynclock._options import BROKEN_BY
from asynclock.events import NodeDown, NodeUp
from asynclock.protocol.attempt import Tickets, Wake
from asynclock.protocol.core import SLICE, uniform
from asynclock.protocol.hold import Holds, Tenure
from asynclock.protocol.local_queue import Entries, LocalQueues, YieldedNames
from asynclock.protocol.planner import waking_time
from asynclock.protocol.states import BEGAN, DONE, NEXT, Asking, Began
from asynclock.protocol.watchdog import Watchdog
from asynclock.rules.registry import FAMILIES
from asynclock.stores.port import WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asynclock.events import Event
    from asynclock.protocol.attempt import TicketOwner
    from asynclock.protocol.causes import NoLease
    from asynclock.protocol.core import Core
    from asynclock.protocol.hold import Hold
    from asynclock.protocol.terms import Terms
    from asynclock.protocol.watchdog import LoopLag
    from asynclock.quorum.ballot import Ballot
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
        self.entries = Entries(core)
        self.under_way: dict[Claim, None] = {}  # in the order in which they began
        self._nodes = nodes
        self._down: dict[str, None] = {}  # the labels of the nodes that are down
        self._renewals: Iterator[Hold | None] | None = None  # those that follow a new connection

    # -- notices -------------------------------------------------------------------------------------------------

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice."""
        waiter = self.tickets.get(notice.id)
        if waiter is not None:
            waiter.notified(index, notice)
        elif notice.number == 0:
            for hold in self.holds.of(notice.name):
                if notice.broken:
                    hold.broken(notice.id)
                elif not notice.expired:
                    hold.waited_for(notice.id)
                elif hold.op.id.startswith(notice.id):
                    hold.lose("expired")
            name, marked, by = notice.name.rpartition(BROKEN_BY)
            for hold in self.holds.of(name) if marked and notice.broken else ():
                hold.broken(notice.id, by)

    def check_kind(self, name: str, kind: Kind) -> None:
        """Raise WrongKind where a task of this process holds the name as another kind. The server would refuse it, too,
        but a task in the local queue does not ask the server."""
        family = FAMILIES[kind.letter]
        for hold in self.holds.of(name):
            held = next((part.kind for part in hold.op.kind.parts if part.name == name), hold.op.kind)
            if FAMILIES[held.letter] != family and any(tenure.held for tenure in hold.tenures):
                raise WrongKind(f"{brief(name)} is in use as another kind", name=name)

    # -- nodes that go down and come back ------------------------------------------------------------------------

    def reported(self, event: Event) -> None:
        """A node tells something. It is down once it told so: an attempt to connect has failed, or it was silent for
        too long. A connection that was lost a moment ago is no outage. If no majority is left, the claims that wait for
        a notice ask now: none will come, and their patience begins."""
        if isinstance(event, NodeUp):
            self._down.pop(event.node, None)
        elif isinstance(event, NodeDown):
            self._down[event.node] = None
            self._wake_all(Wake.GONE)

    def connected(self, missed: bool) -> None:
        """A node is connected again. If its notices may have been lost meanwhile (`missed`), all tickets are sent
        again. If a majority is connected, the claims that wait for that ask again."""
        self._renew_soon()
        self._wake(self.tickets.all() if missed else [], waking_time(1), Wake.MISSED)
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
        promoted. Renew all holds, so that the owners of those learn it now, and not after a third of the lease."""
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


def give_back(result: Tenure | NoLease) -> None:
    """Its caller does not wait for it any more: the hold is passed on or released. One that was lost is released, too,
    since some node may still have it."""
    if isinstance(result, Tenure) and result.loss != "closed":
        result.mark_untaken()
        result.hold.end(result)


class Claim:
    """See the module. The events that each has are `start`, the outcome of a round, the end of a pause, `wake`,
    `abandon`, `fail` and `close`."""

    state: Began = BEGAN  # most claims end at once: what they do not need is not set for each of them

    def __init__(self, machine: Machine, terms: Terms, give_up: float = math.inf) -> None:
        self.terms = terms
        self._machine = machine
        self._core = core = machine.core
        self.future = core.result()  # its caller waits for it
        # Not in the future: a loop refers to that until the caller's task waits for something else.
        self._result: Tenure | NoLease | None = None
        self._give_up = give_up

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.terms.name!r}, {self.state!r}>"

    def start(self) -> None:
        """Begin it. Raises ConfigError, SelfDeadlock."""
        raise NotImplementedError

    def again(self) -> Claim:
        """The same claim once more, after its tenure was lost before its caller woke."""
        raise NotImplementedError

    def wake(self, within: float, why: Wake) -> None:
        """The nodes are back, or gone: ask within so many seconds, if it waits for that."""

    def _leave(self) -> None:
        """Undo what it sent. A second call does nothing."""
        raise NotImplementedError

    def _finish(self, has_it: bool) -> None:
        """It is done."""
        raise NotImplementedError

    def _settled(self, ballot: Ballot) -> None:
        """A round has its outcome."""
        raise NotImplementedError

    # -- its end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Its caller was cancelled, or has failed. What it sent is undone, and what it has is given back."""
        if self.state is not DONE:
            self.future.cancel()
            self._leave_and_finish()
        elif self._result is not None:
            give_back(self.take())
        elif not self.future.cancelled():
            self.future.exception()  # else its end is reported as an error that nobody saw

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

    def _succeed(self, tenure: Tenure) -> None:
        self._finish(True)
        if self.future.done():  # its caller was cancelled in this turn
            give_back(tenure)
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
        """The next task may ask also if an error or a KeyboardInterrupt ends the first half."""
        try:
            self._leave()
        finally:
            self._finish(False)

    # -- its states ----------------------------------------------------------------------------------------------

    def _enter(self, state: Began) -> None:
        """The next state."""
        before, self.state = self.state, state
        assert state.__class__ in NEXT[before.__class__], (before, state)  # noqa: S101 - a flaw of this module
        before.end()

    def _await(self, state: Asking) -> None:
        """Go on with the outcome of its round, which is an event of a later turn."""
        self._enter(state)
        state.ballot.when_settled(self._settled)
