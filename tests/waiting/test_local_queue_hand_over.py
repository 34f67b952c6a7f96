"""The local line: tasks of one process pass a hold on without a round trip, and never for long (`local_queue.py`)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, Self

import pytest

from asynclock import Redlock
from asynclock.acquire.local_queue import PASSING, SPAN, may_pass
from tests.support.probes import hold_of, holds_of, last_fence, local_queues_of, settings_of
from tests.support.still_clock import Stand, all_of, lengths, turns
from tests.support.waiters import LIMIT, LONG, rise

both = pytest.mark.parametrize("nodes", [1, 5])


# -- what is told apart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_trip", "left", "fences", "passes"),
    [
        (0.0, 29.0, 15, True),
        (0.0, 29.0, 1, True),
        (0.0, 29.0, 0, False),  # the span is used up
        (0.0, 29.0, -1, False),
        (0.0049, 29.0, 1, True),
        (0.0051, 29.0, 15, False),  # who waits elsewhere has waited long enough
        (-0.001, 29.0, 1, True),  # a clock that other threads read, too
        (0.0, 10.001, 1, True),
        (0.0, 9.999, 15, False),  # too little of the lease to begin anything with
        (0.0, 0.0, 15, False),
        (0.0, -1.0, 15, False),
        (0.0051, 9.0, 0, False),
    ],
)
def test_when_a_hold_may_be_passed_on(since_trip: float, left: float, fences: int, passes: bool) -> None:
    """While there are fences, within 5 ms of the last round trip, with a third of the lease to go; all three."""
    now = 1000.0
    assert may_pass(now, now - since_trip, now + left, 30.0, fences) is passes


def test_the_bounds_that_are_promised() -> None:
    """docs and DESIGN speak of sixteen tenures, and of five milliseconds."""
    assert (SPAN, PASSING) == (16, 0.005)


# -- a line whose clock the test moves -------------------------------------------------------------------------------


@both
async def test_sixteen_tenures_a_round_trip(nodes: int, name: str) -> None:
    """Fifty tasks of one process, no time passing: the first asks for itself, then sixteen at a time share one hold,
    each with the next fence; the servers hear of no more than the holds."""
    stand = Stand(nodes)
    async with stand.client() as client:
        await all_of([stand.tenure(client, name) for _ in range(50)])
        assert stand.runs == [1, 16, 16, 16, 1]
        assert rise(stand.fences)
        for hold, tenures in groupby(stand.tenures, lambda each: each[0]):
            fences = [fence for _, fence, _ in tenures]
            assert fences == list(range(fences[0], fences[0] + len(fences)))
            assert fences[-1] <= hold.last_fence
        assert stand.tried() == 5
        assert not local_queues_of(client)


@both
@pytest.mark.parametrize(("takes", "each"), [(0.002, 3), (0.0049, 2), (0.0051, 1), (0.0, 16)])
async def test_five_milliseconds_a_round_trip(nodes: int, name: str, takes: float, each: int) -> None:
    """A tenure that ends later than that after the round trip is followed by another round trip."""
    stand = Stand(nodes)
    async with stand.client() as client:
        await all_of([stand.tenure(client, name, takes=takes) for _ in range(1 + 3 * each)])
        assert stand.runs == [1, each, each, each] if each > 1 else [1, 1, 1, 1]
        assert rise(stand.fences)


@both
async def test_a_later_hold_has_greater_fences_than_the_whole_span(nodes: int, name: str) -> None:
    """A span that was not used up is lost: who comes next, from anywhere, is above all of it."""
    stand = Stand(nodes)
    async with stand.client() as client, stand.client() as other:
        await all_of([stand.tenure(client, name) for _ in range(5)])
        last = stand.tenures[-1][0]
        assert last.last_fence > stand.fences[-1]
        async with other(name) as lease:
            assert lease.fence > last.last_fence


@both
async def test_nobody_behind_no_span(nodes: int, name: str) -> None:
    """Who has nobody behind takes one fence, and no more."""
    stand = Stand(nodes)
    async with stand.client() as client, client(name) as lease:
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


async def in_line(stand: Stand, client: Redlock, name: str, *terms: dict[str, Any]) -> list[asyncio.Task[None]]:
    """A task that holds the name by a round trip with fences to spare, and, in line behind it, one for each terms."""
    first = await client(name).acquire(timeout=None)
    tasks = [stand.tenure(client, name, "head"), *(stand.tenure(client, name, i, **its) for i, its in enumerate(terms))]
    await turns(20)
    await first.release()
    return tasks


@both
@pytest.mark.parametrize("terms", OTHER_TERMS, ids=lambda terms: next(iter(terms)))
async def test_locks_of_other_options_are_not_passed_to(nodes: int, name: str, terms: dict[str, Any]) -> None:
    """What a hold was taken under is kept for all its tenures; whoever wants another asks, and is served in turn."""
    stand = Stand(nodes)
    async with stand.client() as client:
        tasks = await in_line(stand, client, name, terms, {})
        for _ in range(20):  # min_hold rests for a while
            await turns(20)
            stand.clock.advance(0.5)
        await all_of(tasks)
        assert [who for _, _, who in stand.tenures] == ["head", 0, 1]
        assert stand.runs == [1, 1, 1]


@both
async def test_another_timeout_is_no_other_option(nodes: int, name: str) -> None:
    """How long somebody would have waited is of no matter to the hold."""
    stand = Stand(nodes)
    async with stand.client(timeout=90.0) as client:
        await all_of(await in_line(stand, client, name, {"timeout": 1.0}, {"timeout": None}, {"timeout": 90.0}))
        assert stand.runs == [4]


@both
async def test_a_min_hold_is_not_passed_on(nodes: int, name: str) -> None:
    """Each tenure keeps the name taken for as long, by the server: so each asks for itself."""
    stand = Stand(nodes)
    async with stand.client(min_hold=1.0) as client:
        tasks = [stand.tenure(client, name) for _ in range(4)]
        began: list[float] = []
        for _ in range(200):
            await turns(20)
            while len(began) < len(stand.tenures):
                began.append(stand.clock.now())
            stand.clock.advance(0.05)
        await all_of(tasks)
        assert stand.runs == [1, 1, 1, 1]
        assert all(later - sooner >= 1.0 for sooner, later in pairwise(began))


@both
async def test_fair_locks_have_no_line(nodes: int, name: str) -> None:
    """Each task has a ticket of its own, in the order of arrival, and a hold of its own."""
    stand = Stand(nodes)
    async with stand.client() as client:
        lease = await client(name, fair=True).acquire(timeout=None)
        tasks = []
        for who in range(4):
            stand.clock.advance(0.001)
            tasks.append(stand.tenure(client, name, who, fair=True))
            await turns(20)
        assert not local_queues_of(client)
        assert len(stand.stores[0].state(name).queue) == 4
        await lease.release()
        await served(stand, tasks)
        assert [who for _, _, who in stand.tenures] == [0, 1, 2, 3]
        assert stand.runs == [1, 1, 1, 1]


async def served(stand: Stand, tasks: list[asyncio.Task[None]]) -> None:
    """Let moments pass until all of them are; far less than any lease or renewal takes."""
    for _ in range(1000):
        await turns(5)
        if all(task.done() for task in tasks):
            break
        stand.clock.advance(0.001)
    for task in tasks:
        task.result()


# -- who waits elsewhere ---------------------------------------------------------------------------------------------


class Busy:
    """A client whose tasks want the name again and again."""

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


async def test_who_waits_elsewhere_gets_its_turn(make: Callable[..., Redlock], name: str) -> None:
    """One process has twenty tasks that never tire. A single task of another is served ten times, each time after a
    few of their round trips at the most."""
    ours, theirs = make(lease=LONG), make(lease=LONG)
    await theirs.health()
    log: list[str] = []
    waited: list[int] = []
    async with Busy(ours, name, log, "ours", 20) as busy, asyncio.timeout(LIMIT):
        for _ in range(10):
            while len(log) < 40 * (len(waited) + 1):  # they are at it
                await asyncio.sleep(0)
            before = len(log)
            async with theirs(name) as lease:
                waited.append(len(log) - before)
                busy.fences.append(lease.fence)
    assert max(waited) <= 8 * SPAN
    assert rise(busy.fences)


async def test_two_lines_take_turns(make: Callable[..., Redlock], name: str) -> None:
    """Two processes of ten tasks that never tire: neither has the name for long while the other waits."""
    log: list[str] = []
    first, second = make(lease=LONG), make(lease=LONG)
    await first.health()
    await second.health()
    async with Busy(first, name, log, "first", 10) as one, Busy(second, name, log, "second", 10) as two:
        async with asyncio.timeout(LIMIT):
            while min(len(one.fences), len(two.fences)) < 100:
                await asyncio.sleep(0)
        both_at_it = log[max(log.index("first"), log.index("second")) :]
    assert max(lengths(both_at_it)) <= 8 * SPAN
    assert len(lengths(both_at_it)) > 4
    assert rise(one.fences)
    assert rise(two.fences)
    assert not set(one.fences) & set(two.fences)


async def test_a_hold_is_given_up_after_sixteen_at_the_most(name: str) -> None:
    """At a node alone, exactly: somebody elsewhere has a ticket, no time passes, and the line is long. The tenures of
    the span that is under way are all that come before; and so on, in turns."""
    stand = Stand(1)
    async with stand.client() as ours, stand.client() as theirs:
        holder = await ours(name).acquire(timeout=None)
        tasks = [stand.tenure(ours, name, "ours") for _ in range(40)]
        tasks += [stand.tenure(theirs, name, "theirs") for _ in range(40)]
        await turns(20)
        await holder.release()
        await all_of(tasks)
        assert rise(stand.fences)
        runs = lengths(who for _, _, who in stand.tenures)
        assert max(runs) == SPAN
        assert len(runs) >= 6


# -- a lease that was passed, and is not wanted any more -------------------------------------------------------------


@both
async def test_passed_to_somebody_who_is_cancelled(nodes: int, name: str) -> None:
    """The heir is cancelled in the turn in which it inherits: the next in line has the same hold, and the fence that
    was the heir's goes to nobody else."""
    stand = Stand(nodes)
    async with stand.client() as client:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        heir = asyncio.create_task(client(name).acquire(timeout=None))
        next_one = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        await first.release()
        lease = await head
        await turns(20)
        stand.tried()
        await lease.release()  # which passes it on, and comes back before the heir runs
        assert not heir.done()
        heir.cancel()
        passed = await next_one
        assert heir.cancelled()
        assert hold_of(passed) is hold_of(lease)
        assert passed.fence > lease.fence + 1
        assert stand.tried() == 0
        await passed.release()
        await turns(20)
        assert not stand.stores[0].state(name).holds
        assert not local_queues_of(client)


