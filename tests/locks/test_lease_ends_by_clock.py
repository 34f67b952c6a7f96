"""A lease that is over by the clock is over in each of its methods, though no timer has run and the servers still keep
its key; and the moments from which max_hold and min_hold count."""

from __future__ import annotations

import asyncio

import pytest

from asynclock import LockLost, Redlock
from asynclock.events import LoopLagged, Lost
from tests.support.cancelled_waits import Make
from tests.support.probes import acquisitions_of, asked_id, hold_of, id_of
from tests.support.shifted_clock import Shifted, shifted
from tests.support.still_clock import Still, TenureRecord, turns
from tests.support.told import told
from tests.support.waiters import LIMIT, LONG

nodes = pytest.mark.parametrize("nodes", [1, 5])

PAST = {"lease": ({"lease": 10.0}, "expired"), "max_hold": ({"lease": LONG, "max_hold": 10.0}, "max_hold")}
"""What ends after ten seconds, and what a loss by it is called."""
limits = pytest.mark.parametrize("limit", PAST)


# -- the clock goes before everything --------------------------------------------------------------------------------


@nodes
async def test_a_grant_that_is_read_after_its_validity_begins_no_lease(
    shared_urls: list[str], name: str, nodes: int
) -> None:
    """Between the send and the reply as much time passes as the lease lasts. The acquire undoes that grant, asks again
    with another id, since that release may be sent once more, and returns a lease that is held."""
    clock = Shifted()
    async with shifted(shared_urls[:nodes], clock, lease=10.0) as client:
        await client.health()
        acquiring = asyncio.create_task(client(name).acquire(timeout=None))
        await asyncio.sleep(0)  # it has asked; no answer can be read in the same turn
        (first,) = map(asked_id, acquisitions_of(client))
        clock.jump(10.0)
        async with asyncio.timeout(LIMIT):
            lease = await acquiring
        assert lease.held
        assert lease.remaining > 5.0
        assert id_of(lease) != first
        await lease.release()
        assert not await client(name).locked()


@nodes
@limits
async def test_held_reads_the_clock(shared_urls: list[str], name: str, nodes: int, limit: str) -> None:
    """It is False, and nothing remains, from the moment on in which the lease or max_hold is over."""
    options, reason = PAST[limit]
    clock = Shifted()
    async with shifted(shared_urls[:nodes], clock) as client:
        lease = await client(name, **options).acquire(timeout=None)
        assert lease.held
        assert 0.0 < lease.remaining <= 10.0
        clock.jump(10.0)
        assert (lease.held, lease.remaining) == (False, 0.0)
        with pytest.raises(LockLost) as lost:
            lease.ensure_held()
        assert lost.value.reason == reason
        assert await client(name).locked()  # only the clock says that it is over
        with pytest.raises(LockLost):
            await lease.release()


@nodes
@limits
async def test_release_all_in_a_block_whose_lease_is_over(
    shared_urls: list[str], name: str, nodes: int, limit: str
) -> None:
    """The lease ended before release_all() was called: the end of the block says that a part of its body was not
    guarded."""
    options, reason = PAST[limit]
    clock = Shifted()
    async with shifted(shared_urls[:nodes], clock) as client:
        with pytest.raises(LockLost) as lost:
            async with client(name, **options):
                clock.jump(10.0)
                await client.release_all()
        assert lost.value.reason == reason
        assert not await client(name).locked()


