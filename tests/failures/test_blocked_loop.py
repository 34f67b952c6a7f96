"""HAZARDS B12: the event loop is blocked for longer than the lease, with renew="thread". Each test blocks its loop for
real. Other clients run in threads of their own meanwhile."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from asynclock import Lease, Lock, LockLost, Redlock
from asynclock._clock import now
from asynclock.quorum.ballot import Ballot
from asynclock.runtime.renewal_thread import ThreadedHold
from asynclock.stores.redis.keys import keys
from tests.support.blocked_loop import ThreadedProxy, block_until, lag_of, try_elsewhere
from tests.support.probes import grant_of, id_of, stores_of, valid_until
from tests.support.servers import Server, Servers
from tests.support.waiters import until

pytestmark = pytest.mark.both_loops("each loop has its own order of timers and of sockets")

LEASE = 8.0
"""The process of the test or a server may stand still for seconds after two thirds of it, and it is renewed in time."""

ENDS = 2.0
"""A lease whose end a test waits for, and that nothing has to renew."""

ANSWER = 2.0
"""The node timeout: no node of a busy machine is missing in a vote."""


def client(servers: Sequence[Server], lease: float) -> Redlock:
    """One that gives a busy machine time: the answer of each node counts."""
    return Redlock(*(each.url for each in servers), lease=lease, renew="thread", prefix="", node_timeout=ANSWER)


async def counted_everywhere(lease: Lease) -> None:
    """Wait until the client has read the answer of each node. A majority was enough for the lease."""
    while (grant := grant_of(lease)) is not None and not grant.complete:
        await asyncio.sleep(0)


def renewed(lease: Lease) -> None:
    """Block the loop until a renewal has moved the end of the lease."""
    before = valid_until(lease)
    block_until(lambda: valid_until(lease) > before or not lease.held)
    assert lease.held


async def test_b12_a_thread_keeps_the_lease_of_a_blocked_loop(make: Callable[..., Redlock], name: str) -> None:
    """For longer than a lease another client is refused; code that blocks the loop reads that the lease is held; and
    the lease is an ordinary one again once the loop runs."""
    redlock = make(lease=LEASE, renew="thread", node_timeout=ANSWER)
    async with redlock(name) as lease:
        assert not try_elsewhere(stores_of(redlock), name, 1.2 * LEASE)
        assert lease.held
        assert 0 < lease.remaining < LEASE
        lease.ensure_held()
        await lease.extend()
    assert try_elsewhere(stores_of(redlock), name, 0)


async def test_the_log_is_true_for_a_lease_that_was_kept(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The line about the blocked loop does not say that no lease was renewed."""
    async with client([server], LEASE) as redlock, redlock(name) as lease:
        ends = now() + LEASE / 2
        renewed(lease)
        block_until(lambda: now() > ends)
        await until(lambda: "the event loop did not run for" in caplog.text)
    (line,) = [each.getMessage() for each in caplog.records if "did not run" in each.getMessage()]
    assert "only leases with renew='thread' were renewed in that time" in line


async def test_b12_each_kind_is_kept(shared_urls: list[str], name: str) -> None:
    """The same for the other kinds of locks, over five nodes: all are kept in one block."""
    locks: list[Callable[[Redlock, str], Lock]] = [
        lambda redlock, name: redlock(f"{name}:fair", fair=True),
        lambda redlock, name: redlock.write(f"{name}:write"),
        lambda redlock, name: redlock.semaphore(f"{name}:semaphore", 1),
        lambda redlock, name: redlock.multi(f"{name}:multi", f"{name}:multi:2"),
        lambda redlock, name: redlock(f"{name}:plain", fencing=False),
    ]
    async with Redlock(*shared_urls, lease=LEASE, renew="thread", node_timeout=ANSWER) as redlock:
        async with AsyncExitStack() as stack:
            leases = [await stack.enter_async_context(lock(redlock, name)) for lock in locks]
            for lock, timeout in zip(locks, [1.2 * LEASE, 0, 0, 0, 0], strict=True):
                assert not try_elsewhere(shared_urls, name, timeout, lock, node_timeout=1.0)
            assert all(lease.held for lease in leases)
        for lock in locks:
            assert try_elsewhere(shared_urls, name, 5, lock, node_timeout=1.0)


async def test_b12_a_lease_is_kept_after_a_time_without_leases(server: Server, name: str) -> None:
    """The thread notices in time that there is a lease again."""
    async with Redlock(server.url, lease=LEASE, renew="thread", node_timeout=ANSWER) as redlock:
        async with redlock(name):
            pass
        while lag_of(redlock).expected != math.inf:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the thread finds out
        async with redlock(name) as lease:
            renewed(lease)


async def test_b12_a_lease_that_is_shorter_than_those_before_is_kept(server: Server, name: str) -> None:
    """The thread looks at the loop more often from then on."""
    async with Redlock(server.url, lease=30.0, renew="thread", node_timeout=ANSWER) as redlock, redlock(f"{name}:long"):
        await asyncio.sleep(0.1)  # the thread sleeps
        async with redlock(name, lease=LEASE) as lease:
            renewed(lease)