@both
async def test_passed_to_the_last_who_is_cancelled(nodes: int, name: str) -> None:
    """Nobody is left in line: the hold is given back."""
    stand = Stand(nodes)
    async with stand.client() as client, stand.client() as other:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        heir = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        await first.release()
        lease = await head
        await lease.release()
        heir.cancel()
        await asyncio.wait({heir})
        assert heir.cancelled()
        assert not local_queues_of(client)
        assert not holds_of(client)
        async with other(name, timeout=0):
            pass


@both
async def test_passed_over_who_has_just_given_up(nodes: int, name: str) -> None:
    """The time of the next in line is up in the very turn of the release: it answers None, and the one behind it has
    the hold."""
    stand = Stand(nodes)
    async with stand.client() as client:
        first = await client(name).acquire(timeout=None)
        head = asyncio.create_task(client(name).acquire(timeout=None))
        late = asyncio.create_task(client(name).acquire(timeout=1.0))
        behind = asyncio.create_task(client(name).acquire(timeout=None))
        await turns(20)
        stand.clock.advance(0.999)
        await first.release()
        lease = await head
        stand.clock.advance(0.002)
        await lease.release()
        assert await late is None
        after = await behind
        assert hold_of(after) is hold_of(lease)
        await after.release()


@both
async def test_a_passed_lease_that_is_dropped(nodes: int, name: str) -> None:
    """Whoever it was passed to lets go of it without giving it back: it says so, the hold ends by itself, and who
    stands behind is served then."""
    stand = Stand(nodes)
    async with stand.client(renew=False) as client:
        first = await client(name).acquire(timeout=None)
        dropped: list[int] = []

        async def drop() -> None:
            lease = await client(name).acquire(timeout=None)
            dropped.append(lease.fence)

        head = asyncio.create_task(client(name).acquire(timeout=None))
        dropper = asyncio.create_task(drop())
        behind = stand.tenure(client, name)
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
        ends = stand.clock.now() + settings_of(lease).lease
        await stand.until(ends - 1.0)
        assert not stand.tenures
        await stand.until(ends + 1.0)
        await all_of([behind])
        assert stand.fences > dropped > [lease.fence]
