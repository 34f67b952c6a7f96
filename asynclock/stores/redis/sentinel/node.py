"""The master of a Sentinel deployment, as one event loop sees it: a `RedisNode` whose server changes.

1. Each attempt to connect asks all sentinels for the master (`masters.py`). The server must say that it is a master:
   a replica, or a server that answers READONLY later, is left, and the next attempt asks again.
2. The node listens to all sentinels. When one of them has switched to another master, or names one with a greater
   epoch, the connection is dropped at once, also if the old master still answers. Replies that come from it later are
   not read. A connection attempt to the old master, or the pause before the next one, ends as well.
3. An address that a sentinel has switched away from is not connected to for 10 s, because other sentinels may learn of
   the switch a moment later. By then the old master has been made a replica, if it is alive. A greater epoch than
   before shows that they have switched back.
4. The pending releases, those of the last moments, the tickets and the renewals go to the new master, as after each
   reconnect. It may lack holds that the old one has granted (docs/stores/sentinel.md).
5. In a quorum the new master is in quarantine from its promotion on. A client that met the old one sees another run_id
   (`restarts.py`); to one that did not, the sentinels tell for how long the master has been one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Protocol

from asynclock.stores.lookups import ADVICE, NO_ANSWER
from asynclock.stores.port import Facts
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.pools import shown
from asynclock.stores.redis.reconnect import Backoff, pause
from asynclock.stores.redis.replies import Fault, ServerError, code_of, config_error, fault_of
from asynclock.stores.redis.restarts import Dialer, fields
from asynclock.stores.redis.sentinel.masters import Watch
from asynclock.stores.redis.stages import NodeState, Stage

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.handlers import Ask
    from asynclock.stores.redis.sentinel.masters import Address, Master, Sentinels

_SWITCHED = "the sentinels switched during the attempt to connect"
_LEFT = 10.0  # seconds for which rule 3 holds; the sentinels tell each other of a switch every 2 s


class _Backoff(Backoff):
    """Pauses that a switch to another master ends."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()  # the sentinels have switched since the last attempt began

    async def pause(self, *, hopeless: bool) -> None:
        await pause(0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.failed(hopeless)):
                await self.changed.wait()

    def switched(self) -> None:
        """The next attempt follows at once."""
        self.reset()
        self.changed.set()


class MasterDialer(Dialer, Protocol):
    """A store that connects to the master that sentinels name."""

    sentinels: Sentinels | None

    async def dial_to(self, address: Address | None) -> AbstractConnection:
        """A new connection to the master that the sentinels name so (None: to the server of the settings), not yet
        connected."""


class SentinelNode(RedisNode):
    """See the module."""

    managed = True

    def __init__(self, store: MasterDialer, config: NodeConfig) -> None:
        super().__init__(store, config)
        if (sentinels := store.sentinels) is None:
            raise TypeError(f"{store.label} has no sentinels")
        self._managed = store
        self._sentinels = sentinels
        self._backoff: _Backoff = _Backoff()
        self._news = Watch(sentinels, self._switched, self._named, config.connect_timeout)
        self._master: Master | None = None  # of the connection, or of the attempt
        self._epoch = "", -1  # the run_id of the last master, and the greatest epoch in which sentinels named it
        self._greatest = -1  # of the epochs in which sentinels named a master
        self._left: dict[Address, tuple[float, float]] = {}  # rule 3: until when, and the greatest epoch known then
        self._attempt: asyncio.Timeout | None = None

    async def aclose(self) -> None:
        try:
            await self._news.stop()
        finally:
            await super().aclose()

    # -- what the sentinels tell -----------------------------------------------------------------------------------

    def _switched(self, old: Address, new: Address) -> None:
        self._left[old] = self.clock.now() + _LEFT, math.inf if self._greatest < 0 else self._greatest
        self._left.pop(new, None)
        if self._master is None or self._master.address == old:
            self._leave(new)

    def _named(self, master: Master) -> None:
        known = self._master
        if known is not None and master.address != known.address and master.epoch > known.epoch:
            self._leave(master.address)

    def _leave(self, new: Address) -> None:
        """Rule 2. Another attempt to connect follows at once."""
        self._backoff.switched()
        if self._connection is not None:
            error = ConnectionError(f"{self.label}: the sentinels have switched to the master {shown(new)}")
            self.lost(self._connection, error)
        elif self._attempt is not None:
            self._attempt.reschedule(asyncio.get_running_loop().time())
            self._attempt = None

    # -- connecting ------------------------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        if self.state is not NodeState.CLOSED:
            self._news.start()
        super()._reconnect()

    async def _open_connection(self) -> None:
        self._backoff.changed.clear()
        try:
            async with asyncio.timeout(None) as self._attempt:
                await super()._open_connection()
            if self._backoff.changed.is_set() and self._connection is not None:  # in the turn in which it succeeded
                self.lost(self._connection, ConnectionError(f"{self.label}: {_SWITCHED}"))
        except TimeoutError:
            if self._backoff.changed.is_set():
                raise ConnectionError(f"{self.label}: {_SWITCHED}") from None
            if self.stage is Stage.LOOKUP and self._master is not None:
                where = shown(self._sentinels.dialed(self._master.address))
                raise ConnectionError(f"the master {where}: {NO_ANSWER}; {ADVICE}") from None
            raise
        finally:
            self._attempt = None

    async def _dial(self) -> AbstractConnection:
        self._master = master = await self._sentinels.find(self._config.connect_timeout)
        self._greatest = max(self._greatest, master.epoch)
        until, epoch = self._left.get(master.address, (-math.inf, -math.inf))
        if until > self.clock.now() and master.epoch <= epoch:
            raise ConnectionError(f"{self.label}: some sentinels still name the old master {shown(master.address)}")
        return await self._managed.dial_to(master.address)

    async def dial_master(self) -> AbstractConnection:
        """A connection to the master of the connection that there is, not yet connected."""
        return await self._managed.dial_to(None if self._master is None else self._master.address)

    async def _greet(self, ask: Ask, name: str | None) -> tuple[str, ...]:
        """Check the role first (rule 1)."""
        replication, server = ask("INFO", "replication"), ask("INFO", "server")
        try:
            info = fields(await replication.answer_of()) | fields(await server.answer_of())
        except ServerError as error:
            if code_of(error) == "NOAUTH":
                raise config_error(self.label, error) from None
            if fault_of(error) is not Fault.CONFIG:
                raise
            info = {}  # INFO is forbidden: a replica is found by its READONLY
        if (role := info.get("role", "master")) != "master":
            raise ConnectionError(f"{self.label}: the sentinels name a server as the master whose role is {role}")
        self._note_promotion(info.get("run_id", ""), float(info.get("uptime_in_seconds", "inf")))
        return await super()._greet(ask, name)

    def _note_promotion(self, run_id: str, uptime: float) -> None:
        """Rule 5. A master that was never switched to is judged as any other server. So is one that has been the master
        for longer than the quarantine: it may have restarted since. A master in a greater epoch than before was
        promoted again: this client has not met the one in between."""
        master, quarantine = self._master, self._config.quarantine
        if quarantine is None or master is None or master.epoch < 0:  # -1: it is not known
            return
        known, epoch = self._epoch
        if known == run_id and master.epoch <= epoch:
            return
        self._epoch = run_id, master.epoch
        if master.epoch == 0:
            return
        noted, when = self._managed.replaced  # perhaps by another event loop
        since = self.clock.now() - min(master.age, uptime)
        if noted == run_id:
            since = max(since, when)
        if quarantine(Facts(run_id, "", -math.inf, since)) > self.clock.now():
            self._managed.replaced = run_id, since
