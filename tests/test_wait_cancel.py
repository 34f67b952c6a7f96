"""Waiting that is cut short, at each await and at random: nothing is left behind, nobody is forgotten (HAZARDS A16, E3,
E5, E15)."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock._lease import Lease
from asynclock.stores._keys import keys
from asynclock.stores.memory import MemoryStore
from tests.fakes import FakeClock
from tests.proxy import cancelled_at, stepped
from tests.servers import Server
from tests.test_wait_faults import behind_gates
from tests.waiters import LONG

SOON = 10.0
"""Seconds that only a lost wake-up could take: a ticket of LONG is renewed after 16 at the soonest."""

cuts = pytest.mark.parametrize("late", [False, True], ids=["at-once", "as-it-wakes"])
fairness = pytest.mark.parametrize("fair", [False, True], ids=["", "fair"])

Make = Callable[..., Redlock]


# -- what may not be left --------------------------------------------------------------------------------------------


def kept(redlock: Redlock) -> dict[str, Any]:
    """What a client still has to do with, or for, its locks."""
    session = redlock._session()
    found = {each: getattr(session, each) for each in ("waits", "waiting", "lines", "held", "_loose")}
    found["leases"] = list(session.watchdog)
    return {each: what for each, what in found.items() if what}


async def known(redlock: Redlock, name: str) -> list[Any]:
    """What the servers know of a name, but for its fence."""
    found: list[Any] = []
    for store in redlock._stores:
        if isinstance(store, MemoryStore):
            state = store.state(name)
            found += [*state.holds, *state.queue, *state.undone]
        else:
            pool: Any = store._pool  # type: ignore[attr-defined]
            there: Any = await Redis(connection_pool=pool).keys(f"*{name}*")
            found += [key for key in there if key.decode() != keys("", name).fence]
            await pool.disconnect()
    return found


async def sent(clients: Iterable[Redlock]) -> None:
    """Return once the servers have carried out, and answered, all that these have sent."""
    for client in clients:
        await asyncio.gather(*(node.ping() for node in client._session().quorum.nodes))
    for _ in range(3):  # a memory store answers in the next turn
        await asyncio.sleep(0)


async def nothing_is_left(clients: list[Redlock], name: str) -> None:
    """No hold, no ticket, no tombstone, and in the clients nothing that waits, holds or undoes."""
    await sent(clients)
    assert not await known(clients[0], name)
    assert [kept(client) for client in clients] == [{}] * len(clients)


@contextmanager
def no_task_is_left() -> Iterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() == before


# -- who waits -------------------------------------------------------------------------------------------------------


async def turns(number: int) -> None:
    """So many turns of the loop."""
    for _ in range(number):
        await asyncio.sleep(0)


async def three(make: Make, lease: float = LONG) -> list[Redlock]:
    """Clients that are connected."""
    clients = [make(lease=lease) for _ in range(3)]
    for client in clients:
        await client.health()
    return clients


def idle(redlock: Redlock) -> bool:
    """Whether all that want something of this client wait to be called, or stand in line."""
    waits: Any = redlock._session().waits
    return bool(waits) and all(each._waker is not None or each.standing for each in waits)


async def tenure(redlock: Redlock, name: str, fair: bool) -> int:
    """Hold it for a turn; its fence."""
    async with redlock(name, fair=fair) as lease:
        await asyncio.sleep(0)
        return lease.fence


async def waiter(redlock: Redlock, name: str, fair: bool) -> asyncio.Task[int]:
    """A task that wants it; by now it waits."""
    task = asyncio.create_task(tenure(redlock, name, fair))
    async with asyncio.timeout(SOON):
        await asyncio.sleep(0)
        while not idle(redlock):
            assert not task.done()
            await asyncio.sleep(0)
    return task


class Held:
    """A lease that is given back once somebody says so; or at last, by hand."""

    def __init__(self, lease: Lease) -> None:
        self.fence = lease.fence
        self._lease = lease
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        self._task = self._task or asyncio.create_task(self._lease.release())

    async def ended(self) -> None:
        self.end()
        assert self._task is not None
        await self._task


class Scene:
    """One name, held by one client and waited for by a task that is cut short, and by others."""

    def __init__(self, clients: list[Redlock], name: str, where: str, fair: bool) -> None:
        self.waits, self.other, self.third = clients
        self.name = name
        self._holder = self.waits if where == "passed-to" else self.other
        self._where = where
        self._fair = fair
        self._company: list[asyncio.Task[int]] = []

    async def play(self, index: int, ends: int, late: bool) -> bool:
        """Cut at the `index`-th await; the holder gives back at the `ends`-th, or once they are idle. Answers whether
        there were so many awaits. Raises TimeoutError where somebody is forgotten."""
        held = Held(await self._holder(self.name, fair=self._fair).acquire(timeout=None))
        if self._where == "behind":
            self._company = [await waiter(self.waits, self.name, self._fair)]
        elif self._where == "first":  # in the next turn, after the task that is cut
            asyncio.get_running_loop().call_soon(self._join)
        ending = asyncio.create_task(self._end_when_idle(held))

        async def cut() -> Any:
            return await stepped(tenure(self.waits, self.name, self._fair), reached)

        def reached(number: int, future: object) -> None:
            del future
            if number == ends:
                held.end()

        async with asyncio.timeout(SOON):
            hit = await cancelled_at(cut, index, late=late)
            ending.cancel()
            await asyncio.wait({ending})
            await held.ended()
            await asyncio.gather(*self._company)
        return hit

    def _join(self) -> None:
        self._company.append(asyncio.create_task(tenure(self.waits, self.name, self._fair)))

    async def _end_when_idle(self, held: Held) -> None:
        while not idle(self.waits):
            await asyncio.sleep(0)
        held.end()


# -- at every await --------------------------------------------------------------------------------------------------


@cuts
@pytest.mark.parametrize(
    ("where", "fair"),
    [("alone", False), ("alone", True), ("passed-to", False), ("first", False), ("first", True), ("behind", False),
     ("behind", True)],
)  # fmt: skip
async def test_a16_a_waiting_acquire(make: Make, name: str, where: str, fair: bool, late: bool) -> None:
    """Cut at each await, while the holder gives back at any of them, or once all are idle: nothing is left, who stands
    before or behind it is served, and then anybody has it at once. It waits alone, or in line behind a holder of its
    own process, as the first, or as the second."""
    clients = await three(make)
    with no_task_is_left():
        for ends in range(3):
            for index in range(100):
                scene = Scene(clients, f"{name}:{ends}:{index}.", where, fair)
                hit = await scene.play(index, ends, late)
                await sent(clients)
                lease = await scene.third(scene.name, fair=fair).acquire(timeout=0)
                assert lease is not None
                await lease.release()
                await nothing_is_left(clients, scene.name)
                if not hit:
                    break
            else:
                pytest.fail("it never came to an end")
            assert index > 1


@cuts
@pytest.mark.parametrize("what", ["extend", "release", "wait_lost"])
async def test_a16_a_lease_that_is_waited_for(make: Make, name: str, what: str, late: bool) -> None:
    """Cut at each await of what a holder does, while another client waits, and one of its own stands in line: both are
    served as soon as it has given back."""
    holds, waits, _ = clients = await three(make)
    with no_task_is_left():
        for index in range(100):
            here = f"{name}:{index}."
            lease = await holds(here).acquire(timeout=None)
            others = [await waiter(waits, here, False), await waiter(holds, here, False)]
            if what == "wait_lost" and index:  # it waits for ever, unless it ends
                others.append(asyncio.create_task(fence_of(lease)))
            hit = await cancelled_at(getattr(lease, what), index, late=late and index > 0)
            assert not lease._waiters
            if lease.held:
                await lease.release()
            async with asyncio.timeout(SOON):
                fences = await asyncio.gather(*others)
            assert min(fences[:2]) > lease.fence
            await nothing_is_left(clients, here)
            if not hit:
                break
        else:
            pytest.fail("it never came to an end")
    assert index > 0


async def fence_of(lease: Lease) -> int:
    """Give it back."""
    await asyncio.sleep(0)
    await lease.release()
    return lease.fence


@cuts
@fairness
async def test_a16_no_timer_is_left(name: str, fair: bool, late: bool) -> None:
    """Cut at each await: all timers of the wait are taken back, too."""
    clock = FakeClock()
    store = MemoryStore(clock)
    async with Redlock(store) as first, Redlock(store) as second, Redlock(store) as third:
        clients = [first, second, third]
        for client in clients:
            await client.health()
        assert not await Scene(clients, f"{name}.", "alone", fair).play(100, 9, late)  # all their watchdogs run now
        before = clock.armed
        for index in range(100):
            hit = await Scene(clients, f"{name}:{index}.", "alone", fair).play(index, 9, late)
            await sent(clients)
            assert clock.armed == before
            if not hit:
                break
        assert index > 1


async def test_a16_who_leaves_the_line_leaves_no_line(make: Make, name: str) -> None:
    """The holder's own process has no more of those who stood behind it, though it holds on."""
    (client, *_) = await three(make)
    async with client(name):
        standing = [await waiter(client, name, False) for _ in range(3)]
        for number in (1, 0, 2):
            standing[number].cancel()
            await asyncio.wait({standing[number]})
        assert kept(client).keys() == {"held", "leases"}


