"""Urls: a comma in a password is no separator, and no message shows a secret, wherever in the url it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any, cast
from urllib import parse

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores import store_for
from asynclock.stores import stores_of as stores_of_environment
from asynclock.stores.embedded.store import EmbeddedStore
from asynclock.stores.redis.cluster.store import ClusterStore
from asynclock.stores.redis.cluster.topology import Address
from asynclock.stores.redis.store import RedisStore
from asynclock.stores.sql import SQLStore
from asynclock.stores.urls import urls_of
from asynclock.stores.zookeeper import ZooKeeperStore
from tests.support.probes import nodes_of, stores_of
from tests.support.servers import Server, Servers
from tests.support.waiters import PATIENT, works

LISTS = {
    "two": ("redis://a:1,redis://b:2", ("redis://a:1", "redis://b:2")),
    "spaces": (" redis://a , rediss://b ,", ("redis://a", "rediss://b")),
    "schemes without slashes": ("embedded:,embedded:x,memory:", ("embedded:", "embedded:x", "memory:")),
    "an upper-case scheme": ("redis://a,VALKEYS://b", ("redis://a", "VALKEYS://b")),
    "an unknown scheme": ("redis://a,http://b", ("redis://a", "http://b")),  # the message says so
    "a comma in a password": ("redis://me:p,w@a,redis://b", ("redis://me:p,w@a", "redis://b")),
    "a comma in a query": ("redis://a?password=p,w,redis://b", ("redis://a?password=p,w", "redis://b")),
    "a comma in a path": ("unix:///a,b.sock", ("unix:///a,b.sock",)),
    "no scheme follows": ("redis://a,b:6379", ("redis://a,b:6379",)),
    "nothing": (" , ", ()),
}


@pytest.mark.parametrize(("text", "urls"), LISTS.values(), ids=LISTS.keys())
def test_a_comma_separates_only_where_a_scheme_follows(text: str, urls: tuple[str, ...]) -> None:
    """All other commas belong to their url."""
    assert urls_of(text) == urls


PASSWORD = "s3cret,x"


@pytest.fixture
def guarded(servers: Servers) -> list[Server]:
    """Three servers with a password that has a comma."""
    three = [servers.start() for _ in range(3)]
    for each in three:
        with each.cli() as cli:
            cli.config_set("requirepass", PASSWORD)
    return three


WRITTEN: dict[str, Callable[[Server], str]] = {
    "plain": lambda server: f"unix://:s3cret,x@{server.path}",
    "encoded": lambda server: f"unix://:s3cret%2Cx@{server.path}",
    "query": lambda server: f"unix://{server.path}?password=s3cret,x",
    "encoded query": lambda server: f"unix://{server.path}?password=s3cret%2Cx",
}


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize("where", ["arguments", "environment"])
async def test_a_comma_in_a_password_reaches_the_server(
    guarded: list[Server],
    write: Callable[[Server], str],
    nodes: int,
    where: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is or as %2C, in the arguments and in the environment, alone and among other urls."""
    urls = [write(each) for each in guarded[:nodes]]
    monkeypatch.setenv("ASYNCLOCK_URLS", ",".join(urls))
    async with aclosing(Redlock(*urls) if where == "arguments" else Redlock()) as redlock:
        await works(redlock, name)


@pytest.mark.parametrize(
    "url", ["redis://a,redis://b", "redis://a:6379,b:6379", "redis://a,b", "redis://:p,redis://x@a"]
)
def test_an_ambiguous_comma_is_explained(url: str) -> None:
    """Whether it was meant as two nodes or as one."""
    with pytest.raises(ConfigError, match=r"%2C"):
        Redlock(url)


