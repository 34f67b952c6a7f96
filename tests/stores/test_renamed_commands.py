"""A server that does not know a command which a lock needs (HAZARDS C13): renamed, disabled, or too old."""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextlib import aclosing

import pytest

from asynclock import ConfigError, Redlock
from asynclock._flood import BURST
from asynclock.events import NodeDown
from asynclock.stores.redis.replies import Fault, ServerError, fault_of, unknown_command
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.commands import answered
from tests.support.default_keys import key_of
from tests.support.servers import Server, Servers
from tests.support.told import told
from tests.support.waiters import LONG, PATIENT, until

DEL_AT = next(at for at, line in enumerate(SCRIPTS[""].splitlines(), 1) if line.endswith("redis.call('DEL', hold)"))

IN_LUA = "Unknown Redis command called from Lua script"

REPLIES = {
    "sent": ("ERR unknown command 'EVALSHA', with args beginning with: 'x' ", "EVALSHA"),
    "sent, Redis 5": ("ERR unknown command `evalsha`, with args beginning with: ", "EVALSHA"),
    "Redis 6.2": (
        f"ERR Error running script (call to f_1a): @user_script:{DEL_AT}: @user_script: {DEL_AT}: {IN_LUA}",
        "DEL",
    ),
    "Redis 7": (f"ERR Unknown Redis command called from script script: 1a, on @user_script:{DEL_AT}.", "DEL"),
    "Valkey": (f"ERR Unknown command called from script script: on @user_script:{DEL_AT}.", "DEL"),
    "pcall": ("ERR Unknown command called from script", "a command of its script"),
    "a line that is none": ("ERR Unknown command called from script script: on @user_script:9999.", "a command"),
}


@pytest.mark.parametrize(("reply", "named"), REPLIES.values(), ids=REPLIES.keys())
def test_c13_every_servers_error_for_an_unknown_command(reply: str, named: str) -> None:
    """Trying again does not help, and the command is named."""
    assert fault_of(ServerError(reply)) is Fault.CONFIG
    assert unknown_command(reply, SCRIPTS[""]).startswith(named)


@pytest.mark.parametrize("reply", ["ERR value is not an integer", "BUSY Redis is busy", "ERR unknown subcommand 'X'"])
def test_other_errors_are_not_about_an_unknown_command(reply: str) -> None:
    """They may be temporary."""
    assert fault_of(ServerError(reply)) is Fault.DOWN
    assert unknown_command(reply) == ""


@pytest.mark.parametrize("code", ["ERR", "LOADING"])
def test_an_error_reply_repeats_no_argument(code: str) -> None:
    """The argument of AUTH is a token that a provider renewed, and its refusal is logged."""
    error = ServerError(f"{code} unknown command 'AUTH', with args beginning with: 'worker' 'a token' ")
    assert "unknown command 'AUTH'" in str(error)
    assert "token" not in str(error)


