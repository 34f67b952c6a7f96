"""Votes that count only once replicas have what they say: the option `min_replicas` of a RedisStore.

1. A grant of an acquire, a renewal or an adoption is passed on after so many replicas have confirmed what the server
   had written by then. With too few of them at the op's deadline the node casts no vote, and the caller undoes the
   grant.
   A refusal of an acquire waits for a confirmation, too: the hold that it names may be one that no replica has. Its
   owner gives that back, so nobody may be told of it as a holder. While replicas fail, the node casts no vote.
2. The notice that a ticket became a hold is passed on after such a confirmation, too. Without one it is dropped, and
   all tickets are sent again, as after a lost notice.
3. The command is WAIT, which blocks its connection until the replicas have answered. So it has a connection of its own:
   behind a WAIT on the shared one, each release and renewal would wait for the slowest replica.
4. WAIT covers what its own connection wrote. So each one follows a PUBLISH on that connection, which replicas get and
   which leaves no key. All grants that the server decided before the PUBLISH are before it in the replication stream.
5. One WAIT is in flight at a time. The grants that arrive meanwhile share the next one.
6. Both connections must reach the same server: the run_id is compared when the second one is made. It ends with the
   first one; grants that are not confirmed by then fail.
7. A server in cluster mode does not replicate PUBLISH, so its WAIT would cover nothing: it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from redis.exceptions import ConnectionError as HungUp
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from asynclock._errors import ConfigError
from asynclock._loop import own_task
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import ACQUIRE, ADOPT, EXTEND, WAIT
from asynclock.stores.closing import CANCELLING
from asynclock.stores.redis.checks import Mode
from asynclock.stores.redis.handlers import StandIn, call_each
from asynclock.stores.redis.hang_ups import explained
from asynclock.stores.redis.keys import channel
from asynclock.stores.redis.login import fetch_credentials
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.remedies import known_cause
from asynclock.stores.redis.replies import ServerError, for_users
from asynclock.stores.redis.restarts import fields
from asynclock.stores.redis.sentinel.node import MasterDialer, SentinelNode
from asynclock.stores.redis.stages import NodeState, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio.connection import AbstractConnection

    from asynclock.rules.model import Op
    from asynclock.stores.port import (
        Checked,
        Grant,
        NodeConfig,
        Notice,
        NoticeListener,
        Refused,
        ReplyHandler,
        Undone,
    )
    from asynclock.stores.redis.connection import Connection
    from asynclock.stores.redis.handlers import Ask

log = logging.getLogger("asynclock")

_CONFIRMED = (ACQUIRE, EXTEND, WAIT, ADOPT)
_REFUSED = (ACQUIRE, WAIT)  # their refusals wait for a confirmation, too
_CHECK = 0.5  # seconds for which a health check waits for the replicas
_AGAIN = 0.02  # and if they did not answer before


class _Grant(NamedTuple):
    """A grant that waits for its confirmation."""

    deadline: float
    confirmed: Callable[[], object]
    failed: Callable[[Exception], object]


class Confirmer:
    """Waits for the replicas of one node's server."""

    def __init__(self, node: ReplicatedNode, replicas: int) -> None:
        self._node = node
        self._replicas = replicas
        self._now = node.clock.now
        self._waiting: deque[_Grant] = deque()  # for the next WAIT
        self._asked: deque[_Grant] = deque()  # for the one in flight
        self._task: asyncio.Task[None] | None = None
        self._timer: Any = None
        self._timer_at = 0.0
        self.trouble: Exception | None = None  # why the last WAIT confirmed nothing; None: it did
        self._beside: AbstractConnection | None = None
        self._beside_of: Connection | None = None

    def add(self, grant: _Grant) -> None:
        """Call `confirmed` or `failed` of the grant, by its deadline."""
        self._waiting.append(grant)
        if self._timer is None or grant.deadline < self._timer_at:
            self._arm(grant.deadline)
        if self._task is None:
            self._task = own_task(self._run(), f"asynclock {self._node.label} WAIT", self._ended)

    @property
    def busy(self) -> bool:
        """Whether votes wait for their confirmation."""
        return bool(self._asked or self._waiting)

    def fail_all(self, error: Exception) -> None:
        """The connection to the server is lost."""
        if self._task is not None:
            self._task.cancel()
        failed = [*self._asked, *self._waiting]
        self._asked.clear()
        self._waiting.clear()
        call_each([partial(each.failed, error) for each in failed])

    async def aclose(self) -> None:
        self.fail_all(ConnectionError(f"{self._node.label} was closed"))
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CANCELLING)
        if self._timer is not None:
            self._timer.cancel()
        await self._hang_up()

    # -- time limits -----------------------------------------------------------------------------------------------

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._node.clock.call_at(when, self._expire)

    def _expire(self) -> None:
        """Fail the grants whose time is over."""
        self._timer = None
        now, late = self._now(), []
        for queue in (self._asked, self._waiting):
            late += [each for each in queue if each.deadline <= now]
            left = [each for each in queue if each.deadline > now]
            queue.clear()
            queue.extend(left)
        try:
            call_each([partial(each.failed, self._too_few()) for each in late])
        finally:
            if (open_ones := [*self._asked, *self._waiting]) and self._timer is None:
                self._arm(min(each.deadline for each in open_ones))

    def _too_few(self, found: int | None = None) -> Exception:
        """The reason for which a grant does not count."""
        said = f"fewer than {self._replicas}" if found is None else f"{found} of {self._replicas}"
        return ConnectionError(
            f"{self._node.label}: {said} replicas confirmed the hold in time (min_replicas={self._replicas}), "
            "so it does not count"
        )

    # -- WAIT ------------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()):
            log.error("asynclock: waiting for the replicas of %s failed", self._node.label, exc_info=error)
        if self._waiting and self._node.up is not None:  # they came after a loss, on the next connection
            self.add(self._waiting.popleft())

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._asked, self._waiting = self._waiting, self._asked
                await self._confirm()
        except asyncio.CancelledError:
            await self._hang_up()
            raise

    async def _confirm(self) -> None:
        """One WAIT for the grants in `_asked`."""
        limit = max(each.deadline for each in self._asked) - self._now()
        error: Exception
        try:
            found = await self._wait(max(limit, 0.001))
            error = self._too_few(found)
        except Exception as failure:  # whatever it is, the grants do not count
            await self._hang_up()
            found, error = -1, self._failure(failure)
        self.trouble = None if found >= self._replicas else error
        grants = list(self._asked)
        self._asked.clear()
        enough = found >= self._replicas
        call_each([each.confirmed if enough else partial(each.failed, error) for each in grants])

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, NoPermissionError) or "NOPERM" in str(error):
            return ConfigError(f"{self._node.label} refuses: {error}; min_replicas needs +wait, +publish and +info")
        if isinstance(error, ConfigError):
            return error
        if (known := known_cause(self._node.label, error)) is not None:
            return known
        why = for_users(str(error)) or repr(error)
        return ConnectionError(f"{self._node.label}: the replicas could not be asked: {why}")

    async def _wait(self, limit: float) -> int:
        """The number of replicas that have all that the server had written by now, after `limit` seconds at most."""
        async with asyncio.timeout(limit + ANSWER_TIMEOUT):
            known = self._beside is not None and self._beside_of is self._node.up
            try:
                return await self._ask(limit)
            except (HungUp, OSError):
                if not known:  # else a server closes connections that are idle, but not those that subscribe
                    raise
            await self._hang_up()
            return await self._ask(limit)

    async def _ask(self, limit: float) -> int:
        beside = await self._connected()
        commands = ("PUBLISH", channel(""), ""), ("WAIT", str(self._replicas), str(max(1, int(limit * 1000))))
        await beside.send_packed_command(beside.pack_commands(commands))
        await beside.read_response(timeout=limit + ANSWER_TIMEOUT)
        return int(await beside.read_response(timeout=limit + ANSWER_TIMEOUT))

    async def _connected(self) -> AbstractConnection:
        """The second connection to the server of the first one."""
        first = self._node.up
        if first is None:
            raise ConnectionError("there is no connection")
        if self._beside is not None and self._beside_of is first:
            return self._beside
        await self._hang_up()
        self._beside, self._beside_of = await self._node.dial_beside(), first
        await fetch_credentials(self._beside, lambda stage: None, ANSWER_TIMEOUT, lambda: None)
        try:
            await self._beside.connect()  # type: ignore[no-untyped-call]
        except RedisError as error:
            raise (await explained(self._beside, error, Stage.HELLO, ANSWER_TIMEOUT)) from None
        await self._beside.send_command("INFO", "server")
        theirs, ours = fields(await self._beside.read_response()), await self._node.server_info()
        if theirs.get("run_id") != ours.get("run_id"):
            raise ConnectionError("a second connection reached another server")
        return self._beside

    async def _hang_up(self) -> None:
        if (beside := self._beside) is not None:
            self._beside = self._beside_of = None
            with contextlib.suppress(RedisError, OSError):
                await beside.disconnect(nowait=True)


