"""A call of an open client waits once, for one future. So a cancel can arrive at one place only, and what it finds
there is either under way or done (`protocol/machine.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from itertools import pairwise
from types import coroutine
from typing import Any, TypeVar

import pytest

from asynclock import ConfigError, Lease, QuorumUnavailable, Redlock, SelfDeadlock
from asynclock.protocol import local_queue
from asynclock.protocol.rounds import Rounds, RoundsAtMany, RoundsAtOne
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.runtime import opening
from asynclock.stores.port import SameServer
from tests.support.default_keys import key_of
from tests.support.probes import (
    acquisitions_of,
    after_grant,
    left_over,
    nesting,
    new_id,
    nodes_of,
    replace_ask,
    session_of,
    set_fence,
    states_of,
)
from tests.support.still_clock import Still, all_of, idle, turns
from tests.support.waiters import LIMIT, until

_Result = TypeVar("_Result")

both = pytest.mark.parametrize("nodes", [1, 5])


@coroutine
def counted(call: Awaitable[_Result], waits: list[object]) -> Generator[Any, Any, _Result]:
    """The result of a call; notes what it waits for."""
    steps = call.__await__()
    try:
        waits.append(next(steps))
        while True:
            yield waits[-1]
            waits.append(steps.send(None))
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


async def on_its_own(call: Any) -> Any:
    """A task needs a coroutine."""
    return await call


@both
async def test_calls_without_contention_wait_once(name: str, nodes: int) -> None:
    """For each call of an open client, and makes no task for it."""
    still = Still(nodes, name)
    async with still.client() as client:
        tasks = asyncio.all_tasks()
        waits: list[object] = []
        lease = await counted(client(name).acquire(timeout=5), waits)
        assert lease is not None
        assert (len(waits), asyncio.all_tasks()) == (1, tasks)
        for call in (lease.extend(), client(name).locked(), lease.release()):
            waits.clear()
            await counted(call, waits)
            assert (len(waits), asyncio.all_tasks()) == (1, tasks)


@both
async def test_detach_and_adopt_wait_once(name: str, nodes: int) -> None:
    """Also with a second round, where the counters of the nodes differ."""
    still = Still(nodes, name)
    for counter, store in enumerate(still.stores):
        set_fence(store, name, 10**17 + counter)
    async with still.held() as (_, lease), still.client() as other:
        tasks = asyncio.all_tasks()
        waits: list[object] = []
        handle = await counted(lease.detach(), waits)
        assert (len(waits), asyncio.all_tasks()) == (1, tasks)
        for counter, store in enumerate(still.stores):
            held = states_of(store)[key_of(name)]
            states_of(store)[key_of(name)] = replace(held, fence=held.fence + counter)
        waits.clear()
        still.asked()
        adopted = await counted(other.adopt(handle), waits)
        assert (len(waits), asyncio.all_tasks()) == (1, tasks)
        assert adopted.fence > lease.fence
        assert ([verb for verb, _ in still.asked()].count(Verb.EXTEND) > 0) is (nodes > 1)
        await adopted.release()


async def test_an_adoption_in_an_outage_waits_once(name: str) -> None:
    """With a pause between two rounds, for the whole patience."""
    still = Still(1, name)
    async with still.held() as (_, lease), still.client(patience=3.0) as other:
        handle = await lease.detach()
        waits: list[object] = []
        ask = replace_ask(other, lambda op, within, on_settled: unreachable(op, still.clock.now(), on_settled))
        adopting = asyncio.create_task(on_its_own(counted(other.adopt(handle), waits)))
        await turns()
        await still.until(still.clock.now() + 4.0)
        with pytest.raises(QuorumUnavailable):
            await adopting
        replace_ask(other, ask)
        assert len(waits) == 1
        assert left_over(other) == {}


def unreachable(op: Op, now: float, on_settled: Callable[[Ballot], object]) -> Ballot:
    """A round that fails at once: in the next turn."""
    ballot = Ballot(op, 1, now, now + 1.0, on_settled)
    asyncio.get_running_loop().call_soon(lambda: ballot.fail(0, ConnectionError("down"), maybe=False))
    return ballot


@both
async def test_the_tasks_of_one_owner_wait_once(name: str, nodes: int) -> None:
    """The first asks; the others enter with it. Entering again waits for nothing."""
    still = Still(nodes, name)
    seen: list[list[object]] = []
    leases: list[Lease] = []

    async def enters(timeout: float | None) -> None:
        seen.append([])
        lock = client(name, reentrant=True, owner="us")
        if (lease := await counted(lock.acquire(timeout=timeout), seen[-1])) is not None:
            leases.append(lease)

    async with still.held() as (_, lease), still.client() as client:
        tasks = [asyncio.create_task(enters(None)) for _ in range(3)] + [asyncio.create_task(enters(5.0))]
        await until(lambda: idle(client))
        first = tasks.pop(0)
        first.cancel()  # the next of the owner asks
        await asyncio.wait({first})
        await still.until(still.clock.now() + 6.0)
        await lease.release()
        await all_of(tasks)
        assert [len(waits) for waits in seen] == [1] * 4
        assert len({each.fence for each in leases}) == 1
        assert len(leases) == 2
        await enters(None)
        assert seen[-1] == []
        for each in leases:
            await each.release()
        assert left_over(client) == {}


async def test_many_tasks_of_one_owner_enter_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks of the loop run in between."""
    monkeypatch.setattr(local_queue, "SLICE", -1.0)  # one task takes longer
    still = Still(1, name)
    async with still.held() as (_, lease), still.client() as client:
        lock = client(name, reentrant=True, owner="us")
        tasks = [asyncio.create_task(lock.acquire(timeout=None)) for _ in range(20)]
        await until(lambda: idle(client))
        await lease.release()
        entered: list[int] = []
        while not all(each.done() for each in tasks):
            await asyncio.sleep(0)
            entered.append(sum(each.done() for each in tasks))
        assert max(after - before for before, after in pairwise(entered)) == 1
        for each in tasks:
            entered_one = each.result()
            assert entered_one is not None
            await entered_one.release()


