"""A client of the first release and one of today on the same servers, as during a rolling upgrade: they exclude each
other, wake each other, and their fencing tokens rise, in every kind.

The old one is taken from git and runs in a process of its own (`support/other_version.py`). The prefix is given
explicitly, since its default may differ. Leases last ten minutes: no lease ends and no ticket is renewed while a test
waits. So a waiter that is served was notified by the other version's release.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from asynclock import Lease, LockNotHeld, Redlock, Skipped
from asynclock.stores.redis.keys import keys
from tests.support.other_version import LIMIT, Peer, lock_of
from tests.support.probes import id_of
from tests.support.waiters import rise, until

OLD = "255fc8a30b771cccb869d33d4661ac9c3510c51a"
"""The commit whose wire format is the first that a fleet may still run."""

LONG = 600.0

KINDS = ["mutex", "fair", "reentrant", "read", "write", "semaphore", "multi"]
MOVABLE = ["mutex", "fair", "read", "write", "semaphore"]


def against(kind: str) -> str:
    """A kind that a holder of `kind` excludes: itself, but for readers."""
    return "write" if kind == "read" else kind


@pytest.fixture(scope="module")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the old package in it."""
    here = Path(__file__).parent

    def git(*words: str) -> bytes:
        try:
            return subprocess.run(["git", "-C", str(here), *words], capture_output=True, check=True).stdout
        except FileNotFoundError:
            pytest.skip("git is not installed, and the old version comes from the repository")
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode(errors="replace").strip()
            pytest.skip(f"this is no full clone: commit {OLD[:7]} is not there ({why}); git fetch --unshallow gets it")

    top = git("rev-parse", "--show-toplevel").decode().strip()
    archive = git("-C", top, "archive", OLD, "asynclock")
    folder = tmp_path_factory.mktemp("old")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


@pytest.fixture(scope="module")
def old_process(old_package: Path) -> Iterator[Peer]:
    peer = Peer(old_package)
    yield peer
    peer.stop()


@pytest.fixture(params=["one", "five"])
def urls(request: pytest.FixtureRequest, shared_urls: list[str]) -> list[str]:
    return shared_urls[:1] if request.param == "one" else shared_urls


@pytest.fixture
def options(name: str) -> dict[str, Any]:
    """The same for both versions; nobody else uses the prefix. A busy machine is no outage."""
    return {"prefix": f"{name}:", "lease": LONG, "max_lease": LONG, "node_timeout": 2.0, "patience": LIMIT}


@pytest.fixture
async def old(old_process: Peer, urls: list[str], options: dict[str, Any]) -> AsyncIterator[Peer]:
    """A client of the old version."""
    await old_process.ask("open", urls=urls, options=options)
    yield old_process
    await old_process.ask("open", urls=["memory:"], options={})


@pytest.fixture
async def new(urls: list[str], options: dict[str, Any]) -> AsyncIterator[Redlock]:
    """A client of the new version."""
    async with Redlock(*urls, **options) as client:
        yield client


async def queued(client: Redlock, name: str, count: int = 1) -> None:
    """Return once so many waiters have tickets at a majority of the nodes."""
    async with asyncio.timeout(LIMIT):
        while sum(waiter.tasks for waiter in (await client.inspect(name)).waiters) != count:
            await asyncio.sleep(0.005)


async def taken(client: Redlock, kind: str, name: str) -> Lease:
    async with asyncio.timeout(LIMIT):
        return await lock_of(client, kind, name).acquire(timeout=None)


def test_the_old_process_runs_the_old_package(old_package: Path, old_process: Peer) -> None:
    """Not the package under test, which its environment has as well."""
    assert old_process.module.is_relative_to(old_package)


@pytest.mark.parametrize("kind", KINDS)
async def test_they_exclude_and_wake_each_other(old: Peer, new: Redlock, kind: str) -> None:
    """The hold goes new, old, new, old. Each time the other is refused first, then waits, and is served by the release.
    Each hold has a greater token than the one before it, and can be extended while the other waits."""
    other = against(kind)
    fences = []

    lease = await taken(new, kind, "name")
    for _ in range(2):
        fences.append(lease.fence)
        assert await old.take("old", other, "name", timeout=0) is None
        waiting = asyncio.create_task(old.take("old", other, "name"))
        await queued(new, "name")
        await lease.extend()
        assert not waiting.done()
        await lease.release()
        fences.append(await waiting or 0)

        assert await lock_of(new, kind, "name").acquire(timeout=0) is None
        comes = asyncio.create_task(taken(new, kind, "name"))
        await queued(new, "name")
        await old.ask("extend", as_="old")
        assert not comes.done()
        await old.ask("give", as_="old")
        lease = await comes
    fences.append(lease.fence)
    await lease.release()
    assert rise(fences), fences
    assert not (await new.inspect("name")).holders


async def test_readers_of_both_share(old: Peer, new: Redlock) -> None:
    """A reader of each version at once; a writer of either is served when the last of them has left."""
    for number, writer in enumerate(("old", "new")):
        name = f"name{number}"
        lease = await taken(new, "read", name)
        assert await old.take("reader", "read", name, timeout=0)
        wants = old.take("writer", "write", name) if writer == "old" else taken(new, "write", name)
        waiting = asyncio.create_task(wants)
        await queued(new, name)
        await lease.release()
        assert not waiting.done()
        await old.ask("give", as_="reader")
        got = await waiting
        if isinstance(got, Lease):
            await got.release()
        else:
            await old.ask("give", as_="writer")


