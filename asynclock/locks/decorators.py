"""Coroutine functions under a lock: `synchronized` (each call holds the lock), `once` (the function completes at most
once in a given time), `lead` (the function runs while this process is elected)."""

from __future__ import annotations

import inspect
import random
from contextvars import ContextVar
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asynclock._clock import sleep
from asynclock._errors import LockLost, LockTimeout, QuorumUnavailable, brief
from asynclock.locks.lease import Lease
from asynclock.locks.lock import Lock
from asynclock.locks.template import namer
from asynclock.protocol.hold import Tenure
from asynclock.rules.model import DONE
from asynclock.runtime.calls import acquire
from asynclock.stores.port import Use

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from asynclock.protocol.causes import NoLease
    from asynclock.protocol.terms import Terms
    from asynclock.runtime.session import Session

_P = ParamSpec("_P")
_R = TypeVar("_R")

AGAIN = (0.05, 0.5)
"""Seconds between two tries where no notice says when to try: `once` pauses for up to the first, `lead` for a time
between the two."""


RUN: ContextVar[Lease] = ContextVar("asynclock.once")
"""In a function that runs under `once`: the lease of this run. The command line reads it."""


class Skipped(Enum):
    """Why `once` did not run."""

    RUNNING = "running"
    """Another run is in progress, and may still fail."""
    DONE = "done"
    """A run returned less than `within` seconds ago."""


def synchronized(
    name: str | Callable[..., str], lock: Callable[[str], Lock]
) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R]]]:
    """Each call runs under `lock(name of the call)`. The decorator raises ConfigError for a wrong template, and
    TypeError for something that is no coroutine function; a call raises what `async with` of a lock raises."""

    def decorate(function: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R]]:
        _check_function(function)
        named = namer(name, function)

        @wraps(function)
        async def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            async with lock(named(*args, **kwargs)):
                return await function(*args, **kwargs)

        return guarded

    return decorate


def once(
    name: str | Callable[..., str], lock: Callable[[str], OnceLock], within: float
) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R | Skipped]]]:
    """A run holds the lock. A run that returns leaves the name taken for `within` seconds; until then a call returns
    Skipped. A call raises what `OnceLock.begin` raises; all else is as in `synchronized`."""

    def decorate(function: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R | Skipped]]:
        _check_function(function)
        named = namer(name, function)

        @wraps(function)
        async def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | Skipped:
            run = lock(named(*args, **kwargs))
            lease = await run.begin()
            if isinstance(lease, Skipped):
                return lease
            before = RUN.set(lease)
            try:
                async with lease:
                    result = await function(*args, **kwargs)
                    run.mark_done(within)
            finally:
                RUN.reset(before)
            return result

        return guarded

    return decorate


class OnceLock(Lock):
    """The lock of one run of a function decorated with `once`."""

    __slots__ = ("_deadline", "_tenure")

    _use = Use.ONCE

    async def begin(self) -> Lease | Skipped:
        """The lease of this run, or the reason why it is skipped. After split votes, which give no reason, and in an
        outage it tries again, for the client's `patience` seconds. Raises LockTimeout, or QuorumUnavailable, after
        that."""
        session = self._session_of(None)
        patience = session.settings.patience
        self._deadline = session.clock.now() + patience
        taken = await self._acquire(0)
        if isinstance(taken, Tenure):
            self._tenure = taken
            return Lease(taken, self._kept)
        if taken.holder:
            return Skipped.DONE if taken.holder == DONE else Skipped.RUNNING
        raise LockTimeout(
            f"{brief(self.name)}: votes were split for {patience:g} s, and no caller got the lock: try again",
            name=self.name,
            waited=patience,
        )

    async def _take(self, session: Session, terms: Terms) -> Tenure | NoLease:
        """All tries of a call, so that it has one event. A refusal names the holder that a majority knows; without one,
        votes were split until the deadline."""
        while True:
            try:
                taken = await acquire(session, terms)
                if isinstance(taken, Tenure):
                    return taken
                holder = (await self._peek()).holder()
                if holder is not None:
                    return taken._replace(holder=holder.holder)
                if session.clock.now() >= self._deadline:
                    return taken._replace(holder="")
                pause = AGAIN[0] * random.random()  # noqa: S311 - jitter
            except QuorumUnavailable:
                if session.clock.now() >= self._deadline:
                    raise
                pause = random.uniform(*AGAIN)  # noqa: S311 - jitter
            terms.mark_waiting()
            await sleep(pause, session.clock)
            session.check_open()

    def mark_done(self, within: float) -> None:
        """The run has returned: after its release the name stays taken for `within` seconds."""
        self._tenure.mark_done(within)


async def lead(lock: Lock, main: Callable[[Lease], Awaitable[_R]], through_outages: bool) -> _R:
    """Run `main` while elected, until it returns or raises. Returns its result, or raises its exception. After the loss
    of a lease it waits for the next election, and with `through_outages` also after an outage. Raises LockTimeout if
    the lock has a timeout, QuorumUnavailable after an outage without `through_outages`, and LockLost once the client is
    closed."""
    while True:
        try:
            lease = await lock._leased()
        except QuorumUnavailable:
            if not through_outages:
                raise
            await lock._sleep(random.uniform(*AGAIN))  # noqa: S311 - jitter
            continue
        raised: BaseException | None = None
        done: list[_R] = []
        try:
            async with lease:
                try:
                    done.append(await _awaitable(main(lease)))
                except BaseException as error:
                    raised = error
                    raise
        except LockLost as lost:
            # A LockLost that `main` raised ends `lead`, unless it reports the loss of this very lease.
            noticed = lost.name == lease.name and await lease.wait_lost()
            if (lost is raised and not noticed) or (lost.reason == "closed" and not done):
                raise
        if done:
            return done[0]


def _awaitable(result: Awaitable[_R]) -> Awaitable[_R]:
    if not inspect.isawaitable(result):
        raise TypeError(f"main must be an async def that takes the lease; it returned {type(result).__name__}")
    return result


def _check_function(function: object) -> None:
    """Only a coroutine function can be guarded: the body of any other function would run without the lock."""
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(f"put the decorator below @{type(function).__name__}, next to the function")
    if not inspect.iscoroutinefunction(function):
        what = "an async generator" if inspect.isasyncgenfunction(function) else "a plain function"
        what = "a generator" if inspect.isgeneratorfunction(function) else what
        raise TypeError(f"{getattr(function, '__qualname__', function)!r} is {what}: only an async def can be guarded")
