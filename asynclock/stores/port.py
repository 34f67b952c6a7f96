"""The port between the stores and the floors above: what a store and its nodes are, and the values that cross it. All
times are in seconds."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from asynclock._errors import ConfigError
from asynclock.rules.model import Notice, Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._clock import Clock
    from asynclock.rules.model import Op

__all__ = [
    "UNDONE",
    "Buffered",
    "Facts",
    "Grant",
    "Node",
    "NodeConfig",
    "NodeView",
    "Notice",
    "NoticeListener",
    "Refused",
    "ReplyHandler",
    "Restartable",
    "SameServer",
    "Slots",
    "Store",
    "Undone",
    "Vote",
    "WrongKind",
]

Grant: TypeAlias = tuple[int, bool]
"""A node says yes: the fence F of the node, and whether others wait for the name there. It is a plain tuple, because it
is made for each acquire; test for it with `vote.__class__ is tuple`."""


class Refused(NamedTuple):
    """A node says no."""

    left: float | None  # until the hold in the way ends; math.inf: never, or unknown; None: nobody holds the name
    holder: str = ""  # the id of that hold; "" where none is named
    rank: int = -1  # so many tickets stand before the ticket of this op; -1: the node keeps none
    order: int = 0  # the order key of the ticket of this op
    slots: Slots | None = None  # the slots in use, of a kind that has some


class Undone(Enum):
    """A node says that the id was undone before: there is a tombstone of it."""

    UNDONE = "undone"


UNDONE = Undone.UNDONE

Vote: TypeAlias = Grant | Refused | Undone | Exception | None
"""What is known of one node's answer to one op; an exception: it casts no vote; None: nothing yet."""


class ReplyHandler(Protocol):
    """It handles the replies to one op. It is called once per node, from the loop, and never awaits."""

    op: Op
    sent: float
    deadline: float

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        """Node `index` answered."""

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        """Node `index` casts no vote; `maybe`: it may still carry the op out."""


class Facts(NamedTuple):
    """What a node says of its server, where restarts matter."""

    run_id: str
    mark: str  # the run_id under which the node was first used; "" where nobody used it
    started: float  # when it started, on the client's clock; -math.inf: unknown
    replaced: float | None = None  # when this client met it there in place of another server, on the client's clock


class NodeView(NamedTuple):
    """What one node knows of one name, as an operator wants it."""

    type: str  # how the holds are kept: "string", "zset" or "none"; another program's may be anything
    holds: tuple[tuple[str, float | None], ...]  # (id, seconds left; None: for ever)
    fence: int
    waiters: tuple[tuple[int, str], ...]  # (order key, id), the first in the queue first


class SameServer(ConfigError):
    """This node is a server that another node is already: its one vote would count as two."""


class WrongKind(ConfigError):
    """The name is in use as another kind of lock, or as something that is none."""


class NoticeListener(Protocol):
    """It receives the notices for all waiters and holders of one event loop. It is called from the loop, and never
    awaits."""

    tag: str  # names its channel

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` sent a notice. No notice overtakes the reply to an op that the node decided before."""

    def connected(self, index: int) -> None:
        """Node `index` is connected (again): notices before that may be lost; or there are none any more."""


class Node(Protocol):
    """One server, as one event loop sees it."""

    label: str
    listens: bool  # notices come through
    error: Exception | None  # why it cannot be asked now; None: it can

    async def open(self) -> None:
        """Connect, or learn why not (`error`); never raises. Goes on trying in the background."""

    def send(self, op: Op, handler: ReplyHandler) -> None:
        """Ask; never awaits and never raises. The handler gets the answer, or learns that there is none, by its
        deadline. Ops are carried out in the order in which they are sent. An op that was revoked is not sent again."""

    async def ping(self) -> float:
        """Seconds for one round trip; raises what is wrong."""

    async def probe(self, name: str) -> NodeView:
        """What it knows of a name; raises what is wrong."""

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """Some of the names that are held and begin so, and the cursor for more; "0" begins and ends. Raises what is
        wrong."""

    async def aclose(self) -> None:
        """Wait until what is in flight that takes a hold away, or over, is answered or overdue; then hang up."""


@runtime_checkable
class Buffered(Protocol):
    """Optional, of a Node that sends the ops of one turn of the loop together."""

    def flush(self) -> None:
        """What was sent leaves now, not at the end of this turn, because somebody waits for it. Never raises."""


@runtime_checkable
class Restartable(Protocol):
    """Optional, of a Node whose server may come back from a restart without the holds that it granted. It casts no vote
    while it is in quarantine (`NodeConfig.quarantine`), but carries releases out."""

    @property
    def facts(self) -> Facts | None:
        """What is known of its server; None: nothing yet."""

    def end_quarantine(self) -> None:
        """The quorum found the deployment new: the server votes."""

    async def read_mark(self) -> None:
        """Read again whether another client found the deployment new."""


class NodeConfig(NamedTuple):
    """What a store needs to know of its client to open a node."""

    position: int
    prefix: str
    clock: Clock
    listener: NoticeListener
    servers: dict[str, str]  # run_id -> label, of all nodes of this client
    # Until when a server of such facts casts no vote, on the client's clock. None: a node alone, which need not ask.
    quarantine: Callable[[Facts], float] | None


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
