"""The local queue: tasks of one process that want the same name. Only the first of them asks the servers.

A release may pass the hold to the next task without a round trip: while fences of its span are left, for at most
PASSING seconds after the round trip of its grant, and while a third of the lease remains. So another client waits for
at most SPAN tenures of this process, whether or not this process knows of it. Then the release is sent, with the next
task's attempt behind it in the same write.

While a majority is out of reach, too, only the first asks. Those behind it get its error when their time or the
patience of the client ends. So thousands of tasks do not ask at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._options import QUORUM_TIMEOUT
from asynclock.protocol.core import SLICE
from asynclock.protocol.planner import answer_from

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from asynclock._errors import LockError
    from asynclock._time import Timer
    from asynclock.protocol.core import Core, Result
    from asynclock.protocol.planner import Planner
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind

SPAN = 16
"""One round trip serves at most this many tenures, each with a fence of its own."""

PASSING = 0.005
"""Seconds after the round trip of its grant for which a hold may be passed on."""


def may_pass(now: float, last_round_trip: float, valid_until: float, lease: float, fences_left: int) -> bool:
    """Whether a hold may be passed on once more. Pure."""
    return fences_left > 0 and now - last_round_trip <= PASSING and valid_until - now >= lease / 3


class Enqueued(Protocol):
    """An acquisition, as its queue sees it."""

    terms: Terms
    future: Result
    planner: Planner | None
    asked_late: bool

    @property
    def unanswered_round(self) -> Ballot | None:
        """The round under way."""

    def followed_by(self, queue: LocalQueue) -> None:
        """It asked alone. Another task has come, and waits behind it in this queue."""

    def passed(self, hold: Any) -> None:
        """A task of this process has passed the hold on."""

    def turn_to_ask(self, outage: LockError | None, patience_ends: float) -> None:
        """It is the first of its queue: ask. `outage`: the error of the asker before it, if no majority answered that
        one; None: there is no outage."""

    def renew_ticket_at(self, at: float) -> None:
        """A task behind it must know whether the name is still held: renew the ticket at that time."""

    def time_up_in_queue(self, waiter: LocalWaiter) -> None:
        """Its time is up, or the answer has come that it waited for."""

    def fail(self, error: BaseException) -> None:
        """Give up with that error."""

    def owner_entered(self) -> None:
        """The acquire of the other task of its owner has ended: with the hold, or without."""

    def owner_time_up(self) -> None:
        """Its time is up, and another task of its owner still asks."""


class LocalWaiter:
    """An acquisition in the queue. It leaves when it gets a tenure, when it is its turn to ask, when its time or its
    patience for an outage ends, when its caller is cancelled, or when the client closes."""

    __slots__ = ("_give_up", "_joined", "_late", "_queue", "_timer", "acquisition", "core")

    def __init__(self, acquisition: Enqueued, queue: LocalQueue, core: Core, give_up: float) -> None:
        self.acquisition = acquisition
        self._queue = queue
        self.core = core
        self._joined = core.clock.now()
        self._late = acquisition.asked_late  # it waits for the next answer only; see `Acquisition.asked_late`
        self._give_up = give_up
        self._timer: Timer | None = None
        queue.join(self, late=self._late)
        if give_up != math.inf:
            self._timer = core.clock.call_at(self.answer_from, self._ask_before_end)

    def __repr__(self) -> str:
        return f"<LocalWaiter of {self._queue.name!r}>"

    @property
    def answer_from(self) -> float:
        """The earliest time at which an answer to the asker is recent enough: see `planner.answer_from`. It is computed
        again each time, because the round trip of the asker may not have been known before."""
        if self._late:
            return self._joined
        terms = self.acquisition.terms
        return answer_from(self._give_up, terms.timeout, self.core.within(terms.settings), self._queue.rtt)

    def _ask_before_end(self) -> None:
        """Its time is up soon. Before that, a recent answer of a majority must show that another owner holds the name.
        One question of the asker serves all waiters whose time is up at about the same time. So the asker waits a
        little, if that leaves at least two round trips for the answer."""
        queue, begin = self._queue, self.answer_from
        self._timer = self.core.clock.call_at(self._give_up, self.time_up)
        if queue.asker is not None and queue.outage is None and queue.answered_at < begin:
            left = self._give_up - begin
            queue.asker.renew_ticket_at(begin + max(0.0, min(left / 4, left - 2 * queue.rtt)))

    def check_knows_enough(self, *, again: bool) -> bool:
        """Its time is up, and it leaves the queue. True: a task of this process holds the name, or a majority has
        answered the asker lately, so the waiter is refused. False, only with `again`: the loop was blocked, so the
        asker asks late, and the waiter waits for that answer. Raises QuorumUnavailable if a majority is out of reach,
        or has not answered the asker lately: then it is unknown whether the name is held."""
        queue, begin = self._queue, self.answer_from
        if queue.outage is not None:
            raise copy(queue.outage)
        if (asker := queue.asker) is None or queue.answered_at >= begin:
            return True
        planner, ballot = asker.planner, asker.unanswered_round
        if planner is not None and planner.interrupted is not None:
            raise copy(planner.interrupted)
        if ballot is not None and ballot.answered:  # a majority has answered; the round waits for the other nodes
            return True
        if again and (ballot is None or ballot.sent > (begin + self._give_up) / 2):
            return False
        quorum = self.core.quorum
        if ballot is not None:
            raise quorum.unavailable(ballot, queue.name)
        not_asked = TimeoutError("it was not asked in time, as the event loop was blocked")
        raise quorum.unavailable_nodes(dict.fromkeys(range(len(quorum.nodes)), not_asked), queue.name)

    @property
    def waits(self) -> bool:
        """Whether its acquire has not ended, and its task was not cancelled."""
        return not self.acquisition.future.done()

    @property
    def _patience_ends(self) -> float:
        """When its patience for the outage ends."""
        return max(self._queue.outage_began, self._joined) + self.core.settings.patience

    def is_impatient(self) -> bool:
        """Whether its patience for the outage has ended."""
        return self.core.clock.now() >= self._patience_ends

    def leave(self) -> None:
        """Harmless for a waiter that has left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._late:
            self._queue.end_late(self)
        self._queue.leave(self)

    def take(self, hold: Any) -> None:
        """The hold is passed to it. The caller has checked that it still waits."""
        self.acquisition.passed(hold)

    def ask(self) -> None:
        """It is the first now. Its first round is sent in this turn of the loop."""
        self.leave()
        self.acquisition.turn_to_ask(self._queue.outage, self._patience_ends)

    def fail(self, outage: LockError) -> None:
        """Its patience for the outage has ended."""
        self.acquisition.fail(copy(outage))

    def time_up(self) -> None:
        """Its time is up, or the answer has come for which it waited. If the asker asks late, it joins the queue again,
        once, to wait for that answer."""
        if self.waits:
            self.acquisition.time_up_in_queue(self)


