"""The values of the rules: the state of a name at a node and its answers (State, Reply, Notice), the requests to it (Op
and its verbs, Queueing), and what a kind of lock is: `Kind`, as a client sees it, and `Rule`, by which a store decides
who may enter. The rules themselves are in `decide.py`. All times are in seconds; a store converts them to its own
units."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from asynclock._options import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ID_LENGTH = 32
"""The length of the random part of an id. It begins with the tag of its client, which names the client's channel."""

TAG_LENGTH = 12

_MADE = re.compile(r"[0-9a-fA-F~][0-9a-fA-F]{31}[|!]")  # with RESTING_MARK
_OURS = re.compile(r"[0-9a-fA-F]{32}\|")


class Verdict(Enum):
    """The answer of a node."""

    YES = "yes"
    NO = "no"
    UNDONE = "undone"  # the node has a tombstone of that id


class Entry(NamedTuple):
    """A hold, or a tombstone: an id and when it ends (None: never)."""

    id: str
    ends: float | None


class Ticket(NamedTuple):
    """The place of a waiter in the queue. Tickets are ordered by `order`, then by `id`."""

    order: int
    id: str
    number: int  # how often its owner has sent it
    fresh: float  # until when it is served
    ends: float  # when it expires, and when the hold ends that it becomes
    span: int  # the number of fences that it takes; 0: it is woken, and never becomes the holder
    tasks: int = 1  # of its client that waited for the name when it was sent
    notified: bool = False  # since it was sent, of a kind that several ids can hold


@dataclass(frozen=True, slots=True)
class State:
    """The state of one name at one node."""

    holds: tuple[Entry, ...] = ()
    fence: int = 0
    fence_ends: float = 0.0
    undone: tuple[Entry, ...] = ()
    queue: tuple[Ticket, ...] = ()
    queue_ends: float = 0.0
    marked: bool = False  # other clients wait for the hold (rule 9)

    def at(self, now: float) -> State:
        """The state at `now`, without the entries that have ended. If none has, it is this object."""
        holds, undone = _alive(self.holds, now), _alive(self.undone, now)
        fence = self.fence_ends > now
        queue = self.queue and self.queue_ends > now
        lasts = (fence or not (self.fence or self.fence_ends)) and (queue or not (self.queue or self.queue_ends))
        if lasts and holds is self.holds and undone is self.undone and (holds or not self.marked):
            return self
        return State(
            holds,
            self.fence if fence else 0,
            self.fence_ends if fence else 0.0,
            undone,
            self.queue if queue else (),
            self.queue_ends if queue else 0.0,
            self.marked and bool(holds),
        )


