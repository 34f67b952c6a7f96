"""A client that closes receives the replies to its releases, adoptions and breaks before it disconnects (HAZARDS
A17)."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.rules.model import Op, Verb
from asynclock.stores.redis import connection as _connection
from asynclock.stores.redis import delivery as _delivery
from asynclock.stores.redis import node as _node
from asynclock.stores.redis.handlers import IgnoredCommand
from tests.support.closing_probes import hang_up, is_cut, timer_of
from tests.support.cut_servers import Clocked, proxies_to
from tests.support.fake_clock import FakeClock
from tests.support.probes import ask_nodes, connection_of, kind_of, new_id, nodes_of
from tests.support.proxy import RELEASE
from tests.support.servers import Server, Servers
from tests.support.still_clock import turns
from tests.support.tls import Tls
from tests.support.waiters import LIMIT, LONG, holder, until

pytestmark = pytest.mark.both_loops("the loop closes the transports")


def commands(client: Redlock, name: str, handle: str, lease: Any) -> dict[str, tuple[tuple[bytes, ...], Any]]:
    """How each looks on its way, and what sends it."""
    return {
        "release": (RELEASE, lease.release),
        "adopt": ((b"\r\nadopt\r\n",), lambda: client.adopt(handle)),
        "break": ((b"\r\nbreak\r\n",), lambda: client.break_lock(f"{name}:broken")),
        "extend": ((b"\r\nextend\r\n",), lease.extend),
    }


async def tried(command: Coroutine[Any, Any, Any]) -> Any:
    """The result of the call, or its exception."""
    try:
        return await command
    except Exception as error:
        return error


@pytest.mark.parametrize("what", ["release", "adopt", "break"])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_node_that_closes_waits_for_the_answer(
    servers: Servers, name: str, nodes: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is on its way as the nodes close: they wait for it, and it counts."""
    monkeypatch.setattr(_delivery, "_LAST_WORDS", 0.0)  # else the test would have to wait for so long
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=15.0)
        )
        lease = await client(name).acquire(timeout=None)
        broken = await client(f"{name}:broken").acquire(timeout=None)
        handle = await (await client(f"{name}:adopted").acquire(timeout=None)).detach()
        looks, send = commands(client, name, handle, lease)[what]
        sent = [proxy.request(*looks) for proxy in proxies]
        for proxy in proxies:
            proxy.hold_from = looks
        sending = asyncio.create_task(tried(send()))
        for event in sent:
            await event.wait()
        closing = [asyncio.create_task(node.aclose()) for node in nodes_of(client)]
        await turns(50)
        assert not any(task.done() for task in closing)
        assert not sending.done()
        for proxy in proxies:
            proxy.hold_from = ()
            proxy.let_go()
        outcome = await sending
        assert not isinstance(outcome, Exception), outcome
        await asyncio.gather(*closing)
        assert broken is not None


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_node_that_closes_waits_for_nothing_else(servers: Servers, name: str, nodes: int) -> None:
    """A renewal is not answered: its node timeout of 19 s does not delay a client that closes."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=19.0)
        )
        lease = await client(name).acquire(timeout=None)
        for proxy in proxies:
            proxy.hold_replies()
        renewing = asyncio.create_task(tried(lease.extend()))
        await turns()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(node.aclose() for node in nodes_of(client)))
        assert loop.time() - began < 10.0
        assert isinstance(await renewing, Exception)


async def test_no_answer_is_awaited_beyond_its_deadline(servers: Servers, name: str) -> None:
    """A frozen server has not answered a release, which has 2 s. Then the client disconnects, though the server has not
    been silent for long enough to be down."""
    clock = FakeClock()
    server = servers.start()
    async with Redlock(Clocked(server.url, clock), lease=LONG, node_timeout=2.0) as client:
        lease = await client(name).acquire(timeout=None)
        server.freeze()
        try:
            (node,) = nodes_of(client)
            releasing = asyncio.create_task(lease.release())
            await turns()
            closing = asyncio.create_task(node.aclose())
            await turns()
            clock.advance(1.9)
            await turns()
            assert not closing.done()
            clock.advance(0.2)
            await asyncio.wait({closing}, timeout=LIMIT)  # the hang-up waits for a moment of its own
            assert closing.done()
            await releasing
        finally:
            server.thaw()


async def test_a_close_that_is_cancelled_cuts_the_connection(servers: Servers, name: str) -> None:
    """The time limit of a close cancels a node that waits for a frozen server: its socket and its timer are gone."""
    clock = FakeClock()
    server = servers.start()
    async with Redlock(Clocked(server.url, clock), lease=LONG, node_timeout=2.0) as client:
        lease = await client(name).acquire(timeout=None)
        server.freeze()
        try:
            (node,) = nodes_of(client)
            connection = connection_of(node)
            releasing = asyncio.create_task(tried(lease.release()))
            await turns()
            closing = asyncio.create_task(node.aclose())
            await turns()
            assert not closing.done()
            closing.cancel()
            await asyncio.wait({closing, releasing}, timeout=LIMIT)
            assert closing.cancelled()
            await turns()
            assert is_cut(connection)
            assert not timer_of(node)
        finally:
            server.thaw()


async def test_a_hang_up_that_is_cancelled_cuts_the_connection(servers: Servers) -> None:
    """A frozen server does not read what is left to write, so the socket would stay open."""
    server = servers.start()
    async with Redlock(server.url) as client:
        await client.health()
        connection = connection_of(nodes_of(client)[0])
        server.freeze()
        try:
            connection.transport.write(b"*1\r\n$4\r\nPING\r\n" * 1_000_000)
            leaving = asyncio.create_task(hang_up(connection))
            await turns(3)
            assert not leaving.done()
            leaving.cancel()
            await asyncio.wait({leaving}, timeout=LIMIT)
            await turns()
            assert is_cut(connection)
        finally:
            server.thaw()


async def test_a_hang_up_is_quiet_once_a_slow_server_has_read_all(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport ends when its buffer is empty, and tells the connection while it does. To abort it then would end
    it twice, which asyncio reports as an error."""
    monkeypatch.setattr(_connection, "_HANGING_UP", LIMIT)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    server = servers.start()
    async with Redlock(server.url) as client:
        await client.health()
        connection = connection_of(nodes_of(client)[0])
        server.freeze()
        try:
            connection.transport.write(b"*1\r\n$4\r\nPING\r\n" * 200_000)
            leaving = asyncio.create_task(hang_up(connection))
            await turns(3)
            assert not leaving.done()
        finally:
            server.thaw()
        await leaving
        await turns(3)
        assert is_cut(connection)
    assert not reported