async def test_b12_python_code_that_computes_does_not_stop_the_thread(server: Server, name: str) -> None:
    """A loop that is blocked by Python code, not by a system call: the interpreter switches threads."""
    async with Redlock(server.url, lease=LEASE, renew="thread") as redlock, redlock(name) as lease:
        before = valid_until(lease)
        while valid_until(lease) <= before:
            assert lease.held


@pytest.mark.parametrize("count", [1, 5])
async def test_b12_the_lease_ends_after_max_block(five: list[Server], count: int, name: str) -> None:
    """A loop that is blocked for longer hangs: another client gets the lock, `held` is False while the loop is still
    blocked, and the block of the lease raises LockLost."""
    urls, most = [each.url for each in five[:count]], 1.5 * LEASE
    async with Redlock(*urls, lease=LEASE, renew="thread", max_block=most, node_timeout=ANSWER) as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                renewed(lease)
                assert try_elsewhere(urls, name, 30)
                assert not lease.held
                assert lease.remaining == 0.0
                assert valid_until(lease) <= lag_of(redlock).expected + most
        assert caught.value.reason == "expired"


async def test_b12_the_thread_says_when_it_gives_up(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each block."""
    async with Redlock(server.url, lease=LEASE / 2, renew="thread", max_block=0.2) as redlock:
        with pytest.raises(LockLost):
            async with redlock(name) as lease:
                block_until(lambda: not lease.held)
    assert [each.levelname for each in caplog.records if "max_block=0.2 s" in each.message] == ["WARNING"]


async def test_b12_max_hold_ends_it(server: Server, name: str) -> None:
    """The thread renews for no longer than the loop would, and the key does not outlive `max_hold`."""
    async with Redlock(server.url, lease=LEASE, renew="thread", max_hold=1.5 * LEASE) as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                renewed(lease)
                assert try_elsewhere([server.url], name, 30)
                assert not lease.held
        assert caught.value.reason == "max_hold"


async def test_b12_a_frozen_minority_is_no_obstacle(five: list[Server], name: str) -> None:
    """Two of five servers stop. The thread counts the votes of the others."""
    urls = [each.url for each in five]
    async with Redlock(*urls, lease=LEASE, renew="thread", node_timeout=ANSWER) as redlock, redlock(name) as lease:
        for each in five[:2]:
            each.freeze()
        renewed(lease)
        assert not try_elsewhere(urls, name, 0)
        assert lease.held
        for each in five[:2]:
            each.thaw()


async def test_b12_a_frozen_majority_ends_it_by_the_clock(five: list[Server], name: str) -> None:
    """Without the votes of a majority the lease ends when its validity does."""
    async with Redlock(*(each.url for each in five), lease=ENDS, renew="thread", node_timeout=0.6) as redlock:
        with pytest.raises(LockLost):
            async with redlock(name) as lease:
                for each in five[:3]:
                    each.freeze()
                block_until(lambda: not lease.held)
                assert now() >= valid_until(lease)
        for each in five[:3]:  # not before: their late votes can renew it, as long as they have the key
            each.thaw()


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("reason", ["broken", "taken"])
async def test_b12_a_refusal_by_a_majority_is_a_loss(five: list[Server], count: int, reason: str, name: str) -> None:
    """An operator deletes the key. `held` is False as soon as the thread finds out, before the validity has run out;
    the body ends in LockLost with the reason."""
    async with Redlock(
        *(each.url for each in five[:count]), lease=LEASE, renew="thread", prefix="", node_timeout=ANSWER
    ) as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                await counted_everywhere(lease)
                promised = valid_until(lease)
                for each in five[: count // 2 + 1]:
                    each.cli().delete(name)
                    if reason == "taken":
                        each.cli().set(name, "another", px=60_000)
                block_until(lambda: not lease.held)
                assert now() < promised
                with pytest.raises(LockLost) as refused:
                    lease.ensure_held()
        assert refused.value.reason == caught.value.reason == reason
        assert len(caught.value.errors) > count // 2


async def test_b12_a_loss_that_the_thread_found_interrupts_the_body(server: Server, name: str) -> None:
    """As soon as the loop runs again."""
    async with Redlock(server.url, lease=LEASE, renew="thread", prefix="") as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                server.cli().delete(name)
                block_until(lambda: not lease.held)
                await asyncio.Event().wait()
        assert caught.value.reason == "broken"


@pytest.mark.parametrize("count", [1, 5])
async def test_b12_a_break_while_the_loop_is_blocked_names_who_did_it(
    five: list[Server], count: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread finds the loss, and the notice of the break waits in the socket of the loop: it is read first."""
    urls, found = [each.url for each in five[:count]], threading.Event()
    count_vote = ThreadedHold.count_in_thread

    def counted(hold: ThreadedHold, ballot: Ballot, index: int) -> None:
        count_vote(hold, ballot, index)
        if now() >= hold.valid_until:
            found.set()  # it has told the loop

    monkeypatch.setattr(ThreadedHold, "count_in_thread", counted)

    async def break_it() -> bool:
        async with Redlock(*urls, metadata="an operator's note") as operator:
            return await operator.break_lock(name)

    async with Redlock(*urls, lease=LEASE, renew="thread", node_timeout=ANSWER) as redlock:
        with pytest.raises(LockLost, match=r"\(\"an operator's note\"\) broke it \(break_lock\)") as caught:
            async with redlock(name):
                with ThreadPoolExecutor(1) as pool:
                    assert pool.submit(asyncio.run, break_it()).result()
                block_until(found.is_set)
                await asyncio.Event().wait()
        assert caught.value.reason == "broken"


async def test_b12_the_thread_does_not_heal(five: list[Server], name: str) -> None:
    """A node that lost the key does not get it back from the thread, which goes on with the others. The loop heals it
    later."""
    async with Redlock(
        *(each.url for each in five[:3]), lease=LEASE, renew="thread", prefix="", node_timeout=ANSWER
    ) as redlock:
        async with redlock(name) as lease:
            await counted_everywhere(lease)
            five[0].cli().delete(name)
            for _ in range(2):
                renewed(lease)
            assert not five[0].cli().exists(name)
            while not five[0].cli().exists(name):
                await asyncio.sleep(0.01)
            assert lease.held


async def test_b12_the_thread_writes_no_fence(server: Server, name: str) -> None:
    """Its connection has no order with the one on which a release and the next grant are sent."""
    fence = keys("", name).fence
    async with Redlock(server.url, lease=LEASE, renew="thread", prefix="") as redlock, redlock(name) as lease:
        server.cli().delete(fence)
        renewed(lease)
        assert not server.cli().exists(fence)


async def test_b12_a_restarted_server_does_not_vote(servers: Servers, name: str) -> None:
    """Servers that restarted a moment ago have the key again, from an old dump for all that the client knows. They are
    in quarantine in the thread, too: the lease ends by the clock."""
    three = [servers.start("--appendonly", "yes", "--appendfsync", "always") for _ in range(3)]
    async with Redlock(
        *(each.url for each in three), lease=LEASE, renew="thread", prefix="", node_timeout=ANSWER
    ) as redlock:
        with pytest.raises(LockLost):
            async with redlock(name) as lease:
                await counted_everywhere(lease)
                for each in three[:2]:
                    each.restart()
                    assert each.cli().exists(name)
                promised = valid_until(lease)  # not before: while one of them was still up, a majority renewed it
                block_until(lambda: not lease.held)
                assert valid_until(lease) == promised


@pytest.mark.parametrize("again", [False, True])
async def test_a7_an_extend_of_the_thread_arrives_after_the_release(server: Server, name: str, again: bool) -> None:
    """It brings no key back; and if the same client holds the name again, it does not prolong that hold, which has
    another id."""
    with ThreadedProxy(server.path.with_suffix(".p"), server.path) as proxy:
        async with Redlock(proxy.url, lease=LEASE, renew="thread", prefix="", node_timeout=1.3) as redlock:
            async with redlock(name) as lease:
                proxy.catch(b"$6\r\nextend\r\n")  # the word alone is in the text of the script, too
                block_until(proxy.caught.is_set)
            assert not server.cli().exists(name)
            if again:
                second = await redlock(name, lease=LEASE / 2, renew=False).acquire(timeout=0)
                assert second is not None
                assert id_of(second) != id_of(lease)
                before = server.cli().pttl(name)
                proxy.let_go()
                assert server.cli().pttl(name) <= before
                await second.release()
            else:
                proxy.let_go()
            assert not server.cli().exists(name)


async def test_a15_a_lease_dropped_while_the_loop_is_blocked_is_not_kept(server: Server, name: str) -> None:
    """The garbage collector takes it, and the key expires."""
    async with Redlock(server.url, lease=LEASE, renew="thread", prefix="", node_timeout=ANSWER) as redlock:
        lease = await redlock(name).acquire(timeout=0)
        assert lease is not None
        renewed(lease)
        with pytest.warns(ResourceWarning, match="dropped while held"):
            del lease
            gc.collect()
        block_until(lambda: not server.cli().exists(name))


async def test_b1_without_the_thread_the_lease_of_a_blocked_loop_ends(server: Server, name: str) -> None:
    """What the other tests here would see if the thread did nothing."""
    async with Redlock(server.url, lease=ENDS) as redlock:
        with pytest.raises(LockLost):
            async with redlock(name) as lease:
                assert try_elsewhere([server.url], name, 20)
                assert not lease.held


async def test_b12_the_thread_connects_again(server: Server, name: str) -> None:
    """Its connection is cut while the loop is blocked: it opens another one."""
    async with Redlock(server.url, lease=LEASE, renew="thread", prefix="") as redlock, redlock(name) as lease:
        renewed(lease)
        server.cli().execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "normal")
        server.cli().execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "pubsub")
        for _ in range(2):
            renewed(lease)
        assert lease.held