SECRETS = [
    *("redis://me:kilo/watt@a", "redis://:kilo#watt@a", "redis://:12#watt@a", "redis://me:kilo?watt@a"),
    *("redis://me:12?watt@a", "redis://me:12?kilo=watt@a", "redis://me:12/watt@a", "redis://:kilo,redis://watt@a"),
    *("redis:/me:kilowatt@a", "me:kilowatt@a:6379", "x://:kilowatt@a", "kilowatt@a://b"),
    *("redis://a:port?password=kilowatt", "redis://a?pasword=kilowatt", "redis://a,b?password=kilowatt"),
    *("redis://a?password=kilowatt,redis://b", "redis:a?password=kilowatt", "a:1?password=kilowatt"),
    *(
        "http://a?password=kilowatt",
        "a?password=kilowatt://b",
        "unix://?password=kilowatt",
        "//a?password=kilo@watt",
    ),
    *("redis://a/x?password=kilowatt", "redis://a?db=x&password=kilowatt", "redis:/a?password=kilo@watt"),
    *("embedded:a?password=kilowatt", "embedded:me:kilowatt@a", "redis://a?password=kilo@watt&kilowatt"),
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("where", ["arguments", "environment"])
async def test_a_wrong_url_does_not_show_its_secret(url: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in userinfo nor in the query, nor a part where an odd character cut it in two, nor in the causes of the
    error."""
    if where == "environment" and len(urls_of(url)) > 1:
        return  # there it is a list
    monkeypatch.setenv("ASYNCLOCK_URLS", url)
    with pytest.raises(ConfigError) as caught:
        if where == "arguments":
            Redlock(url)
        else:
            await Redlock()("order:42").acquire()
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__} {caught.value.__context__}"
    assert not [part for part in ("kilo", "watt", "12") if part in shown]


@pytest.mark.parametrize("url", ["redis://localhost:1?password=kilowatt", "redis://me:kilowatt@localhost:1"])
async def test_an_outage_does_not_show_the_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not in errors, reprs, health or the log."""
    async with aclosing(Redlock(url, patience=0.1)) as redlock:
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock("order:42").acquire(timeout=0)
        known = [caught.value, *caught.value.errors.items(), redlock, stores_of(redlock), await redlock.health()]
        nodes = nodes_of(redlock)
    assert "kilowatt" not in " ".join(f"{each!s} {each!r}" for each in (*known, *nodes, caplog.text))


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("redis://me:kilowatt@[::1]:27025", "[::1]:27025"),
        ("rediss://[fe80::1]:1/2", "[fe80::1]:1/2"),
        ("redis://localhost:1/0", "localhost:1"),
        ("redis://localhost:1/2", "localhost:1/2"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("unix://:kilowatt@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_a_label_is_the_address_and_the_database(url: str, label: str) -> None:
    """As a url has them. Two databases of one server have two labels."""
    assert RedisStore(url).label == label


async def test_two_databases_of_one_server_are_one_node(server: Server) -> None:
    """The error tells them apart."""
    async with aclosing(Redlock(server.url, f"{server.url}?db=2", "unix:///none.sock")) as redlock:
        with pytest.raises(ConfigError, match=r"are the same server: .*its databases fail together") as caught:
            await redlock("order:42").acquire()
    assert f"{server.url} " in str(caught.value)
    assert f"{server.url}?db=2 " in str(caught.value)


@pytest.mark.parametrize("url", ["unix://{}?db=7", "unix://worker:secret@{}?db=7"])
async def test_c13_a_database_out_of_range(servers: Servers, url: str) -> None:
    """The server has fewer: only the user can solve that."""
    server = servers.start("--databases", "2")
    server.user()
    async with aclosing(Redlock(url.format(server.path), **PATIENT)) as redlock:
        with pytest.raises(ConfigError, match=r"DB index is out of range; correct the number .* databases") as caught:
            await redlock("order:42").acquire()
    assert "TLS" not in str(caught.value)


OTHERS = ["redis+cluster://a", "valkey+cluster://a", "postgresql://me:kilowatt@a/b", "memory:", "embedded:", "foo"]


@pytest.mark.parametrize("url", [*OTHERS, "redis", "me:kilowatt@a", ""])
def test_a_redis_store_takes_no_url_of_another_store(url: str) -> None:
    """It says which urls it takes, and shows no part of the wrong one."""
    with pytest.raises(ConfigError, match=r"redis://.*redis\+sentinel://.*Redlock") as caught:
        RedisStore(url, min_replicas=1)
    assert "kilowatt" not in str(caught.value)


def test_a_redis_store_takes_no_client_of_another_kind() -> None:
    """Nor anything else that is no url."""
    with pytest.raises(ConfigError, match=r"not a int"):
        RedisStore(cast("str", 6379))


@pytest.mark.parametrize("hosts", ["[::1]:7000,b:7001,c:7002", "a:7000,[::1]:7001,c:7002", "a:7000,b:7001,[::1]:7002"])
@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_an_ipv6_address_stands_anywhere_in_a_list(scheme: str, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python refuses brackets that do not begin the host."""
    split = parse._splitnetloc  # type: ignore[attr-defined] # noqa: SLF001 - newer versions check there

    def strict(url: str, start: int = 0) -> tuple[str, str]:
        netloc, rest = split(url, start)
        if netloc.rpartition("@")[2].partition("[")[0] and "[" in netloc:
            raise ValueError("Invalid IPv6 URL")
        return netloc, rest

    monkeypatch.setattr(parse, "_splitnetloc", strict)
    parse.clear_cache()  # type: ignore[attr-defined]
    port = int(hosts[hosts.index("]:") + 2 :][:4])
    (store,) = stores_of(Redlock(f"{scheme}://me:secret@{hosts}{'/mymaster' if 'sentinel' in scheme else ''}"))
    if isinstance(store, ClusterStore):
        assert Address("::1", port) in store.seeds
    else:
        assert f"[::1]:{port}" in store.label


ANY_SCHEME = [
    *("redis://a", "redis+sentinel://a/b", "redis+cluster://a", "postgresql://me@a/b", "sqlite:///b"),
    *("zookeeper://a/b", "embedded:b", "memory:"),
]


@pytest.mark.parametrize("url", ANY_SCHEME)
@pytest.mark.parametrize("where", ["arguments", "environment"])
def test_white_space_around_a_url_is_ignored(url: str, where: str) -> None:
    """Such as the line feed at the end of a file."""
    given = f" \t{url}\r\n"
    store = store_for(given) if where == "arguments" else stores_of_environment({"ASYNCLOCK_URLS": given})[0]
    assert store.label.partition(":")[0] == store_for(url).label.partition(":")[0]
    assert url == "memory:" or store.label == store_for(url).label


@pytest.mark.parametrize("url", ["redis://a\nredis://b", "redis://a\tb", "redis://a b:1", "redis://me:kilo\nwatt@a"])
def test_white_space_within_a_url_is_an_error(url: str) -> None:
    """It says what to do, and shows no secret."""
    with pytest.raises(ConfigError, match="separate urls with commas") as caught:
        Redlock(url)
    assert "kilo" not in str(caught.value)


@pytest.mark.parametrize(
    ("store", "url"),
    [
        (RedisStore, "redis://a\nredis://b"),
        (ClusterStore, "redis+cluster://a:1,b c:2"),
        (SQLStore, "postgresql://a\tb/c"),
        (ZooKeeperStore, "zookeeper://a b/c"),
        (EmbeddedStore, "embedded:a\nb"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_store_takes_no_white_space_within_its_url(store: Any, url: str) -> None:
    """As a client: two lines would be one host."""
    with pytest.raises(ConfigError, match="separate urls with commas"):
        store(url)


@pytest.mark.parametrize("sign", "/#?")
@pytest.mark.parametrize("scheme", ["postgresql", "mariadb", "zookeeper"])
def test_a_password_may_have_a_space_before_a_raw_sign(scheme: str, sign: str) -> None:
    """It is no space within a host."""
    if (scheme, sign) != ("zookeeper", "?"):  # there, `?` begins the options
        store_for(f"{scheme}://me:kilo watt{sign}1@host/locks")


def test_a_space_in_a_host_before_the_options_of_zookeeper() -> None:
    """An @ among them ends no password."""
    with pytest.raises(ConfigError, match="separate urls with commas"):
        ZooKeeperStore("zookeeper://a b:2181/p?x=u@y")


@pytest.mark.parametrize("url", ["memory:kilo", "memory://kilo", "memory:///kilo", "memory:?kilo=1"])
def test_a_memory_url_takes_no_name(url: str) -> None:
    """Clients that give the same one would share nothing. The error says how they share locks."""
    with pytest.raises(ConfigError, match=r"MemoryStore\(\)") as caught:
        Redlock(url)
    assert "kilo" not in str(caught.value)


def test_a_cluster_has_no_min_replicas() -> None:
    """The error names the option, and not redis-py."""
    with pytest.raises(ConfigError, match="min_replicas is not supported on a cluster"):
        Redlock("redis+cluster://a:7000,b:7000?min_replicas=1")
