"""The rule that all kinds and stores share, without I/O: what is asked, what is answered, and how a node decides.

    Op       what one node is asked: acquire, extend or release, for one id
    State    what one node knows of one name: holds, fence, tombstones
    decide   (kind, state, op, now) -> Reply, which carries the state after

The rules, as decide and each kind's .lua keep them:

1. An id that was undone (its tombstone is there) is refused for ever: its acquire comes too late.
2. An id that holds already is answered the same again, and its end moves with the answer (never back).
3. A new hold gets the fence max(F + 1, P), P being the client's clock clamped to the node's own +- CLOCK_SKEW:
   counters of all nodes agree without talking, and a counter that was lost starts above all it ever gave.
4. Extend is for the owner alone and never brings a key back.
5. Release takes away the hold of its id and no other.
6. F is raised to the token that extend and release carry, whoever holds: a node that missed it catches up.

Times are in seconds; `now` is the node's own Unix time. A store turns them into its own units at its edge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._clock import Clock

CLOCK_SKEW = 10.0
"""How far a client's clock may pull a fence from the node's own, in seconds (c in docs/safety.md)."""

RESERVED = "asynclock~"
"""What all keys of ours but the holds begin with, after the prefix; names may not."""

RESTING = f"{RESERVED}resting"
"""Who holds a name that was released before its min_hold."""


class Verb(StrEnum):
    """What a node is asked for."""

    ACQUIRE = "acquire"
    EXTEND = "extend"
    RELEASE = "release"  # serves release, and the undo of an attempt


class Verdict(IntEnum):
    """What a node answers; its value opens the reply on the wire."""

    YES = 1
    NO = 0
    UNDONE = -1


class Op:
    """One request to every node. Only `undone`, `wire` and `native` ever change."""

    __slots__ = (
        "fence", "id", "kind", "lease", "memory", "name", "native", "plain", "rest", "tombstone", "undone", "verb",
        "wire",
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
    ) -> None:
        self.verb = verb
        self.kind = kind
        self.name = name
        self.id = id
        self.lease = lease  # seconds; 0 in an extend: only look, and raise F
        self.fence = fence  # acquire: P, the client's clock in us; else the token T, or 0 where there is none yet
        self.memory = memory  # seconds that F outlives its last write
        self.rest = rest  # release: seconds that the name stays taken (min_hold)
        self.plain = plain  # acquire: without fence and tombstone
        self.tombstone = tombstone  # release: leave one, for an acquire that may still be on its way
        self.undone = False  # acquire: its undo or release was queued; it must not be sent again
        self.wire: bytes | None = None  # a store's encoding of it, made once for all nodes
        self.native: tuple[tuple[str, ...], bytes] | None = None  # the same as a command of the server's own, and which

    def __repr__(self) -> str:
        return f"<Op {self.verb.value} {self.kind.name} {self.name!r}>"


class Entry(NamedTuple):
    """A hold, or a tombstone: an id and when it ends (None: never)."""

    id: str
    ends: float | None


@dataclass(frozen=True, slots=True)
class State:
    """What one node knows of one name."""

    holds: tuple[Entry, ...] = ()
    fence: int = 0
    fence_ends: float = 0.0
    undone: tuple[Entry, ...] = ()

    def at(self, now: float) -> State:
        """The same at `now`: what has ended is gone."""
        return State(
            _alive(self.holds, now),
            self.fence if self.fence_ends > now else 0,
            self.fence_ends if self.fence_ends > now else 0.0,
            _alive(self.undone, now),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """A node's answer, and its state after."""

    verdict: Verdict
    state: State
    fence: int = 0
    holder: Entry | None = None

    def wire(self, now: float) -> list[Any]:
        """As the scripts answer: [1, fence], [0, pttl in ms, holder] or [-1]; pttl -1: no expiry, -2: nobody."""
        match self.verdict:
            case Verdict.YES:
                return [1, self.fence]
            case Verdict.UNDONE:
                return [-1]
        if self.holder is None:
            return [0, -2, b""]
        ends = self.holder.ends
        return [0, -1 if ends is None else round((ends - now) * 1000), self.holder.id.encode()]


class Kind(Protocol):
    """A kind of lock: who is let in."""

    @property
    def name(self) -> str: ...
    @property
    def script(self) -> str:
        """Its rule as a Redis script; docs and tests hold it against `decide`."""

    def admits(self, state: State, op: Op) -> bool:
        """Whether one more hold may stand beside those there are (all alive, none of this id)."""


class Sink(Protocol):
    """Who awaits the answers to one op. It is called once per node, from the loop, and never awaits."""

    op: Op
    sent: float
    deadline: float

    def answer(self, index: int, reply: Sequence[Any]) -> None:
        """Node `index` answered; `reply` is as Reply.wire makes it."""

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        """Node `index` casts no vote; `maybe`: it may still carry the op out."""


