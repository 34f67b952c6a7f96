"""The rules that all kinds and stores share: how one node decides an op. Pure: no I/O, no clock.

    Op       a request to one node, for one id (`model.py`)
    State    the state of one name at one node: holds, fence, tombstones, tickets (`model.py`)
    decide   (kind, state, op, now) -> Reply, which has the next state and the notices to send

`decide` and the scripts (stores/redis/scripts/*.lua) keep these rules:

1. An id that was undone is refused while its tombstone exists, because its acquire arrives too late.
2. An id that holds already is granted again. The end of its hold can move later by that, never earlier.
3. A new hold gets the fences up to F := max(F + 1, P) + span - 1. P is the client's clock, clamped to the node's own
   +- CLOCK_SKEW. So the counters of all nodes agree without messages, and a counter that was lost starts above all
   fences that it gave.
4. An extend is for the holder alone. It never creates a key.
5. A release removes the hold and the ticket of its id, and no others. An undo may bring the ticket of its waiter: it is
   put back only where the undo removes a hold, because a refused attempt has left it in the queue. So an undo that
   arrives late stores no ticket that was withdrawn meanwhile. An adopt gives the hold of a known id to another
   id, with new fences. A break removes the holds that asynclock made, notifies their holders, first of who breaks them
   (BROKEN_BY), and serves the queue. It removes the hold of another program only with the id ANY.
6. An extend and a release raise F to the token that they carry, whether or not the id holds. So a node that missed the
   token catches up.
7. A refused attempt that waits leaves a ticket, which expires like a lease. The queue is in the order of the tickets'
   order keys. The order key of a ticket is the same at every node and in every renewal.
8. An op that frees the name, or that finds it free and cannot enter, serves the queue. The first ticket that is fresh,
   and whose client listens, is woken (over N nodes) or becomes the holder (at a node alone), with a notice. At a node
   alone a client that polls becomes the holder, too, and finds that when it asks again. The waiter after it is
   notified, since the release of that holder may notify nobody. Stale tickets, and tickets whose client does not
   listen, are dropped; a client that is alive renews its ticket in the old place. A kind that several ids can hold
   serves as many tickets as can enter together, at most SERVED; the last LAST of them continue the batch. An op visits
   at most VISITED tickets. An attempt at such a kind, as at a fair mutex, enters after the tickets that can enter now,
   so that a client that acquires again at once starves nobody; a reader enters after a writer that cannot enter yet,
   too. A waiter that was woken counts as entering, and is notified no more until it sends its ticket again: else each
   release and each attempt would notify all that are on their way. An op passes the tickets that want fewer permits
   than its own, and cannot enter now; and where it enters itself, it leaves room for those that were woken. A waiter
   for several names (span 0) is woken and never becomes the holder. While a name rests (min_hold, `once`), the first
   waiter is notified of when that ends: by the release that begins it, and by one that leaves only rests; by the first
   waiter, if it leaves; and by a waiter that has entered, which sends the release of an id that nobody has used.
9. A mutex hold is marked while others wait for it. So the server's own compare-and-delete does not match it, and the
   release goes through the script, which serves them.
10. A peek replies whether an acquire without a ticket would enter now, and changes nothing. It does not know which
   clients listen, so it takes each fresh ticket for one that is served.
11. An acquire that serves nobody heals: its id already holds the name at a majority of the nodes, and this node lacks
   the hold. So it does not wait behind the tickets of the queue. The rules 1 and 2 and the holders count as for any
   acquire. The acquires of a round always serve.
12. A release with MARKS_FREE belongs to a run of `once` that has returned. Where the name is free, or marked as done
   already, it sets the mark as if its id held the name. It never shortens a mark, and it does nothing to the hold of
   another id.

Times are in seconds; `now` is the Unix time of the node. A store converts them to its own units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from asynclock._options import BROKEN_BY
from asynclock.rules.model import (
    ANY,
    CLOCK_SKEW,
    DONE,
    ID_LENGTH,
    LAST,
    RESTING,
    RESTING_MARK,
    SERVED,
    VISITED,
    Entry,
    Notice,
    Op,
    Reply,
    Serve,
    State,
    Ticket,
    Verb,
    Verdict,
    is_made_by_asynclock,
    is_ours,
    polls,
    rests,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.rules.model import Rule

HasListener: TypeAlias = Callable[[str], bool | None]
"""Whether a client listens to the channel of a tag; None: the node has no permission to publish."""


def decide(kind: Rule, state: State, op: Op, now: float, has_listener: HasListener = lambda tag: True) -> Reply:
    """The answer of a node in `state` to `op` at `now`. The memory store runs it; tests compare the scripts with it."""
    decision = Decision(kind, state.at(now), op, now, has_listener)
    match op.verb:
        case Verb.ACQUIRE:
            return decision.acquire()
        case Verb.EXTEND:
            return decision.extend()
        case Verb.RELEASE:
            return decision.release()
        case Verb.ADOPT:
            return decision.adopt()
        case Verb.BREAK:
            return decision.break_()
        case Verb.PEEK:
            return decision.peek()
    return decision.wait()


class Decision:
    """The decision of one node on one op: the state so far, and the notices to send."""

    def __init__(self, kind: Rule, state: State, op: Op, now: float, has_listener: HasListener) -> None:
        self.kind = kind
        self.state = state
        self.op = op
        self.now = now
        self.has_listener = has_listener
        self.waiter = op.queueing.waiter or op.id
        self.order = 0
        self.unserved = 0  # the place in the queue of the first waiter that this op has not woken
        self.notices: list[Notice] = []

    # -- the verbs -----------------------------------------------------------------------------------------------

    def acquire(self) -> Reply:
        op, queueing = self.op, self.op.queueing
        if not op.plain and self._is_undone():
            return Reply(Verdict.UNDONE, self.state)
        if not op.plain and self._mine() is not None:
            if not self.state.fence:
                self._next_fences(op.fence, op.memory, queueing.span)
            self._hold(op.id, self.now + op.lease)
            return self._yes()
        enters = self.kind.admits(self.state.holds, op.id)
        if op.plain:
            if not enters:
                return self._no()
            self._hold(op.id, self.now + op.lease)
            return Reply(Verdict.YES, self.state)
        if enters and self.state.queue and not queueing.heals and (queueing.fair or self.kind.respects_queue):
            self._enqueue()
            enters = self._serve(until=self.waiter)
        elif not enters:
            self._enqueue()
        if not enters:
            return self._no()
        self._drop(self.waiter)
        self._next_fences(op.fence, op.memory, queueing.span)
        self._hold(op.id, self.now + op.lease)
        self._put(marked=bool(self.state.queue) and not self.kind.shared)
        return self._yes()

    def extend(self) -> Reply:
        op = self.op
        if op.fence:
            self._raise(op.fence, op.memory)
        if self._mine() is None:
            return self._no()
        if op.lease:
            self._hold(op.id, self.now + op.lease)
        return self._yes()

    def release(self) -> Reply:
        op = self.op
        if self.state.fence < op.fence:
            self._raise(op.fence, op.memory)
        if op.tombstone:
            others = tuple(entry for entry in self.state.undone if entry.id != op.id)
            self._put(undone=(*others, Entry(op.id, self.now + op.lease)))
        no = self._no()
        mine = self._mine() is not None or self._marks_free()
        if mine:
            self._put(holds=self._holds_after(), marked=False)
        place = next((place for place, ticket in enumerate(self.state.queue) if ticket.id == op.id), None)
        self._drop(op.id)
        fence = self.state.fence
        if mine and op.rest > 0:
            self._notify_of_rest(op.rest)
        elif self._may_serve():
            self._serve()
        if op.rest <= 0 and (mine or place == 0 or (op.queueing.serve and place is None)):
            self._notify_of_rest(self._rests_for())
        if mine:
            self._enqueue()  # its ticket, whose place the hold took (rule 5)
            return Reply(Verdict.YES, self.state, fence, notices=tuple(self.notices))
        return replace(no, state=self.state, notices=tuple(self.notices))

    def adopt(self) -> Reply:
        op, state = self.op, self.state
        if self._is_undone():
            return Reply(Verdict.UNDONE, state)
        known = self._mine() or next((each for each in state.holds if each.id == op.queueing.waiter), None)
        if known is None:
            return self._no()
        if known.id != op.id or not state.fence:
            self._next_fences(op.fence, op.memory, op.queueing.span)
        self._put(holds=tuple(each._replace(id=op.id) if each is known else each for each in state.holds))
        self._hold(op.id, self.now + op.lease)
        return self._yes()

    def break_(self) -> Reply:
        broken = [hold for hold in self.state.holds if self.op.id == ANY or is_made_by_asynclock(hold.id)]
        if not broken:
            return self._no()
        for hold in broken:
            if is_ours(hold.id):
                if by := self.op.queueing.waiter:
                    self._notify(hold.id, 0, suffix=BROKEN_BY + by, broken=True)
                self._notify(hold.id, 0, broken=True)
        self._put(holds=tuple(hold for hold in self.state.holds if hold not in broken), marked=False)
        fence = self.state.fence
        self._serve()
        return Reply(Verdict.YES, self.state, fence, notices=tuple(self.notices))

    def wait(self) -> Reply:
        if self._is_undone():
            return Reply(Verdict.UNDONE, self.state)
        self._enqueue()
        turn = self._may_serve() and self._serve(until=self.waiter)
        return self._no(free=turn)  # free: the waiter will send an acquire

    def peek(self) -> Reply:
        op = self.op
        if self._is_undone():
            return Reply(Verdict.UNDONE, self.state)
        enters = self.kind.admits(self.state.holds, op.id)
        if enters and (op.queueing.fair or self.kind.respects_queue):
            enters = len(self.state.queue) < SERVED and self._enters_after_all()
        return replace(self._no(free=enters), rank=-1 if enters else 0)

    # -- the queue -----------------------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        """Store or renew the ticket (rule 7), and mark the hold that it waits for (rule 9)."""
        op, queueing = self.op, self.op.queueing
        if not queueing.number:
            return
        order = queueing.order or _us(self.now)
        if queueing.number == 1:
            order = clamped(order, self.now)
        ends = self.now + op.lease
        others = [each for each in self.state.queue if each.id != self.waiter]
        fresh = self.now + queueing.fresh
        mine = Ticket(order, self.waiter, queueing.number, fresh, ends, queueing.span, queueing.tasks)
        self._put(queue=tuple(sorted([*others, mine])), queue_ends=max(self.state.queue_ends, ends))
        self.order = order
        if self.kind.shared or not self.state.holds:
            return
        if not self.state.marked and is_ours(self.state.holds[0].id):
            self._put(marked=True)
            self._notify(self.state.holds[0].id, 0)

    def _drop(self, id: str) -> None:
        """Remove a ticket."""
        before = self.state.queue
        queue = tuple(each for each in before if each.id != id)
        if len(queue) < len(before):
            self._put(queue=queue, queue_ends=self.state.queue_ends if queue else 0.0)

    def _may_serve(self) -> bool:
        """Whether a ticket may be able to enter. A mutex that is held does not serve its queue."""
        return self.kind.shared or not self.state.holds

    def _serve(self, until: str = "") -> bool:
        """Serve the queue (rule 8) up to the ticket `until`. True: all tickets before it are served, and this op can
        enter."""
        if not self.op.queueing.serve:
            return False
        before, entering = self.state.holds, list[Entry]()
        can_enter = self._serve_all(until, entering)
        if any(polls(each.id) for each in self.state.holds if each not in before):
            for following in self.state.queue[self.unserved : self.unserved + 1]:
                self._notify(following.id, following.number)
        return can_enter

    def _serve_all(self, until: str, entering: list[Entry]) -> bool:
        """As `_serve`. Adds the woken waiters to `entering`: they count as holders for the tickets after them."""
        serve, place, served = self.op.queueing.serve, 0, 0
        for _ in range(VISITED):
            last = served >= SERVED - LAST and self.kind.shared
            queue = self.state.queue
            if len(queue) == place or queue[place].id == until:
                return self._admits(self.op.id, entering)
            head = queue[place]
            if head.fresh <= self.now or any(each.id == head.id for each in self.state.holds):
                self._drop(head.id)
                continue
            if not self._admits(head.id, entering):
                if not self.kind.passes(head.id, self.op.id):
                    return False
                place += 1
                continue
            wakes = serve is Serve.WAKE or not head.span
            comes = wakes and head.notified  # it sends its ticket again, by which it gets the next notice
            received = comes or (self._wake(head, last) if wakes else self._grant(head, last))
            if received is False:
                self._drop(head.id)
                continue
            if received is None or not self.kind.shared:
                return False
            served += not comes
            if wakes:
                self._put(queue=(*queue[:place], head._replace(notified=True), *queue[place + 1 :]))
                entering.append(Entry(head.id, head.ends))
                self.unserved += self.unserved == place
                place += 1
            if served == SERVED:
                return False
        return False

    def _enters_after_all(self) -> bool:
        """Whether this op could enter if each fresh ticket were served first. It changes nothing."""
        entering = list[Entry]()
        for each in self.state.queue:
            if each.fresh <= self.now:
                continue
            if self._admits(each.id, entering):
                entering.append(Entry(each.id, each.ends))
            elif not self.kind.passes(each.id, self.op.id):
                return False
        return self._admits(self.op.id, entering)

    def _admits(self, id: str, entering: Sequence[Entry]) -> bool:
        """Whether the id can enter beside the holders and these, and leaves room for those of these that want fewer
        permits: they are on their way."""
        holds = (*self.state.holds, *entering)
        return self.kind.admits(holds, id) and all(
            self.kind.admits(tuple(each for each in (*holds, Entry(id, None)) if each is not other), other.id)
            for other in entering
            if self.kind.passes(other.id, id)
        )

    def _wake(self, head: Ticket, last: bool) -> bool | None:
        return self._notify(head.id, head.number, continue_batch=last)

    def _grant(self, head: Ticket, last: bool) -> bool | None:
        """Make the waiter the holder until its ticket ends, and notify it. If its client does not listen, undo that,
        unless it polls: then it finds its hold."""
        before = self.state
        self._drop(head.id)
        self._next_fences(None, self.op.memory, head.span)
        self._put(holds=(*self.state.holds, Entry(head.id, head.ends)), marked=not self.kind.shared)
        received = self._notify(head.id, head.number, self.state.fence, continue_batch=last)
        if polls(head.id):
            return True
        if not received:
            fence, ends = self.state.fence, self.state.fence_ends
            self.state = replace(before, fence=fence, fence_ends=ends)
        return received

    def _notify_of_rest(self, seconds: float) -> None:
        """Notify the first waiter that was not woken now of when the name will be free. As in `_serve`, tickets that
        are stale, or whose client does not listen, are dropped. A client that polls asks by itself."""
        index = self.unserved
        for _ in range(VISITED if seconds > 0 else 0):
            if len(self.state.queue) == index:
                return
            head = self.state.queue[index]
            if head.fresh > self.now and polls(head.id):
                index += 1
            elif head.fresh > self.now and self._notify(head.id, head.number, left=seconds) is not False:
                return
            else:
                self._drop(head.id)

    def _rests_for(self) -> float:
        """Seconds for which the name rests, or of several holds the one that ends first; 0.0: it does not."""
        first = min(self.state.holds, key=lambda each: (each.ends or 0.0, each.id), default=None)
        if first is None or first.ends is None:
            return 0.0
        return first.ends - self.now if rests(first.id) else 0.0

    def _notify(
        self, id: str, number: int, fence: int = 0, left: float = 0.0, suffix: str = "", **flags: bool
    ) -> bool | None:
        """Whether the client of `id` receives the notice; None: the node has no permission to publish."""
        notice = Notice(id[:ID_LENGTH], number, fence, left, self.op.name + suffix, **flags)
        received = self.has_listener(notice.tag)
        if received:
            self.notices.append(notice)
        return received

    # -- holds and fence -----------------------------------------------------------------------------------------

    def _mine(self) -> Entry | None:
        return next((entry for entry in self.state.holds if entry.id == self.op.id), None)

    def _is_undone(self) -> bool:
        return any(entry.id == self.op.id for entry in self.state.undone)

    def _hold(self, id: str, ends: float) -> None:
        mine = self._mine()
        if mine is not None and mine.ends is not None:
            ends = max(ends, mine.ends)  # never shorter
        others = tuple(entry for entry in self.state.holds if entry.id != id)
        self._put(holds=(*others, Entry(id, ends)))

    def _marks_free(self) -> bool:
        """Whether this release marks the name as done although its id does not hold it (rule 12)."""
        marks = self.op.marks_free and self.op.rest > 0 and not self.kind.shared
        return marks and all(entry.id == DONE for entry in self.state.holds)

    def _holds_after(self) -> tuple[Entry, ...]:
        """The holds after a release: without that of its id, and with the entry that keeps the name taken, if any."""
        op = self.op
        others = tuple(entry for entry in self.state.holds if entry.id != op.id)
        if op.rest <= 0:
            return others
        ends = self.now + op.rest
        if self.kind.shared:
            return (*others, Entry(RESTING_MARK + op.id[1:], ends))
        if any(entry.ends is None or entry.ends > ends for entry in others):  # a mark that ends later (rule 12)
            return others
        return (Entry(DONE if op.done else RESTING, ends),)

    def _next_fences(self, seed: int | None, memory: float, span: int) -> None:
        """Take the next fences (rule 3). A ticket that becomes the holder brings no clock (None): the node uses its
        own. An attempt with a ticket of span 0 takes one."""
        p = _us(self.now) if seed is None else clamped(seed, self.now)
        self._put(fence=max(self.state.fence + 1, p) + max(span, 1) - 1, fence_ends=self.now + memory)

    def _raise(self, token: int, memory: float) -> None:
        """Raise F to the token that the op carries, and renew its expiry."""
        self._put(fence=max(self.state.fence, token), fence_ends=self.now + memory)

    # -- answers -------------------------------------------------------------------------------------------------

    def _put(
        self,
        holds: tuple[Entry, ...] | None = None,
        fence: int | None = None,
        fence_ends: float | None = None,
        undone: tuple[Entry, ...] | None = None,
        queue: tuple[Ticket, ...] | None = None,
        queue_ends: float | None = None,
        marked: bool | None = None,
    ) -> None:
        """Change these parts of the state. As `replace`, which takes more than twice as long."""
        before = self.state
        self.state = State(
            before.holds if holds is None else holds,
            before.fence if fence is None else fence,
            before.fence_ends if fence_ends is None else fence_ends,
            before.undone if undone is None else undone,
            before.queue if queue is None else queue,
            before.queue_ends if queue_ends is None else queue_ends,
            before.marked if marked is None else marked,
        )

    def _yes(self) -> Reply:
        marked = self.state.marked and self.op.verb is Verb.ACQUIRE
        return Reply(Verdict.YES, self.state, self.state.fence, notices=tuple(self.notices), marked=marked)

    def _no(self, free: bool = False) -> Reply:
        holder = self.kind.blocking_hold(self.state.holds) if self.state.holds and not free else None
        ids = [each.id for each in self.state.queue]
        waits = self.op.queueing.number and self.op.verb in (Verb.ACQUIRE, Verb.WAIT)
        rank = ids.index(self.waiter) if waits and self.waiter in ids else -1
        order = self.order if rank >= 0 else 0
        taken = self.kind.taken(self.state.holds)
        return Reply(Verdict.NO, self.state, 0, holder, rank, order, taken, tuple(self.notices))


def clamped(us: int, now: float) -> int:
    """A time in microseconds that a client sent, not further from that of the node than CLOCK_SKEW."""
    return min(max(us, _us(now - CLOCK_SKEW)), _us(now + CLOCK_SKEW))


def _us(now: float) -> int:
    return int(now * 1_000_000)
