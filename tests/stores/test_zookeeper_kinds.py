"""What is particular to the kinds of locks in ZooKeeper, and to its permissions. The promises of all kinds are tested
over it by the modules of `deployments.py`."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Create2
from kazoo.security import make_acl, make_digest_acl

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock, Skipped, Unsupported
from asynclock.stores.port import PROBE
from asynclock.stores.zookeeper import ZooKeeperStore, looks
from tests.support.cancelled_waits import nothing_is_left
from tests.support.probes import acquisitions_of, nodes_of, waits_for_notice
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import SOON, client_of
from tests.support.zookeeper_probes import (
    connection_of,
    contenders_of,
    held_request,
    most_sent,
    seen_at,
    watchers_of,
)

DONE_FOR = 8.0
"""Seconds for which a run counts as done: on a busy machine a program of kazoo needs some of them to start."""


@pytest.fixture
async def clients(shared_zookeeper: ZooKeeper) -> AsyncIterator[list[Redlock]]:
    found = [client_of(shared_zookeeper, 60.0) for _ in range(3)]
    async with found[0], found[1], found[2]:
        yield found


async def test_all_permits_are_used(clients: list[Redlock], name: str) -> None:
    """Each holder that leaves makes room for one waiter, whichever of them it is. No waiter is forgotten."""
    inside: set[int] = set()
    leave = [asyncio.Event() for _ in range(9)]

    async def work(number: int) -> None:
        async with clients[number % 3].semaphore(name, 3):
            inside.add(number)
            await leave[number].wait()
            inside.remove(number)

    tasks = [asyncio.create_task(work(number)) for number in range(9)]
    for left in range(9, 0, -1):
        await until(lambda left=left: len(inside) == min(3, left))
        assert most_sent(*clients) <= 1  # none was found only by its renewal, after 16 s
        leaver = max(inside) if left % 2 else min(inside)
        leave[leaver].set()
        await until(lambda leaver=leaver: leaver not in inside)
    await asyncio.gather(*tasks)


async def test_a_waiter_enters_before_the_next_one_watches_it(clients: list[Redlock], name: str) -> None:
    """The next one does not wait until it leaves, but for the next permit."""
    holds, first, second = (each.semaphore(name, 2) for each in clients)
    one, two = [await holds.acquire(timeout=None) for _ in range(2)]
    entering = asyncio.create_task(first.acquire(timeout=None))
    await until(lambda: any(each.waits for each in contenders_of(clients[1]).values()))
    with held_request(clients[2], "watch", lambda: True) as reached:
        waiting = asyncio.create_task(second.acquire(timeout=None))
        await reached.wait()
        await one.release()
        await entering
        await connection_of(clients[1]).exists("/")  # the servers have all that it sent before
    await two.release()
    async with asyncio.timeout(LIMIT):
        await waiting
    assert most_sent(clients[2]) == 1


async def test_one_enters_that_the_next_one_took_for_a_waiter(clients: list[Redlock], name: str) -> None:
    """It never waited, since a holder left before it read the children. The next one read them before."""
    holds, first, second = (each.semaphore(name, 2) for each in clients)
    one, two = [await holds.acquire(timeout=None) for _ in range(2)]
    with held_request(
        clients[1], "children", lambda: any(each.nodes for each in contenders_of(clients[1]).values())
    ) as reached:
        entering = asyncio.create_task(first.acquire(timeout=None))
        await reached.wait()
        waiting = asyncio.create_task(second.acquire(timeout=None))
        await until(lambda: any(each.watcher for each in contenders_of(clients[2]).values()))
        await connection_of(clients[2]).exists("/")
        await one.release()
    await entering
    await two.release()
    async with asyncio.timeout(LIMIT):
        await waiting
    assert most_sent(clients[2]) == 1


async def test_waiters_with_other_numbers_of_permits(clients: list[Redlock], name: str) -> None:
    """Each enters while fewer than its own number hold the name, and does not wait for one that needs fewer holders."""
    first, second = [await clients[0].semaphore(name, 5).acquire(timeout=None) for _ in range(2)]
    one = asyncio.create_task(clients[1].semaphore(name, 1).acquire(timeout=None))
    await until(lambda: any(each.waits for each in contenders_of(clients[1]).values()))
    third = await clients[2].semaphore(name, 4).acquire(timeout=LIMIT)
    four = asyncio.create_task(clients[2].semaphore(name, 4).acquire(timeout=None))
    await until(lambda: any(each.waits for each in contenders_of(clients[2]).values()))
    await second.release()
    async with asyncio.timeout(LIMIT):
        fourth = await four
        assert not one.done()
        for lease in (first, third, fourth):
            assert lease is not None
            await lease.release()
        await (await one).release()


async def test_a_waiter_with_fewer_permits_waits_for_holders_behind_it(clients: list[Redlock], name: str) -> None:
    """They came later, and entered because they have more permits. It enters when the last of them has left."""
    first = await clients[0].semaphore(name, 5).acquire(timeout=None)
    one = asyncio.create_task(clients[1].semaphore(name, 1).acquire(timeout=None))
    await until(lambda: any(each.watcher for each in contenders_of(clients[1]).values()))
    (waiter,) = contenders_of(clients[1]).values()
    await connection_of(clients[1]).exists("/")  # the server has its watch of all children
    watches = waiter.watch
    second = await clients[2].semaphore(name, 5).acquire(timeout=LIMIT)
    assert second is not None
    await until(lambda: waiter.watch >= watches + 1)  # it has looked again
    await connection_of(clients[1]).exists("/")
    await first.release()
    await until(lambda: waiter.watch >= watches + 2)
    assert not waiter.granted
    await second.release()
    async with asyncio.timeout(LIMIT):
        await (await one).release()


async def test_e2_a_release_wakes_one_waiter(clients: list[Redlock], name: str, shared_zookeeper: ZooKeeper) -> None:
    """Of ten, each in a task of its own: the others send nothing. Counted by the server."""

    def received() -> int:
        return next(
            int(line.split("\t")[1]) for line in shared_zookeeper.ask("mntr").splitlines() if "packets_received" in line
        )

    lease = await clients[0](name).acquire(timeout=None)
    waiting = [asyncio.create_task(clients[1](name, fair=True).acquire(timeout=None)) for _ in range(10)]
    await until(lambda: sum(each.waits for each in contenders_of(clients[1]).values()) == 10)
    before = received()
    await lease.release()
    done, pending = await asyncio.wait(waiting, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    await asyncio.sleep(0.2)  # time in which a herd would come
    assert received() - before < 20  # a delete, a few questions of one waiter, pings; ten waiters would ask 30
    for task in waiting:
        await (await task).release()
    assert not pending & done


async def test_waiters_that_give_up_leave_no_watchers(clients: list[Redlock], name: str) -> None:
    """kazoo keeps a watcher until the node changes, here until the holder releases: all waiters share one."""
    holds, waits = clients[:2]
    async with holds(name):
        for _ in range(5):
            waiting = asyncio.create_task(waits(name).acquire(timeout=None))
            await until(lambda: [waits_for_notice(each) for each in acquisitions_of(waits)] == [True])
            waiting.cancel()
            await asyncio.wait({waiting})
        gc.collect()
        assert watchers_of(waits) == 1


async def test_a_node_that_is_gone_is_not_watched(clients: list[Redlock], name: str) -> None:
    """It never comes again, so the watch would stay for as long as the session."""
    client = clients[0]
    async with client(name):
        await until(lambda: watchers_of(client) == 1)  # of its own node, with its callback at kazoo
    fired: list[None] = []
    connection = connection_of(client)
    assert not await connection.watch(f"/locks/{name}/0", partial(fired.append, None))
    assert watchers_of(client) == 0


async def test_a_waiter_for_several_names_is_not_overtaken_for_ever(clients: list[Redlock], name: str) -> None:
    """Single locks of its names come and go, and there is always one that waits. After some refusals it closes one of
    its names."""
    names = [f"{name}:a", f"{name}:b"]
    counts: Counter[str] = Counter()
    stop = asyncio.Event()

    async def busy(client: Redlock, which: str) -> None:
        while not stop.is_set():
            async with client(which, fair=True):
                counts[which] += 1
                await asyncio.sleep(0.002)

    tasks = [asyncio.create_task(busy(clients[number % 2], names[number % 2])) for number in range(8)]
    await until(lambda: all(counts[each] > 5 for each in names))
    async with asyncio.timeout(LIMIT), clients[2].multi(*names) as lease:
        before = counts.copy()
        await asyncio.sleep(0.05)
        assert counts == before
        assert lease.held
    stop.set()
    await asyncio.gather(*tasks)


async def test_a_wait_for_several_names_that_is_cut_leaves_no_ticket(clients: list[Redlock], name: str) -> None:
    """Its ticket would stay as long as its session, and the next one would wait for it."""
    holds, waits = clients[:2]
    names = [f"{name}:a", f"{name}:b"]
    async with holds(names[1]):
        waiting = asyncio.create_task(waits.multi(*names).acquire(timeout=None))
        await until(lambda: any(each.ticket for each in contenders_of(waits).values()))
        waiting.cancel()
        await asyncio.wait({waiting})
    await until(lambda: not any(map(contenders_of, clients)))
    for each in names:
        await nothing_is_left([holds, waits], each)


async def test_d7_a_node_that_an_operator_deletes(
    clients: list[Redlock], name: str, shared_zookeeper: ZooKeeper
) -> None:
    """With ZooKeeper's own tools. The holder learns it at once, by its watch."""
    operator = KazooClient(shared_zookeeper.address)
    operator.start()
    with pytest.raises(LockLost) as lost:
        async with asyncio.timeout(LIMIT), clients[0](name):
            await until(lambda: watchers_of(clients[0]) == 1)
            operator.delete(f"/locks/{name}", recursive=True)
            await asyncio.Event().wait()
    assert lost.value.reason == "broken"
    operator.stop()
    operator.close()
    async with asyncio.timeout(LIMIT), clients[1](name):
        pass


