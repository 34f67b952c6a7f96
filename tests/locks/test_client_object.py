"""The client as an object: copied, pickled, configured again, used without a loop; and what it remembers of names."""

from __future__ import annotations

import asyncio
import copy
import pickle
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asynclock import ConfigError, Lock, Redlock, Unsupported
from asynclock.stores.redis.keys import keys, packed
from tests.support.probes import settings_of
from tests.support.servers import Server, Servers
from tests.support.waiters import works

COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]

KINDS: dict[str, Callable[[Redlock], Lock]] = {
    "mutex": lambda client: client("a"),
    "reentrant": lambda client: client("a", reentrant=True),
    "read": lambda client: client.read("a"),
    "semaphore": lambda client: client.semaphore("a", 3),
    "multi": lambda client: client.multi("a", "b"),
}


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy"])
def test_a_copy_of_a_client_is_the_client(copied: Callable[[Any], Any]) -> None:
    """So a fork or a close reaches the copy as well, also where it is a part of another object that is copied."""
    client = Redlock("memory:")
    assert copied(client) is client
    assert copied({"locks": [client]})["locks"][0] is client


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
async def test_a_copy_of_a_lock_is_the_lock(make: Callable[[Redlock], Lock], copied: Callable[[Any], Any]) -> None:
    """It knows the leases that were taken through it."""
    async with Redlock("memory:") as client:
        lock = make(client)
        async with lock as lease:
            assert copied(lock) is lock
            await copied(lock).release()
            assert not lease.held


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_says_what_to_do(protocol: int) -> None:
    """A client and its locks belong to one process."""
    client = Redlock("memory:")
    with pytest.raises(TypeError, match="from the same urls"):
        pickle.dumps(client, protocol)
    for make in KINDS.values():
        with pytest.raises(TypeError, match="make a new"):
            pickle.dumps(make(client), protocol)


# -- configure ---------------------------------------------------------------------------------------------------------


async def test_configure_after_aclose(servers: Servers, name: str) -> None:
    """No session is in use any more: the client uses its new nodes, without being entered again."""
    before, after = servers.start(), [servers.start() for _ in range(3)]
    client = Redlock(before.url)
    await works(client, name)
    await client.aclose()
    client.configure(*(each.url for each in after))
    before.kill()
    await works(client, name)
    await client.aclose()


async def test_closed_before_its_first_use(name: str) -> None:
    """It is closed as after a use: a use raises, and a client that is entered or configured again works."""
    client = Redlock("memory:")
    await client.aclose()
    with pytest.raises(ConfigError, match="was closed"):
        await client(name).acquire()
    async with client:
        await works(client, name)
    other = Redlock("memory:")
    await other.aclose()
    other.configure("memory:")
    await works(other, name)
    await other.aclose()


def test_configure_after_the_end_of_each_loop(servers: Servers) -> None:
    """asyncio.run has closed the loops, and with them the sessions."""
    before, after = servers.start(), servers.start()
    client = Redlock(before.url)
    for server in (before, after):
        client.configure(server.url)
        server.cli().config_resetstat()
        asyncio.run(works(client, "job"))
        assert "cmdstat_evalsha" in server.cli().info("commandstats")


def test_configure_after_a_loop_that_was_closed_by_hand() -> None:
    """The client was not closed before its loop; but nobody can use that session any more."""
    client = Redlock("memory:")
    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(works(client, "job"))
    with pytest.raises(ConfigError, match="in use"):
        client.configure("memory:")
    loop.close()
    client.configure("memory:")
    asyncio.run(works(client, "job"))


def test_configure_while_another_loop_uses_the_client(server: Server) -> None:
    """One loop closed the client, another has not: ConfigError, and nothing is changed."""
    client = Redlock(server.url)
    asyncio.run(works(client, "job"))
    with asyncio.Runner() as runner:
        runner.run(works(client, "job"))
        with pytest.raises(ConfigError, match="in use"):
            client.configure("redis://elsewhere")
        runner.run(works(client, "job"))
        runner.run(client.aclose())
        client.configure("memory:")


async def test_a_configure_that_failed_leaves_a_closed_client_closed(server: Server, name: str) -> None:
    """A refused configure changes nothing."""
    client = Redlock(server.url)
    await works(client, name)
    await client.aclose()
    with pytest.raises(ConfigError, match="is not a url"):
        client.configure("nonsense")
    with pytest.raises(ConfigError, match="closed"):
        await client(name).acquire()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
async def test_a_lock_that_was_made_before_configure_has_the_new_settings(make: Callable[[Redlock], Lock]) -> None:
    """A lease longer than the max_lease of the deployment would outlast the quarantine of a restarted server, which
    then lets a second holder in. The other defaults follow, too."""
    client = Redlock("memory:")
    lock = make(client)
    client.configure("memory:", lease=10, max_lease=15, timeout=3)
    async with client, lock as lease:
        assert (settings_of(lease).lease, settings_of(lease).timeout) == (10.0, 3.0)
        assert lease.remaining <= 10


