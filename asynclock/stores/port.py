"""What a store and its nodes are to the floors above, as protocols: whom they answer, and what they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._clock import Clock
    from asynclock.rules.model import Kind, Op


class ReplyHandler(Protocol):
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
    """Who hears, on behalf of all who wait in one event loop. It is called from the loop, and never awaits."""

    tag: str  # names its channel

    def received(self, index: int, notice: bytes) -> None:
        """Node `index` sent a notice (Notice.wire)."""

    def connected(self, index: int) -> None:
        """Node `index` is connected (again): notices before that may be lost; or there are none any more."""


class Node(Protocol):
    """One server, as one event loop sees it."""

    label: str
    listens: bool  # notices come through
    error: Exception | None  # why it cannot be asked now; None: it can

    @property
    def facts(self) -> Facts | None:
        """What is known of its server, where restarts matter."""

    async def open(self) -> None:
        """Connect, or learn why not (`error`); never raises. Goes on trying behind the caller's back."""

    def send(self, op: Op, handler: ReplyHandler) -> None:
        """Ask; never awaits and never raises: the handler hears the answer, or that there is none, by its deadline."""

    def flush(self) -> None:
        """Let what was sent leave now, not at the end of this turn: somebody waits for it. Never raises."""

    def trust(self) -> None:
        """Let a young server vote: the quorum found the deployment new."""

    async def look(self) -> None:
        """Read again whether somebody else found the deployment new."""

    async def ping(self) -> float:
        """Seconds for one round trip; raises what is wrong."""

    async def probe(self, name: str) -> NodeView:
        """What it knows of a name; raises what is wrong."""

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """Some of the names that are held and begin so, and the cursor for more; "0" begins and ends. Raises what is
        wrong."""

    async def aclose(self) -> None:
        """Wait until what is in flight that takes a hold away, or over, is answered or overdue; then hang up."""


class NodeConfig(NamedTuple):
    """What a store needs to know of its client to open a node."""

    position: int
    prefix: str
    kinds: tuple[Kind, ...]
    clock: Clock
    listener: NoticeListener
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
