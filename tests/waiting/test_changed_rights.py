"""Permissions that change while clients are connected: waiters change between tickets and polling, and that is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.protocol import rounds
from asynclock.rules.model import polls
from asynclock.stores.redis import rights
from tests.support.probes import acquisitions_of, id_of, listens, nodes_of, tickets_of
from tests.support.servers import Server
from tests.support.waiters import LIMIT, PATIENT, SHORT, back, in_queue, processes, queue, until

FAR: dict[str, Any] = {**PATIENT, "lease": 300.0, "max_lease": 300.0}
"""A waiter renews its ticket after 80 s at the earliest."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "LOOK", 0.05)


def told(caplog: pytest.LogCaptureFixture, what: str) -> int:
    """How many lines say that."""
    return sum(what in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_f22_notices_that_are_permitted_later(
    five: Sequence[Server], name: str, nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A waiter polls. Once its user may use the channels, it leaves a ticket, and each change is one line."""
    caplog.set_level(logging.INFO, "asynclock")
    urls = [each.user("resetchannels") for each in five[:nodes]]
    async with Redlock(*urls, **FAR) as holder, Redlock(*urls, **FAR) as client:
        await back(client)  # the last of three nodes may be late
        async with holder(name):
            waiting = asyncio.create_task(client(name).acquire(timeout=LIMIT))
            await until(lambda: acquisitions_of(client))
            assert not listens(client)
            for each in five[:nodes]:
                each.allow("&asynclock~*")
            # All of them: without a waiter, the next look would be ten seconds later.
            await until(lambda: all(node.listens for node in nodes_of(client)) and tickets_of(client))
        lease = await waiting
        assert lease
        await lease.release()
        assert [each.error for each in (await client.health()).nodes] == [""] * nodes
    assert told(caplog, "sends no notices") == 2 * nodes
    assert nodes <= told(caplog, "sends notices again") <= 2 * nodes  # the holder looks seldom


@pytest.mark.parametrize("nodes", [1, 3])
async def test_f22_notices_that_are_forbidden_later(
    five: Sequence[Server], name: str, nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A waiter has a ticket, and the servers may not notify it any more: it polls, and is served long before it would
    renew its ticket."""
    urls = [each.user() for each in five[:nodes]]
    async with aclosing(Redlock(*urls, **FAR)) as holder, aclosing(Redlock(*urls, **FAR)) as client:
        async with holder(name):
            waiting = asyncio.create_task(client(name).acquire(timeout=None))
            await until(lambda: tickets_of(client))
            for each in five[:nodes]:
                each.allow("-publish")
            await until(lambda: told(caplog, "sends no notices") == nodes)
            assert all("waiters poll it" in each.error for each in (await client.health()).nodes)
        lease = await asyncio.wait_for(waiting, LIMIT)
        await lease.release()


async def test_f22_an_idle_connection_that_is_made_anew_repeats_no_line(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that sends no notices is told once, and not at each connection."""
    async with aclosing(Redlock(server.user("resetchannels"), **FAR)) as client:
        for _ in range(3):
            async with client(name):
                pass
            with server.cli() as cli:
                cli.execute_command("CLIENT", "KILL", "USER", "worker")
    assert told(caplog, "sends no notices") == 1


async def test_f22_a_client_without_waiters_looks_as_well(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less often. Its next waiter need not poll, and its next id says so."""
    monkeypatch.setattr(rights, "_IDLE_LOOK", 0.1)
    async with aclosing(Redlock(server.user("resetchannels"), **FAR)) as client:
        async with client(name) as lease:
            assert polls(id_of(lease))
        assert not listens(client)
        server.allow("&asynclock~*")
        await until(lambda: listens(client))
        async with client(name) as lease:
            assert not polls(id_of(lease))


async def test_f22_a_client_that_cannot_notify_does_not_overtake(server: Server, name: str) -> None:
    """Its release reaches no waiter, and it asks again at once. The waiter before it enters when it renews its
    ticket."""
    silent = Redlock(server.user("resetchannels"), lease=SHORT)
    async with silent, Redlock(server.url, lease=SHORT) as other:
        held = await silent(name).acquire(timeout=None)
        before = asyncio.create_task(other(name).acquire(timeout=None))
        await until(in_queue([server], name, 1))
        await held.release()
        again = asyncio.create_task(silent(name).acquire(timeout=None))
        done, _ = await asyncio.wait({before, again}, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        assert done == {before}
        await (await before).release()
        await (await asyncio.wait_for(again, LIMIT)).release()


async def assert_they_enter_in_turn(held: Lease, first: asyncio.Task[Any], second: asyncio.Task[Any]) -> None:
    await held.release()
    lease = await asyncio.wait_for(first, LIMIT)
    assert not second.done()
    await lease.release()
    await (await asyncio.wait_for(second, LIMIT)).release()


@pytest.mark.parametrize("options", [{}, {"fencing": False}, {"fair": True}], ids=["mutex", "plain", "fair"])
async def test_f22_a_waiter_that_polls_has_its_turn(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """One client may not use the channels; the others pass the name on by notices. Its place in the queue is before
    theirs, and the release makes it the holder."""
    monkeypatch.setattr(rounds, "POLLED", LIMIT)  # a busy machine may be slower than a poll has to be
    fair = {"fair": options.get("fair", False)}
    lock = {each: option for each, option in options.items() if each != "fair"}
    async with (
        Redlock(server.url, **FAR) as holder,
        Redlock(server.user("resetchannels"), **FAR) as polls,
        Redlock(server.url, **FAR) as other,
    ):
        held = await holder(name, **fair, **lock).acquire(timeout=None)
        first = asyncio.create_task(polls(name, **fair, **lock).acquire(timeout=None))
        await until(in_queue([server], name, 1))
        second = asyncio.create_task(other(name, **fair, **lock).acquire(timeout=None))
        await until(in_queue([server], name, 2))
        await assert_they_enter_in_turn(held, first, second)


async def test_f22_a_waiter_that_may_not_be_notified_any_more_has_its_turn(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left a ticket that said that its client gets notices. The others get them still, and do not pass it by."""
    monkeypatch.setattr(rounds, "POLLED", LIMIT)
    async with (
        Redlock(server.url, **FAR) as holder,
        aclosing(Redlock(server.user(), **FAR)) as polling,
        Redlock(server.url, **FAR) as other,
    ):
        held = await holder(name).acquire(timeout=None)
        first = asyncio.create_task(polling(name).acquire(timeout=None))
        await until(in_queue([server], name, 1))
        second = asyncio.create_task(other(name).acquire(timeout=None))
        await until(in_queue([server], name, 2))
        server.allow("resetchannels")
        await until(lambda: [polls(each.decode()) for each in queue(server, name)] == [True, False])
        await assert_they_enter_in_turn(held, first, second)


async def test_f22_a_waiter_that_polled_and_died_takes_no_turn(server: Server, name: str) -> None:
    """Its ticket is served only while it asks: the next one becomes the holder."""
    poor = server.user("resetchannels")
    async with Redlock(server.url, **FAR) as holder, Redlock(server.url, **FAR) as other:
        held = await holder(name).acquire(timeout=None)
        async with processes(1, [poor]) as (dead,):
            dead.wait(name)
            await until(in_queue([server], name, 1))
            await dead.kill()
        second = asyncio.create_task(other(name).acquire(timeout=None))
        await until(in_queue([server], name, 2))
        await asyncio.sleep(1.1 * rounds.POLLED)
        await held.release()
        await (await asyncio.wait_for(second, LIMIT)).release()