# -- the woken waiter is cancelled -----------------------------------------------------------------------------------


@fairness
@pytest.mark.parametrize("first", ["cancel", "notice"])
@pytest.mark.parametrize("heir", ["elsewhere", "behind"])
async def test_e5_cancelled_in_the_turn_of_the_notice(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch, fair: bool, first: str, heir: str
) -> None:
    """The head is called, and cancelled just before or after it hears of it, by the first node or any other: what
    reached it is passed on at once, to another client or to the next in its own line."""
    holds, waits, other = clients = await three(make)
    session = waits._session()
    hear = session.heard
    heard: list[Callable[[], object]] = []

    def intercept(index: int, notice: bytes) -> None:
        cancel: Callable[[], object] = heard.pop(0) if heard else bool
        order: list[Callable[[], object]] = [cancel, partial(hear, index, notice)]
        for act in order if first == "cancel" else order[::-1]:
            act()

    monkeypatch.setattr(session, "heard", intercept)
    with no_task_is_left():
        for number in range(len(session.quorum.nodes)):
            here = f"{name}:{number}."
            lease = await holds(here, fair=fair).acquire(timeout=None)
            victim = await waiter(waits, here, fair)
            next_one = await waiter(waits if heir == "behind" else other, here, fair)
            heard[:] = [bool] * number + [victim.cancel]
            await lease.release()
            async with asyncio.timeout(SOON):
                await asyncio.wait({victim})
                assert await next_one > lease.fence
            assert victim.cancelled() or number
            heard.clear()
            await nothing_is_left(clients, here)


