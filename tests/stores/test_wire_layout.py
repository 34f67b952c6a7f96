"""The layout of all that clients of different versions share on a server: keys, values, channels, notices, handles.

Clients of neighbouring versions run side by side during an upgrade, so a change of a table here is a change of the wire
format. Before you change one: can clients of the previous version still read it?

In the tables `p:` is the prefix and `n` the name. ID stands for 32 hex digits, US for a Unix time in microseconds, MS
for one in milliseconds, PID and HOST for the process, SLOT for the number of a permit. A key with "px" at the end of
its line has an expiry, a key with "-" has none.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from textwrap import dedent
from typing import Any

import pytest

from asynclock import Lock, Redlock
from asynclock.rules.model import Kind, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ
from asynclock.rules.semaphore import Semaphore
from tests.support.agreement import command_of
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, until

LONG = 600.0
OPTIONS: dict[str, Any] = {"prefix": "p:", "lease": LONG, "max_lease": LONG, "metadata": "note"}


def masked(text: str) -> str:
    """Without what differs from run to run."""
    for pattern, word in (
        (r"\b[0-9a-f]{32}\b", "ID"),
        (rf"\|{os.getpid()}\|{re.escape(socket.gethostname())}\|", "|PID|HOST|"),
        (rf"~by~{os.getpid()}\|{re.escape(socket.gethostname())}\|", "~by~PID|HOST|"),
        (r"\|s(\d+)/\d+\.", r"|s\1/SLOT."),
        (r"\b\d{16}\b", "US"),
        (r"\b\d{13}\b", "MS"),
        (r"~[0-9a-f]{12}$", "~TAG"),
    ):
        text = re.sub(pattern, word, text)
    return text


class Wire:
    """What is at a server, and what it published."""

    def __init__(self, server: Server) -> None:
        self.cli: Any = server.cli(decode_responses=True)
        self._heard: Any = self.cli.pubsub()
        self._heard.psubscribe("asynclock~*")
        assert self._heard.get_message(timeout=LIMIT)["type"] == "psubscribe"

    def close(self) -> None:
        self._heard.close()
        self.cli.close()

    def keys(self) -> str:
        """All keys: type, key, value, whether it expires."""
        return "\n".join(masked(self._row(key)) for key in sorted(self.cli.keys()))

    def _row(self, key: str) -> str:
        kind = self.cli.type(key)
        match kind:
            case "string":
                value = self.cli.get(key)
            case "zset":
                value = ", ".join(
                    f"{member} = {score:.0f}" for member, score in self.cli.zrange(key, 0, -1, withscores=True)
                )
            case _:
                value = ", ".join(f"{field} = {value}" for field, value in self.cli.hgetall(key).items())
        return f"{kind:6}  {key:27}  {value}  {'-' if self.cli.ttl(key) < 0 else 'px'}"

    def published(self) -> str:
        """All messages so far: channel and text."""
        self.cli.publish("asynclock~", "last")
        found: list[str] = []
        while (message := self._heard.get_message(timeout=LIMIT)) is not None:
            if message["data"] == "last":
                return "\n".join(found)
            found.append(f"{masked(message['channel'])}  {masked(message['data'])!r}")
        raise AssertionError("a message was lost")


def table(text: str) -> str:
    return dedent(text).strip()


@pytest.fixture
def wire(server: Server) -> Any:
    found = Wire(server)
    yield found
    found.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Redlock]:
    async with Redlock(server.url, **OPTIONS) as redlock:
        yield redlock


@pytest.fixture
async def other(server: Server) -> AsyncIterator[Redlock]:
    async with Redlock(server.url, **OPTIONS) as redlock:
        yield redlock


async def waits(wire: Wire, lock: Lock) -> asyncio.Task[Any]:
    """A task that waits; its ticket is at the server."""
    task = asyncio.create_task(lock.acquire(timeout=None))
    await until(lambda: wire.cli.exists("p:asynclock~{p:n}queue"))
    return task


@pytest.mark.usefixtures("no_looks")
async def test_a_mutex(wire: Wire, client: Redlock, other: Redlock) -> None:
    """Held, waited for, handed over, and released: keys and notices at each step."""
    wire.published()
    lease = await client("n").acquire(timeout=None)
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
        string  p:n                          ID|US|PID|HOST|note  px
    """)
    waiting = await waits(wire, other("n"))
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
        zset    p:asynclock~{p:n}queue       ID|US|PID|HOST|note = US  px
        hash    p:asynclock~{p:n}tickets     ID = 1 MS MS 1 1  px
        string  p:n                          +ID|US|PID|HOST|note  px
    """)
    await lease.release()
    next_lease = await waiting
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
        string  p:n                          +ID|US|PID|HOST|note  px
    """)
    assert wire.published() == table("""
        asynclock~TAG  'ID 0 0 -1 p:n'
        asynclock~TAG  'ID 1 US -1 p:n'
    """)
    await next_lease.release()
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
    """)


SHARED = {
    "read": (lambda client: client.read("n"), "ID|r.US|PID|HOST|note = MS"),
    "write": (lambda client: client.write("n"), "ID|w.US|PID|HOST|note = MS"),
    "semaphore": (lambda client: client.semaphore("n", 3), "ID|s3/.US|PID|HOST|note = MS"),
}


@pytest.mark.parametrize(("lock", "member"), SHARED.values(), ids=SHARED.keys())
async def test_a_shared_kind(wire: Wire, client: Redlock, lock: Callable[[Redlock], Lock], member: str) -> None:
    """The hold is a sorted set of ids by the end of their leases."""
    async with lock(client):
        assert wire.keys() == table(f"""
            string  p:asynclock~{{p:n}}fence       US  px
            zset    p:n                          {member}  px
        """)


@pytest.mark.usefixtures("no_looks")
async def test_a_waiter_of_a_shared_kind(wire: Wire, client: Redlock, other: Redlock) -> None:
    """A writer waits for a reader, and is notified."""
    wire.published()
    lease = await client.read("n").acquire(timeout=None)
    waiting = await waits(wire, other.write("n"))
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
        zset    p:asynclock~{p:n}queue       ID|w.US|PID|HOST|note = US  px
        hash    p:asynclock~{p:n}tickets     ID = 1 MS MS 1 1  px
        zset    p:n                          ID|r.US|PID|HOST|note = MS  px
    """)
    await lease.release()
    await (await waiting).release()
    assert wire.published() == table("""
        asynclock~TAG  'ID 1 US -1 p:n'
    """)


