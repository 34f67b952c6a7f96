"""What the errors of a forked child say. The session is told of a fork in this process, as the hook of a fork does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from asynclock import ConfigError, LockNotHeld, QuorumUnavailable, Redlock
from asynclock.stores import MemoryStore
from tests.support.probes import session_of
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT

WHAT_TO_DO = "acquire the lock again in this process, in an event loop of its own"


@pytest.fixture(autouse=True)
def _no_complaint(recwarn: pytest.WarningsRecorder) -> None:
    """The client that was forgotten is never closed."""


async def test_f9_a_lease_of_the_parent_says_what_to_do(name: str) -> None:
    """Each use of it that waits."""
    client = Redlock(MemoryStore())
    lease = await client(name).acquire(timeout=None)
    session_of(client).forget_after_fork()
    for use in (lease.wait_lost, lease.extend):
        with pytest.raises(ConfigError, match=f"this Lease was begun before a fork: .*{WHAT_TO_DO}"):
            await use()
    with pytest.raises(LockNotHeld, match=f"was acquired before a fork: .*{WHAT_TO_DO}"):
        lease.ensure_held()


async def test_f9_a_pending_acquire_of_the_parent_says_what_to_do(name: str) -> None:
    """It is no lease: the error says that a call waits."""
    store = MemoryStore()
    async with aclosing(Redlock(store)) as other, other(name):
        client = Redlock(store, patience=0)
        waiting = asyncio.create_task(client(name).acquire(timeout=1.0))
        await turns(20)
        session_of(client).forget_after_fork()
        with pytest.raises((ConfigError, QuorumUnavailable), match=f"a wait for a lock.*before a fork: .*{WHAT_TO_DO}"):
            await asyncio.wait_for(waiting, LIMIT)
