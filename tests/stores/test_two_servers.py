"""An address behind which another server answers than before: a restart, a promoted replica, or two servers in turn."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from asynclock import ConfigError, LockLost, Redlock
from asynclock.events import NodeDown
from asynclock.stores.redis.identity import Identity, Server, server_of
from tests.support.balancer import Balancer
from tests.support.cut_servers import Clocked
from tests.support.fake_clock import FakeClock
from tests.support.ports import free_port
from tests.support.servers import Server as Process
from tests.support.servers import Servers
from tests.support.told import told
from tests.support.waiters import LIMIT, PATIENT, back, until, works


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_f21_two_servers_behind_one_address(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Round robin: the first one comes back, so two are proved. Each use says so, health too; it works again once the
    address leads to one of them."""
    two = servers.start_together(2)
    async with Balancer(servers.folder / "lb", two) as balancer, aclosing(Redlock(balancer.url, **PATIENT)) as client:
        with told(client) as seen:
            async with client(name):
                pass
            for _ in range(2):  # the second server is too young for a proof by its uptime
                balancer.cut()
                await back_or_refused(client, seen.of(NodeDown))
            with pytest.raises(ConfigError, match=r"two servers answer at .*lb in turn"):
                await client(name).acquire()
            (down,) = seen.of(NodeDown)
            assert "two servers" in down.error
            health = await client.health()
            assert not health.ok
            assert "two servers" in health.reason
            balancer.servers = [two[0]]
            async with asyncio.timeout(LIMIT):
                while not (await client.health()).ok:
                    await asyncio.sleep(0.05)
            async with client(name):
                pass
    assert sum("another server answers" in each for each in warnings(caplog)) == 1


async def test_f21_two_servers_that_were_up_at_the_same_time(servers: Servers, name: str) -> None:
    """The second one was up already when the first one answered last. The time of the connection does not count: the
    client met the first one long before."""
    two, clock = servers.start_together(2), FakeClock()
    with two[1].cli() as cli:
        await until(lambda: cli.info("server")["uptime_in_seconds"] >= 3)  # more than the rounding
    async with Balancer(servers.folder / "lb", two) as balancer:
        async with aclosing(Redlock(Clocked(balancer.url, clock), **PATIENT)) as client:
            async with client(name):
                pass
            clock.advance(1_000.0)  # longer than the second one is up
            await client.health()
            with told(client) as seen:
                balancer.cut()
                await until(lambda: seen.of(NodeDown))
            assert "two servers answer at" in seen.of(NodeDown)[0].error


async def back_or_refused(client: Redlock, downs: list[NodeDown]) -> None:
    """Return once it is connected, or has told why not."""
    before = len(downs)
    while not (await client.health()).ok:
        if len(downs) > before or "two servers" in (await client.health()).reason:
            return
        await asyncio.sleep(0.01)


