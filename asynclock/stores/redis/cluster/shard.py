"""One master of a cluster, as one event loop sees it: a `RedisNode` that hands an op to the router of its cluster when
another master has the slot (`node.py`)."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import RELEASE, Op
from asynclock.stores.port import Reconnecting
from asynclock.stores.redis.cluster.shard_channel import ShardConnection, subscribe
from asynclock.stores.redis.delivery import SLICE
from asynclock.stores.redis.encoding import encode, pack
from asynclock.stores.redis.handlers import CommandReply, IgnoredCommand, IgnoredReply
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.notices import notice_of
from asynclock.stores.redis.replies import Fault, ServerError, fault_of, is_redirect

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Sequence

    from asynclock.stores.port import NodeConfig, Notice, ReplyHandler
    from asynclock.stores.redis.cluster.topology import Address
    from asynclock.stores.redis.connection import Connection
    from asynclock.stores.redis.handlers import Ask
    from asynclock.stores.redis.restarts import Dialer
    from asynclock.stores.undelivered import PendingRelease

_ASKING = pack("ASKING")
_SILENT = 0.25  # seconds without an answer after which a master that closes will hardly redirect an op


class Router(Protocol):
    """The node of the whole cluster, for its shards."""

    watches: bool  # a timer finds out when a shard is silent

    def watch(self) -> None:
        """Start that timer: a shard has a command to answer."""

    def redirected(self, shard: Shard, handler: ReplyHandler, error: ServerError) -> None:
        """The shard did nothing: send the op to the master that has the slot."""

    def received(self, shard: Shard, notice: Notice, *, certain: bool = False) -> None:
        """A notice came on the connection to this shard. `certain`: from this shard itself."""

    def channel_lost(self, shard: Shard) -> None:
        """The slot of its channel has moved, or it forgot its scripts."""

    def connected(self, shard: Shard, *, missed: bool) -> None:
        """The shard is connected (again). `missed`: notices may be lost."""


class _Listener:
    """The `NoticeListener` of one shard."""

    def __init__(self, router: Router, tag: str) -> None:
        self.tag = tag
        self.shard: Shard | None = None
        self._router = router

    def received(self, index: int, notice: Notice) -> None:
        del index
        if self.shard is not None:
            self._router.received(self.shard, notice)

    def connected(self, index: int, *, missed: bool = True) -> None:
        del index
        if self.shard is not None:
            self._router.connected(self.shard, missed=missed)


class Shard(RedisNode):
    """One master."""

    connection_class = ShardConnection
    in_cluster = managed = True

    def __init__(
        self,
        store: Dialer,
        config: NodeConfig,
        router: Router,
        address: Address,
        unanswered: OrderedDict[str, float],
    ) -> None:
        listener = _Listener(router, config.listener.tag)
        super().__init__(store, config._replace(listener=listener))
        listener.shard = self
        self.address = address
        self.tag = ""  # a hash tag in one of its slots, for its channel
        self._client = config.listener.tag
        self._plain, self.pushed = self.pushed, self._pushed
        self.asked_at = -math.inf  # when an ASK named it last
        self._leaves = False  # it closes because it has no slots any more
        self._router = router
        self._pending.unanswered = unanswered  # of all shards: a slot may move before an answer comes
        self._sent = deque(maxlen=0)  # `acknowledged` keeps its releases: another master may have to carry them out
        # Another master had its slots before, so there may be holds of any id that a release names.
        self._lost_at = self.found_at = self.clock.now()

    def begin(self) -> None:
        """Begin to connect."""
        self._reconnect()

    @property
    def connecting(self) -> bool:
        """Whether its first attempt to connect is under way."""
        return not self._met.is_set()

    @property
    def up(self) -> bool:
        """Whether it is connected."""
        return self._connection is not None

    @property
    def lost_at(self) -> float:
        """When its last connection was lost; before its first one, when it was made."""
        return self._lost_at

    @property
    def refusal(self) -> Exception | None:
        """Why it refuses every op; None: it does not."""
        return self._rights.refusal

    @property
    def reconnecting(self) -> bool:
        """Whether its connection was lost a moment ago, and no attempt to connect has failed since."""
        return isinstance(self.error, Reconnecting)

    @property
    def has_pending(self) -> bool:
        """Whether it has releases to deliver."""
        return self._pending.to_send > 0

    @property
    def quarantine_left(self) -> float:
        """The seconds in which it casts no vote yet."""
        return self._restarts.left

    @property
    def busy(self) -> bool:
        """Whether it has commands to answer."""
        return self._connection is not None and bool(self._connection.waiting)

    @property
    def releases(self) -> bool:
        """Whether it has yet to answer a release in time. A silent master is not waited for."""
        waiting = self._connection.waiting if self._connection is not None and self.silent_for < _SILENT else ()
        now = self.clock.now()
        return any(
            not isinstance(each, CommandReply) and each.op.verb is RELEASE and now < each.deadline for each in waiting
        )

    @property
    def silent_for(self) -> float:
        """The seconds for which it has not answered its commands; 0.0: it has none."""
        connection = self._connection
        return self.clock.now() - connection.moved_at if connection is not None and connection.waiting else 0.0

    def give_up(self) -> list[ReplyHandler]:
        """It does not answer, and another master has its slots: drop the connection. Returns the ops to send there:
        each is harmless if it is carried out twice, and the old master forgets what it still does."""
        connection = self._connection
        if connection is None:
            return []
        handlers = list(connection.waiting)
        self._pending.send_again(handlers, self.clock.now(), connection.moved_at)
        connection.waiting.clear()
        error = ConnectionError(f"{self.label} is silent, and another master has its slots")
        self.lost(connection, error)
        ops: list[ReplyHandler] = []
        for handler in handlers:
            if isinstance(handler, CommandReply):
                handler.fail(self.index, error, maybe=True)
            else:
                ops.append(handler)
        return ops

    def send(self, op: Op, handler: ReplyHandler) -> None:
        super().send(op, handler)
        if not self._router.watches:
            self._router.watch()

    def _server_error(self, connection: Connection, handler: ReplyHandler, error: ServerError) -> None:
        if is_redirect(error):
            self._router.redirected(self, handler, error)
        else:
            if fault_of(error) is Fault.RESEND and isinstance(connection, ShardConnection) and connection.tag:
                connection.tag = b""
                self._router.channel_lost(self)
            super()._server_error(connection, handler, error)

    def send_asking(self, op: Op, handler: ReplyHandler) -> None:
        """Send an op for a slot that is being moved here: the server takes it only after ASKING. No other command may
        come between the two."""
        connection = self._connection
        if connection is None:
            self.send(op, handler)
            return
        if self._quarantined and op.verb is not RELEASE and self._refuses_vote(op, handler):
            return
        connection.send(_ASKING, IgnoredCommand(handler.sent, handler.deadline))
        connection.send(encode(op, self._config.prefix), handler)
        if handler.deadline < self._deadlines.next:
            self._deadlines.arm(handler.deadline)

    # -- its channel ---------------------------------------------------------------------------------------------

    async def _greet(self, ask: Ask, name: str | None) -> tuple[str, ...]:
        native = await super()._greet(ask, name)
        self._asked_tag = tag = self.tag
        self._tag = await subscribe(ask, self._client, tag) if self._rights.silence is None and tag else b""
        return native

    async def _open_connection(self) -> None:
        await super()._open_connection()
        if self.tag != self._asked_tag:  # slots have moved since
            await self.subscribe()
        elif isinstance(self._connection, ShardConnection):
            self._connection.tag = self._tag

    async def subscribe(self) -> None:
        """Its channel is in another slot now. Never raises for what the server says."""
        connection = self._connection
        if isinstance(connection, ShardConnection) and self.listens and self.tag:
            connection.tag = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.tag = await subscribe(partial(self._ask, connection), self._client, self.tag)

    def _pushed(self, push: Any) -> None:
        if push[0] == b"smessage":
            if (notice := notice_of(push[2], self._config.prefix)) is not None:
                self._router.received(self, notice, certain=True)
        elif push[0] == b"sunsubscribe":
            self._router.channel_lost(self)
        else:
            self._plain(push)

    # -- pending releases ----------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Close it: it has no slots any more. Releases that it did not answer are pending then, for other masters."""
        self._leaves = True
        await self.aclose()

    def _keep_unanswered(self, connection: Connection) -> None:
        if self._leaves:
            self._pending.cut_off(connection.waiting, self.clock.now(), connection.moved_at)

    def acknowledged(self, op: Op) -> None:
        """It has answered a release."""
        self._pending.sent.append(op)

    def take_pending(self, wanted: Callable[[Op], bool]) -> list[PendingRelease]:
        """Give up these pending releases: another shard has their slot now."""
        return self._pending.take(wanted)

    def deliver(self, releases: Sequence[PendingRelease]) -> None:
        """Carry these releases out, now or when the server is up."""
        now = self.clock.now()
        if self._connection is not None and len(releases) <= SLICE:
            for op in releases:
                op.send_at(now)
                self.send(op, IgnoredReply(op, now, now + ANSWER_TIMEOUT))
            return
        for op in releases:
            self._pending.add(op, now, now)
        if self._connection is not None and releases:
            self._delivery.refused(self._connection)  # in slices

    def keep(self, op: Op, sent: float) -> None:
        """A release could not be sent within its time: it is delivered later."""
        self._pending.add(op, self.clock.now(), sent)
        if self._connection is not None:
            self._delivery.refused(self._connection)

    # -- commands ------------------------------------------------------------------------------------------------

    async def run(self, *command: str, within: float = ANSWER_TIMEOUT) -> Any:
        """The answer to one command. Raises ServerError with its error reply, as it is."""
        return await self._ask(self._connected(), *command, within=within).answer_of()
