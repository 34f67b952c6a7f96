"""What a client tells and logs of its nodes: down, up, in quarantine; and of its releases."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import Any

import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock.events import Event, NodeDown, NodeUp, Quarantined, QuarantineEnded, ReleaseFailed
from tests.support.probes import nodes_of
from tests.support.servers import Server, Servers
from tests.support.told import Told, told
from tests.support.user_store import DictStore
from tests.support.waiters import LIMIT, LONG, back, until, urls_of

SHORT: dict[str, Any] = {"lease": LONG, "node_timeout": 0.3}


def of_nodes(seen: Told) -> list[Event]:
    return [event for event in seen.all if isinstance(event, (NodeDown, NodeUp, Quarantined, QuarantineEnded))]


def lines(caplog: pytest.LogCaptureFixture, *names: str) -> list[tuple[str, str]]:
    """The event and the level of each record for one of these events."""
    found = [(str(getattr(record, "asynclock_event", "")), record.levelname) for record in caplog.records]
    return [each for each in found if each[0] in names]


@pytest.mark.parametrize("nodes", [1, 5])
async def test_a_new_deployment_tells_its_nodes_only(five: list[Server], name: str, nodes: int) -> None:
    """Each node comes up once. Servers a moment old are in quarantine until all have answered: that is not told."""
    used = urls_of(five[:nodes])
    async with aclosing(Redlock(*used)) as client:
        with told(client) as seen:
            async with client(name):
                pass
            await back(client)
    assert {event.node for event in seen.of(NodeUp)} == set(used)
    assert of_nodes(seen) == seen.of(NodeUp)
    assert len(seen.of(NodeUp)) == nodes


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_a_node_goes_down_and_comes_up(
    five: list[Server], name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once each, however often the client tries to connect; a WARNING and an INFO."""
    caplog.set_level(logging.INFO, "asynclock")
    async with Redlock(*urls_of(five), trust_restarts=True, node_timeout=1.5) as client:
        await back(client)
        caplog.clear()
        with told(client) as seen:
            getattr(five[0], how)()
            async with asyncio.timeout(LIMIT):
                while not seen.of(NodeDown):
                    async with client(name):
                        await asyncio.sleep(0.02)
                for _ in range(20):
                    async with client(name):
                        await asyncio.sleep(0.01)
            assert of_nodes(seen) == seen.of(NodeDown)
            five[0].thaw() if how == "freeze" else five[0].restart()
            await until(lambda: seen.of(NodeUp))
    (down,), (up,) = seen.of(NodeDown), seen.of(NodeUp)
    assert down.node == up.node == five[0].url
    assert down.error
    assert lines(caplog, "NodeDown", "NodeUp") == [("NodeDown", "WARNING"), ("NodeUp", "INFO")]


async def test_a_server_that_never_answered_is_told_as_down(caplog: pytest.LogCaptureFixture) -> None:
    """At the first attempt to connect; the password of the url is not shown."""
    async with aclosing(Redlock("redis://worker:swordfish@localhost:1/0", patience=0.3)) as client:
        with told(client) as seen, pytest.raises(QuorumUnavailable):
            await client("k").acquire()
    (down,) = seen.of(NodeDown)
    assert of_nodes(seen) == [down]
    assert "localhost:1" in down.node
    assert lines(caplog, "NodeDown") == [("NodeDown", "WARNING")]
    assert "swordfish" not in f"{seen.all} {caplog.text}"


async def test_a_client_that_closes_tells_no_node_as_down(five: list[Server], name: str) -> None:
    """It has hung up by itself."""
    async with aclosing(Redlock(*urls_of(five))) as client:
        with told(client) as seen:
            async with client(name):
                pass
            await back(client)
            await client.aclose()
    assert len(seen.of(NodeUp)) == 5
    assert seen.of(NodeDown) == []


