"""Bad input gets a clear error, at once where it can be known, and has no other effect: the client works on after
it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from asynclock import ConfigError, LockNotHeld, QuorumUnavailable, Redlock
from asynclock.client import redlock as ready_made
from asynclock.quorum.ballot import drift
from asynclock.stores import MemoryStore
from tests.support.default_keys import key_of
from tests.support.programs import run_python
from tests.support.servers import Servers
from tests.support.still_clock import Still
from tests.support.user_store import DictStore
from tests.support.waiters import works

NOWHERE = "unix:///nonexistent/none.sock"


# -- options ---------------------------------------------------------------------------------------------------------

BAD_LEASES = {
    "zero": (0, "more than 0"),
    "negative": (-1, "more than 0"),
    "nan": (math.nan, "not finite"),
    "inf": (math.inf, "not finite"),
    "milliseconds": (30000, "seconds"),
    "too short": (0.05, "at least 0.1 s"),
    "timedelta": (timedelta(seconds=-30), "more than 0"),
    "bool": (True, "number of seconds"),
    "str": ("30", "number of seconds"),
    "none": (None, "number of seconds"),
    "huge": (10**400, "lease"),
}


@pytest.mark.parametrize(("lease", "says"), BAD_LEASES.values(), ids=BAD_LEASES.keys())
async def test_b8_a_bad_lease(redlock: Redlock, name: str, lease: Any, says: str) -> None:
    """A bad lease is refused when the lock is made, and in extend, which does not change the hold."""
    with pytest.raises(ConfigError, match=says):
        redlock(name, lease=lease)
    async with redlock(name) as held:
        if lease is not None:  # None: the lock's own
            with pytest.raises(ConfigError, match=says):
                await held.extend(lease=lease)
        assert held.held
    await works(redlock, name)


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, True, "2", timedelta(seconds=-1)], ids=repr)
async def test_b8_a_bad_timeout(redlock: Redlock, name: str, timeout: Any) -> None:
    """A bad timeout is refused in the lock, and in acquire."""
    with pytest.raises(ConfigError, match="timeout"):
        redlock(name, timeout=timeout)
    with pytest.raises(ConfigError, match="timeout"):
        await redlock(name).acquire(timeout=timeout)
    await works(redlock, name)


@pytest.mark.parametrize("option", ["max_hold", "min_hold"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "2"], ids=repr)
async def test_b8_a_bad_hold(redlock: Redlock, name: str, option: str, value: Any) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=option):
        redlock(name, **{option: value})
    await works(redlock, name)


async def test_b8_a_fractional_lease(name: str) -> None:
    """A lease may be a fraction of a second."""
    async with Still(1, name).held(lease=0.2345) as (_, lease):
        assert lease.remaining == pytest.approx(0.2345, abs=drift(0.2345))


async def test_b8_a_lease_too_short_for_the_nodes_on_a_quorum(shared_urls: list[str], name: str) -> None:
    """Three node timeouts are the bound, and the message says it; also where the client is connected already."""
    async with Redlock(*shared_urls) as redlock:
        with pytest.raises(ConfigError, match="at least 3 s"):
            async with redlock(name, lease=2.9):
                pytest.fail("entered")
        await works(redlock, name)
    async with aclosing(Redlock(*shared_urls)) as redlock:
        with pytest.raises(ConfigError, match="at least 3 s"):
            async with redlock(name, lease=2.9):
                pytest.fail("entered")


async def test_misspelt_option(redlock: Redlock, name: str) -> None:
    """Did you mean?"""
    wrong: Any = redlock
    with pytest.raises(ConfigError, match="did you mean 'lease'"):
        wrong(name, leese=10)
    with pytest.raises(ConfigError, match="did you mean 'max_lease'"):
        wrong.configure(maxlease=10)
    await works(redlock, name)


WRONG: list[dict[str, Any]] = [
    {"lease": 0.01}, {"lease": -1}, {"lease": "1"}, {"lease": 1}, {"leese": 1}, {"metadata": "x" * 5000},
    {"fair": 1}, {"owner": "me"}, {"reentrant": True, "owner": []},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_the_error_of_a_wrong_option_has_the_name_of_its_lock(wrong: dict[str, Any]) -> None:
    """A decorator has no name yet, so its error has none."""
    client = Redlock("redis://nowhere", node_timeout=1)
    with pytest.raises(ConfigError) as caught:
        client("order:42", **wrong)
    assert caught.value.name == "order:42"
    if not set(wrong) & {"fair", "owner"}:
        with pytest.raises(ConfigError) as caught:
            client.synchronized("order:{order_id}", **wrong)
        assert caught.value.name == ""


@pytest.mark.parametrize("metadata", ["\ud800", "x" * 5000], ids=["surrogate", "huge"])
async def test_metadata_that_cannot_be_sent(redlock: Redlock, name: str, metadata: str) -> None:
    """It is refused when the lock is made."""
    with pytest.raises(ConfigError, match="metadata"):
        redlock(name, metadata=metadata)
    await works(redlock, name)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", b"order:42", None, 42, "\ud800"], ids=repr)
async def test_d8_a_bad_name(redlock: Redlock, name: str, bad: Any) -> None:
    """A name is a non-empty str: refused when the lock is made."""
    with pytest.raises(ConfigError, match="name"):
        redlock(bad)
    await works(redlock, name)


async def test_d8_a_reserved_name(redlock: Redlock, name: str) -> None:
    """A name that would be one of the library's own keys is refused on every store, so that no test passes a name that
    production refuses."""
    with pytest.raises(ConfigError, match="rename"):
        redlock("asynclock~used")
    await works(redlock, name)


# -- nodes -----------------------------------------------------------------------------------------------------------

BAD_NODES = {
    "a name": ("order:42", "redlock\\('order:42'\\)"),
    "empty": ("", "not a url"),
    "unknown scheme": ("http://a", "no store for the scheme 'http': there are redis"),
    "bad port": ("redis://a:port", "redis://host:port"),
    "bad database": ("redis://a?db=x", "redis://host:port"),
    "unknown setting": ("redis://a?sockettimeout=3", "sockettimeout"),
    "several in one": ("redis://a,redis://b", "each"),
    "no path": ("unix://", "path"),
    "bytes": (b"redis://a", "a node is a url"),
    "none": (None, "a node is a url"),
    "a class": (MemoryStore, r"make one: MemoryStore\(\)"),
    "a class of the user": (DictStore, r"make one: DictStore\(\)"),
    "list": (["redis://a"], "not a list: .*Redlock\\(\\*urls\\)"),
    "generator": ((url for url in ("redis://a",)), "Redlock\\(\\*urls\\)"),
    "sync client": (redis.Redis(), "asyncio"),
}


@pytest.mark.parametrize(("node", "says"), BAD_NODES.values(), ids=BAD_NODES.keys())
def test_a_bad_node(node: Any, says: str) -> None:
    """It is refused when the client is made, and by configure, which then changes nothing."""
    with pytest.raises(ConfigError, match=says):
        Redlock(node)
    redlock = Redlock("redis://was:1")
    with pytest.raises(ConfigError, match=says):
        redlock.configure(node, prefix="x")
    assert "was:1" in repr(redlock)


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:kilo/watt@a",
        "redis://:kilo#watt@a",
        "redis:/me:kilowatt@a",
        "me:kilowatt@a:6379",
        "x://:kilowatt@a",
        "unix://me:kilo/watt@/run/r.sock",
        "redis+cluster://me:12?kilo=watt@a",
        "redis+cluster://me:12/kilo=watt@a",
        "zookeeper://me:12?kilo=watt@h",
        "zookeeper://me:12?session_timeout=kilowatt@h",
        "rediss://h?ssl_cert_reqs=kilowatt",
    ],
)
def test_a_bad_url_does_not_show_its_password(url: str) -> None:
    """Nor a part of it, where an odd character cut it in two."""
    with pytest.raises(ConfigError) as caught:
        Redlock(url)
    told = str(caught.value) + repr(caught.value.__context__)
    assert "kilo" not in told
    assert "watt" not in told


async def test_a_client_without_nodes_shows_the_line_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ready-made client without a server shows how to name one, and works once one is named."""
    monkeypatch.delenv("ASYNCLOCK_URLS", raising=False)
    client = Redlock()
    lock = client("order:42")
    for use in (lock.acquire, lock.locked, lock.__aenter__):
        with pytest.raises(ConfigError, match=r"ASYNCLOCK_URLS=embedded:"):
            await use()
    with pytest.raises(ConfigError, match="ASYNCLOCK_URLS"):
        await ready_made("order:42").acquire(timeout=0)
    monkeypatch.setenv("ASYNCLOCK_URLS", " memory: ,")
    async with lock as lease:
        assert lease.held
    await client.aclose()


