"""The port between the stores and the floors above: what a store and its nodes are, and the values that cross it. All
times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from asynclock._errors import ConfigError
from asynclock._options import RESERVED
from asynclock.rules.model import Notice, Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock
    from asynclock.events import Event
    from asynclock.rules.model import Kind, Op
    from asynclock.stores.distance import Distance

__all__ = [
    "PROBE",
    "UNDONE",
    "Buffered",
    "Busy",
    "CarriedOut",
    "Checked",
    "Deferrable",
    "Distant",
    "Explaining",
    "Facts",
    "Grant",
    "KeepsTickets",
    "Limited",
    "Making",
    "Measured",
    "Node",
    "NodeConfig",
    "NodeView",
    "Notice",
    "NoticeListener",
    "Refused",
    "Reconnecting",
    "ReplyHandler",
    "Restartable",
    "SameServer",
    "Slots",
    "Standalone",
    "Store",
    "ThreadSafe",
    "Undone",
    "Use",
    "Vote",
    "WaiterView",
    "Wish",
    "WrongKind",
]

Grant: TypeAlias = tuple[int, bool]
"""A node grants: the fence F of the node, and whether other clients wait for the name there. It is a plain tuple,
because one is made for each acquire. No other vote is a tuple."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A node refuses."""

    left: float | None  # seconds until the blocking hold ends; math.inf: never, or unknown; None: nobody holds the name
    holder: str = ""  # the id of the blocking hold; "" if the node names none
    rank: int = -1  # the number of tickets before the ticket of this op; -1: the node keeps no ticket of it, or, to a
    # peek: an acquire would enter
    order: int = 0  # the order key of the ticket of this op
    slots: Slots | None = None  # the slots in use, for a kind that has slots


class Undone(Enum):
    """A node refuses because the id was undone before: the node keeps a tombstone of it."""

    UNDONE = "undone"


UNDONE = Undone.UNDONE

Vote: TypeAlias = Grant | Refused | Undone | Exception | None
"""One node's answer to one op, as far as it is known. An exception: the node casts no vote. None: no answer yet."""


class ReplyHandler(Protocol):
    """Handles the replies to one op. It is called once for each node, from the event loop, and never awaits."""

    op: Op
    sent: float
    deadline: float

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        """Node `index` answered."""

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        """Node `index` casts no vote. `maybe`: it may have carried the op out, or may still do so."""


@runtime_checkable
class Deferrable(Protocol):
    """Optional: a ReplyHandler that a node may keep waiting in a queue of its own. Only for a node that is alone: the
    times of an op are the same at all nodes."""

    gives_up: float  # when its caller stops waiting, on the client's clock; math.inf: unknown, or never

    def defer(self, why: Callable[[], Exception]) -> None:
        """The op waits in the queue. `why` makes the error for a caller that gives up meanwhile."""

    def begin(self, now: float) -> None:
        """The op is sent now: its time counts from here."""


def deferrable(handler: ReplyHandler) -> Deferrable | None:
    """The handler, if it is Deferrable. A flood asks this for each op, and isinstance takes 20 us for a Protocol."""
    return cast("Deferrable", handler) if hasattr(handler, "defer") else None


@runtime_checkable
class CarriedOut(Protocol):
    """Optional: a ReplyHandler of a release that knows the answers of the other nodes."""

    @property
    def carried_out(self) -> bool:
        """Whether a majority of the nodes is without the id of the release. Until then a node that closes waits for the
        answer also beyond the deadline."""


def is_carried_out(handler: ReplyHandler) -> bool:
    """Whether a majority of the nodes is without the id of a release, as far as the handler knows. A client that closes
    asks this for each release, so this is no isinstance, as in `deferrable`."""
    return cast("CarriedOut", handler).carried_out if hasattr(handler, "carried_out") else True


class Facts(NamedTuple):
    """Facts about the server of a node, from which `quorum/quarantine.py` decides whether it may vote."""

    run_id: str
    mark: str  # the run_id that the server had at its first use; "" if it was never used
    started: float  # when the server started, on the client's clock; -math.inf: unknown
    replaced: float | None = None  # when this client found it in place of another server, on the client's clock

    @property
    def is_marked(self) -> bool:
        """Whether it has its own mark. A server without a run_id has none."""
        return self.run_id != "" and self.mark == self.run_id


