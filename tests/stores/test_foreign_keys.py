"""Keys of other programs on the same servers: a lock never takes them, and operators delete none by mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import redis

from asynclock import ConfigError, Holder, Lock, LockLost, LockTimeout, Redlock
from asynclock.locks.admin import is_listed
from asynclock.rules.model import DONE, ID_LENGTH, RESTING
from tests.support.default_keys import PREFIX, key_of, keys_of
from tests.support.servers import Server
from tests.support.told import told
from tests.support.waiters import LIMIT, PATIENT, back, decided, urls_of

both = pytest.mark.parametrize("nodes", [1, 3])

TYPES: dict[str, Callable[[redis.Redis, str], object]] = {
    "list": lambda cli, key: cli.rpush(key, "a"),
    "hash": lambda cli, key: cli.hset(key, "a", "b"),
    "set": lambda cli, key: cli.sadd(key, "a"),
    "zset": lambda cli, key: cli.zadd(key, {"a": 1}),
    "zset with late scores": lambda cli, key: cli.zadd(key, {"a": 1e15}),
    "stream": lambda cli, key: cli.xadd(key, {"a": "b"}),
}
"""Writes a key of that type."""

KINDS: dict[str, Callable[[Redlock, str], Lock]] = {
    "mutex": lambda client, name: client(name),
    "fair": lambda client, name: client(name, fair=True),
    "plain": lambda client, name: client(name, fencing=False),
    "reentrant": lambda client, name: client(name, reentrant=True),
    "read": lambda client, name: client.read(name),
    "write": lambda client, name: client.write(name),
    "semaphore": lambda client, name: client.semaphore(name, 2),
    "multi": lambda client, name: client.multi(f"{name}:other", name),
}


@asynccontextmanager
async def opened(servers: list[Server], **options: Any) -> AsyncIterator[tuple[Redlock, list[redis.Redis]]]:
    """A client, and a blocking client of each server."""
    with ExitStack() as stack:
        clis = [stack.enter_context(server.cli()) for server in servers]
        async with Redlock(*urls_of(servers), **{**PATIENT, **options}) as client:
            yield client, clis


async def test_d11_the_default_prefix_keeps_a_lock_from_a_key_of_the_application(server: Server) -> None:
    """A lock `order:42` never meets the application's own key `order:42`, and all keys of asynclock have the prefix."""
    with server.cli() as cli:
        cli.set("order:42", "an order")
        async with Redlock(server.url) as redlock, redlock("order:42", timeout=0):
            known: Any = cli.keys("*")
        assert cli.get("order:42") == b"an order"
    ours = {key.decode() for key in known} - {"order:42"}
    assert all(key.startswith(PREFIX) for key in ours)
    assert {keys_of("order:42").hold, keys_of("order:42").fence} <= ours


# -- a key of another type ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", KINDS)
async def test_d11_a_key_of_another_type_is_an_error_at_once(
    five: list[Server], name: str, nodes: int, kind: str
) -> None:
    """Whether the caller waits or not, and for locked(), too. The error names the type, and the key is left alone."""
    async with opened(five[:nodes]) as (client, clis):
        for number, (type_of, write) in enumerate(TYPES.items()):
            here = f"{name}:{number}"
            for cli in clis:
                write(cli, key_of(here))
            dumped = [cli.dump(key_of(here)) for cli in clis]
            lock = KINDS[kind](client, here)
            for ask in (lock.locked, partial(lock.acquire, timeout=0), partial(lock.acquire, timeout=None)):
                async with asyncio.timeout(LIMIT):
                    says = f"a {type_of.partition(' ')[0]} of another program.*another prefix"
                    with pytest.raises(ConfigError, match=says):
                        await ask()  # type: ignore[operator]
            assert [cli.dump(key_of(here)) for cli in clis] == dumped


@both
@pytest.mark.parametrize("kind", KINDS)
async def test_d11_an_acquire_that_finds_a_key_of_another_type_tells_no_event(
    five: list[Server], name: str, nodes: int, kind: str
) -> None:
    """It raises ConfigError, so no metric counts it as an acquire that timed out."""
    async with opened(five[:nodes]) as (client, clis):
        for cli in clis:
            cli.hset(key_of(name), "a", "b")
        with told(client) as seen, pytest.raises(ConfigError):
            await KINDS[kind](client, name).acquire(timeout=0)
        assert not seen.named()


@both
@pytest.mark.parametrize("kind", ["read", "write", "semaphore"])
async def test_d11_a_foreign_string_is_an_error_for_a_shared_kind(
    five: list[Server], name: str, nodes: int, kind: str
) -> None:
    """Only a mutex can wait for it."""
    async with opened(five[:nodes]) as (client, clis):
        for cli in clis:
            cli.set(key_of(name), "another's")
        with pytest.raises(ConfigError, match="a string of another program"):
            await KINDS[kind](client, name).acquire()


