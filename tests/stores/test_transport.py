"""The ways to a server: TCP, TLS, unix sockets, ACL users, databases, and the user's own clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from asynclock import ConfigError, QuorumUnavailable, Redlock
from tests.support.default_keys import key_of
from tests.support.ports import free_port
from tests.support.servers import Server, Servers
from tests.support.tls import Tls
from tests.support.waiters import LIMIT, PATIENT

pytestmark = pytest.mark.both_loops("the loop has the transports")

PASSWORD = "sword/fish#@:%é 1"


async def serves(node: str | Redis, name: str = "order:42", **options: Any) -> None:
    """A lock works there: it excludes, is extended, and is released."""
    async with Redlock(node, **options) as redlock, Redlock(node, **options) as other:
        async with redlock(name) as lease:
            assert await other(name).acquire(timeout=0) is None
            await lease.extend()
            assert lease.held
        assert not await other(name).locked()


@pytest.fixture
def tcp(servers: Servers) -> tuple[Server, int]:
    """A server on a port, too."""
    port = free_port()
    return servers.start("--port", str(port), "--bind", "127.0.0.1"), port


def held_in(server: Server, name: str, db: int = 0) -> bool:
    with server.cli(db=db) as cli:
        return bool(cli.exists(key_of(name)))


# -- urls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "valkey", "REDIS"])
async def test_tcp(tcp: tuple[Server, int], scheme: str) -> None:
    """redis:// and valkey://, however written."""
    await serves(f"{scheme}://127.0.0.1:{tcp[1]}")


async def test_unix_socket(server: Server) -> None:
    """unix:// and a path."""
    await serves(f"unix://{server.path}")


@pytest.mark.parametrize("how", ["path", "query"])
async def test_database_number(tcp: tuple[Server, int], how: str) -> None:
    """/3 on TCP and ?db=3: the lock is there and nowhere else."""
    server, port = tcp
    url = f"redis://127.0.0.1:{port}/3" if how == "path" else f"unix://{server.path}?db=3"
    async with Redlock(url) as redlock, redlock("order:42"):
        assert held_in(server, "order:42", db=3)
        assert not held_in(server, "order:42")
    await serves(url)


async def test_same_name_in_two_databases(server: Server) -> None:
    """It is two names: two databases share nothing."""
    async with Redlock(server.url) as redlock, Redlock(f"{server.url}?db=1") as other, redlock("order:42"):
        async with other("order:42", timeout=0) as lease:
            assert lease.held


@pytest.mark.parametrize("how", ["authority", "query"])
async def test_acl_user_in_the_url(server: Server, how: str) -> None:
    """user:password@, with each character in the password that has a meaning in a url."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", f">{PASSWORD}", "~*", "+@all")
        cli.execute_command("ACL", "SETUSER", "default", "off")
    coded = quote(PASSWORD, safe="")
    if how == "authority":
        await serves(f"unix://worker:{coded}@{server.path}")
    else:
        await serves(f"unix://{server.path}?username=worker&password={coded}")


async def test_password_without_user(server: Server) -> None:
    """requirepass, as before there were users."""
    with server.cli() as cli:
        cli.config_set("requirepass", "swordfish")
    await serves(f"unix://:swordfish@{server.path}")


# -- the user's own clients ------------------------------------------------------------------------------------------


def plain(path: str) -> Redis:
    return Redis(unix_socket_path=path)


def decoding(path: str) -> Redis:
    return Redis(unix_socket_path=path, decode_responses=True)


def resp3(path: str) -> Redis:
    return Redis(unix_socket_path=path, protocol=3)


def retrying(path: str) -> Redis:
    retry = Retry(ExponentialBackoff(), 5)
    return Redis(unix_socket_path=path, retry=retry, retry_on_error=[RedisConnectionError])


def by_url(path: str) -> Redis:
    return Redis.from_url(f"unix://{path}", health_check_interval=1, encoding="latin-1")


def pooled(path: str) -> Redis:
    return Redis.from_pool(BlockingConnectionPool.from_url(f"unix://{path}", max_connections=1, timeout=1))


def single(path: str) -> Redis:
    return Redis(unix_socket_path=path, single_connection_client=True, client_name="app")


def timing(path: str) -> Redis:
    return Redis(unix_socket_path=path, socket_timeout=5.0, socket_connect_timeout=5.0, client_name="app")


every_client = pytest.mark.parametrize("client", [plain, decoding, resp3, retrying, by_url, pooled, single, timing])


@every_client
async def test_a_client_handed_in(server: Server, client: Callable[[str], Redis]) -> None:
    """Whatever options the client has for its own commands, locks work, and it works on beside them and after."""
    async with client(str(server.path)) as theirs:
        await theirs.set("theirs", "x")
        await serves(theirs, "заказ:42")
        assert await theirs.get("theirs") in ("x", b"x")


async def test_a_pool_that_is_used_up(server: Server) -> None:
    """The library's connection does not come from the client's pool: a pool without free connections does not stop a
    lock."""
    async with pooled(str(server.path)) as theirs:
        pool: Any = theirs.connection_pool
        busy = await pool.get_connection()
        try:
            await serves(theirs)
        finally:
            await pool.release(busy)


async def test_closing_leaves_their_client_open(server: Server) -> None:
    """The owner of a handed-in client closes it."""
    async with Redis(unix_socket_path=str(server.path)) as theirs:
        async with Redlock(theirs) as redlock, redlock("order:42"):
            pass
        assert await theirs.ping()


async def test_clients_and_urls_mix(five: list[Server]) -> None:
    """A quorum of both."""
    async with Redis(unix_socket_path=str(five[0].path)) as first:
        nodes: list[str | Redis] = [first, five[1].url, five[2].url]
        async with Redlock(*nodes, **PATIENT) as redlock, redlock("order:42") as lease:
            assert lease.held
            assert all(held_in(server, "order:42") for server in five[:3])


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls(server: Server, tmp_path: Path) -> Tls:
    return Tls(server, tmp_path)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_tls(tls: Tls, scheme: str) -> None:
    """rediss:// with the CA that signed the server's certificate."""
    async with tls.serving():
        await serves(f"{scheme}://localhost:{tls.port}/0?ssl_ca_certs={tls.ca_file}")


