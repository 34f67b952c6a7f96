"""Coroutine functions that run under a lock (`synchronized`), at most once in a time (`once`), or while elected
(`lead`)."""

from __future__ import annotations

import asyncio
import inspect
import random
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asynclock._errors import LockLost, LockTimeout, QuorumUnavailable, brief
from asynclock._loop import running_loop
from asynclock.locks.template import namer
from asynclock.rules.model import DONE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from asynclock.locks.lease import Lease
    from asynclock.locks.lock import Lock

_P = ParamSpec("_P")
_R = TypeVar("_R")

_AGAIN = (0.05, 0.5)
"""Seconds, jittered, between two looks where nothing tells when it pays."""


class Skipped(Enum):
    """Why `once` did not run."""

    RUNNING = "running"
    """Another run is in progress: it may still fail."""
    DONE = "done"
    """A run within the time has returned."""


def synchronized(
    name: str | Callable[..., str], lock: Callable[[str], Lock]
) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R]]]:
    """Each call runs under `lock(name of the call)`."""

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
    name: str | Callable[..., str], lock: Callable[[str], Lock], within: float, patience: float
) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R | Skipped]]]:
    """A run holds the lock; one that returned leaves the name taken for `within` seconds."""

    def decorate(function: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R | Skipped]]:
        _check_function(function)
        named = namer(name, function)

        @wraps(function)
        async def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | Skipped:
            lease = await _begin(lock(named(*args, **kwargs)), patience)
            if isinstance(lease, Skipped):
                return lease
            async with lease:
                result = await function(*args, **kwargs)
                lease._rest = within
            return result

        return guarded

    return decorate


async def _begin(lock: Lock, patience: float) -> Lease | Skipped:
    """The lease of this run; or why there is none. Votes that were split among those who try at once tell nothing."""
    loop = running_loop()
    deadline = loop.time() + patience
    while True:
        lease = await lock.acquire(timeout=0)
        if lease is not None:
            return lease
        holder = await lock._holder()
        if holder is not None:
            return Skipped.DONE if holder == DONE else Skipped.RUNNING
        if loop.time() >= deadline:
            raise LockTimeout(f"{brief(lock.name)}: others try all the time, and none gets in", name=lock.name)
        await asyncio.sleep(_AGAIN[0] * random.random())  # noqa: S311 - jitter


async def lead(lock: Lock, main: Callable[[Lease], Awaitable[_R]]) -> _R:
    """Run `main` while elected: again after a loss of that lease, through outages, until it returns or raises."""
    while True:
        try:
            lease = await lock.acquire()
        except QuorumUnavailable:
            if lock._settings.timeout is not None:
                raise
            await asyncio.sleep(random.uniform(*_AGAIN))  # noqa: S311 - jitter
            continue
        if lease is None:
            raise LockTimeout(f"{brief(lock.name)}: somebody else led all the time", name=lock.name)
        told: BaseException | None = None
        done: list[_R] = []
        try:
            async with lease:
                try:
                    done.append(await _awaitable(main(lease)))
                except BaseException as error:
                    told = error
                    raise
        except LockLost as lost:
            # Main raised it itself? That ends main, but where main only noticed that this lease was lost.
            noticed = lost.name == lease.name and await lease.wait_lost()
            if (lost is told and not noticed) or (lost.reason == "closed" and not done):
                raise
        if done:
            return done[0]


def _awaitable(told: Awaitable[_R]) -> Awaitable[_R]:
    if not inspect.isawaitable(told):
        raise TypeError(f"main is an async def that takes the lease: what was given answered {type(told).__name__}")
    return told


def _check_function(function: object) -> None:
    """A coroutine function is what can be guarded: the others have their body run when nobody holds anything."""
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(f"put the decorator below @{type(function).__name__}, next to the function")
    if not inspect.iscoroutinefunction(function):
        what = "an async generator" if inspect.isasyncgenfunction(function) else "a plain function"
        what = "a generator" if inspect.isgeneratorfunction(function) else what
        raise TypeError(f"{getattr(function, '__qualname__', function)!r} is {what}: only an async def can be guarded")