@fairness
async def test_e5_cancelled_as_the_holder_gives_back(make: Make, name: str, fair: bool) -> None:
    """The head is cancelled some turns after the release began, wherever its call is on the way: the next is served."""
    holds, waits, other = clients = await three(make)
    with no_task_is_left():
        for number in range(60):
            here = f"{name}:{number}."
            held = Held(await holds(here, fair=fair).acquire(timeout=None))
            victim = await waiter(waits, here, fair)
            next_one = await waiter(other, here, fair)
            held.end()
            await turns(number)
            victim.cancel()
            async with asyncio.timeout(SOON):
                await held.ended()
                assert await next_one > held.fence
                await asyncio.wait({victim})
            await nothing_is_left(clients, here)


# -- at random -------------------------------------------------------------------------------------------------------


@pytest.fixture
def chance() -> random.Random:
    """Seeded anew each time; a failure prints the seed, which $ASYNCLOCK_SEED sets again."""
    seed = int(os.environ.get("ASYNCLOCK_SEED") or random.randrange(2**32))
    print(f"ASYNCLOCK_SEED={seed}")
    return random.Random(seed)


class Crowd:
    """Tasks of several clients that want one name, and may be cancelled anywhere; checks that one at a time has it,
    with a greater fence than all before."""

    def __init__(self, clients: list[Redlock], name: str, chance: random.Random) -> None:
        self.served = 0
        self._clients = clients
        self._name = name
        self._chance = chance
        self._inside = 0
        self._fence = 0

    async def round(self, many: int = 8) -> None:
        """Some come, one after the other; all are served, cancelled, or gone when their time is up."""
        chance = self._chance
        fair = chance.random() < 0.5
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(chance.randint(2, many)):
            want = partial(self._want, chance.choice(self._clients), fair, chance.choice([None, None, None, 0, 0.002]))
            tasks.append(asyncio.create_task(self._cut(want) if chance.random() < 0.6 else want()))
            await turns(chance.choice([0, 0, 1, 2, 5]))
        async with asyncio.timeout(SOON):
            await asyncio.gather(*tasks)
        assert not self._inside

    async def _cut(self, want: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel it at one of its awaits, or after so many turns of the loop."""
        chance = self._chance
        if chance.random() < 0.5:
            await cancelled_at(want, chance.randrange(6), late=chance.random() < 0.5)
            return
        task = asyncio.create_task(want())
        await turns(chance.randrange(40))
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _want(self, redlock: Redlock, fair: bool, timeout: float | None) -> None:
        try:
            lease = await redlock(self._name, fair=fair).acquire(timeout=timeout)
        except QuorumUnavailable:  # no word in so short a time
            assert timeout is not None
            return
        if lease is None:
            return
        async with lease:
            assert not self._inside
            assert lease.fence > self._fence
            self._inside, self._fence = 1, lease.fence
            self.served += 1
            try:
                await turns(self._chance.choice([0, 0, 1, 5]))
            finally:
                self._inside = 0


async def test_e5_cancelled_at_random(make: Make, name: str, chance: random.Random) -> None:
    """Hundreds of rounds: one holder, rising fences, nobody forgotten, nothing left."""
    clients = await three(make)
    crowd = Crowd(clients, f"{name}.", chance)
    nodes = len(clients[0]._stores)
    rounds = 500 if nodes > 1 else 1500 if isinstance(clients[0]._stores[0], MemoryStore) else 1000
    for number in range(rounds):
        await crowd.round()
        await sent(clients)
        assert [kept(client) for client in clients] == [{}] * 3
        if number % 50 == 0:
            assert not await known(clients[0], f"{name}.")
    await nothing_is_left(clients, f"{name}.")
    assert crowd.served > rounds


async def test_e15_cancelled_at_random_where_notices_get_lost(
    make: Make, name: str, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of all notices is never heard, and tickets are sent anew at odd moments, so that many are renewed as the
    grant comes: found at the next renewal; one holder, rising fences, nobody forgotten, nothing left."""
    clients = await three(make, lease=1.2)
    lost: list[bytes] = []

    def unsure(hear: Callable[[int, bytes], None], index: int, notice: bytes) -> None:
        if chance.random() < 1 / 3:
            lost.append(notice)
        else:
            hear(index, notice)

    for client in clients:
        session = client._session()
        monkeypatch.setattr(session, "heard", partial(unsure, session.heard))
    crowds = [Crowd(clients, f"{name}:{number}.", chance) for number in range(50)]

    async def rounds(crowd: Crowd) -> None:
        for _ in range(8):
            await crowd.round(many=5)

    async def listen_again() -> None:
        while True:
            await asyncio.sleep(chance.uniform(0, 0.3))
            chance.choice(clients)._session().listening(0)

    again = asyncio.create_task(listen_again())
    await asyncio.gather(*map(rounds, crowds))
    again.cancel()
    await asyncio.wait({again})
    for number in range(len(crowds)):
        await nothing_is_left(clients, f"{name}:{number}.")
    assert sum(crowd.served for crowd in crowds) > 400
    assert sum(notice.split()[1] != b"0" for notice in lost) > 20  # calls, not what holders are told


async def test_e3_cancelled_at_random_while_votes_are_split(
    five: list[Server], name: str, chance: random.Random
) -> None:
    """Each node lets in another first, by lot, and any may be cancelled meanwhile: the others are served, and nothing
    is left."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(behind_gates(five, who, lease=LONG, node_timeout=5.0)) for who in range(3)
        ]
        clients = [client for client, _ in made]
        for client in clients:
            await client.health()
        crowd = Crowd(clients, f"{name}.", chance)
        for _ in range(500):
            playing = asyncio.create_task(crowd.round())
            for index in range(len(five)):
                first = chance.randrange(3)
                for who, (_, gates) in enumerate(made):
                    if who != first:
                        gates[index].open.clear()
            await turns(chance.randrange(40))
            for _, gates in made:
                for gate in gates:
                    gate.open.set()
            await playing
            await sent(clients)
            assert [kept(client) for client in clients] == [{}] * 3
        for each in five:
            with each.cli() as cli:
                assert cli.keys(f"*{name}.*") == [keys("", f"{name}.").fence.encode()]
        assert crowd.served > 500


# -- the client closes -----------------------------------------------------------------------------------------------


@fairness
@pytest.mark.parametrize("holder", ["itself", "another"])
async def test_closed_while_tasks_wait(make: Make, name: str, holder: str, fair: bool) -> None:
    """Whatever turn the client closes in, and whether or not the holder gives back just then: each task that waits
    through it gets ConfigError, nothing is left, and who waits elsewhere is served."""
    other, third = make(lease=LONG), make(lease=LONG)
    for client in (other, third):
        await client.health()
    for number in range(20):
        here = f"{name}:{number}."
        closes = make(lease=LONG)
        await closes.health()
        held = Held(await (closes if holder == "itself" else other)(here, fair=fair).acquire(timeout=None))
        tasks = [asyncio.create_task(tenure(closes, here, fair)) for _ in range(5)]
        await turns(number)
        elsewhere = asyncio.create_task(tenure(third, here, fair))
        await turns(number // 2)
        if number % 2 and holder == "another":
            held.end()
        await closes.aclose()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for each in results:
            assert isinstance(each, ConfigError | LockLost)
        assert kept(closes) == {}
        if holder == "another":
            await held.ended()
        async with asyncio.timeout(SOON):
            assert await elsewhere > held.fence
        await nothing_is_left([other, third], here)