async def test_a_break_and_a_rest(wire: Wire, client: Redlock) -> None:
    """A break is told to the holder (-2), first with the client that breaks it. After `min_hold` and after `once` the
    name keeps a marker."""
    wire.published()
    lease = await client("n").acquire(timeout=None)
    assert await client.break_lock("n")
    assert await lease.wait_lost()
    assert wire.published() == table("""
        asynclock~TAG  'ID 0 0 -2 p:nasynclock~by~PID|HOST|note'
        asynclock~TAG  'ID 0 0 -2 p:n'
    """)
    async with client("n", min_hold=LONG):
        pass

    @client.once("o", within=LONG)
    async def run() -> None: ...

    await run()
    assert wire.keys() == table("""
        string  p:asynclock~{p:n}fence       US  px
        string  p:asynclock~{p:o}fence       US  px
        string  p:n                          asynclock~resting  px
        string  p:o                          asynclock~done  px
    """)


async def test_a_quorum(servers: Servers) -> None:
    """Each node has the mark of first use, without an expiry: the run_id of its server. A permit has a slot."""
    three = [servers.start() for _ in range(3)]
    async with Redlock(*(each.url for each in three), **OPTIONS) as redlock, redlock.semaphore("n", 3):
        for server in three:
            wire = Wire(server)
            await until(lambda wire=wire: wire.cli.exists("p:n"))  # type: ignore[misc]
            run_id = wire.cli.info("server")["run_id"]
            assert wire.keys().replace(run_id, "RUN_ID") == table("""
                string  p:asynclock~used             RUN_ID  -
                string  p:asynclock~{p:n}fence       US  px
                zset    p:n                          ID|s3/SLOT.US|PID|HOST|note = MS  px
            """)
            wire.close()


async def test_a_plain_mutex(wire: Wire, client: Redlock) -> None:
    """fencing=False: the key of any Redlock client, and no other key."""
    async with client("n", fencing=False):
        assert wire.keys() == table("""
            string  p:n                          ID|US|PID|HOST|note  px
        """)


async def test_a_handle(client: Redlock) -> None:
    """ "asynclock1." and, in base64, a checksum of six bytes and a JSON list: name, id, token."""
    lease = await client("n").acquire(timeout=None)
    mark, _, content = (await lease.detach()).partition(".")
    assert mark == "asynclock1"
    assert masked(base64.urlsafe_b64decode(content)[6:].decode()) == '["n", "ID|US|PID|HOST|note", US]'


IDS = [f"{digit * 32}|%s1|1|h|" for digit in "ab"]
KINDS: dict[str, tuple[Kind, str]] = {
    "mutex": (MUTEX, ""),
    "read-write lock": (READ, "r."),
    "semaphore": (Semaphore(1), "s1/."),
}


@pytest.mark.parametrize(("kind", "letter"), KINDS.values(), ids=KINDS.keys())
def test_the_replies_of_the_scripts(server: Server, kind: Kind, letter: str) -> None:
    """A client reads them by position."""
    first, second = (each % letter for each in IDS)
    with server.cli() as cli:

        def ask(verb: Verb, id: str, **more: Any) -> str:
            op = Op(verb, kind, "n", id, LONG, 0, 300.0, 0.0, **more)
            return masked(re.sub(r"\b[56]\d{5}\b", "PTTL", str(cli.execute_command(*command_of(op)))))  # type: ignore[no-untyped-call]

        ticket = Queueing(Serve.GRANT, number=1, fresh=LONG / 2, order=0)
        assert ask(Verb.ACQUIRE, first) == "[1, US]"
        assert ask(Verb.EXTEND, first) == "[1, US]"
        shared = ", b''" if kind.shared and letter.startswith("s") else ""
        if not letter.startswith("r"):
            holder = f"b'{'ID' + first[32:]}'"
            assert ask(Verb.ACQUIRE, second) == f"[0, PTTL, {holder}, -1, 0{shared}]"
            assert ask(Verb.ACQUIRE, second, queueing=ticket) == f"[0, PTTL, {holder}, 0, US{shared}]"
        assert ask(Verb.RELEASE, first) == "[1, US]"
        assert ask(Verb.RELEASE, first, tombstone=True) == f"[0, -2, b'', -1, 0{shared}]"
        assert ask(Verb.ACQUIRE, first) == "[-1]"
