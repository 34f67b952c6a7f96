"""The ACL rule that a NOPERM error recommends: it permits everything that a client does, and each part of it is
needed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from asynclock import ConfigError, Lock, Redlock, Skipped
from asynclock.stores.redis.replies import ACL_COMMANDS
from tests.support.probes import client_of, listens, parts_of, tickets_of
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, PATIENT, healthy, until

KINDS: dict[str, Callable[..., Lock]] = {
    "mutex": lambda client, name, **options: client(name, **options),
    "fair": lambda client, name, **options: client(name, fair=True, **options),
    "reentrant": lambda client, name, **options: client(name, reentrant=True, **options),
    "plain": lambda client, name, **options: client(name, fencing=False, **options),
    "read": lambda client, name, **options: client.read(name, **options),
    "write": lambda client, name, **options: client.write(name, **options),
    "semaphore": lambda client, name, **options: client.semaphore(name, 1, **options),
    "multi": lambda client, name, **options: client.multi(
        f"{name}:0", client.read(f"{name}:1"), client.semaphore(f"{name}:2", 1), client.write(name), **options
    ),
}
RIVALS = {"read": "write", "plain": "mutex"}

OPTIONAL = {"delifeq", "delex", "client|setname", "client|setinfo", "client"}
"""Commands that a server may refuse: a release goes by its script then, and the connection has no name."""


async def recommended(server: Server) -> str:
    """The rule, taken from the error that a user without any permission gets."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "nobody", "on", ">secret", "~*", "resetchannels", "-@all")
    async with aclosing(Redlock(server.url.replace("unix://", "unix://nobody:secret@"))) as client:
        with pytest.raises(ConfigError) as caught:
            await client("any").acquire()
    found = re.search(r"ACL SETUSER .*", str(caught.value))
    assert found
    return found[0]


def pasted(server: Server, rule: str, prefix: str) -> str:
    """A url of a user with this rule and no other."""
    words = rule.replace(" ~* ", f" ~{prefix}* ").split()
    assert words[2:4] == ["name", "on"]
    with server.cli() as cli:
        cli.execute_command(*words[:3], "reset", "resetchannels")  # Redis 6.2 gives a new user all channels
        cli.execute_command(*words)
        cli.config_resetstat()
    return server.url.replace("unix://", "unix://name:password@")


async def everything(first: Redlock, second: Redlock) -> None:
    """Each feature once, by two clients."""
    for kind, make in KINDS.items():
        await hand_over(make(first, kind), KINDS[RIVALS.get(kind, kind)](second, kind))
        async with make(first, f"rests:{kind}", min_hold=0.2):
            pass
        async with KINDS[RIVALS.get(kind, kind)](second, f"rests:{kind}"):
            pass
    for lock in (first("d"), first.read("d:r"), first.write("d:w"), first.semaphore("d:s", 2)):
        lease = await second.adopt(await (await lock.acquire(timeout=None)).detach())
        await lease.release()
    assert await first.once("done", within=60)(_nothing)() is None
    assert await second.once("done", within=60)(_nothing)() is Skipped.DONE
    await first.lead("leader", lambda lease: lease.extend())
    await first.synchronized("guarded")(_nothing)()
    async with first("a"), first.read("b"), first.semaphore("c", 1):
        assert [(await second.inspect(name)).kind for name in "abc"] == ["mutex", "read-write lock", "semaphore"]
        assert {each.name async for each in second.holders()} >= {"a", "b", "c"}
    for broken in (first("e"), first.write("f"), first.semaphore("g", 1)):
        lease = await broken.acquire(timeout=None)
        assert await second.break_lock(broken.name)
        await lease.wait_lost()
    last = await first("released").acquire(timeout=None)
    await first.release_all()
    assert not last.held
    await healthy(first)


async def hand_over(first: Lock, second: Lock) -> None:
    """One client holds and extends. The other tries, waits with a ticket, is cancelled, waits again and gets the
    name."""
    lease = await first.acquire(timeout=None)
    await lease.extend()
    assert await second.acquire(timeout=0) is None
    assert await second.locked()
    for cancelled in (True, False):
        waiting = asyncio.create_task(second.acquire(timeout=None))
        await until(lambda: tickets_of(client_of(second)))
        async with asyncio.timeout(LIMIT):
            while not (await _inspected(second)).waiters:
                await asyncio.sleep(0.005)
        if cancelled:
            waiting.cancel()
            await asyncio.wait({waiting})
    await lease.release()
    async with asyncio.timeout(LIMIT):
        await (await waiting).release()


async def _inspected(lock: Lock) -> Any:
    """What is known of the first of its names: a multi lock waits there."""
    return await client_of(lock).inspect(parts_of(lock)[0].name)


async def _nothing() -> None: ...


def commands(server: Server) -> tuple[set[str], set[str]]:
    """The commands that were used since the rule was made, and those that were refused."""
    with server.cli(single_connection_client=True) as cli:
        stats = cli.info("commandstats")
    called = {each.removeprefix("cmdstat_") for each, stat in stats.items() if stat["calls"]}
    return called, {each.removeprefix("cmdstat_") for each, stat in stats.items() if stat.get("rejected_calls")}


async def test_c13_the_recommended_rule_is_what_a_client_needs(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Under exactly that rule each feature works on one node and on three; and each command of it was used."""
    rule = await recommended(servers.start())
    caplog.clear()
    four = [servers.start() for _ in range(4)]
    urls = [pasted(each, rule, prefix="app:") for each in four]
    for nodes in ([f"{urls[0]}?db=1"], urls[1:]):
        async with (
            Redlock(*nodes, prefix="app:", **PATIENT) as first,
            Redlock(*nodes, prefix="app:", **PATIENT) as second,
        ):
            assert listens(first)
            await everything(first, second)
    called, refused = map(set.union, *(commands(each) for each in four))
    assert refused <= OPTIONAL
    own = {"config|resetstat", "config", "hello", "auth", *OPTIONAL}
    split = any("|" in each for each in called)  # before Redis 7 subcommands are counted with their command
    assert called - own == {each if split else each.partition("|")[0] for each in ACL_COMMANDS}
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert {getattr(each, "asynclock_reason", each.message) for each in warned} == {
        "broken"
    }  # `everything` breaks some