class WaiterView(NamedTuple):
    """A ticket at one node."""

    order: int  # its order key
    id: str
    number: int = 1  # how often its owner has sent it
    tasks: int = 1  # of its client that waited for the name when it was sent


class NodeView(NamedTuple):
    """The state of one name at one node, for `inspect` and `holders`."""

    type: str  # the Redis type of the hold: "string", "zset" or "none"; a key of another program may have any type, and
    # a zset of another program has no holds here
    holds: tuple[tuple[str, float | None], ...]  # (id, seconds left); None: the hold never ends
    fence: int
    waiters: tuple[WaiterView, ...]  # the first in the queue first
    note: str = ""  # what a reader must know of it, such as its age; "": nothing


PROBE = f"{RESERVED}probe"
"""The name of the hold that `Node.check_vote` takes. No user can lock it."""


OLD = "old"
"""The `asynclock_reason` of the line of the log which says that what a node shows may be old."""


class Checked(NamedTuple):
    """A node would vote now."""

    latency: float  # the seconds that the check took
    note: str = ""  # what does not work although the node votes; "" if nothing


class SameServer(ConfigError):
    """Two nodes of the client are the same server: its vote would count twice."""


class Reconnecting(ConnectionError):
    """The connection of a node was lost, and no attempt to connect again has failed since: this may be an idle
    connection that a proxy closed. It is no outage yet. Once an attempt has failed, the node tells NodeDown."""


class Busy(ConnectionError):
    """The program itself uses all connections that this client may have. It says nothing of the node."""


class WrongKind(ConfigError):
    """The name is in use as another kind of lock, or as a key that is not a lock."""


class Unfit(ConfigError):
    """The node cannot write the name, or the id, or cannot read what is stored for the name. So it has not carried out
    the op."""


