"""Servers that fail while tasks wait for a lock: what each task is told, and when (HAZARDS F3, F19)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest

from asynclock import ConfigError, Lease, QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.protocol import machine
from asynclock.rules.model import Verb
from tests.support.cut_servers import Clocked, FaultyProxy, proxies_to
from tests.support.fake_clock import FakeClock
from tests.support.probes import (
    acquisitions_of,
    asks_again_at,
    connection_of,
    nodes_of,
    pauses,
    reconnected,
    send_ticket_again,
    unanswered,
)
from tests.support.servers import Server
from tests.support.still_clock import Still, idle, turns
from tests.support.told import told
from tests.support.waiters import LIMIT, LONG, back, in_queue, queue, until, urls_of
from tests.support.waiting_probes import report

PATIENCE = 5.0
STEP = 0.05
"""Seconds by which a test moves the clock of a client."""

both = pytest.mark.parametrize("nodes", [1, 5])


def _set(option: str, value: str) -> Callable[[Server], object]:
    def fault(server: Server) -> None:
        with server.cli() as cli:
            cli.config_set(option, value)

    return fault


def _command(*words: str) -> Callable[[Server], object]:
    def fault(server: Server) -> None:
        with server.cli() as cli:
            cli.execute_command(*words)  # type: ignore[no-untyped-call]

    return fault


FAULTS: dict[str, Callable[[Server], object]] = {
    "killed": Server.kill,
    "frozen": Server.freeze,
    "paused": _command("CLIENT", "PAUSE", "600000", "ALL"),
    "OOM": _set("maxmemory", "1"),
    "READONLY": _command("REPLICAOF", "127.0.0.1", "1"),
    "NOREPLICAS": _set("min-replicas-to-write", "1"),
    "evalsha": _command("ACL", "SETUSER", "default", "-evalsha"),
}


class Waiting:
    """A client whose clock the test moves, its servers, and a holder of the name on another client."""

    def __init__(self, servers: Sequence[Server], name: str, lease: float = 6.0) -> None:
        self._lease = lease
        self.clock = FakeClock()
        self.servers = servers
        self.name = name
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        holder = await self._stack.enter_async_context(Redlock(*urls_of(self.servers)))
        self.held: Lease = await holder(self.name).acquire(timeout=None)
        stores = [Clocked(each.url, self.clock) for each in self.servers]
        self.client = Redlock(*stores, lease=self._lease, patience=PATIENCE)
        await self._stack.enter_async_context(self.client)
        await back(self.client)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for each in self.servers:
            each.thaw()
            each.kill()
        await turns()  # each connection reads its end: a clock that passes before would look for it each millisecond
        self.clock.advance(100.0)
        await self._stack.aclose()

    async def task(self, timeout: float | None) -> asyncio.Task[tuple[object, float]]:
        """A task that waits: its outcome, and the seconds after which it came."""
        before = len(acquisitions_of(self.client))
        task = asyncio.create_task(self.outcome(timeout))
        await until(lambda: len(acquisitions_of(self.client)) > before and idle(self.client))
        return task

    async def outcome(self, timeout: float | None) -> tuple[object, float]:
        began = self.clock.now()
        try:
            return await self.client(self.name).acquire(timeout=timeout), self.clock.now() - began
        except (QuorumUnavailable, ConfigError) as error:
            return error, self.clock.now() - began

    def fail(self, fault: str) -> None:
        """A majority fails in this way."""
        for each in self.servers[: len(self.servers) // 2 + 1]:
            FAULTS[fault](each)

    async def pass_time(self, *tasks: asyncio.Task[Any], until: float = 1_000.0, answers: bool = False) -> None:
        """Move the clock until the tasks are done, or for so many seconds; servers have time to answer meanwhile.
        `answers`: the clock stands still until they have."""
        ends = self.clock.now() + until
        async with asyncio.timeout(LIMIT):
            while not all(task.done() for task in tasks) and self.clock.now() < ends:
                self.clock.advance(STEP)
                await asyncio.sleep(0.002)
                while answers and any(unanswered(connection_of(each)) for each in nodes_of(self.client)):
                    await asyncio.sleep(0.002)


@both
@pytest.mark.parametrize("fault", FAULTS)
async def test_f19_servers_fail_while_a_task_waits(five: Sequence[Server], name: str, nodes: int, fault: str) -> None:
    """A refusal from before says nothing: at the end of its time the waiter learns of the outage, and not that another
    owner holds the name. One that has more time learns it after its patience, from the next renewal of its ticket on;
    so does one that waits behind it in this process."""
    async with Waiting(five[:nodes], name) as waiting:
        tasks = [await waiting.task(timeout) for timeout in (3600, 3.0, None)]
        waiting.fail(fault)
        await waiting.pass_time(*tasks, answers=fault == "evalsha")
        for task, limit in zip(tasks, (2.0 + PATIENCE, 3.0, 2.0 + PATIENCE), strict=True):
            outcome, seconds = task.result()
            assert isinstance(outcome, ConfigError if fault == "evalsha" else QuorumUnavailable), (outcome, seconds)
            assert seconds <= limit + 1.0, outcome


@both
@pytest.mark.parametrize("behind", [False, True])
async def test_f19_an_old_refusal_is_no_answer(five: Sequence[Server], name: str, nodes: int, behind: bool) -> None:
    """No ticket is due for renewal. The waiter asks once more before its time is up, or has the task ask that it waits
    behind. Of servers that are frozen it hears nothing."""
    async with Waiting(five[:nodes], name, lease=LONG) as waiting:
        tasks = [await waiting.task(timeout) for timeout in ([None, 3.0] if behind else [3.0])]
        waiting.fail("frozen")
        await waiting.pass_time(tasks[-1])
        outcome, seconds = tasks[-1].result()
        assert isinstance(outcome, QuorumUnavailable)
        assert 2.0 < seconds <= 3.0 + 4 * STEP  # the clock is moved in steps, so it may ask late
        tasks[0].cancel()
        await asyncio.wait(tasks)


@both
async def test_f19_a_failed_reconnect_wakes_the_waiters(five: Sequence[Server], name: str, nodes: int) -> None:
    """Their patience begins then, and not with the next renewal of their tickets."""
    async with Waiting(five[:nodes], name) as waiting:
        task = await waiting.task(None)
        with told(waiting.client) as seen:
            waiting.fail("killed")
            await until(lambda: len(seen.of(NodeDown)) > nodes // 2)
        await waiting.pass_time(task)
        outcome, seconds = task.result()
        assert isinstance(outcome, QuorumUnavailable)
        assert "refused the connection" in str(outcome)
        assert PATIENCE <= seconds <= PATIENCE + 0.5


@both
async def test_f19_another_owner_is_told_after_an_answer(name: str, nodes: int) -> None:
    """The servers work: None, in time, for each of those behind the first waiter of this process. One question shortly
    before is for all of them."""
    still = Still(nodes, name)
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        first = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: idle(client))
        tasks = [asyncio.create_task(client(name).acquire(timeout=3.0)) for _ in range(5)]
        await turns()
        ends = still.clock.now() + 3.0
        still.asked()
        while still.clock.now() < ends - 2 * STEP:
            still.clock.advance(STEP)
            await turns()
        assert not any(task.done() for task in tasks)
        still.clock.advance(ends + 0.001 - still.clock.now())
        await turns()
        assert await asyncio.gather(*tasks) == [None] * 5
        assert len(still.asked()) == 1
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.parametrize("behind", [False, True])
async def test_f19_a_blocked_loop_is_no_outage(name: str, behind: bool) -> None:
    """The loop was blocked when the waiter had to ask for the last time, and until its time was over: it asks late."""
    still = Still(1, name)
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        first = asyncio.create_task(client(name).acquire(timeout=None if behind else 3.0))
        await until(lambda: idle(client))
        task = asyncio.create_task(client(name).acquire(timeout=3.0)) if behind else first
        await turns()
        still.asked()
        still.clock.block(10.0)
        still.clock.advance(0.0)
        await turns()
        assert task.done()
        assert task.result() is None
        assert [verb for verb, _ in still.asked()] == [Verb.ACQUIRE, Verb.RELEASE][: 1 if behind else 2]
        first.cancel()
        await asyncio.wait([first])


# -- connections that are closed while they are idle ----------------------------------------------------------------


def _cut(proxies: Sequence[FaultyProxy]) -> None:
    """The connections are closed. New ones are accepted, and wait for the first reply."""
    for each in proxies:
        each.hold_replies()
        each.cut()


@both
async def test_f19_an_idle_connection_that_is_closed_is_no_outage(
    five: Sequence[Server], name: str, nodes: int
) -> None:
    """A waiter keeps its ticket, although it asks while the connection is made again; an acquire with timeout=0 is
    refused by the holder a moment later; no node is reported as down."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Redlock(*urls_of(five[:nodes])))
        held = await other(name).acquire(timeout=None)
        proxies = await proxies_to(stack, five[:nodes])
        options: dict[str, Any] = {"lease": LONG, "connect_timeout": LIMIT, "patience": 0.0, "node_timeout": 5.0}
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), **options))
        with told(client) as seen:
            waiter = asyncio.create_task(client(name).acquire(timeout=None))
            await until(in_queue(five[:nodes], name, 1))
            await until(lambda: idle(client))
            tickets = [queue(each, name) for each in five[:nodes]]
            (waits,) = acquisitions_of(client)
            for _ in range(3):
                _cut(proxies)
                await until(lambda: all(node.error is not None for node in nodes_of(client)))
                send_ticket_again(waits)
                once = asyncio.create_task(client(name).acquire(timeout=0))
                await until(lambda: waits.planner.interrupted is not None)
                await until(lambda: all(map(pauses, acquisitions_of(client))))
                assert [queue(each, name) for each in five[:nodes]] == tickets
                for each in proxies:
                    each.let_go()
                assert await asyncio.wait_for(once, LIMIT) is None
                await until(lambda: waits.planner.interrupted is None and idle(client))
                assert [queue(each, name) for each in five[:nodes]] == tickets
            assert seen.of(NodeDown) == []
            await held.release()
            assert (await asyncio.wait_for(waiter, LIMIT)).held


