"""A name that several clients hold over N nodes, where the nodes name different holders: it counts as held, and a
waiter does not poll (HAZARDS E19). No waiter waits for votes that attempts have split (E14)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from random import random
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.protocol.planner import Obstacles, after_doubt
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.denials import first_free, holder_of, is_held, soonest
from asynclock.rules.model import ID_LENGTH, Entry, Op, Verb
from asynclock.rules.rwlock import WRITE
from asynclock.stores.port import Refused
from tests.support.cancelled_waits import connected
from tests.support.default_keys import key_of
from tests.support.distant_stores import Beyond
from tests.support.memory_probes import set_state
from tests.support.probes import (
    acquisitions_of,
    clock_of,
    id_of,
    most_known_ids,
    probe_nodes,
    sleeps_until,
    stop_renewals_of,
    tag_of,
)
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, calls, until, urls_of

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "readers": (lambda client, name, many: client.read(name), lambda client, name, many: client.write(name)),
    "permits": (lambda client, name, many: client.semaphore(name, many),) * 2,
}
"""The lock of a holder, of which there are so many, and that of a waiter."""

HANDFUL = 8
"""The most scripts at each node until a waiter knows the holders in its way."""

kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("nodes", [3, 5])


# -- the holders in the way --------------------------------------------------------------------------------------------


class Crowded(Beyond):
    """As many clients hold a name as there are nodes, each at another distance from each node, so that each node names
    another of them."""

    def __init__(self, nodes: int, name: str, kind: str) -> None:
        super().__init__(nodes, name, way=0.001)
        self.holds, self.wants = KINDS[kind]
        self.nodes = nodes

    @asynccontextmanager
    async def crowd(self) -> AsyncIterator[tuple[Redlock, list[Lease]]]:
        """One more client, and the leases of the others."""
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.opened()) for _ in range(self.nodes + 1)]
            for place, client in enumerate(clients):
                await client.health()
                for index, store in enumerate(self.far):
                    store.ways[tag_of(client)] = 0.001 + 0.002 * ((place + index) % self.nodes)
            asking = [
                asyncio.create_task(self.holds(client, self.name, self.nodes).acquire(timeout=None))
                for client in clients[1:]
            ]
            await self.finish(*asking)
            leases = [task.result() for task in asking]
            await self.extend(leases)
            yield clients[0], leases

    async def extend(self, leases: list[Lease]) -> None:
        """All at one moment; they arrive one after the other, at each node in another order."""
        await self.pass_time(0.1)
        await self.finish(*(asyncio.create_task(lease.extend()) for lease in leases))
        await self.pass_time(0.1)

    def asked_each(self) -> int:
        """So often has the node that was asked most often been asked for the lock since the last look."""
        found = [sum(verb in (Verb.ACQUIRE, Verb.WAIT) for verb, _ in store.asked) for store in self.stores]
        for store in self.stores:
            store.asked.clear()
        return max(found)


@kinds
@both
async def test_e19_refused_by_a_majority_is_held(name: str, nodes: int, kind: str) -> None:
    """No id is named by a majority, and locked() is True all the same. After the last release it is False."""
    crowded = Crowded(nodes, name, kind)
    async with crowded.crowd() as (other, leases):
        lock = crowded.wants(other, name, nodes)
        looking = asyncio.create_task(probe_nodes(lock))
        await crowded.finish(looking)
        assert looking.result().holder() is None
        looking = asyncio.create_task(lock.locked())
        await crowded.finish(looking)
        assert looking.result() is True
        await crowded.finish(*(asyncio.create_task(lease.release()) for lease in leases))
        looking = asyncio.create_task(lock.locked())
        await crowded.finish(looking)
        assert looking.result() is False


@kinds
@both
@pytest.mark.parametrize("renewed", ["together", "one by one"])
async def test_e19_a_waiter_for_several_holders_does_not_poll(name: str, nodes: int, kind: str, renewed: str) -> None:
    """It sends a handful of scripts at the start, then only the renewals of its ticket, although the holders' renewals
    change which of them the nodes name. The release reaches it at once."""
    crowded = Crowded(nodes, name, kind)
    async with crowded.crowd() as (other, leases):
        if renewed == "one by one":
            for lease in leases:
                await crowded.pass_time(1.7, 0.02)
                await crowded.finish(asyncio.create_task(lease.extend()))
        crowded.asked_each()
        waiting = asyncio.create_task(crowded.wants(other, name, nodes).acquire(timeout=None))
        await crowded.pass_time(1.0)
        assert crowded.asked_each() <= HANDFUL
        await crowded.pass_time(6.5, 0.05)
        assert crowded.asked_each() <= 1  # by then no attempt of a far client could have lived so long
        await crowded.pass_time(80.0, 0.05)
        assert crowded.asked_each() <= 80.0 / (30.0 / 3 * 0.8) + (renewed == "one by one") * HANDFUL
        assert not waiting.done()
        assert all(lease.held for lease in leases)
        await crowded.finish(*(asyncio.create_task(lease.release()) for lease in leases))
        await crowded.finish(waiting, within=1.0)
        await crowded.finish(asyncio.create_task(waiting.result().release()))


@kinds
@both
async def test_e19_holders_that_die_are_followed(name: str, nodes: int, kind: str) -> None:
    """No holder renews or releases: the waiter is granted when the first of them (permits) or the last of them ends."""
    crowded = Crowded(nodes, name, kind)
    async with crowded.crowd() as (other, leases):
        for lease in leases:
            stop_renewals_of(lease)
        waiting = asyncio.create_task(crowded.wants(other, name, nodes).acquire(timeout=None))
        await crowded.pass_time(29.5, 0.05)
        assert not waiting.done()
        await crowded.finish(waiting, within=1.0)
        await crowded.finish(asyncio.create_task(waiting.result().release()))


@kinds
async def test_e19_real_servers(five: list[Server], name: str, kind: str) -> None:
    """The same with five holders at five servers each of which names another: a handful of scripts until it waits, and
    the release serves it."""
    holds, wants = KINDS[kind]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Redlock(*urls_of(five), lease=LONG, node_timeout=5.0)) for _ in range(6)
        ]
        for client in clients:
            await until(partial(connected, client))
        leases = [await holds(client, name, 5).acquire(timeout=None) for client in clients[1:]]
        for server, lease in zip(five, leases, strict=True):
            await until(lambda server=server: count(server, name) == 5)  # type: ignore[misc]
            with server.cli() as cli:  # the last end of a reader is what is named, and the first of a permit
                cli.zincrby(key_of(name), 20_000 if kind == "readers" else -20_000, id_of(lease))
        lock = wants(clients[0], name, 5)
        assert (await probe_nodes(lock)).holder() is None
        assert await lock.locked()
        before = [calls(server) for server in five]
        waiting = asyncio.create_task(lock.acquire(timeout=None))
        clock = clock_of(clients[0])
        await until(lambda: any(sleeps_until(each) > clock.now() + 5.0 for each in acquisitions_of(clients[0])))
        assert all(calls(server) - was <= 2 * HANDFUL for server, was in zip(five, before, strict=True))
        for lease in leases:
            await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


def count(server: Server, name: str) -> int:
    """So many hold it there."""
    with server.cli() as cli:
        found: Any = cli.zcard(key_of(name))
    return int(found)


# -- votes that are split --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seen", [0.002, 0.05, 0.09])
async def test_e14_attempts_are_not_waited_for(name: str, nodes: int, seen: float) -> None:
    """Another attempt holds each node for a while. Then all are undone without a notice. The writer is granted a moment
    later, long before its ticket is renewed or any of the attempts would have ended."""
    still = Still(nodes, name)
    async with still.client() as client:
        await client.health()
        ends = still.stores[0].now() + 30.0
        for index, store in enumerate(still.stores):
            attempt = Entry(f"{index:0{ID_LENGTH}x}|w.1|1|host|", ends)
            set_state(store, name, replace(state_of(store, name), holds=(attempt,)))
        waiting = asyncio.create_task(client.write(name).acquire(timeout=None))
        undone = still.clock.now() + seen
        while still.clock.now() < undone:
            await turns()
            still.clock.advance(0.001)
        for store in still.stores:
            set_state(store, name, replace(state_of(store, name), holds=()))
        while not waiting.done():
            still.clock.advance(0.001)
            await turns()
            assert still.clock.now() < undone + 1.0
        await waiting.result().release()


# -- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["semaphore", "multi"])
async def test_permits_that_a_minority_misses_are_taken(name: str, kind: str) -> None:
    """Three permits over five nodes, each on a majority and not on all nodes: each node has one to give, and none is
    free at a majority. An acquire finds that out by a few tries, and then waits."""
    still = Still(5, name)
    async with still.client(lease=60.0, renew=False) as client, still.client(lease=60.0) as other:
        leases: list[Any] = [await client.semaphore(name, 3).acquire(timeout=None) for _ in range(3)]
        for number, lease in enumerate(leases):
            for store in (still.stores[number], still.stores[number + 1]):
                state = state_of(store, name)
                others = tuple(each for each in state.holds if each.id != id_of(lease))
                set_state(store, name, replace(state, holds=others))
        still.asked()
        lock = other.semaphore(name, 3)
        waiting = asyncio.create_task((other.multi(lock) if kind == "multi" else lock).acquire(timeout=None))
        end = still.clock.now() + 10.0
        while still.clock.now() < end:
            await turns()
            still.clock.advance(0.01)
        tries = [verb for verb, _ in still.asked() if verb in (Verb.ACQUIRE, Verb.WAIT)]
        assert len(tries) <= 2 * HANDFUL
        await leases[0].release()
        while not waiting.done():
            await turns()
            still.clock.advance(0.01)
            assert still.clock.now() < end + 1.0
        await waiting.result().release()


# -- pure ------------------------------------------------------------------------------------------------------------

FREE = Refused(None)


@pytest.mark.parametrize(
    ("denials", "nodes", "held", "first", "one"),
    [
        ([], 3, False, 0.0, None),
        ([Refused(0.9, "a")], 1, True, 0.9, Refused(0.9, "a")),
        ([Refused(math.inf, "a")], 1, True, math.inf, Refused(math.inf, "a")),
        ([FREE, FREE, Refused(0.9, "a")], 3, False, 0.0, None),
        ([FREE, Refused(0.8, "b"), Refused(0.9, "a")], 3, True, 0.8, None),
        ([Refused(0.7, "c"), Refused(0.8, "b"), Refused(0.9, "a")], 3, True, 0.8, None),
        ([Refused(0.7, "c"), Refused(math.inf, "b"), Refused(math.inf, "a")], 3, True, math.inf, None),
        ([Refused(0.7, "a"), Refused(math.inf, "b"), Refused(0.9, "a")], 3, True, 0.9, Refused(0.7, "a")),
        ([Refused(0.8, "b"), Refused(0.9, "a")], 3, True, 0.8, None),  # the third let it in, or says nothing
        ([Refused(0.8, "a"), Refused(0.9, "a")], 4, False, 0.8, None),  # two are no majority
        ([Refused(0.8, "a"), Refused(0.9, "a")], 5, False, 0.0, None),
        ([Refused(0.7, "c"), Refused(0.8, "b"), Refused(0.9, "a")], 5, True, 0.7, None),
        ([Refused(0.6, "d"), Refused(0.7, "c"), Refused(0.8, "b"), Refused(0.9, "a")], 5, True, 0.7, None),
        (
            [Refused(0.5, "e"), Refused(0.6, "d"), Refused(0.7, "c"), Refused(0.8, "b"), Refused(0.9, "a")],
            5,
            True,
            0.7,
            None,
        ),
    ],
)
def test_the_summary_of_denials(
    denials: list[Refused], nodes: int, held: bool, first: float, one: Refused | None
) -> None:
    """Held by a majority, under whichever ids; the earliest moment at which a majority could be free; and the one
    holder."""
    assert is_held(denials, nodes) is held
    assert first_free(denials, nodes) == first
    assert holder_of(denials, nodes) == one


def test_the_first_hold_that_ends() -> None:
    """It is never, where none has an end."""
    assert soonest([FREE, Refused(math.inf, "a"), Refused(0.7, "b"), Refused(0.9, "c")]) == 0.7
    assert soonest([FREE, Refused(math.inf, "a")]) == math.inf


def test_since_when_ids_are_known() -> None:
    """The longest time for which a majority of the ids that the nodes name has been known, at whichever node."""
    seen = Obstacles(random, 0.1)
    assert seen.since([Refused(9.0, "a"), Refused(9.0, "b"), Refused(9.0, "c")], 3, 1.0) == 1.0
    assert seen.since([Refused(9.0, "a"), Refused(9.0, "d"), Refused(9.0, "e")], 3, 2.0) == 2.0
    assert seen.since([Refused(9.0, "b"), FREE, Refused(9.0, "c")], 3, 3.0) == 1.0
    assert seen.since([Refused(9.0, "d"), Refused(9.0, "d"), Refused(9.0, "x")], 3, 4.0) == 2.0
    assert seen.since([Refused(9.0, "x"), Refused(9.0, "y"), Refused(9.0, "z")], 3, 5.0) == 5.0


def test_ids_are_forgotten() -> None:
    """However many have come and gone, a few are kept: those that were named last."""
    seen = Obstacles(random, 0.1)
    for number in range(1_000):
        seen.since([Refused(9.0, "stays"), Refused(9.0, "stays"), Refused(9.0, str(number))], 3, float(number))
    assert most_known_ids(seen) <= 64
    assert seen.since([Refused(9.0, "stays"), Refused(9.0, "stays"), Refused(9.0, "new")], 3, 2_000.0) == 0.0
    assert seen.since([Refused(9.0, "0"), Refused(9.0, "1"), Refused(9.0, "2")], 3, 2_000.0) == 2_000.0


def refused(verb: Verb, sent: float, *ids: str) -> Ballot:
    """By nodes that name these, each for another 20 s."""
    made = Ballot(Op(verb, WRITE, "name", "id", 30.0), len(ids), sent, sent + 0.05)
    for index, whose in enumerate(ids):
        made.answer(index, Refused(20.0, f"{whose:0>{ID_LENGTH}}|w.1|1|host|", 0, 1))
    return made


def test_the_pauses_grow_while_others_are_served() -> None:
    """New ids at each probe: after a few tries the waiter only probes, later and later, at last with each renewal."""
    seen, now, verb = Obstacles(random, 0.1), 100.0, Verb.ACQUIRE
    pauses: list[float] = []
    for number in range(14):
        look = seen.plan(refused(verb, now, *(f"{number}{each}" for each in "abc")), now + 0.001, 0.001, 0)
        assert look.probe is (number >= 3)
        verb = Verb.WAIT if look.probe else verb
        pauses.append(look.at - now)
        now = look.at
    assert all(pause < 0.1 for pause in pauses[:3])
    assert pauses[5:11] == sorted(pauses[5:11])
    assert sum(pauses) > 30.0
    assert all(8.0 <= pause <= 10.0 for pause in pauses[-3:])


def test_holds_are_waited_for_once_they_are_known() -> None:
    """The same ids at a probe that an attempt could not have lived to see: then only a renewal is due. New ids at a
    renewal cost one more probe."""
    seen = Obstacles(random, 0.1)
    assert seen.plan(refused(Verb.ACQUIRE, 100.0, *"abc"), 100.01, 0.01, 0).at < 100.1
    assert seen.plan(refused(Verb.ACQUIRE, 100.109, *"abc"), 100.11, 0.01, 0).at < 100.2
    look = seen.plan(refused(Verb.ACQUIRE, 100.111, *"bca"), 100.12, 0.01, 0)
    assert look.probe
    assert look.at >= 108.0
    look = seen.plan(refused(Verb.WAIT, 109.0, *"def"), 109.01, 0.01, 0)
    assert look.probe
    assert 109.11 <= look.at <= 109.13
    assert seen.plan(refused(Verb.WAIT, look.at, *"fed"), look.at + 0.01, 0.01, 0).at >= look.at + 8.0


def test_f17_an_attempt_of_a_far_client() -> None:
    """The same ids at a probe that an attempt of this client could not have lived to see. A client that is farther from
    the nodes has more time: the waiter probes soon again, with pauses that grow, until no client's attempt could have
    lived so long."""
    seen, now, probes = Obstacles(random, 0.1, 6.0), 100.0, list[float]()
    verb = Verb.ACQUIRE
    while now < 106.0:
        look = seen.plan(refused(verb, now, *"abc"), now + 0.001, 0.001, 0)
        verb = Verb.WAIT if look.probe else verb
        now = look.at
        probes.append(now - 100.0)
    waited = [each for each in probes if each >= 0.1]
    assert 0.1 <= waited[0] <= 0.13
    assert waited[1] <= 0.7  # an attempt of half a second costs the waiter no more than this
    assert len(waited) <= 5
    assert seen.plan(refused(Verb.WAIT, now, *"cab"), now + 0.001, 0.001, 0).at >= now + 8.0


def test_after_doubt_is_bounded_by_the_renewal() -> None:
    """Whatever has gone on before."""
    assert after_doubt(random, 100.0, 100.0, 0.3, 100.0, 0.2, 0) <= (100.1, True)
    assert 108.0 <= after_doubt(random, 100.0, 100.0, 30.0, 100.0, 0.1, 1_000).at <= 110.0