@both
async def test_a_lock_beside_the_own_one_waits_once(name: str, nodes: int) -> None:
    """A task that has one permit tries once for another, and then waits, where it does not wait for itself."""
    still = Still(nodes, name)
    async with still.client() as client, still.client() as other:
        mine = await client.semaphore(name, 3).acquire(timeout=0)
        others = [await other.semaphore(name, 3).acquire(timeout=None) for _ in range(2)]
        waits: list[object] = []
        with pytest.raises(SelfDeadlock):
            await counted(client.semaphore(name, 1).acquire(timeout=5), waits)
        assert len(waits) == 1
        task = asyncio.current_task()
        release = asyncio.get_running_loop().call_soon
        waits.clear()
        assert mine is not None
        seen: list[object] = []

        def free() -> None:
            if idle(client):
                seen.append(asyncio.create_task(others[0].release()))
            else:
                release(free)

        release(free)
        again = await counted(client.semaphore(name, 3).acquire(timeout=None), waits)
        assert task is asyncio.current_task()
        assert (len(waits), len(seen)) == (1, 1)
        for lease in (again, mine, others[1]):
            await lease.release()
        assert left_over(client) == {}


async def test_a_lock_beside_the_own_one_that_is_lost_early_is_asked_for_with_all_its_time(name: str) -> None:
    """It was granted at the one try, and lost before its task woke. The next claim is that of the caller."""
    still = Still(1, name)
    async with still.client() as client:
        mine = await client.semaphore(name, 3).acquire(timeout=0)
        assert mine is not None
        again: list[float | None] = []

        def lose() -> None:
            list(session_of(client).machine.holds.of(name))[-1].lose("taken")

        def watch() -> None:
            (acquires,) = acquisitions_of(client)
            again.append(acquires.again().terms.timeout)
            after_grant(acquires, lose)

        asyncio.get_running_loop().call_soon(watch)
        second = await client.semaphore(name, 3).acquire(timeout=5)
        assert second is not None
        assert second.held
        assert again == [5]
        for lease in (second, mine):
            await lease.release()


