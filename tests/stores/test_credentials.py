"""Credentials that change while a client lives, and what a server shows of its connections."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.auth.token import SimpleToken
from redis.auth.token_manager import CredentialsListener
from redis.credentials import CredentialProvider, StreamingCredentialProvider

import asynclock
from asynclock import QuorumUnavailable, Redlock
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, until, works

pytestmark = pytest.mark.both_loops("the loop has the transports of TLS")


class Changing(CredentialProvider):
    """Gives the password that is valid at the time."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.asked = 0

    async def get_credentials_async(self) -> tuple[str, str]:
        self.asked += 1
        return "worker", self.password


class Streaming(StreamingCredentialProvider):
    """Calls back with each renewed token, as `redis.auth.token_manager` does: there is one callback, the last one."""

    def __init__(self) -> None:
        self._listener = CredentialsListener()
        self.user = "first"

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.user, f"token of {self.user}"

    def on_next(self, callback: Callable[[Any], None]) -> None:
        self._listener.on_next = callback

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        self._listener.on_error = callback

    def is_streaming(self) -> bool:
        return True

    async def renew(self, user: str) -> None:
        self.user = user
        await self._listener.on_next(SimpleToken(f"token of {user}", -1, 0, {"oid": user}))  # type: ignore[misc, operator]


def issue(server: Server, user: str) -> None:
    """A server has one user for each token, so that a connection shows which token it used."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", user, "on", f">token of {user}", "~*", "&*", "+@all")


def end(server: Server, user: str) -> None:
    """The token ends: the server closes the connections that used no later one."""
    with server.cli() as cli:
        assert cli.execute_command("ACL", "DELUSER", user) == 1


def connections(server: Server, name: str = "asynclock") -> list[dict[str, str]]:
    """What the server shows of the connections with this name."""
    with server.cli() as cli:
        return [each for each in cli.client_list() if each["name"] == name]


def user_of(server: Server, name: str = "asynclock") -> str:
    """The user of the only connection with this name."""
    (connection,) = connections(server, name)
    return connection["user"]


@pytest.fixture
async def theirs() -> AsyncIterator[Callable[..., Redis]]:
    """Makes clients of the user, and closes them."""
    async with AsyncExitStack() as stack:

        def client(server: Server, provider: CredentialProvider, **options: Any) -> Redis:
            made = Redis(unix_socket_path=str(server.path), credential_provider=provider, **options)
            stack.push_async_callback(made.aclose)
            return made

        yield client


async def test_each_connection_asks_the_provider_anew(server: Server, theirs: Callable[..., Redis], name: str) -> None:
    """The password changes and the connection breaks: the next connection uses the new password."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">old", "~*", "&*", "+@all")
        provider = Changing("old")
        async with Redlock(theirs(server, provider), connect_timeout=LIMIT) as redlock:
            await works(redlock, name)
            assert provider.asked == 1
            cli.execute_command("ACL", "SETUSER", "worker", "resetpass", ">new")
            provider.password = "new"
            cli.execute_command("CLIENT", "KILL", "USER", "worker")
            async with asyncio.timeout(LIMIT):
                await works(redlock, name)
            assert provider.asked == 2


class Slow(Changing):
    """Takes longer than a connect may."""

    async def get_credentials_async(self) -> tuple[str, str]:
        found = await super().get_credentials_async()
        await asyncio.sleep(4.2)
        return found


class Failing(Changing):
    def __init__(self, error: Exception) -> None:
        super().__init__("old")
        self._error = error

    async def get_credentials_async(self) -> tuple[str, str]:
        raise self._error


class Hanging(Changing):
    async def get_credentials_async(self) -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("it does not end")


async def test_c21_a_slow_provider_is_no_slow_connect(server: Server, theirs: Callable[..., Redis], name: str) -> None:
    """`connect_timeout` begins when the provider has answered; so it is asked once."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">old", "~*", "&*", "+@all")
    provider = Slow("old")
    async with Redlock(theirs(server, provider), connect_timeout=4.0) as redlock:
        await works(redlock, name)
        assert provider.asked == 1


@pytest.mark.parametrize("error", [RuntimeError("sealed"), TimeoutError("slow"), ConnectionRefusedError(111, "down")])
async def test_c20_a_provider_that_fails_is_named(
    server: Server, theirs: Callable[..., Redis], name: str, error: Exception
) -> None:
    """The servers are up, so the message must not send an operator to them: the provider's own server may be down."""
    async with aclosing(Redlock(theirs(server, Failing(error)), patience=0.3)) as redlock:
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock(name).acquire()
    assert f"credential provider failed ({type(error).__name__}: {error})" in str(caught.value)
    assert "refused the connection" not in str(caught.value)


@pytest.mark.parametrize(("timeout", "patience"), [(0, 60.0), (3600, 1.0), (None, 1.0)])
async def test_c20_a_provider_that_hangs_uses_up_no_budget(
    server: Server, theirs: Callable[..., Redis], name: str, timeout: float | None, patience: float
) -> None:
    """A try ends at connect_timeout, and a longer wait after that and the patience, as with a silent server. The
    message names the provider."""
    async with aclosing(Redlock(theirs(server, Hanging("")), connect_timeout=0.3, patience=patience)) as redlock:
        with pytest.raises(QuorumUnavailable, match="no answer of the credential provider"):
            async with asyncio.timeout(LIMIT):
                await redlock(name).acquire(timeout=timeout)