class _Unconfirmed(StandIn):
    """Has the vote of an op confirmed first."""

    __slots__ = ("_confirmer",)

    def __init__(self, handler: ReplyHandler, confirmer: Confirmer) -> None:
        super().__init__(handler)
        self._confirmer = confirmer

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        handler = self.handler
        if reply.__class__ is not tuple and self.op.verb not in _REFUSED:
            handler.answer(index, reply)
            return
        self._confirmer.add(
            _Grant(
                self.deadline,
                lambda: handler.answer(index, reply),
                lambda error: handler.fail(index, error, maybe=True),
            )
        )


class _Listener:
    """Stands in for the listener of a client, and has the grants in notices confirmed first."""

    def __init__(self, listener: NoticeListener, node: ReplicatedNode) -> None:
        self.tag = listener.tag
        self._listener = listener
        self._node = node
        self._asks_again = False

    def received(self, index: int, notice: Notice) -> None:
        if notice.number and (notice.fence or self._node.confirms):  # it must not overtake a refusal
            self._node.confirm(lambda: self._listener.received(index, notice), lambda error: self._unconfirmed(index))
        else:
            self._listener.received(index, notice)

    def _unconfirmed(self, index: int) -> None:
        """All tickets are sent again, once for the notices of one WAIT: thousands may fail together."""
        if not self._asks_again:
            self._asks_again = True
            clock = self._node.clock
            clock.call_at(clock.now(), partial(self._ask_again, index))

    def _ask_again(self, index: int) -> None:
        self._asks_again = False
        if self._node.state is not NodeState.CLOSED:
            self._listener.connected(index)

    def connected(self, index: int, *, missed: bool = True) -> None:
        self._listener.connected(index, missed=missed)