@both
async def test_a_multi_lock_waits_once(name: str, nodes: int) -> None:
    """Its acquire beside an own hold, its release, and its question whether it is locked."""
    still = Still(nodes, name)
    async with still.client() as client:
        several = client.multi(client.semaphore(name, 3), client.read(f"{name}:b"), f"{name}:c")
        own = await client.read(f"{name}:b").acquire(timeout=None)
        tasks = asyncio.all_tasks()
        waits: list[object] = []
        lease = await counted(several.acquire(timeout=5), waits)
        assert lease is not None
        assert (len(waits), asyncio.all_tasks()) == (1, tasks)
        for call in (several.locked(), lease.extend(), lease.release(), several.locked()):
            waits.clear()
            await counted(call, waits)
            assert (len(waits), asyncio.all_tasks()) == (1, tasks)
        await own.release()


@both
async def test_an_acquire_that_is_refused_and_notified_waits_once(name: str, nodes: int) -> None:
    """However many rounds it needs: here a refusal, renewals of its ticket, a notice, and the round that wins."""
    still = Still(nodes, name)
    async with still.held() as (_, lease), still.client() as other:
        waits: list[object] = []
        waiting = asyncio.create_task(on_its_own(counted(other(name).acquire(timeout=None), waits)))
        await until(lambda: idle(other))
        await still.until(still.clock.now() + 25.0)
        assert len([verb for verb, _ in still.asked() if verb is Verb.WAIT or verb is Verb.ACQUIRE]) > 2
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert len(waits) == 1
        await got.release()


@both
async def test_tasks_of_one_process_wait_once(name: str, nodes: int) -> None:
    """In the local queue, whether a hold is passed on, or each asks; and where the time is up."""
    still = Still(nodes, name)
    seen: list[list[object]] = []

    async def enters(timeout: float | None) -> bool:
        seen.append([])
        lease = await counted(client(name).acquire(timeout=timeout), seen[-1])
        if lease is not None:
            await lease.release()
        return lease is not None

    async with still.held() as (_, lease), still.client() as client:
        tasks = [asyncio.create_task(enters(5.0 if each % 2 else None)) for each in range(10)]
        await until(lambda: idle(client))
        await still.until(still.clock.now() + 6.0)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            assert await asyncio.gather(*tasks) == [True, False] * 5
    assert [len(waits) for waits in seen] == [1] * 10


