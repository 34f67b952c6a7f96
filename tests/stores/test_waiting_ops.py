"""The queue of a node whose store carries out few ops at a time: what begins when, and what never does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock._clock import SYSTEM
from asynclock._options import RELEASE_TIMEOUT
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import ACQUIRE, EXTEND, RELEASE, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.backlog import LONGEST, SLICE
from asynclock.stores.sql import SQLStore
from asynclock.stores.sql.sending import Sending
from asynclock.stores.transactional import State, Step
from tests.support.fake_clock import FakeClock
from tests.support.gated_store import Gated, patient
from tests.support.probes import backlog_of, nodes_of, undelivered_by
from tests.support.sql_states import database_of
from tests.support.still_clock import forgotten, idle, turns
from tests.support.user_store import DictStore, state_of
from tests.support.waiters import LIMIT, LONG, SHORT, until

OWN_QUEUE = "the queue of this client has 1 requests that were not sent yet"


def waiting(client: Redlock, number: int) -> Coroutine[Any, Any, None]:
    """Return once so many ops wait in the queue of the client."""
    return until(lambda: backlog_of(client) == number)


async def test_f5_renewals_and_releases_begin_first(name: str) -> None:
    store = Gated()
    async with patient(store) as client:
        a, b = [await client(f"{name}:{each}").acquire(timeout=None) for each in "ab"]
        async with store.busy(client):
            asking = [asyncio.create_task(client(f"{name}:{each}").acquire()) for each in "cd"]
            await waiting(client, 2)
            keeping = asyncio.gather(a.extend(), b.release())
            await turns()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(keeping, *asking)
    order = [(EXTEND, "a"), (RELEASE, "b"), (ACQUIRE, "c"), (ACQUIRE, "d")]
    assert store.begun[:4] == [(verb, f"{name}:{each}") for verb, each in order]


async def test_f5_the_renewal_of_a_ticket_that_was_granted_begins_first(name: str) -> None:
    """Its owner does not use the notice of the grant before its own request is answered. It began after the acquires
    that were sent before it, and nobody worked under the name meanwhile."""

    class SlowFor(Gated):
        async def transact(self, keys: Sequence[str], step: Step) -> None:
            await (super() if keys[0].endswith("another") else super(Gated, self)).transact(keys, step)

    clock = FakeClock()
    store = SlowFor(clock)
    async with patient(store) as holds, patient(store) as waits:
        lease = await holds(name, renew=False).acquire(timeout=None)
        tasks = [asyncio.create_task(waits(name).acquire(timeout=None))]
        await until(lambda: state_of(store, name).queue)
        async with store.busy(waits):
            tasks.append(asyncio.create_task(waits(f"{name}:other").acquire(timeout=None)))
            await waiting(waits, 1)
            clock.advance(LONG / 2)  # the ticket is renewed
            await waiting(waits, 2)
            await lease.release()
            assert state_of(store, name).holds
            store.begun.clear()
        for held in await asyncio.gather(*tasks):
            assert held is not None
            await held.release()
    assert store.begun[:2] == [(ACQUIRE, name), (ACQUIRE, f"{name}:other")]


async def test_f5_the_ops_of_one_name_keep_their_order(name: str) -> None:
    """A release comes after an acquire of its name that was sent before, and both before the acquire of another one."""
    store, other = Gated(), f"{name}:other"
    async with patient(store) as client:
        semaphore = client.semaphore(name, 2)
        lease = await semaphore.acquire(timeout=None)
        async with store.busy(client):
            asking = [asyncio.create_task(each.acquire()) for each in (client(other), semaphore)]
            await waiting(client, 2)
            releasing = asyncio.create_task(lease.release())
            await turns()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(releasing, *asking)
    assert store.begun[:3] == [(ACQUIRE, name), (RELEASE, name), (ACQUIRE, other)]


async def test_f5_an_acquire_that_is_given_up_is_never_sent(name: str) -> None:
    """Nor is its release."""
    store = Gated()
    async with patient(store) as client:
        async with store.busy(client):
            asking = asyncio.create_task(client(name).acquire())
            await waiting(client, 1)
            asking.cancel()
            await asyncio.wait({asking})
            await waiting(client, 0)
        assert forgotten(client)
        assert not store.begun


async def test_f5_a_ticket_is_withdrawn_although_its_renewal_was_not_sent(name: str) -> None:
    """The ticket is in the database since its first sending."""
    store = Gated()
    async with patient(store) as holds, patient(store, lease=SHORT, node_timeout=1.0) as waits:
        lease = await holds(name).acquire(timeout=None)
        asking = asyncio.create_task(waits(name).acquire())
        await until(lambda: state_of(store, name).queue)
        async with store.busy(waits):
            await waiting(waits, 1)
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: not state_of(store, name).queue)
        assert store.begun == [(RELEASE, name)]
        await lease.release()


@pytest.mark.parametrize("timeout", [0.0, 0.1])
async def test_f5_a_caller_whose_time_ends_in_the_queue_learns_that(name: str, timeout: float) -> None:
    """It is told neither that the name is held, nor that the store is silent. Nothing is sent for it."""
    store = Gated()
    async with patient(store, node_timeout=0.1) as client:
        async with store.busy(client):
            with pytest.raises(QuorumUnavailable, match=OWN_QUEUE):
                await client(name).acquire(timeout=timeout)
        assert not store.begun


async def test_f5_a_caller_whose_round_failed_before_learns_why(name: str) -> None:
    """Its next round waits in the queue when its time ends. What the database said is the cause, not the queue."""

    class Full(Gated):
        full = False

        async def transact(self, keys: Sequence[str], step: Step) -> None:
            if self.full:
                raise RuntimeError("the disk is full")
            await super().transact(keys, step)

    clock = FakeClock()
    store = Full(clock)
    async with patient(store, patience=LONG) as client:
        store.full = True
        asking = asyncio.create_task(client(name).acquire(timeout=30.0))
        await until(lambda: bool(store.begun))
        await turns()
        store.full = False
        async with store.busy(client):
            while not backlog_of(client):
                clock.advance(0.1)
                await turns()
            clock.advance(30.0)
            with pytest.raises(QuorumUnavailable, match="the disk is full"):
                await asking


async def test_f5_an_acquire_that_fails_leaves_nothing_to_the_collector(name: str) -> None:
    """Thousands fail in a flood. Their errors, and the frames that the tracebacks keep, would fill its generations."""
    store = Gated()
    async with patient(store) as client, store.busy(client):
        gc.disable()
        try:
            try:
                await client(name).acquire(timeout=0.1)
            except QuorumUnavailable as error:
                left = weakref.ref(error)
            await turns()
            assert left() is None
        finally:
            gc.enable()


async def test_f5_the_time_of_an_op_counts_from_when_it_begins(name: str) -> None:
    """The wait in the queue is no part of the node_timeout, nor of the lease."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store, node_timeout=3.0) as client:
        async with store.busy(client):
            asking = asyncio.create_task(client(name).acquire(timeout=None))
            await waiting(client, 1)
            clock.advance(4.0)
        async with asyncio.timeout(LIMIT):
            lease = await asking
        assert lease.remaining > LONG - 4.0
        await lease.release()


