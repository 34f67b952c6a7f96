"""The values of the rules: what one node knows of one name and answers (State, Reply, Notice), what it is asked (Op and
its verbs, Queueing), and for which kind of lock. Values, without a rule (that is `decide.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from asynclock._options import RESERVED

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_LENGTH = 32
"""The random part of an id; it begins with its client's tag, which names its channel."""

TAG_LENGTH = 12

_MADE = re.compile(r"[0-9a-fA-F]{32}[|!]")
_OURS = re.compile(r"[0-9a-fA-F]{32}\|")


class Verdict(IntEnum):
    """What a node answers; its value opens the reply on the wire."""

    YES = 1
    NO = 0
    UNDONE = -1


class Entry(NamedTuple):
    """A hold, or a tombstone: an id and when it ends (None: never)."""

    id: str
    ends: float | None


class Ticket(NamedTuple):
    """One who waits. Ordered by `order`, then `id`."""

    order: int
    id: str
    number: int  # which of its owner's sendings this is
    fresh: float  # served only until then
    ends: float  # when the hold would end that it turns into
    span: int


@dataclass(frozen=True, slots=True)
class State:
    """What one node knows of one name."""

    holds: tuple[Entry, ...] = ()
    fence: int = 0
    fence_ends: float = 0.0
    undone: tuple[Entry, ...] = ()
    queue: tuple[Ticket, ...] = ()
    queue_ends: float = 0.0
    marked: bool = False  # somebody waits for the hold (rule 9)

    def at(self, now: float) -> State:
        """The same at `now`: what has ended is gone."""
        holds = _alive(self.holds, now)
        fence = self.fence_ends > now
        queue = self.queue and self.queue_ends > now
        return State(
            holds,
            self.fence if fence else 0,
            self.fence_ends if fence else 0.0,
            _alive(self.undone, now),
            self.queue if queue else (),
            self.queue_ends if queue else 0.0,
            self.marked and bool(holds),
        )


BROKEN = -2
"""Instead of ms left, in a notice to a holder: its hold was taken from it."""


GO_ON = -3
"""Instead of ms left, in a notice to a waiter: of those who were served together it was one of the last that one
step may serve; once it has come in, it has the rest served."""


class Notice(NamedTuple):
    """What a client is told by push."""

    id: str  # whom it is for: a waiter's id, or a holder's
    number: int  # of its ticket; 0: it is the holder, and somebody waits for it, or it was broken
    fence: int = 0  # F, where the ticket became a hold; 0: it did not, come and try
    left: int = -1  # ms until the name will be free; -1: it is

    @property
    def tag(self) -> str:
        """Names the channel."""
        return self.id[:TAG_LENGTH]

    def wire(self, key: str) -> bytes:
        """As the scripts publish it, `key` being prefix + name."""
        return f"{self.id[:ID_LENGTH]} {self.number} {self.fence} {self.left} {key}".encode()


_NOTICE = re.compile(rb"(\S{32}) (\d{1,16}) (\d{1,16}) (-?\d{1,16}) (.*)", re.DOTALL)


def parse_notice(wire: bytes) -> tuple[str, int, int, int, str] | None:
    """The random part of the id, number, fence, left and key of `Notice.wire`. None: it is no notice. Anybody who may
    publish on a client's channel can send anything, and an exception would cost the client its connection."""
    match = _NOTICE.fullmatch(wire)
    if match is None:
        return None
    whose, number, fence, left, key = match.groups()
    try:
        return whose.decode(), int(number), int(fence), int(left), key.decode()
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Reply:
    """A node's answer, its state after, and what is told to others."""

    verdict: Verdict
    state: State
    fence: int = 0
    holder: Entry | None = None
    rank: int = -1  # how many tickets stand before this one's; -1: it has none
    order: int = 0  # its order key
    taken: str | None = None  # what more a refusal of its kind tells
    notices: tuple[Notice, ...] = ()
    marked: bool = False  # what was granted is waited for already

    def wire(self, now: float) -> list[Any]:
        """As the scripts answer: [1, F], or [1, F, 1] where others wait; [0, pttl in ms, holder, rank, order], pttl
        being -1 without expiry and -2 where nobody holds it; or [-1]."""
        match self.verdict:
            case Verdict.YES:
                return [1, self.fence, 1] if self.marked else [1, self.fence]
            case Verdict.UNDONE:
                return [-1]
        more = [] if self.taken is None else [self.taken.encode()]
        if self.holder is None:
            return [0, -2, b"", self.rank, self.order, *more]
        ends = self.holder.ends
        left = -1 if ends is None else round((ends - now) * 1000)
        return [0, left, self.holder.id.encode(), self.rank, self.order, *more]


