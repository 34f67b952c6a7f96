"""A host with two addresses, of which the first one does not answer: IPv6 that leads nowhere, or a pod that is gone."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, aclosing, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from redis.asyncio import Connection, Redis, SSLConnection
from redis.asyncio.sentinel import Sentinel

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores.dialing import DialingLoop, connected, delay_of
from asynclock.stores.lookups import addresses_of
from tests.support.host_names import GOOD, SILENT, HostNames, silent_at
from tests.support.ports import free_port
from tests.support.probes import connection_of, nodes_of, socket_of
from tests.support.proxy import cancelled_at
from tests.support.servers import Server, Servers
from tests.support.services.cluster import Cluster
from tests.support.services.mariadb import own_mariadb
from tests.support.services.postgresql import own, own_postgresql
from tests.support.services.sentinels import NAME, Deployment
from tests.support.services.zookeeper import ZooKeeper
from tests.support.tls import Tls
from tests.support.waiters import LIMIT

both_loops = pytest.mark.both_loops("the loop has the transports")


@pytest.fixture
def first_silent(host_names: HostNames) -> Iterator[ExitStack]:
    """The host `two.test`."""
    host_names.give("two.test", SILENT, GOOD)
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def port(servers: Servers, first_silent: ExitStack) -> int:
    """Of a Redis server at the second address."""
    found = free_port()
    servers.start("--port", str(found), "--bind", GOOD)
    first_silent.enter_context(silent_at(found))
    return found


async def serves(node: Any, name: str = "order:42", **options: Any) -> None:
    """A lock works there."""
    async with asyncio.timeout(LIMIT), Redlock(node, patience=LIMIT, **options) as client, client(name) as lease:
        assert lease.held


# -- each store --------------------------------------------------------------------------------------------------------


@both_loops
async def test_f14_redis(port: int) -> None:
    """By url. The whole connect takes less than its limit, which one address would use up."""
    await serves(f"redis://two.test:{port}")


async def test_f14_redis_with_a_short_limit(port: int) -> None:
    """The second address is tried before the time is over, also where that is shorter than the usual delay."""
    async with Redlock(f"redis://two.test:{port}", connect_timeout=0.2, patience=LIMIT) as client, client("x") as lease:
        assert lease.held


async def test_f14_sentinels(sentinel_deployment: Deployment, first_silent: ExitStack) -> None:
    """By url, and as clients of redis-py."""
    ports = [each.port for each in sentinel_deployment.sentinels]
    for each in ports:
        first_silent.enter_context(silent_at(each))
    await serves(f"redis+sentinel://{','.join(f'two.test:{each}' for each in ports)}/{NAME}")
    async with Sentinel([("two.test", each) for each in ports]).master_for(NAME) as master:
        await serves(master)


async def test_f14_cluster(shared_cluster: Cluster, first_silent: ExitStack) -> None:
    """The node that is named."""
    seed = shared_cluster.members[0].port
    first_silent.enter_context(silent_at(seed))
    await serves(f"redis+cluster://two.test:{seed}")


@both_loops
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
async def test_f14_databases(request: pytest.FixtureRequest, first_silent: ExitStack, name: str, database: str) -> None:
    """With the drivers that a url has without its own."""
    url = str(request.getfixturevalue(f"{database}_url"))
    where = urlsplit(url)
    first_silent.enter_context(silent_at(where.port or 0))
    await serves(url.replace(f"@{where.hostname}:", "@two.test:"), name)


async def test_f14_zookeeper(
    shared_zookeeper: ZooKeeper, first_silent: ExitStack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo tries the addresses one after the other, and each of them for a third of a session timeout."""
    monkeypatch.setattr("random.shuffle", lambda found: None)
    first_silent.enter_context(silent_at(shared_zookeeper.port))
    await serves(f"zookeeper://two.test:{shared_zookeeper.port}/locks?session_timeout=60", name, lease=60)


# -- connection classes of users ---------------------------------------------------------------------------------------


class Own(Connection):
    """Does more than redis-py's, which connects."""

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]


class Tunnel(Connection):
    """Connects in its own way, to a host that only the tunnel knows."""

    entry = 0

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(GOOD, self.entry)


class Bound(Connection):
    """With an argument that a socket depends on: asyncio has to make it."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "local_addr": (SILENT, 0)}


@both_loops
async def test_f14_a_connection_class_of_the_user(port: int, host_names: HostNames, monkeypatch: Any) -> None:
    """It is used as it is. If its parent connects, both addresses are tried."""
    async with Redis(host="two.test", port=port) as theirs:
        theirs.connection_pool.connection_class = Own
        await serves(theirs)
    monkeypatch.setattr(Tunnel, "entry", port)
    async with Redis(host="behind.test", port=port) as theirs:
        theirs.connection_pool.connection_class = Tunnel
        await serves(theirs)
    assert not host_names.asked["behind.test"]
    async with Redis(host=GOOD, port=port) as theirs:
        theirs.connection_pool.connection_class = Bound
        async with Redlock(theirs) as client:
            assert socket_of(connection_of(nodes_of(client)[0])).getsockname()[0] == SILENT


class OwnTls(SSLConnection):
    """Does more than redis-py's, which connects."""

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]


