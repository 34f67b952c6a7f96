"""min_hold and max_hold, of every kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from tests.support.waiters import LIMIT, LONG

KINDS: dict[str, Callable[..., Any]] = {
    "mutex": lambda client, name, **options: client(name, **options),
    "fair": lambda client, name, **options: client(name, fair=True, **options),
    "reentrant": lambda client, name, **options: client(name, reentrant=True, **options),
    "read": lambda client, name, **options: client.read(name, **options),
    "write": lambda client, name, **options: client.write(name, **options),
    "semaphore": lambda client, name, **options: client.semaphore(name, 1, **options),
    "multi": lambda client, name, **options: client.multi(f"{name}:0", name, **options),
}
RIVALS = {"read": "write"}
"""The kind that is excluded, where that is not the same kind."""


async def of_all(check: Callable[[str], Any]) -> None:
    """All kinds at once: their tests wait side by side."""
    async with asyncio.timeout(2 * LIMIT), asyncio.TaskGroup() as group:
        for kind in KINDS:
            group.create_task(check(kind), name=kind)


async def test_min_hold_keeps_the_name_taken(make: Callable[..., Redlock], name: str) -> None:
    """Release returns before the time is over; a waiter is granted then, and not before."""
    client, other = make(), make()

    async def check(kind: str) -> None:
        began = time.monotonic()
        lease = await KINDS[kind](client, f"{name}:{kind}", min_hold=1.5).acquire(timeout=None)
        await lease.release()
        assert not lease.held
        rival = KINDS[RIVALS.get(kind, kind)](other, f"{name}:{kind}")
        again = await rival.acquire(timeout=LIMIT)
        assert again is not None
        assert time.monotonic() - began >= 1.5
        assert again.fence > lease.fence
        await again.release()

    await of_all(check)


async def test_a6_max_hold_ends_it(make: Callable[..., Redlock], name: str) -> None:
    """The lease is lost after that time, its body is cancelled, and the next waiter is granted, long before the lease
    would end."""
    client, other = make(lease=LONG), make()

    async def check(kind: str) -> None:
        began = time.monotonic()
        with pytest.raises(LockLost) as lost:
            async with KINDS[kind](client, f"{name}:{kind}", max_hold=0.5):
                await asyncio.Event().wait()
        assert lost.value.reason == "max_hold"
        assert time.monotonic() - began >= 0.5
        rival = await KINDS[RIVALS.get(kind, kind)](other, f"{name}:{kind}").acquire(timeout=LIMIT)
        assert rival is not None
        await rival.release()

    await of_all(check)
