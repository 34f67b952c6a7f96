"""What a server permits to this client: to vote, and to send notices. Its permissions may change while the client is
connected, so the client looks again.

1. The handshake takes a hold of a reserved name and gives it back (`checks.py`), and subscribes. A node that refuses
   the hold refuses every op, so it is reported as down, with what it refuses.
2. The client looks again when an op is refused, and every 2 s while an acquire is under way or the node refuses. If it
   sends no notices and nobody waits, every 10 s.
3. Each change is reported. When notices begin or end, all waiters ask again: they change between notices and polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError
from asynclock._loop import own_task
from asynclock.rules.model import ACQUIRE, RELEASE
from asynclock.stores.port import Reconnecting, WrongKind
from asynclock.stores.redis.keys import channel
from asynclock.stores.redis.replies import Fault, ServerError, config_error, fault_of, is_half_done
from asynclock.stores.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asynclock.rules.model import Op
    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.connection import Connection, Owner
    from asynclock.stores.redis.handlers import Ask
    from asynclock.stores.reports import Reports

log = logging.getLogger("asynclock")

LOOK = 2.0
"""Seconds between two looks while an acquire is under way, or the node refuses every op."""

_IDLE_LOOK = 10.0  # seconds, of a node that sends no notices and that nobody uses

_REMEMBERED = 10_000
"""The greatest number of ids that are remembered because the node never granted them."""


class Rights:
    """The permissions of one node. `check_vote` asks the server for its vote (`checks.py`), and `changed` is called
    after a look that found others than before."""

    def __init__(
        self,
        node: Owner,
        config: NodeConfig,
        reports: Reports,
        check_vote: Callable[[Ask], Awaitable[str]],
        changed: Callable[[], object],
    ) -> None:
        self.refusal: ConfigError | None = None  # why it refuses every op; None: it votes
        self.silence: ServerError | None = None  # why it sends no notices; None: it does
        self._node = node
        self._config = config
        self._reports = reports
        self._check_vote = check_vote
        self._changed = changed
        self._connection: Connection | None = None
        self._ask: Ask | None = None  # on that connection
        self._timer: Any = None
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._doubtful = False  # an op was refused since the last look
        self._refused: dict[str, object] = {}  # ids, in the order in which they were refused

    # -- what the server says ------------------------------------------------------------------------------------

    async def read(self, ask: Ask) -> None:
        """Learn all of it, on a new connection."""
        self._looked_at = self._node.clock.now()
        # Side by side: a server may be 100 ms away, and all of a connect takes at most connect_timeout.
        _, self.silence = await asyncio.gather(self._read_vote(ask), _subscribe(ask, self._config))

    async def check(self, ask: Ask) -> str:
        """Whether the node votes, for `Node.check_vote`: what does not work although it does. Raises ConfigError,
        ServerError."""
        before = self.refusal is None, self.silence is None
        try:
            refusal = await self._vote(ask)
        finally:
            self._tell(*before)
        if not refusal and self.silence is None:
            return ""
        if self.silence is None:  # no longer: the look tells that
            self.look_soon()
        note = f"{self._node.label} sends no notices, so waiters poll it"
        return f"{note}: {refusal}" if refusal else note

    async def _vote(self, ask: Ask) -> str:
        """Its refusal of PUBLISH; "" if it publishes. Remembers whether the node refuses."""
        try:
            refusal = await self._check_vote(ask)
        except WrongKind:  # the key of another program
            raise
        except ConfigError as error:
            self.refusal = error
            raise
        self.refusal = None
        return refusal

    async def _read_vote(self, ask: Ask) -> None:
        self._doubtful = False
        with contextlib.suppress(ConfigError, ServerError):  # a ServerError ends by itself, and the first op gets it
            await self._vote(ask)

    async def _look(self, ask: Ask) -> None:
        before = self.refusal is None, self.silence is None
        if self.refusal is not None or self._doubtful:
            await self._read_vote(ask)
        silence = await (_publish(ask) if self.silence is None else _subscribe(ask, self._config))
        if silence is None or fault_of(silence) is Fault.CONFIG:  # else it is busy, for example
            self.silence = silence
        self._tell(*before)

    def _tell(self, voted: bool, notified: bool) -> None:
        """Report a change. A server that votes from now on refused parts of the handshake: it is done again. Without a
        connection the next handshake reports: another check has just found the change, and ended the connection."""
        if self._connection is None:
            return
        if not voted and self.refusal is None:
            error = Reconnecting(f"{self._node.label} is connected anew, since it votes now")
            self._node.lost(self._connection, error)
        elif (voted, notified) != (self.refusal is None, self.silence is None):
            self._changed()

    # -- when to look again --------------------------------------------------------------------------------------

    def start(self, connection: Connection, ask: Ask) -> None:
        """The node is connected, and `read` is done."""
        self._connection, self._ask = connection, ask
        self._schedule()

    def look_soon(self) -> None:
        """Look now, unless the last look was a moment ago; then a look follows by itself."""
        now = self._node.clock.now()
        if self._ask is not None and self._looking is None and now - self._looked_at >= LOOK:
            self._looked_at = now
            name = f"asynclock {self._node.label} rights"
            self._looking = own_task(self._look(self._ask), name, self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):  # else the connection was lost, or is silent
            log.error("asynclock: the permissions at %s cannot be read", self._node.label, exc_info=error)

    def _schedule(self) -> None:
        self._timer = self._node.clock.call_at(self._node.clock.now() + LOOK, self._due)

    def _due(self) -> None:
        used = self.refusal is not None or self._doubtful or self._config.waits()
        since = self._node.clock.now() - self._looked_at
        if used or (self.silence is not None and since >= _IDLE_LOOK):
            self.look_soon()
        self._schedule()

    def stop(self) -> None:
        """The connection is lost, or the node closes."""
        self._connection = self._ask = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking is not None:
            self._looking.cancel()

    # -- refused ops ---------------------------------------------------------------------------------------------

    def refused(self, op: Op, error: ServerError) -> ConfigError:
        """The error of an op that the server refuses, although only the user can change that. A release is logged as
        well, because many are sent in the background: the key stays on that server until its lease ends. Not if the
        server refused its acquire, too."""
        refusal = config_error(self._node.label, error, SCRIPTS[op.kind.letter])
        if isinstance(refusal, WrongKind):  # a key of another type is not a lock
            return refusal
        if op.verb is ACQUIRE and not is_half_done(error):
            self._never_granted(op)
        elif op.verb is RELEASE and self._refused.pop(op.id, self) is self:
            self._reports.unreleased(op.name, refusal)
        self._doubtful = True
        self.look_soon()
        return refusal

    def _never_granted(self, op: Op) -> None:
        """Remember the ids that the server has refused from the first."""
        ticket, first = op.queueing.waiter, op.queueing.number <= 1
        if ticket or first:  # over N nodes each attempt has an id of its own
            self._refused[op.id] = None
        if ticket and first:
            self._refused[ticket] = None
        while len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]


async def _subscribe(ask: Ask, config: NodeConfig) -> ServerError | None:
    """Subscribe (rule 6 of `node.py`). Returns the server's refusal."""
    try:
        if (spoken := _protocol_of(await ask("HELLO", "3").answer_of())) != 3:  # notices would be taken for replies
            return ServerError(f"HELLO 3 is answered in protocol {spoken}")
        subscribed = ask("SUBSCRIBE", channel(config.listener.tag))
        published = ask("PUBLISH", channel(""), "")  # does not wait for the reply to the other
        await subscribed.answer_of()
        await published.answer_of()
    except ServerError as error:
        return error
    return None


def _protocol_of(hello: Any) -> object:
    """The protocol that a server speaks from now on, by its answer to HELLO: a map, or a list of names and values."""
    if isinstance(hello, list):
        hello = dict(zip(hello[::2], hello[1::2], strict=False))
    return hello.get(b"proto") if isinstance(hello, dict) else None


async def _publish(ask: Ask) -> ServerError | None:
    """Its refusal of PUBLISH: a server that forbids this cannot notify anyone."""
    try:
        await ask("PUBLISH", channel(""), "").answer_of()
    except ServerError as error:
        return error
    return None