def mode_of(id: str) -> str:
    """The letter that tells the kind of hold: r and w of a read-write lock, s of a semaphore; "" of a mutex."""
    letter = id[ID_LENGTH + 1 : ID_LENGTH + 2]
    return letter if letter.isalpha() and id[ID_LENGTH : ID_LENGTH + 1] in ("|", "!") else ""


FAMILIES = {"": "mutex", "r": "read-write lock", "w": "read-write lock", "s": "semaphore"}
"""What a hold of that mode is, for messages."""


def is_ours(id: str) -> bool:
    """Whether a holder is of our own kind and can be heard of: it serves the queue when it releases."""
    return _OURS.match(id) is not None


def is_ours_or_mute(id: str) -> bool:
    """Whether a client of ours made the id: one that hears, or one that could not."""
    return _MADE.match(id) is not None


def _alive(entries: Sequence[Entry], now: float) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry.ends is None or entry.ends > now)


CLOCK_SKEW = 10.0
"""How far a client's clock may pull a fence or an order key from the node's own, in seconds (c in docs/safety.md)."""

RESTING = f"{RESERVED}resting"
"""The holder of a name that was released before its min_hold."""

DONE = f"{RESERVED}done"
"""The holder of a name after a run of `once` returned. It differs from RESTING: a min_hold is no sign of a run that
returned."""

TIMED = (RESTING, DONE)
"""Holders that nobody releases: their name is free when their time is over."""

RESTING_MARK = "~"
"""The same where several may hold it: their ids, with this as their first character."""

MARK = "+"
"""Goes before the id of a hold that somebody waits for (rule 9)."""

SERVED = 64
"""So many tickets at most are looked at to serve one."""

LAST = 8
"""So many of these are told to go on: of the last ones some may be stale, or deaf."""


class Verb(StrEnum):
    """What a node is asked for."""

    ACQUIRE = "acquire"
    EXTEND = "extend"
    RELEASE = "release"  # serves release, the undo of an attempt, and a waiter's leaving
    WAIT = "wait"  # renew a ticket, and look
    ADOPT = "adopt"  # take over the hold of another id, which was told us
    BREAK = "break"  # take it from whoever has it


ACQUIRE, EXTEND, RELEASE, WAIT, ADOPT, BREAK = Verb
"""Names of their own, for what runs often: on 3.11 reading a member from its class takes 70 to 120 ns."""


class Serve(IntEnum):
    """What becomes of the next in the queue where an op leaves the name free."""

    NOBODY = 0
    WAKE = 1
    GRANT = 2


@dataclass(slots=True, eq=False)
class Queueing:
    """How an op deals with those who wait. Many ops share one, so only `wire` ever changes; and of a ticket `serve`,
    and `number` where it was sent again, or taken back, meanwhile."""

    serve: Serve = Serve.NOBODY
    fair: bool = False  # acquire: enter only as the first of the queue
    span: int = 1  # so many fences are wanted; 0, of a ticket: it is called, and never made the holder
    waiter: str = ""  # whose ticket it is; "": the op's own id; adopt: whose hold
    number: int = 0  # which sending of the ticket this is, from 1; 0: leave none
    fresh: float = 0.0  # seconds for which the ticket may be served
    order: int = 0  # its order key, in us; 0: the node's own clock says
    contended: bool = False  # release: somebody waits, as far as we know
    wire: bytes = field(default=b"", init=False)  # a store's encoding of it


ALONE = Queueing()
"""An op that leaves no ticket and serves nobody."""


