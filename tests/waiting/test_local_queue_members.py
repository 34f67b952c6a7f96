"""Tasks of one process that want one name: the kinds they ask for, and how they leave the local queue."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from asynclock import ConfigError, Lock, Redlock
from asynclock.protocol.hold import Hold
from asynclock.protocol.holds import Holds
from asynclock.protocol.local_queue import LocalQueues
from tests.support.kinds_of_node import in_memory
from tests.support.waiters import LIMIT, LONG, works

KINDS: dict[str, Callable[[Redlock, str], Lock]] = {
    "mutex": lambda client, name: client(name),
    "fair": lambda client, name: client(name, fair=True),
    "reentrant": lambda client, name: client(name, reentrant=True),
    "read": lambda client, name: client.read(name),
    "write": lambda client, name: client.write(name),
    "semaphore": lambda client, name: client.semaphore(name, 2),
    "multi": lambda client, name: client.multi(name, f"{name}:other"),
    "multi of reads": lambda client, name: client.multi(client.read(name), f"{name}:other"),
}
FAMILY = {"read": "read-write lock", "write": "read-write lock", "semaphore": "semaphore"}
FAMILY["multi of reads"] = "read-write lock"


def _clashes(held: str, asked: str) -> bool:
    return FAMILY.get(held, "mutex") != FAMILY.get(asked, "mutex")


CLASHES = [(held, asked) for held in KINDS for asked in KINDS if _clashes(held, asked)]


@in_memory
@pytest.mark.parametrize(("held", "asked"), CLASHES)
async def test_c22_another_kind_of_a_name_held_in_this_process(
    make: Callable[..., Redlock], name: str, held: str, asked: str
) -> None:
    """Another task of the process that holds it gets the ConfigError that another process gets, which names both."""
    await gets_the_error_of_another_process(make, name, held, asked)


@pytest.mark.parametrize(("held", "asked"), list(permutations(["mutex", "read", "semaphore"], 2)))
async def test_c22_a_server_says_the_same(make: Callable[..., Redlock], name: str, held: str, asked: str) -> None:
    """The servers' own error for another process is the one that this process gives."""
    await gets_the_error_of_another_process(make, name, held, asked)


async def gets_the_error_of_another_process(make: Callable[..., Redlock], name: str, held: str, asked: str) -> None:
    holds, other = make(lease=LONG), make(lease=LONG)
    async with KINDS[held](holds, name), asyncio.timeout(LIMIT):

        async def refusal(client: Redlock) -> str:
            with pytest.raises(ConfigError) as caught:
                await KINDS[asked](client, name).acquire(timeout=LIMIT)
            return str(caught.value)

        here = await asyncio.create_task(refusal(holds))
        assert FAMILY.get(held, "mutex") in here
        assert FAMILY.get(asked, "mutex") in here
        assert here == await asyncio.create_task(refusal(other))
    await works(holds, name)


class Compared:
    """Counts how often any of them is compared with another."""

    compared = 0
    waits = True
    names = ("name",)

    def __init__(self) -> None:
        self.tenures: list[Any] = []
        self.op = SimpleNamespace(id=secrets.token_hex(16), kind=SimpleNamespace(shared=True))

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)


def test_b11_leaving_the_queue_compares_no_others() -> None:
    """2,000 tasks are cancelled in any order, with almost no comparisons: each leaves in constant time."""
    count = 2_000
    queues = LocalQueues()
    queue = queues.of("name")
    waiters: list[Any] = [Compared() for _ in range(count)]
    for waiter in waiters:
        queue.join(waiter)
    random.shuffle(waiters)
    Compared.compared = 0
    for waiter in waiters:
        queue.leave(waiter)
    assert Compared.compared < count
    assert not queues


def test_b11_a_hold_that_ends_compares_no_others() -> None:
    """The same for the holds that a process has of one name, such as the permits of a semaphore."""
    count = 2_000
    nothing: Any = None
    holds = Holds(nothing, nothing, nothing, nothing, nothing)
    some: list[Any] = [Compared() for _ in range(count)]
    for each in some:
        holds.add(each)
    random.shuffle(some)
    Compared.compared = 0
    for each in some:
        holds.remove(each)
    assert Compared.compared < count
    assert holds.get("name") is None


def test_b11_an_acquire_compares_no_other_tasks() -> None:
    """A task that asks for one of 2,000 permits has none, or a few: the tasks of the others are not looked at. A task
    that has taken a lease over from the task that acquired it counts as its owner."""
    count = 2_000
    nothing: Any = None
    holds = Holds(nothing, nothing, nothing, nothing, nothing)
    some, tasks = [Compared() for _ in range(count)], [Compared() for _ in range(count)]
    for each, task in zip(some, tasks, strict=True):
        each.tenures.append(SimpleNamespace(task=task, held=True))
        hold: Any = each
        holds.add(hold)
    Compared.compared = 0
    assert holds.number_of_task("name", Compared()) == 0
    assert holds.number_of_task("name", tasks[7]) == 1
    some[8].tenures[0].task = tasks[7]
    hold = some[8]
    holds.task_changed(hold)
    assert holds.number_of_task("name", tasks[7]) == 2
    assert holds.number_of_task("name", tasks[8]) == 0
    for each in some:
        hold = each
        holds.remove(hold)
    assert Compared.compared < 10
    assert holds.get("name") is None


@in_memory
async def test_b11_a_notice_reaches_one_hold(
    make: Callable[..., Redlock], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An operator breaks a name with many holds. Each has a notice of its own, which no other hold looks at."""
    told: list[str] = []
    real = Hold.broken

    def broken(hold: Hold, by: str = "") -> None:
        told.append(hold.op.id)
        real(hold, by)

    monkeypatch.setattr(Hold, "broken", broken)
    permits, client = 20, make(lease=LONG)
    leases = [await client.semaphore(name, permits).acquire(timeout=0) for _ in range(permits)]
    assert await client.break_lock(name)
    for lease in leases:
        assert lease is not None
        await lease.wait_lost()
    assert sorted(told) == sorted([hold_id for hold_id in set(told) for _ in range(2)])  # one says who broke it
    assert len(set(told)) == permits