class Named(SSLConnection):
    """The certificate is for another name than that of the host."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": "cert.test"}


@pytest.fixture
def tls(server: Server, tmp_path: Path) -> Tls:
    return Tls(server, tmp_path)


async def serves_by(connection_class: type[SSLConnection], tls: Tls) -> None:
    """A client of the user, with a connection class of its own, over TLS."""
    async with Redis(host="two.test", port=tls.port, ssl=True, ssl_ca_certs=str(tls.ca_file)) as theirs:
        theirs.connection_pool.connection_class = connection_class
        await serves(theirs)


@both_loops
@pytest.mark.parametrize("order", [(GOOD, SILENT), (SILENT, GOOD)], ids=["first", "second"])
async def test_f14_tls_over_both_addresses(tls: Tls, host_names: HostNames, order: tuple[str, str]) -> None:
    """The certificate has the name of the host, and no address: the name of the url is what is verified."""
    host_names.give("two.test", *order)
    async with tls.serving("two.test"):
        with silent_at(tls.port):
            await serves(f"rediss://two.test:{tls.port}?ssl_ca_certs={tls.ca_file}")
            await serves_by(OwnTls, tls)


@both_loops
async def test_f14_tls_for_another_name(tls: Tls, host_names: HostNames) -> None:
    """It is refused over the second address, too, unless the user's own class names it."""
    host_names.give("two.test", SILENT, GOOD)
    async with tls.serving("cert.test"):
        with silent_at(tls.port):
            with pytest.raises(ConfigError, match=r"certificate does not verify .*'two\.test'"):
                await serves(f"rediss://two.test:{tls.port}?ssl_ca_certs={tls.ca_file}")
            await serves_by(Named, tls)


@both_loops
async def test_f14_a_driver_with_tls(tls: Tls, host_names: HostNames) -> None:
    """The loop that a driver of a database gets verifies the name of the host as well."""
    host_names.give("two.test", SILENT, GOOD)
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    loop = DialingLoop(asyncio.get_running_loop(), 1.0)
    for name, verifies in (("two.test", True), ("cert.test", False)):
        async with tls.serving(name):
            with silent_at(tls.port):
                connecting = loop.create_connection(asyncio.Protocol, "two.test", tls.port, ssl=context)
                if verifies:
                    transport, _ = await connecting
                    transport.abort()
                else:
                    with pytest.raises(ssl.SSLCertVerificationError):
                        await connecting


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
async def test_f14_databases_with_tls(first_silent: ExitStack, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """Their drivers verify the name of the url, too, over the second address."""
    ca, folder = trustme.CA(), Path(first_silent.enter_context(TemporaryDirectory()))
    folder.chmod(0o755)
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    ca.issue_cert("two.test").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    both = folder / "server.pem"
    both.chmod(0o600)
    own(both, "postgres" if database == "postgresql" else "mysql")
    server: Any
    if database == "postgresql":
        monkeypatch.setenv("PGSSLROOTCERT", str(folder / "ca.pem"))
        server = first_silent.enter_context(own_postgresql(ssl="on", ssl_cert_file=str(both), ssl_key_file=str(both)))
        option = "ssl=verify-full"
    else:
        server = first_silent.enter_context(own_mariadb(f"--ssl-cert={both}", f"--ssl-key={both}"))
        option = f"ssl_ca={folder / 'ca.pem'}"
    first_silent.enter_context(silent_at(server.port))
    await serves(f"{server.url.replace('127.0.0.1', 'two.test')}?{option}")
    async with aclosing(
        Redlock(f"{server.url.replace('127.0.0.1', 'localhost')}?{option}", patience=0.2, connect_timeout=LIMIT / 2)
    ) as client:
        with pytest.raises((ConfigError, QuorumUnavailable), match=r"certificate|CERTIFICATE"):
            await client("order:42").acquire(timeout=None)


# -- connecting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "limit", "delay"),
    [(1, 1.0, 0.25), (2, 1.0, 0.25), (3, 1.0, 0.25), (6, 1.0, 0.1), (2, 0.3, 0.15), (2, 60.0, 0.25), (99, 0.1, 0.01)],
)
def test_the_last_address_is_tried_in_time(addresses: int, limit: float, delay: float) -> None:
    """The delay is the one of RFC 8305, unless there are many addresses or little time."""
    assert delay_of(addresses, limit) == pytest.approx(delay)


@both_loops
@pytest.mark.parametrize("late", [False, True])
async def test_f14_a_cancel_at_each_await(port: int, late: bool) -> None:
    """It is not lost, also when it comes while the other attempt ends. No socket is left open."""
    index = 0

    async def connects() -> None:
        addresses = await addresses_of("two.test", port)
        with closing(await connected(addresses, 0.02)):
            assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]

    while await cancelled_at(connects, index, late=late):
        index += 1
    assert index > 2
    gc.collect()  # pytest reports a socket that nobody closed
