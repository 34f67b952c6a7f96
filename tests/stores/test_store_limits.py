"""What a store says that it cannot keep, and which stores make a quorum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynclock import ConfigError, Redlock, Unsupported
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Use, Wish
from tests.support.user_store import DictStore


class Narrow(MemoryStore):
    """Keeps what no test here asks for."""

    def cannot(self, wish: Wish) -> str | None:
        if wish.use is not Use.LOCK:
            return f"{wish.use.value} is not for it"
        if wish.kind.letter or len(wish.names) > 1:
            return f"it keeps mutexes of one name only, not {', '.join(wish.names)}"
        if not wish.fencing or wish.min_hold or wish.lease != 30.0:
            return "it has leases of 30 s, and no other options"
        return None


class Alone(DictStore):
    """A store with a namespace of its own."""

    standalone = True


async def job() -> None: ...


MADE: dict[str, tuple[Callable[[Redlock], Any], str]] = {
    "read": (lambda client: client.read("a"), r"\(read of 'a'\): it keeps mutexes of one name only"),
    "write": (lambda client: client.write("a"), "mutexes of one name"),
    "semaphore": (lambda client: client.semaphore("a", 2), "mutexes of one name"),
    "multi": (lambda client: client.multi("a", "b"), "one name only, not a, b"),
    "lease": (lambda client: client("a", lease=10), "leases of 30 s"),
    "reentrant": (lambda client: client("a", lease=10, reentrant=True), "leases of 30 s"),
    "min_hold": (lambda client: client("a", min_hold=1), "leases of 30 s"),
    "fencing": (lambda client: client("a", fencing=False), "leases of 30 s"),
    "synchronized": (lambda client: client.synchronized("a", lease=10)(job), "leases of 30 s"),
    "once": (lambda client: client.once("a", within=60)(job), "once is not for it"),
}


@pytest.mark.parametrize("what", MADE)
async def test_what_a_store_cannot_keep_is_unsupported_when_the_lock_is_made(what: str) -> None:
    """The message has the name of the store, the lock and the reason."""
    make, why = MADE[what]
    store = Narrow()
    with pytest.raises(Unsupported, match=rf"{store.label} cannot keep this .*{why}"):
        make(Redlock(store))


@pytest.mark.parametrize("what", ["read", "multi", "lease"])
async def test_or_at_first_use_if_the_store_was_not_known(what: str) -> None:
    """The client is configured after the lock was made."""
    client = Redlock()
    lock = MADE[what][0](client)
    client.configure(Narrow())
    for use in (lambda: lock.acquire(timeout=0), lock.locked):
        with pytest.raises(Unsupported, match=MADE[what][1]):
            await use()
    await client.aclose()


async def test_what_the_store_can_keep_works() -> None:
    """A mutex, also a reentrant one, `lead`, and a decorated function."""
    async with Redlock(Narrow()) as client:
        async with client("a"), client("b", reentrant=True):
            assert await client("a").locked()

        async def main(lease: Any) -> int:
            return lease.fence

        assert await client.lead("c", main)
        await client.synchronized("d")(job)()


async def test_what_a_lease_can_do_is_limited_as_well() -> None:
    """detach, adopt and another length of the lease. The lease is held as before."""
    async with Redlock(MemoryStore()) as other, other("a") as theirs:
        handle = await theirs.detach()
    async with Redlock(Narrow()) as client, client("a") as lease:
        with pytest.raises(Unsupported, match="detach is not for it"):
            await lease.detach()
        with pytest.raises(Unsupported, match="leases of 30 s"):
            await lease.extend(lease=40)
        await lease.extend()
        with pytest.raises(Unsupported, match="adopt is not for it"):
            await client.adopt(handle)
        assert lease.held


async def test_health_says_that_the_store_cannot_keep_the_locks_of_the_client() -> None:
    """The node votes, and a lock with options of its own works. A lock with those of the client does not."""
    async with Redlock(Narrow(), lease=10) as client:
        health = await client.health()
        assert health.ok
        assert "raises Unsupported: it has leases of 30 s" in health.nodes[0].error
        async with client("a", lease=30):
            pass
    async with Redlock(Narrow()) as client:
        assert (await client.health()).nodes[0].error == ""


def test_a_standalone_store_is_the_only_node() -> None:
    """It is replicated by itself."""
    with pytest.raises(ConfigError, match="dict is always the only node of a client"):
        Redlock(Alone(), MemoryStore(), MemoryStore())


async def test_a_standalone_store_has_no_prefix(name: str) -> None:
    """The default prefix is not used, and another one is refused: it would exclude nobody."""
    store = Alone()
    async with Redlock(store) as client, client(name):
        assert name in store.states
        assert [holder.name async for holder in client.holders()] == [name]
    with pytest.raises(ConfigError, match="prefix='app:' is for keys in Redis; dict has a namespace of its own"):
        Redlock(store, prefix="app:")


def test_the_prefix_of_the_environment_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ready-made client takes it from there."""
    monkeypatch.setenv("ASYNCLOCK_PREFIX", "app:")
    with pytest.raises(ConfigError, match="leave prefix out"):
        Redlock().configure(Alone())


def test_a_quorum_of_different_stores_is_of_redis_or_memory() -> None:
    """Other stores count leases and fences in ways of their own."""
    with pytest.raises(ConfigError, match="a quorum of different stores is made of Redis servers only"):
        Redlock("redis://a", "redis://b", DictStore())
    Redlock("redis://a", "embedded:", MemoryStore())
