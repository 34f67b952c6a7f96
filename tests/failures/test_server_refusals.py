"""Refusals of a server (HAZARDS C13): a clear error at once, and the lock works once the cause is mended."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from tests.support.redis_deadlines import answers_within, next_look
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, until, works


def acl(server: Server, *rules: str) -> None:
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">swordfish", "~*", *rules)


async def refused(url: str, *says: str) -> None:
    """Each entry point raises at once a ConfigError that names node and reason, and not the password."""
    async with aclosing(Redlock(url)) as redlock:
        async with asyncio.timeout(LIMIT):
            for use in (redlock("order:42").acquire, redlock("order:42").__aenter__):
                with pytest.raises(ConfigError) as caught:
                    await use()
                message = str(caught.value)
                assert all(word in message for word in (*says, url.rpartition("@")[2].removeprefix("unix://")))
                assert "swordfish" not in message + repr(caught.value)
        assert "swordfish" not in repr(await redlock.health())


async def test_c13_wrong_password(server: Server) -> None:
    """WRONGPASS."""
    acl(server, "+@all")
    await refused(f"unix://worker:swordfishes@{server.path}", "password")


async def test_c13_unknown_user(server: Server) -> None:
    """There is no such user."""
    await refused(f"unix://nobody:swordfish@{server.path}", "password")


async def test_c13_no_password(server: Server) -> None:
    """NOAUTH."""
    with server.cli() as cli:
        cli.config_set("requirepass", "swordfish")
    await refused(server.url, "Authentication required")


@pytest.mark.filterwarnings("ignore:.*forbids:RuntimeWarning")
@pytest.mark.parametrize("rules", ["+@all -evalsha -eval", "+@all -set", "+@all resetkeys ~x:*"])
async def test_c13_no_permission(server: Server, rules: str) -> None:
    """NOPERM for the library's script, for a command inside it, or for the key; and once it is given, the same client
    works."""
    acl(server, *rules.split())
    url = f"unix://worker:swordfish@{server.path}"
    await refused(url, "ACL SETUSER")  # the words of the servers differ, and the remedy is that of the library
    async with aclosing(Redlock(url)) as redlock:
        with pytest.raises(ConfigError):
            await redlock("order:42").acquire()
        acl(server, "+@all", "~*")
        await works(redlock, "order:42")


async def test_c13_the_client_works_once_the_password_is_right(server: Server, name: str) -> None:
    """The server was mended, not the program: the same client finds out by itself."""
    acl(server, "+@all", "resetpass", ">other")
    async with aclosing(Redlock(f"unix://worker:swordfish@{server.path}")) as redlock:
        with pytest.raises(ConfigError):
            await redlock(name).acquire()
        acl(server)
        async with asyncio.timeout(LIMIT):
            while not (await redlock.health()).ok:
                await asyncio.sleep(0.05)  # it connects again when it likes
        await works(redlock, name)


async def test_c13_a_minority_that_refuses(servers: Servers, name: str) -> None:
    """One node of three with another password costs nothing."""
    urls = [servers.start().url for _ in range(2)]
    third = servers.start()
    acl(third, "+@all")
    async with Redlock(*urls, f"unix://worker:wrong@{third.path}") as redlock:
        await works(redlock, name)


async def test_a_warning_that_is_an_error_leaves_no_connection(servers: Servers, name: str) -> None:
    """A server forbids INFO, and the program makes the warning of that an error: the node connects once more, and the
    connection of the first attempt is closed."""
    some = servers.start_together(3)
    async with Redlock(*(each.url for each in some)) as first:  # from now on it is no new deployment
        await works(first, name)
    acl(some[0], "+@all", "-info")
    urls = [f"unix://worker:swordfish@{some[0].path}", *(each.url for each in some[1:])]
    async with aclosing(Redlock(*urls)) as redlock:
        await works(redlock, name)
        async with asyncio.timeout(LIMIT):
            while not all(each.ok for each in (await redlock.health()).nodes):
                await asyncio.sleep(0.05)
        with some[0].cli() as cli:
            async with asyncio.timeout(LIMIT):
                while sum(each["user"] == "worker" for each in cli.client_list()) != 1:
                    await asyncio.sleep(0.01)


async def test_a_look_has_a_time_limit_of_its_own(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the deadline of an op before it, a tenth of its lease, is later. The server stops between the two."""
    answers_within(1.0, monkeypatch)
    async with aclosing(Redlock(server.url, lease=600.0, max_lease=600.0)) as redlock:
        await works(redlock, name)
        await until(lambda: next_look(redlock) == math.inf)  # no limit of the handshake is left
        lease = await redlock(name).acquire()
        assert next_look(redlock) < math.inf
        server.freeze()
        try:
            with pytest.raises(QuorumUnavailable):
                async with asyncio.timeout(LIMIT):
                    [each async for each in redlock.holders()]
        finally:
            server.thaw()
        assert lease
        await lease.release()
