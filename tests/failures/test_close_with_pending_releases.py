"""A client closes while a release for a server is pending: its connection was cut a moment before, or it was busy."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from asynclock import Redlock
from asynclock.stores.redis import delivery as _delivery
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, LONG, holder, until, urls_of

nodes = pytest.mark.parametrize("nodes", [1, 3])


def cut_off(server: Server) -> None:
    """The server closes all connections but the test's."""
    with server.cli() as cli:
        for kind in ("normal", "pubsub"):
            cli.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def busy(server: Server) -> object:
    """It runs a script that does not end; each other command is refused."""

    def spin() -> None:
        with server.cli() as cli, contextlib.suppress(Exception):
            cli.eval("while true do end", 0)

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        yield spinning
    finally:
        with server.cli() as cli:
            cli.script_kill()
        spinning.join()


def is_busy(server: Server) -> bool:
    with server.cli() as cli:
        try:
            cli.get("x")
        except Exception as error:
            return "BUSY" in str(error)
    return False


@nodes
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.usefixtures("patient_farewells")
async def test_a17_a_release_is_delivered_by_a_new_connection(
    servers: Servers, name: str, nodes: int, released: bool
) -> None:
    """The connections to a majority are cut as the client closes: it connects once more, and no key is left."""
    some = [servers.start() for _ in range(nodes)]
    async with asyncio.timeout(LIMIT):
        client = Redlock(*urls_of(some), lease=LONG)
        lease = await client(name, renew=False).acquire(timeout=None)
        await until(lambda: all(holder(server, name) for server in some))
        for server in some[: nodes // 2 + 1]:
            cut_off(server)
        if released:
            await lease.release()
        await client.aclose()
    assert not any(holder(server, name) for server in some)


@nodes
@pytest.mark.usefixtures("patient_farewells")
async def test_a17_a_release_that_a_busy_server_refused_is_delivered(servers: Servers, name: str, nodes: int) -> None:
    """A majority answers BUSY to the release, and can serve again when the client closes: no key is left."""
    some = [servers.start("--busy-reply-threshold", "1") for _ in range(nodes)]
    async with asyncio.timeout(LIMIT):
        client = Redlock(*urls_of(some), lease=LONG)
        lease = await client(name, renew=False).acquire(timeout=None)
        await until(lambda: all(holder(server, name) for server in some))
        with contextlib.ExitStack() as stack:
            for server in some[: nodes // 2 + 1]:
                stack.enter_context(busy(server))  # type: ignore[arg-type]
                await until(lambda server=server: is_busy(server))  # type: ignore[misc]
            await lease.release()
        await client.aclose()
    assert not any(holder(server, name) for server in some)


async def test_a_dead_server_does_not_keep_a_client_from_closing(servers: Servers, name: str) -> None:
    """A release for it is pending, and it refuses the connection: the client closes, and leaves no task."""
    server = servers.start()
    before = asyncio.all_tasks()
    async with asyncio.timeout(LIMIT):
        client = Redlock(server.url, lease=LONG)
        lease = await client(name, renew=False).acquire(timeout=None)
        server.kill()
        await client.aclose()
    assert not lease.held
    assert asyncio.all_tasks() == before


async def test_releases_that_a_busy_server_refused_are_sent_after_one_pause(
    servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many releases were refused. Once the server works again all of them are sent after one pause, not one pause a
    slice."""
    monkeypatch.setattr(_delivery, "SLICE", 2)
    monkeypatch.setattr(_delivery, "BUSY_PAUSE", 2.0)
    server = servers.start("--busy-reply-threshold", "1")
    async with asyncio.timeout(LIMIT), Redlock(server.url, lease=LONG) as client:
        leases = [await client(f"{name}:{i}", renew=False).acquire(timeout=None) for i in range(40)]
        with busy(server):  # type: ignore[attr-defined]
            await until(lambda: is_busy(server))
            await asyncio.gather(*(lease.release() for lease in leases))
        # with a pause for each of the 20 slices it would take twice as long as the test waits
        await until(lambda: not any(holder(server, f"{name}:{i}") for i in range(40)))