class ReplicatedDialer(MasterDialer, Protocol):
    """A store with the option `min_replicas`."""

    min_replicas: int


class ReplicatedNode(RedisNode):
    """See the module."""

    def __init__(self, store: ReplicatedDialer, config: NodeConfig) -> None:
        self._within = _CHECK  # the time limit of the last op
        super().__init__(store, config._replace(listener=_Listener(config.listener, self)))
        self._replicas = store.min_replicas
        self._confirmer = Confirmer(self, store.min_replicas)

    @property
    def up(self) -> Connection | None:
        """The connection; None: there is none, or this is a forked child, whose parent has it."""
        return self._connection if self._origin.is_here else None

    @property
    def confirms(self) -> bool:
        """Whether votes wait for their confirmation."""
        return self._confirmer.busy

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if op.verb in _CONFIRMED:
            self._within = handler.deadline - handler.sent
            handler = _Unconfirmed(handler, self._confirmer)
        super().send(op, handler)

    def confirm(self, confirmed: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        """Call one of the two once the replicas are known to have all that the server has written by now, or not."""
        self._confirmer.add(_Grant(self.clock.now() + self._within, confirmed, failed))

    def lost(self, connection: Connection, error: Exception) -> None:
        try:
            if self._connection is connection:
                self._confirmer.fail_all(error)
        finally:
            super().lost(connection, error)

    async def _greet(self, ask: Ask, name: str | None) -> tuple[str, ...]:
        native = await super()._greet(ask, name)
        if self.mode is Mode.CLUSTER:
            raise ConfigError(
                f"{self.label} is in cluster mode, where min_replicas is not supported: leave it out, or use Sentinel"
            )
        return native

    async def check_vote(self) -> Checked:
        checked = await super().check_vote()
        replicas = fields(await self._run("INFO", "replication")).get("connected_slaves", "")
        if replicas.isdecimal() and int(replicas) < self._replicas:
            raise ConnectionError(
                f"{self.label} has too few replicas: {replicas} are connected, and min_replicas is {self._replicas}"
            )
        outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def settle(error: Exception | None = None) -> None:
            if not outcome.done():
                outcome.set_result(error)

        self._confirmer.add(_Grant(self.clock.now() + min(self._within, _CHECK), settle, settle))
        # The caller may cancel a check that lasts: then its error would not name the replicas.
        await asyncio.wait({outcome}, timeout=None if self._confirmer.trouble is None else _AGAIN)
        if (error := outcome.result() if outcome.done() else self._confirmer.trouble) is not None:
            raise error
        return checked

    async def dial_beside(self) -> AbstractConnection:
        """A second connection to the same server, not yet connected."""
        return await self._store.dial()

    async def server_info(self) -> dict[str, str]:
        """What the server says of itself. Raises ConfigError."""
        try:
            return fields(await self._run("INFO", "server"))
        except (ServerError, ResponseError) as error:
            raise ConfigError(f"{self.label} refuses: {error}; min_replicas needs INFO") from None

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            await self._confirmer.aclose()


class ReplicatedSentinelNode(ReplicatedNode, SentinelNode):
    """The master of a Sentinel deployment, with `min_replicas`."""

    async def dial_beside(self) -> AbstractConnection:
        return await self.dial_master()
