"""Tenure: what belongs to one owner of a hold, from its grant to its end.

A hold has one tenure at a time, or several of one owner that entered again. The Lock and the Lease keep the tenure; the
hold refers to it weakly. So a tenure that the program has dropped is collected, warns, and is renewed no more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from contextvars import Context, ContextVar, copy_context
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from asynclock._clock import wake
from asynclock._errors import LockNotHeld, brief
from asynclock._loop import owner_of, running_task
from asynclock.events import Detached, Released

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from asynclock._errors import LockLost
    from asynclock._options import LockSettings
    from asynclock.acquire.hold import Hold
    from asynclock.rules.model import Kind

_T = TypeVar("_T")

log = logging.getLogger("asynclock")


class TenureState(Enum):
    """The state of a tenure."""

    HELD = "held"
    UNKNOWN = "unknown"  # held, but the last renewal had no reply
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "detached"  # another process may adopt it


HELD, UNKNOWN, LOST, RELEASED, DETACHED = TenureState  # quicker to read than from the class, as those of `model.py`
OPEN = (HELD, UNKNOWN)
GIVEN = (RELEASED, DETACHED)


class Loss(StrEnum):
    """Why a tenure was lost: LockLost.reason."""

    EXPIRED = "expired"
    TAKEN = "taken"
    BROKEN = "broken"
    MAX_HOLD = "max_hold"
    CLOSED = "closed"


class Terms:
    """The request of one caller: a kind of lock of that name, under these settings, within `timeout` seconds."""

    __slots__ = ("_context", "_waits", "kind", "name", "owner", "settings", "task", "timeout")

    _waits: bool  # without a value until it waits: most do not

    def __init__(
        self,
        name: str,
        kind: Kind,
        settings: LockSettings,
        task: asyncio.Task[Any] | None,
        timeout: float | None,
        owner: Hashable = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.settings = settings
        self.task = task  # the task that asks
        self.timeout = timeout  # None: as long as it takes; 0: one try
        self.owner = owner  # the owner that may enter again, of a reentrant lock
        self._context = copy_context()

    def one_try(self) -> Terms:
        """The same, for one try."""
        return Terms(self.name, self.kind, self.settings, self.task, 0, self.owner)

    def wait(self) -> None:
        """It was not granted at once: it waits in the local queue, at the servers, or for a pause."""
        self._waits = True

    @property
    def had_to_wait(self) -> bool:
        """Whether it waits, or did so before its end."""
        return getattr(self, "_waits", False)

    def variable(self, variable: ContextVar[_T], default: _T) -> _T:
        """The value of a variable in the context of the caller."""
        return self._context.get(variable, default)

    def in_context(self, function: Callable[..., object], *args: object) -> None:
        """Log or tell what is about this caller, in its context, wherever it is found. The caller that finds it itself
        may have changed its context since then, and is in it already."""
        if running_task() is self.task:
            function(*args)
        else:
            self._context.copy().run(function, *args)  # a copy is never entered already

    @property
    def described(self) -> tuple[str, str, str]:
        """The name, the kind and the label, as an event has them."""
        return self.name, self.kind.name, self.settings.label


class Tenure:
    """See the module. `Hold.begin` makes it. Times are seconds of the client's clock."""

    __slots__ = (
        "__weakref__", "_on_loss", "_untaken", "_waiters", "done_for", "fence", "hold", "loss", "on_lost", "own",
        "since", "state", "task", "terms", "unattended", "until",
    )  # fmt: skip

    _untaken: bool  # without a value, unless its task was cancelled before it had the tenure
    _on_loss: Callable[[LockLost], None]  # without a value, unless its owner is a thread that wants to be told

    def __init__(self, hold: Hold, terms: Terms, fence: int, since: float) -> None:
        self.state = HELD
        self.hold = hold
        self.terms = terms
        self.fence = fence
        self.since = since
        max_hold = terms.settings.max_hold
        self.until = math.inf if max_hold is None else since + max_hold  # when max_hold ends it
        self.task = terms.task  # the task that took it, then the task that entered it
        self.loss: Loss | None = None
        self.done_for = 0.0  # seconds for which the name is marked as done after the release (`once`)
        self.on_lost: Callable[[Loss], None] | None = None  # interrupts the body that it guards; None: there is none
        self.unattended = False  # its task has ended, and the log says so
        self.own = ref(self)
        self._waiters: set[asyncio.Future[None]] | None = None  # most tenures have none

    def __repr__(self) -> str:
        return f"<Tenure {brief(self.hold.name)} {self.state.value}>"

    @property
    def open(self) -> bool:
        """Whether it was neither released, nor detached, nor lost, as far as this client knows."""
        return self.state in OPEN

    @property
    def held(self) -> bool:
        """Whether it is held now, by the clock."""
        hold = self.hold
        if self.state not in OPEN or hold.session.forked:
            return False
        now = hold.session.clock.now()
        return now < hold.valid_until and now < self.until

    @property
    def lost_early(self) -> bool:
        """Whether its hold is lost, before its task could take it. The end of max_hold is no such loss: it counts from
        the grant, and may be shorter than a turn of the loop."""
        lost = self.loss is not None and self.loss is not Loss.MAX_HOLD
        return lost or self.hold.session.clock.now() >= self.hold.valid_until

    @property
    def ends(self) -> float:
        """When it ends, unless it is renewed."""
        return min(self.hold.valid_until, self.until)

    @property
    def held_for(self) -> float:
        """Seconds since it began."""
        return self.hold.session.clock.now() - self.since

    def check_clock(self) -> None:
        """Lose it if its time is over. After a loop was blocked beyond the lease, this runs before any timer."""
        now = self.hold.session.clock.now()
        if self.state in OPEN and (now >= self.hold.valid_until or now >= self.until):
            self.hold.lose(self._over(now))

    def error(self) -> LockLost | LockNotHeld:
        """The error for the use of a tenure that has ended."""
        name = self.hold.name
        if self.hold.session.forked:
            return LockNotHeld(
                f"{brief(name)} was acquired before a fork: its lease belongs to the parent process; acquire it here",
                name=name,
            )
        if self.state in GIVEN:
            how = "detached" if self.state is DETACHED else "released already"
            return LockNotHeld(f"{brief(name)} was {how}", name=name)
        return self.hold.lost_error(self.loss or self._over(self.hold.session.clock.now()))

    def _over(self, now: float) -> Loss:
        return Loss.MAX_HOLD if now >= self.until else Loss.EXPIRED

    async def wait_lost(self) -> bool:
        """Wait for its end. True: lost; False: released or detached."""
        self.check_clock()
        if self.state in OPEN:
            waiter = self.hold.session.loop.create_future()
            self._waiters = self._waiters or set()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.state is LOST

    def enter(self, task: asyncio.Task[Any] | None, on_lost: Callable[[Loss], None]) -> None:
        """The body that it guards begins, in that task."""
        self.task = task
        self.on_lost = on_lost

    def leave(self) -> None:
        """The body has ended."""
        self.on_lost = None

    def renewed(self, answered: bool) -> None:
        """A renewal is decided, or had no reply from a majority."""
        self.state = HELD if answered else UNKNOWN

    def mark_untaken(self) -> None:
        """Its task was cancelled before it had the tenure: no acquire was told, so its end is not told either."""
        self._untaken = True

    def mark_done(self, within: float) -> None:
        """A run of `once` has returned: the name stays taken for `within` seconds after the release."""
        self.done_for = within

    def call_on_loss(self, call: Callable[[LockLost], None]) -> None:
        """Call it in the event loop when the tenure is lost; now, if it is lost already."""
        self._on_loss = call
        if self.state is LOST:
            call(self.hold.lost_error(self.loss or Loss.EXPIRED))

    def end(self, state: TenureState, loss: Loss | None = None) -> None:
        """End it in that state. Tasks in `wait_lost` wake, and a loss interrupts the body."""
        self.state = state
        self.loss = loss
        if self._waiters is not None:
            for waiter in self._waiters:
                wake(waiter)
        observers = self.hold.session.observers
        if observers.active and loss is None and not getattr(self, "_untaken", False):
            ended = Detached if state is DETACHED else Released
            observers.tell(ended(*self.terms.described, self.held_for))
        if loss is not None and self.on_lost is not None:
            self.on_lost(loss)
        if loss is not None and (call := getattr(self, "_on_loss", None)) is not None:
            call(self.hold.lost_error(loss))

    def rest(self) -> float:
        """Seconds for which the name stays taken after a release now."""
        settings = self.terms.settings
        if not settings.min_hold or getattr(self, "_untaken", False):
            return self.done_for
        return max(self.done_for, self.since + settings.min_hold - self.hold.session.clock.now())

    def log_unattended(self) -> None:
        """Log that its task has ended without a release. Its Lock keeps it, so no other report comes. Other tasks may
        use it on purpose, so this is no warning."""
        if not self.unattended and self.on_lost is None and self.task is not None and self.task.done():
            self.unattended = True
            log.info(
                "asynclock: the %s that acquired %s has ended; its lease is renewed until it is released (set "
                "max_hold to end it)",
                owner_of(self.task),
                brief(self.hold.name),
            )

    def drop(self) -> None:
        """The program no longer refers to it. A garbage collector calls this in any thread, and between any two steps
        of the loop's thread. So it changes nothing: the loop ends it, in a turn of its own. Done here, the end could
        fall between the look of an acquire at the holds and its place in the local queue; nothing would wake that."""
        hold, session = self.hold, self.hold.session
        last, held, left = all(each is self for each in hold.tenures), self.held, self.ends - session.clock.now()
        if not session.forked:  # in a forked child the loop is the parent's
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits in it
                session.loop.call_soon_threadsafe(hold.dropped, self.own, context=Context())
        if last and held:
            warnings.warn(
                f"the lease of {brief(hold.name)} was dropped while held: release it, or use a `with` block; "
                f"it ends by itself in {left:.3g} s",
                ResourceWarning,
                source=self,
                stacklevel=3,
            )

    def __del__(self) -> None:
        if self.state in OPEN:
            self.drop()
