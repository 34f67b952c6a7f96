"""HAZARDS B: time. Where a clock has to move, the test moves it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock._clock import SYSTEM, now
from asynclock.quorum.ballot import drift
from asynclock.rules.model import Op, Verb
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Refused
from tests.support.default_keys import key_of
from tests.support.distant_stores import Beyond
from tests.support.fake_clock import FakeClock
from tests.support.probes import kind_of, renew_now, replace_ask
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.shifted_clock import Shifted, shifted
from tests.support.still_clock import Still, turns
from tests.support.user_store import state_of


def fake(**options: Any) -> tuple[Redlock, MemoryStore, FakeClock]:
    clock = FakeClock()
    store = MemoryStore(clock)
    return Redlock(store, **options), store, clock


@pytest.mark.parametrize("nodes", [1, 5])
async def test_b1_a_loop_blocked_longer_than_the_lease(name: str, nodes: int) -> None:
    """`held` is False at the next read, before any timer could run, and no renewal is sent for an expired lease."""
    still = Still(nodes, name)
    async with still.held(lease=30.0) as (_, lease):
        assert lease.held
        still.asked()
        still.clock.block(30.0)
        assert not lease.held
        assert lease.remaining == 0.0
        with pytest.raises(LockLost):
            await lease.extend()
        with pytest.raises(LockLost):
            await lease.release()
        assert Verb.EXTEND not in {verb for verb, _ in still.asked()}


async def test_b1_the_deadline_is_checked_before_renewing(server: Server, name: str) -> None:
    """A watchdog that wakes too late sends no renewal, though the key may still be there."""
    clock = Shifted()
    async with shifted([server.url], clock) as redlock:
        lease = await redlock(name, lease=3.0).acquire(timeout=None)
        server.cli().persist(key_of(name))
        extends = server.cli().info("commandstats").get("cmdstat_pexpire", {"calls": 0})["calls"]
        clock.jump(3.0)
        assert await lease.wait_lost() is True
        assert server.cli().info("commandstats").get("cmdstat_pexpire", {"calls": 0})["calls"] == extends
        server.cli().delete(key_of(name))


async def test_b2_the_wall_clock_jumps(name: str) -> None:
    """A jump does not change the validity, and the next fence rises all the same."""
    redlock, _, clock = fake(lease=30.0)
    async with redlock(name) as lease:
        for jump in (3600.0, -7200.0):
            clock.jump_wall(jump)
            assert lease.held
            assert lease.remaining == pytest.approx(30.0 - drift(30.0))
        before = lease.fence
    async with redlock(name) as lease:
        assert lease.fence > before
    await redlock.aclose()


def test_b3_validity_is_counted_through_sleep() -> None:
    """CLOCK_BOOTTIME where there is one: it goes on while the machine sleeps, as the server's clock does."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime(clock)
    assert before <= SYSTEM.now() <= now() <= time.clock_gettime(clock)


async def test_b4_only_relative_expiry_is_sent(server: Server, proxy: Proxy, name: str) -> None:
    """No PXAT, EXAT or PEXPIREAT anywhere: one that lies in the past answers OK and sets nothing."""
    absolute = [proxy.request(word) for word in (b"PXAT", b"EXAT", b"PEXPIREAT", b"EXPIREAT")]
    relative = proxy.request(b"PX")
    async with Redlock(proxy.url) as redlock:
        server.cli().script_flush()  # so that the whole script passes by, too
        for fencing in (True, False):
            async with redlock(name, fencing=fencing) as lease:
                await lease.extend()
    assert relative.is_set()
    assert not any(word.is_set() for word in absolute)


@pytest.fixture
async def proxy(server: Server) -> Any:
    async with Proxy(server.path.with_suffix(".p"), server.path) as between:
        yield between


async def test_b5_validity_counts_from_the_send(server: Server, proxy: Proxy, name: str) -> None:
    """A grant whose reply took longer than the lease is a failure; a slow reply leaves less validity."""
    async with Redlock(proxy.url, lease=20.0, node_timeout=6.0) as redlock:
        sent = proxy.request(b"acquire")
        proxy.hold_replies()
        waiting = asyncio.create_task(redlock(name, renew=False).acquire(timeout=0))
        await sent.wait()
        before = now()
        while server.cli().pttl(key_of(name)) > 19_700:
            await asyncio.sleep(0.01)
        late_by = now() - before
        proxy.let_go()
        lease = await waiting
        assert lease is not None
        assert lease.remaining <= 20.0 - drift(20.0) - late_by
        await lease.release()


