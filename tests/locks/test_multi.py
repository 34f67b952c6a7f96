"""Several locks as one, on every deployment and both loops."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import ConfigError, Lease, LockLost, LockTimeout, Redlock, SelfDeadlock, Unsupported
from tests.support.cancelled_waits import no_task_is_left, nothing_is_left
from tests.support.servers import Server
from tests.support.still_clock import Still, forgotten, idle, turns
from tests.support.waiters import IN_VAIN, LIMIT, LONG, decided, urls_of

Make = Callable[..., Redlock]

SOON = 10.0
"""Seconds; a ticket of a LONG lease is renewed after 16 at the soonest, so what comes before that was called."""


async def taken(lock: Any) -> Lease:
    """The lease of a lock that is free."""
    lease = await lock.acquire(timeout=0)
    assert lease is not None
    found: Lease = lease
    return found


def several(name: str, letters: str) -> list[str]:
    return [f"{name}:{letter}" for letter in letters]


async def waiting(client: Redlock, lock: Any, order: list[object], who: object) -> asyncio.Task[None]:
    """A task that notes `who` once it has the lock; by now it waits."""

    async def run() -> None:
        async with lock:
            order.append(who)

    task = asyncio.create_task(run())
    async with asyncio.timeout(LIMIT):
        await asyncio.sleep(0)
        while not idle(client):
            assert not task.done()
            await asyncio.sleep(0)
    return task


@pytest.mark.every_store
async def test_all_or_none(make: Make, name: str) -> None:
    """A holder has each of the names; where one is taken, it has none."""
    client, other = make(), make()
    a, b, c, d = several(name, "abcd")
    async with client.multi(a, b, client.read(c)) as lease:
        assert lease.held
        for lock in (other(a), other(b), other.write(c), other.multi(d, b), other.multi(a, d)):
            assert await lock.acquire(timeout=0) is None
            assert await lock.locked()
        assert not await other(d).locked()
        await (await taken(other.read(c))).release()
        await lease.extend()
    for lock in (other(a), other(b), other.write(c)):
        await (await taken(lock)).release()


@pytest.mark.every_store
async def test_one_fence_above_all_before(make: Make, name: str) -> None:
    """Greater than the fences of all earlier holds of any of the names, and less than those of all later ones."""
    client, other = make(), make()
    names = several(name, "abc")
    highest = 0
    for number in range(6):
        for each in random.sample(names, 2):
            lease = await taken(other(each))
            highest = max(highest, lease.fence)
            await lease.release()
        lease = await taken(client.multi(*names[number % 2 :]))
        assert lease.fence > highest
        highest = lease.fence
        await lease.release()
        for each in names[number % 2 :]:
            after = await taken(other(each))
            assert after.fence > highest
            await after.release()


async def test_any_order_and_no_deadlock(make: Make, name: str) -> None:
    """Thirty tasks with random subsets in random orders, of three clients, and single names between: all come in, each
    name has one holder at a time, or readers only, and its fences rise."""
    clients = [make() for _ in range(3)]
    names = several(name, "abcdef")
    chance = random.Random(name)
    inside: dict[str, list[str]] = {each: [] for each in names}
    fences = dict.fromkeys(names, 0)
    done = 0

    async def work(client: Redlock) -> None:
        nonlocal done
        for _ in range(2):
            mine = chance.sample(names, chance.randint(1, 4))
            kinds = ["r" if each == names[-1] and chance.random() < 0.7 else "w" for each in mine]
            locks = [_part(client, each, kind, names[-1]) for each, kind in zip(mine, kinds, strict=True)]
            async with (
                client.multi(*locks) if len(locks) > 1 or chance.random() < 0.5 else _single(client, locks[0]) as lease
            ):
                for each, kind in zip(mine, kinds, strict=True):
                    assert not inside[each] or {kind, *inside[each]} == {"r"}
                    inside[each].append(kind)
                    if each != names[-1]:
                        assert lease.fence > fences[each]
                    fences[each] = max(fences[each], lease.fence)
                await asyncio.sleep(0)
                for each, kind in zip(mine, kinds, strict=True):
                    inside[each].remove(kind)
            done += 1

    async with asyncio.timeout(2 * LIMIT):
        await asyncio.gather(*(work(clients[number % 3]) for number in range(30)))
    assert done == 60
    assert all(forgotten(client) for client in clients)


def _part(client: Redlock, name: str, kind: str, shared: str) -> Any:
    if name != shared:
        return name
    return client.read(name) if kind == "r" else client.write(name)


def _single(client: Redlock, lock: Any) -> Any:
    return client(lock) if isinstance(lock, str) else lock


@pytest.mark.every_store
async def test_e11_a_refused_multi_holds_nothing_while_it_waits(make: Make, name: str) -> None:
    """One of the names is taken: the others are free for all clients until that one is free."""
    client, other = make(lease=LONG), make(lease=LONG)
    a, b, c = several(name, "abc")
    lease = await taken(other(b))
    order: list[object] = []
    task = await waiting(client, client.multi(a, b, c), order, "multi")
    for _ in range(3):
        for free in (other(a), other(c), other.multi(a, c)):
            await (await taken(free)).release()
    assert order == []
    await lease.release()
    async with asyncio.timeout(SOON):
        await task


@pytest.mark.parametrize("names", ["ab", "ba"])
async def test_e16_a_multi_that_is_woken_and_refused_passes_it_on(make: Make, name: str, names: str) -> None:
    """The multi is the first waiter for a name that is released, but needs another name that is held. The next waiter
    for the first name is served at once, and the multi when the other name is free."""
    client, other, third = make(lease=LONG), make(lease=LONG), make(lease=LONG)
    this, that = several(name, names)
    first = await taken(other(this))
    order: list[object] = []
    several_at_once = await waiting(client, client.multi(this, that), order, "multi")
    second = await taken(other(that))
    single = await waiting(third, third(this), order, "single")
    await first.release()
    async with asyncio.timeout(SOON):
        await single
        assert order == ["single"]
        await second.release()
        await several_at_once
    assert order == ["single", "multi"]


async def test_a_semaphore_and_a_fair_lock_in_it(make: Make, name: str) -> None:
    """Permits are counted, and the order of arrival is kept, as by their own locks."""
    client, other = make(lease=LONG), make(lease=LONG)
    a, pool, turn = several(name, "apt")
    permits = [await taken(client.multi(f"{a}{number}", client.semaphore(pool, 3))) for number in range(3)]
    assert await other.multi(a, other.semaphore(pool, 3)).acquire(timeout=0) is None
    more = await taken(other.multi(a, other.semaphore(pool, 4)))
    await more.release()
    order: list[object] = []
    task = await waiting(other, other.multi(a, other.semaphore(pool, 3)), order, "permit")
    await permits.pop().release()
    async with asyncio.timeout(SOON):
        await task
    for lease in permits:
        await lease.release()

    held = await taken(client(turn))
    early = await waiting(other, other(turn, fair=True), order, "early")
    assert await client.multi(a, client(turn, fair=True)).acquire(timeout=0) is None
    late = await waiting(client, client.multi(a, client(turn, fair=True)), order, "late")
    await held.release()
    async with asyncio.timeout(SOON):
        await asyncio.gather(early, late)
    assert order == ["permit", "early", "late"]


async def test_waiting_for_oneself_raises(make: Make, name: str) -> None:
    """A task that holds one of the names, alone or with others, asks for it again: SelfDeadlock. Two readers may be one
    task."""
    client = make()
    a, b, c = several(name, "abc")
    async with client.multi(a, client.read(c)):
        for lock in (client(a), client.multi(b, a), client.multi(a, b, client.read(c))):
            with pytest.raises(SelfDeadlock, match="would wait for itself"):
                await lock.acquire(timeout=LIMIT)
            assert await lock.acquire(timeout=0) is None
        async with client.multi(b, client.read(c)):
            pass
        with pytest.raises(SelfDeadlock):
            await client.multi(b, client.write(c)).acquire()


async def test_c14_one_name_is_of_another_kind(make: Make, name: str) -> None:
    """The error names it and both kinds, and nothing else is held."""
    client, other = make(), make()
    a, b, c = several(name, "abc")
    async with other.semaphore(b, 2):
        with pytest.raises(ConfigError, match=f"{b}.*semaphore.*mutex"):
            await client.multi(a, b, c).acquire()
        assert not await other(a).locked()
        assert not await other(c).locked()


@pytest.mark.parametrize("how", ["fair", "plain", "multi"])
async def test_c14_asking_for_the_wrong_kind_grants_to_nobody(make: Make, name: str, how: str) -> None:
    """A permit is held and waited for, and a client asks for a mutex of that name, alone or with another name that is
    taken. The waiter for the permit goes on waiting, and its holder holds."""
    client, other, third = make(lease=LONG), make(lease=LONG), make(lease=LONG)
    a, pool = several(name, "ab")
    permit, busy = await taken(client.semaphore(pool, 1)), await taken(client(a))
    order: list[object] = []
    task = await waiting(other, other.semaphore(pool, 1), order, "permit")
    if how == "multi":
        with contextlib.suppress(ConfigError):  # where it looks so far
            assert await third.multi(a, pool).acquire(timeout=0) is None
    else:
        with pytest.raises(ConfigError, match="semaphore"):
            await third(pool, fair=how == "fair").acquire(timeout=LIMIT)
    await third.health()
    await permit.extend()
    assert order == []
    await permit.release()
    async with asyncio.timeout(SOON):
        await task
    await busy.release()


@pytest.mark.every_store
async def test_d7_one_of_its_names_is_broken(make: Make, name: str) -> None:
    """The holder is notified at once that it lost them, and releases the others."""
    client, other = make(lease=LONG), make(lease=LONG)
    a, b = several(name, "ab")
    with pytest.raises(LockLost) as lost:
        async with asyncio.timeout(SOON), client.multi(a, b):
            assert await other.break_lock(b)
            await asyncio.Event().wait()
    assert lost.value.reason == "broken"
    for each in (a, b):
        await (await other(each).acquire(timeout=SOON)).release()


async def test_inspect_shows_each_name(make: Make, name: str) -> None:
    """Its holder, with its metadata. A waiter for all of them waits at one of them."""
    client, other = make(metadata="both"), make(lease=LONG)
    a, b = several(name, "ab")
    order: list[object] = []
    async with client.multi(a, client.read(b)) as lease:
        task = await waiting(other, other.multi(a, other.write(b)), order, "other")
        for each, kind in ((a, "mutex"), (b, "read-write lock")):
            info = await other.inspect(each)
            assert (info.kind, [holder.metadata for holder in info.holders]) == (kind, ["both"])
            assert info.fence >= lease.fence
        assert [sum(waiter.tasks for waiter in (await other.inspect(each)).waiters) for each in (a, b)] == [1, 0]
    await task


@pytest.mark.parametrize("nodes", [1, 3])
async def test_the_watchdog_keeps_all_of_them(nodes: int) -> None:
    """For as long as it is held, and max_hold ends them all."""
    still = Still(nodes, "")
    async with still.client(lease=9.0) as client, still.client() as other:
        lock = client.multi("a", client.write("b"), client.read("c"), max_hold=100.0)
        lease = await taken(lock)
        for _ in range(30):
            await still.until(still.clock.now() + 3.0)
            assert lease.held
            for refused in (other("a"), other.read("b"), other.write("c")):
                assert await refused.acquire(timeout=0) is None
        await still.until(still.clock.now() + 10.0)
        assert not lease.held
        await still.until(still.clock.now() + 9.0)
        for free in (other("a"), other.read("b"), other.write("c")):
            await (await taken(free)).release()


async def test_min_hold_is_of_each_name() -> None:
    """Released sooner, all names stay taken until then."""
    still = Still(1, "")
    async with still.client() as client, still.client() as other:
        lease = await taken(client.multi("a", client.read("b"), min_hold=5.0))
        await lease.release()
        for _ in range(4):
            for refused in (other("a"), other.write("b"), other.multi("z", "a")):
                assert await refused.acquire(timeout=0) is None
            await still.until(still.clock.now() + 1.0)
        await still.until(still.clock.now() + 1.1)
        await (await taken(other.multi("a", other.write("b")))).release()


async def test_a_minority_is_down(five: list[Server], name: str) -> None:
    """Three of five nodes are enough, for the holder and for the waiter."""
    client, other = (
        Redlock(*urls_of(five), lease=LONG, node_timeout=5.0),
        Redlock(*urls_of(five), lease=LONG, node_timeout=5.0),
    )
    a, b = several(name, "ab")
    async with client, other:
        lease = await taken(client.multi(a, b))
        await client.health()  # over the same connections: all five have carried it out, not only a majority
        order: list[object] = []
        task = await waiting(other, other.multi(b, a), order, "other")
        for server in five[:2]:
            server.kill()
        await lease.extend()
        await lease.release()
        async with asyncio.timeout(SOON):
            await task


async def test_a16_cancelled_at_random(make: Make, name: str) -> None:
    """Tasks that want several names are cancelled at random moments: they leave nothing, and the rest are granted."""
    clients = [make(lease=LONG) for _ in range(2)]
    for client in clients:
        await client.health()
    names = several(name, "abc")
    chance = random.Random(name)

    async def work(client: Redlock) -> None:
        async with client.multi(*chance.sample(names, chance.randint(1, 3))):
            await turns(chance.randint(0, 3))

    with no_task_is_left():
        for _ in range(8):
            tasks = [asyncio.create_task(work(chance.choice(clients))) for _ in range(8)]
            victims = chance.sample(tasks, 5)
            while any(not victim.done() for victim in victims):
                await turns(chance.randint(1, 6))
                chance.choice(victims).cancel()
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*(task for task in tasks if task not in victims))
            await asyncio.gather(*victims, return_exceptions=True)
        for each in names:
            await nothing_is_left(clients, each)


async def test_it_times_out(make: Make, name: str) -> None:
    """As any lock does, in both forms, and without leaving a ticket."""
    client, other = make(), make()
    await client.health()  # connected, so that the timeout is for the lock alone
    a, b = several(name, "ab")
    lease = await taken(other(b))

    async def enter() -> None:
        async with client.multi(b, a, timeout=IN_VAIN):
            pytest.fail("entered")

    assert await decided(lambda: client.multi(a, b).acquire(timeout=IN_VAIN)) is None
    with pytest.raises(LockTimeout, match=f"{a}, {b}"):
        await decided(enter)
    await lease.release()
    for each in (a, b):
        await nothing_is_left([client, other], each)


def test_a_multi_is_made_of_locks_of_its_client() -> None:
    """Locks of this client, each named once. All else is refused before any server is asked."""
    client, other = Redlock("memory:"), Redlock("memory:")
    assert client.multi("b", client.read("a")).name == "a, b"
    for locks, message in (
        ([], "no locks"),
        ([f"{number}" for number in range(257)], "257 locks"),
        (["a", "a"], "twice"),
        (["a", client.read("a")], "twice"),
        (["a", other("b")], "another client's"),
        (["a", client.multi("b", "c")], "cannot be part"),
        (["a", client("b", reentrant=True)], "cannot be part"),
        (["a", ""], "empty"),
        ([b"a"], "not bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            client.multi(*locks)  # type: ignore[arg-type]  # what is wrong is the point
    with pytest.raises(Unsupported, match="fencing=False"):
        client.multi("a", "b", fencing=False)
    with pytest.raises(ConfigError, match="max_lease"):
        client.multi("a", lease=1000)
