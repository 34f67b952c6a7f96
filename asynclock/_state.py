"""What one node knows of one name, and what it answers and tells: values, without a rule (that is `_op.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

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
