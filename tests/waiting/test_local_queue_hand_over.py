"""The local queue: tasks of one process pass a hold on without a round trip, within bounds (`local_queue.py`)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, Self

import pytest

from asynclock import Redlock
from asynclock.protocol.local_queue import PASSING, SPAN, may_pass
from tests.support.kinds_of_node import each_kind_of_node
from tests.support.probes import hold_of, holds_of, last_fence, local_queues_of, settings_of
from tests.support.still_clock import TenureRecord, all_of, lengths, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, rise

both = pytest.mark.parametrize("nodes", [1, 5])


# -- the bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_trip", "left", "fences", "passes"),
    [
        (0.0, 29.0, 15, True),
        (0.0, 29.0, 1, True),
        (0.0, 29.0, 0, False),  # the span is used up
        (0.0, 29.0, -1, False),
        (0.0049, 29.0, 1, True),
        (0.0051, 29.0, 15, False),  # the remote waiter has waited long enough
        (-0.001, 29.0, 1, True),  # a clock that other threads read, too
        (0.0, 10.001, 1, True),
        (0.0, 9.999, 15, False),  # too little of the lease to begin anything with
        (0.0, 0.0, 15, False),
        (0.0, -1.0, 15, False),
    ],
)
def test_when_a_hold_may_be_passed_on(since_trip: float, left: float, fences: int, passes: bool) -> None:
    """A hold is passed on while fences are left, within 5 ms of the last round trip, and with a third of the lease to
    go."""
    now = 1000.0
    assert may_pass(now, now - since_trip, now + left, 30.0, fences) is passes


def test_the_bounds_are_as_documented() -> None:
    """The docs name sixteen tenures and five milliseconds."""
    assert (SPAN, PASSING) == (16, 0.005)


# -- a local queue whose clock the test moves ------------------------------------------------------------------------


@both
async def test_sixteen_tenures_a_round_trip(nodes: int, name: str) -> None:
    """Fifty tasks of one process, and no time passes. The first asks the servers for itself. Then sixteen at a time
    share one hold, each with the next fence. The servers see no more than the holds."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        await all_of([record.tenure(client, name) for _ in range(50)])
        assert record.runs == [1, 16, 16, 16, 1]
        assert rise(record.fences)
        for hold, tenures in groupby(record.tenures, lambda each: each[0]):
            fences = [fence for _, fence, _ in tenures]
            assert fences == list(range(fences[0], fences[0] + len(fences)))
            assert fences[-1] <= hold.last_fence
        assert record.tried() == 5
        assert not local_queues_of(client)


@both
@pytest.mark.parametrize(("takes", "each"), [(0.002, 3), (0.0049, 2), (0.0051, 1), (0.0, 16)])
async def test_five_milliseconds_a_round_trip(nodes: int, name: str, takes: float, each: int) -> None:
    """A tenure that ends later than that after the round trip is followed by another round trip."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        await all_of([record.tenure(client, name, takes=takes) for _ in range(1 + 3 * each)])
        assert record.runs == [1, each, each, each] if each > 1 else [1, 1, 1, 1]
        assert rise(record.fences)


@both
async def test_a_later_hold_has_greater_fences_than_the_whole_span(nodes: int, name: str) -> None:
    """The rest of a span that was not used up is lost: the next hold of any client has a fence above all of it."""
    record = TenureRecord(nodes)
    async with record.client() as client, record.client() as other:
        await all_of([record.tenure(client, name) for _ in range(5)])
        last = record.tenures[-1][0]
        assert last.last_fence > record.fences[-1]
        async with other(name) as lease:
            assert lease.fence > last.last_fence


@both
async def test_no_span_without_local_waiters(nodes: int, name: str) -> None:
    """A holder without local waiters takes one fence only."""
    record = TenureRecord(nodes)
    async with record.client() as client, client(name) as lease:
        assert lease.fence == last_fence(lease)


# -- to whom it is not passed ----------------------------------------------------------------------------------------

OTHER_TERMS: list[dict[str, Any]] = [
    {"lease": 20.0},
    {"renew": False},
    {"max_hold": 10.0},
    {"min_hold": 1.0},
    {"cancel_on_lost": False},
    {"metadata": "another"},
    {"fencing": False},
]


async def holder_and_waiters(
    record: TenureRecord, client: Redlock, name: str, *terms: dict[str, Any]
) -> list[asyncio.Task[None]]:
    """A task that holds the name by a round trip with fences to spare, and behind it one local waiter for each
    terms."""
    first = await client(name).acquire(timeout=None)
    tasks = [
        record.tenure(client, name, "head"),
        *(record.tenure(client, name, i, **its) for i, its in enumerate(terms)),
    ]
    await turns(20)
    await first.release()
    return tasks


@both
@pytest.mark.parametrize("terms", OTHER_TERMS, ids=lambda terms: next(iter(terms)))
async def test_locks_of_other_options_are_not_passed_to(nodes: int, name: str, terms: dict[str, Any]) -> None:
    """All tenures of a hold keep the options that it was taken with. A waiter with other options asks for itself, and
    is served in turn."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        tasks = await holder_and_waiters(record, client, name, terms, {})
        for _ in range(20):  # min_hold rests for a while
            await turns(20)
            record.clock.advance(0.5)
        await all_of(tasks)
        assert [who for _, _, who in record.tenures] == ["head", 0, 1]
        assert record.runs == [1, 1, 1]