class NoticeListener(Protocol):
    """Receives the notices for all waiters and holders of one event loop. It is called from that loop, and never
    awaits."""

    tag: str  # the name of its channel

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` sent a notice. A notice never overtakes the reply to an op that the node decided earlier."""

    def connected(self, index: int, *, missed: bool = True) -> None:
        """Node `index` is connected (again). It may be another server, which lacks holds. `missed`: earlier notices may
        be lost, and the node may send no notices from now on (`Node.listens`); False: it sent none before either."""


class Node(Protocol):
    """One server, as one event loop sees it."""

    label: str
    listens: bool  # whether notices from the server arrive
    error: Exception | None  # why it cannot be asked now (`Reconnecting`: for a moment); None: it can be asked

    async def open(self) -> None:
        """Connect. Never raises: if the attempt fails, `error` says why, and more attempts follow in the background."""

    def send(self, op: Op, handler: ReplyHandler) -> None:
        """Send an op; never awaits and never raises. By its deadline the handler gets either the answer or a failure.
        The ops of one name are carried out in the order in which they are sent. A revoked op is not sent again."""

    async def check_vote(self) -> Checked:
        """Take a hold of the name PROBE and give it back, as an acquire and its release do; nothing is left. Raises the
        reason for which the node would cast no vote now."""

    async def probe(self, name: str) -> NodeView:
        """The state of a name at this node. Raises the error of the node."""

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """The next cursor, and some of the names that are held and begin with `begin`. The cursor "0" starts the
        listing, and marks its end when it is returned. Raises the error of the node."""

    async def aclose(self) -> None:
        """Wait until each release, adopt and break in flight is answered or overdue, for 1.8 s at most, then
        disconnect. A release that is not `CarriedOut` is not overdue before these 1.8 s are over. Ends within 3 s, also
        if the server is silent: then it cuts the connection."""


@runtime_checkable
class KeepsTickets(Protocol):
    """Optional: a Node whose tickets outlive a lost connection, because they belong to a session. A waiter keeps its
    ticket in an outage, and renews it when the node is back. Only for a node that is alone."""

    keeps_tickets: bool


@runtime_checkable
class Buffered(Protocol):
    """Optional: a Node that sends the ops of one turn of the loop together."""

    def flush(self) -> None:
        """Write all ops sent so far now, not at the end of this turn, because another client waits for them. Never
        raises."""


@runtime_checkable
class Restartable(Protocol):
    """Optional: a Node whose server may lose holds when it restarts. While it is in quarantine
    (`NodeConfig.quarantine`), it casts no vote, but it carries out releases."""

    @property
    def facts(self) -> Facts | None:
        """The facts about its server; None: not known yet."""

    def end_quarantine(self) -> None:
        """The deployment is new, so the server may vote from now on."""

    async def read_mark(self) -> None:
        """Read the mark again: another client may have found the deployment new. Raises the error of a server that does
        not answer."""


@runtime_checkable
class Measured(Protocol):
    """Optional: a Node that measures how long its server takes to answer."""

    def rtt(self) -> float | None:
        """Seconds from an op to its answer, of the last op that was measured; None: none was. Any thread may call
        it."""


@runtime_checkable
class Distant(Protocol):
    """Optional: a Node that knows how far its server is. It calls `NodeConfig.measured`, too."""

    @property
    def distance(self) -> Distance:
        """The round trips to its server; to the farthest, if there are several."""


@runtime_checkable
class Explaining(Protocol):
    """Optional: a Node that may know why an answer is late."""

    def delay(self, since: float, name: str = PROBE) -> str:
        """Why a check, or a look at that name, that began at `since` on the client's clock has no answer yet; "" if
        unknown."""


@runtime_checkable
class Lengthy(Protocol):
    """Optional: a Node whose `check_vote` takes several round trips, where an acquire may take one."""

    check_limit: float
    """Seconds for which a caller waits for a check, at least."""


@runtime_checkable
class Making(Protocol):
    """Optional: a Store whose first client makes what it needs, such as a table, unless that is set to False."""

    makes: bool


@runtime_checkable
class ThreadSafe(Protocol):
    """Optional: a Store that several threads may use at the same time, each in an event loop of its own. A thread can
    renew leases (renew="thread") only in such a store."""

    thread_safe: bool


CHECK_LIMIT = 3.0
"""The `check_limit` of the stores that have one: ten round trips of 0.3 s, and what an acquire has for one with the
default lease."""


class Use(Enum):
    """What a caller wants to do with a lock."""

    LOCK = "lock"
    ONCE = "once"
    DETACH = "detach"
    ADOPT = "adopt"


class Wish(NamedTuple):
    """A lock that a caller wants, for `Limited`."""

    use: Use
    kind: Kind
    names: tuple[str, ...]  # more than one: of a multi lock; none: a decorator, whose names come with its calls
    lease: float
    min_hold: float = 0.0
    fencing: bool = True
    prefix: str = ""  # of the client


@runtime_checkable
class Limited(Protocol):
    """Optional: a Store that cannot keep every kind of lock, or not with all options."""

    def cannot(self, wish: Wish) -> str | None:
        """Why it cannot keep such a lock, for the message of Unsupported; None: it can. Does no I/O."""


@runtime_checkable
class Standalone(Protocol):
    """Optional: a Store that is replicated by itself, and has a namespace of its own, such as a table or a path. It is
    the only node of its client, and `NodeConfig.prefix` is ""."""

    standalone: bool


class NodeConfig(NamedTuple):
    """The settings of the client with which a store opens a node."""

    position: int
    prefix: str
    clock: Clock
    listener: NoticeListener
    servers: dict[str, str]  # run_id -> label, of all nodes of this client
    # When the quarantine of a server with these facts ends, on the client's clock. None: a single node, which has none.
    quarantine: Callable[[Facts], float] | None
    connect_timeout: float = 1.0  # the longest time to connect, in seconds
    max_lease: float = 60.0  # of the client; a server shows it to operators, because it must be equal in all clients
    tell: Callable[[Event], object] = lambda event: None  # tell an event of the node to the client
    waits: Callable[[], bool] = lambda: False  # whether an acquire of the client is under way
    # The answers of the node come within so many seconds, by its round trips: called when that changes. None: it need
    # not measure them.
    measured: Callable[[float], object] | None = None


class Store(Protocol):
    """A place where locks are kept; shared by all event loops, and opened in each."""

    @property
    def label(self) -> str:
        """Its name in messages; never contains a password."""

    @property
    def clock(self) -> Clock | None:
        """The clock that its clients must use; None: the clock of the machine."""

    def open(self, config: NodeConfig) -> Node:
        """Make its node for one event loop, without connecting."""


def is_thread_safe(store: Store) -> bool:
    """Whether several threads may use it at the same time."""
    return isinstance(store, ThreadSafe) and store.thread_safe


def is_standalone(store: Store) -> bool:
    """Whether it is always the only node of its client."""
    return isinstance(store, Standalone) and store.standalone
