"""Session: one client in one event loop, with its nodes, its watchdog and its holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING

from asynclock._clock import SYSTEM, wait_ended
from asynclock._errors import ConfigError, QuorumUnavailable, brief, client_closed
from asynclock._loop import no_loop, own_task
from asynclock._options import BROKEN_BY, RESERVED, LockSettings, node_timeout
from asynclock.acquire import shutdown
from asynclock.acquire.backoff import waking_time
from asynclock.acquire.causes import lost
from asynclock.acquire.holds import Entries, Holds
from asynclock.acquire.journal import Journal, write
from asynclock.acquire.local_queue import LocalQueues
from asynclock.acquire.loop_lag import LoopLag
from asynclock.acquire.outages import Outages
from asynclock.acquire.renewal_thread import RenewalThread, started_thread
from asynclock.acquire.tenure import Loss
from asynclock.acquire.ticket import Tickets
from asynclock.acquire.watchdog import Watchdog
from asynclock.acquire.yielded import YieldedNames
from asynclock.events import LoopLagged, Lost, Quarantined, QuarantineEnded, ReleaseFailed
from asynclock.quorum.ballot import UNREACHABLE, WON
from asynclock.quorum.quorum import quorum_over
from asynclock.rules.model import ID_LENGTH, TAG_LENGTH
from asynclock.rules.registry import FAMILIES
from asynclock.stores import check_supported, limited_of
from asynclock.stores.port import WrongKind, is_thread_safe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from asynclock._errors import LockLost, Reason
    from asynclock._options import ClientSettings
    from asynclock.acquire.acquisition import Acquisition
    from asynclock.acquire.causes import Cause
    from asynclock.acquire.handover import Adoption
    from asynclock.acquire.observers import Observers
    from asynclock.acquire.tenure import Terms
    from asynclock.events import Event
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind
    from asynclock.stores.port import Notice, Store, Wish


_DRAW = 64
"""This many ids are drawn at once, because one call into the system costs more than an id (docs/decisions.md)."""

_RELEASES = 256
"""So many outcomes of releases are looked at in one turn of the loop."""

_HOST = socket.gethostname().replace("|", "_")


class Session:
    """Made by the client at first use in a loop. No other loop may use it."""

    def __init__(self, settings: ClientSettings, stores: Sequence[Store], observers: Observers) -> None:
        clocks = [store.clock for store in stores if store.clock is not None]
        self.loop = asyncio.get_running_loop()
        self.settings = settings
        self.observers = observers
        observers.look_at_level()
        self.clock = clocks[0] if clocks else SYSTEM
        self.journal = Journal(self.clock)
        self.lag = LoopLag(lambda seconds: Context().run(self.tell, LoopLagged(seconds)))
        self.watchdog = Watchdog(self.clock, self.lag, self.journal.admits_fault)
        self.holds = Holds()
        self.local_queues = LocalQueues()
        self.yielded = YieldedNames(self.clock.now, used=len(stores) > 1)
        self.tickets = Tickets()
        self.entries = Entries(self.loop)
        self.under_way: set[Acquisition | Adoption] = set()
        self._outages = Outages(self.under_way, self.loop)
        self.tag = secrets.token_hex(TAG_LENGTH // 2)
        self.forked = False
        self.closed = False  # nothing new begins
        self.hung_up = False  # until this is True, releases are still sent
        self.opened = False  # the first attempts to connect have ended
        self.ready = False  # and no majority of the nodes refuses for a reason that only the user can solve
        self.quorum = quorum_over(stores, settings, self.clock, self, self._reported, lambda: bool(self.under_way))
        self._limits = self.quorum.limits
        self._usual = 0.0  # the node timeout of a lock without options of its own
        self._usual_of = -1.0  # the limit of the nodes for which it was computed; -1.0: it was not
        self.limited = limited_of(stores)
        self._stores = stores
        self._renewal_thread: RenewalThread | None = None
        self._whoami = f"{os.getpid()}|{_HOST}"
        self._random: list[str] = []  # ids drawn ahead; a forked child has another session and draws its own
        self._opening: asyncio.Task[ConfigError | QuorumUnavailable | None] | None = None
        self._judging: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._votes = False  # somebody wants to know whether a majority would vote
        self._quarantines: dict[str, Event] = {}  # node -> told while the session opens

    def check(self) -> None:
        """Raise ConfigError in a forked child, and outside this session's event loop."""
        if self.forked:
            raise ConfigError(
                "this Lease was taken before a fork: it belongs to the parent process; acquire the lock again here"
            )
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            raise no_loop() from None
        if here is not self.loop:
            raise ConfigError("this Lease belongs to another event loop: use it there, or acquire the lock again here")

    def forget_after_fork(self) -> None:
        """This is a forked child: the sockets are the parent's, and nothing is held here."""
        self.forked = True

    def connect_limit(self, wait: float | None) -> float:
        """Seconds for which a first use waits, at most. The first attempts to connect end after connect_timeout. With a
        timeout or a patience of 0 it tries once, too."""
        longest = max(self.settings.patience, self.settings.connect_timeout)
        return min(wait, longest) if wait else longest

    def check_supported(self, wish: Wish) -> None:
        """Raise Unsupported for a lock that the stores cannot keep."""
        check_supported(self.limited, wish._replace(prefix=self.settings.prefix))

    def check_open(self) -> None:
        """Raise ConfigError once the client was closed."""
        if self.closed:
            raise client_closed()

    def within(self, settings: LockSettings) -> float:
        """The node timeout of a lock, in seconds."""
        measured = self._limits.longest
        if settings is self.settings.lock and measured == self._usual_of:
            return self._usual
        timeout = node_timeout(self.settings, settings, len(self.quorum.nodes), measured=measured)
        if settings.lease < self.lag.lease:
            self.lag.use(settings.lease)
            if self._renewal_thread is not None:
                self._renewal_thread.look_again()
        if settings is self.settings.lock:
            self._usual, self._usual_of = timeout, measured
        return timeout

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        """A fresh id: the session's tag, 80 random bits, a bar, and what an operator may read of its holder. The bar
        says that this client receives notices and that its release serves waiters. A client without notices writes
        another sign (`is_ours`)."""
        if not self._random:
            length = ID_LENGTH - TAG_LENGTH
            drawn = secrets.token_hex(length // 2 * _DRAW)
            bar = "|" if self.quorum.listens else "!"
            self._random = [f"{self.tag}{drawn[i : i + length]}{bar}" for i in range(0, len(drawn), length)]
        return f"{self._random.pop()}{mode}{seed}|{self._whoami}|{metadata}"

    def introduction(self, metadata: str) -> str:
        """What the holder of a lock reads of the client that breaks it: process, host and the first 80 characters of
        the note."""
        return f"{self._whoami}|{metadata.replace(RESERVED, '')[:80]}"

    def use_renewal_thread(self) -> None:
        """Start the thread that extends holds while the loop is blocked, if it does not run. A store with a clock of
        its own has no thread, because only a test moves that clock. Neither has a store that threads cannot share."""
        if self._renewal_thread is None and self.clock is SYSTEM and all(map(is_thread_safe, self._stores)):
            self._renewal_thread = started_thread(self, self._stores)

    # -- events --------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Log an event that is not one of DEBUG, and tell it to the listeners."""
        self.journal.write(event)
        if self.observers.active:
            self.observers.tell(event)

    def tell_lost(self, terms: Terms, reason: Reason, held_for: float, why: Callable[[], object]) -> None:
        """A lease was lost. `why` makes the error that says so, if it is logged. A client that closes ends its leases
        on purpose: that is no warning."""
        if self.forked:
            return
        level = logging.INFO if reason == "closed" else logging.WARNING
        if (logged := self.journal.admits(Lost, level)) or self.observers.active:
            event = Lost(*terms.described, reason, held_for)
            if logged:
                terms.in_context(write, event, level, str(why()))
            terms.in_context(self.observers.tell, event)

    def lost_error(self, name: str, cause: Cause) -> LockLost:
        """The error for a lease that was lost for that cause."""
        return lost(name, cause, [node.label for node in self.quorum.nodes])

    def _reported(self, event: Event) -> None:
        """An event of a node. While the session opens, the nodes may be found to be new: then they were in quarantine
        for a moment only, which is not told."""
        self._outages.told(event, len(self._stores))
        if isinstance(event, Quarantined) and self._opening is not None and not self._opening.done():
            self._quarantines[event.node] = event
        elif not isinstance(event, QuarantineEnded) or self._quarantines.pop(event.node, None) is None:
            Context().run(self.tell, event)  # it is about no caller, also where a caller finds it

    def _renew_soon(self) -> None:
        """The only node is connected again, perhaps to another server that lacks holds, such as a replica that was
        promoted. Renew all holds, so that the owners of those learn it now, and not after a third of the lease."""
        if len(self.quorum.nodes) > 1 or not self.holds:
            return
        if self._renewing is None or self._renewing.done():
            self._renewing = own_task(self._make_due(), "asynclock renew")

    async def _make_due(self) -> None:
        within = waking_time(len(self.holds))
        for hold in self.holds.in_slices():
            if hold is not None:
                hold.renew_soon(self.clock.now() + random.uniform(0.0, within))  # noqa: S311 - jitter
            else:
                await asyncio.sleep(0)

    # -- notices -------------------------------------------------------------------------------------------------

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice."""
        waiter = self.tickets.get(notice.id)
        if waiter is not None:
            waiter.notified(index, notice)
        elif notice.number == 0:
            for hold in self.holds.of(notice.name):
                if notice.broken:
                    hold.broken(notice.id)
                elif not notice.expired:
                    hold.waited_for(notice.id)
                elif hold.op.id.startswith(notice.id):
                    hold.lose(Loss.EXPIRED)
            name, marked, by = notice.name.rpartition(BROKEN_BY)
            for hold in self.holds.of(name) if marked and notice.broken else ():
                hold.broken(notice.id, by)

    def connected(self, index: int, *, missed: bool = True) -> None:
        """Node `index` is connected again. If notices may have been lost meanwhile (`missed`), all tickets are sent
        again. If it was the end of an outage, the acquires that wait for that try again."""
        del index
        self._random.clear()  # an id says whether notices come, and that may have changed
        self._renew_soon()
        self._outages.connected(self.quorum.nodes, self.tickets.all() if missed else [])

    def check_kind(self, name: str, kind: Kind) -> None:
        """Raise WrongKind where a task of this process holds the name as another kind. The server would refuse it, too,
        but a task in the local queue does not ask the server."""
        family = FAMILIES[kind.letter]
        for hold in self.holds.of(name):
            held = next((part.kind for part in hold.op.kind.parts if part.name == name), hold.op.kind)
            if FAMILIES[held.letter] != family and any(tenure.held for tenure in hold.tenures):
                raise WrongKind(f"{brief(name)} is in use as another kind", name=name)

    # -- opening and closing -------------------------------------------------------------------------------------

    async def open(self, settings: LockSettings, limit: float, *, check: bool = True) -> QuorumUnavailable | None:
        """Connect at first use, and check whether a majority would vote; wait for that at most `limit` seconds. Returns
        the error of an outage. Raises ConfigError. Without `check` it only connects: a vote writes, and a client that
        only reads may have no right to that."""
        self.within(settings)  # raises for a lease that is too short, before anything is sent
        self.check_open()
        self._votes |= check
        if self._opening is None:
            self._opening = own_task(self._open(), "asynclock open")
        opening = self._opening
        await wait_ended(opening, limit, self.clock)
        if opening.done():
            if self._opening is opening:
                self._opening = None
            self.check_open()
            error = None if opening.cancelled() else opening.result()
            if check and isinstance(error, ConfigError):
                raise error
            if isinstance(error, QuorumUnavailable):
                return error
        return None

    async def _open(self) -> ConfigError | QuorumUnavailable | None:
        if self._closer is None:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        if not self.opened:
            await self.quorum.open()
            self.opened = True
        error = await self.quorum.check(self.within(self.settings.lock)) if self._votes else None
        self.ready = self._votes and not isinstance(error, ConfigError)
        quarantines, self._quarantines = self._quarantines, {}
        for event in quarantines.values():
            self.tell(event)
        return error

    def judge_again(self) -> None:
        """An acquire finds no majority. In the background: servers that came up since may be new, and need no
        quarantine."""
        if self._judging is None or self._judging.done():
            self._judging = own_task(self.quorum.judge_again(), "asynclock judge")

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """asyncio.run closes all async generators at its end. Then this one closes a client that the program has not
        closed."""
        try:
            yield
        finally:
            if self._closing is None or self._closing.cancelled():
                try:
                    self.holds.warn_unclosed()
                finally:
                    await self.aclose()

    def not_released(self, ballot: Ballot, terms: Terms) -> None:
        """A release had no majority. After an outage the hold ends by itself, which is told. Raises ConfigError where
        servers refuse the command: the key stays, and only the user can fix that."""
        error = self.quorum.unavailable(ballot, terms.name)
        if isinstance(error, ConfigError):
            raise error
        terms.in_context(self.tell, ReleaseFailed(*terms.described, str(error)))

    async def wait_shielded(self, ballot: Ballot) -> None:
        """Wait for an outcome in a task that was cancelled: it comes within the node timeout. The caller continues the
        cancel after it."""
        import anyio  # 20 ms of import, needed here only

        with anyio.CancelScope(shield=True):
            while ballot.outcome is None:
                try:
                    await ballot.settled(self.loop)
                except asyncio.CancelledError:
                    continue  # a second cancel; the caller raises the first

    async def release_all(self) -> None:
        """Release all holds, even if the task is cancelled meanwhile. Errors of single locks are logged and not
        raised."""
        releases: deque[tuple[Ballot, Terms]] = deque()
        cancelled: asyncio.CancelledError | None = None
        for hold in self.holds.in_slices():
            if hold is None:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as error:  # it goes on once all releases were sent
                    cancelled = error
                continue
            for tenure in hold.tenures:
                tenure.check_clock()  # the owner of a lease that is over is told so
                if (ballot := hold.end(tenure)) is not None:
                    releases.append((ballot, tenure.terms))
        if cancelled is not None:
            raise cancelled
        await self._tell_failed(releases)

    async def _tell_failed(self, releases: deque[tuple[Ballot, Terms]]) -> None:
        """Tell each release that had no majority, after its outcome. A client that hung up gets no more replies."""
        for number in range(1, len(releases) + 1):
            ballot, terms = releases.popleft()
            if (ballot.outcome if self.hung_up else await ballot.settled(self.loop)) is UNREACHABLE:
                with contextlib.suppress(ConfigError):
                    self.not_released(ballot, terms)
            if number % _RELEASES == 0:  # most outcomes are there already, so the loop would wait for all of them
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Release all holds, wait for the replies that are on their way, and close the connections. Leases that are
        still held are lost ("closed")."""
        if self._closing is None or self._closing.cancelled():
            self.closed = True
            self.ready = self.opened = False
            self.local_queues.close()
            self._closing = own_task(self._close(), "asynclock close")
        await asyncio.shield(self._closing)  # a cancel of the caller does not stop it

    async def _close(self) -> None:
        await shutdown.cancelled([each for each in (self._opening, self._judging, self._renewing) if each is not None])
        releases: deque[tuple[Ballot, Terms]] = deque()
        for hold in self.holds.in_slices():
            if hold is None:
                await asyncio.sleep(0)
                while releases and releases[0][0].outcome is WON:  # not kept: a garbage collection would look at all
                    releases.popleft()
            else:
                owners = hold.tenures[:1]
                ballot = hold.close()
                releases.extend([(ballot, owner.terms) for owner in owners])
        self.watchdog.stop()
        for each in list(self.under_way):
            each.close()
        await shutdown.drained(self.under_way)
        self.hung_up = True
        closing = [node.aclose() for node in self.quorum.nodes]
        if self._renewal_thread is not None:
            closing.append(self._renewal_thread.aclose())
        await shutdown.all_ended(closing, shutdown.CLOSING)
        await self._tell_failed(releases)
        self.journal.stop()
        closer, self._closer = self._closer, None
        if closer is not None:
            with contextlib.suppress(RuntimeError):  # it runs already: it has called aclose()
                await closer.aclose()