@pytest.mark.parametrize("urls", ["five"], indirect=True)
async def test_a_reader_is_healed_before_a_waiter_of_the_old(
    old: Peer, new: Redlock, shared_urls: list[str], options: dict[str, Any]
) -> None:
    """A node loses the hold of a reader of the new version while a writer of the old one waits there. The reader gets
    it back with its next renewal, and the writer gets the name with its release."""
    lease = await taken(new, "read", "name")
    waiting = asyncio.create_task(old.take("writer", "write", "name"))
    at = keys(options["prefix"], "name")
    with redis.Redis.from_url(shared_urls[0]) as cli:
        await until(lambda: cli.exists(at.hold, at.queue) == 2)
        cli.delete(at.hold)
        async with asyncio.timeout(LIMIT):
            while not cli.exists(at.hold):
                await lease.extend()
        found: Any = cli.zrange(at.hold, 0, -1)
        assert found == [id_of(lease).encode()]
    assert not waiting.done()
    await lease.release()
    assert await waiting
    await old.ask("give", as_="writer")


async def test_permits_of_both_count_together(old: Peer, new: Redlock) -> None:
    """One of either, where there is one, and no third where there are two."""
    first = await new.semaphore("name", 2).acquire(timeout=0)
    assert first is not None
    second = await new.semaphore("name", 2).acquire(timeout=0)
    assert second is not None
    assert await old.take("old", "semaphore", "name", timeout=0) is None
    waiting = asyncio.create_task(old.take("old", "semaphore", "name"))
    await queued(new, "name")
    await first.release()
    await second.release()
    fence = await waiting
    assert fence is not None
    assert fence > max(first.fence, second.fence)
    third = await new.semaphore("name", 2).acquire(timeout=0)
    assert third is not None
    assert await new.semaphore("name", 2).acquire(timeout=0) is None
    await third.release()
    await old.ask("give", as_="old")


async def test_both_wait_in_one_fair_queue(old: Peer, new: Redlock) -> None:
    """They are served in the order in which they came, whatever their version."""
    order: list[str] = []

    async def old_one(who: str) -> None:
        await old.take(who, "fair", "name")
        order.append(who)
        await old.ask("give", as_=who)

    async def new_one(who: str, client: Redlock) -> None:
        lease = await taken(client, "fair", "name")
        order.append(who)
        await lease.release()

    first = await taken(new, "fair", "name")
    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(old_one(f"old{number}")))
        await queued(new, "name", 2 * number + 1)
        waiting.append(asyncio.create_task(new_one(f"new{number}", new)))
        await queued(new, "name", 2 * number + 2)
    await first.release()
    await asyncio.gather(*waiting)
    assert order == ["old0", "new0", "old1", "new1", "old2", "new2"]


@pytest.mark.parametrize("kind", MOVABLE)
async def test_a_hold_moves_between_them(old: Peer, new: Redlock, kind: str) -> None:
    """Detached by one version and adopted by the other, there and back: it is never free, the token rises, and a handle
    is good for one adoption."""
    lease = await taken(new, kind, "name")
    fences = [lease.fence]
    handle = await lease.detach()
    fences.append((await old.ask("adopt", as_="old", handle=handle))["fence"])
    with pytest.raises(LockNotHeld):
        await new.adopt(handle)
    assert await lock_of(new, against(kind), "name").acquire(timeout=0) is None
    adopted = await new.adopt((await old.ask("detach", as_="old"))["handle"])
    fences.append(adopted.fence)
    assert await old.take("old", against(kind), "name", timeout=0) is None
    await adopted.release()
    fences.append(await old.take("old", kind, "name", timeout=0) or 0)
    await old.ask("give", as_="old")
    assert rise(fences), fences


@pytest.mark.parametrize("kind", ["mutex", "write", "semaphore"])
async def test_a_break_by_the_old_reaches_the_new(old: Peer, new: Redlock, kind: str) -> None:
    """An operator of the old version frees a name that a client of the new one holds: its lease is lost at once."""
    lease = await taken(new, kind, "name")
    assert (await old.ask("break", name="name"))["broken"]
    async with asyncio.timeout(LIMIT):
        assert await lease.wait_lost()
    assert await old.take("old", kind, "name", timeout=0)
    await old.ask("give", as_="old")


@pytest.mark.parametrize("urls", ["one"], indirect=True)
@pytest.mark.parametrize("kind", ["mutex", "write", "semaphore"])
async def test_a_break_by_the_new_reaches_the_old(old: Peer, new: Redlock, kind: str) -> None:
    """The other way round. On one node only: over several, the old version may heal a hold of its own while the break
    comes in node by node, whichever version breaks it."""
    assert await old.take("old", kind, "name", timeout=0)
    assert await new.break_lock("name")
    assert (await old.ask("lost", as_="old"))["lost"]
    await (await taken(new, kind, "name")).release()


async def test_once_is_once_for_both(old: Peer, new: Redlock) -> None:
    """What one version has run, the other does not run again."""

    async def run() -> bool:
        return True

    assert (await old.ask("once", name="first"))["ran"]
    assert isinstance(await new.once("first", within=LIMIT)(run)(), Skipped)
    assert await new.once("second", within=LIMIT)(run)() is True
    assert not (await old.ask("once", name="second"))["ran"]
