"""Lock: a name and how to hold it, for threads."""

from __future__ import annotations

from sys import _getframe as frame_at
from threading import Thread, current_thread
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, overload

from asynclock._errors import LockNotHeld, brief
from asynclock.blocking.lease import entered, give_back, leave, watched
from asynclock.blocking.loop_thread import abandon, call, call_and_undo, call_to_its_end
from asynclock.locks.lock import UNSET

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from asynclock._options import Seconds
    from asynclock.blocking.lease import Lease
    from asynclock.blocking.options import OnLostNow
    from asynclock.locks import lock as locks_lock

    Caller: TypeAlias = tuple[int, CodeType]
    """A frame that enters or leaves a block: its id and its code."""


class _Block(NamedTuple):
    """A `with` block of a Lock."""

    thread: Thread
    caller: Caller
    lease: Lease


class Lock:
    """A name and how to hold it. Making one does no I/O. Any number of threads may share it: each acquire returns a
    `Lease` of its own. Times are in seconds. Source:
    https://redis.io/docs/latest/develop/use/patterns/distributed-locks/"""

    __slots__ = ("__weakref__", "_blocks", "_lock", "_on_lost_now")

    def __init__(self, lock: locks_lock.Lock, on_lost_now: OnLostNow) -> None:
        self._lock = lock
        self._on_lost_now = on_lost_now
        self._blocks: list[_Block] = []  # not left yet; each of its operations is one step for other threads

    def __repr__(self) -> str:
        return repr(self._lock)

    def __copy__(self) -> Self:
        return self  # a copy could not release the leases that were acquired through this Lock

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Lock cannot be pickled: send its name, and make a new Lock in the other process")

    def _async_lock(self) -> locks_lock.Lock:
        """For `multi`: the lock as the background loop has it."""
        return self._lock

    @property
    def name(self) -> str:
        """The name, without the client's prefix."""
        return self._lock.name

    @overload
    def acquire(self, *, timeout: None) -> Lease: ...
    @overload
    def acquire(self, *, timeout: Seconds = ...) -> Lease | None: ...
    def acquire(self, *, timeout: Seconds | None = UNSET) -> Lease | None:
        """Wait for the lock, at most `timeout` seconds (None: as long as it takes; 0: try once; unset: the lock's).

        Returns a Lease, or None if another owner held the lock for the whole timeout: test for it before `with`. Raises
        QuorumUnavailable (a majority was out of reach for `patience` seconds or until the timeout), SelfDeadlock (this
        thread would wait for itself), ConfigError (a wrong timeout, a server that refuses a command, a name in use as
        another kind, or a thread that runs an event loop).
        """
        return call_and_undo(watched, give_back, self._lock.acquire, self._on_lost_now(), timeout=timeout)

    def release(self) -> None:
        """Release the lease that this thread acquired last through this Lock; without one, the only open lease of a
        thread that has ended.

        Raises LockNotHeld (no lease to release), LockLost, ConfigError (the servers refuse the command). An outage is
        logged: the lease ends by itself.
        """
        call_to_its_end(self._lock.release)

    def locked(self) -> bool:
        """Whether another owner's `acquire(timeout=0)` would be refused now: the holders leave no room, or a waiter
        goes first (of a fair lock, or a writer before readers). Raises QuorumUnavailable, ConfigError."""
        return call(self._lock.locked)

    def __enter__(self) -> Lease:
        """Wait for the lock and guard the body. Raises LockTimeout where `acquire` returns None, and the errors of
        `acquire`."""
        lease, block = call_and_undo(entered, leave, self._lock.__aenter__, self._on_lost_now()), None
        try:
            lease._note_entered()
            frame = frame_at(1)
            block = _Block(current_thread(), (id(frame), frame.f_code), lease)
            self._blocks.append(block)
        except BaseException:  # such as a KeyboardInterrupt: the body does not run, and neither does __exit__
            if block in self._blocks:
                self._blocks.remove(block)
            abandon(leave, lease)
            raise
        return lease

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /) -> None:
        """Release, as the Lease does at the end of its block."""
        block: _Block | None = None
        try:
            frame = frame_at(1)
            block = self._ended((id(frame), frame.f_code))
            self._blocks.remove(block)
            block.lease.__exit__(t, e, tb)
        except LockNotHeld:
            raise
        except BaseException:  # such as a KeyboardInterrupt, perhaps before the release has begun
            frame = frame_at(1)
            block = block or self._ended((id(frame), frame.f_code))
            if block in self._blocks:
                self._blocks.remove(block)
            abandon(leave, block.lease)
            raise

    def _ended(self, caller: Caller) -> _Block:
        """The block that ends here. A `with` statement enters and leaves from one frame, in whatever
        threads that runs, such as a generator that a framework resumes in another thread. An exit stack has another
        frame for each: then it is the block that this thread entered last. Raises LockNotHeld."""
        thread, blocks = current_thread(), list(reversed(self._blocks))
        if blocks and blocks[0].caller == caller and blocks[0].thread is thread:  # most blocks
            return blocks[0]
        of_frame = [each for each in blocks if each.caller == caller]
        of_thread = [each for each in blocks if each.thread is thread]
        found = [each for each in of_frame if each.thread is thread] or of_frame or of_thread
        found = found or [each for each in blocks if not each.thread.is_alive()]
        if not found:
            raise LockNotHeld(f"this thread has entered no block of {brief(self.name)}", name=self.name)
        return found[0]