async def test_f5_an_acquire_does_not_begin_if_its_caller_would_not_see_the_answer(name: str) -> None:
    """By the time that acquires take. But one whose caller has half of its time left always begins."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store) as client:
        with store.slow():
            first = asyncio.create_task(client(f"{name}:first").acquire(timeout=None))
            await turns()
            clock.advance(10.0)  # from now on an acquire may take a second
        await first
        async with store.busy(client):
            asking = asyncio.create_task(client(name).acquire(timeout=3.0))
            await waiting(client, 1)
            clock.advance(2.5)
        await turns()
        assert not store.begun
        clock.advance(1.0)
        with pytest.raises(QuorumUnavailable, match=OWN_QUEUE):
            await asking
        await waiting(client, 0)
        async with store.busy(client):
            asking = asyncio.create_task(client(name).acquire(timeout=3.0))
            await waiting(client, 1)
            clock.advance(1.25)
        async with asyncio.timeout(LIMIT):
            assert await asking


async def test_f5_a_last_question_of_a_blocked_loop_waits_for_its_turn(name: str) -> None:
    """The time of its caller is over, and another op is under way. It begins once that has ended, and the caller learns
    that the name is held."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store) as holder, patient(store) as client:
        lease = await holder(name).acquire(timeout=None)
        asking = asyncio.create_task(client(name).acquire(timeout=3.0))
        await until(lambda: idle(client))
        async with store.busy(client):
            clock.block(10.0)
            clock.advance(0.0)
            await waiting(client, 1)
        assert await asyncio.wait_for(asking, LIMIT) is None
        await lease.release()