async def test_tls_of_a_client_handed_in(tls: Tls) -> None:
    """The TLS settings of the client are used."""
    async with tls.serving(), Redis(host="localhost", port=tls.port, ssl=True, ssl_ca_certs=str(tls.ca_file)) as theirs:
        assert theirs.connection_pool.connection_class is SSLConnection
        await serves(theirs)


async def test_tls_with_a_client_certificate(tls: Tls, tmp_path: Path) -> None:
    """Mutual TLS, by url."""
    own = tls.ca.issue_cert("worker")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    own.private_key_pem.write_to_path(str(key))
    chain.write_bytes(b"".join(part.bytes() for part in own.cert_chain_pems))
    async with tls.serving(client_certificates=True):
        await serves(f"rediss://localhost:{tls.port}?ssl_ca_certs={tls.ca_file}&ssl_certfile={chain}&ssl_keyfile={key}")


async def test_c13_tls_with_another_ca(tls: Tls) -> None:
    """A certificate that does not verify is a ConfigError that says so, at once and at entering."""
    async with tls.serving():
        url = f"rediss://localhost:{tls.port}?ssl_ca_certs={tls.other_ca_file}"
        redlock = Redlock(url)
        with pytest.raises(ConfigError, match=rf"localhost:{tls.port}.*certificate"):
            await redlock("order:42").acquire()
        await redlock.aclose()
        with pytest.raises(ConfigError, match="certificate"):
            async with Redlock(url):
                pytest.fail("entered")


async def test_c13_tls_for_another_host(tls: Tls) -> None:
    """A certificate for another host is refused."""
    async with tls.serving("example.org"):
        with pytest.raises(ConfigError, match="certificate"):
            async with Redlock(f"rediss://localhost:{tls.port}?ssl_ca_certs={tls.ca_file}"):
                pytest.fail("entered")


async def test_c13_tls_to_a_server_without(tcp: tuple[Server, int], tls: Tls) -> None:
    """rediss:// to a port that speaks plain text: an error in bounded time, and it names the node."""
    with pytest.raises(Exception, match=rf"127\.0\.0\.1:{tcp[1]}") as caught:
        async with Redlock(f"rediss://127.0.0.1:{tcp[1]}?ssl_ca_certs={tls.ca_file}", patience=1.0):
            pytest.fail("entered")
    assert isinstance(caught.value, ConfigError) or "1 of 1" in str(caught.value)


async def test_c13_a_ca_file_that_is_not_there(tls: Tls) -> None:
    """A mistyped path is the user's mistake: ConfigError, not an outage."""
    async with tls.serving():
        with pytest.raises(ConfigError, match=r"ssl_ca_certs|nowhere\.pem"):
            async with Redlock(f"rediss://localhost:{tls.port}?ssl_ca_certs=/nowhere.pem", patience=1.0):
                pytest.fail("entered")


# -- what is no Redis ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stranger(answer: bytes) -> AsyncIterator[str]:
    """A server of another sort: it sends `answer` after whatever it receives, and nothing else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65536):
                writer.write(answer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("setting", ["", "?client_name=x&password=p"], ids=["silent login", "login"])
async def test_a_server_that_speaks_http(setting: str) -> None:
    """It will never speak Redis' protocol: ConfigError."""
    async with stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        async with aclosing(Redlock(url + setting)) as redlock, asyncio.timeout(LIMIT):
            with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*host and port"):
                await redlock("order:42").acquire()


async def test_a_server_that_never_answers() -> None:
    """QuorumUnavailable in bounded time, whatever it was asked. Four clients ask at once, since each waits for all of
    connect_timeout."""
    uses: list[Callable[[Redlock], Any]] = [
        lambda redlock: redlock("order:42").acquire(),
        lambda redlock: redlock("order:42").acquire(timeout=0),
        lambda redlock: redlock.__aenter__(),
        lambda redlock: redlock("order:42").locked(),
    ]

    async def silence(url: str, use: Callable[[Redlock], Any]) -> None:
        async with aclosing(Redlock(url, patience=0.3)) as redlock:
            with pytest.raises(QuorumUnavailable):
                await use(redlock)

    async with stranger(b"") as url, asyncio.timeout(LIMIT):
        await asyncio.gather(*(silence(url, use) for use in uses))
