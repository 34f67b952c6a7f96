"""LockLost says why, and what each node said; the log has a line for it: on real servers, of every kind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from asynclock._flood import BURST
from asynclock.rules.model import Verb
from tests.support.cut_servers import Clocked
from tests.support.fake_clock import FakeClock
from tests.support.probes import connection_of, intercept_notices, nodes_of, renew_now, unanswered
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.told import KINDS
from tests.support.waiters import LIMIT, LONG, back, holder, urls_of

Make = Callable[..., Redlock]

both = pytest.mark.parametrize("nodes", [1, 5])
each_kind = pytest.mark.parametrize(("nodes", "kind"), [*((1, kind) for kind in KINDS), (5, "mutex"), (5, "multi")])
SHORT: dict[str, Any] = {"lease": 0.6, "node_timeout": 0.2}
MOVED: dict[str, Any] = {"lease": 9.0, "node_timeout": 1.0}
"""For a client whose clock the test moves."""


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records that say that a lease was lost."""
    return [record for record in caplog.records if getattr(record, "asynclock_event", "") == "Lost"]


async def pass_lease(clock: FakeClock, client: Redlock, frozen: int) -> None:
    """Let the time of a lease pass, with turns for what wakes. The nodes after the frozen ones answer in each step."""
    connections = [connection_of(node) for node in nodes_of(client)[frozen:]]
    for _ in range(100):
        clock.advance(0.1)
        await turns(3)
        while any(map(unanswered, connections)):
            await asyncio.sleep(0)


async def loss(lock: Any, harm: Callable[[], object]) -> LockLost:
    """The error of a block in which `harm` is done."""
    with pytest.raises(LockLost) as caught:
        async with asyncio.timeout(LIMIT), lock:
            harm()
            await asyncio.Event().wait()
    return caught.value


