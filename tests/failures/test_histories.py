"""Many tasks of several clients use a lock while connections are cut and servers die. What they were told could have
happened one after the other (`spec/linearizability.py`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from asynclock import Redlock
from spec.linearizability import check
from spec.sequential import Mutex, Once, ReadWrite, Semaphore, falling
from tests.support.recorder import Recorder
from tests.support.servers import Server
from tests.support.waiters import LIMIT, LONG, PATIENT, urls_of

each_number = pytest.mark.parametrize("nodes", [1, 5])


@asynccontextmanager
async def disturbed(servers: Sequence[Server]) -> AsyncIterator[None]:
    """Meanwhile all connections are cut at one server after the other. Of several servers one dies."""

    async def disturb() -> None:
        for turn in range(1000):
            server = servers[turn % len(servers)]
            if turn == 1 and len(servers) > 1:
                servers[-1].kill()
            elif server.process.poll() is None:
                with server.cli() as cli:
                    for kind in ("normal", "pubsub"):
                        cli.client_kill_filter(_type=kind, skipme=True)
            await asyncio.sleep(0.3)

    task = asyncio.create_task(disturb())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def crowd(
    five: Sequence[Server], nodes: int, chance: random.Random
) -> AsyncIterator[tuple[Recorder, list[Redlock]]]:
    """Three clients, and what their tasks do is recorded."""
    servers = five[:nodes]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redlock(*urls_of(servers), lease=LONG, **PATIENT)) for _ in range(3)]
        await stack.enter_async_context(disturbed(servers))
        async with asyncio.timeout(2 * LIMIT):
            recorder = Recorder(chance)
            for each in clients:
                recorder.listen_to(each)
            yield recorder, clients


@each_number
@pytest.mark.parametrize("kind", ["mutex", "reentrant", "fair", "semaphore", "read-write"])
async def test_the_history_of_a_lock(
    five: Sequence[Server], name: str, nodes: int, kind: str, chance: random.Random
) -> None:
    """Exclusion, tokens, permits and owners, at the moments at which the tasks saw them."""
    specs: dict[str, Any] = {
        "mutex": Mutex(),
        "reentrant": Mutex(reentrant=True),
        "fair": Mutex(),  # the order in which tasks came is not seen here: tests/locks/test_fair.py
        "semaphore": Semaphore(3),
        "read-write": ReadWrite(),
    }
    async with crowd(five, nodes, chance) as (recorder, clients):

        async def work(client: Redlock, who: str) -> None:
            match kind:
                case "mutex":
                    await recorder.hold(who, "acquire", client(name))
                case "reentrant":
                    await recorder.hold(who, "acquire", client(name, reentrant=True), again=chance.random() < 0.5)
                case "fair":
                    await recorder.hold(who, "acquire", client(name, fair=True))
                case "semaphore":
                    await recorder.hold(who, "acquire", client.semaphore(name, 3))
                case _ if chance.random() < 0.6:
                    await recorder.hold(who, "read", client.read(name))
                case _:
                    await recorder.hold(who, "write", client.write(name))

        await recorder.crowd(clients, work, tasks=12, rounds=8, cancelled=0.2)
    assert len(recorder.calls) > 30
    assert (violation := check(specs[kind], recorder.calls)) is None, str(violation)
    if kind not in ("reentrant", "fair"):
        assert falling(recorder.calls) is None


@each_number
async def test_the_history_of_once(five: Sequence[Server], name: str, nodes: int, chance: random.Random) -> None:
    """One run at a time, and none after one that has returned. Most runs fail."""
    async with crowd(five, nodes, chance) as (recorder, clients):

        async def work(client: Redlock, who: str) -> None:
            await recorder.once(who, client.once(name, within=60), fails=0.97)

        await recorder.crowd(clients, work, tasks=12, rounds=12, cancelled=0.0)
    assert {"run", "skip"} <= {call.what for call in recorder.calls}
    assert (violation := check(Once(), recorder.calls)) is None, str(violation)
