"""The rule that all kinds and stores share, without I/O: what is asked, what is answered, and how a node decides.

    Op       what one node is asked: acquire, extend, release or wait, for one id
    State    what one node knows of one name: holds, fence, tombstones, and who waits (`_state.py`)
    decide   (kind, state, op, now) -> Reply, which carries the state after and whom to tell

The rules, as decide and each kind's .lua keep them:

1. An id that was undone (its tombstone is there) is refused for ever: its acquire comes too late.
2. An id that holds already is answered the same again, and its end moves with the answer (never back).
3. A new hold gets the fences up to F := max(F + 1, P) + span - 1, P being the client's clock clamped to the node's own
   +- CLOCK_SKEW: counters of all nodes agree without talking, and one that was lost starts above all it ever gave.
4. Extend is for the owner alone and never brings a key back.
5. Release takes away the hold and the ticket of its id and no other's.
6. F is raised to the token that extend and release carry, whoever holds: a node that missed it catches up.
7. Who is refused and will wait leaves a ticket: a lease that waits. The queue is in the order of the tickets' order
   keys, which are the same at every node and in every renewal.
8. Who frees the name, or finds it free and may not enter, serves the queue: its first ticket that is fresh, and whose
   client listens, is told (over N nodes) or made the holder and told (at a node alone). What is found stale or deaf
   on the way goes; its owner, if it lives, renews it in its old place.
9. A hold that somebody waits for is marked, so that the server's own compare-and-delete does not take it away unheard.

Times are in seconds; `now` is the node's own Unix time. A store turns them into its own units at its edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, Protocol, TypeAlias

from asynclock._state import Entry, Notice, Reply, State, Ticket, Verdict, is_ours

CLOCK_SKEW = 10.0
"""How far a client's clock may pull a fence or an order key from the node's own, in seconds (c in docs/safety.md)."""

RESERVED = "asynclock~"
"""What all keys of ours but the holds begin with, after the prefix, and our channels; names may not."""

RESTING = f"{RESERVED}resting"
"""Who holds a name that was released before its min_hold."""

MARK = "+"
"""Goes before the id of a hold that somebody waits for (rule 9)."""

SERVED = 64
"""So many tickets at most are looked at to serve one."""


class Verb(StrEnum):
    """What a node is asked for."""

    ACQUIRE = "acquire"
    EXTEND = "extend"
    RELEASE = "release"  # serves release, the undo of an attempt, and a waiter's leaving
    WAIT = "wait"  # renew a ticket, and look


class Serve(IntEnum):
    """What becomes of the next in the queue where an op leaves the name free."""

    NOBODY = 0
    WAKE = 1
    GRANT = 2


@dataclass(slots=True, eq=False)
class Queueing:
    """How an op deals with those who wait. Many ops share one, so only `wire` ever changes."""

    serve: Serve = Serve.NOBODY
    fair: bool = False  # acquire: enter only as the first of the queue
    span: int = 1  # so many fences are wanted
    waiter: str = ""  # whose ticket it is; "": the op's own id
    number: int = 0  # which sending of the ticket this is, from 1; 0: leave none
    fresh: float = 0.0  # seconds for which the ticket may be served
    order: int = 0  # its order key, in us; 0: the node's own clock says
    contended: bool = False  # release: somebody waits, as far as we know
    wire: bytes = field(default=b"", init=False)  # a store's encoding of it


ALONE = Queueing()
"""An op that leaves no ticket and serves nobody."""


class Op:
    """One request to every node. Only `undone`, `queueing`, `fence`, `wire` and `native` ever change."""

    __slots__ = (
        "fence", "id", "kind", "lease", "memory", "name", "native", "plain", "queueing", "rest", "tombstone", "undone",
        "verb", "wire",
    )  # fmt: skip

    def __init__(
        self,
        verb: Verb,
        kind: Kind,
        name: str,
        id: str,
        lease: float,
        fence: int = 0,
        memory: float = 0.0,
        rest: float = 0.0,
        plain: bool = False,
        tombstone: bool = False,
        queueing: Queueing = ALONE,
    ) -> None:
        self.verb = verb
        self.kind = kind
        self.name = name
        self.id = id
        self.lease = lease  # seconds; 0 in an extend: only look, and raise F
        self.fence = fence  # acquire: P, the client's clock in us; else the token T, or 0 where there is none yet
        self.memory = memory  # seconds that F outlives its last write
        self.rest = rest  # release: seconds that the name stays taken (min_hold)
        self.plain = plain  # acquire: without fence, tombstone and ticket
        self.tombstone = tombstone  # release: leave one, for an acquire that may still be on its way
        self.queueing = queueing
        self.undone = False  # acquire, wait: its undo or release was queued; it must not be sent again
        self.wire: bytes | None = None  # a store's encoding of it, made once for all nodes
        self.native: tuple[tuple[str, ...], bytes] | None = None  # the same as a command of the server's own, and which

    def __repr__(self) -> str:
        return f"<Op {self.verb.value} {self.kind.name} {self.name!r}>"


class Kind(Protocol):
    """A kind of lock: who is let in."""

    @property
    def name(self) -> str: ...
    @property
    def fair(self) -> bool:
        """Whether it enters in the order of the queue only."""

    @property
    def script(self) -> str:
        """Its rule as a Redis script; docs and tests hold it against `decide`."""

    def admits(self, state: State, op: Op) -> bool:
        """Whether one more hold may stand beside those there are (all alive, none of this id)."""


Hears: TypeAlias = Callable[[str], bool | None]
"""Whether anybody listens to the channel of a tag; None: we may not publish there."""


def decide(kind: Kind, state: State, op: Op, now: float, hears: Hears = lambda tag: True) -> Reply:
    """The answer of a node in `state` to `op` at `now`. Pure: it is the memory store, and the oracle of the scripts."""
    desk = _Desk(kind, state.at(now), op, now, hears)
    match op.verb:
        case Verb.ACQUIRE:
            return desk.acquire()
        case Verb.EXTEND:
            return desk.extend()
        case Verb.RELEASE:
            return desk.release()
    return desk.wait()


class _Desk:
    """Where one op is decided."""

    def __init__(self, kind: Kind, state: State, op: Op, now: float, hears: Hears) -> None:
        self.kind = kind
        self.state = state
        self.op = op
        self.now = now
        self.hears = hears
        self.waiter = op.queueing.waiter or op.id
        self.order = 0
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
        enters = self.kind.admits(self.state, op)
        if op.plain:
            if not enters:
                return self._no(self.state.holds[0])
            self._hold(op.id, self.now + op.lease)
            return Reply(Verdict.YES, self.state)
        if enters and queueing.fair and self.state.queue:
            self._enqueue()
            enters = self._serve(until=self.waiter)
        elif not enters:
            self._enqueue()
        if not enters:
            return self._no(next(iter(self.state.holds), None))
        self._drop(self.waiter)
        self._next_fences(op.fence, op.memory, queueing.span)
        self._hold(op.id, self.now + op.lease)
        self._put(marked=bool(self.state.queue))
        return self._yes()

    def extend(self) -> Reply:
        op = self.op
        if op.fence:
            self._raise(op.fence, op.memory)
        if self._mine() is None:
            return self._no(next(iter(self.state.holds), None))
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
        found = next(iter(self.state.holds), None)
        mine = self._mine() is not None
        if mine:
            rest = (Entry(RESTING, self.now + op.rest),) if op.rest > 0 else ()
            others = tuple(entry for entry in self.state.holds if entry.id != op.id)
            self._put(holds=(*others, *rest), marked=False)
        self._drop(op.id)
        fence = self.state.fence
        if mine and op.rest > 0:
            self._tell_rest()
        elif not self.state.holds:
            self._serve()
        self._enqueue()
        if mine:
            return Reply(Verdict.YES, self.state, fence, notices=tuple(self.notices))
        return self._no(found)

    def wait(self) -> Reply:
        if self._is_undone():
            return Reply(Verdict.UNDONE, self.state)
        self._enqueue()
        if not self.state.holds:
            self._serve(until=self.waiter)
        return self._no(next(iter(self.state.holds), None))

    # -- the queue -----------------------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        """Leave, or renew, the ticket (rule 7); mark the hold that it waits for (rule 9)."""
        op, queueing = self.op, self.op.queueing
        if not queueing.number:
            return
        order = queueing.order or _us(self.now)
        if queueing.number == 1:
            order = _clamped(order, self.now)
        ends = self.now + op.lease
        others = [each for each in self.state.queue if each.id != self.waiter]
        mine = Ticket(order, self.waiter, queueing.number, self.now + queueing.fresh, ends, queueing.span)
        self._put(queue=tuple(sorted([*others, mine])), queue_ends=max(self.state.queue_ends, ends))
        self.order = order
        if self.state.holds and not self.state.marked and is_ours(self.state.holds[0].id):
            self._put(marked=True)
            self._tell(Notice(self.state.holds[0].id, 0))

    def _drop(self, id: str) -> None:
        """A ticket goes."""
        queue = tuple(each for each in self.state.queue if each.id != id)
        self._put(queue=queue, queue_ends=self.state.queue_ends if queue else 0.0)

    def _serve(self, until: str = "") -> bool:
        """Serve the next (rule 8). True: it is the turn of `until`, or of whoever has no ticket: nobody is left."""
        serve = self.op.queueing.serve
        if not serve:
            return False
        for _ in range(SERVED):
            if not self.state.queue or self.state.queue[0].id == until:
                return True
            head = self.state.queue[0]
            if head.fresh > self.now:
                heard = self._wake(head) if serve is Serve.WAKE else self._grant(head)
                if heard is not False:
                    return False
            self._drop(head.id)
        return False

    def _wake(self, head: Ticket) -> bool | None:
        return self._tell(Notice(head.id, head.number))

    def _grant(self, head: Ticket) -> bool | None:
        """Make it the holder until its ticket's end, and tell it; what nobody hears is taken back."""
        before = self.state
        self._drop(head.id)
        self._next_fences(None, self.op.memory, head.span)
        self._put(holds=(Entry(head.id, head.ends),), marked=True)
        heard = self._tell(Notice(head.id, head.number, self.state.fence))
        if not heard:
            fence, ends = self.state.fence, self.state.fence_ends
            self.state = replace(before, fence=fence, fence_ends=ends)
        return heard

    def _tell_rest(self) -> None:
        """The head learns when the name will be free."""
        if self.state.queue:
            head = self.state.queue[0]
            self._tell(Notice(head.id, head.number, 0, round(self.op.rest * 1000)))

    def _tell(self, notice: Notice) -> bool | None:
        heard = self.hears(notice.tag)
        if heard:
            self.notices.append(notice)
        return heard

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

    def _next_fences(self, seed: int | None, memory: float, span: int) -> None:
        """Rule 3. Who is granted unasked has no clock at hand: the node's serves (None)."""
        p = _us(self.now) if seed is None else _clamped(seed, self.now)
        self._put(fence=max(self.state.fence + 1, p) + span - 1, fence_ends=self.now + memory)

    def _raise(self, token: int, memory: float) -> None:
        """F up to the token that the op carries, and kept for as long again."""
        self._put(fence=max(self.state.fence, token), fence_ends=self.now + memory)

    # -- answers -------------------------------------------------------------------------------------------------

    def _put(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _yes(self) -> Reply:
        return Reply(Verdict.YES, self.state, self.state.fence, notices=tuple(self.notices))

    def _no(self, holder: Entry | None) -> Reply:
        ids = [each.id for each in self.state.queue]
        waits = self.op.queueing.number and self.op.verb in (Verb.ACQUIRE, Verb.WAIT)
        rank = ids.index(self.waiter) if waits and self.waiter in ids else -1
        order = self.order if rank >= 0 else 0
        return Reply(Verdict.NO, self.state, holder=holder, rank=rank, order=order, notices=tuple(self.notices))


def _clamped(us: int, now: float) -> int:
    return min(max(us, _us(now - CLOCK_SKEW)), _us(now + CLOCK_SKEW))


def _us(now: float) -> int:
    return int(now * 1_000_000)