@pytest.fixture
def provider() -> Streaming:
    return Streaming()


async def test_a_renewed_token_reaches_the_live_connection(
    server: Server, theirs: Callable[..., Redis], provider: Streaming, name: str
) -> None:
    """When the first token ends, the connection has the second one already: it stays, and nothing is lost."""
    issue(server, "first")
    async with Redlock(theirs(server, provider)) as redlock, redlock(name) as lease:
        (before,) = connections(server)
        assert before["user"] == "first"
        issue(server, "second")
        await provider.renew("second")
        await lease.extend()
        assert user_of(server) == "second"
        end(server, "first")
        await lease.extend()
        (after,) = connections(server)
        assert after["id"] == before["id"]


async def test_the_users_own_connection_gets_the_token_as_before(
    server: Server, theirs: Callable[..., Redis], provider: Streaming
) -> None:
    """Two clients are made of one pool, which is told of each token once."""
    issue(server, "first")
    app = theirs(server, provider, client_name="app")
    assert await app.ping()
    with server.cli() as cli:
        async with Redlock(app), Redlock(app):
            assert {each["user"] for each in connections(server, "app")} == {"first"}
            issue(server, "second")
            before = cli.info("commandstats")["cmdstat_auth"]["calls"]
            await provider.renew("second")
            assert await app.ping()
            await until(lambda: {each["user"] for each in connections(server, "app")} == {"second"})
            assert len(connections(server, "app")) == 3
            assert cli.info("commandstats")["cmdstat_auth"]["calls"] == before + 3


async def test_a_token_reaches_all_servers_of_a_provider(
    servers: Servers, theirs: Callable[..., Redis], provider: Streaming
) -> None:
    """redis-py tells the last client only, because its provider has one callback. Each client is connected before the
    next one is made."""
    three = [servers.start() for _ in range(3)]
    async with AsyncExitStack() as stack:
        for server in three:
            issue(server, "first")
            issue(server, "second")
            await stack.enter_async_context(Redlock(theirs(server, provider)))
        await provider.renew("second")
        await until(lambda: [user_of(server) for server in three] == ["second"] * 3)


async def test_a_token_reaches_the_connections_of_other_event_loops(
    server: Server, theirs: Callable[..., Redis], provider: Streaming
) -> None:
    """The provider lives in one loop. A connection of another thread gets the token in its own loop."""
    issue(server, "first")
    issue(server, "second")
    redlock = Redlock(theirs(server, provider))
    inside, leave = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        asyncio.get_running_loop().set_debug(True)  # then it refuses calls from other threads
        async with redlock:
            inside.set()
            await asyncio.to_thread(leave.wait, LIMIT)

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    try:
        assert await asyncio.to_thread(inside.wait, LIMIT)
        await provider.renew("second")
        await until(lambda: user_of(server) == "second")
    finally:
        leave.set()
        await other


async def test_a_refused_token_is_logged_and_harms_nothing(
    server: Server, theirs: Callable[..., Redis], provider: Streaming, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection keeps its login. The log names the node, and shows no token."""
    issue(server, "first")
    async with Redlock(theirs(server, provider)) as redlock:
        with caplog.at_level(logging.WARNING, "asynclock"):
            await provider.renew("nobody")
            await works(redlock, name)
        assert user_of(server) == "first"
    (record,) = caplog.records
    assert str(server.path) in record.getMessage()
    assert "refused a renewed token" in record.getMessage()
    assert "token of" not in record.getMessage()


async def test_a_server_shows_the_client_and_its_max_lease(server: Server) -> None:
    """In CLIENT LIST. Operators compare `max_lease` of all clients there, which must be equal."""
    async with Redlock(server.url, max_lease=90):
        (connection,) = connections(server)
        with server.cli() as cli:
            known = [*map(int, cli.info("server")["redis_version"].split(".")[:2])] >= [7, 2]
        shown = ("asynclock(max_lease=90)", asynclock.__version__) if known else (None, None)
        assert (connection.get("lib-name"), connection.get("lib-ver")) == shown


async def test_the_name_of_the_users_client_is_kept(server: Server, theirs: Callable[..., Redis]) -> None:
    """A name that the user chose is not replaced."""
    issue(server, "first")
    async with Redlock(theirs(server, Streaming(), client_name="app")):
        assert len(connections(server, "app")) == 1
        assert connections(server) == []


async def test_d10_a_server_that_forbids_names_keeps_locks(server: Server, name: str) -> None:
    """CLIENT is denied to this user: there is no name, and no warning, and locks work."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">x", "~*", "&*", "+@all", "-client")
    async with Redlock(server.url.replace("unix://", "unix://worker:x@")) as redlock:
        await works(redlock, name)
        assert connections(server) == []