@both
@pytest.mark.parametrize("kind", ["mutex", "fair", "plain", "reentrant", "multi"])
async def test_d11_a_foreign_string_is_busy(five: list[Server], name: str, nodes: int, kind: str) -> None:
    """For a mutex it is like the lock of another library. The waiter gets the name when the key is gone."""
    async with opened(five[:nodes]) as (client, clis):
        for cli in clis:
            cli.set(key_of(name), "another's")
        lock = KINDS[kind](client, name)
        assert await lock.locked()
        assert await lock.acquire(timeout=0) is None
        waiting = asyncio.create_task(lock.acquire(timeout=None))
        await asyncio.sleep(0)
        assert [cli.get(key_of(name)) for cli in clis] == [b"another's"] * nodes
        for cli in clis:
            cli.delete(key_of(name))
        async with asyncio.timeout(LIMIT), await waiting:
            pass


@both
@pytest.mark.parametrize("kind", ["mutex", "fair", "plain", "reentrant", "multi"])
@pytest.mark.parametrize("timeout", [0, 1])
async def test_d11_a_timeout_names_a_foreign_holder(
    five: list[Server], name: str, nodes: int, kind: str, timeout: float
) -> None:
    """That it is a key of another program, and whether it expires."""

    async def enter() -> None:
        async with KINDS[kind](client, name):
            pytest.fail("entered")

    async with opened(five[:nodes], timeout=timeout) as (client, clis):
        for px, says in ((None, "a key of another program, without an expiry"), (60_000, "which expires in")):
            for cli in clis:
                cli.set(key_of(name), "another's", px=px)
            with pytest.raises(LockTimeout, match=says) as error:
                await decided(enter)
            holder = error.value.holder
            assert holder is not None
            assert (holder.host, holder.remaining is None) == ("", px is None)


# -- break_lock --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("type_of", [*TYPES, "string"])
async def test_d11_break_lock_deletes_a_foreign_key_only_when_asked(
    five: list[Server], name: str, nodes: int, type_of: str
) -> None:
    """It refuses otherwise, names the type, and says how to ask. Then the name is free."""
    async with opened(five[:nodes]) as (client, clis):
        for cli in clis:
            TYPES.get(type_of, lambda cli, key: cli.set(key, "an order"))(cli, key_of(name))
        says = f"a {type_of.partition(' ')[0]} of another program.*foreign=True"
        with pytest.raises(ConfigError, match=says) as error:
            await client.break_lock(name)
        assert error.value.name == name
        assert all(cli.exists(key_of(name)) for cli in clis)
        assert await client.break_lock(name, foreign=True)
        assert not any(cli.exists(key_of(name)) for cli in clis)
        assert not await client.break_lock(name, foreign=True)
        async with client(name, timeout=0):
            pass


@both
@pytest.mark.parametrize("kind", ["mutex", "plain", "read", "semaphore"])
@pytest.mark.parametrize("foreign", [False, True])
async def test_d11_break_lock_breaks_our_own_hold_in_either_way(
    five: list[Server], name: str, nodes: int, kind: str, foreign: bool
) -> None:
    """Its holder is notified."""
    async with opened(five[:nodes], lease=60) as (client, _):
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(LIMIT), KINDS[kind](client, name):
                async with Redlock(*urls_of(five[:nodes])) as operator:
                    assert await operator.break_lock(name, foreign=foreign)
                await asyncio.Event().wait()
        assert lost.value.reason == "broken"
        assert not await client.break_lock(name)


async def test_d11_break_lock_leaves_a_foreign_key_on_a_minority(five: list[Server], name: str) -> None:
    """Three nodes have a hold of asynclock and two a key of another program: only the hold is broken."""
    async with opened(five) as (client, clis):
        for cli in clis[:2]:
            cli.set(key_of(name), "an order")
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        async with Redlock(*urls_of(five)) as operator:
            await back(operator)
            assert await operator.break_lock(name)
        assert [cli.get(key_of(name)) for cli in clis] == [b"an order", b"an order", None, None, None]


async def test_d11_a_name_that_rests_is_ours_to_break(make: Callable[..., Redlock], name: str) -> None:
    """After min_hold and after `once`, in kinds that one or several hold."""
    client = make()
    async with client(name, min_hold=20):
        pass
    assert await client.break_lock(name)
    async with client.read(name, min_hold=20):
        pass
    assert await client.break_lock(name)

    @client.once(name, within=20)
    async def work() -> None: ...

    await work()
    assert await client.break_lock(name)
    assert not await client.break_lock(name)


