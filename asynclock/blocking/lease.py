"""Lease: one tenure, for the thread that acquired it and the threads that it passes it to."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Self

from asynclock._errors import LockError, LockLost
from asynclock.blocking.loop_thread import (
    call,
    call_to_its_end,
    is_collected_here,
    loop_thread,
    run_in_background,
    thread_here,
)
from asynclock.locks import lease as locks_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from asynclock._options import Seconds
    from asynclock.blocking.options import OnLost


_PARTING = 1.0
"""Seconds for which the end of a generator waits for the release of its block, at most. The background thread may need
a lock for it, such as that of a handler of logging, which the thread that runs the garbage collector holds."""


class Lease:
    """One tenure of a lock. The library makes it; any thread of the process may use it. Times are in seconds."""

    __slots__ = ("__weakref__", "_home", "_lease")

    def __init__(self, lease: locks_lease.Lease) -> None:
        self._lease = lease
        self._home = thread_here()

    def __repr__(self) -> str:
        return repr(self._lease)

    def __reduce__(self) -> str:
        raise TypeError("a Lease cannot be pickled or copied: use detach() to hand it over to another process")

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._lease.name

    @property
    def fence(self) -> int:
        """The fencing token, greater than those of all earlier holds of the name. Raises Unsupported with
        fencing=False."""
        return self._lease.fence

    @property
    def held(self) -> bool:
        """Whether this lease holds the lock now, by the clock."""
        return self._lease.held

    @property
    def remaining(self) -> float:
        """Seconds of validity left; 0.0 once it has ended."""
        return self._lease.remaining

    def ensure_held(self) -> None:
        """Raise LockLost if it was lost, LockNotHeld if it was released or detached; nothing if it is held now. Long
        work in a thread asks this, since a loss cannot interrupt it."""
        self._lease.ensure_held()

    def wait_lost(self) -> bool:
        """Wait for its end. Returns True if it was lost, False if it was released or detached."""
        self._check_home()
        return call(self._lease.wait_lost)

    def extend(self, *, lease: Seconds | None = None) -> None:
        """Move its end to `lease` seconds from now (default: the lock's lease), but never to an earlier time. Raises
        LockLost, LockNotHeld, QuorumUnavailable (it is still held until its validity runs out), ConfigError."""
        self._check_home()
        call(self._lease.extend, lease=lease)

    def release(self) -> None:
        """Release the lock, and wait for the reply. Raises LockLost, LockNotHeld (released or detached already),
        ConfigError (the servers refuse the command). An outage is logged: the lease ends by itself."""
        self._check_home()
        call_to_its_end(self._lease.release)

    def detach(self, *, lease: Seconds | None = None) -> str:
        """End this tenure without freeing the name. Returns a handle, which is a secret. Another process may take the
        hold over once, with `adopt(handle)`, before the hold ends. It ends `lease` seconds from now (default: the
        lock's lease), or later if it would have ended later. Raises LockLost, LockNotHeld, QuorumUnavailable (it is
        still held), Unsupported (a multi lock), ConfigError."""
        self._check_home()
        return call(self._lease.detach, lease=lease)

    def __enter__(self) -> Self:
        """Guard the body: the end of the block raises LockLost if the lease was lost. Raises LockLost, LockNotHeld,
        ConfigError. An exception such as KeyboardInterrupt meanwhile releases the lock."""
        try:
            self._check_home()
            call(self._lease.__aenter__)
            self._lease._note_entered()
        except BaseException as error:
            if not isinstance(error, Exception):  # such as a KeyboardInterrupt: the body does not run, nor __exit__
                run_in_background(self._home, leave_or_give_back, self)
            raise
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /) -> None:
        """Release. Raises LockLost if it was lost meanwhile, or an error of `release`. An exception of the body takes
        precedence, with a note."""
        try:
            if isinstance(e, GeneratorExit):  # perhaps of a garbage collector, while this thread holds some lock
                ended = run_in_background(self._home, self._lease.__aexit__, t, e, tb)
                if not is_collected_here():
                    ended.acquire(timeout=_PARTING)
                return
            try:
                self._check_home()
            except LockError as error:
                if e is None:
                    raise
                if not isinstance(e, LockLost):
                    e.add_note(str(error))
                return
            call_to_its_end(self._lease.__aexit__, t, e, tb)
        except BaseException:  # such as a KeyboardInterrupt, perhaps before the release has begun
            run_in_background(self._home, leave, self)
            raise

    def _note_entered(self) -> None:
        """The thread that calls this has entered a block of the Lock."""
        self._lease._note_entered()

    def _check_home(self) -> None:
        """Raise the error of a lease that belongs to the parent of this process, or that ended with the interpreter."""
        if not self._home.is_here():
            self._lease.ensure_held()
            loop_thread()


def current_lease() -> Lease | None:
    """The lease of the innermost block that this thread has entered and that is still held. None: there is none."""
    lease = locks_lease.current_lease()
    return None if lease is None else Lease(lease)


async def watched(
    take: Callable[..., Coroutine[Any, Any, locks_lease.Lease | None]], on_lost: OnLost | None, **options: Any
) -> Lease | None:
    """A Lease of the result of `take`; `on_lost` is called at its loss. It is made here, in the loop: a signal handler
    that raises in the thread of the caller, before the call is over, makes the loop give it back."""
    lease = await take(**options)
    if lease is None:
        return None
    if on_lost is not None:
        watch(lease, on_lost)
    return Lease(lease)


async def give_back(lease: Lease | None) -> None:
    """Nobody takes the result of `watched`."""
    if lease is not None:
        await lease._lease.release()  # noqa: SLF001 - of this module


async def leave(lease: Lease) -> None:
    """Nobody enters the block of that lease, or its end was interrupted, perhaps before it began."""
    if lease._home.is_here() and lease._lease._in_block:  # noqa: SLF001 - of this module
        await lease._lease.__aexit__(None, None, None)  # noqa: SLF001


async def leave_or_give_back(lease: Lease) -> None:
    """Its block may have begun, and its body does not run."""
    await (leave if lease._lease._in_block else give_back)(lease)  # noqa: SLF001 - of this module


async def entered(enter: Callable[[], Coroutine[Any, Any, locks_lease.Lease]], on_lost: OnLost | None) -> Lease:
    """As `watched`, for a block."""
    lease = await watched(enter, on_lost)
    assert lease is not None  # noqa: S101 - it raises where `acquire` returns None
    return lease


def watch(lease: locks_lease.Lease, on_lost: OnLost) -> None:
    """At its loss, call `on_lost` in a thread of the library, in the context of the caller of this function."""
    context, losses = copy_context(), thread_here().losses

    def lost(error: LockLost) -> None:
        losses.put(context.copy(), on_lost, error)

    lease._call_on_loss(lost)
