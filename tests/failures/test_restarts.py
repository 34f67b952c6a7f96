"""HAZARDS D: servers that restart, forget, or lose a key by an operator; the delayed restart of Redlock."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from tests.support.default_keys import key_of, keys_of
from tests.support.probes import in_quarantine, nodes_of, renew_now
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, LONG, back, until


def client(servers: list[Server], **options: Any) -> Redlock:
    return Redlock(*(each.url for each in servers), **options)


async def test_a_new_deployment_works_at_once(five: list[Server], name: str) -> None:
    """Servers a moment old that no client has used vote for the first client, and for those that come after it."""
    for _ in range(3):
        async with client(five) as redlock, redlock(name, timeout=0) as lease:
            assert lease.held


async def test_clients_that_start_together_on_a_new_deployment(five: list[Server], name: str) -> None:
    """A client that finds half the marks of another's first use there waits for the rest, not for max_lease."""
    clients = [client(five) for _ in range(8)]

    async def once(redlock: Redlock) -> int:
        async with redlock, redlock(name, timeout=10) as lease:
            return lease.fence

    fences = await asyncio.gather(*(once(each) for each in clients))
    assert len(set(fences)) == 8


async def test_d3_a_majority_restarts_empty(five: list[Server], name: str) -> None:
    """No second holder while the first may hold: restarted servers cast no vote for max_lease + 1 s."""
    options: dict[str, Any] = {"lease": 3.0, "max_lease": 7.0, "connect_timeout": LIMIT, "patience": LIMIT}
    async with client(five, **options) as holder:
        lease = await holder(name, renew=False).acquire(timeout=0)
        assert lease is not None
        for each in five[:3]:
            each.restart()
        async with aclosing(client(five, **options)) as rival:  # entering would wait for the servers
            with pytest.raises(QuorumUnavailable, match="restarted a short while ago"):
                await rival(name).acquire(timeout=0)
            with pytest.raises(QuorumUnavailable):
                await holder(f"{name}:other").acquire(timeout=0)
            taken = await rival(name).acquire(timeout=LIMIT)
            assert taken is not None
            assert not lease.held
            assert taken.fence > lease.fence
            await taken.release()


async def test_d3_a_rolling_restart_under_a_held_lease(five: list[Server], name: str) -> None:
    """One node after the other restarts empty; a node that lost the key is healed, so the lease lives on."""
    async with client(five, lease=4.5, max_lease=4.5, node_timeout=1.5) as redlock, redlock(name) as lease:
        for each in five[:3]:
            await lease.extend()
            each.restart()
            node = nodes_of(redlock)[five.index(each)]
            while node.error is not None or in_quarantine(node) or not each.cli().exists(key_of(name)):
                assert lease.held
                await asyncio.sleep(0.01)
        assert lease.held
        await lease.extend()


async def test_trusted_restarts_vote_at_once(five: list[Server], name: str) -> None:
    """trust_restarts=True is for servers that write to disk first."""
    async with client(five, trust_restarts=True) as redlock:
        async with redlock(name):
            pass
        for each in five[:3]:
            each.restart()
        lease = await redlock(name).acquire(timeout=LIMIT)
        assert lease is not None
        await lease.release()


async def test_a_single_node_votes_at_once_after_a_restart(server: Server, name: str) -> None:
    """With one node no other node could vote: the rule is not applied, and docs/safety.md says what that means."""
    async with Redlock(server.url) as redlock:
        async with redlock(name):
            pass
        server.restart()
        lease = await redlock(name).acquire(timeout=LIMIT)
        assert lease is not None
        await lease.release()


async def test_d4_counters_go_back(servers: Servers, name: str) -> None:
    """Nodes come back with an older dump: they do not count for one lease, and fences rise all the same."""
    nodes = [servers.start("--dbfilename", f"{i}.rdb") for i in range(3)]
    fences = []
    async with client(nodes, lease=3.0, max_lease=7.0, patience=LIMIT) as redlock:
        for _ in range(3):
            async with redlock(name) as lease:
                fences.append(lease.fence)
        for each in nodes:
            each.cli().save()
        for _ in range(3):
            async with redlock(name) as lease:
                fences.append(lease.fence)
        for each in nodes[:2]:
            each.restart()
        with pytest.raises(QuorumUnavailable):
            await redlock(name).acquire(timeout=0)
        async with redlock(name, timeout=LIMIT) as lease:
            fences.append(lease.fence)
    assert fences == sorted(set(fences))


async def test_d4_fences_rise_though_every_counter_is_lost(five: list[Server], name: str) -> None:
    """Without any counter left the client's clock seeds the fence above all before."""
    async with client(five) as redlock:
        async with redlock(name) as lease:
            before = lease.fence
        for each in five:
            each.cli().flushall()
        async with redlock(name) as lease:
            assert lease.fence > before


async def test_fences_rise_over_nodes_that_disagree(five: list[Server], name: str) -> None:
    """Counters far apart: the greatest of a majority wins, and a majority knows it before the caller does. The others
    get it in the background, so a witness that is lost later is not missed."""
    key = keys_of(name).fence

    def known() -> list[int]:
        return [int(each.cli().get(key) or 0) for each in five]  # type: ignore[arg-type]

    async with client(five, lease=240.0, max_lease=240.0) as redlock:  # no renewal takes the token to a node
        async with redlock(name) as lease:
            fence = lease.fence
        for ahead, nodes in ((7, five[:1]), (9, five[1:]), (10, five[2:4]), (11, five[:4]), (12, five[3:])):
            for each in nodes:
                each.cli().set(key, fence + 10**ahead)
            async with redlock(name) as lease:
                assert sum(each >= lease.fence for each in known()) >= 3
                assert lease.fence > fence
                fence = lease.fence
                await until(partial(lambda fence: min(known()) >= fence, fence))