async def test_break_lock_checks_its_flag(redlock: Redlock, name: str) -> None:
    """A word in its place deletes nothing."""
    with pytest.raises(ConfigError, match="foreign is True or False"):
        await redlock.break_lock(name, foreign="no")  # type: ignore[arg-type]


# -- holders -----------------------------------------------------------------------------------------------------------

RANDOM = "0f" * (ID_LENGTH // 2)
LISTED: list[tuple[str, str, str, float | None, bool]] = [
    ("our hold", "order:42", f"{RANDOM}|17|1|host|", 5.0, True),
    ("our hold that lost its end", "order:42", f"{RANDOM}|17|1|host|", None, True),
    ("our hold without notices", "order:42", f"{RANDOM}!17|1|host|", 5.0, True),
    ("a name that rests", "order:42", RESTING, 5.0, True),
    ("a name that is done", "order:42", DONE, 5.0, True),
    ("redis-py", "order:42", RANDOM, 5.0, True),
    ("redis-semaphore", "order:42", "6f1f2b5c-0d5f-4c0e-9a53-0b1ea0a8a3f1", 5.0, True),
    ("redsync", "order:42", "m3ZbJx0kQ1mZ5oY3n2bT4A==", 5.0, True),
    ("a token that does not expire", "order:42", RANDOM, None, False),
    ("a number", "visits", "1234567890123456789", 5.0, False),
    ("a document", "order:42", '{"order": 42, "customer": 7}', 5.0, False),
    ("a short word", "mode", "maintenance", 5.0, False),
    ("a long text", "page", "a" * 65, 5.0, False),
    ("nothing", "empty", "", 5.0, False),
    ("our fence under a prefix", "app:asynclock~{app:x}fence", "1700000000000000", 5.0, False),
]


@pytest.mark.parametrize(("name", "id", "left", "listed"), [each[1:] for each in LISTED], ids=[e[0] for e in LISTED])
def test_d11_which_values_holders_shows_without_a_prefix(name: str, id: str, left: float | None, listed: bool) -> None:
    """Those that asynclock made, and those that look like the token of a lock library."""
    assert is_listed("", name, id, left) is listed


def test_d11_which_values_holders_shows_under_a_prefix() -> None:
    """Each string keeps its name taken. The counters of a client with a longer prefix are no holds."""
    assert is_listed(PREFIX, "order:42", "an old program's", None)
    assert not is_listed(PREFIX, "a:asynclock~{lock:a:x}fence", "1700000000000000", 5.0)


async def listed(client: Redlock) -> list[str]:
    return sorted([holder.name async for holder in client.holders()])


async def test_d11_holders_shows_only_locks_of_its_prefix(server: Server) -> None:
    """On a database with keys of the application and of a client with another prefix."""
    with server.cli() as cli:
        cli.set("order:42", "an order")
        cli.set("session:7", "some text", px=60_000)
        for type_of, write in TYPES.items():
            write(cli, f"data:{type_of}")
            write(cli, key_of(f"data:{type_of}"))
        locks = [cli.lock("job", timeout=60), cli.lock("lock:job", timeout=60)]
        for lock in locks:
            assert lock.acquire(blocking=False)
        async with Redlock(server.url) as client, Redlock(server.url, prefix="") as bare:
            async with client("order:42"), client.read("feed"), Redlock(server.url, prefix="app:") as app, app("x"):
                assert await listed(client) == ["feed", "job", "order:42"]
                assert await listed(bare) == ["app:x", "job", "lock:feed", "lock:job", "lock:order:42"]
                assert await listed(app) == ["x"]


@pytest.mark.parametrize("type_of", ["zset", "zset with late scores", "hash"])
async def test_d11_inspect_names_the_type_of_a_foreign_key(server: Server, name: str, type_of: str) -> None:
    """It has no holder, and it is not free."""
    async with opened([server]) as (client, (cli,)):
        TYPES[type_of](cli, key_of(name))
        info = await client.inspect(name)
        word = type_of.partition(" ")[0]
        assert (info.kind, info.holders) == (word, ())
        assert all(f"in use as a {word} of another program" in said for said in info.nodes.values())


async def test_d11_inspect_shows_a_foreign_string_as_the_holder(server: Server, name: str) -> None:
    """Since it keeps the name taken."""
    async with opened([server], prefix="") as (client, (cli,)):
        cli.set(name, "an order")
        assert (await client.inspect(name)).holders == (Holder(name, "", 0, 0.0, None, ""),)
