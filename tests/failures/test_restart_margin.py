"""Why the quarantine of a restarted server is a second longer than max_lease: the server counts its uptime in whole
seconds of its clock, and so may report a second after a moment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asynclock import QuorumUnavailable, Redlock
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, urls_of

SECOND = 1.0
LATE = (0.60, 0.80)
"""The part of a second in which the servers restart: they are up before it ends, so that their clock soon says one."""


async def restarted_late_in_a_second(servers: list[Server]) -> bool:
    """Kill them and start them again; returns whether that took no longer than the rest of the second."""
    while not LATE[0] <= time.time() % 1.0 <= LATE[1]:
        await asyncio.sleep(0.005)
    began = int(time.time())
    for each in servers:
        each.restart()
    return int(time.time()) == began


def uptime(server: Server) -> int:
    with server.cli() as cli:
        info: Any = cli.info("server")
    return int(info["uptime_in_seconds"])


async def test_d3_a_server_that_reports_a_second_after_a_moment(servers: Servers, name: str) -> None:
    """A majority restarts, empty, right after a holder took its lease of one second, and soon reports an uptime of a
    second, which is as long as any lease lasts. The holder still holds, so no other client is granted."""
    for _ in range(4):  # until the machine was quick enough for it
        some = [servers.start() for _ in range(3)]
        async with Redlock(*urls_of(some), lease=SECOND, max_lease=SECOND, node_timeout=0.3) as holder:
            await holder.health()
            while not LATE[0] - 0.1 <= time.time() % 1.0 <= LATE[0]:
                await asyncio.sleep(0.005)
            lease = await holder(name, renew=False).acquire(timeout=None)
            in_time = await restarted_late_in_a_second(some[:2])
            async with asyncio.timeout(LIMIT):
                while min(map(uptime, some[:2])) < 1:
                    await asyncio.sleep(0.005)
            async with Redlock(*urls_of(some), lease=SECOND, max_lease=SECOND, node_timeout=0.3) as rival:
                try:
                    taken = await rival(name).acquire(timeout=0)
                except QuorumUnavailable:
                    taken = None
                decisive = in_time and lease.held
                assert not (taken and lease.held)
        if decisive:
            return
    pytest.skip("the servers took too long to start for a result")