async def test_f19_waiters_renew_their_tickets_when_connections_are_made_again(name: str) -> None:
    """They do not try: a majority has said that another owner holds the name."""
    still = Still(5, name)
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        task = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: idle(client))
        (waits,) = acquisitions_of(client)
        waits.planner.interrupted = QuorumUnavailable("the connections were lost while they were idle")
        still.asked()
        for index in range(5):
            for _ in range(10):  # each moves the time at which it asks, if a random one is earlier
                reconnected(client, index)
        still.clock.advance(1.0)
        await turns()
        assert [verb for verb, _ in still.asked()] == [Verb.WAIT]
        assert waits.planner.interrupted is None
        task.cancel()
        await asyncio.wait([task])


@both
async def test_f19_servers_that_hang_up_on_each_question(five: Sequence[Server], name: str, nodes: int) -> None:
    """They accept each connection, so no reconnect fails. It is an outage all the same, after connect_timeout."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Redlock(*urls_of(five[:nodes])))
        held = await other(name).acquire(timeout=None)
        proxies = await proxies_to(stack, five[:nodes])
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), patience=0.5, lease=LONG))
        task = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: idle(client))
        (waits,) = acquisitions_of(client)
        for each in proxies:
            each.hang_up_on = b"EVALSHA"
        send_ticket_again(waits)
        with pytest.raises(QuorumUnavailable, match="hung up"):
            await asyncio.wait_for(task, LIMIT)
        for each in proxies:
            each.hang_up_on = b""
        await held.release()


# -- several at once -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("fault", ["OOM", "READONLY", "NOREPLICAS"])
async def test_f3_several_clients_meet_servers_that_do_not_write(
    five: Sequence[Server], name: str, nodes: int, fault: str
) -> None:
    """Nobody holds the name. Each is told of the outage, whatever its time, and none of another owner."""
    servers = five[:nodes]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Redlock(*urls_of(servers), patience=0.5, node_timeout=1.0))
            for _ in range(3)
        ]
        for client in clients:
            await client.health()
        for each in servers[: nodes // 2 + 1]:
            FAULTS[fault](each)
        for timeout in (0, 0.3, None):
            tasks = [client(name).acquire(timeout=timeout) for client in clients * 2]
            for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT):
                assert isinstance(outcome, QuorumUnavailable)
                assert fault in str(outcome)


async def test_b11_an_outage_wakes_the_waiters_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks of the loop run in between. The rest is left alone if the node is back meanwhile."""
    monkeypatch.setattr(machine, "SLICE", -1.0)  # one waiter takes longer
    still, names = Still(1, name), [f"{name}:{i}" for i in range(20)]
    async with still.client(lease=LONG) as holder, still.client(lease=LONG) as client:
        held = [await holder(each).acquire(timeout=None) for each in names]
        tasks = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names]
        await until(lambda: len(acquisitions_of(client)) == len(names) and idle(client))
        (node,), soon = nodes_of(client), still.clock.now() + 1.0

        def woken() -> int:
            return sum(asks_again_at(each) <= soon for each in acquisitions_of(client))

        assert woken() == 0
        report(client, NodeDown(node.label, "it is silent"))
        for number in range(1, 6):
            assert woken() == number
            await asyncio.sleep(0)
        report(client, NodeUp(node.label))
        await turns()
        assert woken() == 6
        report(client, NodeDown(node.label, "it is silent"))
        await turns(len(names))
        assert woken() == len(names)
        assert all(held)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# -- tasks behind others of the process ------------------------------------------------------------------------------


async def test_f19_patience_counts_from_the_first_question_without_an_answer(server: Server, name: str) -> None:
    """The server freezes while nobody holds the name. The first task finds out after its node timeout. Neither it nor
    the tasks behind it wait for longer than their patience, from when they came."""
    async with Waiting([server], f"{name}:other") as waiting:
        waiting.name = name
        server.freeze()
        tasks = []
        for _ in range(3):
            tasks.append(asyncio.create_task(waiting.outcome(10.0)))
            await turns()
            await until(lambda: unanswered(connection_of(nodes_of(waiting.client)[0])) or tasks[0].done())
            waiting.clock.advance(0.2)
        await waiting.pass_time(*tasks)
        for task in tasks:
            outcome, seconds = task.result()
            assert isinstance(outcome, QuorumUnavailable)
            assert PATIENCE - STEP <= seconds <= PATIENCE + 2 * STEP
