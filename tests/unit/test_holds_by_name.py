"""The holds of one client, by name: going through all of them, in the loop and in other threads."""

from __future__ import annotations

import pytest

from asynclock import Lease, Redlock
from asynclock.protocol.core import SLICE
from asynclock.protocol.holds import Holds
from asynclock.stores.memory import MemoryStore
from tests.support.fake_clock import FakeClock
from tests.support.probes import hold_of, session_of


async def several(client: Redlock, name: str) -> tuple[Holds, list[Lease]]:
    """The holds of a client that has two permits of one name, and two names together."""
    locks = [client.semaphore(name, 3), client.semaphore(name, 3), client.multi(f"{name}:a", f"{name}:b")]
    leases = [lease for lock in locks if (lease := await lock.acquire(timeout=0)) is not None]
    assert len(leases) == len(locks)
    return session_of(client).machine.holds, leases


async def test_a_copy_for_another_thread_has_each_hold_once(name: str) -> None:
    """Also those that have a name in common, and one that has several names: the renewal thread extends each."""
    async with Redlock(MemoryStore(FakeClock())) as client:
        holds, leases = await several(client, name)
        assert holds.copied() == [hold_of(lease) for lease in leases]
        for lease in leases:
            await lease.release()


async def test_each_slice_of_all_holds_ends_when_its_time_is_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: a turn of the loop for each hold would cost more than the work."""
    async with Redlock(MemoryStore(FakeClock())) as client:
        leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(10)]
        spent, slices = [1_000.0], [0]
        holds = session_of(client).machine.holds
        monkeypatch.setattr(holds.core, "spent", lambda: spent[0])
        for hold in holds.in_slices():
            if hold is None:
                slices.append(0)
            else:
                slices[-1] += 1
                spent[0] += 0.3 * SLICE
        assert slices == [4, 4, 2]
        for lease in leases:
            await lease.release()


async def test_a_hold_that_has_ended_meanwhile_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that closes would release it a second time."""
    async with Redlock(MemoryStore(FakeClock())) as client:
        holds, leases = await several(client, name)
        monkeypatch.setattr(holds.core, "spent", lambda: 0.0)  # one slice, on a busy machine too
        found = holds.in_slices()
        assert next(found) is hold_of(leases[0])
        for lease in leases[1:]:
            await lease.release()
        assert list(found) == []
        await leases[0].release()
