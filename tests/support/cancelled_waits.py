"""Acquires that are cut short while they wait, and what they must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from asynclock import Redlock
from asynclock.locks.lease import Lease
from asynclock.stores.transactional import TransactionalStore
from asynclock.stores.zookeeper import ZooKeeperStore
from tests.support.probes import left_over, nodes_of, ping, stores_of
from tests.support.proxy import cancelled_at, stepped
from tests.support.still_clock import idle
from tests.support.stored_keys import keys_at
from tests.support.user_store import state_of
from tests.support.waiters import LONG, until
from tests.support.zookeeper_probes import contenders_of, seen_at

SOON = 10.0
"""Seconds that only a lost wake-up could take: a ticket of LONG is renewed after 16 at the soonest."""

Make = Callable[..., Redlock]


# -- what may not be left --------------------------------------------------------------------------------------------


def kept(redlock: Redlock) -> dict[str, Any]:
    """What a client still keeps of its locks."""
    contenders = contenders_of(redlock)
    return {**left_over(redlock), **({"contenders": contenders} if contenders else {})}


async def known(redlock: Redlock, name: str) -> list[Any]:
    """What the servers know of a name, without its fence."""
    found: list[Any] = []
    for store in stores_of(redlock):
        if isinstance(store, TransactionalStore):
            state = state_of(store, name)
            found += [*state.holds, *state.queue, *state.undone]
        elif isinstance(store, ZooKeeperStore):
            found += await seen_at(nodes_of(redlock)[0], name)
        else:
            found += [key for key in await keys_at(store, f"*{name}*") if not key.endswith("fence")]
    return found


def connected(client: Redlock) -> bool:
    """Whether all of its nodes are."""
    return all(node.error is None for node in nodes_of(client))


async def sent(clients: Iterable[Redlock], name: str = "any") -> None:
    """Return once the servers have carried out, and answered, all that these clients have sent; a SQL database: all
    about that name."""
    for client in clients:
        await until(partial(connected, client))  # a client enters once a majority is connected
        await asyncio.gather(*(ping(node, name) for node in nodes_of(client)))
    for _ in range(3):  # a memory store answers in the next turn
        await asyncio.sleep(0)


async def nothing_is_left(clients: list[Redlock], name: str) -> None:
    """No hold, no ticket, no tombstone, and in the clients nothing that waits, holds or undoes."""
    await sent(clients, name)
    assert not await known(clients[0], name)
    assert [kept(client) for client in clients] == [{}] * len(clients)


@contextmanager
def no_task_is_left() -> Iterator[None]:
    before = asyncio.all_tasks()
    yield
    left = [
        task for task in asyncio.all_tasks() - before if task.get_name() != "asynclock removes rows"
    ]  # from time to time
    assert not left, left


# -- waiters -----------------------------------------------------------------------------------------------------------


async def three(make: Make, lease: float = LONG, node_timeout: float = 5.0) -> list[Redlock]:
    """Clients that are connected. A busy machine keeps the node timeout: after it an undo leaves a tombstone, which is
    no rest of a wait."""
    clients = [make(lease=lease, node_timeout=node_timeout) for _ in range(3)]
    for client in clients:
        await client.health()
    return clients


async def tenure(redlock: Redlock, name: str, fair: bool) -> int:
    """Hold it for a turn; returns its fence."""
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
    """A lease that is released on request; or at the end, by hand."""

    def __init__(self, lease: Lease) -> None:
        self.fence = lease.fence
        self._lease = lease
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        self._task = self._task or asyncio.create_task(self._lease.release())

    async def end_when_idle(self, client: Redlock) -> None:
        """Release it once all tasks of this client that want a lock wait for a notice."""
        while not idle(client):
            await asyncio.sleep(0)
        self.end()

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
        """Cut at the `index`-th await; the holder releases at the `ends`-th, or once all are idle. Returns whether
        there were so many awaits. Raises TimeoutError where a waiter is forgotten."""
        held = Held(await self._holder(self.name, fair=self._fair).acquire(timeout=None))
        if self._where == "behind":
            self._company = [await waiter(self.waits, self.name, self._fair)]
        elif self._where == "first":  # in the next turn, after the task that is cut
            asyncio.get_running_loop().call_soon(self._join)
        ending = asyncio.create_task(held.end_when_idle(self.waits))

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
