"""What synchronized, once and lead promise, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asynclock import ConfigError, Lease, LockLost, LockTimeout, QuorumUnavailable, Redlock, Skipped
from asynclock.events import Acquired, TimedOut, Unavailable
from asynclock.testing import FakeStore
from tests.support.told import told
from tests.support.waiters import IN_VAIN, decided


class Shop:
    """With a method to guard."""

    def __init__(self, client: Redlock, prefix: str) -> None:
        self.id = 7
        self.inside = 0

        @client.synchronized(f"{prefix}:{{shop.id}}:{{order_id}}")
        async def charge(shop: Shop, order_id: int, *, fee: int = 1) -> int:
            shop.inside += 1
            assert shop.inside == 1
            await asyncio.sleep(0)
            shop.inside -= 1
            return order_id + fee

        self.charge = charge


# -- synchronized ----------------------------------------------------------------------------------------------------


async def test_one_call_at_a_time(redlock: Redlock, name: str) -> None:
    """Calls of the same name run one at a time, with their results, defaults and keywords."""
    shop = Shop(redlock, name)
    assert await asyncio.gather(*(shop.charge(shop, 1) for _ in range(10))) == [2] * 10
    assert await shop.charge(shop, order_id=1, fee=2) == 3
    assert shop.charge.__name__ == "charge"
    assert not await redlock(f"{name}:7:1").locked()


async def test_calls_of_other_names_run_side_by_side(redlock: Redlock, name: str) -> None:
    """Only calls with the same arguments exclude each other."""
    both = asyncio.Barrier(2)

    @redlock.synchronized(name + ":{n}")
    async def meet(n: int) -> None:
        await both.wait()

    await asyncio.gather(meet(1), meet(2))


async def test_a_call_waits_no_longer_than_its_timeout(redlock: Redlock, name: str) -> None:
    """LockTimeout, as from `async with`; and a function may make the name."""

    @redlock.synchronized(lambda n: f"{name}:{n}", timeout=0)
    async def work(n: int) -> None:
        async with asyncio.timeout(5):
            with pytest.raises(LockTimeout):
                await asyncio.create_task(work(n))

    await work(1)


def test_only_coroutine_functions_can_be_guarded() -> None:
    """A generator's body would run while the lock is not held."""
    client = Redlock("redis://nowhere")

    def plain() -> None: ...

    async def stream() -> AsyncIterator[int]:
        yield 1

    async def fine() -> None: ...

    bad: list[Any] = [plain, stream, classmethod(fine), staticmethod(fine), 17]  # type: ignore[arg-type]
    for function in bad:
        for decorate in (client.synchronized("x"), client.once("x", within=1)):
            with pytest.raises(TypeError):
                decorate(function)
    with pytest.raises(ConfigError, match="lease"):
        client.synchronized("x", lease=-1)
    with pytest.raises(ConfigError, match="within"):
        client.once("x", within=0)


# -- once ------------------------------------------------------------------------------------------------------------


async def test_it_completes_once(make: Callable[..., Redlock], name: str) -> None:
    """Over all clients: ten calls at once are one run, and later calls return that it is done."""
    runs = 0
    started, go_on = asyncio.Event(), asyncio.Event()

    def mail_of(client: Redlock) -> Callable[[int], Any]:
        @client.once(name + ":{n}", within=60)
        async def mail(n: int) -> str:
            nonlocal runs
            runs += 1
            started.set()
            await go_on.wait()
            return f"sent {n}"

        return mail

    clients = [mail_of(make()) for _ in range(3)]
    first = asyncio.create_task(clients[0](1))
    await started.wait()
    assert await asyncio.gather(*(mail(1) for mail in clients)) == [Skipped.RUNNING] * 3
    go_on.set()
    assert await first == "sent 1"
    assert await asyncio.gather(*(mail(1) for mail in clients)) == [Skipped.DONE] * 3
    assert runs == 1
    assert await clients[1](2) == "sent 2"


async def test_a_run_that_raised_may_be_run_again(redlock: Redlock, name: str) -> None:
    """It did not complete."""
    fail = True

    @redlock.once(name, within=60)
    async def work() -> int:
        if fail:
            raise ValueError("no")
        return 1

    with pytest.raises(ValueError, match="no"):
        await work()
    fail = False
    assert await work() == 1
    assert await work() is Skipped.DONE


async def test_a_run_that_raised_may_be_run_again_whatever_the_clients_min_hold(
    make: Callable[..., Redlock], name: str
) -> None:
    """The client's default min_hold neither keeps the name nor marks the run as done."""
    runs = 0

    @make(min_hold=20).once(name, within=60)
    async def work() -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("no")
        return runs

    with pytest.raises(ValueError, match="no"):
        await work()
    assert await work() == 2
    assert await work() is Skipped.DONE


async def test_a_name_that_rests_is_not_taken_for_done(make: Callable[..., Redlock], name: str) -> None:
    """No run returned: the min_hold of another user of the name keeps it taken."""
    async with make()(name, min_hold=20):
        pass

    @make().once(name, within=60)
    async def work() -> None: ...

    assert await work() is Skipped.RUNNING


async def test_an_acquire_enters_when_the_time_of_a_run_is_over(make: Callable[..., Redlock], name: str) -> None:
    """The end of a mark that says "done" wakes waiters, as the end of a rest does: they do not take the mark for
    another program's key."""

    @make().once(name, within=0.3)
    async def work() -> None: ...

    await work()
    async with asyncio.timeout(20), make()(name) as lease:
        assert lease.held