@both
async def test_another_timeout_is_no_other_option(nodes: int, name: str) -> None:
    """The timeout of a waiter does not matter to the hold."""
    record = TenureRecord(nodes)
    async with record.client(timeout=90.0) as client:
        await all_of(
            await holder_and_waiters(record, client, name, {"timeout": 1.0}, {"timeout": None}, {"timeout": 90.0})
        )
        assert record.runs == [4]


@both
async def test_a_min_hold_is_not_passed_on(nodes: int, name: str) -> None:
    """The server keeps the name taken for that time after each tenure, so each tenure is a hold of its own."""
    record = TenureRecord(nodes)
    async with record.client(min_hold=1.0) as client:
        tasks = [record.tenure(client, name) for _ in range(4)]
        began: list[float] = []
        for _ in range(200):
            await turns(20)
            while len(began) < len(record.tenures):
                began.append(record.clock.now())
            record.clock.advance(0.05)
        await all_of(tasks)
        assert record.runs == [1, 1, 1, 1]
        assert all(later - sooner >= 1.0 for sooner, later in pairwise(began))


@both
async def test_fair_locks_have_no_local_queue(nodes: int, name: str) -> None:
    """Each task has a ticket of its own, in order of arrival, and a hold of its own."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        lease = await client(name, fair=True).acquire(timeout=None)
        tasks = []
        for who in range(4):
            record.clock.advance(0.001)
            tasks.append(record.tenure(client, name, who, fair=True))
            await turns(20)
        assert not local_queues_of(client)
        assert len(state_of(record.stores[0], name).queue) == 4
        await lease.release()
        await served(record, tasks)
        assert [who for _, _, who in record.tenures] == [0, 1, 2, 3]
        assert record.runs == [1, 1, 1, 1]


async def served(record: TenureRecord, tasks: list[asyncio.Task[None]]) -> None:
    """Let moments pass until all of them are; far less than any lease or renewal takes."""
    for _ in range(1000):
        await turns(5)
        if all(task.done() for task in tasks):
            break
        record.clock.advance(0.001)
    for task in tasks:
        task.result()


# -- remote waiters ----------------------------------------------------------------------------------------------------


class Busy:
    """A client whose tasks acquire the name again and again."""

    def __init__(self, client: Redlock, name: str, log: list[str], who: str, tasks: int) -> None:
        self._lock = client(name)
        self._log = log
        self._who = who
        self._stop = False
        self.fences: list[int] = []
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(tasks)]

    async def _go_on(self) -> None:
        while not self._stop:
            async with self._lock as lease:
                self._log.append(self._who)
                self.fences.append(lease.fence)
                await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop = True
        await all_of(self._tasks)


@pytest.mark.every_store
@each_kind_of_node
async def test_a_remote_waiter_gets_its_turn(make: Callable[..., Redlock], name: str) -> None:
    """One process has twenty tasks that acquire the name again and again. A single task of another process is served
    five times, each time after at most a few of their round trips."""
    ours, theirs = make(lease=LONG), make(lease=LONG)
    await theirs.health()  # it is connected
    log: list[str] = []
    waited: list[int] = []
    async with Busy(ours, name, log, "ours", 20) as busy, asyncio.timeout(LIMIT):
        for _ in range(5):
            while len(log) < 40 * (len(waited) + 1):  # they are at it
                await asyncio.sleep(0)
            before = len(log)
            waiting = asyncio.create_task(theirs(name).acquire(timeout=None))
            while not waiting.done() and not (await ours.inspect(name)).waiters:  # a database may take a while
                before = len(log)
            async with await waiting as lease:
                waited.append(len(log) - before)
                busy.fences.append(lease.fence)
    assert max(waited) <= 8 * SPAN
    assert rise(busy.fences)


@each_kind_of_node
async def test_two_local_queues_take_turns(make: Callable[..., Redlock], name: str) -> None:
    """Two processes of ten tasks each acquire the name again and again: neither process has it for long while the other
    waits."""
    log: list[str] = []
    first, second = make(lease=LONG), make(lease=LONG)
    await asyncio.gather(first.health(), second.health())
    async with Busy(first, name, log, "first", 10) as one, Busy(second, name, log, "second", 10) as two:
        async with asyncio.timeout(LIMIT):
            while min(len(one.fences), len(two.fences)) < 60:
                await asyncio.sleep(0)
        both_at_it = log[max(log.index("first"), log.index("second")) :]
    assert max(lengths(both_at_it)) <= 8 * SPAN
    assert len(lengths(both_at_it)) > 4
    assert all(map(rise, (one.fences, two.fences)))
    assert not set(one.fences) & set(two.fences)


async def test_a_hold_is_given_up_after_sixteen_at_the_most(name: str) -> None:
    """On a single node, exactly: a remote waiter has a ticket, no time passes, and the local queue is long. Only the
    remaining tenures of the current span come before the remote waiter; and so on, in turns."""
    record = TenureRecord(1)
    async with record.client() as ours, record.client() as theirs:
        holder = await ours(name).acquire(timeout=None)
        tasks = [record.tenure(ours, name, "ours") for _ in range(40)]
        tasks += [record.tenure(theirs, name, "theirs") for _ in range(40)]
        await turns(20)
        await holder.release()
        await all_of(tasks)
        assert rise(record.fences)
        runs = lengths(who for _, _, who in record.tenures)
        assert max(runs) == SPAN
        assert len(runs) >= 6


# -- a lease that was passed, and is not wanted any more -------------------------------------------------------------


@both
async def test_passed_to_a_waiter_that_is_cancelled(nodes: int, name: str) -> None:
    """The next waiter is cancelled in the turn in which the hold is passed to it: the waiter behind it has the same
    hold, and no other tenure gets the fence of the cancelled one."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        next_waiter = asyncio.create_task(client(name).acquire(timeout=None))
        next_one = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        await first.release()
        lease = await head
        await turns(20)
        record.tried()
        await lease.release()  # which passes it on, and returns before the next waiter runs
        assert not next_waiter.done()
        next_waiter.cancel()
        passed = await next_one
        assert next_waiter.cancelled()
        assert hold_of(passed) is hold_of(lease)
        assert passed.fence > lease.fence + 1
        assert record.tried() == 0
        await passed.release()
        await turns(20)
        assert not state_of(record.stores[0], name).holds
        assert not local_queues_of(client)