class Notice(NamedTuple):
    """A message that a node pushes to a client."""

    id: str  # the random part of the id of the waiter or holder that receives it
    number: int  # of the waiter's ticket; 0: it is for the holder: other clients wait, or the hold was broken
    fence: int = 0  # F, if the ticket became a hold; 0: it did not, and the waiter may try
    left: float = 0.0  # seconds until the name will be free; 0.0: it is free
    name: str = ""  # of the lock, without the client's prefix
    broken: bool = False  # an operator broke the hold
    continue_batch: bool = False  # the step reached its limit: after its entry this waiter serves the next tickets
    expired: bool = False  # the store knows that the hold has ended

    @property
    def tag(self) -> str:
        """The name of the channel."""
        return self.id[:TAG_LENGTH]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a node, its next state, and the notices to send."""

    verdict: Verdict
    state: State
    fence: int = 0
    holder: Entry | None = None
    rank: int = -1  # the number of tickets before the ticket of the op; -1: it has none
    order: int = 0  # the order key of that ticket
    taken: tuple[int, ...] | None = None  # the slots in use, for a kind that has slots
    notices: tuple[Notice, ...] = ()
    marked: bool = False  # other clients already wait for the granted hold


def letter_of(id: str) -> str:
    """The letter of the kind of a hold (rules/registry.py); "" for a mutex and for the id of another program."""
    letter = id[ID_LENGTH + 1 : ID_LENGTH + 2]
    return letter if letter.isalpha() and id[ID_LENGTH : ID_LENGTH + 1] in ("|", "!") else ""


def rests(id: str) -> bool:
    """Whether it is the hold of a name that rests: no client has it, and it ends by itself."""
    return id in TIMED or id[:1] == RESTING_MARK


def polls(id: str) -> bool:
    """Whether the client of this id receives no notices, and asks again and again."""
    return id[ID_LENGTH : ID_LENGTH + 1] == "!"


def is_ours(id: str) -> bool:
    """Whether asynclock made this id, and its client receives notices: then its release serves the queue."""
    return _OURS.match(id) is not None


def is_made_by_asynclock(id: str) -> bool:
    """Whether asynclock made this hold: the hold of a client, with notices or without, or a name that rests."""
    return _MADE.match(id) is not None or id in TIMED


def _alive(entries: tuple[Entry, ...], now: float) -> tuple[Entry, ...]:
    for entry in entries:
        if entry.ends is not None and entry.ends <= now:
            return tuple(entry for entry in entries if entry.ends is None or entry.ends > now)
    return entries


CLOCK_SKEW = 10.0
"""The greatest difference in seconds between the clock of the node and a fence or an order key that a client brings (c
in docs/safety.md)."""

RESTING = f"{RESERVED}resting"
"""The holder of a name that was released before its min_hold."""

DONE = f"{RESERVED}done"
"""The holder of a name after a run of `once` returned. It differs from RESTING, because a min_hold also follows a run
that raised."""

MARKS_FREE = 2
"""`Op.done` of a release that also marks a free name as done (rule 12 in `decide.py`)."""

TIMED = (RESTING, DONE)
"""Holders without a client. Nobody releases them: the name is free when they expire."""

RESTING_MARK = "~"
"""The first character of such a hold, for a kind that several ids can hold. The rest is from the id of the holder."""

MARK = "+"
"""The character before the id of a hold for which other clients wait (rule 9)."""

SERVED = 64
"""The greatest number of tickets that one op serves."""

LAST = 8
"""The last so many of these continue the batch. More than one, because some clients may be dead."""

VISITED = 512
"""The greatest number of tickets that one op visits: a killed client may have left hundreds, which are dropped."""


class Slots(NamedTuple):
    """The slots in use, in the refusal of a node."""

    taken: tuple[int, ...]
    part: int = 0  # the number of the name, for an op of several names


class Kind(Protocol):
    """A kind of lock, as a client sees it."""

    @property
    def name(self) -> str: ...
    @property
    def letter(self) -> str:
        """The first character of its mode, by which a store finds its rule or script; "" for the mutex."""

    @property
    def fair(self) -> bool:
        """Whether it is a mutex whose attempts enter only in the order of the queue."""

    @property
    def shared(self) -> bool:
        """Whether several ids can hold a name at once. If not, the hold on Redis is a plain string with the mark of
        rule 9, and the tasks of one process use a local queue."""

    @property
    def mode(self) -> str:
        """The text after the bar in its ids, which describes the hold; "" for the mutex."""

    @property
    def max_per_task(self) -> int:
        """The number of holds of a name with which a task that waits for one more waits for itself."""

    @property
    def deadlock_hint(self) -> str:
        """The advice in the message of SelfDeadlock."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The names that it holds together; (): only the name of its op."""

    @property
    def slots(self) -> int:
        """The number of slots. Over N nodes each hold has a slot, which its id contains and a majority grants; 0: the
        kind has no slots."""

    @property
    def slot(self) -> int | None:
        """The slot of an attempt; None: it has none, or one for each of several names."""

    def at(self, slot: int) -> Kind:
        """The kind of an attempt for this slot."""

    def choose(self, taken: Sequence[Slots], spare: int, random: Callable[[], float]) -> int | None:
        """A slot that a majority may grant. `taken`: the slots in use at each node that refused; `spare`: the number of
        nodes that a majority does not need; `random`: draws a number from 0.0 up to 1.0. None: no such slot is
        known."""

    @property
    def respects_queue(self) -> bool:
        """Whether an attempt enters after the tickets before it that can enter now, even if it could enter, too. An
        acquire that heals does not (rule 11 in `decide.py`)."""