async def test_b6_extend_after_the_deadline(name: str) -> None:
    """It is refused; and where the key is gone on the server, an extend does not bring it back."""
    redlock, store, clock = fake(lease=30.0)
    lease = await redlock(name, renew=False).acquire(timeout=None)
    clock.advance(30.0)
    with pytest.raises(LockLost):
        await lease.extend()
    assert state_of(store, name).holds == ()
    kind = kind_of(redlock(name))
    replies: list[list[object]] = []
    store.decide(name, Op(Verb.EXTEND, kind, name, "x" * 32, 30.0, memory=60.0), replies.append)
    assert replies == [Refused(None)]
    assert state_of(store, name).holds == ()
    await redlock.aclose()


async def test_b7_an_extend_with_a_shorter_time(server: Server, name: str) -> None:
    """It never shortens the lease, in the client or on the server."""
    async with Redlock(server.url) as redlock, redlock(name, lease=40) as lease:
        await lease.extend(lease=1)
        assert lease.remaining > 20
        assert server.cli().pttl(key_of(name)) > 20_000


@pytest.mark.parametrize("nodes", [1, 5])
async def test_b10_one_renewal_is_lost(name: str, nodes: int) -> None:
    """The next renewal follows after lease/12, not after another third: the lease is kept."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(lease=12.0) as redlock:
        lease = await beyond.lease(redlock)
        renewed_at = beyond.clock.now() + 4.0
        await beyond.pass_time(3.0, step=0.1)
        beyond.set_answering(False)
        await beyond.pass_time(renewed_at - beyond.clock.now() + 0.1)
        beyond.disconnect()
        beyond.set_answering(True)
        beyond.asked()
        await beyond.pass_time(1.5)
        first, *_ = [at for verb, at in beyond.asked() if verb is Verb.EXTEND]
        assert first <= renewed_at + 1.1
        assert lease.remaining > 12.0 - 1.5 - drift(12.0)
        await beyond.finish(asyncio.create_task(lease.release()))


async def test_the_watchdog_renews_at_a_third(name: str) -> None:
    """The lease is held for ten times its length, with a renewal at each third, and lost once renewals stop."""
    redlock, store, clock = fake(lease=30.0)
    lease = await redlock(name).acquire(timeout=None)
    for _ in range(60):
        clock.advance(5.0)
        await turns()
        assert lease.held
        assert lease.remaining > 30.0 * 2 / 3 - 5.0 - 1.0
    assert state_of(store, name).holds
    await lease.release()
    await redlock.aclose()


async def test_renew_false_lets_it_end(name: str) -> None:
    """Without the watchdog's renewals the lease ends after its time, and its body is cancelled."""
    redlock, _, clock = fake(lease=30.0)
    lease = await redlock(name, renew=False).acquire(timeout=None)
    lost = asyncio.create_task(lease.wait_lost())
    await turns()
    clock.advance(29.0)
    await turns()
    assert not lost.done()
    clock.advance(1.0)
    assert await lost is True
    await redlock.aclose()


async def test_unknown_is_not_lost(five: list[Server], name: str) -> None:
    """A majority freezes under a holder: only the clock ends its lease, and if the nodes answer again in time it lives
    on."""
    async with Redlock(*(each.url for each in five), lease=6.0) as redlock:
        async with redlock(name, lease=15.0) as lease:
            for each in five[:3]:
                each.freeze()
            renew_now(lease)
            while "unknown" not in repr(lease):
                assert lease.held
                await asyncio.sleep(0.01)
            with pytest.raises(QuorumUnavailable):
                await lease.extend()
            for each in five[:3]:
                each.thaw()
            while "unknown" in repr(lease):
                assert lease.held
                await asyncio.sleep(0.01)
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                for each in five[:3]:
                    each.freeze()
                await asyncio.Event().wait()
        for each in five[:3]:
            each.thaw()
        assert caught.value.reason == "expired"


async def test_a5_the_watchdog_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each renewal raises: it is tried again until the deadline, and then the loss is reported."""
    redlock, _, clock = fake(lease=30.0)
    with pytest.raises(LockLost):
        async with redlock(name):
            asked = 0

            def broken(*args: object, **kwargs: object) -> Any:
                nonlocal asked
                asked += 1
                raise RuntimeError("broken on purpose")

            working = replace_ask(redlock, broken)
            call_soon = asyncio.get_running_loop().call_soon  # timers run in the loop, not in the holder's task
            while asked <= 3:
                call_soon(clock.advance, 1.0)
                await asyncio.sleep(0)
            replace_ask(redlock, working)
            call_soon(clock.advance, 30.0)
            await asyncio.Event().wait()
    assert asked > 3
    assert "will try again" in caplog.text
    await redlock.aclose()
