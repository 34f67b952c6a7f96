"""Servers that say why and hang up (HAZARDS F15): the user reads their sentence, and what to do."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest
import trustme

from asynclock import ConfigError, QuorumUnavailable, Redlock
from tests.support.ports import free_port
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, PATIENT, works

both_loops = pytest.mark.both_loops("the loop loses what was not read")

FULL = "max number of clients reached; raise its maxclients, or close connections to it that nobody needs"

PROTECTED = b"-DENIED Redis is running in protected mode because no password is set. In this mode 1) Disable it.\r\n"

LOGINS = ["", ":secret@"]


@contextmanager
def full(servers: Sequence[Server]) -> Iterator[None]:
    """They have one connection each, and it is in use."""
    with ExitStack() as stack:
        clients = [stack.enter_context(each.cli()) for each in servers]
        for each in clients:
            each.config_set("maxclients", 1)
        yield
        for each in clients:
            each.config_set("maxclients", 100)


class HangsUp(asyncio.Protocol):
    """A connection of a server that says `first`, or `then` to the begin of what it is sent, and closes. It reads no
    more."""

    def __init__(self, first: bytes, then: bytes, made: list[HangsUp]) -> None:
        self._first = first
        self._then = then
        self._made = made
        self.gone = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._made.append(self)
        self.transport = transport
        if self._first:
            transport.write(self._first)
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.transport.write(self._then)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()


@asynccontextmanager
async def hanging_up(first: bytes, then: bytes = b"", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address of such a server."""
    made: list[HangsUp] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HangsUp(first, then, made), "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for each in made:
            each.transport.abort()
            await each.gone.wait()


async def told(*urls: str, raises: type[Exception]) -> str:
    """The message of an acquire there."""
    async with aclosing(Redlock(*urls, **PATIENT)) as client, asyncio.timeout(LIMIT):
        with pytest.raises(raises) as caught:
            await client("order:42").acquire(timeout=0)
    assert "secret" not in str(caught.value)
    return str(caught.value)


@both_loops
@pytest.mark.parametrize("nodes", [1, 3])
async def test_f15_a_full_server_says_so(servers: Servers, name: str, nodes: int) -> None:
    """With a login and without, over TCP and unix sockets. It is an outage: the client works when there is room."""
    ports = [free_port() for _ in range(nodes)]
    some = [servers.start("--port", str(each), "--bind", "127.0.0.1") for each in ports]
    urls = [f"redis://127.0.0.1:{each}" for each in ports]
    async with aclosing(Redlock(*urls, **PATIENT)) as client:
        with full(some):
            with pytest.raises(QuorumUnavailable, match=FULL) as caught:
                await client(name).acquire(timeout=0)
            assert all(FULL in str(each) for each in caught.value.errors.values())
            logged_in = [f"unix://:secret@{each.path}?db=1" for each in some]
            assert (await told(*logged_in, raises=QuorumUnavailable)).count(FULL) == nodes
        await works(client, name)


async def test_f15_a_server_without_room_for_the_second_connection(server: Server, name: str) -> None:
    """With min_replicas a node has two. A hold that nobody can confirm does not count, and the error says why."""
    with server.cli() as cli:
        cli.config_set("maxclients", 2)
        async with aclosing(Redlock(f"{server.url}?min_replicas=1", **PATIENT)) as client:
            with pytest.raises(QuorumUnavailable, match=FULL):
                await client(name).acquire(timeout=0)


@pytest.mark.parametrize("scheme", ["redis+sentinel://{}/mymaster", "redis+cluster://{}"])
async def test_f15_a_full_sentinel_or_cluster_says_so(servers: Servers, scheme: str) -> None:
    """The remedy stands once."""
    port = free_port()
    server = servers.start("--port", str(port), "--bind", "127.0.0.1")
    with full([server]):
        said = await told(scheme.format(f"127.0.0.1:{port}"), raises=QuorumUnavailable)
    assert said.endswith(FULL)
    assert said.count("maxclients") == 1


@both_loops
@pytest.mark.parametrize("login", LOGINS)
async def test_f15_protected_mode_says_so(servers: Servers, login: str) -> None:
    """As a Redis of Debian does that is reached from another host: here by another address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no other address than that of the loopback interface")
        address = probe.getsockname()[0]
    port = free_port()
    servers.start("--port", str(port), "--bind", "0.0.0.0", "--protected-mode", "yes")
    said = await told(f"redis://{login}{address}:{port}", raises=ConfigError)
    assert f"{address}:{port} refuses the connection: " in said
    assert "protected mode" in said
    assert "set a password at the server (requirepass) and write it in the url" in said
    assert len(said) < 450, "no page of advice"


@both_loops
@pytest.mark.parametrize("url", ["redis://{}", "redis://:secret@{}/3", "redis+sentinel://{}/m", "redis+cluster://{}"])
async def test_f15_a_sentence_before_the_first_command(url: str) -> None:
    """The client writes before it has read, and the sentence is the reply to a command whose reply nobody reads."""
    async with hanging_up(PROTECTED) as address:
        said = await told(url.format(address), raises=ConfigError)
    assert "Redis is running in protected mode because no password is set; set a password" in said


@pytest.mark.parametrize(
    ("then", "raises", "says"),
    [
        (b"-NOAUTH Authentication required.\r\n", ConfigError, "Authentication required"),
        (b"-ERR no backend is up\r\n", QuorumUnavailable, "is out of reach: no backend is up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ConfigError, "does not answer as a Redis server does"),
        (b"\x15\x03\x03\x00\x02\x02\x46", ConfigError, "it speaks TLS only; turn TLS on in the url (rediss://)"),
        (b"", QuorumUnavailable, "check host and port, and whether both sides use TLS (rediss://)"),
    ],
    ids=["a login is missing", "a proxy without servers", "HTTP", "TLS", "nothing"],
)
async def test_f15_a_sentence_after_the_first_command(then: bytes, raises: type[Exception], says: str) -> None:
    """The server closes with commands unread, so that what it said may be lost behind a write that fails."""
    async with hanging_up(b"", then) as address:
        assert says in await told(f"redis://{address}", raises=raises)


@pytest.mark.parametrize("login", LOGINS)
async def test_f15_a_server_that_speaks_tls_only(login: str) -> None:
    """It hangs up without a word that a client without TLS could read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    async with hanging_up(b"", tls=context) as address:
        said = await told(f"redis://{login}{address}", raises=ConfigError)
    assert "it speaks TLS only; turn TLS on in the url (rediss://)" in said


async def test_f15_a_login_is_no_reason_of_its_own() -> None:
    """A server that hangs up after a login is asked again without one, and refuses that: this is not why it hung up."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"PING" in await reader.read(65536):
            writer.write(b"-NOAUTH Authentication required.\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert "no reply to" in await told(f"redis://:secret@{host}:{port}", raises=QuorumUnavailable)


@both_loops
async def test_f15_a_server_that_is_gone_when_it_is_asked_why(caplog: pytest.LogCaptureFixture) -> None:
    """It hangs up and stops. The error still names the stage of the attempt, and not that of the question. The log has
    it; the acquire may get that of a second attempt."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with aclosing(Redlock(f"redis://{host}:{port}", **PATIENT)) as client:
        with pytest.raises(QuorumUnavailable):
            await client("any").acquire(timeout=0)
    assert "(no reply to HELLO); check host and port" in caplog.text