def without(servers: Servers, *commands: str) -> Server:
    """A server that does not know these commands."""
    return servers.start(*(word for each in commands for word in ("--rename-command", each, "")))


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_an_acquire_names_the_command(servers: Servers, nodes: int, name: str) -> None:
    """No endless retry, and no QuorumUnavailable that sounds like an outage."""
    urls = [without(servers, "MGET").url for _ in range(nodes)]
    async with aclosing(Redlock(*urls, **PATIENT)) as redlock:
        with pytest.raises(ConfigError, match="does not know MGET"):
            await redlock(name).acquire()
        with pytest.raises(ConfigError, match="does not know MGET"):
            await redlock(name).locked()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_c13_a_server_that_does_not_know_auth_shows_no_secret(
    servers: Servers, name: str, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a server repeats what it was sent. The error does not have that, nor its cause, and neither have events,
    health, the log and doctor."""
    caplog.set_level(logging.DEBUG, "asynclock")
    server = without(servers, "AUTH", "HELLO")
    url = server.url.replace("unix://", "unix://worker:very-secret@") + f"?protocol={protocol}"
    async with aclosing(Redlock(url, **PATIENT)) as redlock:
        with told(redlock) as seen:
            with pytest.raises(ConfigError, match=r"does not know (AUTH|HELLO) \(.*unknown command") as caught:
                await redlock(name).acquire(timeout=0)
            health = await redlock.health()
    assert seen.of(NodeDown)
    assert not health.ok
    doctor = await asyncio.to_thread(answered, "doctor", ASYNCLOCK_URLS=url)
    assert "does not know" in doctor.stdout
    shown = [*traceback.format_exception(caught.value), *map(str, seen.all), str(health), caplog.text, doctor.stdout]
    assert "very-secret" not in "".join(shown)


RELEASE = ("DEL", "DELIFEQ", "DELEX")
"""All by which a server can delete a key for a release."""


def unreleased(caplog: pytest.LogCaptureFixture) -> int:
    """How many errors were logged about releases."""
    return sum(each.levelno == logging.ERROR and "not released" in each.message for each in caplog.records)


class Forbidding:
    """Servers that take commands away from a user that has connected: the first use of a client finds a command that
    was missing from the start."""

    def __init__(self, servers: Servers, nodes: int) -> None:
        self.servers = [servers.start() for _ in range(nodes)]
        self.urls = [each.url.replace("unix://", "unix://worker:secret@") for each in self.servers]
        self._acl("+@all")

    def forbid(self, *commands: str) -> None:
        with self.servers[0].cli() as cli:
            here = {each.decode().upper() for each in cli.command_list()}
        self._acl(*(f"-{each}" for each in commands if each in here))

    def _acl(self, *rules: str) -> None:
        for server in self.servers:
            with server.cli() as cli:
                cli.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~*", "&*", *rules)


@pytest.mark.parametrize("command", ["DEL", "PEXPIRE", "ZADD"])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_a_missing_command_is_told_at_the_start(
    servers: Servers, nodes: int, name: str, command: str
) -> None:
    """Before anything is held: at the first acquire, and where the client is entered."""
    urls = [without(servers, command).url for _ in range(nodes)]
    async with aclosing(Redlock(*urls, **PATIENT)) as redlock:
        with pytest.raises(ConfigError, match=f"does not know .*{command}"):
            await redlock(name).acquire(timeout=0)
        with pytest.raises(ConfigError, match=f"does not know .*{command}"):
            await redlock.__aenter__()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_a_release_that_the_server_cannot_do_fails(
    servers: Servers, nodes: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises and is logged: no caller takes the name for free while the key stays."""
    some = Forbidding(servers, nodes)
    async with aclosing(Redlock(*some.urls, **PATIENT)) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        some.forbid(*RELEASE)
        with pytest.raises(ConfigError, match="ACL SETUSER"):
            await lease.release()
        with pytest.raises(ConfigError, match="ACL SETUSER"):
            async with redlock(f"{name}:block"):
                pass
        await until(lambda: unreleased(caplog) == 2 * nodes)  # the last node's answer may come after the majority's


async def test_many_releases_that_a_server_refuses_are_counted(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some lines, and one with the number of the others."""
    some = Forbidding(servers, 1)
    async with aclosing(Redlock(*some.urls, **PATIENT)) as redlock:
        leases = [await redlock(f"{name}:{number}").acquire(timeout=None) for number in range(BURST + 20)]
        some.forbid(*RELEASE)
        for lease in leases:
            with pytest.raises(ConfigError):
                await lease.release()
    assert unreleased(caplog) == BURST + 1
    assert "and 20 more locks that were not released" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_the_bodys_own_exception_is_raised(servers: Servers, nodes: int, name: str) -> None:
    """The failed release is a note on it."""
    some = Forbidding(servers, nodes)
    async with aclosing(Redlock(*some.urls, **PATIENT)) as redlock:
        with pytest.raises(KeyError) as caught:
            async with redlock(name):
                some.forbid(*RELEASE)
                raise KeyError("body")
        assert "ACL SETUSER" in caught.value.__notes__[0]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_a_close_that_cannot_release_logs_it(
    servers: Servers, nodes: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its releases have no caller, so they are logged."""
    some = Forbidding(servers, nodes)
    redlock = Redlock(*some.urls, **PATIENT)
    lease = await redlock(name).acquire(timeout=None)
    some.forbid(*RELEASE)
    await redlock.aclose()
    assert not lease.held
    assert unreleased(caplog) == nodes


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c13_inspect_and_holders_name_the_command(servers: Servers, nodes: int, name: str) -> None:
    """They do not report a free name either."""
    urls = [without(servers, "GETRANGE", "SCAN").url for _ in range(nodes)]
    async with Redlock(*urls, **PATIENT) as redlock, redlock(name):
        with pytest.raises(ConfigError, match="does not know GETRANGE"):
            await redlock.inspect(name)
        with pytest.raises(ConfigError, match="does not know SCAN"):
            [each async for each in redlock.holders()]


@pytest.mark.parametrize("timeout", [0, 1])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_script_that_fails_half_way_is_undone(servers: Servers, name: str, nodes: int, timeout: int) -> None:
    """PEXPIRE is forbidden, and a semaphore's script calls it after it has added the permit: no permit is left."""
    some = Forbidding(servers, nodes)
    async with Redlock(*some.urls, lease=LONG, **PATIENT) as client:
        some.forbid("PEXPIRE")
        with pytest.raises(ConfigError, match="pexpire"):
            await client.semaphore(name, 1).acquire(timeout=timeout)
        await client.aclose()
    for server in some.servers:
        with server.cli() as cli:
            assert not cli.exists(key_of(name))