async def test_d3_a_server_that_is_out_of_reach_may_have_a_mark(servers: Servers, name: str) -> None:
    """A client has met one of three servers before another client used them all. That one is out of reach by now, and
    the other two restart empty: they cast no vote, since the first one may have the mark of that use."""
    some = [servers.start() for _ in range(3)]
    links = [each.path.with_suffix(".link") for each in some]
    links[0].symlink_to(some[0].path)
    met = Redlock(*(f"unix://{path}" for path in links))
    with pytest.raises(QuorumUnavailable):
        await met(name).acquire(timeout=0)
    async with client(some) as other:
        lease = await other(name, renew=False).acquire(timeout=None)
        links[0].unlink()
        for kind in ("normal", "pubsub"):
            some[0].cli().execute_command("CLIENT", "KILL", "TYPE", kind)  # type: ignore[no-untyped-call]
        await until(lambda: nodes_of(met)[0].error is not None)
        for each, path in zip(some[1:], links[1:], strict=True):
            each.restart()
            path.symlink_to(each.path)
        await until(lambda: all(node.error is None for node in nodes_of(met)[1:]))
        for _ in range(3):
            with pytest.raises(QuorumUnavailable, match="casts no vote for another"):
                await met(name).acquire(timeout=0.3)
        assert lease.held
    await met.aclose()


@pytest.mark.parametrize("how", ["delete", "flushall", "steal"])
@pytest.mark.parametrize("nodes", [1, 5])
async def test_d7_an_operator_deletes_the_key(five: list[Server], name: str, how: str, nodes: int) -> None:
    """The holder finds out at its next renewal, with the reason."""
    async with client(five[:nodes], lease=LONG) as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                for each in five[:nodes]:
                    if how == "delete":
                        each.cli().delete(key_of(name))
                    elif how == "flushall":
                        each.cli().flushall()
                    else:
                        each.cli().set(key_of(name), "somebody else", px=60_000)
                renew_now(lease)
                await asyncio.Event().wait()
        assert caught.value.reason == ("taken" if how == "steal" else "broken")
        assert lease.remaining == 0.0


async def test_d10_info_and_script_are_forbidden(five: list[Server], name: str) -> None:
    """One warning per node; locks work."""
    for each in five:
        each.cli().acl_setuser(
            "app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info", "-script"]
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with Redlock(*(each.url.replace("unix://", "unix://app:pw@") for each in five)) as redlock:
            await back(redlock)  # the last of them may be late
            async with redlock(name) as lease:
                await lease.extend()
            async with redlock(name):
                pass
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(said) == 5
    assert all("forbids" in text and ":pw@" not in text for text in said)


async def test_a_second_loop_remembers_that_servers_were_replaced(five: list[Server], name: str) -> None:
    """All nodes restart empty under a client that knew them: it waits, and so does its next session."""
    nodes = five[:3]
    redlock = client(nodes, patience=0)
    async with redlock, redlock(name):
        pass
    for each in nodes:
        each.restart()
    for _ in range(2):
        with pytest.raises(QuorumUnavailable, match="casts no vote"):
            await redlock.__aenter__()
        with pytest.raises(QuorumUnavailable, match="casts no vote"):
            await redlock(name).acquire(timeout=0)
        await redlock.aclose()


async def test_a_node_that_forgot_the_hold_counts_no_more(five: list[Server], name: str) -> None:
    """A majority was never lost at once, but node by node: the lease ends with what the other nodes still keep."""
    async with client(five[:3], lease=9.0) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        five[2].freeze()
        left = lease.remaining
        while lease.remaining <= left:  # a renewal on the other two
            left = lease.remaining
            await asyncio.sleep(0.005)
        five[0].freeze()
        five[1].cli().delete(key_of(name))
        loop = asyncio.get_running_loop()
        until = loop.time() + lease.remaining
        assert await lease.wait_lost() is True
        assert five[1].cli().exists(key_of(name)) == 0
        assert loop.time() < until  # the lease does not rely on a withdrawn vote
        for each in (five[0], five[2]):
            each.thaw()


async def test_a_slow_node_may_know_that_the_deployment_is_not_new(five: list[Server], name: str) -> None:
    """A majority restarted, and the node that has the mark is slow to answer: no node votes for a new client."""
    nodes = five[:3]
    async with client(nodes) as holder:
        lease = await holder(name, renew=False).acquire(timeout=None)
        for each in nodes[1:]:
            each.restart()
        nodes[0].freeze()
        rival = client(nodes)
        waiting = asyncio.create_task(rival(name).acquire(timeout=3))
        while any(node.facts is None for node in nodes_of(rival)[1:3]):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        nodes[0].thaw()
        with pytest.raises(QuorumUnavailable):
            await waiting
        assert lease.held
        await rival.aclose()
        with pytest.raises(LockLost):
            await lease.release()
