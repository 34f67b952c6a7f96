"""`use`: which clients get the stores of the test, and until when."""

from __future__ import annotations

import asyncio

import pytest

from asynclock import ConfigError, LockLost, Redlock, redlock
from asynclock.testing import FakeStore, use
from tests.support.probes import session_of, stores_of
from tests.support.servers import Server


def nodes(client: Redlock) -> list[str]:
    """The labels of the nodes that it asks in this event loop."""
    return [each.label for each in session_of(client).quorum.nodes]


async def test_every_client_has_these_nodes() -> None:
    """One that is made inside, one that is first used inside, and the ready-made one; several stores are a quorum."""
    first_used = Redlock("redis://nowhere.invalid:1")
    stores = [FakeStore() for _ in range(3)]
    labels = [store.label for store in stores]
    with use(*stores):
        async with redlock("a"), first_used("b"):
            async with Redlock("redis://nowhere.invalid:2") as made:
                assert await made("a").acquire(timeout=0) is None
            assert await redlock("b").acquire(timeout=0) is None
            assert nodes(redlock) == nodes(first_used) == labels


async def test_it_restores() -> None:
    """Each client has its own nodes again, and a new block begins with new stores."""
    client = Redlock("redis://nowhere.invalid:1")
    for _ in range(2):
        with use(store := FakeStore()):
            async with client("a", timeout=0):
                assert nodes(client) == [store.label]
    assert nodes(client) == ["nowhere.invalid:1"]
    with pytest.raises(ConfigError, match="no servers are named"):
        await redlock("a").acquire(timeout=0)
    await client.aclose()


async def test_it_nests() -> None:
    """The innermost block counts, and the leases of the outer one go on."""
    client = Redlock("redis://nowhere.invalid:1")
    with use(outer := FakeStore()):
        async with redlock("a") as lease, client("b") as other:
            sessions = [session_of(redlock), session_of(client)]
            with use(inner := FakeStore()):
                assert nodes(redlock) == nodes(client) == [inner.label]
                async with redlock("a", timeout=0), client("b", timeout=0):
                    await outer.advance(300)
            assert [session_of(redlock), session_of(client)] == sessions
            assert lease.held
            assert other.held


async def test_a_client_in_use_keeps_its_nodes(server: Server, name: str) -> None:
    """Only the ready-made one is taken over."""
    async with Redlock(server.url) as client, client(name):
        with use(FakeStore()):
            assert await client(name).acquire(timeout=0) is None
            assert nodes(client) == [server.url]
        assert stores_of(client)[0].label == server.url


async def test_a_program_that_configures_inside(server: Server) -> None:
    """`configure` of a program that starts sets its nodes for later, and the options for now."""
    redlock = Redlock()  # as the ready-made one, which other tests use
    with use(FakeStore()):
        redlock.configure("redis://nowhere.invalid:1", lease=7)
        try:
            async with redlock("a") as lease:
                assert 6 < lease.remaining < 7
        finally:
            await redlock.aclose()
    try:
        assert nodes(redlock) == ["nowhere.invalid:1"]
    finally:
        await redlock.aclose()


async def test_a_lease_that_is_held_at_the_end() -> None:
    """It is lost ("closed")."""
    with use(FakeStore()):
        lease = await redlock("a").acquire(timeout=None)
    assert await asyncio.wait_for(lease.wait_lost(), 20)
    with pytest.raises(LockLost) as caught:
        lease.ensure_held()
    assert caught.value.reason == "closed"


def test_stores_are_named() -> None:
    """`use()` is a mistake."""
    with pytest.raises(ConfigError, match=r"use\(FakeStore\(\)\)"), use():
        pass


def test_over_several_event_loops() -> None:
    """A block around several calls of asyncio.run, as a fixture is: one store for all of them."""

    async def count() -> int:
        async with redlock("a", timeout=0) as lease:
            return lease.fence

    with use(FakeStore()):
        assert asyncio.run(count()) < asyncio.run(count())
