"""Lease: one tenure as its user sees it, and how its owner learns of its end. For the fencing token see
https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html

The rules:

1. `held` and `remaining` read the clock, not a flag. Unknown is not lost: a renewal without a reply leaves the lease
   as it is until its validity runs out. If a majority refuses a renewal, the lease is lost at once.
2. The task inside `async with` is cancelled on a loss, and LockLost takes the place of the CancelledError. A cancel
   from outside takes precedence (`cancellation.py`).
3. A block that ends after its lease raises LockLost, unless the body raises another exception.
4. `release()` sends before it awaits anything, and its reply is awaited even if the task is cancelled.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

from asynclock._errors import ConfigError, LockError, LockLost, Unsupported, brief
from asynclock._options import lock_settings
from asynclock.locks.cancellation import Block
from asynclock.locks.tenures import TenuresByTask
from asynclock.protocol.handover import handle_of
from asynclock.protocol.hold import Tenure
from asynclock.protocol.states import GIVEN_BACK, LOST
from asynclock.quorum.ballot import UNREACHABLE, WON
from asynclock.rules.model import parts_of
from asynclock.runtime.session import session_of
from asynclock.stores.port import Use, Wish

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from asynclock._options import Seconds
    from asynclock.locks.cancellation import Caller
    from asynclock.quorum.ballot import Ballot
    from asynclock.runtime.session import Session

    Entered = tuple[ref[Tenure], ref[TenuresByTask], "Entered | None", int]

_ENTERED: ContextVar[Entered | None] = ContextVar("asynclock.entered", default=None)
"""The blocks that this context has entered, the innermost first. The references are weak: a context may live longer
than a block that the program has dropped. It is never reset, since a block may end in another context: `_open_ones`
skips the blocks that have ended. The number counts down with each entry; at 0 all blocks that have ended are removed,
and not only the innermost ones."""

_FEW = 16
"""A context keeps at most this many entries of ended blocks, and one more for each open block."""


class Lease:
    """One tenure of a lock. The library makes it; only the event loop in which it was acquired may use it. Times are in
    seconds."""

    __slots__ = ("__weakref__", "_kept", "_tenure")

    def __init__(self, tenure: Tenure, kept: TenuresByTask) -> None:
        self._tenure = tenure
        self._kept = ref(kept)  # the tenures of the Lock, which the program may have dropped

    def __repr__(self) -> str:
        return f"<Lease {brief(self.name)} {self._tenure.state.value}, {self.remaining:.3g} s left>"

    def __reduce__(self) -> str:
        raise TypeError("a Lease cannot be pickled or copied: use detach() to hand it over to another process")

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._tenure.hold.name

    @property
    def fence(self) -> int:
        """The fencing token, greater than those of all earlier holds of the name. The protected resource refuses a
        smaller token than it has seen (https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).
        Raises Unsupported with fencing=False, also where an outer block of a reentrant lock has it."""
        tenure = self._tenure
        if not tenure.terms.settings.fencing or tenure.hold.op.plain:
            which = "each lock of this name" if tenure.terms.settings.fencing else "the lock"
            raise Unsupported(
                f"{brief(self.name)} has no fencing token: make {which} with fencing=True", name=self.name
            )
        return tenure.fence

    @property
    def held(self) -> bool:
        """Whether this lease holds the lock now, by the clock."""
        return self._tenure.held

    @property
    def remaining(self) -> float:
        """Seconds of validity left; 0.0 once it has ended."""
        tenure = self._tenure
        return max(0.0, tenure.ends - tenure.hold.core.clock.now()) if tenure.held else 0.0

    def ensure_held(self) -> None:
        """Raise LockLost if it was lost, and LockNotHeld if it was released or detached."""
        if not self._tenure.held:
            raise self._tenure.error()

    async def wait_lost(self) -> bool:
        """Wait for its end. Returns True if it was lost, False if it was released or detached. Raises ConfigError in
        another loop."""
        tenure, session = self._tenure, session_of(self._tenure)
        session.check()
        tenure.check_clock()
        if tenure.open:
            waiter: asyncio.Future[None] = session.loop.create_future()
            tenure.add_waiter(waiter)
            try:
                await waiter
            finally:
                tenure.remove_waiter(waiter)
        return tenure.state is LOST

    async def extend(self, *, lease: Seconds | None = None) -> None:
        """Move its end to `lease` seconds from now (default: the lock's lease), but never to an earlier time.

        Raises LockLost, LockNotHeld, QuorumUnavailable (it is still held until its validity runs out), ConfigError.
        """
        tenure, session = self._tenure, session_of(self._tenure)
        session.check()
        tenure.check_clock()
        self.ensure_held()
        length = tenure.terms.settings.lease
        if lease is not None:
            length = lock_settings(self.name, {"lease": lease, "min_hold": 0}, session.settings).lease
        self._check_supported(Use.LOCK, length)
        ballot = tenure.hold.extend(length)
        await session.settled(ballot)
        tenure.check_clock()  # a refusal by less than a majority may have ended it; the watchdog finds that later
        if not tenure.open:
            raise tenure.error()
        if ballot.outcome is not WON:
            raise session.quorum.unavailable(ballot, self.name)

    def _check_supported(self, use: Use, lease: float) -> None:
        """Raise Unsupported for what the stores cannot do with this lock."""
        terms, session = self._tenure.terms, session_of(self._tenure)
        if session.limited:
            names = tuple(part.name for part in parts_of(terms))
            session.check_supported(Wish(use, terms.kind, names, lease, 0.0, terms.settings.fencing))

    async def release(self) -> None:
        """Release the lock. The command is sent before anything is awaited. Raises LockLost, LockNotHeld (released or
        detached already), ConfigError (the servers refuse the command). An outage is logged: the lease ends by
        itself."""
        await release(self._tenure, self._kept())

    async def detach(self, *, lease: Seconds | None = None) -> str:
        """End this tenure without freeing the name. Returns a handle, which is a secret. Another process may take the
        hold over once, with `adopt(handle)`, before the hold ends. It ends `lease` seconds from now (default: the
        lock's lease), or later if it would have ended later. The block of the lease ends without an error.

        Raises LockLost, LockNotHeld, QuorumUnavailable (it is still held), Unsupported (a multi lock), ConfigError.
        """
        tenure, hold = self._tenure, self._tenure.hold
        if hold.op.kind.parts:
            raise Unsupported(f"{brief(self.name)} is a multi lock: detach() is for locks of one name", name=self.name)
        self._check_supported(Use.DETACH, tenure.terms.settings.lease)
        await self.extend(lease=lease)
        self.ensure_held()
        if len(hold.tenures) > 1:
            raise ConfigError(f"{brief(self.name)} was entered more than once: leave the inner blocks before detach()")
        hold.detach(tenure)
        forget(tenure, self._kept())
        return handle_of(hold.op, hold.last_fence)

    def _call_on_loss(self, call: Callable[[LockLost], None]) -> None:
        """For `asynclock.blocking`: call it in the event loop when the lease is lost."""
        self._tenure.call_on_loss(call)

    def _note_entered(self) -> None:
        """For `asynclock.blocking`: the thread that calls this has entered its block."""
        note_entered(self._tenure, self._kept)

    @property
    def _in_block(self) -> bool:
        """For `asynclock.blocking`: whether it guards a block whose end has not begun."""
        return self._tenure.block is not None

    def _spare_body(self) -> None:
        """For `asynclock.fastapi`, in a block whose body waits for a thread: a loss does not cancel it, since that
        would not end the thread. The end of the block raises LockLost."""
        self._tenure.enter(self._tenure.task, Block(None, False, None))

    async def __aenter__(self) -> Self:
        """Guard the body: this task is cancelled if the lease is lost. Raises LockLost, LockNotHeld, ConfigError."""
        tenure = self._tenure
        session_of(tenure).check()
        if tenure.block is not None:
            raise ConfigError(
                f"the lease of {brief(self.name)} guards a block already: acquire another lease", name=self.name
            )
        tenure.check_clock()
        if tenure.state is LOST:
            await give_back(tenure, self._kept())
        self.ensure_held()
        guard(tenure, self._kept, asyncio.current_task())
        return self

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Release. Raises LockLost if it was lost meanwhile, or an error of `release`. An exception of the body takes
        precedence."""
        await leave(self._tenure, self._kept(), e)


def guard(
    tenure: Tenure, kept: ref[TenuresByTask], task: asyncio.Task[Any] | None, caller: Caller | None = None
) -> None:
    """From here to `leave` the task is cancelled if the tenure is lost. `caller`: see Block."""
    tenure.enter(task, Block(task, tenure.terms.settings.cancel_on_lost, caller))
    note_entered(tenure, kept)


def note_entered(tenure: Tenure, kept: ref[TenuresByTask]) -> None:
    """Record that this context has entered its block, for `current_lease` and `enclosing_lease`."""
    around = _open_ones(_ENTERED.get())
    if around is not None and not around[3]:
        around = _swept(around)
    _ENTERED.set((tenure.weak_self, kept, around, _FEW if around is None else around[3] - 1))


def _open_ones(entered: Entered | None) -> Entered | None:
    """`entered` without the blocks at its front that have ended. So blocks that are entered one after the other leave
    one entry in all. A block that has not ended stays, also if its lease is lost: `enclosing_lease` needs it."""
    while entered is not None and ((tenure := entered[0]()) is None or tenure.block is None):
        entered = entered[2]
    return entered


def _swept(entered: Entered | None) -> Entered | None:
    """All blocks that have not ended, in their order."""
    open_ones: list[Entered] = []
    while (entered := _open_ones(entered)) is not None:
        open_ones.append(entered)
        entered = entered[2]
    for depth, (tenure, kept, _, _) in enumerate(reversed(open_ones), 1):
        entered = tenure, kept, entered, depth + _FEW
    return entered


def current_lease() -> Lease | None:
    """The lease of the innermost block that this context has entered and that is still held: of `async with`, of a
    function under `synchronized` or `once`, or of `lead`. None: there is none. A task that was started inside the block
    has its lease, too, for as long as it is held."""
    entered = _ENTERED.get()
    while entered is not None and ((tenure := entered[0]()) is None or not tenure.held):
        entered = entered[2]
    return _lease_of(entered)


def enclosing_lease() -> Lease | None:
    """For `asynclock.fencing`: the lease of the innermost block that has not ended, also if it is no longer held. The
    token of a block around it belongs to another name, and says nothing about the data that the inner lock protects."""
    return _lease_of(_open_ones(_ENTERED.get()))


def _lease_of(entered: Entered | None) -> Lease | None:
    if entered is None or (tenure := entered[0]()) is None:
        return None
    return Lease(tenure, entered[1]() or TenuresByTask())


def last_entry(context: Context) -> object:
    """An object that stands for the block that the context has entered last, also after that block has ended."""
    return context.get(_ENTERED)


async def leave(which: Tenure | Callable[[], Tenure], kept: TenuresByTask | None, e: BaseException | None) -> None:
    """The body has ended, with the exception `e`. Release the tenure: `which`, or the one that `which` finds. Raises
    LockLost, ConfigError, and LockNotHeld if `which` finds none, or if this is a forked child."""
    cancel: asyncio.CancelledError | None = None
    if isinstance(e, GeneratorExit):
        # A garbage collector that destroys the coroutine of the block runs this, in any thread and between any two
        # steps of the loop's thread. The collector does not resume it after an await, so nothing is changed before this
        # await; `Tenure.__del__` schedules the end. `aclose` of an async generator also gets here, and resumes in the
        # next turn. A `finally` here would also run in the collector.
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            cancel = error  # the release goes first
    tenure = which if isinstance(which, Tenure) else which()
    block, ours = tenure.block, False
    tenure.leave()
    if isinstance(block, Block) and (block.cancelled or cancel is not None):
        ours, cancel = await block.leave(e, cancel)
    tenure.check_clock()
    try:
        if tenure.state in GIVEN_BACK:  # the body released or detached it
            forget(tenure, kept)
        else:
            await give_back(tenure, kept)
    except LockError as lost:
        if cancel is not None:
            cancel.add_note(str(lost))
        elif e is None or ours:
            raise lost from e
        elif not isinstance(e, LockLost):
            e.add_note(str(lost))
    if cancel is not None:
        raise cancel


async def release(tenure: Tenure, kept: TenuresByTask | None) -> None:
    """Release a tenure outside the end of its block. Raises LockLost, LockNotHeld, ConfigError."""
    session_of(tenure).check()
    tenure.check_clock()
    if tenure.state in GIVEN_BACK:
        raise tenure.error()
    await give_back(tenure, kept)


async def give_back(tenure: Tenure, kept: TenuresByTask | None) -> None:
    """End the tenure, and wait for the reply to its release. Raises LockLost, ConfigError, and LockNotHeld in a forked
    child, which sends nothing: the hold is that of the parent."""
    hold = tenure.hold
    session: Session = hold.core  # type: ignore[assignment] # as `session_of`, with two calls less
    lost = tenure.state is LOST
    if session.hung_up or (lost and tenure.loss == "closed"):  # no release can be sent any more, or the close sent it
        if not session.forked:
            hold.lose("closed")
        forget(tenure, kept)
        raise tenure.error()
    ballot = hold.end(tenure)
    if kept is not None:  # as `forget`, with one call less
        kept.forget(tenure)
    if lost:
        raise tenure.error()
    if ballot is None:
        return
    if ballot.outcome is None:
        try:
            await session.waiter(ballot)
        except asyncio.CancelledError as cancel:
            await session.wait_shielded(ballot)
            if ballot.outcome is not WON:
                try:
                    _check_released(tenure, ballot)  # reports it: the caller learns only of its cancel
                except (LockLost, ConfigError) as error:
                    cancel.add_note(str(error))
            raise
    if ballot.outcome is not WON:
        _check_released(tenure, ballot)


def forget(tenure: Tenure, kept: TenuresByTask | None) -> None:
    """Its Lock no longer refers to it."""
    if kept is not None:
        kept.forget(tenure)


def _check_released(tenure: Tenure, ballot: Ballot) -> None:
    """Raise LockLost if a majority refused the release: another owner holds the name, or the key is gone. Report an
    outage, unless a majority of the nodes is without the hold all the same. Raises ConfigError if the servers refuse
    the command."""
    session = session_of(tenure)
    if ballot.no > ballot.nodes // 2:
        error = tenure.hold.lost_error(ballot.loss_reason(), ballot)
        session.tell_lost(tenure.terms, error.reason, tenure.held_for, lambda: error)
        raise error
    if ballot.outcome is UNREACHABLE and not ballot.carried_out:
        session.not_released(ballot, tenure.terms)
