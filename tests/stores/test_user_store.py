"""A store that a user writes. The tests of all kinds of locks run over it, too (`make` in conftest.py). Here are the
effects of a transaction that is slow, or fails."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.locks import health
from asynclock.rules.model import ACQUIRE, RELEASE, Entry, Op, Queueing, Serve
from asynclock.rules.mutex import MUTEX
from asynclock.runtime.opening import check_votes
from asynclock.stores import Clock
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Node, Reconnecting, Refused
from asynclock.stores.transactional import Change, Notice, State, Step, TransactionalNode
from tests.support.probes import intercept_notices, nodes_of
from tests.support.still_clock import turns
from tests.support.user_store import DictStore, state_of
from tests.support.waiters import LIMIT, LONG, until

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"


def test_the_page_shows_the_store_that_is_tested() -> None:
    """Word for word."""
    source = (Path(__file__).parents[1] / "support" / "user_store.py").read_text()
    shown = source[source.index("class DictStore") : source.index("def state_of")].strip()
    assert shown in PAGE.read_text()
    assert len(shown.splitlines()) <= 40


async def test_the_store_of_the_page_forgets_names_that_are_free() -> None:
    """Once their fencing tokens need not be kept any more."""
    store = DictStore()
    for number in range(1_000):
        ended = State(fence=number + 1, fence_ends=store.now() - 1)
        await store.transact([f"free:{number}"], lambda states, now, after=ended: Change([after]))
    assert len(store.states) < 300


async def test_the_store_of_the_page_keeps_names_that_are_held() -> None:
    """Also while it forgets others."""
    store = DictStore()
    held = State((Entry("1" * 32 + "|", store.now() + LONG),))
    for number in range(1_000):
        await store.transact([f"held:{number}"], lambda states, now: Change([held]))
    assert len(store.states) == 1_000


async def test_a_jump_of_the_wall_clock_ends_no_lease_in_the_store_of_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set forward by a day."""
    store = DictStore()
    async with Redlock(store, lease=LONG) as client, client(name):
        monkeypatch.setattr(time, "time", lambda today=time.time: today() + 86_400)
        assert state_of(store, name).holds
        assert await client(name).locked()


