"""Metrics: what a client does is counted, with the real SDK and real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from asynclock import Lock, LockLost, QuorumUnavailable, Redlock
from asynclock.otel import HOLD_BUCKETS, MOST_LABELS, OTHER, WAIT_BUCKETS, instrument
from tests.support.meters import Meters
from tests.support.probes import acquisitions_of, renew_now, waits_for_notice
from tests.support.servers import Server
from tests.support.waiters import IN_VAIN, until

Make = Callable[..., Redlock]
Kind = Callable[[Redlock, str], Lock]

KINDS: dict[str, Kind] = {
    "mutex": lambda client, name: client(name, label="a"),
    "read": lambda client, name: client.read(name, label="a"),
    "write": lambda client, name: client.write(name, label="a"),
    "semaphore": lambda client, name: client.semaphore(name, 1, label="a"),
    "multi": lambda client, name: client.multi(name, f"{name}:b", label="a"),
}


async def waits(client: Redlock, count: int = 1) -> None:
    """Return once so many acquires of the client wait for a notice, or in the local queue."""
    await until(lambda: sum(map(waits_for_notice, acquisitions_of(client))) == count)


# -- acquires ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_acquires_count_by_kind_and_label(make: Make, meters: Meters, name: str, kind: str) -> None:
    """And by outcome. Only the client that is instrumented counts."""
    client, other = make(), make()
    instrument(client, meter_provider=meters.provider)
    async with KINDS[kind](client, name):
        pass
    async with other.write(name) if kind == "read" else KINDS[kind](other, name):
        assert await KINDS[kind](client, name).acquire(timeout=0) is None
    found = {"kind": kind, "label": "a"}
    assert meters.by("asynclock.acquisitions", "outcome") == {"acquired": 1, "timeout": 1}
    assert meters.value("asynclock.acquisitions", outcome="acquired", **found) == 1
    assert meters.value("asynclock.acquisitions", outcome="timeout", **found) == 1


async def test_an_outage_counts_as_unavailable(server: Server, meters: Meters, name: str) -> None:
    """An acquire that ended with QuorumUnavailable is no timeout."""
    async with Redlock(server.url, patience=1.0) as client:
        instrument(client, meter_provider=meters.provider)
        server.kill()
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire()
        assert meters.by("asynclock.acquisitions", "outcome") == {"unavailable": 1}


@pytest.mark.parametrize("make", ["memory"], indirect=True)  # a server that is late would make it an outage
async def test_the_wait_of_an_acquire_that_waited_is_recorded(make: Make, meters: Meters, name: str) -> None:
    """From its call to its end; of one that timed out, too. A free acquire and one try record nothing."""
    client, other = make(), make()
    instrument(client, meter_provider=meters.provider)
    lock = client(name, label="a")
    async with other(name):
        assert await lock.acquire(timeout=0) is None
        assert await lock.acquire(timeout=IN_VAIN) is None
        waiter = asyncio.create_task(lock.acquire())
        await waits(client)
    await (await waiter).release()
    async with client(f"{name}:free", label="a"):
        pass
    assert meters.by("asynclock.wait.duration", "outcome") == {"acquired": 1, "timeout": 1}
    (timed_out,) = [
        point for point in meters.points("asynclock.wait.duration") if point.attributes["outcome"] == "timeout"
    ]
    assert timed_out.sum >= 0.19  # a timer of uvloop may be early by some ms
    assert tuple(timed_out.explicit_bounds) == WAIT_BUCKETS


async def test_a_wait_in_the_local_queue_is_recorded(redlock: Redlock, meters: Meters, name: str) -> None:
    """The waiter may get the hold without a round trip."""
    instrument(redlock, meter_provider=meters.provider)
    async with redlock(name):
        waiter = asyncio.create_task(redlock(name).acquire())
        await waits(redlock)
    await (await waiter).release()
    assert meters.value("asynclock.wait.duration", outcome="acquired") == 1


# -- holds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_duration_of_a_hold_is_recorded(redlock: Redlock, meters: Meters, name: str, kind: str) -> None:
    """Of a release, and of a detach."""
    instrument(redlock, meter_provider=meters.provider)
    loop = asyncio.get_running_loop()
    async with KINDS[kind](redlock, name):
        began = loop.time()
        await asyncio.sleep(0)
        held_for = loop.time() - began
    (point,) = meters.points("asynclock.hold.duration")
    assert dict(point.attributes) == {"kind": kind, "label": "a"}
    assert (point.count, tuple(point.explicit_bounds)) == (1, HOLD_BUCKETS)
    assert point.sum >= held_for
    if kind != "multi":  # it cannot be detached
        lease = await KINDS[kind](redlock, name).acquire()
        assert lease is not None
        await lease.detach()
        assert meters.value("asynclock.hold.duration", kind=kind) == 2


async def test_what_is_held_and_what_waits_is_reported(make: Make, meters: Meters, name: str) -> None:
    """The sum over all clients; now, and not since the last report."""
    client, other = make(), make()
    for each in (client, other):
        instrument(each, meter_provider=meters.provider)
    async with client(name), other(f"{name}:b"):
        waiters = [asyncio.create_task(other(name).acquire()) for _ in range(2)]
        await waits(other, 2)
        assert (meters.value("asynclock.held"), meters.value("asynclock.waiting")) == (2, 2)
    for waiter in asyncio.as_completed(waiters):
        await (await waiter).release()
    assert (meters.value("asynclock.held"), meters.value("asynclock.waiting")) == (0, 0)


# -- losses, renewals, releases ----------------------------------------------------------------------------------------


async def lost(lock: Lock, end: Callable[[], Awaitable[object]]) -> None:
    """A lease of it is lost as `end` ends it."""
    with pytest.raises(LockLost):
        async with lock:
            await end()
            await asyncio.sleep(20)


async def test_losses_count_by_reason(make: Make, meters: Meters, name: str) -> None:
    """And the durations of their holds are recorded."""
    client = make()
    instrument(client, meter_provider=meters.provider)
    await lost(client(name, label="a"), lambda: client.break_lock(name))
    await lost(client(name, label="b", max_hold=0.05), lambda: asyncio.sleep(0))
    assert meters.by("asynclock.lost", "reason") == {"broken": 1, "max_hold": 1}
    assert meters.by("asynclock.lost", "label") == {"a": 1, "b": 1}
    assert meters.value("asynclock.hold.duration") == 2


async def test_an_expired_lease_counts_and_so_do_its_renewals(server: Server, meters: Meters, name: str) -> None:
    """A renewal that no majority answers fails, and the next one is sent. So does the release of the lost lease."""
    async with Redlock(server.url, lease=6, node_timeout=1.0) as client:
        instrument(client, meter_provider=meters.provider)
        async with client(name) as lease:
            renew_now(lease)
            await until(lambda: meters.value("asynclock.renewals", outcome="ok"))
        async with client(f"{name}:open") as lease:
            server.freeze()
            renew_now(lease)
            await until(lambda: meters.value("asynclock.renewals", outcome="failed"))
            before = meters.value("asynclock.release.failures")  # the first release may fail on a busy machine
        assert meters.value("asynclock.release.failures") == before + 1
        server.thaw()
        await lost(client(name, lease=3.0), lambda: asyncio.sleep(0, server.freeze()))
        assert meters.by("asynclock.lost", "reason") == {"expired": 1}
        server.thaw()


# -- nodes -------------------------------------------------------------------------------------------------------------


async def test_each_node_is_up_or_down(five: Sequence[Server], meters: Meters, name: str) -> None:
    """A frozen one and a dead one are down; a node that is back is up again."""
    async with Redlock(*(server.url for server in five)) as client:
        instrument(client, meter_provider=meters.provider)
        up = {server.url: 1 for server in five}
        await until(lambda: meters.by("asynclock.node.up", "node") == up)  # to enter, a majority is enough
        five[3].kill()
        five[4].freeze()
        down = {five[3].url, five[4].url}

        async def use() -> dict[str, float]:
            async with client(name):
                return meters.by("asynclock.node.up", "node")

        async with asyncio.timeout(30):
            while await use() != {url: 1 for url in up if url not in down}:
                await asyncio.sleep(0.01)
        five[4].thaw()
        async with asyncio.timeout(30):
            while len(await use()) < 4:
                await asyncio.sleep(0.01)
        assert meters.by("asynclock.node.rtt", "node").keys() >= up.keys() - down


# -- labels ------------------------------------------------------------------------------------------------------------


async def test_a_name_is_in_no_attribute(redlock: Redlock, meters: Meters, name: str) -> None:
    """Names may be without number, and say more than a metric may."""
    instrument(redlock, meter_provider=meters.provider)

    @redlock.synchronized("order:{order}")
    async def work(order: str) -> None:
        await asyncio.sleep(0)

    await work(name)
    async with redlock(name):
        pass
    assert meters.by("asynclock.acquisitions", "label") == {"": 1, "order:{order}": 1}
    for metric in meters.metrics().values():
        for point in metric.data.data_points:
            assert name not in str(point.attributes)


@pytest.mark.parametrize("make", ["memory"], indirect=True)
async def test_labels_are_bounded(make: Make, meters: Meters, name: str) -> None:
    """The first 200 count apart, all others together; a program may make a label of a name by mistake."""
    client = make()
    instrument(client, meter_provider=meters.provider)
    for _ in range(2):
        for number in range(MOST_LABELS + 30):
            async with client(name, label=f"l{number}"):
                pass
    counted = meters.by("asynclock.acquisitions", "label")
    assert counted == {f"l{number}": 2 for number in range(MOST_LABELS)} | {OTHER: 60}
    assert len(meters.points("asynclock.hold.duration")) == MOST_LABELS + 1


async def test_what_has_not_happened_yet_is_zero(redlock: Redlock, meters: Meters, name: str) -> None:
    """From the first event of a label on: a rate sees the first loss only if there was a value before it."""
    instrument(redlock, meter_provider=meters.provider)
    async with redlock(name, label="a"):
        pass
    zeros = {
        (metric, *sorted(value for key, value in point.attributes.items() if key not in ("kind", "label")))
        for metric in ("asynclock.acquisitions", "asynclock.lost", "asynclock.renewals", "asynclock.release.failures")
        for point in meters.points(metric)
        if point.value == 0
    }
    assert zeros == {
        *(("asynclock.acquisitions", outcome) for outcome in ("timeout", "unavailable")),
        *(("asynclock.lost", reason) for reason in ("broken", "closed", "expired", "max_hold", "taken")),
        *(("asynclock.renewals", outcome) for outcome in ("failed", "ok")),
        ("asynclock.release.failures",),
    }
