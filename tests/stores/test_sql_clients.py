"""Clients of one event loop that share a SQLStore, or look for their notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.stores.port import Notice
from asynclock.stores.sql import SQLStore, inbox
from tests.support.cancelled_waits import SOON, sent, waiter
from tests.support.waiters import LIMIT, LONG, until


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/locks.db"


async def test_a_client_may_begin_while_the_last_one_closes(file: str, name: str) -> None:
    """At whichever moment: it is not left with a database that the other one has closed."""
    store = SQLStore(file)
    for turns in range(40):
        begins, ends = Redlock(store, patience=1), Redlock(store)
        async with ends(name):
            pass
        closing = asyncio.create_task(ends.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        async with begins(name):  # connects
            pass
        await closing
        await begins.aclose()


async def test_a_client_that_holds_looks_sooner_once_it_waits(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it only holds, it pauses long between its looks. A waiter ends the pause."""
    monkeypatch.setattr(inbox, "FIRST", 60.0)
    monkeypatch.setattr(inbox, "HOLDING", 60.0)
    long: Any = {"lease": LONG}  # no ticket is renewed meanwhile
    async with (
        Redlock(file, **long) as waits,
        Redlock(file, **long) as holds,
        asyncio.timeout(LIMIT / 2),
        waits(f"{name}:held"),
    ):
        await waits.health()  # meanwhile the long pause begins
        monkeypatch.setattr(inbox, "FIRST", 0.002)
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        while not (await holds.inspect(name)).waiters:
            await asyncio.sleep(0.01)
        await lease.release()
        await (await waiting).release()


async def test_e5_the_next_waiter_looks_on_after_a_grant_to_one_that_left(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice of that grant is found only once another task of the client waits for the name. That task waits still,
    so the looks go on; without them it would be served when it renews its ticket."""
    found: list[object] = []
    may_look, take, taken = asyncio.Event(), inbox.Inbox._take, inbox.Inbox._taken  # noqa: SLF001

    async def take_late(self: inbox.Inbox, tag: str) -> None:
        await may_look.wait()
        await take(self, tag)

    def noted(self: inbox.Inbox, notice: Notice | None) -> None:
        found.append(notice)
        taken(self, notice)

    monkeypatch.setattr(inbox.Inbox, "_take", take_late)
    monkeypatch.setattr(inbox.Inbox, "_taken", noted)
    async with Redlock(file, lease=LONG) as holds, Redlock(file, lease=LONG) as waits:
        lease = await holds(name).acquire(timeout=None)
        leaves = await waiter(waits, name, fair=False)
        await sent([waits], name)
        await lease.release()  # grants it to the one that leaves
        leaves.cancel()
        await asyncio.wait({leaves})
        await sent([waits], name)
        lease = await holds(name).acquire(timeout=None)
        stays = await waiter(waits, name, fair=False)
        await sent([waits], name)
        may_look.set()
        await until(lambda: found)
        await lease.release()
        async with asyncio.timeout(SOON):
            await stays