async def carried_out(client: Redlock, server: Server, commands: int) -> int:
    """How many of so many commands the server has carried out, if the client hangs up while it stands still."""
    await client.health()
    connection = connection_of(nodes_of(client)[0])
    server.freeze()
    try:
        connection.send(b"*2\r\n$4\r\nINCR\r\n$7\r\ncounter\r\n" * commands, IgnoredCommand(0.0, 0.0))
        connection.fail_all(ConnectionError("the client closes"))
        leaving = asyncio.create_task(hang_up(connection))
        await turns(3)
    finally:
        server.thaw()
    await leaving
    with server.cli() as cli:
        return int(cli.get("counter"))


async def test_a19_a_server_reads_all_that_was_written_before_a_hang_up(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as it reads. If the socket were closed by then, it would drop the commands that it has not read."""
    monkeypatch.setattr(_connection, "_HANGING_UP", LIMIT)
    server = servers.start()
    async with Redlock(server.url) as client:
        assert await carried_out(client, server, 3_000) == 3_000


async def test_a19_a_server_behind_tls_reads_all_that_was_written_before_a_hang_up(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS has no half-close, and a reply after its end cuts the connection."""
    monkeypatch.setattr(_connection, "_HANGING_UP", LIMIT)
    server = servers.start()
    tls = Tls(server, tmp_path)
    async with tls.serving(), Redlock(f"rediss://localhost:{tls.port}?ssl_ca_certs={tls.ca_file}") as client:
        assert await carried_out(client, server, 100_000) == 100_000


async def test_a_hang_up_on_a_connection_that_the_server_has_reset() -> None:
    """The loop has not seen the reset yet. The hang-up ends without an error: in a cluster, the error of one master
    would cut the connections to the others before these have read all."""
    node: Any = SimpleNamespace(
        index=0, clock=FakeClock(), label="server", lost=lambda connection, error: connection.abort()
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, writer = await asyncio.open_connection(*listening.getsockname())
        server, _ = listening.accept()
        connection = _connection.Connection(node, writer)
        connection.transport.set_protocol(connection)
        connection.send(b"*1\r\n$4\r\nPING\r\n", IgnoredCommand(0.0, 0.0))
        connection.flush()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
        await hang_up(connection)
    assert is_cut(connection)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_release_sent_while_the_node_closes_is_delivered(servers: Servers, name: str, nodes: int) -> None:
    """A reply is awaited as the nodes close; a release that comes meanwhile is carried out."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=15.0)
        )
        first = await client(name).acquire(timeout=None)
        second = await client(f"{name}:2").acquire(timeout=None)
        for proxy in proxies:
            proxy.hold_replies()
        releasing = [asyncio.create_task(first.release())]
        await turns()
        closing = [asyncio.create_task(node.aclose()) for node in nodes_of(client)]
        await turns()
        assert all(node.state is _node.NodeState.CLOSED for node in nodes_of(client))
        releasing.append(asyncio.create_task(second.release()))
        await turns()
        for proxy in proxies:
            proxy.let_go()
        await asyncio.gather(*closing, *releasing)
        for each in some:
            assert not holder(each, f"{name}:2")


async def test_an_undo_sent_as_the_node_disconnects_is_delivered(servers: Servers, name: str) -> None:
    """An acquire is cut short by the closing node, and undone in the same turn: the undo is sent before the end."""
    server = servers.start()
    async with AsyncExitStack() as stack:
        (proxy,) = await proxies_to(stack, [server])
        client = await stack.enter_async_context(Redlock(proxy.url, lease=LONG))
        await client(f"{name}:first").locked()
        proxy.hold_replies()
        op = Op(Verb.ACQUIRE, kind_of(client(name)), name, new_id(client, 1), LONG, 1, LONG)
        undone = proxy.request(b"\r\nrelease\r\n", *RELEASE[1:])
        ask_nodes(client, op, 10.0, undone=True)
        await nodes_of(client)[0].aclose()
        async with asyncio.timeout(LIMIT):
            await undone.wait()
        await until(lambda: not holder(server, name))