async def test_d3_a_quarantine_is_told_at_its_begin_and_at_its_end(
    five: list[Server], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted server casts no vote for max_lease + 1 s: told with the seconds, once; and when it votes again."""
    caplog.set_level(logging.INFO, "asynclock")
    async with Redlock(*urls_of(five), lease=2.0, max_lease=2.0, node_timeout=0.6) as client:
        async with client(name):
            pass
        caplog.clear()
        with told(client) as seen:
            five[0].kill()
            await until(lambda: seen.of(NodeDown))
            five[0].restart()

            def here(kind: type[Event]) -> list[Any]:  # a slow machine may take another one for restarted as well
                return [event for event in of_nodes(seen) if isinstance(event, kind) and event.node == five[0].url]

            async with asyncio.timeout(LIMIT):
                while not here(QuarantineEnded):
                    with suppress(LockLost):  # the test itself stood still
                        async with client(name):
                            await asyncio.sleep(0.01)
    (begins,) = here(Quarantined)
    assert 0 < begins.seconds <= 3.0
    named = [type(event).__name__ for event in here(Event)]
    assert named.index("NodeDown") < named.index("Quarantined") < named.index("QuarantineEnded")
    assert set(lines(caplog, "Quarantined", "QuarantineEnded")) == {
        ("Quarantined", "INFO"),
        ("QuarantineEnded", "INFO"),
    }


async def test_a_client_that_starts_within_a_quarantine_is_told(servers: Servers, name: str) -> None:
    """One that has not seen the server before its restart."""
    three = servers.start_together(3)
    async with Redlock(*urls_of(three), lease=5.0, max_lease=20.0) as client:
        async with client(name):
            pass
    three[0].restart()
    async with aclosing(Redlock(*urls_of(three), lease=5.0, max_lease=20.0)) as client:
        with told(client) as seen:
            async with client(name):
                pass
            await until(lambda: seen.of(Quarantined))
    (begins,) = seen.of(Quarantined)
    assert begins.node == three[0].url
    assert 10.0 < begins.seconds <= 21.0


async def test_a_store_of_a_user_is_told_as_well(name: str) -> None:
    """Down where it cannot listen, and up once it can."""

    class Broken(DictStore):
        broken = True

        def listen(self, *args: Any) -> Any:
            if self.broken:
                raise ConnectionError("the database is down")
            return super().listen(*args)

    store = Broken()
    async with aclosing(Redlock(store, patience=LIMIT)) as client:
        with told(client) as seen:
            waiting = asyncio.create_task(client(name).acquire(timeout=None))
            await until(lambda: seen.of(NodeDown))
            store.broken = False
            async with asyncio.timeout(LIMIT):
                await (await waiting).release()
    assert of_nodes(seen) == [NodeDown(store.label, "the database is down"), NodeUp(store.label)]


async def test_a_release_without_a_majority_is_a_warning(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the lock, and what the node said."""
    async with Redlock(server.url, **SHORT) as client:
        lease = await client(name, label="orders").acquire(timeout=None)
        server.freeze()
        await lease.release()
        server.thaw()
    (line,) = [record for record in caplog.records if getattr(record, "asynclock_event", "") == "ReleaseFailed"]
    assert line.levelno == logging.WARNING
    assert f"the release of {name!r} had no majority" in line.getMessage()
    assert vars(line)["asynclock_label"] == "orders"
    assert str(server.path) in vars(line)["asynclock_error"]


@pytest.mark.parametrize("again", [True, False], ids=["up again", "still down"])
async def test_a_failed_release_says_what_each_node_said(servers: Servers, name: str, again: bool) -> None:
    """A node that was down at the acquire is not asked to release. It is named if it is still down, with the reason
    for that; and not if it is up again."""
    gone, up, *silent = (servers.start() for _ in range(5))
    async with Redlock(*urls_of([gone, up, *silent]), lease=LONG, node_timeout=1.5) as client:
        gone.freeze()
        node = nodes_of(client)[0]
        await client(name).locked()
        await until(lambda: node.error is not None)
        lease = await client(name).acquire(timeout=None)
        if again:
            gone.thaw()
            await until(lambda: node.error is None)
        with told(client) as seen:
            for server in silent:
                server.freeze()
            await lease.release()
        for server in (*silent, *([] if again else [gone])):
            server.thaw()
    (event,) = seen.of(ReleaseFailed)
    named = sum(f"{server.url} did not answer within" in event.error for server in silent)
    assert named >= 2  # with the first node these are the majority: the third may be overdue a turn later
    assert up.url not in event.error
    assert "not asked" not in event.error
    assert (f"{gone.url} has been silent for" in event.error) is not again


async def test_a_release_that_leaves_a_majority_free_is_no_warning(servers: Servers, name: str) -> None:
    """One of three nodes was down at the acquire, and is not asked to release; another one does not answer. The first
    and the third can grant the name, so it does not stay taken."""
    gone, silent, up = (servers.start() for _ in range(3))
    async with Redlock(*urls_of([gone, silent, up]), lease=LONG, node_timeout=1.5) as client:
        gone.freeze()
        node = nodes_of(client)[0]
        await client(name).locked()
        await until(lambda: node.error is not None)
        lease = await client(name).acquire(timeout=None)
        gone.thaw()
        await until(lambda: node.error is None)
        with told(client) as seen:
            silent.freeze()
            await lease.release()
            async with client(name, timeout=LIMIT) as next_lease:
                assert next_lease.held
        silent.thaw()
    assert not seen.of(ReleaseFailed)


@pytest.mark.parametrize("how", ["release_all", "aclose"])
async def test_releases_of_a_client_that_ends_in_an_outage_are_warnings(
    server: Server, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody awaits these releases, so only the events and the log tell that the names stay taken."""
    client = Redlock(server.url, **SHORT)
    leases = [await client(f"{name}:{number}", label="orders").acquire(timeout=None) for number in range(3)]
    with told(client) as seen:
        server.freeze()
        await getattr(client, how)()
        server.thaw()
    assert {event.name for event in seen.of(ReleaseFailed)} == {lease.name for lease in leases}
    assert {event.label for event in seen.of(ReleaseFailed)} == {"orders"}
    assert lines(caplog, "ReleaseFailed") == [("ReleaseFailed", "WARNING")] * 3
    await client.aclose()


async def test_each_cycle_is_logged_at_debug_only(server: Server, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the logger was at DEBUG as the client began; and no longer after its level has changed."""
    log = logging.getLogger("asynclock")
    async with Redlock(server.url) as quiet:
        async with quiet(name):
            pass
    assert lines(caplog, "Acquired", "Released") == []
    caplog.set_level(logging.DEBUG, "asynclock")
    async with Redlock(server.url) as client:
        async with client(name) as lease:
            pass
        assert lines(caplog, "Acquired", "Released") == [("Acquired", "DEBUG"), ("Released", "DEBUG")]
        assert repr(lease.fence) not in caplog.text
        log.setLevel(logging.INFO)
        client.subscribe(lambda event: None)
        caplog.clear()
        async with client(name):
            pass
        assert lines(caplog, "Acquired", "Released") == []