class Rule(Kind, Protocol):
    """The rule of a kind of lock of one name: which attempts can enter. Pure. No hold has ended, and none is of
    `id`."""

    def passes(self, blocked: str, id: str) -> bool:
        """Whether an op of `id` serves those behind the ticket `blocked`, which cannot enter now, and may enter itself.
        If not, an attempt of `id` is refused."""

    def at(self, slot: int) -> Rule: ...

    def of_mode(self, mode: str) -> Rule:
        """The rule of a hold whose id has this mode, which has the same letter."""

    def taken(self, holds: Sequence[Entry]) -> tuple[int, ...] | None:
        """The slots in use; None: the kind has no slots."""

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        """Whether the id can hold the name together with `holds`."""

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        """The hold that a refused attempt waits for: it tries again when this hold ends."""


class Slotless:
    """The methods that are the same for all rules without slots."""

    parts = ()
    slots = 0
    slot = None

    def at(self, slot: int) -> Self:
        del slot
        return self

    def of_mode(self, mode: str) -> Self:
        del mode
        return self

    def passes(self, blocked: str, id: str) -> bool:
        del blocked, id
        return False

    def choose(self, taken: Sequence[Slots], spare: int, random: Callable[[], float]) -> None:
        del taken, spare, random

    def taken(self, holds: Sequence[Entry]) -> None:
        del holds


_SLOT = re.compile(r"/\d+")


class Part(NamedTuple):
    """One of several names that are held together."""

    name: str
    kind: Rule

    def named(self, id: str, *, waits: bool = False) -> str:
        """The id of that hold at this name; or of its ticket, which is not for a single slot."""
        mode = _SLOT.sub("/", self.kind.mode) if waits else self.kind.mode
        return f"{id[: ID_LENGTH + 1]}{mode}{id[ID_LENGTH + 1 :]}" if id else ""


class Verb(StrEnum):
    """The request to a node."""

    ACQUIRE = "acquire"
    EXTEND = "extend"
    RELEASE = "release"  # release a hold, undo an attempt, or withdraw a ticket
    WAIT = "wait"  # renew a ticket, and reply whether it can enter
    ADOPT = "adopt"  # take over the hold of another id, which the handle of `detach` contains
    BREAK = "break"  # remove the holds of asynclock; with the id ANY also the holds of other programs
    PEEK = "peek"  # reply whether an acquire would enter, and change nothing


ACQUIRE, EXTEND, RELEASE, WAIT, ADOPT, BREAK, PEEK = Verb
"""Module constants for code that runs often: on CPython 3.11 reading a member from its class takes 70 to 120 ns."""


ANY = "*" * ID_LENGTH
"""The id of a break that also removes the key of another program, of any type."""

PEEK_ID = f"{'0' * ID_LENGTH}|"  # the id of a peek, before the mode of its kind


class Serve(IntEnum):
    """What an op does for the next waiter if it leaves the name free."""

    NOBODY = 0  # an acquire of a hold that this node lacks (Queueing.heals); an undo of a minority; a close; a peek
    WAKE = 1
    GRANT = 2


@dataclass(slots=True, eq=False)
class Queueing:
    """How an op uses the queue. Many ops share one Queueing, so only its methods and the stores (`packed`) change
    it."""

    serve: Serve = Serve.NOBODY
    fair: bool = False  # acquire of a mutex, or of several names: enter a mutex only as the first of its queue
    span: int = 1  # the number of fences to take; 0, of a ticket: it is woken, and never becomes the holder
    waiter: str = ""  # the id of the ticket; "": the id of the op; adopt: the id of the hold; break: who breaks it
    number: int = 0  # how often the ticket was sent, from 1; 0: leave no ticket
    fresh: float = 0.0  # seconds for which the ticket may be served
    order: int = 0  # its order key, in us; 0: the node uses its own clock
    contended: bool = False  # release: this client knows of waiters in other clients
    tasks: int = 1  # of a ticket: the tasks of this client that wait for the name, in its local queue, too
    looks: bool = False  # release: a script must look at the queue, because the acquire was a plain SET and did not
    packed: Any = field(default=None, init=False)  # a store's encoding of it

    @property
    def heals(self) -> bool:
        """Of an acquire: it belongs to a hold that a majority of the nodes has, and this node lacks (rule 11 in
        `decide.py`). The acquires of a round serve."""
        return self.serve is Serve.NOBODY

    def revoke(self) -> None:
        """A newer op renewed or withdrew the ticket. If this op must be sent again, it leaves no ticket."""
        self.number = 0
        self.packed = None

    def serve_as(self, serve: Serve) -> None:
        """Set what the op does for the next waiter."""
        self.serve = serve
        self.packed = None