def test_an_even_number_of_nodes_is_warned_of() -> None:
    """Four nodes survive no more failures than three do; the warning points at the line that names them."""
    with pytest.warns(UserWarning, match="odd number") as caught:
        Redlock(*(f"redis://{host}" for host in "abcd"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        Redlock("redis://a")
        Redlock("redis://a", "redis://b", "redis://c")


async def test_configure_after_the_first_use(redlock: Redlock, name: str) -> None:
    """It raises ConfigError, and the client stays as it was."""
    await works(redlock, name)
    with pytest.raises(ConfigError, match="before the first use"):
        redlock.configure(NOWHERE)
    await works(redlock, name)


# -- the same server twice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["redis://a", "redis://A", "redis://a:6379", "redis://a/0", "valkey://me:pw@a"])
def test_d1_the_same_url_twice(other: str) -> None:
    """It is refused at once, however the url is written."""
    with pytest.raises(ConfigError, match="twice"):
        Redlock("redis://a", other, "redis://b")


async def doubled(redlock: Redlock) -> None:
    """Each first use raises ConfigError, again and again; no lock is ever taken."""
    async with aclosing(redlock):
        for _ in range(2):
            with pytest.raises(ConfigError, match="same server"):
                await redlock("order:42").acquire(timeout=0)
        with pytest.raises(ConfigError, match="same server"):
            async with redlock:
                pytest.fail("entered")


async def test_d1_a_path_and_a_link_to_it(servers: Servers) -> None:
    """Two paths of one socket: the run_id of the server shows it."""
    one, two = servers.start(), servers.start()
    alias = servers.folder / "alias.sock"
    alias.symlink_to(one.path)
    await doubled(Redlock(one.url, f"unix://{alias}", two.url))
    with one.cli() as cli:
        assert not cli.exists(key_of("order:42"))


async def test_d1_two_databases_of_one_server(servers: Servers) -> None:
    """Two databases fail together: one server has one vote."""
    one, two = servers.start(), servers.start()
    await doubled(Redlock(one.url, f"{one.url}?db=1", two.url))


async def test_d1_a_double_that_comes_late(servers: Servers) -> None:
    """A second way to a server that opens after the first use gets no second vote."""
    one = servers.start()
    alias = servers.folder / "alias.sock"
    async with aclosing(Redlock(one.url, f"unix://{alias}", NOWHERE)) as redlock:
        with pytest.raises(QuorumUnavailable):
            await redlock("order:42").acquire(timeout=0)
        alias.symlink_to(one.path)
        with pytest.raises((ConfigError, QuorumUnavailable)):
            async with redlock("order:42", timeout=1):
                pytest.fail("one server made a majority")


# -- after the end ---------------------------------------------------------------------------------------------------


async def test_a_lease_after_its_end(redlock: Redlock, name: str) -> None:
    """Each method says what became of the lease."""
    lease = await redlock(name).acquire(timeout=None)
    await lease.release()
    for use in (lease.release, lease.extend, lease.__aenter__):
        with pytest.raises(LockNotHeld) as caught:
            await use()
        assert caught.value.name == name
    await works(redlock, name)


async def test_a_lease_guards_one_block(redlock: Redlock, name: str) -> None:
    """Entering it twice raises ConfigError, and the block that it guards goes on."""
    async with redlock(name) as lease:
        with pytest.raises(ConfigError, match="already"):
            async with lease:
                pytest.fail("entered")
        assert lease.held
    await works(redlock, name)


async def test_a_client_after_its_end(make: Callable[..., Redlock], name: str) -> None:
    """After aclose it raises ConfigError. A second aclose does nothing. Entered again, it works."""
    redlock = make()
    await works(redlock, name)
    await redlock.aclose()
    await redlock.aclose()
    for use in (redlock(name).acquire, redlock(name).locked, redlock(name).__aenter__):
        with pytest.raises(ConfigError, match="closed"):
            await use()
    assert not (await redlock.health()).ok
    async with redlock:
        await works(redlock, name)


def test_outside_a_loop(tmp_path: Path) -> None:
    """A ConfigError says what is missing, and the same Lock works in a loop afterwards."""
    program = """
        import asyncio
        from asynclock import ConfigError, Redlock
        redlock = Redlock("memory:")
        step = redlock("x").acquire()
        try:
            step.send(None)
        except ConfigError as error:
            assert "asyncio event loop" in str(error)
        async def main():
            async with redlock("x"):
                print("fine")
        asyncio.run(main())
    """
    assert run_python(program, HOME=str(tmp_path)) == "fine\n"


def test_an_option_that_was_valid_is_checked_with_other_settings() -> None:
    """A client remembers the options that it has checked, until its own settings are others."""
    client = Redlock("memory://", max_lease=60.0)
    client("a", lease=50.0)
    client.configure(max_lease=40.0, lease=30.0)
    with pytest.raises(ConfigError, match="max_lease"):
        client("a", lease=50.0)


def test_an_option_that_was_valid_is_checked_in_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without nodes reads the environment again until its first await."""
    client = Redlock()
    client("a", lease=50.0)
    monkeypatch.setenv("ASYNCLOCK_MAX_LEASE", "40")
    with pytest.raises(ConfigError, match="max_lease"):
        client("a", lease=50.0)


def test_an_option_that_equals_a_valid_one_is_checked() -> None:
    """True equals 1, and is no time."""
    client = Redlock("memory://")
    for wrong in (True, "1", [1]):
        client("a", timeout=1)
        with pytest.raises(ConfigError, match="timeout"):
            client("a", timeout=wrong)  # type: ignore[arg-type]


def test_options_of_many_values_are_not_all_remembered() -> None:
    """As metadata that differ in each request."""
    client = Redlock("memory://")
    made = [client("a", metadata=f"request {number}") for number in range(1_000)]
    assert len(client._valid) <= 64  # noqa: SLF001
    assert {each._options.settings.metadata for each in made} == {f"request {number}" for number in range(1_000)}  # noqa: SLF001