async def test_a_waiter_whose_node_an_operator_deletes(
    clients: list[Redlock], name: str, shared_zookeeper: ZooKeeper
) -> None:
    """It finds that when the holder before it leaves, and enqueues again at once: not at its renewal, after 16 s."""
    operator = KazooClient(shared_zookeeper.address)
    operator.start()
    async with clients[0](name):
        waiting = asyncio.create_task(clients[1](name).acquire(timeout=None))
        await until(lambda: [waits_for_notice(each) for each in acquisitions_of(clients[1])] == [True])
        _, node = sorted(operator.get_children(f"/locks/{name}"), key=lambda each: each[-10:])
        operator.delete(f"/locks/{name}/{node}")
    async with asyncio.timeout(SOON):
        await (await waiting).release()
    operator.stop()
    operator.close()


@pytest.mark.parametrize("reply", ["arrives", "is lost"])
async def test_an_operator_deletes_one_of_several_nodes_at_once(
    clients: list[Redlock], name: str, reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the client knows that it holds them all. It deletes the others, which would stay with its session."""
    client, other = clients[:2]
    names = [f"{name}:{each}" for each in "ab"]
    async with client.multi(*names):
        pass
    connection = connection_of(client)
    create_all = connection.create_all

    async def deleted(nodes: Any) -> list[str]:
        paths: list[str] = await create_all(nodes)
        await connection.delete(paths[0])
        monkeypatch.undo()
        if reply == "is lost":
            raise ConnectionLoss
        return paths

    monkeypatch.setattr(connection, "create_all", deleted)
    async with asyncio.timeout(LIMIT / 2):
        with pytest.raises(QuorumUnavailable):
            await client.multi(*names).acquire(timeout=0)
        for each in names:
            async with other(each):
                pass
    await until(lambda: not contenders_of(client))


async def test_d7_a_deleted_hold_is_lost_although_its_ticket_stayed(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost twice when the ticket was to be deleted: after the grant, and after the nodes were gone.
    A hold without nodes would be extended for ever."""
    client, other = clients[:2]
    names, lost = [f"{name}:{each}" for each in "ab"], list[str]()
    async with client.multi(*names):
        pass
    connection = connection_of(client)
    delete = connection.delete

    async def deleted(path: str) -> bool:
        if ("__wait__" in path or "__next__" in path) and len(lost) < 2:
            lost.append(path)
            raise ConnectionLoss
        return bool(await delete(path))

    monkeypatch.setattr(connection, "delete", deleted)
    async with asyncio.timeout(LIMIT):
        async with other(names[1]):
            asking = asyncio.create_task(client.multi(*names).acquire(timeout=None))
            await until(lambda: any(each.ticket for each in contenders_of(client).values()))
        lease = await asking
        await until(lambda: len(lost) == 1)
        await other.break_lock(names[0])
        await until(lambda: len(lost) == 2)
        with pytest.raises(LockLost):
            await lease.extend()
    await until(lambda: not contenders_of(client))


async def test_a_check_without_an_answer_leaves_no_node(clients: list[Redlock]) -> None:
    """It would stay for as long as the session, one for each call of `health`. The next check deletes it."""
    client = clients[0]
    assert (await client.health()).ok
    (node,) = nodes_of(client)
    before = len(await seen_at(node, PROBE))
    with held_request(client, "delete", lambda: True) as reached:
        checking = asyncio.create_task(client.health())
        await reached.wait()
        checking.cancel()
        await asyncio.wait({checking})
    assert (await client.health()).ok
    assert len(await seen_at(node, PROBE)) <= before


def test_what_it_cannot_keep_is_unsupported_when_the_lock_is_made() -> None:
    """With the reason, and without a server."""
    client = Redlock("zookeeper://127.0.0.1:1/locks")
    with pytest.raises(Unsupported, match="session_timeout=10"):
        client("a", lease=10)
    with pytest.raises(Unsupported, match="min_hold"):
        client("a", min_hold=1)
    with pytest.raises(Unsupported, match="TTL"):
        client.once("a", within=60)
    with pytest.raises(ConfigError, match="prefix"):
        Redlock("zookeeper://127.0.0.1:1/locks", prefix="a:")
    with pytest.raises(ConfigError):
        Redlock("zookeeper://127.0.0.1:1/locks", "redis://b", "redis://c")


async def test_detach_is_unsupported(clients: list[Redlock], name: str) -> None:
    async with clients[0](name) as lease:
        with pytest.raises(Unsupported, match="session"):
            await lease.detach()
        with pytest.raises(Unsupported, match="session"):
            await lease.extend(lease=5)
        assert lease.held


@pytest.mark.parametrize("layout", ["kazoo", "curator"])
async def test_once_with_ttl_nodes(shared_zookeeper: ZooKeeper, name: str, layout: str) -> None:
    """One run in two clients completes. Its mark keeps out other clients and other programs, and ends by itself."""
    url = shared_zookeeper.url(f"/once-{layout}", ttl_nodes="true", layout=layout)
    runs, running, end = 0, asyncio.Event(), asyncio.Event()

    def job(client: Redlock) -> Callable[[], Coroutine[Any, Any, str | Skipped]]:
        @client.once(name, within=DONE_FOR)
        async def run() -> str:
            nonlocal runs
            runs += 1
            running.set()
            await end.wait()
            return "ran"

        return run

    async with Redlock(url) as one, Redlock(url) as two, asyncio.timeout(LIMIT + DONE_FOR):
        first, second = job(one), job(two)
        ran = asyncio.create_task(first())
        await running.wait()
        assert await second() is Skipped.RUNNING
        end.set()
        assert await ran == "ran"
        assert (await first(), await second(), runs) == (Skipped.DONE, Skipped.DONE, 1)
        assert [holder.metadata for holder in (await two.inspect(name)).holders] == ["(done)"]
        if layout == "kazoo":
            assert not await asyncio.to_thread(tried, shared_zookeeper, f"/once-kazoo/{name}")
        while await second() != "ran":  # RUNNING, if the mark ends between two questions of one try
            await asyncio.sleep(0.05)
        assert runs == 2


def tried(server: ZooKeeper, path: str) -> bool:
    """Whether a lock of kazoo is free."""
    other = KazooClient(server.address)
    other.start()
    got: bool = other.Lock(path).acquire(blocking=False)
    other.stop()
    other.close()
    return got


@pytest.mark.parametrize("layout", ["kazoo", "curator"])
async def test_the_end_of_a_mark_of_once(shared_zookeeper: ZooKeeper, name: str, layout: str) -> None:
    """Operators see how long the mark lives, not the session timeout."""
    async with Redlock(shared_zookeeper.url(f"/once-{layout}", ttl_nodes="true", layout=layout)) as client:

        @client.once(name, within=3600)
        async def run() -> None:
            (mine,) = (await client.inspect(name)).holders
            assert mine.remaining == 30.0

        await run()
        (mark,) = (await client.inspect(name)).holders
    assert mark.metadata == "(done)"
    assert mark.remaining is not None
    assert 3590 < mark.remaining <= 3601


async def test_a_run_of_once_for_longer_than_a_node_can_live(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Its mark lives for 34 years. The client works on."""
    async with Redlock(shared_zookeeper.url("/once", ttl_nodes="true")) as client, client(f"{name}:other") as lease:

        @client.once(name, within=1e14)
        async def run() -> None:
            pass

        await run()
        assert await run() is Skipped.DONE
        (mark,) = (await client.inspect(name)).holders
        assert mark.remaining == pytest.approx(2**40 / 1000)
        await lease.extend()


async def test_a_mark_of_once_that_is_refused_frees_the_name(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The right to create nodes was taken away meanwhile. The call says so, and the node of the run is deleted: it
    would stay for as long as the session."""
    path = f"/marks-{name.replace(':', '-')}"
    owner = KazooClient(shared_zookeeper.address, auth_data=[("digest", "me:secret")])
    owner.start()
    async with Redlock(shared_zookeeper.url(path, ttl_nodes="true")) as client:

        @client.once("n", within=60)
        async def run() -> None:
            mine = make_digest_acl("me", "secret", all=True)
            owner.set_acls(f"{path}/n", [make_acl("world", "anyone", read=True, delete=True), mine])

        with pytest.raises(ConfigError, match="lacks the permission CREATE"):
            await run()
        assert owner.get_children(f"{path}/n") == []
    owner.stop()
    owner.close()


async def test_a_run_of_once_that_raises_leaves_no_mark(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The next call runs."""
    async with Redlock(shared_zookeeper.url("/once", ttl_nodes="true")) as client:

        @client.once(name, within=60)
        async def fails() -> None:
            raise OSError("it failed")

        for _ in range(2):
            with pytest.raises(OSError, match="it failed"):
                await fails()


async def test_servers_without_ttl_nodes(zookeepers: ZooKeepers, name: str) -> None:
    """A client that was told of TTL nodes finds out when it connects, and not after the first run."""
    server = await asyncio.to_thread(partial(zookeepers.start, ttl=False))
    client = Redlock(server.url(ttl_nodes="true"))
    with pytest.raises(ConfigError, match="extendedTypesEnabled"):
        await client(name).acquire(timeout=None)
    await client.aclose()


async def test_servers_that_are_too_old(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not know a request that each acquire sends. The error names the version that they need, and not the TTL
    nodes, for which nobody asked. A server answers as well to a number that no request has."""
    monkeypatch.setattr(Create2, "type", 99)
    client = client_of(shared_zookeeper)
    with pytest.raises(ConfigError, match=r"do not know the request Create2: they need version 3\.5"):
        await client(name).acquire(timeout=None)
    await client.aclose()


async def test_c13_permissions(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The nodes of a client with a user are for this user alone. Another one gets a ConfigError that says so, at
    once."""
    path = f"/private-{name.replace(':', '-')}"
    url = shared_zookeeper.url(path).replace("zookeeper://", "zookeeper://me:secret@")
    async with Redlock(url) as client, client(name):
        pass
    stranger = Redlock(shared_zookeeper.url(path))
    with pytest.raises(ConfigError, match="NoAuthError") as refused:
        await stranger(name).acquire(timeout=None)
    assert "secret" not in str(refused.value)
    assert "NoAuthError" in (await stranger.health()).reason
    await stranger.aclose()


@pytest.mark.parametrize(
    ("lacking", "said"),
    [("read", "lacks the permission READ on {path}/n:"), ("create", "lacks the permission CREATE on {path}/n:")],
)
async def test_c13_a_permission_that_is_lacking_is_named(
    lacking: str, said: str, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """At once, with its path, so that its owner can grant it. Nothing is left there."""
    path = f"/lacking-{name.replace(':', '-')}"
    owner = KazooClient(shared_zookeeper.address, auth_data=[("digest", "me:secret")])
    owner.start()
    rights = {each: each != lacking for each in ("read", "write", "create", "delete")}
    owner.ensure_path(path)
    owner.create(f"{path}/n", acl=[make_acl("world", "anyone", **rights), make_digest_acl("me", "secret", all=True)])
    async with Redlock(shared_zookeeper.url(path), patience=LIMIT) as client:
        with pytest.raises(ConfigError, match=said.format(path=path)):
            await client("n").acquire(timeout=0)
        if lacking == "read":
            with pytest.raises(ConfigError, match=said.format(path=path)):
                await client.inspect("n")
            await until(lambda: not contenders_of(client))
    assert owner.get_children(f"{path}/n") == []
    owner.stop()
    owner.close()


async def test_c13_the_names_below_a_path_that_may_not_be_read(shared_zookeeper: ZooKeeper, name: str) -> None:
    """A list of them is refused in the same way."""
    path = f"/hidden-{name.replace(':', '-')}"
    owner = KazooClient(shared_zookeeper.address, auth_data=[("digest", "me:secret")])
    owner.start()
    owner.create(path, acl=[make_acl("world", "anyone", create=True), make_digest_acl("me", "secret", all=True)])
    async with Redlock(shared_zookeeper.url(path)) as client, client("n"):
        with pytest.raises(ConfigError, match=f"lacks the permission READ on {path}:"):
            [each async for each in client.holders()]
    owner.stop()
    owner.close()


async def test_a_node_that_is_deleted_during_a_listing(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name is left out of the next page."""
    monkeypatch.setattr(looks, "_PAGE", 2)
    path = f"/pages-{name.replace(':', '-')}"
    async with Redlock(shared_zookeeper.url(path)) as client:
        leases = [await client(each).acquire(timeout=None) for each in "abcd"]
        (node,) = nodes_of(client)
        cursor, found = await node.names("", "0")
        assert found == ["a", "b"]
        await leases[0].release()
        assert await connection_of(client).delete(f"{path}/a")
        cursor, found = await node.names("", cursor)
        assert found == ["c", "d"]
        assert await node.names("", cursor) == ("0", [])
        for lease in leases[1:]:
            await lease.release()


async def test_c13_one_of_several_names_is_forbidden(
    clients: list[Redlock], name: str, shared_zookeeper: ZooKeeper
) -> None:
    """The transaction fails as a whole, and the error is that of the name."""
    names = [f"{name}:{each}" for each in "abc"]
    owner = KazooClient(shared_zookeeper.address, auth_data=[("digest", "me:secret")])
    owner.start()
    read_only = [make_acl("world", "anyone", read=True), make_digest_acl("me", "secret", all=True)]
    owner.create(f"/locks/{names[1]}", acl=read_only)
    async with clients[0](names[0]), clients[0](names[2]):
        pass
    with pytest.raises(ConfigError, match="NoAuthError"):
        await clients[0].multi(*names).acquire(timeout=None)
    await until(lambda: not contenders_of(clients[0]))
    async with clients[1](names[0], timeout=0), clients[1](names[2], timeout=0):
        pass
    owner.stop()
    owner.close()


async def test_permissions_of_ones_own(shared_zookeeper: ZooKeeper, name: str) -> None:
    """`acl` names them, for example so that several users share the locks."""
    path = f"/shared-{name.replace(':', '-')}"
    both = [make_digest_acl("me", "a", all=True), make_digest_acl("you", "b", all=True)]
    urls = [shared_zookeeper.url(path).replace("//", f"//{user}@") for user in ("me:a", "you:b")]
    async with Redlock(ZooKeeperStore(urls[0], acl=both)) as me, Redlock(ZooKeeperStore(urls[1], acl=both)) as you:
        async with me(name):
            assert await you(name).acquire(timeout=0) is None
        async with you(name):
            assert await me(name).acquire(timeout=0) is None
