"""One client in one event loop: its nodes, its watchdog, and what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._clock import SYSTEM
from asynclock._errors import ConfigError, brief
from asynclock._loop import no_loop
from asynclock._options import CONNECT_TIMEOUT, QUORUM_TIMEOUT, RELEASE_TIMEOUT, LockSettings, node_timeout
from asynclock.acquire.watchdog import Watchdog
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import FAMILIES, ID_LENGTH, TAG_LENGTH, Kind, Queueing
from asynclock.stores.port import NodeConfig, WrongKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Hashable, Sequence
    from weakref import ref

    from asynclock._options import ClientSettings
    from asynclock.acquire.local_queue import Line
    from asynclock.quorum.ballot import Ballot
    from asynclock.stores.port import Notice, Store


log = logging.getLogger("asynclock")


class Interruptible(Protocol):
    """An acquire or an adoption under way."""

    def interrupt(self) -> None:
        """The client closes."""


class Wait(Interruptible, Protocol):
    """An acquire under way (`acquisition.py`)."""

    def called(self, index: int, notice: Notice) -> None:
        """Node `index` sent a notice for its ticket."""

    def renew_soon(self) -> None:
        """Send the ticket again."""


_DRAW = 64
"""So many ids are drawn at once: a call into the system costs more than an id (docs/decisions.md)."""

_HOST = socket.gethostname().replace("|", "_")


class Session:
    """Made by the client at first use in a loop; never used in another."""

    def __init__(self, settings: ClientSettings, stores: Sequence[Store], kinds: Sequence[Kind]) -> None:
        clocks = [store.clock for store in stores if store.clock is not None]
        self.loop = asyncio.get_running_loop()
        self.settings = settings
        self.clock = clocks[0] if clocks else SYSTEM
        self.watchdog = Watchdog(self.clock)
        self.held: dict[str, dict[ref[Any], None]] = {}  # name -> the Leases that this loop has, the last one last
        self.lines: dict[str, Line] = {}  # name -> who stands in line for it here
        self.ceded: dict[str, float] = {}  # name -> when it was given back to others
        self.entering: dict[tuple[str, Hashable], asyncio.Future[None]] = {}  # first entries of owners, under way
        self.tag = secrets.token_hex(TAG_LENGTH // 2)
        self.waits: set[Interruptible] = set()  # acquires and adoptions under way
        self.waiting: dict[str, Wait] = {}  # random part of an id -> whose ticket it is
        self.forked = False
        self.closed = False  # nothing new begins
        self.hung_up = False  # until this is True, releases are still sent
        self.ready = False
        quarantine = None if len(stores) == 1 else 0.0 if settings.trust_restarts else settings.max_lease + 1.0
        servers: dict[str, str] = {}
        self.quorum = Quorum(
            [
                store.open(NodeConfig(index, settings.prefix, tuple(kinds), self.clock, self, servers, quarantine))
                for index, store in enumerate(stores)
            ],
            self.clock,
        )
        self._whoami = f"{os.getpid()}|{_HOST}"
        self._random: list[str] = []  # ids drawn ahead; a forked child has another session, and so draws its own
        self._usual = 0.0  # the node timeout of a lock without options of its own, once it is known
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None

    def check(self) -> None:
        """Raise ConfigError where this session cannot be used from here."""
        if self.forked:
            raise ConfigError("this Lease was taken before a fork: it belongs to the parent process; acquire anew here")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            raise no_loop() from None
        if here is not self.loop:
            raise ConfigError("this Lease belongs to another event loop: use it there, or acquire anew here")

    def connect_limit(self, wait: float | None) -> float:
        """Seconds that a first use waits for connections. A timeout or a patience of 0 allows one attempt, too."""
        return wait or max(self.settings.patience, CONNECT_TIMEOUT)

    def check_open(self) -> None:
        """Raise ConfigError once the client was closed."""
        if self.closed:
            raise ConfigError("this client was closed: enter it again (async with), or make a new one")

    def within(self, settings: LockSettings) -> float:
        """The node timeout of a lock, in seconds."""
        if settings is self.settings.lock and self._usual:
            return self._usual
        timeout = node_timeout(self.settings, settings, len(self.quorum.nodes))
        if settings is self.settings.lock:
            self._usual = timeout
        return timeout

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        """A fresh id: our tag and 80 random bits, then what an operator may read of its holder. The bar says that we
        hear, and say, who waits; a client that cannot writes another sign (`is_ours`)."""
        if not self._random:
            length = ID_LENGTH - TAG_LENGTH
            drawn = secrets.token_hex(length // 2 * _DRAW)
            bar = "|" if self.quorum.listens else "!"
            self._random = [f"{self.tag}{drawn[i : i + length]}{bar}" for i in range(0, len(drawn), length)]
        return f"{self._random.pop()}{mode}{seed}|{self._whoami}|{metadata}"

    # -- notices -------------------------------------------------------------------------------------------------

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` sent a notice."""
        wait = self.waiting.get(notice.id)
        if wait is not None:
            wait.called(index, notice)
        elif notice.number == 0:
            for lease in self.leases(notice.name):
                if notice.broken:
                    lease._hold.broken(notice.id)
                else:
                    lease._hold.waited_for(notice.id)

    def connected(self, index: int) -> None:
        """What a node had to tell meanwhile is lost, so all tickets are sent anew."""
        del index
        for wait in list(self.waiting.values()):
            wait.renew_soon()

    def leases(self, name: str) -> list[Any]:
        """What this loop has of a name, the last one last."""
        return [lease for known in self.held.get(name, ()) if (lease := known()) is not None]

    def check_kind(self, name: str, kind: Kind) -> None:
        """Raise WrongKind where a task of this process holds the name as another kind. The server would refuse it, too,
        but a task that stands in the local queue never asks the server."""
        family = FAMILIES[kind.mode[:1]]
        for lease in self.leases(name):
            held = lease._hold.op.kind
            held = next((part.kind for part in held.parts if part.name == name), held)
            if lease.held and FAMILIES[held.mode[:1]] != family:
                raise WrongKind(f"{brief(name)} is in use as another kind", name=name)

    def gone(self, name: str, lease: ref[Any]) -> None:
        """A lease of that name has ended; harmless for one that had before."""
        mine = self.held.get(name)
        if mine is not None:
            mine.pop(lease, None)
            if not mine:
                del self.held[name]

    def cede(self, kind: Kind, name: str) -> None:
        """A hold that others wait for was given back, and these are called: who wants it here comes after them. (At a
        node alone to call is to let in; and the other kinds have their order at the nodes.)"""
        if len(self.quorum.nodes) == 1 or kind.fair or kind.shared:
            return
        now = self.clock.now()
        self.ceded.pop(name, None)
        while self.ceded and now - next(iter(self.ceded.values())) > QUORUM_TIMEOUT:
            del self.ceded[next(iter(self.ceded))]
        self.ceded[name] = now  # the last one last

    def next_in_line(self, names: Sequence[str]) -> None:
        """Their lease here has ended: the next who stands in line asks."""
        for name in names:
            line = self.lines.get(name)
            if line is not None and line.asker is None and not self.closed:
                line.next(self.lines)

    # -- opening and undoing -------------------------------------------------------------------------------------

    async def open(self, settings: LockSettings, limit: float) -> None:
        """Connect at first use; wait for it at most `limit` seconds. Raises ConfigError."""
        self.within(settings)  # a lease that is too short for it is told before anything is tried
        self.check_open()
        if self._opening is None:
            self._opening = self.loop.create_task(self._open(), name="asynclock open")
        opening = self._opening
        await asyncio.wait({opening}, timeout=limit)
        if opening.done():
            if self._opening is opening:
                self._opening = None
            self.check_open()
            if not opening.cancelled():
                opening.result()

    async def _open(self) -> None:
        if self._closer is None:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        await self.quorum.open()
        self.ready = True

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """asyncio.run ends by closing all async generators: that is where a client nobody closed hangs up."""
        try:
            yield
        finally:
            if self._closing is None or self._closing.cancelled():
                await self.aclose()

    def undo(self, ballot: Ballot, ticket: Queueing | None = None) -> None:
        """Take an attempt back. Nobody awaits it; a node that closes waits for its answer."""
        within = min(max(ballot.deadline - ballot.sent, QUORUM_TIMEOUT), RELEASE_TIMEOUT)
        self.quorum.undo(ballot, within, ticket)

    def not_released(self, ballot: Ballot, name: str) -> None:
        """A release without a majority. In an outage the lease ends by itself, which is logged. Raises ConfigError
        where servers refuse: the key stays, and only the user can mend that."""
        error = self.quorum.unavailable(ballot, name)
        if isinstance(error, ConfigError):
            raise error
        log.warning("asynclock: released %s, which ends by itself: %s", brief(name), error)

    async def finished(self, ballot: Ballot) -> None:
        """Wait for an outcome, whoever cancels: it is bounded by its node timeout, and the cancel goes on after it."""
        try:
            await ballot.waiter(self.loop)
        except asyncio.CancelledError:
            import anyio  # 20 ms of import, needed here only

            with anyio.CancelScope(shield=True):
                while ballot.outcome is None:
                    try:
                        await ballot.settled(self.loop)
                    except asyncio.CancelledError:
                        continue  # a second cancel; the first is raised below
            raise

    async def release_all(self) -> None:
        """Give back all that is held; errors of single locks are not raised."""
        leases: list[Any] = list(self.watchdog)
        await asyncio.gather(*(lease.release() for lease in leases), return_exceptions=True)

    async def aclose(self) -> None:
        """Give back all that is held, wait for what is on its way, hang up. Leases still held are lost ("closed")."""
        if self._closing is None or self._closing.cancelled():
            self.closed = True
            self.ready = False
            self._closing = self.loop.create_task(self._close(), name="asynclock close")
        await asyncio.shield(self._closing)  # whoever cancels, it comes to its end

    async def _close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        leases: list[Any] = list(self.watchdog)
        for lease in leases:
            lease._close()
        self.watchdog.stop()
        for wait in list(self.waits):
            wait.interrupt()
        while self.waits:  # noqa: ASYNC110 - a turn or two: each wakes, undoes and raises
            await asyncio.sleep(0)
        self.hung_up = True
        await asyncio.gather(*(node.aclose() for node in self.quorum.nodes))
        closer, self._closer = self._closer, None
        if closer is not None:
            with contextlib.suppress(RuntimeError):  # it runs: it is what closes us
                await closer.aclose()
