"""The keys of a name on Redis: in one slot, apart from all other names'; and fences beyond Lua's number format."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from asynclock import ConfigError, Redlock
from asynclock._options import check_name
from asynclock.rules.model import ID_LENGTH
from asynclock.stores.redis.keys import RESERVED, Keys, keys, mark
from tests.support.default_keys import keys_of
from tests.support.servers import Server, Servers
from tests.support.waiters import PATIENT

ODD = "{}{}ab:~"  # braces as often as not
CHARACTERS = st.characters(exclude_categories=("Cs",))
"""Those of UTF-8. With `codec="utf-8"` Hypothesis would encode each of a million, once in each process."""
texts = st.one_of(st.text(ODD, max_size=8), st.text(CHARACTERS, max_size=8))
names = st.one_of(st.text(ODD, min_size=1, max_size=8), st.text(CHARACTERS, min_size=1, max_size=8))

WEIRD = {
    "braces": "{user:1}:mail",
    "closing": "a}b",
    "opening": "a{b",
    "empty braces": "{}x",
    "both": "}{a}{",
    "spaces": "  two words \n",
    "nul": "a\0b",
    "huge": "x" * 10_240,
    "non-ascii": "заказ:42 🔒",
}


def tombstone(found: Keys) -> str:
    return found.undone + "0" * ID_LENGTH


def all_keys(found: Keys) -> list[str]:
    return [found.hold, found.fence, tombstone(found)]


@given(texts, names)
def test_d8_the_hold_is_exactly_prefix_and_name(prefix: str, name: str) -> None:
    """Other clients of the same names exclude this key, and an operator looks for it."""
    assert keys(prefix, name).hold == prefix + name


@given(texts, names)
@example("", "a}b")
@example("", "{}x")
@example("", "{}{a}")
@example("{", "}")
@example("{a", "}b}")
@example("{a}", "{b}")
@example("{}", "{b}")
def test_d8_all_keys_share_a_slot(prefix: str, name: str) -> None:
    """A cluster serves a script only if its keys are in one slot, whatever braces a name has."""
    assert len({key_slot(key.encode()) for key in all_keys(keys(prefix, name))}) == 1


@given(texts, names, names)
@example("", "a}", "a}}")
@example("", "{a}", "{a}:")
@example("", "{a}b", "{a}:b")
@example("{p}", "a", "a:")
@example("", "a}:fence", "a}")
@example("", "{a}undone:", "{a}")
def test_d8_keys_of_distinct_names_never_collide(prefix: str, one: str, other: str) -> None:
    """No key of one name is a key of another name, nor the mark of the node."""
    assert mark(prefix) not in all_keys(keys(prefix, one))
    if one != other:
        assert not set(all_keys(keys(prefix, one))) & set(all_keys(keys(prefix, other)))


@given(texts, names, st.sampled_from(["fence", "tombstone", "mark"]))
def test_d8_a_name_cannot_be_an_internal_key_of_another(prefix: str, name: str, which: str) -> None:
    """A lock with such a name never touches a counter, a tombstone or the mark of another."""
    found = keys(prefix, name)
    own = {"fence": found.fence, "tombstone": tombstone(found), "mark": mark(prefix)}[which]
    if own.startswith(prefix) and own != prefix:
        with pytest.raises(ConfigError, match="rename"):
            check_name(own[len(prefix) :])


def test_d8_a_reserved_name_is_refused_when_the_lock_is_made() -> None:
    """A bad name raises ConfigError there, not at the first acquire."""
    with pytest.raises(ConfigError, match="rename"):
        Redlock("memory:")(f"{RESERVED}used")


@given(st.text(CHARACTERS, max_size=8), names)
def test_d8_keys_begin_with_the_prefix(rest: str, name: str) -> None:
    """ACL patterns such as ~lock:* need that."""
    prefix = f"lock:{rest.replace('{', '').replace('}', '')}"
    assert all(key.startswith(prefix) for key in [*all_keys(keys(prefix, name)), mark(prefix)])


# -- real servers ----------------------------------------------------------------------------------------------------


async def test_d8_weird_names_exclude(make: Callable[..., Redlock], name: str) -> None:
    """Every name works on every deployment, and leaves nothing held."""
    ours, theirs = make(prefix=name, **PATIENT), make(prefix=name, **PATIENT)
    for weird in WEIRD.values():
        async with ours(weird) as lease:
            assert lease.name == weird
            assert await theirs(weird).acquire(timeout=0) is None
            await lease.extend()
        assert not await theirs(weird).locked()


async def clustered(servers: Servers) -> Server:
    """A cluster of one node that serves all slots."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])  # its bus needs one, though it is not used
    bus = ("--bind", "127.0.0.1", "--cluster-port", port, "--cluster-config-file", "nodes")
    server = servers.start("--cluster-enabled", "yes", *bus)
    with server.cli(decode_responses=True) as cli:
        cli.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        async with asyncio.timeout(20):
            while "cluster_state:ok" not in str(cli.execute_command("CLUSTER", "INFO", NEVER_DECODE=True)):
                await asyncio.sleep(0.01)  # the server has no notice of it, so poll
    return server


async def test_d8_weird_names_on_a_cluster(servers: Servers) -> None:
    """A cluster's node refuses keys in two slots; the keys of a name are in one."""
    server = await clustered(servers)
    async with Redlock(server.url) as redlock, Redlock(server.url) as other:
        for weird in WEIRD.values():
            async with redlock(weird) as lease:
                assert await other(weird).acquire(timeout=0) is None
                await lease.extend()
            assert not await redlock(weird).locked()


async def limited(server: Server) -> str:
    """A url of a user with access to lock:* only."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~lock:*", "+@all")
    return f"unix://worker:secret@{server.path}"


@pytest.mark.parametrize("count", [1, 3])
async def test_d8_acl_by_prefix(servers: Servers, count: int) -> None:
    """`~lock:*` is all that the user of a client with the prefix lock: needs; on a quorum, too."""
    urls = [await limited(servers.start()) for _ in range(count)]
    async with Redlock(*urls, prefix="lock:", **PATIENT) as redlock, Redlock(*urls, prefix="lock:", **PATIENT) as other:
        for name in ["order:42", "two words"]:
            async with redlock(name) as lease:
                assert await other(name).acquire(timeout=0) is None
                await lease.extend()
            assert not await other(name).locked()


@pytest.mark.parametrize("count", [1, 3])
async def test_d8_acl_by_prefix_with_weird_names(servers: Servers, count: int) -> None:
    """Braces in a name do not lead out of the prefix."""
    urls = [await limited(servers.start()) for _ in range(count)]
    async with Redlock(*urls, prefix="lock:", **PATIENT) as redlock:
        for weird in WEIRD.values():
            async with redlock(weird) as lease:
                assert lease.held


@pytest.mark.parametrize("count", [1, 3])
async def test_d9_fences_are_exact_to_the_end(servers: Servers, count: int, name: str) -> None:
    """Just below 2^53, where Lua's own formatting would round, each hold still gets exactly the next number."""
    servers_ = [servers.start() for _ in range(count)]
    start = 2**53 - 10
    for server in servers_:
        with server.cli() as cli:
            cli.set(keys_of(name).fence, start, px=60_000)
    async with Redlock(*(server.url for server in servers_), **PATIENT) as redlock:
        fences = []
        for _ in range(8):
            async with redlock(name) as lease:
                fences.append(lease.fence)
                await lease.extend()
    assert fences == list(range(start + 1, start + 9))
    with servers_[0].cli() as cli:
        stored: Any = cli.get(keys_of(name).fence)
        assert int(stored) == start + 8