async def test_configure_keeps_the_options_of_a_lock() -> None:
    """Those that it was made with; each use of the lock says so if they do not fit any more."""
    client = Redlock("memory:")
    short, long = client("a", lease=5), client("b", lease=20)
    client.configure(lease=10, max_lease=15)
    async with client:
        async with short as lease:
            assert settings_of(lease).lease == 5
        for use in (long.acquire, long.locked, long.__aenter__):
            with pytest.raises(ConfigError, match="above max_lease=15") as refused:
                await use()
            assert refused.value.name == "b"


async def test_configure_without_fencing_after_a_semaphore_was_made() -> None:
    """Each use of the lock says that it needs fencing tokens. A mutex has none from then on."""
    client = Redlock("memory:")
    mutex, semaphore, several = client("a"), client.semaphore("b", 2), client.multi("c", "d")
    client.configure(fencing=False)
    async with client:
        async with mutex as lease:
            assert not settings_of(lease).fencing
        for lock in (semaphore, several):
            with pytest.raises(Unsupported, match="pass fencing=True"):
                await lock.acquire()


# -- without a loop ----------------------------------------------------------------------------------------------------


async def _nothing() -> None: ...


async def _first_holder(client: Redlock) -> object:
    return await anext(client.holders())


USES: dict[str, Callable[[Redlock], Coroutine[Any, Any, object]]] = {
    **{f"acquire {kind}": lambda client, make=make: make(client).acquire() for kind, make in KINDS.items()},
    "timeout": lambda client: client("a").acquire(timeout=0),
    "enter": lambda client: client("a").__aenter__(),
    "release": lambda client: client("a").release(),
    "locked": lambda client: client("a").locked(),
    "enter client": lambda client: client.__aenter__(),
    "aclose": lambda client: client.aclose(),
    "release_all": lambda client: client.release_all(),
    "inspect": lambda client: client.inspect("a"),
    "holders": _first_holder,
    "break_lock": lambda client: client.break_lock("a"),
    "lead": lambda client: client.lead("a", lambda lease: lease.wait_lost()),
    "once": lambda client: client.once("a", within=1)(_nothing)(),
    "synchronized": lambda client: client.synchronized("a")(_nothing)(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_without_an_asyncio_loop(use: Callable[[Redlock], Coroutine[Any, Any, object]]) -> None:
    """As under trio, which drives coroutines itself: ConfigError says what asynclock needs."""
    with pytest.raises(ConfigError, match="asyncio event loop"):
        use(Redlock("memory:")).send(None)


def test_a_lease_without_an_asyncio_loop() -> None:
    """The lease was taken in a loop; each of its methods raises the same ConfigError elsewhere. health() never raises:
    it reports the error."""
    client = Redlock("memory:")
    with asyncio.Runner() as runner:
        lease = runner.run(client("a").acquire(timeout=None))
        handle = runner.run(runner.run(client("b").acquire(timeout=None)).detach())
        for use in (lease.release, lease.extend, lease.wait_lost, lease.__aenter__, lambda: client.adopt(handle)):
            with pytest.raises(ConfigError, match="asyncio event loop"):
                use().send(None)
        with pytest.raises(StopIteration) as done:
            client.health().send(None)
        assert "asyncio event loop" in done.value.value.nodes[0].error
        runner.run(lease.release())


# -- names that are remembered -----------------------------------------------------------------------------------------


def test_the_keys_of_long_names_are_not_cached() -> None:
    """Thousands of names of 10 kB would fill hundreds of MB."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(500):
            assert keys("app:", f"{number}:{'x' * 10_000}").fence.endswith("fence")
            assert b"fence" in packed("app:", f"{{{number}}}:{'x' * 10_000}")
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 500_000


def test_the_keys_of_usual_names_are_cached_up_to_a_number() -> None:
    """A name that is used again costs no new keys; the keys of a million names are not kept."""
    assert keys("app:", "order:42") is keys("app:", "order:42")
    assert packed("app:", "{order}:42") is packed("app:", "{order}:42")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(12_000):
            keys("app:", f"order:{number}")
            packed("app:", f"{{order}}:{number}")
            packed("app:", f"order:{number}")
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 7_000_000


async def test_a_decorator_follows_configure(name: str) -> None:
    """A function that is decorated at import runs under the options of the client that is configured later."""
    client = Redlock("memory:")

    @client.synchronized(name)
    async def note() -> str:
        (holder,) = (await client.inspect(name)).holders
        return holder.metadata

    assert await note() == ""
    await client.aclose()
    client.configure(metadata="configured later")
    assert await note() == "configured later"
    await client.aclose()
