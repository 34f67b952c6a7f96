"""The examples keep their promises: real processes, real HTTP, real servers, under load and when a process dies.

Sync tests, so that they run once: the loop of the test makes no difference to the programs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import redis

from asynclock import Lease, Redlock
from tests.support.default_keys import key_of
from tests.support.servers import Server

ROOT = Path(__file__).parents[2]
LOAD = 100

_T = TypeVar("_T")
Start = Callable[..., "Program"]
Serve = Callable[..., list["Program"]]
Journal = Callable[[int], list[tuple[int, str]]]
_numbers = itertools.count()


def wait_for(what: Callable[[], _T], why: str, limit: float = 30.0) -> _T:
    """What `what` answers, once it is true; fails with `why` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.01)
    return found


class Program:
    """An example that runs in a process of its own; what it prints goes to a file."""

    def __init__(self, folder: Path, urls: list[str], example: str, args: tuple[str, ...], env: dict[str, str]) -> None:
        self.port = 0
        self._log = folder / f"{next(_numbers)}-{example}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "examples" / example), *args],
                env={
                    **{key: value for key, value in os.environ.items() if not key.startswith("SHOP")},
                    "PYTHONPATH": str(ROOT),
                    "ASYNCLOCK_URLS": ",".join(urls),
                    "SHOP": str(folder / "shop.sqlite"),
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        """All it has printed so far."""
        return self._log.read_text()

    def says(self, words: str) -> None:
        """Wait until it prints that."""
        wait_for(lambda: words in self.said or self.process.poll() is not None, f"no {words!r} in: {self.said}")
        assert words in self.said, self.said

    def serves(self) -> None:
        """Wait until it accepts connections."""
        wait_for(lambda: accepts(self.port) or self.process.poll() is not None, f"nobody on the port: {self.said}")
        assert self.process.poll() is None, self.said

    def ends(self) -> int:
        """Wait for its exit code."""
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.wait()


def accepts(port: int) -> bool:
    """Whether a server listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_port() -> int:
    """A port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(params=["one", "five"])
def urls(request: pytest.FixtureRequest, shared_urls: list[str]) -> list[str]:
    """One node, and a quorum of five."""
    return shared_urls[:1] if request.param == "one" else shared_urls


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts examples that share one shop, and ends them afterwards."""
    programs: list[Program] = []

    def program(urls: list[str], example: str, *args: str, **env: str) -> Program:
        programs.append(Program(tmp_path, urls, example, args, env))
        return programs[-1]

    yield program
    for each in programs:
        each.kill()


@pytest.fixture
def serve(start: Start) -> Serve:
    """Starts so many processes of one web app, and waits until they serve."""

    def serving(urls: list[str], example: str, count: int = 1, *, wait: float = 60.0, **env: str) -> list[Program]:
        apps = []
        for _ in range(count):
            port = free_port()
            apps.append(start(urls, example, "--port", str(port), "--wait", str(wait), **env))
            apps[-1].port = port
        for app in apps:
            app.serves()
        return apps

    return serving


@pytest.fixture
def order() -> int:
    """An order that no other test charges."""
    return os.getpid() * 1000 + next(_numbers)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Reads the shop's entries about an order: (fence, what), in the order in which things happened."""

    def entries(order: int) -> list[tuple[int, str]]:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.sqlite", timeout=10)) as shop:
            found = shop.execute("SELECT fence, what FROM journal WHERE order_id = ? ORDER BY entry", (order,))
            return found.fetchall()

    return entries


async def post(client: httpx.AsyncClient, app: Program, order: int) -> httpx.Response:
    """One customer's request."""
    return await client.post(f"http://127.0.0.1:{app.port}/orders/{order}/charge")


def post_once(app: Program, order: int) -> httpx.Response:
    """The same, alone."""

    async def once() -> httpx.Response:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await post(client, app, order)

    return asyncio.run(once())


async def post_at_once(apps: list[Program], order: int, count: int) -> list[httpx.Response]:
    """So many customers at once, spread over the apps."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        return await asyncio.gather(
            *(post(client, app, order) for app in itertools.islice(itertools.cycle(apps), count))
        )


async def take(urls: list[str], name: str, timeout: float) -> Lease | None:
    """Take the lock in this process, and give it back."""
    async with Redlock(*urls) as client:
        lease = await client(name).acquire(timeout=timeout)
        if lease is not None:
            await lease.release()
        return lease


both_apps = pytest.mark.parametrize("example", ["fastapi_app.py", "aiohttp_app.py"])


# -- the web apps ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@both_apps
# In one process the local queue passes the lock on, whatever the nodes. For two processes five nodes are harder.
@pytest.mark.parametrize(("urls", "processes"), [("one", 1), ("five", 2)], indirect=["urls"])
def test_one_charge_at_a_time_and_none_is_lost(
    serve: Serve, journal: Journal, urls: list[str], order: int, example: str, processes: int
) -> None:
    """A hundred customers at once on one order, over one process and over two: each charge begins after the last one
    ended, under a greater token, and each customer gets the reply to its own charge."""
    apps = serve(urls, example, processes)
    answers = asyncio.run(post_at_once(apps, order, LOAD))
    assert [answer.status_code for answer in answers] == [200] * LOAD
    entries = journal(order)
    assert [what for _, what in entries] == ["begin", "charged"] * LOAD
    begun, charged = ([fence for fence, _ in entries[i::2]] for i in (0, 1))
    assert begun == charged == sorted(set(charged))
    assert sorted(answer.json()["fence"] for answer in answers) == charged
    assert not any("Traceback" in app.said for app in apps)


@both_apps
def test_the_lock_of_a_client_that_disconnects_is_released(
    serve: Serve, journal: Journal, urls: list[str], order: int, example: str
) -> None:
    """It disconnects in the middle of a charge that would take an hour: the charge is cancelled and the name is free,
    long before the lease ends."""
    (app,) = serve(urls, example, SHOP_LATENCY="3600")
    with socket.create_connection(("127.0.0.1", app.port)) as customer:
        customer.sendall(f"POST /orders/{order}/charge HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n".encode())
        wait_for(lambda: journal(order), "the charge did not begin")
        assert asyncio.run(take(urls, f"order:{order}", timeout=0)) is None
    lease = asyncio.run(take(urls, f"order:{order}", timeout=10))  # the app's lease is 30 s, and renewed
    assert lease is not None
    assert [what for _, what in journal(order)] == ["begin", "cancelled"]
    assert "Traceback" not in app.said


@both_apps
def test_an_order_that_stays_busy_is_a_conflict(
    serve: Serve, journal: Journal, shared_urls: list[str], order: int, example: str
) -> None:
    """LockTimeout is a 409: another request held the order all the time; nothing was charged."""
    (app,) = serve(shared_urls, example, wait=0.2)

    async def customer_in_vain() -> httpx.Response:
        async with Redlock(*shared_urls) as other, other(f"order:{order}"):
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                return await post(client, app, order)

    assert asyncio.run(customer_in_vain()).status_code == 409
    assert journal(order) == []


@both_apps
def test_servers_out_of_reach_are_an_outage(
    serve: Serve, journal: Journal, server: Server, order: int, example: str
) -> None:
    """QuorumUnavailable is a 503 and charges nothing; the app serves again when the servers do."""
    (app,) = serve([server.url], example, wait=0.2)
    server.kill()
    answer = post_once(app, order)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert journal(order) == []
    server.restart()
    wait_for(lambda: post_once(app, order).status_code == 200, "no service after the outage")


# -- the worker ------------------------------------------------------------------------------------------------------


def test_workers_do_each_job_once(start: Start, journal: Journal, urls: list[str], order: int) -> None:
    """Two workers, one list, both started at once after they found every job taken: no job is done twice, none is
    left."""
    orders = [order * 100 + i for i in range(30)]

    async def released() -> list[Program]:
        async with Redlock(*urls) as other:
            leases = [await other(f"order:{each}").acquire(timeout=None) for each in orders]
            workers = [start(urls, "worker.py", "--timeout", "0.05", *map(str, orders)) for _ in range(2)]
            for worker in workers:
                await asyncio.to_thread(worker.says, f"order {orders[-1]}: another worker charges it")
            for lease in leases:
                await lease.release()
            return workers

    workers = asyncio.run(released())
    assert [worker.ends() for worker in workers] == [0, 0]
    for each in orders:
        assert [what for _, what in journal(each)] == ["begin", "charged"]
        assert sum(worker.said.count(f"order {each}: charged") for worker in workers) == 1


def test_a_killed_workers_job_is_done_by_another(start: Start, journal: Journal, urls: list[str], order: int) -> None:
    """kill -9 in the middle of a job: the worker that skipped it comes back to it, once the lease of the dead one is
    over."""
    dies = start(urls, "worker.py", "--lease", "1", str(order), SHOP_LATENCY="3600")
    wait_for(lambda: (dies.process.poll() is not None) or began(journal, order), f"no job began: {dies.said}")
    other = start(urls, "worker.py", "--lease", "1", "--timeout", "0.1", str(order))
    other.says(f"order {order}: another worker charges it")
    dies.kill()
    assert other.ends() == 0
    assert [what for _, what in journal(order)] == ["begin", "begin", "charged"]


def test_a_frozen_worker_is_refused_by_its_fence(
    start: Start, journal: Journal, shared_urls: list[str], order: int
) -> None:
    """No lease can stop a process that is frozen in the middle of a charge. When it wakes, another has charged the
    order: its charge fails, and the shop takes no entry under its old token."""
    sleeper = start(shared_urls, "worker.py", "--lease", "1", str(order), SHOP_LATENCY="3600")
    wait_for(lambda: (sleeper.process.poll() is not None) or began(journal, order), f"no job began: {sleeper.said}")
    sleeper.process.send_signal(signal.SIGSTOP)
    other = start(shared_urls, "worker.py", "--lease", "1", "--timeout", "0.1", str(order))
    assert other.ends() == 0
    sleeper.process.send_signal(signal.SIGCONT)
    assert sleeper.ends() != 0
    assert "LockLost" in sleeper.said
    entries = journal(order)
    assert [what for _, what in entries] == ["begin", "begin", "charged"]
    assert entries[0][0] < entries[1][0] == entries[2][0]


def began(journal: Journal, order: int) -> bool:
    """Whether a charge of it began; not before there is a shop."""
    with contextlib.suppress(sqlite3.OperationalError):
        return bool(journal(order))
    return False


# -- the long job ----------------------------------------------------------------------------------------------------


def test_a_long_job_keeps_its_name_for_many_leases(start: Start, urls: list[str], name: str) -> None:
    """Four leases long: another process tries in vain until the job is done, and has the name as soon as it ends."""
    job = start(urls, "long_job.py", "--name", name, "--lease", "1", "--seconds", "4")
    job.says("%")

    async def try_on() -> int:
        tries = 0
        async with Redlock(*urls) as other:
            while (lease := await other(name).acquire(timeout=0)) is None:
                tries += 1
                assert job.process.poll() is None, job.said
                await asyncio.sleep(0.01)  # a breath: the job has two cores to share with us
            # The job prints its last step before it gives the name back, so that the line is there before our grant.
            assert "100%" in job.said, f"taken after {tries} tries, while the job ran: {job.said}"
            await lease.release()
        return tries

    assert asyncio.run(try_on()) > 0
    assert job.ends() == 0
    assert job.said.endswith("done\n")
    assert job.said.count("%") == 40


def test_a_killed_long_job_frees_its_name(start: Start, urls: list[str], name: str) -> None:
    """kill -9: the name is taken until the lease is over, and free then."""
    job = start(urls, "long_job.py", "--name", name, "--lease", "1", "--seconds", "3600")
    job.says("%")
    job.kill()
    assert job.process.returncode == -signal.SIGKILL
    # At most the lease and one pause of the waiter; the rest is for a machine that is busy.
    assert asyncio.run(take(urls, name, timeout=5)) is not None


def test_a_long_job_runs_once_at_a_time(start: Start, urls: list[str], name: str) -> None:
    """A second run at the same time ends at once, and says so with its exit code."""
    job = start(urls, "long_job.py", "--name", name, "--seconds", "3600")
    job.says("%")
    second = start(urls, "long_job.py", "--name", name, "--seconds", "3600")
    assert second.ends() == os.EX_TEMPFAIL
    assert second.said == f"{name} runs elsewhere\n"


def test_a_long_job_that_loses_its_lease_fails(start: Start, urls: list[str], name: str) -> None:
    """An operator deletes the key: the job stops in the middle, and its exit code says that it is not done."""
    job = start(urls, "long_job.py", "--name", name, "--lease", "1", "--seconds", "3600")
    job.says("%")
    for url in urls:
        with contextlib.closing(redis.Redis.from_url(url)) as operator:
            assert operator.delete(key_of(name)) == 1
    assert job.ends() == 1
    assert "stopped: lost the lock" in job.said
    assert "done" not in job.said
