"""Functions under a lock, for threads: `synchronized`, `once` and `lead`, as in `locks/decorators.py`."""

from __future__ import annotations

import inspect
import random
import time
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from asynclock._errors import LockLost, QuorumUnavailable
from asynclock.blocking.lease import Lease, watch
from asynclock.blocking.lock import Lock
from asynclock.blocking.loop_thread import abandon, call_and_undo
from asynclock.locks.decorators import AGAIN, RUN, OnceLock, Skipped
from asynclock.locks.template import namer

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.blocking.options import OnLost, OnLostNow
    from asynclock.locks import lease as locks_lease
    from asynclock.locks import lock as locks_lock

_P = ParamSpec("_P")
_R = TypeVar("_R")


def synchronized(
    name: str | Callable[..., str], lock: Callable[[str], locks_lock.Lock], on_lost_now: OnLostNow
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Each call runs under `lock(name of the call)`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        _check_function(function)
        named = namer(name, function)

        @wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with Lock(lock(named(*args, **kwargs)), on_lost_now):
                return function(*args, **kwargs)

        return guarded

    return decorate


def once(
    name: str | Callable[..., str], lock: Callable[[str], OnceLock], within: float, on_lost_now: OnLostNow
) -> Callable[[Callable[_P, _R]], Callable[_P, _R | Skipped]]:
    """A run holds the lock. A run that returns leaves the name taken for `within` seconds."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | Skipped]:
        _check_function(function)
        named = namer(name, function)

        @wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | Skipped:
            run, before, begun = lock(named(*args, **kwargs)), None, False
            lease = call_and_undo(_begun, _give_back, run, on_lost_now())
            try:
                if isinstance(lease, Skipped):
                    return lease
                before = RUN.set(lease)
                with Lease(lease):
                    begun = True
                    result = function(*args, **kwargs)
                    run.mark_done(within)
                return result
            except BaseException:
                if not begun:  # such as a KeyboardInterrupt: __exit__ has not run
                    abandon(_give_back, lease)
                raise
            finally:
                if before is not None:
                    RUN.reset(before)

        return guarded

    return decorate


async def _begun(run: OnceLock, on_lost: OnLost | None) -> locks_lease.Lease | Skipped:
    lease = await run.begin()
    if on_lost is not None and not isinstance(lease, Skipped):
        watch(lease, on_lost)
    return lease


async def _give_back(lease: locks_lease.Lease | Skipped) -> None:
    if not isinstance(lease, Skipped):
        await lease.release()


def lead(lock: Lock, main: Callable[[Lease], _R], through_outages: bool) -> _R:
    """Run `main` while elected, until it returns or raises. If it raises the LockLost of its own lease, the next
    election runs it again. Raises TypeError for a `main` that could not run under the lock."""
    _check_function(main)
    while True:
        raised: BaseException | None = None
        done: list[_R] = []
        lease: Lease | None = None
        try:
            with lock as lease:
                try:
                    done.append(main(lease))
                except BaseException as error:
                    raised = error
                    raise
        except QuorumUnavailable as error:
            if not through_outages or error is raised:
                raise
            time.sleep(random.uniform(*AGAIN))  # noqa: S311 - jitter
        except LockLost as lost:
            noticed = lease is not None and lost.name == lease.name and lease.wait_lost()
            if (lost is raised and not noticed) or (lost.reason == "closed" and not done):
                raise
        if done:
            return done[0]


def _check_function(function: object) -> None:
    """Only a plain function can be guarded: the body of a coroutine function or generator runs after the call."""
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(f"put the decorator below @{type(function).__name__}, next to the function")
    if not callable(function):
        raise TypeError(f"only a function can be guarded, not {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        what = "an async def: use the async API, asynclock.Redlock"
    elif inspect.isasyncgenfunction(function):
        what = "an async generator, whose body would run without the lock"
    elif inspect.isgeneratorfunction(function):
        what = "a generator, whose body would run without the lock"
    else:
        return
    raise TypeError(f"{getattr(function, '__qualname__', function)!r} is {what}")
