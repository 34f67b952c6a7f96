"""The values of the rules: what one node knows of one name and answers (State, Reply, Notice), what it is asked (Op and
its verbs, Queueing), and for which kind of lock. Values, without a rule (that is `decide.py`). All times are in
seconds; a store turns them into its own units."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from asynclock._options import RESERVED

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_LENGTH = 32
"""The random part of an id; it begins with its client's tag, which names its channel."""

TAG_LENGTH = 12

_MADE = re.compile(r"[0-9a-fA-F]{32}[|!]")
_OURS = re.compile(r"[0-9a-fA-F]{32}\|")


class Verdict(Enum):
    """What a node answers."""

    YES = "yes"
    NO = "no"
    UNDONE = "undone"  # there is a tombstone of that id


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


class Notice(NamedTuple):
    """What a node pushes to a client."""

    id: str  # the random part of the id of the waiter, or of the holder, that it is for
    number: int  # of the waiter's ticket; 0: it is for the holder: others wait, or the hold was broken
    fence: int = 0  # F, where the ticket became a hold; 0: it did not, and the waiter may try
    left: float = 0.0  # seconds until the name will be free; 0.0: it is
    name: str = ""  # of the lock, without the client's prefix
    broken: bool = False  # an operator took the hold away
    continue_batch: bool = False  # it is one of the last that one step served: once it is in, it has the rest served

    @property
    def tag(self) -> str:
        """Names the channel."""
        return self.id[:TAG_LENGTH]


@dataclass(frozen=True, slots=True)
class Reply:
    """A node's answer, its state after, and what is told to others."""

    verdict: Verdict
    state: State
    fence: int = 0
    holder: Entry | None = None
    rank: int = -1  # how many tickets stand before this one's; -1: it has none
    order: int = 0  # its order key
    taken: tuple[int, ...] | None = None  # the slots in use, of a kind that has some
    notices: tuple[Notice, ...] = ()
    marked: bool = False  # what was granted is waited for already


class Slots(NamedTuple):
    """What a node that refuses says of the slots of a kind that has some."""

    taken: tuple[int, ...]
    part: int = 0  # which of the names of the op it speaks of


def mode_of(id: str) -> str:
    """The letter of the kind of hold (rules/registry.py); "" of a mutex, and of another program's id."""
    letter = id[ID_LENGTH + 1 : ID_LENGTH + 2]
    return letter if letter.isalpha() and id[ID_LENGTH : ID_LENGTH + 1] in ("|", "!") else ""


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
    """How an op deals with those who wait. Many ops share one; only what its methods say, and `packed`, ever change."""

    serve: Serve = Serve.NOBODY
    fair: bool = False  # acquire: enter only as the first of the queue
    span: int = 1  # so many fences are wanted; 0, of a ticket: it is called, and never made the holder
    waiter: str = ""  # whose ticket it is; "": the op's own id; adopt: whose hold
    number: int = 0  # which sending of the ticket this is, from 1; 0: leave none
    fresh: float = 0.0  # seconds for which the ticket may be served
    order: int = 0  # its order key, in us; 0: the node's own clock says
    contended: bool = False  # release: somebody waits, as far as we know
    packed: Any = field(default=None, init=False)  # a store's encoding of it

    def revoke(self) -> None:
        """The ticket was sent anew, or taken back: should its op have to be sent again, it leaves no ticket."""
        self.number = 0
        self.packed = None

    def serve_as(self, serve: Serve) -> None:
        """What becomes of the next in the queue."""
        self.serve = serve
        self.packed = None


ALONE = Queueing()
"""An op that leaves no ticket and serves nobody."""


class Op:
    """One request to every node. Once it was sent, only what its methods say, and `packed`, ever change."""

    __slots__ = (
        "done", "fence", "id", "kind", "lease", "memory", "name", "packed", "plain", "queueing", "rest", "revoked",
        "since", "tombstone", "verb",
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
        since: float = 0.0,
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
        self.since = since  # release: nothing of its id was sent before this moment, on the client's clock
        self.revoked = False  # see revoke()
        self.packed: Any = None  # a store's encoding of it, made once for all nodes; of no meaning to others

    def __repr__(self) -> str:
        return f"<Op {self.verb.value} {self.kind.name} {self.name!r}>"

    def revoke(self) -> None:
        """The release or the undo of its id was queued. From now on no store may send it again: it could create a key,
        or a ticket, that nobody takes back."""
        self.revoked = True

    def forget_packed(self) -> None:
        """All nodes have replied to it: its encoding is not needed any more."""
        self.packed = None

    def renew_seed(self, seed: int) -> None:
        """It is about to be sent once more, with the client's clock of now."""
        self.fence = seed
        self.packed = None

    def set_queueing(self, queueing: Queueing, *, plain: bool = False) -> None:
        """The same, with another ticket; a `plain` acquire has none."""
        self.queueing = queueing
        self.plain = plain
        self.packed = None

    def ask_with_ticket(self, ticket: str) -> None:
        """Before it is sent: a mere renewal of that ticket, in place of an acquire."""
        self.verb, self.id = WAIT, ticket


class Kind(Protocol):
    """A kind of lock, as its client sees it."""

    @property
    def name(self) -> str: ...
    @property
    def letter(self) -> str:
        """The first character of its mode; a store finds by it what it runs for the kind. "" for the mutex."""

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
    def max_per_task(self) -> int:
        """With so many holds of the name, a task that waits for one more waits for itself."""

    @property
    def deadlock_hint(self) -> str:
        """What to do instead of that, for the message of SelfDeadlock."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The names that it holds together; (): the one name of its op."""

    @property
    def slots(self) -> int:
        """Over N nodes a hold takes one of so many, by majority, which its id names; 0: there are none."""

    def at(self, slot: int) -> Kind:
        """The kind of an attempt for that slot."""

    def choose(self, taken: Sequence[Slots], spare: int) -> int | None:
        """A slot that a majority may give: of nodes that refused, `taken` are the slots in use, and `spare` nodes are
        not needed. None: there is none, as far as is known."""

    def respects_queue(self, id: str) -> bool:
        """Whether the tickets before it go first, even if it could enter."""


class Rule(Kind, Protocol):
    """A kind of lock of one name: who is let in. Pure; holds are all alive, and none is of the id in question."""

    def at(self, slot: int) -> Rule: ...

    def of_mode(self, mode: str) -> Rule:
        """The kind of a hold whose id has this mode: one of the same letter."""

    def taken(self, holds: Sequence[Entry]) -> tuple[int, ...] | None:
        """The slots in use; None: it has no slots."""

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        """Whether one more hold may stand beside those there are."""

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        """The hold that a refused attempt waits for: it tries again when this hold ends."""


class Slotless:
    """What is the same for all rules without slots."""

    parts = ()
    slots = 0

    def at(self, slot: int) -> Self:
        del slot
        return self

    def of_mode(self, mode: str) -> Self:
        del mode
        return self

    def choose(self, taken: Sequence[Slots], spare: int) -> None:
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
