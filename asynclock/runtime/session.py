"""Session: one client in one event loop. It implements `Core` (`protocol/core.py`) for that loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
import warnings
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from asynclock._clock import SYSTEM, wait_ended
from asynclock._errors import ConfigError, QuorumUnavailable, brief, client_closed
from asynclock._loop import no_loop, own_task, retrieve, running_task
from asynclock._options import RESERVED, THREAD, LockSettings, node_timeout
from asynclock.events import LoopLagged, Lost, NodeDown, NodeUp, Quarantined, QuarantineEnded, ReleaseFailed
from asynclock.protocol.core import SLICE
from asynclock.protocol.machine import Machine
from asynclock.protocol.terms import owner_of
from asynclock.protocol.watchdog import LoopLag
from asynclock.quorum.ballot import UNREACHABLE, WON
from asynclock.rules.model import ID_LENGTH, TAG_LENGTH
from asynclock.runtime import opening, shutdown
from asynclock.runtime.inherited import of_parent, silent
from asynclock.runtime.observers import Journal, Observers, write
from asynclock.runtime.renewal_thread import RenewalThread, ThreadedHold
from asynclock.stores import check_supported, check_thread_safe, limited_of
from asynclock.stores.port import is_thread_safe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from asynclock._errors import Reason
    from asynclock._options import ClientSettings
    from asynclock.events import Event
    from asynclock.protocol.hold import Hold, Tenure
    from asynclock.protocol.holds import Holds
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot, Outcome
    from asynclock.stores.port import Notice, Store, Wish

log = logging.getLogger("asynclock")

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
        self.result: Callable[[], asyncio.Future[None]] = self.loop.create_future
        self.settings = settings
        self.observers = observers
        observers.look_at_level()
        self.clock = clocks[0] if clocks else SYSTEM
        self.journal = Journal(self.clock)
        self.lag = LoopLag(lambda seconds: Context().run(self.tell, LoopLagged(seconds)))
        self.machine = Machine(self, self.lag, len(stores), self._make_threaded)
        self.tag = secrets.token_hex(TAG_LENGTH // 2)
        self.forked = False
        self.closed = False  # nothing new begins
        self.hung_up = False  # until this is True, releases are still sent
        self.opened = False  # the first attempts to connect have ended
        self.ready = False  # and no majority of the nodes refuses for a reason that only the user can solve
        under_way = self.machine.under_way
        self.quorum = opening.quorum_over(stores, settings, self.clock, self, self._reported, lambda: bool(under_way))
        self._limits = self.quorum.limits
        self._usual = 0.0  # the node timeout of a lock without options of its own
        self._usual_of = -1.0  # the limit of the nodes for which it was computed; -1.0: it was not
        self.limited = limited_of(stores)
        self._stores = stores
        self._thread_safe = all(map(is_thread_safe, stores))
        self._renewal_thread: RenewalThread | None = None
        self._whoami = f"{os.getpid()}|{_HOST}"
        self._random: list[str] = []  # ids drawn ahead; a forked child has another session and draws its own
        self._opening: asyncio.Task[ConfigError | QuorumUnavailable | None] | None = None
        self._openers = 0  # the number of callers that wait for it
        self._entries = 0  # the number of `async with` of the client that have begun and did not fail
        self._used_by_entry = False  # its first use was such an entry
        self._judging: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._votes = False  # somebody wants to know whether a majority would vote
        self.down: set[str] = set()  # the labels of the nodes that were reported as down, and not as up since
        self._quarantines: dict[str, Event] = {}  # node -> its Quarantined event, held back until the session is open
        _all_sessions.add(self)

    def check(self) -> None:
        """Raise ConfigError in a forked child, and outside this session's event loop."""
        if self.forked:
            raise of_parent("this Lease")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            raise no_loop() from None
        if here is not self.loop:
            raise ConfigError("this Lease belongs to another event loop: use it there, or acquire the lock again here")

    def forget_after_fork(self) -> None:
        """This is a forked child: the sockets are the parent's, and nothing is held here. So nothing is sent any more:
        what ends here, in a copy of the parent's event loop, goes on in the parent. Another thread may have been in
        that loop, so this only sets values: no timer or task of the loop is changed."""
        self.forked = self.closed = self.hung_up = True
        self.ready = self.opened = False
        self.quorum = silent(self.quorum, self.later)
        self.observers = Observers.of_nobody()

    def connect_limit(self, wait: float | None) -> float:
        """Seconds for which a first use waits, at most. The first attempts to connect end after connect_timeout. A
        first use waits for them also with a timeout or a patience of 0, which mean one try."""
        longest = max(self.settings.patience, self.settings.connect_timeout)
        return min(wait, longest) if wait else longest

    def check_supported(self, wish: Wish) -> None:
        """Raise Unsupported for a lock that the stores cannot keep."""
        check_supported(self.limited, wish._replace(prefix=self.settings.prefix))

    def check_open(self) -> None:
        """Raise ConfigError once the client was closed."""
        if self.forked:
            raise of_parent()
        if self.closed:
            raise client_closed()

    def within(self, settings: LockSettings) -> float:
        """The node timeout of a lock, in seconds. Raises ConfigError for settings that the nodes or the stores do not
        allow."""
        measured = self._limits.longest
        if settings is self.settings.lock and measured == self._usual_of:
            return self._usual
        timeout = node_timeout(self.settings, settings, len(self.quorum.nodes), measured=measured)
        if settings.renew == THREAD and not self._thread_safe:  # they may have been unknown when the lock was made
            check_thread_safe(self._stores)
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

    # -- what the machine needs (`protocol/core.py`) -------------------------------------------------------------

    random = staticmethod(random.random)
    spent = staticmethod(time.perf_counter)

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the next turn of the loop."""
        self.loop.call_soon(call, *args, context=Context())

    def renews(self, tenures: Sequence[Tenure]) -> None:
        """A hold with these tenures is renewed now. Log it if its task has ended without a release. The Lock keeps the
        tenure, so no ResourceWarning follows. Other tasks may use it on purpose, so this is no warning."""
        if self.forked:
            return
        self.observers.look_at_level()
        for tenure in tenures:
            if tenure.mark_unattended():
                log.info(
                    "asynclock: the %s that acquired %s has ended; its lease is renewed until it is released (set "
                    "max_hold to end it)",
                    owner_of(tenure.task),
                    brief(tenure.hold.name),
                )

    def dropped(self, tenure: Tenure) -> None:
        """The program no longer refers to it. A garbage collector calls this in any thread, and between any two steps
        of the loop's thread. So it changes nothing: the loop ends it, in a turn of its own. If this ended the hold, the
        end could come after an acquire has read the holds and before it joins the local queue. Then nothing would wake
        that acquire."""
        hold = tenure.hold
        last, held, left = all(each is tenure for each in hold.tenures), tenure.held, tenure.ends - self.clock.now()
        if not self.forked:  # in a forked child the loop is the parent's
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits in it
                self.loop.call_soon_threadsafe(hold.dropped, tenure.weak_self, context=Context())
        if last and held:
            warnings.warn(
                f"the lease of {brief(hold.name)} was dropped while held: release it, or use a `with` block; "
                f"it ends by itself in {left:.3g} s",
                ResourceWarning,
                source=tenure,
                stacklevel=3,
            )

    def fault(self, where: object, error: Exception) -> None:
        """A check of the watchdog has raised. It is repeated."""
        if self.journal.admits_fault("checks of the watchdog that failed"):
            log.error("asynclock: the watchdog failed on %r and will try again", where, exc_info=error)

    def judge_again(self) -> None:
        """An acquire finds no majority. Decide again in the background: servers that came up after the session opened
        may be new, and then need no quarantine."""
        if self._judging is None or self._judging.done():
            self._judging = own_task(opening.judge_again(self.quorum), "asynclock judge")

    # -- for the floors above ------------------------------------------------------------------------------------

    def introduction(self, metadata: str) -> str:
        """What the holder of a lock reads of the client that breaks it: process, host and the first 80 characters of
        the note."""
        return f"{self._whoami}|{metadata.replace(RESERVED, '')[:80]}"

    def _make_threaded(self, holds: Holds, settings: LockSettings, grant: Ballot, token: int, contended: bool) -> Hold:
        """A hold that a thread extends while the loop is blocked. It starts that thread, if it does not run. A store
        with a clock of its own has no thread, because only a test moves that clock. Neither has a store that threads
        cannot share. If the system gives no thread, the next lease tries again."""
        if self._renewal_thread is None and self.clock is SYSTEM and self._thread_safe:
            try:
                thread = RenewalThread(self.machine, self.lag, self.loop, self._stores)
                thread.start()
                self._renewal_thread = thread
            except (OSError, RuntimeError):  # no more files, or no more threads
                if self.journal.admits_fault("times that the renewal thread could not start"):
                    log.exception("asynclock: the renewal thread cannot start: leases end if the event loop is blocked")
        return ThreadedHold(self.loop, holds, settings, grant, token, contended)

    # -- events --------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Log an event that is not one of DEBUG, and call the listeners with it."""
        if self.forked:  # it is one of the parent
            return
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
                in_context(terms, write, event, level, str(why()))
            in_context(terms, self.observers.tell, event)

    def _reported(self, event: Event) -> None:
        """An event of a node. While the session opens, the nodes may be found to be new: then they were in quarantine
        for a moment only, and no event is emitted."""
        self.machine.reported(event)
        if isinstance(event, NodeDown):
            self.down.add(event.node)
        elif isinstance(event, NodeUp):
            self.down.discard(event.node)
        if isinstance(event, Quarantined) and self._opening is not None and not self._opening.done():
            self._quarantines[event.node] = event
        elif not isinstance(event, QuarantineEnded) or self._quarantines.pop(event.node, None) is None:
            Context().run(self.tell, event)  # in an empty context: it concerns no caller, even if a caller found it

    # -- notices -------------------------------------------------------------------------------------------------

    def received(self, index: int, notice: Notice) -> None:
        """Node `index` has sent a notice."""
        self.machine.received(index, notice)

    def connected(self, index: int, *, missed: bool = True) -> None:
        """Node `index` is connected again. If notices may have been lost meanwhile (`missed`), all tickets are sent
        again. If that ends an outage, the acquires that wait for its end try again."""
        del index
        self._random.clear()  # an id says whether notices come, and that may have changed
        self.machine.connected(missed)

    # -- opening and closing -------------------------------------------------------------------------------------

    async def open(self, settings: LockSettings, limit: float, *, check: bool = True) -> QuorumUnavailable | None:
        """Connect at first use, and check whether a majority would vote; wait for that at most `limit` seconds. Returns
        the error of an outage. Raises ConfigError. Without `check` it only connects: a vote writes, and a client that
        only reads may have no right to that."""
        self.within(settings)  # raises for a lease that is too short, before anything is sent
        self.check_open()
        self._votes |= check
        if self._opening is None or _has_failed(self._opening):  # that error is of its callers, who gave up
            self._opening = own_task(self._open(), "asynclock open", retrieve)
        opening = self._opening
        self._openers += 1
        try:
            await wait_ended(opening, limit, self.clock)
        finally:
            self._openers -= 1
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

    def begin_entry(self, used_before: bool) -> None:
        """An `async with` of the client begins. `used_before`: the client was in use before it."""
        self._entries += 1
        self._used_by_entry = self._used_by_entry or not used_before

    async def fail_entry(self) -> None:
        """That entry has failed, so no `__aexit__` follows it. Close the session, unless another caller uses it: one
        that enters it, too, or one that used it before the first entry, or that has or wants a lock. Then it is left to
        that caller."""
        self._entries -= 1
        if self._entries or not self._used_by_entry:
            return
        if self._openers or self.machine.holds or self.machine.under_way:
            self._used_by_entry = False
        else:
            await self.aclose()

    async def _open(self) -> ConfigError | QuorumUnavailable | None:
        if self._closer is None:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        if not self.opened:
            await opening.open_nodes(self.quorum)
            self.opened = not self.closed  # a close in this very turn comes too late to cancel this task
        error = await opening.check(self.quorum, self.within(self.settings.lock)) if self._votes else None
        self.ready = self._votes and not self.closed and not isinstance(error, ConfigError)
        quarantines, self._quarantines = self._quarantines, {}
        for event in quarantines.values():
            self.tell(event)
        return error

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """asyncio.run closes all async generators at its end. Then this one closes a client that the program has not
        closed."""
        try:
            yield
        finally:
            if not self.forked and (self._closing is None or self._closing.cancelled()):
                try:
                    self._warn_unclosed()
                finally:
                    await self.aclose()

    def _warn_unclosed(self) -> None:
        """Warn of leases that are still held when their event loop ends, because the program has not closed the client.
        Code that still works under one of them runs without the lock."""
        held = [
            hold.name for hold in self.machine.holds.in_slices() if hold and any(tenure.held for tenure in hold.tenures)
        ]
        if not held:
            return
        which = f"{brief(held[0])} and {len(held) - 1:,} more" if len(held) > 1 else brief(held[0])
        log.warning(
            "asynclock: the event loop ended while the lease of %s was held, so it is released: work under a lease in "
            "the event loop that acquired it (asyncio.run and async_to_sync make a new one for each call)",
            which,
        )
        text = f"the lease of {which} was held at the end of its event loop: release it before, or close the client"
        warnings.warn(text, ResourceWarning, stacklevel=2)

    def not_released(self, ballot: Ballot, terms: Terms) -> None:
        """A release had no majority. After an outage the hold ends by itself, and ReleaseFailed is emitted. Raises
        ConfigError where servers refuse the command: the key stays, and only the user can fix that."""
        error = self.quorum.unavailable(ballot, terms.name)
        if isinstance(error, ConfigError):
            raise error
        in_context(terms, self.tell, ReleaseFailed(*terms.described, str(error)))

    def waiter(self, ballot: Ballot) -> asyncio.Future[Outcome]:
        """A future of the outcome, to await while there is none."""
        future: asyncio.Future[Outcome] = asyncio.Future(loop=self.loop)  # as loop.create_future(), with one call less
        ballot.wakes(future)
        return future

    async def settled(self, ballot: Ballot) -> Outcome:
        """Wait for the outcome. A cancellation ends the waiting, not the ballot."""
        return ballot.outcome or await self.waiter(ballot)

    async def all_settled(self, ballots: Sequence[Ballot]) -> None:
        """Wait for the outcomes of several ballots, once."""
        left = [ballot for ballot in ballots if ballot.outcome is None]
        if left:
            countdown = _Countdown(len(left), self.loop.create_future())
            for ballot in left:
                ballot.wakes(countdown)
            await countdown.future

    async def wait_shielded(self, ballot: Ballot) -> None:
        """Wait for an outcome in a task that was cancelled: it comes within the node timeout. The caller continues the
        cancel after it."""
        import anyio  # 20 ms of import, needed here only

        with anyio.CancelScope(shield=True):
            while ballot.outcome is None:
                try:
                    await self.settled(ballot)
                except asyncio.CancelledError:
                    continue  # a second cancel; the caller raises the first

    async def release_all(self) -> None:
        """Release all holds, even if the task is cancelled meanwhile. Errors of single locks are logged and not
        raised."""
        releases: deque[tuple[Ballot, Terms]] = deque()
        cancelled: asyncio.CancelledError | None = None
        for hold in self.machine.holds.in_slices():
            if hold is None:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as error:  # it goes on once all releases were sent
                    cancelled = error
                continue
            for tenure in hold.tenures:
                tenure.check_clock()  # ends a lease that is over as lost, so that its owner is notified
                if (ballot := hold.end(tenure)) is not None:
                    releases.append((ballot, tenure.terms))
        if cancelled is not None:
            raise cancelled
        await self._tell_failed(releases)

    async def _tell_failed(self, releases: deque[tuple[Ballot, Terms]]) -> None:
        """Report each release that had no majority, once it has an outcome. A client that hung up gets no more
        replies."""
        for number in range(1, len(releases) + 1):
            ballot, terms = releases.popleft()
            outcome = ballot.outcome if self.hung_up else await self.settled(ballot)
            if outcome is UNREACHABLE and not ballot.carried_out:
                with contextlib.suppress(ConfigError):
                    self.not_released(ballot, terms)
            if number % _RELEASES == 0:  # most outcomes are known, so `settled` seldom lets other tasks run
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Release all holds, wait for the replies that are on their way, and close the connections. Leases that are
        still held are lost ("closed")."""
        if self.forked:  # they are those of the parent, as the connections are
            return
        if self._closing is None or self._closing.cancelled():
            self.closed = True
            self.ready = self.opened = False
            self.machine.begin_close()
            self._closing = own_task(self._close(), "asynclock close")
        await asyncio.shield(self._closing)  # a cancel of the caller does not stop it

    async def _close(self) -> None:
        await shutdown.cancelled([each for each in (self._opening, self._judging) if each is not None])
        if self.machine.watchdog.is_armed:  # its timer may be overdue, and does not fire once it is stopped
            self.lag.beat(self.clock.now())
        releases: deque[tuple[Ballot, Terms]] = deque()
        for hold in self.machine.holds.in_slices():
            if hold is None:
                await asyncio.sleep(0)
                while releases and releases[0][0].outcome is WON:  # not kept: a garbage collection would look at all
                    releases.popleft()
            else:
                owners = hold.tenures[:1]
                ballot = self.machine.close_hold(hold)
                releases.extend([(ballot, owner.terms) for owner in owners])
        began = self.spent()
        for each in list(self.machine.under_way):
            each.close()
            if self.spent() - began > SLICE:
                await asyncio.sleep(0)
                began = self.spent()
        self.machine.watchdog.stop()  # a claim may have won between two slices
        await shutdown.drained(self.machine.under_way)
        await self._end_marks()
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

    async def _end_marks(self) -> None:
        """Wait for a moment, until the marks of runs of `once` that have returned are at all nodes."""
        marks = self.machine.holds.done_marks
        if marks:
            ended = self.result()
            marks.begin_close(ended)
            await wait_ended(ended, shutdown.MARKS, self.clock)
            marks.stop()


_all_sessions: WeakSet[Session] = WeakSet()
"""Also those whose client was dropped: a session lives on for as long as a lease of it does."""

_inherited: list[Session] = []
"""Of a forked child: the sockets and the loop belong to the parent. They are kept but not used: closing them would
change the parent's selector."""


def _after_fork() -> None:
    for session in list(_all_sessions):
        if not session.forked:  # else it is in the list already
            session.forget_after_fork()
            _inherited.append(session)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _has_failed(opening: asyncio.Task[ConfigError | QuorumUnavailable | None]) -> bool:
    """Whether it has ended with an error."""
    return opening.done() and (opening.cancelled() or opening.exception() is not None or opening.result() is not None)


class _Countdown:
    """A waiter for several ballots, with the future that the last of them completes."""

    def __init__(self, left: int, future: asyncio.Future[None]) -> None:
        self._left = left
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, outcome: Any, /) -> None:
        del outcome
        self._left -= 1
        if not self._left:
            self.future.set_result(None)


def in_context(terms: Terms, function: Callable[..., object], *args: object) -> None:
    """Call a function that logs or emits an event about this caller, in the context of the caller. If the caller's own
    task runs this, it is in that context already, and may have changed it since the copy was made."""
    if running_task() is terms.task:
        function(*args)
    else:
        terms.context.copy().run(function, *args)  # a copy is never entered already


def session_of(tenure: Tenure) -> Session:
    """The session that has it."""
    session = tenure.hold.core
    assert isinstance(session, Session)  # noqa: S101 - the floors above have only such tenures
    return session
