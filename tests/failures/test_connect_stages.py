"""Servers to which no connection comes up: the error names the stage at which each attempt ended (HAZARDS C20, C21)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
import trustme

from asynclock import ConfigError, QuorumUnavailable, Redlock, _options
from asynclock._options import ClientSettings
from asynclock.rules.model import Verb
from tests.support.cut_servers import Clocked, proxies_to
from tests.support.fake_clock import FakeClock
from tests.support.ports import free_port
from tests.support.probes import connection_of, nodes_of, unanswered
from tests.support.servers import Server, Servers
from tests.support.still_clock import turns
from tests.support.waiters import until, urls_of

pytestmark = pytest.mark.both_loops("the loop connects")

GUARD = 15
"""Seconds; far above what a busy machine needs, and below the connect_timeout that no test waits for."""

both = pytest.mark.parametrize("nodes", [1, 3])


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """The addresses of three servers that accept connections and say nothing."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    yield [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    for each in listeners:
        each.close()


@asynccontextmanager
async def answering(reply: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address of a server that answers once, whatever it is asked, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(65536)
            writer.write(reply)
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def refused(*urls: str, timeout: float | None = 0, **options: float) -> str:
    """The message of a first acquire there. Its error names each node."""
    async with aclosing(Redlock(*urls, **options)) as client, asyncio.timeout(GUARD):  # type: ignore[arg-type]
        with pytest.raises((QuorumUnavailable, ConfigError)) as caught:
            await client("order:42").acquire(timeout=timeout)
        if isinstance(caught.value, QuorumUnavailable):
            assert len(caught.value.errors) == len(urls)
            assert all(node in str(error) for node, error in caught.value.errors.items())
        assert "secret" not in str(caught.value)
        return str(caught.value)


STAGES = {
    "redis://": "no reply to HELLO",
    "redis://:secret@": "no reply to AUTH",
    "rediss://": "no TLS connection",
    "rediss://:secret@": "no TLS connection",
}


@pytest.mark.parametrize(("scheme", "nodes"), [*((scheme, 1) for scheme in STAGES), ("redis://:secret@", 3)])
async def test_c21_a_server_that_accepts_and_says_nothing(silent: list[str], scheme: str, nodes: int) -> None:
    """connect_timeout bounds a timeout of 0, and a long one ends after that and the patience."""
    urls = [f"{scheme}{each}" for each in silent[:nodes]]
    limit = 1.0 if scheme.startswith("rediss") else 0.3  # the certificates are read first: CPU of a busy machine
    for timeout in (0, 3600):
        said = ""
        while not said or "not connected yet: no connection" in said:  # a busy machine has not come so far
            said = await refused(*urls, timeout=timeout, connect_timeout=limit, patience=0.3)
        assert said.count(STAGES[scheme]) == nodes


async def test_c21_the_default_is_a_second(silent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option of its own."""
    monkeypatch.setattr(_options, "ClientSettings", ClientSettings)  # other tests have another default
    assert ClientSettings().connect_timeout == 1.0
    assert STAGES["redis://"] in await refused(f"redis://{silent[0]}")


async def test_c21_a_short_timeout_names_the_stage_too(silent: list[str]) -> None:
    """And what to check. The attempt to connect has not ended yet."""
    said = await refused(f"redis://{silent[0]}", timeout=3.0, connect_timeout=30)
    assert "not connected yet: no reply to HELLO; check host and port, and whether both sides use TLS" in said


async def test_c21_health_names_the_stage_too(silent: list[str]) -> None:
    """A server without TLS waits for more of a TLS greeting. `health` ends before the attempt to connect does."""
    async with aclosing(Redlock(f"rediss://{silent[0]}", connect_timeout=30)) as client:
        (node,) = (await client.health()).nodes
    assert "not connected yet" in node.error  # on a busy machine at an earlier stage than TLS
    assert "; check host and port, and whether both sides use TLS" in node.error


@both
async def test_c21_connect_timeout_bounds_the_handshake(servers: Servers, nodes: int) -> None:
    """The server says no more as soon as its scripts are loaded."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        for each in proxies:
            each.instead = b"*", b""  # the first list of a handshake is the reply to HELLO
            each.hold_replies()
        said = await refused(*(each.url for each in proxies), connect_timeout=1.0)
        assert said.count("no reply to HELLO") == nodes


async def test_c21_a_full_server_has_no_connection() -> None:
    """It does not even accept: its queue of connections is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(full.getsockname())
        said = await refused(f"redis://127.0.0.1:{full.getsockname()[1]}", connect_timeout=1.0)
        assert "no connection" in said
        for each in waiting:
            each.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_c21_a_port_on_which_nobody_listens(scheme: str) -> None:
    """It is refused at once."""
    assert "refused" in await refused(f"{scheme}://127.0.0.1:{free_port()}", connect_timeout=30)


async def test_c21_tls_on_the_clients_side_only(servers: Servers) -> None:
    """A server without TLS waits for more, or answers with an error: either way the message is about TLS."""
    port = free_port()
    servers.start("--port", str(port), "--bind", "127.0.0.1")
    assert "TLS" in await refused(f"rediss://127.0.0.1:{port}", connect_timeout=1.0)
    async with answering(b"-ERR unknown command\r\n") as address:
        assert "answers without TLS" in await refused(f"rediss://{address}", connect_timeout=GUARD)


@pytest.mark.parametrize("scheme", ["redis://", "redis://:secret@"])
async def test_c21_tls_on_the_servers_side_only(scheme: str) -> None:
    """A server with TLS hangs up, or answers with a TLS alert: either way the message names TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    async with answering(b"", context) as address:
        assert "(rediss://)" in await refused(f"{scheme}{address}", connect_timeout=GUARD)
    async with answering(b"\x15\x03\x03\x00\x02\x02\x46") as address:
        assert "(rediss://)" in await refused(f"{scheme}{address}", connect_timeout=GUARD)


async def test_c21_a_healthy_majority_is_not_slowed(silent: list[str], servers: Servers, name: str) -> None:
    """One of three accepts and says nothing: the first use does not wait for connect_timeout."""
    some = [servers.start() for _ in range(2)]
    for each in some:  # a deployment in use, where a late node cannot have a mark that decides
        with each.cli() as cli:
            cli.set("asynclock~used", cli.info("server")["run_id"])  # type: ignore[index]
    urls = [*urls_of(some), f"redis://{silent[0]}"]
    async with asyncio.timeout(20), aclosing(Redlock(*urls, connect_timeout=30)) as client, client(name) as lease:
        assert lease.held
        assert "no reply to HELLO" in str(nodes_of(client)[2].error)


@pytest.mark.usefixtures("patient_connections")
@both
async def test_c21_node_timeout_bounds_a_try_once_a_connection_is_up(servers: Servers, name: str, nodes: int) -> None:
    """The servers hang after the first use: a timeout of 0 does not wait for connect_timeout."""
    some = [servers.start() for _ in range(nodes)]
    async with Redlock(*urls_of(some), connect_timeout=30, node_timeout=0.5) as client:
        async with client(name):
            pass
        for each in some:
            each.freeze()
        async with asyncio.timeout(GUARD):
            with pytest.raises(QuorumUnavailable, match="did not answer within") as caught:
                await client(name).acquire(timeout=0)
        assert len(caught.value.errors) > nodes // 2
        for each in some:
            each.thaw()


async def test_c21_a_blocked_loop_is_no_silent_server(server: Server, name: str) -> None:
    """The program is busy in each turn of its loop, for longer than connect_timeout: a try succeeds all the same. It
    needs 50 turns."""
    async with aclosing(Redlock(server.url, connect_timeout=0.01)) as client:
        acquiring = asyncio.create_task(client(name).acquire(timeout=0))
        while not acquiring.done():
            await asyncio.sleep(0)
            time.sleep(0.06)
        lease = await acquiring
        assert lease is not None
        assert lease.held


# -- patience ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["mutex", "fair", "read", "semaphore", "multi", "block", "local", "adopt"])
async def test_c20_patience_bounds_each_way_to_acquire(servers: Servers, name: str, nodes: int, kind: str) -> None:
    """Without a timeout, whatever is acquired."""
    some = [servers.start() for _ in range(nodes)]
    async with Redlock(*urls_of(some), patience=0.2) as client:
        handle = await (await client(f"{name}:handle").acquire(timeout=None)).detach()
        for each in some:
            each.kill()
        acquires = {
            "mutex": lambda: client(name).acquire(timeout=None),
            "fair": lambda: client(name, fair=True).acquire(timeout=None),
            "read": lambda: client.read(name).acquire(timeout=None),
            "semaphore": lambda: client.semaphore(name, 2).acquire(timeout=None),
            "multi": lambda: client.multi(name, f"{name}:2").acquire(timeout=None),
            "block": lambda: client(name).__aenter__(),
            "adopt": lambda: client.adopt(handle),
        }
        many = 5 if kind == "local" else 1
        ask = acquires.get(kind, acquires["mutex"])
        async with asyncio.timeout(GUARD):
            found = await asyncio.gather(*(ask() for _ in range(many)), return_exceptions=True)
        assert [type(each) for each in found] == [QuorumUnavailable] * many


async def test_c20_patience_ends_a_round_that_is_under_way(server: Server, name: str) -> None:
    """A single silent node is asked for 1.5 s each time. The first such round begins the outage, and the patience ends
    the second one."""
    clock = FakeClock()
    async with Redlock(Clocked(server.url, clock), patience=2.0, node_timeout=1.5) as client:
        connection = connection_of(nodes_of(client)[0])

        def rounds() -> int:
            ops = [handler.op for handler in unanswered(connection) if hasattr(handler, "op")]
            return sum(op.verb is Verb.ACQUIRE for op in ops)

        server.freeze()
        acquiring = asyncio.create_task(client(name).acquire(timeout=None))
        await until(rounds)
        clock.advance(1.51)
        await until(lambda: clock.advance(0.01) or rounds() == 2)
        await turns()
        assert not acquiring.done()
        clock.advance(1.0)
        with pytest.raises(QuorumUnavailable, match="did not answer within"):
            await acquiring
        server.thaw()


async def test_c20_a_round_that_was_just_sent_makes_no_healthy_node_silent(five: list[Server], name: str) -> None:
    """Tasks of all timeouts, first ones and tasks in the local queue: their errors name the frozen nodes only."""
    async with Redlock(*urls_of(five), node_timeout=0.5) as client:
        async with client(name):
            pass
        for each in five[:3]:
            each.freeze()
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=1.5)
        timeouts = [0, 0.5, 0.6, 1.0, 1.01, 1.5]
        found = await asyncio.gather(
            *(client(f"{name}:{at % 3}").acquire(timeout=timeout) for at, timeout in enumerate(timeouts * 5)),
            return_exceptions=True,
        )
        for each in found:
            assert isinstance(each, QuorumUnavailable)
            assert set(each.errors) == {frozen.url for frozen in five[:3]}
        for frozen in five[:3]:
            frozen.thaw()