@both
async def test_an_error_while_a_task_gives_up_lets_the_next_one_ask(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the local queue is cancelled, and its cleaning up fails. The second gets the lock."""
    still, rounds = Still(nodes, name), RoundsAtOne if nodes == 1 else RoundsAtMany
    leave = rounds.leave

    def leave_and_fail(self: Rounds) -> None:
        leave(self)
        raise MemoryError

    async with still.held() as (_, lease), still.client() as other:
        first, second = (asyncio.create_task(other(name).acquire(timeout=None)) for _ in range(2))
        await until(lambda: idle(other))
        with monkeypatch.context() as failing:
            failing.setattr(rounds, "leave", leave_and_fail)
            first.cancel()
            with pytest.raises(MemoryError):
                await first
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await second).release()


@both
async def test_a_grant_in_the_turn_of_a_cancel_is_given_back(name: str, nodes: int) -> None:
    """The grant comes first, and the task is cancelled before it wakes; or the other way round. Nothing is left."""
    for grant_first in (True, False):
        still = Still(nodes, name)
        async with still.held() as (_, lease), still.client() as other:
            waiting = asyncio.create_task(other(name).acquire(timeout=None))
            await until(lambda: idle(other))
            (acquires,) = acquisitions_of(other)
            if grant_first:
                after_grant(acquires, waiting.cancel)
                await lease.release()
            else:
                releasing = asyncio.create_task(lease.release())
                while not acquires.unanswered_round and idle(other):
                    await asyncio.sleep(0)
                waiting.cancel()
                await releasing
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await turns()
            assert left_over(other) == {}
            async with other(name, timeout=0):
                pass


async def test_a_hold_that_comes_as_the_client_closes_is_given_back(name: str) -> None:
    """The client begins to close between the grant and the turn in which the task wakes."""
    still = Still(1, name)
    async with still.held() as (_, lease):
        other = still.client()
        await other.__aenter__()
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        closing: list[asyncio.Task[None]] = []

        def close() -> None:
            closing.append(asyncio.create_task(other.aclose()))
            session_of(other).closed = True  # as in the first step of that task

        after_grant(acquires, close)
        await lease.release()
        with pytest.raises(ConfigError, match="closed"):
            await waiting
        await asyncio.gather(*closing)
        assert left_over(other) == {}
    async with still.client() as third, third(name, timeout=0):
        pass


async def test_a_failure_at_once_is_an_event_of_the_next_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fails inside the call, as one that is known to be down: no event is delivered inside another one. So
    the end of one acquire does not run through all waiters of its queue in one stack."""
    deepest = nesting(monkeypatch)
    dead = [f"unix:///nowhere/{each}" for each in range(3)]
    client = Redlock(*dead, patience=0.1, connect_timeout=0.1)
    try:
        tasks = [asyncio.create_task(client(name).acquire(timeout=None)) for _ in range(200)]
        done, _ = await asyncio.wait(tasks, timeout=LIMIT)
        assert len(done) == 200
        assert {type(each.exception()).__name__ for each in done} == {"QuorumUnavailable"}
        assert deepest() == 1
    finally:
        await client.aclose()


# -- ends that meet each other -----------------------------------------------------------------------------------------


@both
async def test_a_hold_that_nobody_took_does_not_rest(name: str, nodes: int) -> None:
    """min_hold is for the work of a holder. A caller that was cancelled before it had the lease has done none."""
    still = Still(nodes, name)
    async with still.held() as (_, lease), still.client() as other:
        waiting = asyncio.create_task(other(name, min_hold=20).acquire(timeout=None))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        after_grant(acquires, waiting.cancel)
        await lease.release()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await turns()
        async with other(name, timeout=0):
            pass


async def test_an_error_in_the_turn_of_a_cancel_is_no_error_that_nobody_saw(name: str) -> None:
    """asyncio reports an exception of a future that nobody reads."""
    still, reported = Still(1, name), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with still.held(), still.client() as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        acquires.fail(QuorumUnavailable("gone"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del acquires, waiting
        gc.collect()
        assert reported == []


async def test_an_error_of_a_first_use_that_nobody_reads_is_not_logged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two urls are found to be those of one server, and the client closes in that turn: its caller gets the error of a
    closed client."""
    still, reported = Still(3, name), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    client = still.client()

    def close(_: object) -> None:
        closing = client.aclose()
        closing.send(None)
        closing.close()

    async def connects(*_: object, **__: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(close)
        await asyncio.sleep(0)
        raise SameServer("twice")

    monkeypatch.setattr(opening, "open_nodes", connects)
    with pytest.raises(ConfigError, match="closed"):
        await client(name).acquire(timeout=5)
    await client.aclose()
    gc.collect()
    assert reported == []


async def test_f4_the_end_of_a_coroutine_only_schedules(name: str) -> None:
    """The collector may destroy a coroutine that waits, between any two steps of another acquire. It is given up in a
    turn of its own."""
    still = Still(1, name)
    async with still.held(), still.client() as other:
        waiting = other(name).acquire(timeout=None)
        for _ in range(3):  # the rounds of the store need turns of the loop
            with contextlib.suppress(StopIteration):
                if not acquisitions_of(other):
                    waiting.send(None)
            await turns()
        assert idle(other)
        waiting.close()
        assert acquisitions_of(other)
        await turns()
        assert left_over(other) == {}


async def test_no_waiter_asks_while_its_client_closes(name: str) -> None:
    """The asker gives up, and the next one of its queue would send a round that is undone at once."""
    still = Still(1, name)
    async with still.held(), still.client() as other:
        tasks = [asyncio.create_task(other(name).acquire(timeout=None)) for _ in range(3)]
        await until(lambda: idle(other))
        still.asked()
        await other.aclose()
        for each in tasks:
            with pytest.raises(ConfigError, match="closed"):
                await each
        assert {verb for verb, _ in still.asked()} <= {Verb.RELEASE}


async def test_many_waiters_whose_turns_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its error, and the next one its turn, however many there are: not all in one stack."""
    still = Still(1, name)
    async with still.held() as (_, lease), still.client() as other:
        tasks = [asyncio.create_task(other(name).acquire(timeout=None)) for _ in range(2000)]
        await until(lambda: idle(other))
        monkeypatch.setattr(RoundsAtOne, "send", failing)
        tasks[0].cancel()
        done, _ = await asyncio.wait(tasks[1:], timeout=LIMIT)
        assert {type(each.exception()) for each in done} == {ArithmeticError}
        assert len(done) == 1999
        monkeypatch.undo()
        await lease.release()


def failing(*_: object, **__: object) -> None:
    raise ArithmeticError


async def test_a_loss_in_a_blocked_loop_is_no_outage(name: str) -> None:
    """The hold is lost before its task wakes, and the time of the caller is over: it asks once more, and waits for the
    answer."""
    still = Still(1, name)
    async with still.held() as (_, lease), still.client() as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=20))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)

        def block() -> None:
            still.clock.block(40.0)  # longer than the lease
            asyncio.get_running_loop().call_soon(timers)

        def timers() -> None:
            if not waiting.done():
                still.clock.advance(0.0)
                asyncio.get_running_loop().call_soon(timers)

        after_grant(acquires, block)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert got is not None
        await got.release()