@nodes
@limits
async def test_a_close_after_the_end_of_a_lease_says_why_it_ended(
    shared_urls: list[str], name: str, nodes: int, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop was blocked beyond the lease, and the client closes before any timer runs. The lease is lost for the
    reason of its end, with a WARNING, because the body worked without the lock; and the name is free."""
    options, reason = PAST[limit]
    clock = Shifted()
    async with shifted(shared_urls[:nodes], clock) as client, shifted(shared_urls[:nodes], clock) as other:
        lease = await client(name, **options).acquire(timeout=None)
        with told(client) as seen:
            clock.jump(10.0)
            await client.aclose()
        assert [event.reason for event in seen.of(Lost)] == [reason]
        with pytest.raises(LockLost) as lost:
            await lease.release()
        assert lost.value.reason == reason
        lines = [each.levelname for each in caplog.records if getattr(each, "asynclock_event", "") == "Lost"]
        assert lines == ["WARNING"]
        assert not await other(name).locked()


@nodes
async def test_a_close_after_a_blocked_loop_reports_the_block(name: str, nodes: int) -> None:
    """The timer that measures how late the loop is has not run yet, and the close stops it: LoopLagged is told once."""
    still = Still(nodes, name)
    async with still.client() as client:
        lease = await client(name).acquire(timeout=None)
        with told(client) as seen:
            still.clock.block(60.0)
            await client.aclose()
            still.clock.advance(60.0)
        assert [round(event.seconds) for event in seen.of(LoopLagged)] == [58]  # the first beat was due after 2.5 s
        assert not lease.held


@nodes
@limits
async def test_a_block_that_ends_too_late_raises(shared_urls: list[str], name: str, nodes: int, limit: str) -> None:
    """Its body ran on for longer than the lease or max_hold, without a turn of the loop. The end of the block raises,
    though each server still had the key and released it without an error."""
    options, reason = PAST[limit]
    clock = Shifted()
    async with shifted(shared_urls[:nodes], clock) as client:
        with pytest.raises(LockLost) as lost:
            async with client(name, **options):
                clock.jump(10.0)
        assert lost.value.reason == reason
        assert not await client(name).locked()
        with pytest.raises(ZeroDivisionError) as raised:
            async with client(name, **options):
                clock.jump(10.0)
                raise ZeroDivisionError
        assert len(raised.value.__notes__) == 1


@nodes
async def test_an_expired_lease_is_not_entered_again(name: str, nodes: int) -> None:
    """The loop was blocked beyond the lease of a reentrant lock, and its owner enters before any timer runs. That is a
    hold of its own, with a greater fence, or none where another client has the name by then."""
    still = Still(nodes, name)
    async with still.client() as client, still.client() as other:
        lock = client(name, reentrant=True, owner="us")
        first = await lock.acquire(timeout=None)
        still.clock.block(60.0)
        second = await lock.acquire(timeout=0)
        assert second is not None
        assert second.held
        assert second.fence > first.fence
        still.clock.block(60.0)
        taken = await other(name).acquire(timeout=0)
        assert taken is not None
        assert await lock.acquire(timeout=0) is None
        await taken.release()


# -- what is counted from where --------------------------------------------------------------------------------------


async def test_max_hold_of_an_owner_that_entered_again(name: str) -> None:
    """The owner enters again with max_hold: the hold is lost when that is over, and not when it would be renewed."""
    still = Still(1, name)
    async with still.client(lease=LONG) as client:
        outer = await client(name, reentrant=True).acquire(timeout=None)
        inner = await client(name, reentrant=True, max_hold=5.0).acquire(timeout=None)
        lost = [asyncio.create_task(each.wait_lost()) for each in (outer, inner)]
        await turns()
        still.clock.advance(5.1)
        await turns()
        assert all(each.done() and each.result() for each in lost)


@nodes
async def test_max_hold_of_a_passed_hold_counts_from_its_own_beginning(name: str, nodes: int) -> None:
    """The hold is passed on after four milliseconds: the next owner has all of its max_hold, and no more."""
    record = TenureRecord(nodes)
    async with record.client(max_hold=2.0) as client:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        next_waiter = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        await first.release()
        lease = await head
        record.clock.advance(0.004)
        await lease.release()
        passed = await next_waiter
        assert hold_of(passed) is hold_of(lease)
        assert passed.remaining == pytest.approx(2.0, abs=1e-6)
        record.clock.advance(1.999)
        assert passed.held
        record.clock.advance(0.002)
        assert not passed.held


@nodes
@pytest.mark.parametrize("end", ["lost", "lost-in-block", "closed", "closed-late"])
async def test_min_hold_outlives_a_loss_and_a_close(name: str, nodes: int, end: str) -> None:
    """The tenure is over after a second, by max_hold or because its client closes, also where no timer has run since:
    the name stays taken until min_hold is over, and is free from then on."""
    still = Still(nodes, name)
    began = still.clock.now()
    async with still.client(min_hold=5.0, max_hold=1.0 if end != "closed" else 9.0) as client, still.client() as other:
        if end == "lost-in-block":
            with pytest.raises(LockLost):
                async with client(name):
                    asyncio.get_running_loop().call_soon(still.clock.advance, 1.02)
                    await asyncio.Event().wait()
        else:
            lease = await client(name).acquire(timeout=None)
            (still.clock.block if end == "closed-late" else still.clock.advance)(1.02)
            if end.startswith("closed"):
                await client.aclose()
            with pytest.raises(LockLost):
                await lease.release()
        await turns()
        still.clock.advance(began + 4.99 - still.clock.now())
        assert await other(name).acquire(timeout=0) is None
        still.clock.advance(0.02)
        after = await other(name).acquire(timeout=0)
        assert after is not None
        await after.release()


@pytest.mark.parametrize("end", ["lost", "lost-in-block", "closed"])
async def test_min_hold_outlives_a_loss_and_a_close_on_servers(make: Make, name: str, end: str) -> None:
    """The same on each deployment, as far as a test without waiting can see: the name rests, and no other client gets
    in."""
    client: Redlock = make(lease=LONG, min_hold=30.0, max_hold=0.05 if end != "closed" else None)
    other = make()
    if end == "lost-in-block":
        with pytest.raises(LockLost):
            async with client(name):
                await asyncio.Event().wait()
    else:
        lease = await client(name).acquire(timeout=None)
        if end == "closed":
            await client.aclose()
        else:
            assert await lease.wait_lost()
        with pytest.raises(LockLost):
            await lease.release()
    assert await other(name).acquire(timeout=0) is None
    (holder,) = (await other.inspect(name)).holders
    assert holder.remaining is not None
    assert holder.remaining <= 30.0  # a rest, and not what was left of the lease
