"""A release that begins late, since its database was slow or down: for how long its name stays taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock.rules.model import Op, Verb
from tests.support.fake_clock import FakeClock
from tests.support.gated_store import Gated, patient
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT


class Noting(Gated):
    """It notes the rest of each release that begins."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.rests: list[float] = []

    def decide(self, prefix: str, op: Op, answer: Any) -> Any:
        if op.verb is Verb.RELEASE:
            self.rests.append(op.rest)
        return super().decide(prefix, op, answer)


async def test_f23_min_hold_counts_from_the_release_and_not_from_when_it_begins(name: str) -> None:
    """It waited for 6 s in the queue of its client. The name stayed taken for 20 s after that."""
    clock = FakeClock()
    store = Noting(clock)
    async with patient(store) as client:
        lease = await client(name, min_hold=20.0).acquire(timeout=None)
        async with store.busy(client):
            releasing = asyncio.create_task(lease.release())
            await turns()
            clock.advance(6.0)
            await turns()
        async with asyncio.timeout(LIMIT):
            await releasing
    assert store.rests == [pytest.approx(14.0, abs=0.1)]
