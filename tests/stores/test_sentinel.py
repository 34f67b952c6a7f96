"""Locks on the master that Redis Sentinels name: urls, clients of redis-py, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis.asyncio.sentinel import Sentinel

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores.redis.sentinel.masters import Master, newest
from asynclock.stores.redis.store import RedisStore
from asynclock.stores.urls import urls_of
from tests.support.default_keys import key_of
from tests.support.ports import free_port
from tests.support.probes import connection_of, nodes_of, socket_of, stores_of
from tests.support.proxy import TcpProxy
from tests.support.services.sentinels import NAME, Deployment, Part
from tests.support.waiters import LIMIT, PATIENT, until, works


@pytest.fixture(scope="module")
def guarded() -> Iterator[Deployment]:
    """A deployment with passwords: one for the servers, one for the sentinels."""
    deployment = Deployment(replicas=0, password="p,w/1", sentinel_password="s3cret")
    yield deployment
    deployment.stop()


@pytest.fixture
def own() -> Iterator[Deployment]:
    """A small deployment that the test may harm."""
    deployment = Deployment(replicas=0)
    yield deployment
    deployment.stop()


def addresses(deployment: Deployment) -> list[tuple[str, int]]:
    return [(each.host, each.port) for each in deployment.sentinels]


def hasty(node: Any) -> Redlock:
    """It waits for no end of an outage. A connect has its time: the error is what failed, and not that it was late."""
    return Redlock(node, patience=0.1, connect_timeout=LIMIT)


def port_of(client: Redlock) -> int:
    """The port of the server to which the client is connected."""
    return int(socket_of(connection_of(nodes_of(client)[0])).getpeername()[1])


# -- urls --------------------------------------------------------------------------------------------------------------


async def test_a_url_of_sentinels(sentinel_deployment: Deployment, name: str) -> None:
    """The locks are at the master, under the same keys as always."""
    async with Redlock(sentinel_deployment.url) as client, client(name) as lease:
        assert lease.held
        assert port_of(client) == sentinel_deployment.master.port
        with sentinel_deployment.master.cli() as cli:
            assert cli.exists(key_of(name))


async def test_a_database(sentinel_deployment: Deployment, name: str) -> None:
    """The number after the name."""
    async with Redlock(f"{sentinel_deployment.url}/3") as client, client(name):
        assert stores_of(client)[0].label.endswith(f"/{NAME}/3")
        with sentinel_deployment.master.cli() as cli:
            assert not cli.exists(key_of(name))
            cli.select(3)
            assert cli.exists(key_of(name))


async def test_passwords_of_servers_and_of_sentinels(guarded: Deployment, name: str) -> None:
    """They differ; each reaches only its own, and no name or message shows it."""
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in guarded.sentinels)
    url = f"redis+sentinel://:p%2Cw%2F1@{hosts}/{NAME}?sentinel_password=s3cret"
    async with Redlock(url) as client:
        await works(client, name)
        shown = f"{client!r} {stores_of(client)} {nodes_of(client)} {await client.health()}"
    assert "s3cret" not in shown
    assert "p,w" not in shown


WRONG = {
    "of the sentinels": (":p%2Cw%2F1@", "other", "sentinel"),
    "of the servers": (":other@", "s3cret", "master"),
    "none of the servers": ("", "s3cret", "master"),
    "none of the sentinels": (":p%2Cw%2F1@", "", "sentinel"),
}


@pytest.mark.parametrize(("login", "secret", "whose"), WRONG.values(), ids=WRONG)
async def test_c13_a_wrong_password(guarded: Deployment, name: str, login: str, secret: str, whose: str) -> None:
    """A ConfigError at once that says whose, and shows none."""
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in guarded.sentinels)
    query = f"?sentinel_password={secret}" if secret else ""
    advice = r"sentinel_password= in the url" if whose == "sentinel" else "user and password in the url"
    async with aclosing(Redlock(f"redis+sentinel://{login}{hosts}/{NAME}{query}", **PATIENT)) as client:
        with pytest.raises(ConfigError, match=advice) as caught:
            await client(name).acquire(timeout=LIMIT)
        assert (f"127.0.0.1:{guarded.sentinels[0].port} refuses" in str(caught.value)) == (whose == "sentinel")
        assert str(caught.value).count("in the url") == 1, "once, not for each sentinel"
        assert not [each for each in ("other", "s3cret", "p,w") if each in str(caught.value)]


async def test_ipv6(name: str) -> None:
    """Hosts in brackets, as in other urls; the sentinels name the servers by their IPv6 addresses."""
    deployment = Deployment(replicas=0, host="::1")
    try:
        assert "[::1]:" in deployment.url
        async with Redlock(deployment.url) as client:
            await works(client, name)
    finally:
        deployment.stop()


async def test_tls(tmp_path: Path, name: str) -> None:
    """To the sentinels and to the servers, with one CA; a certificate that does not verify is a ConfigError."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    deployment = Deployment(replicas=0, tls=tmp_path)
    try:
        async with Redlock(f"{deployment.url}?ssl_ca_certs={tmp_path / 'ca.pem'}", **PATIENT) as client:
            await works(client, name)
        async with aclosing(Redlock(deployment.url, **PATIENT)) as client:
            with pytest.raises(ConfigError, match="certificate does not verify"):
                await client(name).acquire(timeout=0)
    finally:
        deployment.stop()