async def test_f21_a_restart_is_told_once(server: Process, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning; the hold that the new server does not know is lost at once, and not at its next renewal."""
    async with aclosing(Redlock(server.url, **{**PATIENT, "lease": 60.0})) as client:
        lease = await client(name).acquire(timeout=None)
        server.restart()
        await back(client)
        async with asyncio.timeout(LIMIT):
            assert await lease.wait_lost()
        with pytest.raises(LockLost):
            lease.ensure_held()
        with server.cli() as cli:
            cli.client_kill_filter(_type="pubsub")
        await back(client)
        async with client(name):
            pass
    assert sum("another server answers" in each for each in warnings(caplog)) == 1


async def test_f21_a_promoted_replica_is_no_second_server(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator promotes the replica, and the address leads to it; later it leads to the first one again, which was
    the replica meanwhile. Both were up all the time."""
    old, new = (servers.start("--port", str(free_port())) for _ in range(2))
    await _replicate(new, old)
    async with Balancer(servers.folder / "lb", [old]) as balancer, aclosing(Redlock(balancer.url, **PATIENT)) as client:
        for source, target in ((old, new), (new, old)):
            async with client(name):
                pass
            with target.cli() as cli:
                cli.replicaof("NO", "ONE")
            await _replicate(source, target)
            balancer.servers = [target]
            balancer.cut()
            await back(client)
        async with client(name):
            pass
    assert [("another server" in each) for each in warnings(caplog)] == [True, True]


async def test_f21_a_replica_behind_the_address_is_no_second_server(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The address leads to the replica, and back to the master: that is reported as what it is."""
    master, replica = (servers.start("--port", str(free_port())) for _ in range(2))
    await _replicate(replica, master)
    async with (
        Balancer(servers.folder / "lb", [master]) as balancer,
        aclosing(Redlock(balancer.url, **PATIENT)) as client,
    ):
        async with client(name):
            pass
        with told(client) as seen:
            balancer.servers = [replica]
            balancer.cut()
            async with asyncio.timeout(LIMIT):
                while not seen.of(NodeDown):
                    await client.health()
            balancer.servers = [master]
            await works(client, name)
    assert all("READONLY" in each.error for each in seen.of(NodeDown))
    assert not [each for each in warnings(caplog) if "another server" in each]


async def test_f21_a_replica_that_was_attached_later_and_promoted(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A master takes a new replication id when its first replica comes, and when it has had none for an hour. The
    client does not see that: it is connected all the time."""
    old, new = (servers.start("--port", str(free_port())) for _ in range(2))
    async with Balancer(servers.folder / "lb", [old]) as balancer, aclosing(Redlock(balancer.url, **PATIENT)) as client:
        async with client(name):
            pass
        await _replicate(new, old)
        with new.cli() as cli:
            await until(lambda: cli.info("server")["uptime_in_seconds"] >= 4)
            async with client(name):
                pass
            cli.replicaof("NO", "ONE")
        balancer.servers = [new]
        balancer.cut()
        async with client(name):
            pass
    assert [("another server" in each) for each in warnings(caplog)] == [True]


async def test_f21_a_replica_behind_the_same_address_is_no_second_server(servers: Servers, name: str) -> None:
    """The address leads to the replica for a moment, and the user may not ask by HELLO what the server is."""
    master, replica = (servers.start("--port", str(free_port())) for _ in range(2))
    await _replicate(replica, master)
    for each in (master, replica):
        each.user("-hello")
    async with Balancer(servers.folder / "lb", [master]) as balancer:
        url = balancer.url.replace("unix://", "unix://worker:secret@")
        async with aclosing(Redlock(url, **PATIENT)) as client:
            async with client(name):
                pass
            balancer.servers = [replica, master]
            balancer.number = 0
            balancer.cut()
            async with client(name):
                pass
            assert balancer.number > 1


async def _replicate(replica: Process, master: Process) -> None:
    """Make it a replica, and wait until it has all."""
    with replica.cli() as cli, master.cli() as theirs:
        theirs.config_set("repl-diskless-sync-delay", 0)
        cli.replicaof("127.0.0.1", theirs.config_get("port")["port"])
        await until(lambda: cli.info("replication").get("master_link_status") == "up")


# -- what proves two servers; pure -------------------------------------------------------------------------------------

A, B = Server("a", "ra", "", 100.0), Server("b", "rb", "", 100.0)


def met(*visits: tuple[float, Server], answered: float = 0.0, managed: bool = False) -> str:
    """The answer for the last of these connections; the others raise nothing that counts."""
    identity, found = Identity(), ""
    for now, server in visits:
        identity.answered(answered)
        found = identity.meet(server, now, "here", managed=managed)
    return found


def test_f21_a_server_that_was_up_before_the_last_answer_of_the_other() -> None:
    with pytest.raises(ConfigError, match="two servers answer at here in turn"):
        met((1000.0, A), (1050.0, B), answered=1040.0)


@pytest.mark.parametrize("uptime", [0.0, 5.0, 11.0])
def test_f21_a_server_that_started_after_the_last_answer(uptime: float) -> None:
    """The uptime is rounded."""
    assert met((1000.0, A), (1050.0, B._replace(uptime=uptime)), answered=1040.0) == "a"


def test_f21_a_server_that_names_no_replication_id_may_be_a_promoted_replica() -> None:
    assert met((1000.0, A._replace(replication_id="")), (1050.0, B), answered=1040.0) == "a"


def test_f21_a_run_id_that_comes_back() -> None:
    """Unless it was promoted again."""
    young = B._replace(uptime=1.0)
    with pytest.raises(ConfigError, match="two servers"):
        met((1000.0, A), (1050.0, young), (1051.0, A))
    assert met((1000.0, A), (1050.0, young), (1051.0, A._replace(before_promotion="rb"))) == "b"


def test_f21_servers_of_long_ago_are_forgotten() -> None:
    """So their number is bounded. The last sixteen are known."""
    servers = [Server(f"s{number}", f"r{number}") for number in range(18)]
    visits = [(1000.0 + 100.0 * number, server) for number, server in enumerate(servers)]
    assert met(*visits, (9000.0, servers[0])) == "s17"
    with pytest.raises(ConfigError, match="two servers"):
        met(*visits, (9000.0, servers[1]))


def test_f21_two_servers_one_of_which_was_promoted_long_ago() -> None:
    """It is doubted when it comes back: it was not promoted since."""
    promoted = B._replace(before_promotion="rz")
    assert met((1000.0, A), (1050.0, promoted), answered=1040.0) == "a"
    with pytest.raises(ConfigError, match="two servers"):
        met((1000.0, promoted), (1050.0, A._replace(uptime=1.0)), (1051.0, promoted))


def test_f21_a_server_that_a_sentinel_names_is_not_doubted() -> None:
    assert met((1000.0, A), (1050.0, B), (1051.0, A), answered=1040.0, managed=True) == "b"


def test_f21_without_info_nothing_is_compared() -> None:
    assert met((1000.0, A), (1050.0, server_of({})), (1051.0, A)) == ""


def test_f21_a_migration_fails_once() -> None:
    """The next attempt meets the server that was found last."""
    identity = Identity()
    identity.meet(A, 1000.0, "here", managed=False)
    identity.answered(1049.0)
    with pytest.raises(ConfigError):
        identity.meet(B, 1050.0, "here", managed=False)
    assert identity.meet(B, 1055.0, "here", managed=False) == ""