class Odd(DictStore):
    """Its transactions wait while it is `stuck`, and fail with `error`, before or after they were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.stuck: asyncio.Event | None = None
        self.error: Exception | None = None
        self.committed = False

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        assert not self.running  # one at a time, of one client
        self.running += 1
        try:
            if self.stuck is not None:
                await self.stuck.wait()
            if self.error is None or self.committed:
                await super().transact(keys, step)
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1


async def test_a_transaction_that_takes_too_long_casts_no_vote(name: str) -> None:
    """The caller gets an error in time. The undo comes after the transaction and deletes what it created."""
    store = Odd()
    async with Redlock(store, node_timeout=1.0, lease=5.0, patience=0) as client:
        await client.health()
        store.stuck = asyncio.Event()
        with pytest.raises(QuorumUnavailable, match="did not answer"):
            await client(name).acquire(timeout=0)
        store.stuck.set()
        store.stuck = None
        await until(lambda: name in str(list(store.states)))
        async with asyncio.timeout(LIMIT), client(name):
            pass


@pytest.mark.parametrize("committed", [False, True])
async def test_a_transaction_that_fails_is_ambiguous(name: str, committed: bool) -> None:
    """It may have been committed, so the attempt is undone. Once the store works again the name is free."""
    store = Odd()
    async with Redlock(store, patience=0) as client:
        await client.health()
        store.error, store.committed = OSError("the database hung up"), committed
        with pytest.raises(QuorumUnavailable, match="the database hung up"):
            await client(name).acquire(timeout=0)
        store.error = None
        async with asyncio.timeout(LIMIT), client(name):
            pass


@pytest.mark.parametrize("awaited", [True, False])
async def test_a_transaction_without_its_step_fails(name: str, awaited: bool) -> None:
    """A mistake in a store: its `transact` ends, and has not called the step. The op has no answer, and its caller an
    error that says why."""

    async def nothing() -> None: ...

    class Idle(DictStore):
        idle = False

        def transact(self, keys: Sequence[str], step: Step) -> Any:
            if self.idle:
                return nothing() if awaited else None
            return super().transact(keys, step)

    store = Idle()
    async with asyncio.timeout(LIMIT), Redlock(store, patience=0.2) as client:
        await client.health()
        store.idle = True
        with pytest.raises(QuorumUnavailable, match="did not call the step"):
            await client(name).acquire(timeout=None)
        store.idle = False


async def test_a_store_that_cannot_be_reached_is_asked_again(name: str) -> None:
    """The first `listen` fails. The acquire goes on trying, and has the lock once the store is there."""

    class Away(DictStore):
        away = True

        def listen(self, tag: str, receive: Any) -> None:
            if self.away:
                raise OSError("nobody is there")
            super().listen(tag, receive)

    store = Away()
    client = Redlock(store, patience=LIMIT)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable, match="nobody is there"):
            await client(name).acquire(timeout=0)
        waiting = asyncio.create_task(client(name).acquire())
        await asyncio.sleep(0)
        store.away = False
        lease = await waiting
        assert lease
        await lease.release()
        await client.aclose()


async def test_entering_ends_with_the_patience_although_the_store_never_answers() -> None:
    """Its `listen` has no limit, and hangs."""

    class Silent(DictStore):
        async def listen(self, tag: str, receive: Any) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    client = Redlock(Silent(), patience=1)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable, match="is not connected yet"):
            await client.__aenter__()


async def test_a_waiter_asks_again_when_the_node_is_open_again(name: str) -> None:
    """An idle connection for notices is lost, and with it the notice of a grant. The waiter finds the grant when the
    node is open again, and not when it renews its ticket, 16 s later at the soonest."""
    store = DictStore()
    async with Redlock(store, lease=LONG) as holder, Redlock(store, lease=LONG) as waiter:
        lease = await holder(name).acquire(timeout=None)
        waiting = asyncio.create_task(waiter(name).acquire(timeout=None))
        await turns(30)
        lost: list[Notice] = []
        receive = intercept_notices(waiter, lambda index, notice: lost.append(notice))
        await lease.release()
        await until(lambda: bool(lost))
        intercept_notices(waiter, receive)
        (node,) = nodes_of(waiter)
        node.lost(Reconnecting("the connection is gone"))
        async with asyncio.timeout(LIMIT / 2):
            await (await waiting).release()


async def test_a_client_that_closes_while_it_connects_waits_for_the_end_of_that(name: str) -> None:
    """Else connections would be left when the event loop ends."""

    class Slow(DictStore):
        steps: list[str]

        async def listen(self, tag: str, receive: Any) -> None:  # type: ignore[override]
            self.steps = ["opened"]
            try:
                await asyncio.Event().wait()
            finally:
                await turns()
                self.steps.append("closed")

    store = Slow()
    client = Redlock(store, patience=LIMIT)
    waiting = asyncio.create_task(client(name).acquire())
    await turns()
    await client.aclose()
    assert store.steps == ["opened", "closed"]
    await asyncio.gather(waiting, return_exceptions=True)


async def test_releases_that_wait_for_the_database_end_when_the_client_closes(name: str) -> None:
    """One waits for the database, and the others for their turn: none of their transactions has begun. No coroutine is
    left that was never awaited."""

    class Down(Odd):
        def listen(self, tag: str, receive: Any) -> None:
            if self.error is not None:
                raise self.error
            super().listen(tag, receive)

        def is_down(self, error: Exception) -> bool:
            return isinstance(error, OSError)

    store = Down()
    async with aclosing(Redlock(store, patience=0, lease=3.0, node_timeout=1.0)) as client:
        leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(3)]
        store.error = OSError("the database hung up")
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        releases = [asyncio.create_task(lease.release()) for lease in leases]
        await turns()
    await asyncio.gather(*releases, return_exceptions=True)
    gc.collect()  # a coroutine that was never awaited warns, and a warning fails the test


async def test_a_client_that_closes_waits_for_its_release(name: str) -> None:
    """It is on its way in the queue of the node; after that the name is free for others."""
    store = Odd()
    client = Redlock(store)
    lease = await client(name).acquire(timeout=None)
    stuck = store.stuck = asyncio.Event()
    releasing = asyncio.create_task(lease.release())
    await turns()
    closing = asyncio.create_task(client.aclose())
    await turns()
    stuck.set()
    await asyncio.gather(releasing, closing)
    assert not state_of(store, name).holds


class Faulty(Odd):
    """Its methods that explain a failure fail themselves."""

    def is_down(self, error: Exception) -> bool:
        raise KeyError("a fault of is_down")

    def delay(self, keys: Sequence[str], since: float) -> str:
        raise KeyError("a fault of delay")


async def test_an_is_down_that_raises_is_the_error_of_the_op(name: str) -> None:
    """Its caller has an answer, long before the time of the op is over."""
    store = Faulty()
    async with Redlock(store, patience=0, lease=600.0, max_lease=600.0, node_timeout=5 * LIMIT) as client:
        await client.health()
        store.error = OSError("the database hung up")
        with pytest.raises(QuorumUnavailable, match="a fault of is_down"):
            await asyncio.wait_for(client(name).acquire(timeout=0), LIMIT)
        store.error = None


async def test_a_fault_of_a_store_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of each method."""
    store = Faulty()
    async with Redlock(store, patience=0) as client:
        await client.health()
        store.error = OSError("the database hung up")
        for number in range(2):
            with pytest.raises(QuorumUnavailable):
                await client(f"{name}:{number}").acquire(timeout=0)
        store.error = None
    assert caplog.text.count("is_down of the store dict raised an exception") == 1