async def test_f5_a_renewal_that_waits_is_not_asked_for_again(name: str) -> None:
    """The watchdog would lengthen the queue in which it waits. The lease counts from when the renewal begins."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store, lease=30.0, node_timeout=3.0) as client:
        lease = await client(name).acquire(timeout=None)
        async with store.busy(client):
            for _ in range(18):
                clock.advance(1.0)
                await turns(2)
        await turns()
        assert store.begun == [(EXTEND, name)]
        assert lease.remaining > 29.0
        await lease.release()


async def test_f5_the_queue_has_a_limit_and_fails_in_slices_with_the_database(name: str) -> None:
    """The acquires that wait learn at once that the database is lost, although a transaction is still under way. No
    turn of the loop tells all of them."""

    def ask(number: int) -> Ballot:
        op = Op(ACQUIRE, MUTEX, f"{name}:{number}", f"{number:032}|", LONG, memory=LONG)
        ballot = Ballot(op, 1, SYSTEM.now(), SYSTEM.now() + LIMIT)
        node.send(op, ballot)
        return ballot

    store = Gated()
    async with patient(store) as client:
        async with store.busy(client):
            (node,) = nodes_of(client)
            ballots = [ask(number) for number in range(LONGEST)]
            with pytest.raises(QuorumUnavailable, match="10001 requests that were not sent yet, and it is full"):
                await client(name).acquire(timeout=0.1)
            store.error = OSError("the database hung up")
            node.lost(store.error)
            for told in range(1, 4):
                await asyncio.sleep(0)
                assert sum(each.outcome is not None for each in ballots) <= told * SLICE
            await until(lambda: all(each.outcome is not None for each in ballots))
        assert all(each.errors() == [(0, store.error)] and each.left_nothing for each in ballots)
        store.error = None
        async with asyncio.timeout(LIMIT), client(name):
            pass
        assert store.begun == [(ACQUIRE, name), (RELEASE, name)]


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
async def test_f5_a_burst_of_acquires_is_served(
    database: str, request: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals overtake it, the leases that are held meanwhile are kept, and each of its acquires is served. On
    PostgreSQL they share a statement, whose process may stand still while others serve acquires: there it counts when
    it is sent."""
    store = SQLStore(
        f"sqlite:///{tmp_path}/locks.db" if database == "sqlite" else request.getfixturevalue("postgresql_url")
    )
    burst, granted, seen, sent = 500, 0, list[int](), Counter[str]()
    send = Sending._send  # noqa: SLF001

    def count(sending: Any, taken: Sequence[Any]) -> None:
        if taken[0].group == "extend":
            seen.extend([sent["acquire"]] * len(taken))
        sent[taken[0].group.split()[0].removeprefix("re")] += len(taken)
        send(sending, taken)

    async def extend(lease: Lease | None) -> None:
        assert lease is not None
        await lease.extend()
        if database == "sqlite":
            seen.append(granted)

    async def lock_for_a_moment(number: int) -> None:
        nonlocal granted
        async with client(f"{name}:{number}", timeout=None):
            granted += 1

    async with Redlock(store, lease=6.0, patience=LIMIT, node_timeout=2.0) as client:
        await until(lambda: database == "sqlite" or database_of(store).pushes)
        held = [await client(f"{name}:held:{number}").acquire(timeout=None) for number in range(30)]
        if database == "postgresql":
            monkeypatch.setattr(Sending, "_send", count)
        asking = [asyncio.create_task(lock_for_a_moment(number)) for number in range(burst)]
        await turns(2)
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*map(extend, held))
        assert seen[len(held) // 3] < burst / 2
        async with asyncio.timeout(2 * LIMIT):
            await asyncio.gather(*asking)
        assert all(lease.held for lease in held)
        await client.release_all()


async def test_f5_an_op_that_is_given_up_in_the_queue_lets_others_begin(name: str) -> None:
    """A multi waits behind a slow name, and an op of its other name waits behind the multi. When the multi is given up,
    that op begins, and so do those of all other names."""

    class Slow(DictStore):
        concurrency = 64

        async def transact(self, keys: Sequence[str], step: Step) -> None:
            if len(keys) == 1 and keys[0].endswith(":a"):
                await gate.wait()
            await super().transact(keys, step)

    gate, store = asyncio.Event(), Slow()
    async with Redlock(store, node_timeout=LIMIT, lease=LONG, max_lease=LONG) as client:
        first = asyncio.create_task(client(f"{name}:a").acquire(timeout=None))
        await turns()
        both = asyncio.create_task(client.multi(f"{name}:a", f"{name}:b").acquire(timeout=None))
        await waiting(client, 1)
        behind = asyncio.create_task(client(f"{name}:b").acquire(timeout=None))
        await waiting(client, 2)
        both.cancel()
        await asyncio.wait({both})
        async with asyncio.timeout(LIMIT):
            found = [await behind, await client(f"{name}:c").acquire(timeout=None)]
        gate.set()
        for lease in (*found, await first):
            await lease.release()


@pytest.mark.parametrize("turn", [1, 10], ids=["before-it-begins", "while-it-runs"])
async def test_f23_a_program_that_cancels_all_tasks_loses_no_release(name: str, turn: int) -> None:
    """As asyncio.run does after Ctrl-C: the tasks of the library are among them. The release is sent again, and what
    waits in the queue behind it begins."""
    store = Gated()
    async with patient(store) as client:
        lease = await client(name).acquire(timeout=None)
        with store.slow():
            releasing = asyncio.create_task(lease.release())
            asking = asyncio.create_task(client(f"{name}:other").acquire(timeout=None))
            await turns(turn)
            for task in asyncio.all_tasks() - {asyncio.current_task(), asking}:
                task.cancel()
            await asyncio.wait({releasing})
        async with asyncio.timeout(LIMIT):
            await (await asking).release()
        await until(lambda: not state_of(store, name).holds)


async def test_f23_releases_are_sent_after_a_program_cancelled_the_task_that_opens_again(name: str) -> None:
    """The database is down when the program cancels all tasks. The next op opens the node, and then releases do not
    wait for that task."""
    store = Gated()
    async with patient(store, patience=LIMIT) as client:
        lease = await client(name).acquire(timeout=None)
        store.error = OSError("the database hung up")
        (node,) = nodes_of(client)
        node.lost(store.error)
        await turns()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await turns()
        store.error = None
        async with asyncio.timeout(LIMIT):
            async with client(f"{name}:other"):
                pass
            await lease.release()
            await until(lambda: not state_of(store, name).holds)


async def test_f5_a_release_that_waits_delays_its_caller_for_a_limited_time(name: str) -> None:
    """It is carried out all the same."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store) as client:
        lease = await client(name).acquire(timeout=None)
        async with store.busy(client):
            releasing = asyncio.create_task(lease.release())
            await turns()
            clock.advance(RELEASE_TIMEOUT - 0.1)
            await turns()
            assert not releasing.done()
            clock.advance(0.2)
            await turns()
            assert releasing.done()
        await until(lambda: not state_of(store, name).holds)


async def test_c10_an_answer_that_came_while_the_loop_was_blocked_counts(name: str) -> None:
    """Its time is over when the loop runs again. An answer that does not come then is overdue."""
    clock = FakeClock()
    store = Gated(clock)
    async with patient(store, node_timeout=1.0, patience=0) as client:
        with store.slow():
            acquiring = asyncio.create_task(client(name).acquire(timeout=0))
            await turns()
            clock.block(5.0)
            clock.advance(0.0)
        lease = await acquiring
        assert lease
        with store.slow():
            acquiring = asyncio.create_task(client(f"{name}:other").acquire(timeout=0))
            await turns()
            clock.block(5.0)
            clock.advance(0.0)
            await turns()
            assert not acquiring.done()
            clock.advance(1.0)
            with pytest.raises(QuorumUnavailable, match="did not answer within 1 s"):
                await acquiring
        await lease.release()


async def test_f5_one_of_several_nodes_does_not_defer_an_op(name: str) -> None:
    """Two of five nodes grant at once, and a third one five seconds later, as its op waited in the queue of the client.
    The validity counts from the moment in which the op was sent to all of them."""
    clock = FakeClock()
    stores = [Gated(clock) for _ in range(5)]
    for number, store in enumerate(stores):
        store.label = f"gated {number}"
    async with Redlock(*stores, node_timeout=LIMIT, lease=LONG, max_lease=LONG) as client:
        with stores[3].slow(), stores[4].slow():
            with stores[2].slow():
                looking = asyncio.create_task(client.inspect("another"))
                await turns()
                acquiring = asyncio.create_task(client(name).acquire(timeout=None))
                await turns()
                clock.advance(5.0)
            async with asyncio.timeout(LIMIT):
                lease = await acquiring
            assert lease.remaining <= LONG - 5.0
        await asyncio.wait({looking})
        await lease.release()


async def test_f23_a_release_that_waits_again_is_sent_once(name: str) -> None:
    """A release that failed waits in the queue for longer than an op may. It keeps its place, and no other one of its
    id is put behind it."""

    class Failing(Gated):
        fails = False

        async def transact(self, keys: Sequence[str], step: Step) -> None:
            if self.fails:
                raise OSError("a lock was not free")
            await super().transact(keys, step)

    clock = FakeClock()
    store = Failing(clock)
    async with patient(store) as client:
        lease = await client(name).acquire(timeout=None)
        store.fails = True
        await lease.release()
        store.fails = False
        assert undelivered_by(client) == 1
        async with store.busy(client):
            for _ in range(20):
                clock.advance(1.0)
                await turns()
        await until(lambda: not undelivered_by(client))
        await turns()
        assert store.begun == [(RELEASE, name)]
    assert not state_of(store, name).holds


@pytest.mark.usefixtures("long_closes")
async def test_f23_releases_that_fail_keep_back_no_others_at_the_close(name: str) -> None:
    """All are tried once, and those that fail come behind the others then."""

    class Bad(DictStore):
        concurrency = 64
        down = False

        async def transact(self, keys: Sequence[str], step: Step) -> None:
            if self.down or keys[0].endswith(":bad"):
                await asyncio.sleep(0.1)  # what a locked row costs
                if self.down or self.states.get(keys[0], State()).holds:
                    raise OSError("a lock was not free")
            await super().transact(keys, step)

    store = Bad()
    client = Redlock(store, lease=LONG, max_lease=LONG)
    names = [f"{name}:{number}" for number in range(20)]
    all_names = (*names, *(f"{name}:{number}:bad" for number in range(10)))
    leases = [await client(each).acquire(timeout=None) for each in all_names]
    store.down = True
    await client.release_all()
    await until(lambda: undelivered_by(client) == len(leases))
    closing = asyncio.create_task(client.aclose())
    await turns()
    store.down = False
    await closing
    assert [each for each in names if state_of(store, each).holds] == []


async def test_f5_each_op_is_told_when_its_own_time_is_over(name: str) -> None:
    """Also one whose time is shorter than that of those before it."""
    clock = FakeClock()
    store = Gated(clock)
    store.concurrency = 3
    async with Redlock(store, patience=0, max_lease=100.0) as client:
        with store.slow():
            asked = list[asyncio.Task[Any]]()
            for lease in (50.0, 10.0, 100.0):
                lock = client(f"{name}:{lease}", lease=lease)
                asked.append(asyncio.create_task(lock.acquire(timeout=None)))
                await until(lambda: len(store.begun) == len(asked))
            ended = list[list[bool]]()
            for seconds in (1.1, 4.0, 5.0):  # a tenth of each lease
                clock.advance(seconds)
                await turns()
                ended.append([each.done() for each in asked])
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert ended == [[False, True, False], [True, True, False], [True, True, True]]
    assert all(isinstance(each, QuorumUnavailable) for each in found)
