"""Contender: what this process has at the servers under one id: a hold, a place in the queue, or nothing yet."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, NamedTuple

from asynclock._untrusted import number_of
from asynclock.rules.model import DONE, Part, parts_of
from asynclock.stores.zookeeper.layout import is_ordered, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.rules.model import Op


_WAITS = "waits"


def data_of(id: str, tasks: int, *, waits: bool = False) -> bytes:
    """The data of a node: the id; the number of tasks if it is more than one; and whether it waits where its place does
    not say that."""
    if waits:
        return f"{id}\0{tasks}\0{_WAITS}".encode()
    return (f"{id}\0{tasks}" if tasks > 1 else id).encode()


def data_of_mark(seconds: float) -> bytes:
    """The data of the mark of a run of `once` that lives so long: a server does not tell the TTL of a node."""
    return f"{DONE}\0{math.ceil(seconds * 1000)}".encode()


class Data(NamedTuple):
    """What the data of a node say."""

    id: str
    tasks: int = 1  # of a mark of `once`: for how many ms it lives
    waits: bool = False  # its place is that of a holder, and it waits for holders behind it


def read(data: bytes | None) -> Data:
    """Read the data of a node."""
    known, _, rest = (data or b"").decode(errors="replace").partition("\0")
    tasks, _, waits = rest.partition("\0")
    number = number_of(tasks)
    return Data(known, 1 if number is None else number, waits == _WAITS)


class Own(NamedTuple):
    """A node of a contender at one name."""

    path: str
    name: str  # its last part
    czxid: int
    part: Part
    closes: bool = False  # a ticket, behind which later arrivals wait

    @property
    def number(self) -> int:
        """Its place in the order of the queue."""
        return place_of(self.name)

    @property
    def is_ordered(self) -> bool:
        """Whether that place says who came before it."""
        return is_ordered(self.number)


class HoldAndWait:
    """A waiter for several names waits with its nodes at all of them, where they are in the way of others."""

    __slots__ = ("ends", "is_over", "looks", "suspects")

    def __init__(self, ends: float) -> None:
        self.ends = ends  # on the clock of the loop
        self.is_over = False
        self.suspects: set[str] = set()  # holders in its way, of clients that wait behind it
        self.looks = 0  # which found the same suspect, in a row


class Contender:
    """Its ops, and the looks of a waiter, are carried out one after the other (`turn`)."""

    __slots__ = (
        "arrived", "czxid", "doubtful", "ends", "given_up", "granted", "has_ended", "hold_and_wait", "id",
        "is_followed", "lease", "looked_at", "name", "nodes", "number", "parts", "refusals", "rest", "rounds", "sent",
        "session", "tasks", "ticket", "turn", "users", "waits", "waits_at", "watch", "watcher",
    )  # fmt: skip

    def __init__(self, op: Op) -> None:
        self.id = op.id
        self.name = op.name
        self.parts: tuple[Part, ...] = parts_of(op)
        self.lease = op.lease
        self.turn = asyncio.Lock()
        self.users = 0  # ops that are under way
        self.nodes: tuple[Own, ...] = ()  # one for each part; (): none, as far as this client knows
        self.ticket: Own | None = None  # where it waits without its nodes
        self.arrived: int | None = None  # the number of a ticket that closed the name, which its node has replaced
        self.refusals = 0  # in a row, after each of which it deleted its nodes
        self.hold_and_wait: HoldAndWait | None = None  # it waits for several names with its nodes
        self.rounds = 0  # how often it has done so in vain
        self.doubtful = False  # a create had no reply: there may be nodes that `nodes` does not have
        self.granted = False
        self.rest = 0.0  # seconds for which the name is taken after its release (`once`)
        self.given_up = False  # its release was sent: nodes that are found are deleted
        self.has_ended = False  # it was granted, and not extended in time: the same, but its id may acquire again
        self.czxid = 0  # of the nodes: the fencing token
        self.session = 0  # that of the nodes and of the ticket
        self.is_followed = False  # another one was behind it when it looked last
        self.waits = False  # its owner waits for a notice
        self.waits_at: Part | None = None  # where its node has the place of a holder, and its data say that it waits
        self.number = 0  # of the last sending of the ticket
        self.sent = 0.0  # when that was sent
        self.tasks = op.queueing.tasks  # of this process that wait for the name, as its data say
        self.ends = math.inf  # when the hold ends, unless it is extended
        self.looked_at = math.inf  # when `Expiry` looks whether it has ended; math.inf: it does not
        self.watch = 0  # of several watches only the last one counts
        self.watcher: Callable[[], object] | None = None  # its callback, which the connection does not keep

    @property
    def several(self) -> bool:
        """Whether it is for several names."""
        return len(self.parts) > 1

    def data_at(self, part: Part) -> bytes:
        """The data of its node at one name."""
        known = part.named(self.id) if self.several else self.id
        return data_of(known, self.tasks, waits=part is self.waits_at)

    def keep(self, paths: Sequence[str], czxid: int) -> None:
        """These are its nodes, one for each part."""
        self.czxid = czxid
        self.nodes = tuple(
            Own(path, path.rpartition("/")[2], czxid, part) for path, part in zip(paths, self.parts, strict=True)
        )

    def forget(self) -> None:
        """Its nodes are gone."""
        self.nodes, self.ticket, self.arrived, self.waits_at = (), None, None, None
        self.doubtful = self.granted = self.has_ended = self.waits = False
        self.hold_and_wait, self.rounds = None, 0
        self.ends = math.inf
        self.unwatch()

    def unwatch(self) -> None:
        """What it watches does not count any more."""
        self.watch += 1
        self.watcher = None

    @property
    def is_unwanted(self) -> bool:
        """Whether its nodes are to be deleted."""
        return self.given_up or self.has_ended

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is at the servers."""
        return not self.nodes and self.ticket is None and not self.doubtful