@each_kind
async def test_an_outage(
    five: list[Server], name: str, nodes: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers stop: no majority renewed it since when, and each silent node with its error; the log says the
    same."""
    used = list(five[:nodes])
    stopped = used[: nodes // 2 + 1]
    _, lock_of = KINDS[kind]
    clock, passing = FakeClock(), list[asyncio.Task[None]]()

    def freeze() -> None:
        for server in stopped:
            server.freeze()
        passing.append(asyncio.create_task(pass_lease(clock, client, len(stopped))))

    async with Redlock(*(Clocked(server.url, clock) for server in used), **MOVED) as client:
        lock = lock_of(client, name, label="orders")
        error = await loss(lock, freeze)
        for server in stopped:
            server.thaw()
        await passing[0]
    assert error.reason == "expired"
    assert "no majority of the nodes renewed it for" in str(error)
    assert "UTC" in str(error)
    assert set(error.errors) == {server.url for server in stopped}
    for server in stopped:
        assert server.url in str(error)
    (line,) = lost_lines(caplog)
    assert line.levelno == logging.WARNING
    assert str(error) in line.getMessage()
    fields = {key: value for key, value in vars(line).items() if key.startswith("asynclock_")}
    assert fields.pop("asynclock_seconds") > 0
    called = {"asynclock_lock": lock.name, "asynclock_kind": KINDS[kind][0], "asynclock_label": "orders"}
    assert fields == {"asynclock_event": "Lost", "asynclock_reason": "expired", **called}


@both
async def test_b1_a_blocked_loop(five: list[Server], name: str, nodes: int) -> None:
    """The servers are well, and the loop did not run: the message says so, with the time."""
    async with Redlock(*urls_of(five[:nodes]), **SHORT) as client:
        error = await loss(client(name), lambda: time.sleep(0.9))
    assert error.reason == "expired"
    assert "the event loop did not run for" in str(error)
    assert error.errors == {}


async def test_b1_a_use_of_the_lease_finds_the_block_first(server: Server, name: str) -> None:
    """Before any timer runs, the lease says the same."""
    async with Redlock(server.url, **SHORT) as client:
        lease = await client(name).acquire(timeout=None)
        time.sleep(0.9)
        with pytest.raises(LockLost, match="the event loop did not run for") as caught:
            lease.ensure_held()
        assert caught.value.reason == "expired"
        with pytest.raises(LockLost, match="the event loop did not run for"):
            await lease.release()


@pytest.mark.parametrize("nodes", [1, 5])
async def test_a_lease_that_is_not_renewed(name: str, nodes: int) -> None:
    """renew=False: it ends by itself, and the message says what to do."""
    still = Still(nodes, name)
    async with still.held(lease=9.0, renew=False) as (_, lease):
        await still.until(still.clock.now() + 9.0)
        with pytest.raises(LockLost, match=r"with renew=False, call extend\(\)"):
            await lease.release()


@pytest.mark.parametrize("nodes", [1, 5])
async def test_the_time_without_a_renewal_is_exact(name: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from the sending of the last renewal that a majority granted, not from the acquire."""
    still = Still(nodes, name)

    def fail(*asked: object) -> None:
        raise ConnectionError("the store is down")

    async with still.held(lease=9.0, max_lease=9.0) as (_, lease):
        await still.until(still.clock.now() + 30.0)
        assert lease.held
        last = max(at for verb, at in still.asked() if verb is Verb.EXTEND)
        for store in still.stores:
            monkeypatch.setattr(store, "decide", fail)
        await still.until(last + 9.0)
        with pytest.raises(LockLost) as caught:
            lease.ensure_held()
    unrenewed = float(re.findall(r"renewed it for ([\d.]+) s", str(caught.value))[0])
    assert unrenewed == pytest.approx(9.0 - 0.09, abs=0.1)
    assert "the store is down" in str(caught.value)


@each_kind
async def test_another_owner_has_it(five: list[Server], name: str, nodes: int, kind: str) -> None:
    """The keys were deleted by hand, and another client got the lock: its host and process are in the message, and in
    the errors of the nodes."""
    used = list(five[:nodes])
    _, lock_of = KINDS[kind]
    options: dict[str, Any] = {"prefix": "", "lease": LONG}
    async with Redlock(*urls_of(used), **options) as client, Redlock(*urls_of(used), **options) as other:
        await back(other)  # the last of five nodes may be late, and would not have its acquire
        with pytest.raises(LockLost) as caught:
            async with asyncio.timeout(LIMIT), lock_of(client, name) as lease:
                for server in used:
                    with server.cli() as cli:
                        cli.flushdb()
                taken = await lock_of(other, name).acquire(timeout=None)
                renew_now(lease)
                await asyncio.Event().wait()
        await taken.release()
    who = f"{socket.gethostname()}, pid {os.getpid()}"
    assert caught.value.reason == "taken"
    assert f"another owner holds the name now: {who}" in str(caught.value)
    assert {str(said).partition(": ")[2] for said in caught.value.errors.values()} == {f"the name is held by {who}"}
    assert len(caught.value.errors) > nodes // 2


@each_kind
async def test_an_operator_broke_it(five: list[Server], name: str, nodes: int, kind: str) -> None:
    """break_lock on another client: the message says who called it."""
    used = urls_of(five[:nodes])
    _, lock_of = KINDS[kind]
    async with Redlock(*used, lease=LONG) as client, Redlock(*used, metadata="an operator's note") as operator:
        lock = lock_of(client, name)
        breaking: list[asyncio.Task[bool]] = []
        first = lock.name.partition(", ")[0]
        error = await loss(lock, lambda: breaking.append(asyncio.create_task(operator.break_lock(first))))
        assert await breaking[0]
    assert error.reason == "broken"
    who = f'{socket.gethostname()}, pid {os.getpid()} ("an operator\'s note")'
    assert f"{who} broke it (break_lock)" in str(error)
    assert {str(said).partition(": ")[2] for said in error.errors.values()} == {"the key is gone"}


@both
async def test_its_key_was_deleted_by_hand(five: list[Server], name: str, nodes: int) -> None:
    """No notice comes: the message says what may have happened."""
    used = list(five[:nodes])
    async with Redlock(*urls_of(used), lease=LONG, prefix="") as client:
        with pytest.raises(LockLost, match="its key is gone from a majority of the nodes") as caught:
            async with asyncio.timeout(LIMIT), client(name) as lease:
                for server in used:
                    with server.cli() as cli:
                        assert cli.delete(name)
                renew_now(lease)
                await asyncio.Event().wait()
    assert caught.value.reason == "broken"


@both
async def test_a_release_finds_the_new_owner(five: list[Server], name: str, nodes: int) -> None:
    """The client learns of the loss from its release only: the message names the new owner."""
    used = urls_of(five[:nodes])
    async with Redlock(*used, lease=LONG) as client, Redlock(*used) as other:
        lease = await client(name).acquire(timeout=None)
        intercept_notices(client, lambda index, notice: None)
        assert await other.break_lock(name)
        async with other(name):
            with pytest.raises(LockLost) as caught:
                await lease.release()
    assert caught.value.reason == "taken"
    assert f"another owner holds the name now: {socket.gethostname()}, pid {os.getpid()}" in str(caught.value)
    assert len(caught.value.errors) > nodes // 2


async def test_max_hold_and_close(make: Make, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The time of max_hold is in the message. A client that closes with leases logs that at INFO: it was asked to."""
    caplog.set_level(logging.INFO, "asynclock")
    client = make()
    with pytest.raises(LockLost, match=r"it was held for max_hold \(0.05 s\)"):
        async with client(name, max_hold=0.05):
            await asyncio.Event().wait()
    lease = await client(name).acquire(timeout=None)
    await client.aclose()
    with pytest.raises(LockLost, match="its client was closed"):
        await lease.release()
    assert [record.levelname for record in lost_lines(caplog)] == ["WARNING", "INFO"]


async def test_no_loss_shows_an_id(server: Server, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its own nor that of the new owner, in the error and in the log."""
    async with Redlock(server.url, lease=LONG) as client, Redlock(server.url) as other:
        secrets: list[str] = []
        with pytest.raises(LockLost) as caught:
            async with asyncio.timeout(LIMIT), client(name) as lease:
                secrets.append(holder(server, name).decode().lstrip("+")[:32])
                with server.cli() as cli:
                    cli.flushdb()
                taken = await other(name).acquire(timeout=None)
                secrets.append(holder(server, name).decode().lstrip("+")[:32])
                renew_now(lease)
                await asyncio.Event().wait()
        await taken.release()
    shown = f"{caught.value} {caught.value.errors!r} {caplog.text}"
    assert "pid" in shown
    for secret in secrets:
        assert len(secret) == 32
        assert secret not in shown


async def test_many_losses_are_some_lines_and_a_count(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All leases of a client are lost in one outage: the log has some lines, and one that counts the others."""
    clock, count = FakeClock(), 2 * BURST
    async with Redlock(Clocked(server.url, clock), **MOVED) as client:
        leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(count)]
        server.freeze()
        await pass_lease(clock, client, 1)
        async with asyncio.timeout(LIMIT):
            assert all(await asyncio.gather(*(lease.wait_lost() for lease in leases)))
        server.thaw()
        for lease in leases:
            with pytest.raises(LockLost):
                await lease.release()
    lines = lost_lines(caplog)
    assert len(lines) == BURST + 1
    assert lines[-1].getMessage() == f"asynclock: and {count - BURST} more lost leases"
