"""Tasks of one process that want one name: what they ask for, and how they leave the queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import ConfigError, Lock, Redlock
from asynclock.acquire.local_queue import Line
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


@pytest.mark.parametrize(("held", "asked"), CLASHES)
async def test_c22_another_kind_of_a_name_held_in_this_process(
    make: Callable[..., Redlock], name: str, held: str, asked: str
) -> None:
    """Another task of the process that holds it gets the ConfigError that another process gets, which names both."""
    holds, other = make(lease=LONG), make(lease=LONG)
    async with KINDS[held](holds, name), asyncio.timeout(LIMIT):

        async def told(client: Redlock) -> str:
            with pytest.raises(ConfigError) as caught:
                await KINDS[asked](client, name).acquire(timeout=LIMIT)
            return str(caught.value)

        here = await asyncio.create_task(told(holds))
        assert FAMILY.get(held, "mutex") in here
        assert FAMILY.get(asked, "mutex") in here
        assert here == await asyncio.create_task(told(other))
    await works(holds, name)


class Stander:
    """Stands in a queue, and counts how often any of them is compared with another."""

    compared = 0
    standing = True

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)


def test_b11_to_leave_the_queue_looks_at_no_other() -> None:
    """20,000 tasks that are cancelled in any order look at each other hardly ever: each leaves in constant time."""
    count = 2_000
    lines: dict[str, Any] = {}
    line = lines["name"] = Line("name")
    standers: list[Any] = [Stander() for _ in range(count)]
    for stander in standers:
        line.stand(stander)
    random.shuffle(standers)
    Stander.compared = 0
    for stander in standers:
        line.leave(stander, lines)
    assert Stander.compared < count
    assert not lines


def test_b11_a_lease_that_ends_looks_at_no_other(name: str) -> None:
    """The same of the leases that a process has of one name, such as the permits of a semaphore."""
    count = 2_000

    async def run() -> None:
        async with Redlock("memory:") as client:
            session = client._session()
            leases: list[Any] = [Stander() for _ in range(count)]
            session.held[name] = dict.fromkeys(leases)
            random.shuffle(leases)
            Stander.compared = 0
            for each in leases:
                session.gone(name, each)
            assert Stander.compared < count
            assert name not in session.held

    asyncio.run(run())
