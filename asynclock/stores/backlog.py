"""The ops of one node that wait while enough others are under way. What waits here has not left the client.

The rules:

1. Ops that keep a lock or free it are urgent: they begin before those that ask for one. An acquire is urgent, too, once
   the store has granted the ticket of its id: the name is taken, and nobody works under it before the answer. Within
   each of these two groups ops begin in the order in which they were sent, or became urgent.
2. A release removes the acquire of its id that waits. If no op of that id ever began, the release need not be sent.
3. The time that a node has for an op counts from when the op begins. The wait is bounded, too: for an acquire by its
   caller, which sends the release of rule 2 when its time is over; for a renewal by the lease; for the others by
   `_LONGEST_WAIT`. An op whose time is over is dropped, except for a release: a hold that nobody wants must end.
4. An acquire does not begin if its caller would be gone before the answer comes. Else a queue that is longer than the
   callers' timeouts would carry out nothing but acquires that are undone at once. One that was granted begins (rule 1).
5. At most `LONGEST` ops that are not urgent wait. The others have no such limit: there are as many as there are holds.
6. One of several nodes does not defer an op: its time counts from when it was sent, as at the other nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from asynclock._options import RELEASE_TIMEOUT
from asynclock.rules.model import ACQUIRE, ADOPT, BREAK, EXTEND, ID_LENGTH, RELEASE, WAIT
from asynclock.stores.port import deferrable

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock, Timer
    from asynclock.rules.model import Op
    from asynclock.stores.port import Deferrable, NodeConfig, ReplyHandler

LONGEST = 10_000
"""See rule 5."""

SLICE = 100
"""Ops that one turn of the event loop begins or drops, at most."""

_LONGEST_WAIT = RELEASE_TIMEOUT
"""Seconds. See rule 3."""

_URGENT = (EXTEND, RELEASE, ADOPT, BREAK)
_OF_A_HOLD = (EXTEND, RELEASE, WAIT)

_MARGIN = 2.0
"""An acquire begins if its caller waits for so many times the usual time of an acquire, ..."""

_MOST_MARGIN = 0.5
"""... or for this part of its whole time, if that is less: a slow server gets acquires, too."""

_WEIGHT = 0.1
"""Of the last acquire in that usual time."""


class Asked:
    """An op that was sent, and the handler of its answer."""

    __slots__ = (
        "_timer", "deferred", "handler", "in_lane", "is_granted", "op", "passed_over", "until", "urgent", "waits",
    )  # fmt: skip

    def __init__(self, op: Op, handler: ReplyHandler) -> None:
        self.op = op
        self.handler = handler
        self.urgent = op.verb in _URGENT  # or an urgent op must come after it
        self.waits = False  # a failure in the queue goes to its handler
        self.in_lane = False  # it may begin
        self.deferred: Deferrable | None = None  # its handler, if its time counts from when it begins
        self.is_granted = False  # the store has granted the ticket that it renews
        self.passed_over = False  # it was too late for it, and `dropped` was called
        self.until = math.inf  # it waits until then at most
        self._timer: Timer | None = None

    @property
    def may_be_done(self) -> bool:
        """Whether an op of its id has begun, even if this one has not."""
        return self.op.verb in _OF_A_HOLD or self.op.sent > 0

    def call_at_end(self, clock: Clock, overdue: Callable[[], object]) -> None:
        """Call `overdue` when its time in the queue is over."""
        if self.until < math.inf:
            self._timer = clock.call_at(self.until, overdue)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_Asked = TypeVar("_Asked", bound=Asked)


class Backlog(Generic[_Asked]):
    """See the module. `begin` is called with each op that begins, while there is room (`has_room`), and `dropped` with
    each op that does not begin any more. The handler of such an op gets its error in the next turn of the loop; if the
    op is too late (rule 4), when its caller gives up. `alone`: the node is the only one of its client (rule 6)."""

    def __init__(
        self,
        label: str,
        config: NodeConfig,
        has_room: Callable[[], bool],
        begin: Callable[[_Asked], object],
        dropped: Callable[[_Asked], object],
        *,
        alone: bool,
    ) -> None:
        self._label = label
        self._index = config.position
        self._clock = config.clock
        self._has_room = has_room
        self._begin = begin
        self._dropped = dropped
        self._alone = alone
        self._lanes: tuple[OrderedDict[_Asked, None], ...] = (OrderedDict(), OrderedDict())  # the urgent one first
        self._acquires: OrderedDict[str, _Asked] = OrderedDict()  # that wait, by the random part of their id
        self._length = 0  # the ops that wait, without those that were sent as urgent ones
        self._why = self._is_waiting  # one object for all that wait
        self._usual = 0.0  # seconds from the begin of an acquire to its answer
        self._begins = False  # more of them begin in the next turn of the loop

    def __len__(self) -> int:
        return self._length

    @property
    def can_begin(self) -> bool:
        """Whether an op waits that may begin."""
        return bool(self._lanes[0] or self._lanes[1])

    # -- waiting -------------------------------------------------------------------------------------------------

    def put(self, asked: _Asked) -> bool:
        """Let it wait. False: there is no room, and it was dropped. It begins once it is `ready`."""
        asked.waits = True
        op, handler = asked.op, asked.handler
        if op.verb not in _URGENT:
            self._length += 1
            if self._length > LONGEST:
                self._drop(asked, self._own_queue("it is full"))
                return False
        if op.verb is ACQUIRE:
            if (older := self._acquires.get(op.id[:ID_LENGTH])) is not None:
                self._drop(older, self._own_queue("a later request of the same owner came"))
            self._acquires[op.id[:ID_LENGTH]] = asked
        asked.deferred = deferrable(handler) if self._alone else None
        if asked.deferred is not None:
            asked.deferred.defer(self._why)
        asked.until = handler.deadline if asked.deferred is None else _longest_wait(op, handler)
        asked.call_at_end(self._clock, partial(self._overdue, asked))
        return True

    def ready(self, asked: _Asked) -> None:
        """No earlier op has to come before it."""
        asked.in_lane = True
        self._lanes[not asked.urgent][asked] = None

    def hurry(self, asked: _Asked) -> None:
        """An urgent op comes after it."""
        if asked.in_lane and not asked.urgent:
            del self._lanes[1][asked]
            self._lanes[0][asked] = None
        asked.urgent = True

    def granted(self, id: str) -> None:
        """The store has granted the ticket of that id, or of that random part of one. Its renewal is urgent if it waits
        here: until its answer comes, its owner does not use the notice of the grant."""
        if (asked := self._acquires.get(id[:ID_LENGTH])) is not None:
            asked.is_granted = True
            self.hurry(asked)

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin_more(self) -> None:
        """Begin those whose turn has come; the rest of many in the next turn of the loop."""
        self._begins = False
        for _ in range(SLICE):
            if not self.can_begin or not self._has_room():
                return
            if (asked := self._take()) is None:
                break
            self._begin(asked)
        self.begin_soon()

    def begin_soon(self) -> None:
        """The same from the next turn of the loop on."""
        if not self._begins and self.can_begin and self._has_room():
            self._begins = True
            asyncio.get_running_loop().call_soon(self.begin_more)

    def _take(self) -> _Asked | None:
        """The next op, which begins now. None: there is none, or too many were dropped in this turn (`can_begin`)."""
        now, passed_over = self._clock.now(), 0
        for lane in self._lanes:
            while lane and passed_over < SLICE:
                asked, _ = lane.popitem(last=False)
                asked.in_lane = False
                if self._is_too_late(asked, now):
                    passed_over += 1
                    asked.passed_over = True  # it waits still, until its caller gives up (rule 2)
                    self._dropped(asked)
                    continue
                self._leave(asked)
                if asked.deferred is not None:
                    asked.deferred.begin(now)
                return asked
        return None

    def _is_too_late(self, asked: _Asked, now: float) -> bool:
        """Rule 4."""
        if asked.op.verb is not ACQUIRE or asked.deferred is None or asked.is_granted:
            return False
        gives_up = asked.deferred.gives_up
        return gives_up - now < min(self._usual * _MARGIN, (gives_up - asked.handler.sent) * _MOST_MARGIN)

    def took(self, seconds: float) -> None:
        """An acquire had its answer so long after it began."""
        self._usual += (seconds - self._usual) * _WEIGHT

    # -- dropping ------------------------------------------------------------------------------------------------

    def undo(self, id: str) -> bool:
        """The owner of that id gives up. Its acquire is dropped if it waits. Whether it is certain that no op of that
        id ever began: then there is nothing to release."""
        asked = self._acquires.get(id[:ID_LENGTH])
        if asked is None:
            return False
        self._drop(asked, LookupError("its owner gave up before it was sent"))
        return self._alone and not asked.may_be_done  # a quorum heals a hold by another acquire of its id

    def drop(self, asked: _Asked, error: Exception) -> None:
        """It does not begin. Harmless for an op that has begun."""
        if asked.waits:
            self._drop(asked, error)

    def fail(self, why: Callable[[], Exception | None]) -> None:
        """Drop the acquires that wait, in slices, as long as there is a reason `why`."""
        error = why()
        if error is None or not self._acquires:
            return
        for asked in list(islice(self._acquires.values(), SLICE)):
            self._drop(asked, error)
        asyncio.get_running_loop().call_soon(self.fail, why)

    async def aclose(self, error: Exception) -> None:
        """Drop all that waits, in slices. Ops that are under way go on, and let others begin when they end. The
        handlers of releases get their errors when their time is over, as if they had been sent."""
        while left := [*self._lanes[0], *self._lanes[1], *self._acquires.values()][:SLICE]:
            for asked in left:
                if asked.op.verb is RELEASE:
                    self._leave_lane(asked)
                    self._dropped(asked)
                else:
                    self.drop(asked, error)
            await asyncio.sleep(0)

    def _overdue(self, asked: _Asked) -> None:
        error = self._is_waiting()
        if asked.op.verb is RELEASE:
            asked.handler.fail(self._index, error, maybe=True)
        else:
            self._drop(asked, error)

    def _drop(self, asked: _Asked, error: Exception) -> None:
        self._leave(asked)
        maybe = asked.may_be_done
        asyncio.get_running_loop().call_soon(partial(asked.handler.fail, self._index, error, maybe=maybe))
        if not asked.passed_over:
            self._dropped(asked)

    def _leave(self, asked: _Asked) -> None:
        """It does not wait any more."""
        asked.waits = False
        asked.cancel_timer()
        self._leave_lane(asked)
        if asked.op.verb not in _URGENT:
            self._length -= 1
        if self._acquires.get(key := asked.op.id[:ID_LENGTH]) is asked:
            del self._acquires[key]

    def _leave_lane(self, asked: _Asked) -> None:
        if asked.in_lane:
            asked.in_lane = False
            del self._lanes[not asked.urgent][asked]

    def _is_waiting(self) -> TimeoutError:
        return self._own_queue("the turn of this one did not come")

    def _own_queue(self, what: str) -> TimeoutError:
        return TimeoutError(
            f"{self._label}: the queue of this client has {self._length} requests that were not sent yet, and {what}: "
            "ask for fewer locks at the same time, or give a longer timeout"
        )


def _longest_wait(op: Op, handler: ReplyHandler) -> float:
    """Until when an op waits in the queue of the only node (rule 3)."""
    if op.verb is ACQUIRE:
        return math.inf
    return max(handler.deadline, handler.sent + (op.lease if op.verb is EXTEND else _LONGEST_WAIT))