async def test_a_late_vote_with_a_greater_counter(name: str) -> None:
    """Three of five nodes have granted, with different counters, and the token is raised there. The votes of the others
    come meanwhile, from greater counters: the token stays, and the hold counts."""
    still = Still(5, name)
    for store, counter in zip(still.stores, (1, 2, 3, 4, 5), strict=True):
        set_fence(store, name, 10**17 + counter)
    async with still.client() as client:
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        assert lease.fence == 10**17 + 4
        await lease.release()
        again = await client(name).acquire(timeout=0)
        assert again is not None
        assert again.fence > lease.fence
        await again.release()


async def test_nothing_answers_inside_a_call(name: str) -> None:
    """A node that fails at once, as one that is known to be down: the release, the renewal and the acquire that ask it
    learn that in the next turn."""
    client = Redlock("unix:///nowhere/0", patience=600, connect_timeout=0.1)
    try:
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: bool(acquisitions_of(client)) and isinstance(nodes_of(client)[0].error, OSError))
        settled: list[Ballot] = []
        quorum = session_of(client).quorum
        for verb in (Verb.ACQUIRE, Verb.RELEASE):
            ballot = quorum.ask(Op(verb, MUTEX, name, new_id(client, 1), 9.0), 1.0, on_settled=settled.append)
            assert (ballot.outcome, ballot.silent(), settled) == (None, [0], [])
            await asyncio.sleep(0)
            assert settled == [ballot]
            settled.clear()
        waiting.cancel()
        await asyncio.wait({waiting})
    finally:
        await client.aclose()