@both
async def test_passed_to_the_last_waiter_that_is_cancelled(nodes: int, name: str) -> None:
    """The local queue is empty after that: the hold is released."""
    record = TenureRecord(nodes)
    async with record.client() as client, record.client() as other:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        next_waiter = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        await first.release()
        lease = await head
        await lease.release()
        next_waiter.cancel()
        await asyncio.wait({next_waiter})
        assert next_waiter.cancelled()
        assert not local_queues_of(client)
        assert not holds_of(client)
        async with other(name, timeout=0):
            pass


@both
async def test_a_waiter_that_timed_out_is_skipped(nodes: int, name: str) -> None:
    """The time of the next waiter is up in the turn of the release: it returns None, and the one behind it has the
    hold."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        late = asyncio.create_task(client(name).acquire(timeout=1.0))
        behind = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        record.clock.advance(0.999)
        await first.release()
        lease = await head
        record.clock.advance(0.002)
        await lease.release()
        assert await late is None
        after = await behind
        assert hold_of(after) is hold_of(lease)
        await after.release()


@both
async def test_a_passed_lease_that_is_dropped(nodes: int, name: str) -> None:
    """The owner drops a lease that was passed to it, without a release. It warns, the hold expires, and the waiter
    behind it is served then."""
    record = TenureRecord(nodes)
    async with record.client(renew=False) as client:
        first = await client(name).acquire(timeout=None)
        dropped: list[int] = []

        async def drop() -> None:
            lease = await client(name).acquire(timeout=None)
            dropped.append(lease.fence)

        head = asyncio.create_task(client(name).acquire(timeout=None))
        dropper = asyncio.create_task(drop())
        behind = record.tenure(client, name)
        await turns(20)
        await first.release()
        lease = await head
        hold = hold_of(lease)
        with pytest.warns(ResourceWarning, match="dropped while held"):
            await lease.release()
            await dropper
            del dropper
            gc.collect()
        await turns(20)
        assert hold.over
        ends = record.clock.now() + settings_of(lease).lease
        await record.until(ends - 1.0)
        assert not record.tenures
        await record.until(ends + 1.0)
        await all_of([behind])
        assert record.fences > dropped > [lease.fence]
