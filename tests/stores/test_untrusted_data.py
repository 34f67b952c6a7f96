"""Ids that other programs wrote to the same servers: no call of the library fails of them, and what it prints is one
line without control characters."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from asynclock import ConfigError, LockTimeout, QuorumUnavailable, Redlock
from asynclock.events import NodeDown
from asynclock.rules.model import Entry, State
from asynclock.stores.sql import SQLStore
from tests.support.commands import asynclock
from tests.support.default_keys import key_of, keys_of
from tests.support.servers import Server
from tests.support.services.zookeeper import ZooKeeper
from tests.support.sql_states import damage, write_state
from tests.support.waiters import LIMIT, PATIENT, urls_of

RANDOM = "c0ffee" * 5 + "ab"
ODD_HOST = "web\x1b[2J\r\nroot: all is well"
LONG = "9" * 5000

IDS = [
    f"{RANDOM}|1700000000000000|7|{ODD_HOST}|a\nnote",
    f"{RANDOM}|1700000000000000|²|web|",
    f"{RANDOM}|1700000000000000|{LONG}|web|",
    f"{RANDOM}|²|7|web|",
    f"{RANDOM}|{LONG}|7|web|",
    f"{RANDOM}|r.{LONG}|²|web|",
    f"{RANDOM}|s{LONG}/{LONG}.{LONG}|²|web|",
    f"{RANDOM}|s3/²|7",
]


async def answers_all(client: Redlock, name: str) -> None:
    """An acquire is refused, or told that the name has another use; and inspect and holders answer."""
    with pytest.raises((LockTimeout, ConfigError)) as caught:
        async with client(name, timeout=0):
            pass
    assert str(caught.value).isprintable()
    info = await client.inspect(name)
    assert info.holders
    assert all(said.isprintable() for said in info.nodes.values())
    assert name in [holder.name async for holder in client.holders(name)]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_f11_odd_ids_on_redis(five: list[Server], name: str, nodes: int) -> None:
    """As the string of a mutex, as members of a sorted set, in the queue, and as a counter."""
    servers = five[:nodes]
    async with Redlock(*urls_of(servers), **PATIENT) as client:
        for number, each in enumerate(IDS):
            mutex, shared = f"{name}:{number}:mutex", f"{name}:{number}:shared"
            for server in servers:
                with server.cli() as cli:
                    cli.set(key_of(mutex), each, px=60_000)
                    cli.zadd(key_of(shared), {each: (time.time() + 60) * 1000})
                    for key in map(keys_of, (mutex, shared)):
                        cli.zadd(key.queue, {each: "inf", f"{each[:31]}e|1|²|web|": "-inf"})
                        cli.hset(key.tickets, each[:32], f"{LONG} ² x y z")
                        cli.set(key.fence, LONG)
            await answers_all(client, mutex)
            await answers_all(client, shared)


async def test_f11_odd_slots_on_redis(five: list[Server], name: str) -> None:
    """Other holders of the same semaphore, whose permits and slots no client can have."""
    async with Redlock(*urls_of(five[:3]), **PATIENT) as client:
        for server in five[:3]:
            with server.cli() as cli:
                members = {f"{RANDOM}|s3/{LONG}.1|7|web|": (time.time() + 60) * 1000}
                cli.zadd(key_of(name), {**members, f"{RANDOM[:31]}d|s{LONG}/1.1|7|web|": (time.time() + 60) * 1000})
        lease = await client.semaphore(name, 3).acquire(timeout=0)
        assert lease is not None
        assert await client.semaphore(name, 3).acquire(timeout=0) is None
        assert (await client.inspect(name)).free == 0
        await lease.release()


async def test_f11_odd_ids_in_a_database(tmp_path: Path, name: str) -> None:
    """A row whose column `state` is no state of ours is a ConfigError that names it; a list leaves it out."""
    store = SQLStore(f"sqlite:///{tmp_path}/locks.db")
    async with Redlock(store) as client:
        for number, each in enumerate(IDS):
            state = State((Entry(each, time.time() + 60),), 7, time.time() + 60)
            await write_state(store, f"{name}:{number}", state)
            await answers_all(client, f"{name}:{number}")
        async with client(f"{name}:damaged", min_hold=20.0, lease=20.0):
            pass
        await damage(store, f"{name}:damaged", '{"holds": [["a", "b"]]}')
        for ask in (client(f"{name}:damaged").acquire(timeout=0), client.inspect(f"{name}:damaged")):
            with pytest.raises(ConfigError, match=f"the row '{name}:damaged' was written by another program"):
                await ask
        assert len([holder async for holder in client.holders(name)]) == len(IDS)


async def test_f11_odd_ids_in_zookeeper(shared_zookeeper: ZooKeeper, name: str) -> None:
    """As data of a node that has the name of one of ours; and a node whose name has a long number."""
    kazoo = KazooClient(shared_zookeeper.address)

    def plant() -> None:
        kazoo.start()
        for number, each in enumerate(IDS):
            path = f"/locks/{name}:{number}/{RANDOM}m__lock__"
            kazoo.create(path, f"{each}\0{LONG}".encode(), ephemeral=True, sequence=True, makepath=True)
            kazoo.create(f"/locks/{name}:{number}/{RANDOM}s{LONG}__sem__", b"", ephemeral=True, sequence=True)

    def end() -> None:
        kazoo.stop()
        kazoo.close()

    try:
        await asyncio.to_thread(plant)
        async with Redlock(shared_zookeeper.url()) as client:
            for number in range(len(IDS)):
                await answers_all(client, f"{name}:{number}")
    finally:
        await asyncio.to_thread(end)


def test_f11_commands_print_ids_escaped(server: Server, name: str) -> None:
    """Here, who holds the name."""
    odd = f"{name}\x1b[31m"
    with server.cli() as cli:
        cli.set(key_of(odd), IDS[0], px=60_000)
    done = asynclock("run", odd, "--wait", "0", "--", "true", on=server)
    assert done.returncode == 75, done
    assert r"web\x1b[2J\r\nroot" in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


async def test_f11_what_a_server_says_is_printed_escaped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Here it answers each command with an error of several colours: in errors, events, health and log lines."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                commands = len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", data))
                writer.write(commands * b"-MISCONF \x1b[31mred\x1b[0m\x07\r\n")
        writer.close()

    events: list[Any] = []
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with aclosing(Redlock(f"redis://127.0.0.1:{port}", connect_timeout=LIMIT)) as client:
            client.subscribe(events.append)
            with pytest.raises(QuorumUnavailable) as caught:
                await client(name).acquire(timeout=0)
            health = await client.health()
    shown = [str(caught.value), *map(str, caught.value.errors.values()), health.reason, health.nodes[0].error]
    shown += [each.error for each in events if isinstance(each, NodeDown)] + caplog.messages
    assert sum(r"\x1b[31mred" in each for each in shown) >= 5, shown
    assert all(each.isprintable() for each in shown), shown
