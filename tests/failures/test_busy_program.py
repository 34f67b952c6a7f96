"""A program that was too busy to read is no silent server (HAZARDS C10, C21)."""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any

import pytest

from asynclock import Redlock
from asynclock._clock import running_for
from tests.support.cut_servers import Clocked
from tests.support.fake_clock import FakeClock
from tests.support.probes import connection_of, nodes_of, socket_of, unanswered, unsent
from tests.support.servers import Server
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, until

STEP = 0.01
"""Of a limit of one second: so much passes between two looks of `running_for`."""


class Limited:
    """A task that waits for ever under `running_for(1.0)`, on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        with pytest.raises(TimeoutError):
            async with running_for(1.0, self.clock):
                await asyncio.Event().wait()

    async def ended(self) -> bool:
        await turns(3)
        return self.task.done()


async def test_c21_a_limit_ends_when_its_time_has_passed() -> None:
    """The loop is on time."""
    limited = Limited()
    assert not await limited.ended()
    limited.clock.advance(0.94)
    assert not await limited.ended()
    limited.clock.advance(0.07)
    assert await limited.ended()


async def test_c21_time_in_which_the_loop_was_blocked_does_not_count() -> None:
    """Neither at the end of the limit nor before: an answer that came meanwhile is not read yet, and the commands that
    follow it are not sent. The rest of the limit is left after each block, whenever the block ends."""
    limited = Limited()
    await limited.ended()
    for late in (0.9, 0.011, 1.0, 30.0, 0.02):
        limited.clock.block(STEP + late)
        limited.clock.advance(0.0)
        assert not await limited.ended()
        limited.clock.advance(0.1)
    limited.clock.advance(0.44)
    assert not await limited.ended()
    limited.clock.advance(0.07)
    assert await limited.ended()


async def test_c21_a_loop_that_is_always_blocked_ends_a_limit_too() -> None:
    """A first connection takes 50 turns of the loop: so many blocks do not end it, and twice as many do, with one more
    turn to read what has come."""
    limited = Limited()
    await limited.ended()
    for blocks in (50, 51):
        assert not await limited.ended()
        for _ in range(blocks):
            limited.clock.block(STEP + 1.0)
            limited.clock.advance(0.0)
    assert await limited.ended()


async def test_c21_a_busy_loop_stretches_a_limit_by_its_delays_only() -> None:
    """The loop runs timers each 15 ms: some are late, others are not. A limit of one second ends after twice that time
    at most."""
    limited = Limited()
    await limited.ended()
    began = limited.clock.now()
    while not await limited.ended():
        limited.clock.block(0.0125)
        limited.clock.advance(0.0)
        limited.clock.block(0.0225)
        limited.clock.advance(0.0)
    assert 1.0 <= limited.clock.now() - began <= 2.0


async def test_c21_what_came_during_the_last_block_is_read() -> None:
    """The limit passes while the loop is blocked: it ends after one more turn."""
    limited = Limited()
    await limited.ended()
    limited.clock.advance(0.995)
    limited.clock.block(1.0)
    limited.clock.advance(0.0)
    assert not await limited.ended()
    limited.clock.advance(STEP)
    assert await limited.ended()


async def test_c21_a_result_in_time_ends_no_task() -> None:
    """The timer is gone with the block."""
    clock = FakeClock()
    async with running_for(1.0, clock):
        clock.advance(0.5)
    assert clock.armed == 0


@pytest.mark.parametrize("late", [0.0, 5.0])
async def test_c10_a_reply_in_the_socket_is_read_first(server: Server, name: str, late: float) -> None:
    """The loop is blocked for longer than the node timeout, and the reply comes meanwhile. The timer may be due at the
    very end of that time, so that it is on time."""
    clock = FakeClock()
    async with Redlock(Clocked(server.url, clock), node_timeout=1.0) as client:
        connection = connection_of(nodes_of(client)[0])
        server.freeze()
        acquiring = asyncio.create_task(client(name).acquire(timeout=0))
        while not unanswered(connection) or unsent(connection):
            await asyncio.sleep(0)
        server.thaw()
        assert select.select([socket_of(connection).fileno()], [], [], LIMIT)[0]
        for _ in range(3):
            clock.block(1.0 + late)
            clock.advance(0.0)
        assert unanswered(connection)
        lease = await acquiring
        assert lease is not None
        assert lease.held


async def test_c10_a_server_has_time_after_a_block(server: Server, name: str) -> None:
    """uvloop writes at the end of a turn: a command of the turn that blocks leaves after it. The server then has its
    time, and a moment in which it gets no CPU time is no silence."""
    clock = FakeClock()
    async with Redlock(Clocked(server.url, clock), node_timeout=1.0) as client:
        connection = connection_of(nodes_of(client)[0])
        server.freeze()
        acquiring: asyncio.Task[Any] = asyncio.create_task(client(name).acquire(timeout=0))
        while not unanswered(connection) or unsent(connection):
            await asyncio.sleep(0)
        clock.block(1.0 + 5.0)
        clock.advance(0.0)
        clock.advance(0.9)
        await turns()
        assert not acquiring.done()
        server.thaw()
        await until(lambda: not unanswered(connection))
        await acquiring


async def test_c10_a_silent_server_is_found_while_commands_are_sent(server: Server, name: str) -> None:
    """The program sends commands in each turn of the loop, so some are unsent whenever a timer fires. The silent server
    is down all the same, and what waits for its answers fails."""
    clock = FakeClock()
    async with Redlock(Clocked(server.url, clock), node_timeout=1.0) as client:
        await client.health()
        (node,) = nodes_of(client)
        connection = connection_of(node)
        server.freeze()
        acquiring = [asyncio.create_task(client(name).acquire(timeout=0))]
        while not unanswered(connection) or unsent(connection):
            await asyncio.sleep(0)
        for number in range(60):
            acquiring.append(asyncio.create_task(client(f"{name}:{number}").acquire(timeout=0)))
            while connection_of(node) is connection and not unsent(connection):
                await asyncio.sleep(0)
            clock.advance(0.1)
        assert connection_of(node) is not connection
        server.thaw()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*acquiring, return_exceptions=True)


@pytest.mark.parametrize("question", ["inspect", "health"])
async def test_c10_a_question_is_answered_after_a_block(server: Server, name: str, question: str) -> None:
    """Both wait for a second. The loop is blocked for longer, and the reply comes meanwhile: the question goes on after
    it, with another command where the server has forgotten its scripts. The block is real, because the wait is one of
    asyncio."""
    async with Redlock(server.url) as client:
        await client.health()
        connection = connection_of(nodes_of(client)[0])
        with server.cli() as cli:
            cli.script_flush()
        server.freeze()
        asking = asyncio.create_task(client.inspect(name) if question == "inspect" else client.health())
        while not unanswered(connection) or unsent(connection):
            await asyncio.sleep(0)
        server.thaw()
        assert select.select([socket_of(connection).fileno()], [], [], LIMIT)[0]
        time.sleep(1.1)
        found: Any = await asking
        assert question == "inspect" or found.ok
