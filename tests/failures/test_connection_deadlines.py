"""When a command is overdue, whose retries count, and which command is sent before a release."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from asynclock import QuorumUnavailable, Redlock
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.handlers import IgnoredReply, UnfailedCommands
from asynclock.stores.redis.pending import PendingReleases
from tests.support.probes import contended
from tests.support.servers import Server
from tests.support.waiters import LIMIT

pytestmark = pytest.mark.both_loops("the loop has the timers")


@pytest.mark.parametrize(
    ("moved_at", "now", "overdue"),
    [
        (10.0, 10.04, False),  # its time is not up
        (10.0, 10.06, True),  # silent since it was sent
        (10.03, 10.06, False),  # behind others that are being answered
        (10.03, 10.09, True),  # the answers have stopped
        (15.04, 15.049, False),  # a long queue
        (15.05, 15.06, True),  # but the time in the queue is bounded
    ],
)
def test_silence_makes_a_command_overdue_not_age(moved_at: float, now: float, overdue: bool) -> None:
    """Sent at 10.0 with 0.05 s to answer, on a connection that last received data at `moved_at`."""
    handler = IgnoredReply(Op(Verb.RELEASE, MUTEX, "x", "", 30.0), 10.0, 10.05)
    commands = UnfailedCommands()
    commands.read(deque([handler]), moved_at)
    assert bool(commands.take_overdue(now)) is overdue


def test_data_that_arrives_gives_the_commands_more_time() -> None:
    """Those that were failed before are not failed again without it."""
    waiting = deque(IgnoredReply(Op(Verb.RELEASE, MUTEX, "x", "", 30.0), 10.0, 10.05 + each) for each in range(3))
    commands = UnfailedCommands()
    commands.read(waiting, 10.0)
    assert commands.take_overdue(10.06) == [waiting[0]]
    commands.read(waiting, 10.0)
    assert commands.take_overdue(11.06) == [waiting[1]]
    commands.read(waiting, 12.0)
    assert commands.next == pytest.approx(12.05)


def test_a_pending_release_expires() -> None:
    """A release that is refused each time it is sent is dropped when the hold that it undoes must have ended."""
    releases, op = PendingReleases(), Op(Verb.RELEASE, MUTEX, "x", "a" * 32, 30.0)
    now = 0.0
    releases.add(op, now, now)
    while sent := releases.drain(now, 10):  # and refused
        now += 5.0
        for again in sent:
            releases.add(again, now, now)
    assert now == 90.0


async def test_a_clients_retries_do_not_delay_an_error(tmp_path: Path) -> None:
    """A handed-in client would retry for ten minutes: the library raises the error at once."""
    theirs = Redis(unix_socket_path=str(tmp_path / "nobody"), retry=Retry(ConstantBackoff(60), 10))
    redlock = Redlock(theirs)
    with pytest.raises(QuorumUnavailable, match="out of reach"):
        await redlock("x").acquire(timeout=0)
    await redlock.aclose()


def pings(cli: redis_py.Redis) -> int:
    """How many pings the server has answered or refused."""
    stats: Any = cli.info("commandstats").get("cmdstat_ping", {})  # type: ignore[union-attr]
    return int(stats.get("calls", 0)) + int(stats.get("rejected_calls", 0))


@pytest.mark.parametrize("rules", ["+@all", "+@all -ping"])
async def test_a_ping_goes_before_a_release_with_waiters(server: Server, name: str, rules: str) -> None:
    """One command more, so that the notified waiter receives its notice before the releaser receives its reply.
    Answered or refused, nobody waits for it, and all other replies stay in step. A release without waiters is sent
    alone."""
    cli = server.cli()
    cli.execute_command("ACL", "SETUSER", "worker", "on", ">swordfish", "~*", "&*", *rules.split())
    url = f"unix://worker:swordfish@{server.path}"
    async with Redlock(url) as ours, Redlock(url) as other:
        async with ours(name):
            pass
        before = pings(cli)
        async with ours(name) as lease:
            waits = asyncio.create_task(other(name).acquire(timeout=None))
            while not contended(lease):
                await asyncio.sleep(0.001)
        assert pings(cli) == before + 1
        async with asyncio.timeout(LIMIT), await waits as theirs:
            assert theirs.fence > lease.fence
        before = pings(cli)  # a client that was granted as a waiter assumes that others wait
        fences = []
        for _ in range(3):
            async with ours(name) as again:
                fences.append(again.fence)
        assert fences == sorted(fences)
        assert fences[0] > theirs.fence
        assert pings(cli) == before
    cli.close()
