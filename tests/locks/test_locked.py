"""`locked()` is True where another owner's `timeout=0` would be refused, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

import pytest
import redis

from asynclock import Lock, QuorumUnavailable, Redlock
from asynclock.quorum.denials import would_refuse
from asynclock.rules.decide import decide
from asynclock.rules.model import (
    ACQUIRE,
    ID_LENGTH,
    PEEK,
    PEEK_ID,
    Entry,
    Op,
    Queueing,
    Rule,
    Serve,
    State,
    Ticket,
    Verdict,
)
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import Refused, Slots
from tests.support.default_keys import key_of
from tests.support.probes import id_of
from tests.support.servers import Server
from tests.support.still_clock import idle, turns
from tests.support.waiters import LIMIT, back, urls_of

Make = Callable[..., Redlock]

NOW = 1_700_000_000.0


def held(*modes: str) -> tuple[Entry, ...]:
    return tuple(Entry(f"{i:0{ID_LENGTH}x}|{mode}17|1|host|", NOW + 9) for i, mode in enumerate(modes))


def waits(*modes: str, fresh: float = 5.0) -> tuple[Ticket, ...]:
    return tuple(
        Ticket(i, f"{i + 50:0{ID_LENGTH}x}|{mode}17|1|host|", 1, NOW + fresh, NOW + 10, 1)
        for i, mode in enumerate(modes)
    )


STATES: list[tuple[str, Rule, State, bool]] = [
    ("mutex, free", MUTEX, State(), False),
    ("mutex, held", MUTEX, State(held("")), True),
    ("mutex, waited for", MUTEX, State(queue=waits("")), False),
    ("fair, free", FAIR, State(), False),
    ("fair, waited for", FAIR, State(queue=waits("")), True),
    ("fair, a stale ticket", FAIR, State(queue=waits("", fresh=-1)), False),
    ("read, free", READ, State(), False),
    ("read, readers", READ, State(held("r.", "r.")), False),
    ("read, a writer", READ, State(held("w.")), True),
    ("read, a writer waits", READ, State(held("r."), queue=waits("w.")), True),
    ("read, a reader waits", READ, State(queue=waits("r.")), False),
    ("read, a writer waits behind a reader", READ, State(held("r."), queue=waits("r.", "w.")), True),
    ("read, a writer's ticket is stale", READ, State(held("r."), queue=waits("w.", fresh=-1)), False),
    ("write, free", WRITE, State(), False),
    ("write, a reader", WRITE, State(held("r.")), True),
    ("write, a writer waits", WRITE, State(queue=waits("w.")), True),
    ("write, a reader waits", WRITE, State(queue=waits("r.")), True),
    ("write, a stale ticket", WRITE, State(queue=waits("r.", fresh=-1)), False),
    ("semaphore, free", Semaphore(2), State(), False),
    ("semaphore, one is free", Semaphore(2), State(held("s2/.")), False),
    ("semaphore, none is free", Semaphore(2), State(held("s2/.", "s2/.")), True),
    ("semaphore, fewer permits than its holders have", Semaphore(1), State(held("s9/.")), True),
    ("semaphore, more permits than its holders have", Semaphore(3), State(held("s2/.", "s2/.")), False),
    ("semaphore, waited for", Semaphore(2), State(held("s2/."), queue=waits("s2/.")), True),
    ("semaphore, two are free, and one is waited for", Semaphore(2), State(queue=waits("s2/.")), False),
    ("semaphore, one with fewer permits waits", Semaphore(2), State(held("s2/."), queue=waits("s1/.")), False),
]


@pytest.mark.parametrize(("kind", "state", "locked"), [each[1:] for each in STATES], ids=[each[0] for each in STATES])
def test_a_peek_at_one_node(kind: Rule, state: State, locked: bool) -> None:
    """The answer of a node by its state, and it changes nothing. It is that of a real acquire without a ticket."""
    state = State(state.holds, 7, NOW + 9, queue=state.queue, queue_ends=NOW + 10)
    peek = Op(PEEK, kind, "n", PEEK_ID + kind.mode, 0.0, queueing=Queueing(fair=kind.fair))
    reply = decide(kind, state, peek, NOW)
    assert (reply.rank >= 0) is locked
    assert (reply.state, reply.notices) == (state.at(NOW), ())
    other = PEEK_ID.replace("0", "a") + kind.mode
    acquire = Op(ACQUIRE, kind, "n", other, 5.0, queueing=Queueing(Serve.GRANT, kind.fair))
    assert (decide(kind, state, acquire, NOW).verdict is Verdict.NO) is locked


def nodes(*replies: tuple[bool, tuple[int, ...]]) -> list[Refused]:
    """The replies to a peek: whether an attempt enters there, and the slots in use."""
    return [
        Refused(None, rank=-1 if enters else 0, slots=None if slots is None else Slots(slots))
        for enters, slots in replies
    ]


YES, NO = (True, ()), (False, ())
REPLIES: list[tuple[str, Rule, int, list[Refused], bool]] = [
    ("one, free", MUTEX, 1, nodes(YES), False),
    ("one, held", MUTEX, 1, nodes(NO), True),
    ("a minority is held", MUTEX, 5, nodes(YES, YES, YES, NO, NO), False),
    ("a majority is held", MUTEX, 5, nodes(YES, YES, NO, NO, NO), True),
    ("no majority is free among those that answer", MUTEX, 5, nodes(YES, YES, NO), True),
    ("a majority is free among those that answer", MUTEX, 5, nodes(YES, YES, YES, NO), False),
    ("one, a permit is free", Semaphore(2), 1, nodes((True, ())), False),
    ("a slot is free on a majority", Semaphore(2), 3, nodes((True, (0,)), (True, (0,)), (True, (1,))), False),
    ("a slot is taken twice", Semaphore(2), 3, nodes((True, (0,)), (True, (1,)), (True, ())), False),
    ("two, a slot is free at both", Semaphore(2), 2, nodes((True, (0,)), (True, (0,))), False),
    ("two, no slot is free at both", Semaphore(2), 2, nodes((True, (0,)), (True, (1,))), True),
    (
        "each slot is taken on too many",
        Semaphore(2),
        5,
        nodes((True, (0,)), (True, (0,)), (False, (0, 1)), (True, (1,)), (True, (1,))),
        True,
    ),
]


@pytest.mark.parametrize(
    ("kind", "count", "replies", "locked"), [each[1:] for each in REPLIES], ids=[each[0] for each in REPLIES]
)
def test_the_replies_of_all_nodes(kind: Rule, count: int, replies: list[Refused], locked: bool) -> None:
    """A majority must let an attempt enter, over N nodes with one slot."""
    assert would_refuse(replies, count, kind) is locked


# -- on every deployment -----------------------------------------------------------------------------------------------


async def agrees(lock: Lock, locked: bool) -> None:
    """The answer, and what an acquire finds right after it."""
    assert await lock.locked() is locked
    lease = await lock.acquire(timeout=0)
    assert (lease is None) is locked
    if lease is not None:
        await lease.release()


async def test_a_mutex_is_locked_while_it_is_held(make: Make, name: str) -> None:
    """By anybody, also by this client."""
    client, other = make(), make()
    for plain in (True, False):
        await agrees(other(name, fencing=plain), False)
        async with client(name):
            assert await client(name).locked()
            await agrees(other(name, fencing=plain), True)


async def test_a_read_lock_is_locked_for_readers_while_a_writer_has_it(make: Make, name: str) -> None:
    """Readers share it, and a writer is alone."""
    client, other = make(), make()
    async with client.read(name):
        await agrees(other.read(name), False)
        await agrees(other.write(name), True)
    async with client.write(name):
        await agrees(other.read(name), True)
        await agrees(other.write(name), True)
    await agrees(other.write(name), False)


async def test_a_semaphore_is_locked_while_no_permit_is_free(make: Make, name: str) -> None:
    """The permits of the lock that is asked count."""
    client, other = make(), make()
    async with client.semaphore(name, 3):
        await agrees(other.semaphore(name, 2), False)
        await agrees(other.semaphore(name, 1), True)
        async with client.semaphore(name, 3):
            await agrees(other.semaphore(name, 2), True)
            await agrees(other.semaphore(name, 3), False)
            async with client.semaphore(name, 3):
                await agrees(other.semaphore(name, 3), True)


async def test_several_names_are_locked_while_one_of_them_is(make: Make, name: str) -> None:
    """Each part by the rule of its own kind."""
    client, other = make(), make()
    asked = other.multi(f"{name}:a", other.read(f"{name}:b"), other.semaphore(f"{name}:c", 2))
    await agrees(asked, False)
    for taken, locked in (
        (client(f"{name}:a"), True),
        (client.read(f"{name}:b"), False),
        (client.write(f"{name}:b"), True),
        (client.semaphore(f"{name}:c", 2), False),
        (client.semaphore(f"{name}:c", 1), False),
        (client.multi(client.semaphore(f"{name}:c", 2), f"{name}:d"), False),
    ):
        async with taken:
            await agrees(asked, locked)
    async with client.semaphore(f"{name}:c", 2), client.semaphore(f"{name}:c", 2):
        await agrees(asked, True)


async def test_a_semaphore_is_locked_while_no_slot_is_free_on_a_majority(shared_urls: list[str], name: str) -> None:
    """Two holders of two permits, each known to a majority only: at most nodes there is room for one more, but no slot
    has a majority. So it is for a lock of several names."""
    async with (
        Redlock(*shared_urls, lease=60, node_timeout=5.0) as client,
        Redlock(*shared_urls, node_timeout=5.0) as other,
    ):
        await back(client)
        asked = other.semaphore(name, 2), other.multi(other.semaphore(name, 2), f"{name}:x")
        first, second = [await client.semaphore(name, 2).acquire(timeout=None) for _ in range(2)]
        await client.health()  # over the same connections: each node has carried out both acquires, not only a majority
        for lease, urls in ((first, shared_urls[3:]), (second, shared_urls[:2])):
            for url in urls:  # a minority has forgotten it
                with closing(redis.Redis.from_url(url)) as cli:
                    assert cli.zrem(key_of(name), id_of(lease)) == 1
        assert [await lock.locked() for lock in asked] == [True, True]
        await first.release()
        assert [await lock.locked() for lock in asked] == [False, False]
        await second.release()


async def waiting(client: Redlock, lock: Lock) -> asyncio.Task[object]:
    """A task that waits at the servers."""
    task: asyncio.Task[object] = asyncio.create_task(lock.acquire(timeout=None))
    async with asyncio.timeout(LIMIT):
        while not (idle(client) and (await client.inspect(lock.name)).waiters):
            await asyncio.sleep(0.005)
    return task


async def given_up(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait({task})
    await turns()


async def test_readers_find_it_locked_while_a_writer_waits(make: Make, name: str) -> None:
    """A writer that waits behind readers holds new readers back. Once it gives up, they enter."""
    client, writer, other = make(lease=60), make(lease=60), make()
    async with client.read(name):
        task = await waiting(writer, writer.write(name))
        await agrees(other.read(name), True)
        await given_up(task)
        async with asyncio.timeout(LIMIT):
            while await other.read(name).locked():
                await asyncio.sleep(0.005)
        await agrees(other.read(name), False)


async def test_an_answer_needs_a_majority(five: list[Server], name: str) -> None:
    """With two of five servers dead it is right. Without a majority there is none."""
    async with Redlock(*urls_of(five), node_timeout=5.0) as client, Redlock(*urls_of(five), node_timeout=5.0) as other:
        await back(other)
        async with client.read(name):
            for server in five[:2]:
                server.kill()
            await agrees(other.write(name), True)
            await agrees(other.read(name), False)
        await agrees(other.write(name), False)
        five[2].kill()
        with pytest.raises(QuorumUnavailable):
            await other.write(name).locked()