async def test_a_delay_that_raises_is_part_of_the_error(name: str) -> None:
    """The caller of an op without an answer has the error of its deadline."""
    store = Faulty()
    async with Redlock(store, patience=0, node_timeout=1.0, lease=5.0) as client:
        await client.health()
        stuck = store.stuck = asyncio.Event()
        with pytest.raises(QuorumUnavailable, match=r"did not answer .*a fault of delay"):
            await asyncio.wait_for(client(name).acquire(timeout=0), LIMIT)
        store.stuck = None
        stuck.set()


class Unconfirmed(DictStore):
    """The next transaction is committed at once, but its client gets the result only once it is `confirmed`."""

    confirmed: asyncio.Event | None = None

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        waiting, self.confirmed = self.confirmed, None
        await super().transact(keys, step)
        if waiting is not None:
            await waiting.wait()


async def test_no_notice_overtakes_a_reply(name: str) -> None:
    """The try of a waiter is committed, with its ticket. Before the client receives the refusal, the holder passes the
    name to that ticket. The waiter has the lease at once, and not when its ticket would have been renewed."""
    store = Unconfirmed()
    long: Any = {"lease": 600.0, "max_lease": 600.0, "node_timeout": LIMIT}  # no ticket is renewed within the LIMIT
    async with Redlock(store, **long) as holds, Redlock(store, **long) as waits:
        lease = await holds(name).acquire(timeout=None)
        await waits.health()
        confirmed = store.confirmed = asyncio.Event()
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        await until(lambda: len(state_of(store, name).queue) == 1)
        await lease.release()
        await until(lambda: not state_of(store, name).queue)
        await turns()
        confirmed.set()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


async def test_an_op_is_carried_out_as_it_was_when_it_was_sent(name: str) -> None:
    """Its owner renews it before the transaction begins."""
    store, seed = DictStore(), int(time.time() * 1_000_000)
    store.states[name] = State((Entry("1" * 32 + "|", time.time() + LONG),))
    op = Op(ACQUIRE, MUTEX, name, "0" * 32 + "|", 30.0, seed, 60.0, queueing=Queueing(number=1, fresh=10.0))
    pending = store.decide("", op, lambda vote: None)
    assert pending is not None
    op.renew(seed + 1_000_000, op.queueing)
    op.queueing.revoke()
    op.revoke()
    running, votes = pending
    await running
    (vote,) = votes
    assert isinstance(vote, Refused)
    assert vote.rank == 0  # it left its ticket
    store.states[name] = State()
    again = store.decide("", op, lambda vote: None)
    assert again is not None
    op.renew(0, op.queueing)
    await again[0]
    assert again[1] == [(seed + 1_000_000, False)]


class Crossed(MemoryStore):
    """Another thread's transaction comes right behind the next one, before the reply to that one is sent."""

    then: Callable[[], object] | None = None

    def transact(self, keys: Sequence[str], step: Step) -> None:
        super().transact(keys, step)
        then, self.then = self.then, None
        if then is not None:
            then()


async def test_no_notice_of_another_thread_overtakes_a_reply(name: str) -> None:
    """The same in a memory store: its notices cross threads."""
    store, holder = Crossed(), "1" * 32 + "|"
    store.decide("", Op(ACQUIRE, MUTEX, name, holder, LONG), lambda vote: None)
    give_back = Op(RELEASE, MUTEX, name, holder, LONG, queueing=Queueing(Serve.GRANT))
    long: Any = {"lease": 600.0, "max_lease": 600.0, "prefix": ""}
    async with Redlock(store, **long) as waits:
        store.then = lambda: store.decide("", give_back, lambda vote: None)
        async with asyncio.timeout(LIMIT), waits(name):
            pass


async def test_health_gives_the_answers_a_second_after_a_slow_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting takes nearly the whole second of a first health, as on a busy machine. The answers get another one."""
    passed, limits = [time.monotonic()], list[float]()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: passed[0])

    class Slow(DictStore):
        def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
            passed[0] += 0.9
            super().listen(tag, receive)

    async def asked(nodes: Sequence[Node], within: float, clock: Clock, *, everyone: bool) -> list[Any]:
        limits.append(within)
        return await check_votes(nodes, within, clock, everyone=everyone)

    monkeypatch.setattr(health, "check_votes", asked)
    async with aclosing(Redlock(Slow())) as client:
        assert (await client.health()).ok
    assert limits >= [0.5]


async def test_a_client_of_a_far_away_store_can_be_entered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check takes longer than a tenth of the lease and than connect_timeout, because it is two transactions."""
    monkeypatch.setattr(TransactionalNode, "check_limit", LIMIT)  # a busy machine is no distance

    class FarStore(DictStore):
        async def transact(self, keys: Sequence[str], step: Step) -> None:
            await asyncio.sleep(0.6)
            await super().transact(keys, step)

    async with Redlock(FarStore(), lease=10, connect_timeout=1) as client:
        assert (await client.health()).ok
        async with client(name):
            pass