class Facts(NamedTuple):
    """What a node says of its server, where restarts matter."""

    run_id: str
    mark: str  # the run_id under which the node was first used; "" where nobody used it
    seen_other: bool  # this client has met another server there
    young: bool  # it started so lately that it may have forgotten holds


class SameServer(ConfigError):
    """This node is a server that another node is already: its one vote would count as two."""


class Node(Protocol):
    """One server, as one event loop sees it."""

    label: str
    error: Exception | None  # why it cannot be asked now; None: it can

    @property
    def facts(self) -> Facts | None:
        """What is known of its server, where restarts matter."""

    async def open(self) -> None:
        """Connect, or learn why not (`error`); never raises. Goes on trying behind the caller's back."""

    def send(self, op: Op, sink: Sink) -> None:
        """Ask; never awaits and never raises: the sink hears the answer, or that there is none, by its deadline."""

    def trust(self) -> None:
        """Let a young server vote: the quorum found the deployment new."""

    async def look(self) -> None:
        """Read again whether somebody else found the deployment new."""

    async def ping(self) -> float:
        """Seconds for one round trip; raises what is wrong."""

    async def aclose(self) -> None:
        """Send what is queued, then hang up."""


class NodeConfig(NamedTuple):
    """What a store needs to know of its client to open a node."""

    position: int
    prefix: str
    kinds: tuple[Kind, ...]
    clock: Clock
    servers: dict[str, str]  # run_id -> label, of all nodes of this client
    quarantine: float | None  # seconds for which a restarted server casts no vote; None: a node alone, do not ask


class Store(Protocol):
    """A place where locks are kept; shared by all event loops, and opened in each."""

    @property
    def label(self) -> str:
        """For messages; without a password."""

    @property
    def clock(self) -> Clock | None:
        """The clock its clients must use; None: the machine's."""

    def open(self, config: NodeConfig) -> Node:
        """Its node for one event loop; connects nothing yet."""


def decide(kind: Kind, state: State, op: Op, now: float) -> Reply:
    """The answer of a node in `state` to `op` at `now`. Pure: it is the memory store, and the oracle of the scripts."""
    state = state.at(now)
    match op.verb:
        case Verb.ACQUIRE:
            return _acquire(kind, state, op, now)
        case Verb.EXTEND:
            return _extend(state, op, now)
    return _release(state, op, now)


def _acquire(kind: Kind, state: State, op: Op, now: float) -> Reply:
    if not op.plain and any(entry.id == op.id for entry in state.undone):
        return Reply(Verdict.UNDONE, state)
    mine = None if op.plain else _hold_of(state, op.id)
    if mine is None and not kind.admits(state, op):
        return Reply(Verdict.NO, state, holder=state.holds[0])
    if op.plain:
        return Reply(Verdict.YES, _with_hold(state, op.id, now + op.lease))
    if mine is None or not state.fence:
        seed = min(max(op.fence, _us(now - CLOCK_SKEW)), _us(now + CLOCK_SKEW))
        fence = max(state.fence + 1, seed)
        state = replace(state, fence=fence, fence_ends=now + op.memory)
    return Reply(Verdict.YES, _with_hold(state, op.id, now + op.lease), state.fence)


def _extend(state: State, op: Op, now: float) -> Reply:
    state = _raised(state, op, now)
    mine = _hold_of(state, op.id)
    if mine is None:
        return Reply(Verdict.NO, state, holder=next(iter(state.holds), None))
    if op.lease:
        state = _with_hold(state, op.id, now + op.lease)
    return Reply(Verdict.YES, state, state.fence)


def _release(state: State, op: Op, now: float) -> Reply:
    if state.fence < op.fence:
        state = _raised(state, op, now)
    if op.tombstone:
        others = tuple(entry for entry in state.undone if entry.id != op.id)
        state = replace(state, undone=(*others, Entry(op.id, now + op.lease)))
    mine = _hold_of(state, op.id)
    if mine is None:
        return Reply(Verdict.NO, state, holder=next(iter(state.holds), None))
    rest = (Entry(RESTING, now + op.rest),) if op.rest > 0 else ()
    others = tuple(entry for entry in state.holds if entry.id != op.id)
    return Reply(Verdict.YES, replace(state, holds=(*others, *rest)), state.fence)


def _raised(state: State, op: Op, now: float) -> State:
    """F up to the token that the op carries, and kept for as long again."""
    if not op.fence:
        return state
    return replace(state, fence=max(state.fence, op.fence), fence_ends=now + op.memory)


def _with_hold(state: State, id: str, ends: float) -> State:
    mine = _hold_of(state, id)
    if mine is not None and mine.ends is not None:
        ends = max(ends, mine.ends)  # never shorter
    others = tuple(entry for entry in state.holds if entry.id != id)
    return replace(state, holds=(*others, Entry(id, ends)))


def _hold_of(state: State, id: str) -> Entry | None:
    return next((entry for entry in state.holds if entry.id == id), None)


def _alive(entries: tuple[Entry, ...], now: float) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry.ends is None or entry.ends > now)


def _us(now: float) -> int:
    return int(now * 1_000_000)
