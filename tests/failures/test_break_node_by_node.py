"""An operator breaks a lock, and the nodes do so one after the other: the holder loses it, knows why, and creates no
key again (HAZARDS D7)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asynclock import Lease, LockLost, Redlock
from asynclock.quorum.denials import lost_to
from asynclock.stores.port import Notice, Refused
from tests.support.cancelled_waits import sent
from tests.support.distant_stores import Beyond
from tests.support.probes import deliver_notice, denied_by, id_of, said_to_be_broken
from tests.support.servers import Server
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, holder, urls_of


@pytest.mark.parametrize("nodes", [1, 3, 5])
async def test_d7_a_broken_hold_is_not_healed(five: list[Server], name: str, nodes: int) -> None:
    """Each node is broken once the holder has handled the one before. No key comes back, the lease is held as long as a
    majority keeps it, and the loss is reported as a break."""
    some, majority = five[:nodes], nodes // 2 + 1
    async with Redlock(*urls_of(some), lease=LONG) as client:
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(LIMIT), client(name) as lease:
                for count, server in enumerate(some[:majority], 1):
                    assert lease.held
                    await broken(server, name)
                    while lease.held and forgotten(lease) < count:
                        await asyncio.sleep(0)
                    await sent([client])
                    assert not any(holder(each, name) for each in some[:count])
                await asyncio.Event().wait()
        assert lost.value.reason == "broken"


async def broken(server: Server, name: str) -> None:
    """It is broken at that server alone."""
    async with Redlock(server.url) as operator:
        assert await operator.break_lock(name)


def forgotten(lease: Lease) -> int:
    """The number of nodes at which its holder knows that the hold is gone."""
    return denied_by(lease)


@pytest.mark.parametrize("nodes", [3, 5])
@pytest.mark.parametrize("apart", [0.0005, 0.002, 0.011])
async def test_d7_nodes_at_different_distances(name: str, nodes: int, apart: float) -> None:
    """Each node breaks it a little later than the one before, and the holder asks them again in between. The loss says
    that the hold was broken, not that it has expired, and all stores are empty."""
    beyond = Beyond(nodes, name, way=0.001)
    for index, store in enumerate(beyond.far):
        store.way = 0.001 + apart * index
    async with beyond.opened() as client, beyond.opened() as operator:
        await operator.health()
        lease = await beyond.lease(client)
        reasons: list[str] = []

        async def body() -> None:
            try:
                async with lease:
                    await asyncio.Event().wait()
            except LockLost as lost:
                reasons.append(lost.reason)

        guarded = asyncio.create_task(body())
        breaking = asyncio.create_task(operator.break_lock(name))
        await beyond.finish(guarded, breaking)
        await beyond.pass_time(0.2)
        assert reasons == ["broken"]
        assert not any(state_of(store, name).holds for store in beyond.far)


@pytest.mark.parametrize(
    ("denials", "nodes", "broken", "reason"),
    [
        ([Refused(None)], 1, True, "broken"),
        ([Refused(0.9, "x")], 1, True, "taken"),
        ([Refused(None), Refused(None)], 3, True, "broken"),
        ([Refused(None), Refused(0.9, "x")], 3, True, "broken"),  # the next holder has no majority yet
        ([Refused(0.9, "x"), Refused(0.9, "y")], 3, True, "broken"),
        ([Refused(0.9, "x"), Refused(math.inf, "x")], 3, True, "taken"),
        ([Refused(None), Refused(None)], 3, False, "broken"),
        ([Refused(None), Refused(0.9, "x")], 3, False, "taken"),
    ],
)
def test_why_a_hold_is_lost(denials: list[Refused], nodes: int, broken: bool, reason: str) -> None:
    """BROKEN where an operator broke it, unless another client holds a majority. Else TAKEN, where another client holds
    it at any node."""
    assert lost_to(denials, nodes, broken) == reason


async def test_d7_another_hold_of_the_name_is_not_asked_about(five: list[Server], name: str) -> None:
    """Five readers of one client, and a notice that one of them was broken: the others send nothing."""
    async with Redlock(*urls_of(five[:3]), lease=LONG) as client:
        leases: list[Any] = [await client.read(name).acquire(timeout=None) for _ in range(3)]
        whose = id_of(leases[1])[:32]
        deliver_notice(client, 0, Notice(whose, 0, name=name, broken=True))
        assert [said_to_be_broken(lease) for lease in leases] == [False, True, False]
        for lease in leases:
            await lease.release()