ALONE = Queueing()
"""An op that leaves no ticket and serves nobody. An acquire with it heals."""

QUIET = {serve: Queueing(serve) for serve in Serve}
"""Ops that leave no ticket."""

CONTENDED = {serve: Queueing(serve, contended=True) for serve in Serve}
"""Releases of names for which other clients wait."""

LOOKING = {serve: Queueing(serve, looks=True) for serve in Serve}
"""Releases of plain holds for which other clients may wait."""


class Op:
    """One request to every node. After it was sent, only its methods and the stores (`packed`, `sent`) change it."""

    __slots__ = (
        "done", "fence", "id", "kind", "lease", "memory", "name", "packed", "plain", "queueing", "rest", "revoked",
        "sent", "since", "tombstone", "verb",
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
        done: int = False,
        since: float = 0.0,
    ) -> None:
        self.verb = verb
        self.kind = kind
        self.name = name
        self.id = id
        self.lease = lease  # seconds; 0 in an extend: only read, and raise F
        self.fence = fence  # acquire: P, the client's clock in us; else the token T, or 0 before there is one
        self.memory = memory  # seconds that F outlives its last write
        self.rest = rest  # release: seconds that the name stays taken (min_hold, once)
        self.plain = plain  # acquire: without fence, tombstone and ticket
        self.tombstone = tombstone  # release: leave one, because the acquire may still arrive
        self.queueing = queueing
        self.done = done  # release of a mutex: True or MARKS_FREE: during `rest` the holder is DONE, not RESTING
        self.since = since  # release: nothing of its id was sent before this moment, on the client's clock
        self.revoked = False  # see revoke()
        self.packed: Any = None  # the encoding of a store, made once for all nodes; only stores use it
        self.sent = 0.0  # when a store sent it last; 0.0: never, or the store does not say; only stores use it

    def __repr__(self) -> str:
        return f"<Op {self.verb.value} {self.kind.name} {self.name!r}>"

    def revoke(self) -> None:
        """The release or the undo of its id was queued. From now on no store may send it again, because it could create
        a key or a ticket that nothing deletes."""
        self.revoked = True

    @property
    def marks_free(self) -> bool:
        """Of a release: a free name gets the mark of `once`, too."""
        return self.done == MARKS_FREE

    def take_one_fence(self) -> None:
        """For a store whose fences are numbers that it does not choose: a hold has one fence, and so it is not passed
        on within a process."""
        if self.queueing.span > 1:
            self.queueing = replace(self.queueing, span=1)

    def forget_packed(self) -> None:
        """All nodes have replied to it: its encoding is not needed any more."""
        self.packed = None

    def renew(self, seed: int, queueing: Queueing, *, plain: bool = False) -> None:
        """Before the acquire is sent once more: set the client's clock of now and the ticket. A `plain` acquire has no
        ticket."""
        self.fence = seed
        self.queueing = queueing
        self.plain = plain
        self.packed = None

    def ask_with_ticket(self, ticket: str) -> None:
        """Before it is sent: turn the acquire into a renewal of that ticket, which takes no hold."""
        self.verb, self.id = WAIT, ticket


class Named(Protocol):
    """What is about a name, or about several names together: an op, or the request of a caller."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Kind: ...


def parts_of(what: Named) -> tuple[Part, ...]:
    """The names, usually one, each with its kind."""
    return parts_for(what.name, what.kind)


def parts_for(name: str, kind: Kind) -> tuple[Part, ...]:
    """The same, of a kind that is of several names or of this one."""
    return kind.parts or (Part(name, cast("Rule", kind)),)