class LocalQueue:
    """The queue of one name. It exists while a task waits in it, and while its asker asks."""

    __slots__ = ("_late", "_queues", "_waiters", "answered_at", "asker", "name", "outage", "outage_began", "rtt")

    def __init__(self, queues: LocalQueues, name: str, asker: Enqueued | None) -> None:
        planner = asker.planner if asker is not None else None
        self._queues = queues
        self.name = name
        self.asker = asker  # the acquisition that asks the servers; None: a task of this process holds the name
        # When a majority answered an asker last, or a task of this process had the hold. An outage does not reset it:
        # those that read it look at `outage` first.
        self.answered_at = planner.answered_at if planner is not None else -math.inf
        self.rtt = planner.rtt if planner is not None else 0.0  # seconds that this answer took; 0.0: not known yet
        self.outage: LockError | None = None  # the error of the last round, if no majority answered it
        self.outage_began = 0.0
        # Those that asked late, oldest first. Each leaves with its reply, at the latest after the next answer of a
        # majority, or when its task is cancelled.
        self._late: OrderedDict[LocalWaiter, None] | None = None
        self._waiters: OrderedDict[LocalWaiter, None] | None = None  # in order; each can leave in constant time

    @property
    def waiting(self) -> int:
        """The number of tasks that wait here."""
        return len(self._waiters) if self._waiters and self.next_waiter() is not None else 0

    def join(self, waiter: LocalWaiter, *, late: bool = False) -> None:
        """`late`: the next answer of a majority is its reply."""
        if self._waiters is None:
            self._waiters = OrderedDict()
        self._waiters[waiter] = None
        if late:
            if self._late is None:
                self._late = OrderedDict()
            self._late[waiter] = None

    def end_late(self, waiter: LocalWaiter) -> None:
        """It has its reply, or its task was cancelled. Harmless for a waiter that did not ask late."""
        if self._late:
            self._late.pop(waiter, None)

    def leave(self, waiter: LocalWaiter) -> None:
        """Harmless for a waiter that is not in the queue."""
        if self._waiters:
            self._waiters.pop(waiter, None)
        if not self._waiters and self.asker is None:
            self._end()

    def next_waiter(self) -> LocalWaiter | None:
        """The first that still waits."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if waiter.waits:
                return waiter
            del self._waiters[waiter]
        return None

    def answered(self, at: float, rtt: float) -> None:
        """A majority has answered the asker, `rtt` seconds after it was asked."""
        self.answered_at, self.rtt = at, rtt or self.rtt
        self.outage = None
        if self._late:
            self._tell_late()

    def _tell_late(self) -> None:
        """Reply to those that asked late before the last answer; in slices, between which other code of the loop
        runs."""
        began: float | None = None
        while self._late and (waiter := next(iter(self._late))).answer_from <= self.answered_at:
            if began is None:
                began = waiter.core.spent()
            elif waiter.core.spent() - began > SLICE:
                waiter.core.later(self._tell_late)
                return
            del self._late[waiter]
            waiter.time_up()

    def begin_outage(self, error: LockError, began: float) -> None:
        """No majority answered the round that the asker sent at `began`. It tries again, and those that wait here send
        nothing."""
        if self.outage is None:
            self.outage_began = began
        self.outage = error

    def end_asking(self, has_it: bool) -> None:
        """The asker has got the hold (`has_it`), or has given up."""
        if has_it:
            self.outage = None
        if self._waiters is None:  # the usual case: as `_end`, with one call less
            self._queues.remove(self)
        elif not has_it:
            self.next_turn()
        elif self.next_waiter() is None:
            self._end()
        else:
            self.asker = None

    def hold_ended(self) -> None:
        """A task of this process had the hold."""
        if (waiter := self.next_waiter()) is not None:
            self.answered_at = waiter.core.clock.now()
        self.next_turn()

    def next_turn(self) -> None:
        """No task of this process asks or holds the name: the first waiter asks."""
        self.asker = None
        if self.outage is not None and not self._end_patience(self.outage):
            return
        waiter = self.next_waiter()
        if waiter is None:
            self._end()
        elif not self._queues.closed:
            self.asker = waiter.acquisition
            waiter.ask()

    def _end_patience(self, outage: LockError) -> bool:
        """Give the error of the outage to those whose patience has ended. The patience of the first waiter ends first.
        False: the rest follows in the next turn of the loop."""
        began: float | None = None
        while (waiter := self.next_waiter()) is not None and waiter.is_impatient():
            if began is None:
                began = waiter.core.spent()
            elif waiter.core.spent() - began > SLICE:
                waiter.core.later(self._go_on)
                return False
            waiter.fail(outage)
        return True

    def _go_on(self) -> None:
        if self.asker is None:
            self.next_turn()

    def _end(self) -> None:
        self._queues.remove(self)


class LocalQueues:
    """The local queues of one session, by name."""

    __slots__ = ("_alone", "by_name", "closed")

    def __init__(self) -> None:
        self.by_name: dict[str, LocalQueue] = {}  # each acquire and release reads it: it is mostly empty
        self._alone: dict[str, Enqueued] = {}  # those that ask, and have no queue behind them yet
        self.closed = False

    def close(self) -> None:
        """From now on no hold is passed on, and no waiting task becomes the asker."""
        self.closed = True

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def begin_alone(self, asker: Enqueued) -> bool:
        """A task asks. Its name has no queue: `of` makes one when a second task comes. False: another task asks."""
        return self._alone.setdefault(asker.terms.name, asker) is asker

    def is_alone(self, asker: Enqueued) -> bool:
        """Whether it asks, and no task waits behind it."""
        return self._alone.get(asker.terms.name) is asker

    def end_alone(self, asker: Enqueued) -> None:
        """It does not ask any more. Harmless for a task that does not ask alone."""
        if self._alone.get(asker.terms.name) is asker:
            del self._alone[asker.terms.name]

    def of(self, name: str) -> LocalQueue:
        """The queue of a name that a task of this process holds or asks for."""
        queue = self.by_name.get(name)
        if queue is None:
            asker = self._alone.pop(name, None)
            queue = self.by_name[name] = LocalQueue(self, name, asker)
            if asker is not None:
                asker.followed_by(queue)
        return queue

    def remove(self, queue: LocalQueue) -> None:
        if self.by_name.get(queue.name) is queue:
            del self.by_name[queue.name]

    def first_waiter(self, name: str) -> LocalWaiter | None:
        """The task of this process to which a hold of that name may be passed on; None: there is none."""
        if not self.by_name or self.closed:
            return None
        queue = self.by_name.get(name)
        return queue.next_waiter() if queue is not None and queue.asker is None else None

    def next_turn(self, names: Iterable[str]) -> None:
        """A hold of these names has ended: the next task of this process asks."""
        if self.by_name and not self.closed:
            for name in names:
                queue = self.by_name.get(name)
                if queue is not None and queue.asker is None:
                    queue.hold_ended()


# -- names that were given to other clients ----------------------------------------------------------------------------


class YieldedNames:
    """The names that were released to waiters of other clients a moment ago. The servers have notified those waiters. A
    task of this process that comes a moment later enqueues behind them, so that it does not overtake them."""

    __slots__ = ("_at", "_now", "_used")

    def __init__(self, now: Callable[[], float], used: bool) -> None:
        self._now = now
        self._used = used  # not at a single node: a notice grants there, so that no waiter can be overtaken
        self._at: dict[str, float] = {}  # name -> when it was released, oldest first

    def __bool__(self) -> bool:
        return bool(self._at)

    def add(self, kind: Kind, name: str) -> None:
        """Only for the mutex that is not fair. The other kinds enter after the tickets that the nodes keep
        (`Kind.respects_queue`)."""
        if not self._used or kind.fair or kind.shared:
            return
        now = self._now()
        self._at.pop(name, None)
        while self._at and now - next(iter(self._at.values())) > QUORUM_TIMEOUT:
            del self._at[next(iter(self._at))]
        self._at[name] = now

    def take(self, name: str) -> bool:
        """Whether the name was released a moment ago. True at most once for each release."""
        at = self._at.pop(name, None)
        return at is not None and self._now() - at <= QUORUM_TIMEOUT


# -- the owners of reentrant locks -------------------------------------------------------------------------------------


class Entry:
    """A task of the owner of a reentrant lock asks for the hold. Other tasks of that owner wait for its end."""

    __slots__ = ("_waiters", "asker")

    def __init__(self, asker: Enqueued) -> None:
        self.asker = asker
        self._waiters: dict[Enqueued, Timer | None] = {}  # in their order

    def join(self, waiter: Enqueued, core: Core, give_up: float) -> None:
        """It waits until that time."""
        self._waiters[waiter] = None if give_up == math.inf else core.clock.call_at(give_up, waiter.owner_time_up)

    def leave(self, waiter: Enqueued) -> None:
        if (timer := self._waiters.pop(waiter, None)) is not None:
            timer.cancel()

    def ended(self, core: Core) -> None:
        """Those that wait enter, too, or one of them asks and the others wait for it. In slices, too."""
        began = core.spent()
        try:
            while self._waiters:
                waiter = next(iter(self._waiters))
                self.leave(waiter)
                waiter.owner_entered()
                if core.spent() - began > SLICE:
                    return
        finally:  # also after a KeyboardInterrupt
            if self._waiters:
                core.later(self.ended, core)


class Entries:
    """The entries that are under way: at most one for each name and owner."""

    __slots__ = ("_core", "_under_way")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._under_way: dict[tuple[str, Hashable], Entry] = {}

    def get(self, name: str, owner: Hashable) -> Entry | None:
        """The entry under way; None: there is none."""
        return self._under_way.get((name, owner))

    def begin(self, asker: Enqueued) -> None:
        self._under_way[asker.terms.name, asker.terms.owner] = Entry(asker)

    def end(self, asker: Enqueued) -> None:
        """It has the hold, or gives up. Harmless for a task that does not ask for its owner."""
        key = asker.terms.name, asker.terms.owner
        if (entry := self._under_way.get(key)) is not None and entry.asker is asker:
            del self._under_way[key]
            self._core.later(entry.ended, self._core)
