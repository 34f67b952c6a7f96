"""The event loop is blocked while a database answers: the answer is there, and nobody has read it."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, pool, transactions
from asynclock.stores.sql.limits import limited
from asynclock.stores.sql.lines import AsyncmyLine, AsyncpgLine
from tests.support.proxy import stepped
from tests.support.waiters import LIMIT, LONG

pytestmark = pytest.mark.both_loops("uvloop runs timers before it reads")

BLOCKED = 1.5
"""Seconds, longer than the limits of the tests, by as much as a loop may need to read what has come."""


@pytest.mark.parametrize(
    ("service", "kind", "method", "several"),
    [
        ("postgresql", AsyncpgLine, "fetch", False),
        ("postgresql", AsyncpgLine, "fetch", True),
        ("mariadb", AsyncmyLine, "change", False),
        ("mariadb", AsyncmyLine, "fetch", True),
    ],
)
async def test_an_answer_that_came_while_the_loop_was_blocked_counts(
    service: str,
    kind: Any,
    method: str,
    several: bool,
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an acquire in one statement, and of one in a transaction. The time of its connection ends meanwhile."""
    blocks, events, real = list[float](), list[Any](), getattr(kind, method)

    def block(number: int, future: object) -> None:
        del number, future
        if blocks:  # the statement is sent
            time.sleep(blocks.pop())

    async def blocked(line: Any, *arguments: Any) -> Any:
        return await stepped(real(line, *arguments), block)

    store = SQLStore(request.getfixturevalue(f"{service}_url"), name.replace(":", "_"))
    async with Redlock(store, lease=LONG, node_timeout=5.0, patience=LIMIT) as client:
        lock = client.multi(name, f"{name}:b") if several else client(name)
        async with lock:
            pass
        client.subscribe(events.append)
        monkeypatch.setattr(kind, method, blocked)
        blocks.append(BLOCKED)
        with monkeypatch.context() as limited_here:
            limited_here.setattr(pool, "LIMIT", 0.5)
            limited_here.setattr(transactions, "LIMIT", 0.5)
            lease = await lock.acquire(timeout=0)
        assert not blocks
        assert lease is not None
        await lease.release()
    assert [each for each in events if type(each).__name__ in ("NodeDown", "ReleaseFailed")] == []


async def test_a_connect_whose_answers_came_while_the_loop_was_blocked_succeeds() -> None:
    """It takes some turns of the loop to read them."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    begun = asyncio.Event()

    async def connect() -> bytes:
        begun.set()
        answer = await asyncio.get_running_loop().sock_recv(ours, 1)
        for _ in range(5):
            await asyncio.sleep(0)
        return answer

    with ours, theirs:
        connecting = asyncio.create_task(limited(connect(), 0.5))
        await begun.wait()
        theirs.send(b"a")
        time.sleep(BLOCKED)
        assert await connecting == b"a"