class Op:
    """One request to every node. Once sent, only `undone`, `queueing`, `fence`, `wire` and `native` ever change."""

    __slots__ = (
        "done", "fence", "id", "kind", "lease", "memory", "name", "native", "plain", "queueing", "rest", "since",
        "tombstone", "undone", "verb", "wire",
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
        done: bool = False,
    ) -> None:
        self.verb = verb
        self.kind = kind
        self.name = name
        self.id = id
        self.lease = lease  # seconds; 0 in an extend: only look, and raise F
        self.fence = fence  # acquire: P, the client's clock in us; else the token T, or 0 where there is none yet
        self.memory = memory  # seconds that F outlives its last write
        self.rest = rest  # release: seconds that the name stays taken (min_hold, once)
        self.plain = plain  # acquire: without fence, tombstone and ticket
        self.tombstone = tombstone  # release: leave one, for an acquire that may still be on its way
        self.queueing = queueing
        self.done = done  # release of a mutex: for the time of `rest` the name is marked as DONE, not as RESTING
        self.since = 0.0  # release: nothing of its id was sent before this moment, on the client's clock
        self.undone = False  # acquire, wait: its undo or release was queued; it must not be sent again
        self.wire: bytes | None = None  # a store's encoding of it, made once for all nodes
        self.native: tuple[tuple[str, ...], bytes] | None = None  # the same as a command of the server's own, and which

    def __repr__(self) -> str:
        return f"<Op {self.verb.value} {self.kind.name} {self.name!r}>"


class Kind(Protocol):
    """A kind of lock, as its client sees it."""

    @property
    def name(self) -> str: ...
    @property
    def fair(self) -> bool:
        """Whether it enters in the order of the queue only."""

    @property
    def shared(self) -> bool:
        """Whether several may hold it at once. If not, its hold is a plain string on Redis, which bears the mark of
        rule 9, and tasks of one process stand in a line of their own."""

    @property
    def mode(self) -> str:
        """What its ids tell of it, after the bar; "" for the mutex."""

    @property
    def room(self) -> int:
        """So many may be in at once, as far as a task that holds it itself must know: it would wait for itself."""

    @property
    def way_out(self) -> str:
        """What to do instead."""

    @property
    def script(self) -> str:
        """Its rule as a Redis script; docs and tests hold it against `decide`."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The names that it holds together; (): the one name of its op."""

    @property
    def slots(self) -> int:
        """Over N nodes a hold takes one of so many, by majority, which its id names; 0: there are none."""

    def at(self, slot: int) -> Kind:
        """The kind of an attempt for that slot."""

    def choose(self, taken: Sequence[bytes], spare: int) -> int | None:
        """A slot that a majority may give: of nodes that refused, `taken` are the slots in use, and `spare` nodes are
        not needed. None: there is none, as far as is known."""

    def in_turn(self, id: str) -> bool:
        """Whether who waits before it goes first, even where it could enter."""


class Rule(Kind, Protocol):
    """A kind of lock of one name: who is let in. Pure; holds are all alive, and none is of the id in question."""

    def at(self, slot: int) -> Rule: ...

    def taken(self, holds: Sequence[Entry]) -> str | None:
        """The slots in use, with spaces between; None: there are none."""

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        """Whether one more hold may stand beside those there are."""

    def obstacle(self, holds: Sequence[Entry]) -> Entry:
        """Whom who is refused waits for; its end is when to look again."""


class Slotless:
    """What is the same for all rules without slots."""

    parts = ()
    slots = 0

    def at(self, slot: int) -> Self:
        del slot
        return self

    def choose(self, taken: Sequence[bytes], spare: int) -> None:
        del taken, spare

    def taken(self, holds: Sequence[Entry]) -> None:
        del holds


_SLOT = re.compile(r"/\d+")


class Part(NamedTuple):
    """One of several names that are held together."""

    name: str
    kind: Rule

    def named(self, id: str, *, waits: bool = False) -> str:
        """The id of that hold at this name; or of a ticket, which is for no one slot."""
        mode = _SLOT.sub("/", self.kind.mode) if waits else self.kind.mode
        return f"{id[: ID_LENGTH + 1]}{mode}{id[ID_LENGTH + 1 :]}" if id else ""


def parts_of(op: Op) -> tuple[Part, ...]:
    """The names that an op is for; mostly one."""
    return op.kind.parts or (Part(op.name, cast("Rule", op.kind)),)
