"""A client with much to close does so in slices. Between two of them its event loop runs (HAZARDS A17, A19)."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from asynclock import ConfigError, Lease, LockLost, Redlock
from asynclock.rules.model import RELEASE
from asynclock.stores import MemoryStore
from tests.support.held import sent_to
from tests.support.probes import nodes_of, session_of
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, until

pytestmark = pytest.mark.both_loops("the loop orders the turns")

WAITERS = 8


async def test_a19_a_block_that_the_close_ends_releases_nothing_again(name: str) -> None:
    """The close has released its hold, and cancels its body while waiters of the client are still to be ended. A second
    release would serve these waiters."""
    client = Redlock(*(MemoryStore() for _ in range(3)))
    semaphore = client.semaphore(name, 1)
    entered = asyncio.Event()

    async def block() -> None:
        async with semaphore:
            entered.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(block())
    await entered.wait()
    waiting = [asyncio.create_task(client.semaphore(name, 1).acquire(timeout=None)) for _ in range(WAITERS)]
    await until(lambda: len(session_of(client).machine.tickets.all()) == WAITERS)
    sent = sent_to(nodes_of(client)[0])
    session_of(client).spent = itertools.count().__next__  # each waiter is a slice
    await client.aclose()
    ids = [op.id for op, _ in sent if op.verb is RELEASE]
    assert len(ids) == len(set(ids)) == 1 + WAITERS
    with pytest.raises(LockLost, match="closed"):
        await holding
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in ended} == {ConfigError}


@pytest.mark.parametrize("after", range(8))
async def test_a17_a_client_that_closes_while_it_connects_stays_closed(
    name: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """It closes so many turns after its node has answered, perhaps in the very turn in which its first use goes on."""
    client = Redlock(MemoryStore())
    (node,) = nodes_of(client)
    connects = asyncio.Event()

    async def opened() -> None:
        await connects.wait()

    monkeypatch.setattr(node, "open", opened)
    first = asyncio.create_task(client(name).acquire(timeout=None))
    await turns(5)
    connects.set()
    await turns(after)
    session = session_of(client)
    await client.aclose()
    assert not session.opened
    assert not session.ready
    async with asyncio.timeout(LIMIT):
        (outcome,) = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(outcome, ConfigError) or (isinstance(outcome, Lease) and not outcome.held)