async def test_a_run_that_was_cancelled_may_be_run_again(redlock: Redlock, name: str) -> None:
    """It did not complete either."""
    started = asyncio.Event()
    stay = True

    @redlock.once(name, within=60)
    async def work() -> int:
        started.set()
        if stay:
            await asyncio.Event().wait()
        return 1

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    await asyncio.wait({task})
    stay = False
    assert await work() == 1


async def test_it_may_run_again_after_its_time(redlock: Redlock, name: str) -> None:
    """`within` is counted from the end of the run."""

    @redlock.once(name, within=0.05)
    async def work() -> int:
        return 1

    assert await work() == 1
    async with asyncio.timeout(20):
        while await work() is Skipped.DONE:
            await asyncio.sleep(0.01)


async def test_many_calls_at_once_are_one_run(make: Callable[..., Redlock], name: str) -> None:
    """Also where their votes are split: one call runs, and no call reports a run that did not happen."""
    for attempt in range(5):
        outcomes: list[object] = []

        async def call(client: Redlock, attempt: int = attempt, outcomes: list[object] = outcomes) -> None:
            @client.once(f"{name}:{attempt}", within=60)
            async def work() -> int:
                await asyncio.sleep(0)
                return 1

            outcomes.append(await work())

        clients = [make() for _ in range(4)]
        await asyncio.gather(*(client.health() for client in clients))
        await asyncio.gather(*(call(client) for client in clients))
        assert outcomes.count(1) == 1


@pytest.mark.both_loops("advance reads from the tasks of the loop how far they have run")
async def test_a_call_of_once_waits_for_the_end_of_an_outage(name: str) -> None:
    """For `patience` seconds, as `synchronized` does. The patience is that of now, and not of the decoration."""
    store = FakeStore()
    client = Redlock(store)

    @client.once(name, within=60)
    async def work() -> int:
        return 1

    client.configure(patience=20)
    async with client:
        store.down()
        call = asyncio.create_task(work())
        await store.advance(10)
        assert not call.done()
        store.up()
        await store.advance(2)
        assert await call == 1
        store.down()
        call = asyncio.create_task(work())
        await store.advance(25)
        with pytest.raises(QuorumUnavailable):
            await call
        store.up()


@pytest.mark.both_loops("advance reads from the tasks of the loop how far they have run")
@pytest.mark.parametrize("down", [3.0, 25.0])
async def test_a_call_of_once_tells_one_event(name: str, down: float) -> None:
    """However often it tries in an outage, which ends before its patience of 20 s, or does not. So a metric of acquires
    counts calls."""
    store = FakeStore()
    async with Redlock(store, patience=20) as client:
        with told(client) as seen:
            store.down()
            call = asyncio.create_task(client.once(name, within=60)(asyncio.sleep)(0))
            await store.advance(down)
            store.up()
            await store.advance(2)
            await asyncio.wait({call})
            ends = [each for each in seen.all if isinstance(each, Acquired | TimedOut | Unavailable)]
    (end,) = ends
    assert isinstance(end, Acquired if down < 20 else Unavailable)
    assert end.had_to_wait
    assert min(down, 20) <= end.waited < down + 2
    assert isinstance(call.exception(), QuorumUnavailable | None)


# -- lead ------------------------------------------------------------------------------------------------------------


async def test_one_leads_and_its_result_ends_it(make: Callable[..., Redlock], name: str) -> None:
    """While one leads no other does; each leader's result is returned to its caller."""
    leading = 0

    async def main(lease: Lease) -> int:
        nonlocal leading
        leading += 1
        assert leading == 1
        assert lease.held
        await asyncio.sleep(0)
        leading -= 1
        return lease.fence

    fences = await asyncio.gather(*(make().lead(name, main) for _ in range(3)))
    assert len(set(fences)) == 3


async def test_a_leader_that_lost_its_lease_campaigns_again(make: Callable[..., Redlock], name: str) -> None:
    """It is cancelled, and runs again with a greater token."""
    fences: list[int] = []

    async def main(lease: Lease) -> str:
        fences.append(lease.fence)
        if len(fences) == 1:
            await asyncio.Event().wait()
        return "done"

    assert await make().lead(name, main, max_hold=0.3) == "done"
    assert len(fences) == 2
    assert fences[0] < fences[1]


async def test_an_error_of_main_ends_it(redlock: Redlock, name: str) -> None:
    """Also a LockLost of another lease than its own."""

    async def main(lease: Lease) -> None:
        raise LockLost("another", "expired")

    with pytest.raises(LockLost) as caught:
        await redlock.lead(name, main)
    assert caught.value.name == "another"
    assert not await redlock(name).locked()


async def test_a_campaign_may_have_an_end(make: Callable[..., Redlock], name: str) -> None:
    """With a timeout it does not wait for the end of another leader."""

    async def main(lease: Lease) -> None:
        raise AssertionError("led")

    leads, other = make(), make()
    await other.health()  # connected, so that the timeout is for the lock alone
    async with leads(name):
        with pytest.raises(LockTimeout):
            await decided(lambda: other.lead(name, main, timeout=IN_VAIN))
    with pytest.raises(ConfigError, match="main"):
        await make().lead(name, 17)  # type: ignore[arg-type]


async def test_a_cancelled_leader_leaves(redlock: Redlock, name: str) -> None:
    """It was cancelled from outside: it does not campaign again."""
    led = asyncio.Event()

    async def main(lease: Lease) -> None:
        led.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(redlock.lead(name, main))
    await led.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not await redlock(name).locked()