def test_the_default_port() -> None:
    """That of sentinels, not that of servers."""
    store = RedisStore("redis+sentinel://a,b:1,[::1],[fe80::2]:7/mymaster/2")
    assert store.label == "sentinel://a:26379,b:1,[::1]:26379,[fe80::2]:7/mymaster/2"


def test_a_comma_separates_only_where_a_scheme_follows() -> None:
    """The hosts of one url keep theirs, in lists of urls, too."""
    text = "redis+sentinel://h1:1,h2:2/mymaster/0,redis://x, rediss+sentinel://:p,w@h3,h4/other"
    assert urls_of(text) == (
        "redis+sentinel://h1:1,h2:2/mymaster/0",
        "redis://x",
        "rediss+sentinel://:p,w@h3,h4/other",
    )


async def test_a_list_in_the_environment(
    sentinel_deployment: Deployment, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ready-made client reads it."""
    monkeypatch.setenv("ASYNCLOCK_URLS", sentinel_deployment.url)
    async with Redlock() as client:
        await works(client, name)


MALFORMED = [
    *("redis+sentinel://kilowatt:1", "redis+sentinel:///kilowatt", "redis+sentinel://a:1/kilo/watt"),
    *("redis+sentinel://:kilo/watt@a:1/m", "redis+sentinel://me:12/kilo@watt:1", "redis+sentinel://a:kilo/m"),
    *("redis+sentinel://a:1/m/0/kilo", "redis+sentinel://a:1/m#kilo", "redis+sentinel://a:1/m?kilo"),
    *("redis+sentinel://a:70000/m", "redis+sentinel://a:1,b:0/m"),
    *("redis+sentinel://:kilo#watt@a:1/m", "redis+sentinel://a:1/m?kilo=1", "redis+sentinel://:kilo?watt@a:1/m"),
]


@pytest.mark.parametrize("url", MALFORMED)
def test_a_wrong_url(url: str) -> None:
    """A ConfigError at once, with the form of such a url; it shows no part that may be a secret."""
    with pytest.raises(ConfigError) as caught:
        RedisStore(url)
    said = f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert "watt" not in said
    assert "kilo" not in said or "does not know a setting" in said


# -- clients of redis-py -----------------------------------------------------------------------------------------------


async def test_a_sentinel_managed_client(sentinel_deployment: Deployment, name: str) -> None:
    """Its sentinels are asked, and its settings are used, whatever it decodes."""
    sentinel = Sentinel(addresses(sentinel_deployment), socket_timeout=1.0)
    async with aclosing(sentinel.master_for(NAME, db=2, decode_responses=True)) as theirs:
        async with Redlock(theirs) as client, client(name):
            assert port_of(client) == sentinel_deployment.master.port
            assert await theirs.exists(key_of(name))
    for each in sentinel.sentinels:
        await each.aclose()


async def test_its_passwords(guarded: Deployment, name: str) -> None:
    """Those of the servers and those of the sentinels."""
    sentinel = Sentinel(addresses(guarded), sentinel_kwargs={"password": "s3cret"}, password="p,w/1")
    async with aclosing(sentinel.master_for(NAME)) as theirs, Redlock(theirs) as client:
        await works(client, name)


async def test_a_client_of_the_replicas_is_refused() -> None:
    """No replica keeps locks."""
    async with aclosing(Sentinel([("127.0.0.1", 1)]).slave_for(NAME)) as theirs:
        with pytest.raises(ConfigError, match="master_for"):
            Redlock(theirs)


async def test_sentinels_that_see_too_few_others(sentinel_deployment: Deployment, name: str) -> None:
    """`min_other_sentinels` of the client counts."""
    sentinel = Sentinel(addresses(sentinel_deployment), min_other_sentinels=3)
    async with aclosing(sentinel.master_for(NAME)) as theirs, aclosing(hasty(theirs)) as client:
        with pytest.raises(QuorumUnavailable, match="sees 2 other sentinels"):
            await client(name).acquire(timeout=0)


async def test_its_forced_host(sentinel_deployment: Deployment, name: str) -> None:
    """`force_master_ip` takes the place of the host that the sentinels name."""
    sentinel = Sentinel(addresses(sentinel_deployment), force_master_ip="127.0.0.2")  # no server listens there
    async with aclosing(sentinel.master_for(NAME)) as theirs, aclosing(hasty(theirs)) as client:
        with pytest.raises(QuorumUnavailable, match="refused the connection"):
            await client(name).acquire(timeout=0)


# -- sentinels that fail -----------------------------------------------------------------------------------------------


async def test_a_name_that_no_sentinel_knows(sentinel_deployment: Deployment, name: str) -> None:
    """Only the user can solve that."""
    url = sentinel_deployment.url.replace(NAME, "other")
    async with aclosing(Redlock(url, **PATIENT)) as client:
        with pytest.raises(ConfigError, match="knows no master other"):
            await client(name).acquire(timeout=LIMIT)


async def test_a_server_in_the_place_of_a_sentinel(sentinel_deployment: Deployment, name: str) -> None:
    """Only the user can solve that, too."""
    server = sentinel_deployment.servers[0]
    async with aclosing(Redlock(f"redis+sentinel://{server.host}:{server.port}/{NAME}", **PATIENT)) as client:
        with pytest.raises(ConfigError, match=r"is no sentinel .* write redis://"):
            await client(name).acquire(timeout=LIMIT)


async def test_c20_no_sentinel_answers(name: str) -> None:
    """An outage, with the reason of each sentinel."""
    ports = free_port(), free_port()
    url = f"redis+sentinel://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/{NAME}"
    async with aclosing(hasty(url)) as client:
        with pytest.raises(QuorumUnavailable) as caught:
            await client(name).acquire(timeout=0)
    for port in ports:
        assert f"127.0.0.1:{port} refused the connection" in str(caught.value)


@pytest.mark.parametrize("harm", [Part.kill, Part.freeze])
async def test_c21_most_sentinels_are_silent(own: Deployment, name: str, harm: Callable[[Part], None]) -> None:
    """One answer is enough to connect, after connect_timeout at most."""
    for each in own.sentinels[:2]:
        harm(each)
    async with asyncio.timeout(LIMIT), Redlock(own.url, connect_timeout=2.0) as client:
        await works(client, name)


async def test_c21_one_frozen_sentinel_delays_nobody(own: Deployment, name: str) -> None:
    """The others are a majority: it is waited for a moment only, and not for the time that one sentinel has."""
    own.sentinels[0].freeze()
    sentinels = RedisStore(own.url).sentinels
    assert sentinels is not None
    async with asyncio.timeout(LIMIT):
        for _ in range(5):  # without the others each would take 5 s, the limit of a socket
            await sentinels.find(2 * LIMIT)
    async with Redlock(own.url) as client:
        await works(client, name)


async def test_a_connected_client_needs_no_sentinel(own: Deployment, name: str) -> None:
    """Until it has to connect again."""
    async with Redlock(own.url) as client:
        await works(client, name)
        for each in own.sentinels:
            each.kill()
        await works(client, name)
        own.servers[0].restart()
        await until(lambda: nodes_of(client)[0].error is not None)
        for each in own.sentinels:
            each.restart()
        await until(lambda: nodes_of(client)[0].error is None)
        await works(client, name)


async def test_closing_while_it_begins_to_listen(sentinel_deployment: Deployment) -> None:
    """The client closes after any number of turns of the loop. On Python 3.11 redis-py may lose the cancel of a task
    that connects to a sentinel, so such a task looks for it before it waits for messages."""
    for turns in range(0, 60, 2):
        async with aclosing(Redlock(sentinel_deployment.url)) as client, asyncio.timeout(LIMIT):
            opening = asyncio.create_task(client.health())
            for _ in range(turns):
                await asyncio.sleep(0)
            await client.aclose()
            await opening


async def test_a_sentinel_that_is_far_is_listened_to(own: Deployment, name: str) -> None:
    """Each connection to it takes longer than a second, and the client gives it the time of any connect."""
    for each in own.sentinels:
        with each.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "locks", "on", ">secret", "~*", "&*", "+@all")
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(TcpProxy(each.port)) for each in own.sentinels]
        for proxy in proxies:
            proxy.delay = 1.2
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        url = f"redis+sentinel://{hosts}/{NAME}?sentinel_username=locks&sentinel_password=secret"
        client = await stack.enter_async_context(Redlock(url, connect_timeout=LIMIT, patience=LIMIT))
        await works(client, name)
        await until(lambda: all(listeners(each) == 1 for each in own.sentinels))


async def test_a_sentinel_user_with_few_rights(own: Deployment, name: str) -> None:
    """Those that docs/stores/sentinel.md names are enough; without the epochs, too."""
    rule = "on >secret resetchannels &+switch-master -@all +auth +ping +subscribe +sentinel|get-master-addr-by-name"
    for more in ("+sentinel|master", "-sentinel|master"):
        for each in own.sentinels:
            with each.cli() as cli:
                cli.execute_command("ACL", "SETUSER", "locks", *rule.split(), more)
        url = f"{own.url}?sentinel_username=locks&sentinel_password=secret"
        async with Redlock(url) as client:
            await works(client, name)
            await until(lambda: listeners(own.sentinels[0]) == 1)


def listeners(sentinel: Part) -> int:
    """The number of clients that listen to a sentinel for switches."""
    with sentinel.cli() as cli:
        found: Any = cli.execute_command("CLIENT", "LIST")
    return sum(" user=locks " in line and " sub=1 " in line for line in found.decode().splitlines())


A, B = ("a", 1), ("b", 2)
ANSWERS = {
    "the greatest epoch": ([Master(A, 3), Master(A, 3), Master(B, 4)], B),
    "not the most": ([Master(B, 4), Master(A, 3), Master(A, 3)], B),
    "of equal epochs the most": ([Master(A, 3), Master(B, 3), Master(B, 3)], B),
    "no epochs": ([Master(A), Master(B), Master(B)], B),
    "one": ([Master(A, 0)], A),
}


@pytest.mark.parametrize(("answers", "address"), ANSWERS.values(), ids=ANSWERS)
def test_answers_that_differ(answers: list[Master], address: tuple[str, int]) -> None:
    """A sentinel that was cut off during a failover has an older epoch."""
    assert newest(answers).address == address


def test_the_age_of_a_master() -> None:
    """A sentinel that has just started knows it for a short time only; one that names another server says nothing."""
    assert newest([Master(A, 3, 5.0), Master(A, 3, 70.0), Master(B, 2, 900.0)]).age == 70.0
