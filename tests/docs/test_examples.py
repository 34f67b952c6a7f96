"""The examples keep their promises: real processes, real HTTP, real servers, under load and when a process dies.

The tests of processes are sync, so that they run once: the loop of the test makes no difference to the programs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import runpy
import signal
import socket
from pathlib import Path

import httpx
import pytest
import redis

from asynclock import Lease, LockTimeout, Redlock
from asynclock.testing import FakeStore, use
from tests.support.default_keys import key_of
from tests.support.example_programs import Journal, Payments, Program, Serve, Start, pays, take, wait_for
from tests.support.servers import Server
from tests.support.waiters import IN_VAIN

pytestmark = pytest.mark.xdist_group("examples")  # one process imports the frameworks for all

EXAMPLES = Path(__file__).parents[2] / "examples"
LOAD = 100

LEASE = ("--lease", "9")
"""A lease whose end a test waits for. Its owner may stand still for some seconds without a loss."""


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


both_apps = pytest.mark.parametrize("example", ["fastapi_app.py", "aiohttp_app.py"])


# -- the web apps ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@both_apps
# In one process the local queue passes the lock on, whatever the nodes. For two processes five nodes are harder.
@pytest.mark.parametrize(("urls", "processes"), [("one", 1), ("five", 2)], indirect=["urls"])
def test_an_order_is_charged_once(
    serve: Serve, journal: Journal, urls: list[str], order: int, example: str, processes: int
) -> None:
    """A hundred customers at once on one order, over one process and over two: the first holder of the lock charges it,
    all others find that under a greater token, and each customer gets the reply to its own request."""
    apps = serve(urls, example, processes)
    answers = asyncio.run(post_at_once(apps, order, LOAD))
    assert [answer.status_code for answer in answers] == [200] * LOAD
    fences = sorted({answer.json()["fence"] for answer in answers})
    assert len(fences) == LOAD
    assert journal(order) == [(fences[0], "begin"), (fences[0], "charged")]
    assert not any("Traceback" in app.said for app in apps)


def customer(app: Program, order: int) -> socket.socket:
    """A client that has sent its request, and hangs up when the socket is closed."""
    connected = socket.create_connection(("127.0.0.1", app.port))
    connected.sendall(f"POST /orders/{order}/charge HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n".encode())
    return connected


@both_apps
def test_f13_a_charge_that_has_begun_ends_although_its_client_disconnects(
    serve: Serve, journal: Journal, urls: list[str], order: int, example: str
) -> None:
    """The order is charged once, under the lock, which is free after that."""
    (app,) = serve(urls, example, SHOP_LATENCY="3")
    with customer(app, order):
        wait_for(lambda: journal(order), "the charge did not begin")
    taken = asyncio.run(take(urls, f"order:{order}", timeout=0))
    assert taken is None or len(journal(order)) > 1, "taken while the charge ran"
    wait_for(lambda: len(journal(order)) > 1, "the charge did not end")
    assert [what for _, what in journal(order)] == ["begin", "charged"]
    lease = asyncio.run(take(urls, f"order:{order}", timeout=20))  # the app's lease is 30 s, and renewed
    assert lease is not None
    assert "Traceback" not in app.said


@both_apps
def test_f13_a_client_that_disconnects_while_it_waits_is_not_served(
    serve: Serve, journal: Journal, urls: list[str], order: int, example: str
) -> None:
    """Its wait ends, long before the timeout of the app. Nothing is charged."""
    (app,) = serve(urls, example, wait=600)

    async def hang_up() -> None:
        async with Redlock(*urls) as other, other(f"order:{order}"):

            async def tasks() -> int:
                return sum(each.tasks for each in (await other.inspect(f"order:{order}")).waiters)

            async with asyncio.timeout(30):
                with customer(app, order):
                    while not await tasks():
                        await asyncio.sleep(0.01)
                while await tasks():
                    await asyncio.sleep(0.01)

    asyncio.run(hang_up())
    assert asyncio.run(take(urls, f"order:{order}", timeout=10)) is not None
    assert journal(order) == []
    assert "Traceback" not in app.said


@both_apps
def test_an_order_that_stays_busy_is_a_conflict(
    serve: Serve, journal: Journal, shared_urls: list[str], order: int, example: str
) -> None:
    """LockTimeout is a 409: another request held the order all the time; nothing was charged."""
    (app,) = serve(shared_urls, example, wait=IN_VAIN)

    async def customer_in_vain() -> int:
        async with Redlock(*shared_urls) as other, other(f"order:{order}"):
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                while (status := (await post(client, app, order)).status_code) == 503:
                    pass  # no majority answered near the end of the wait, on a busy machine
                return status

    assert asyncio.run(customer_in_vain()) == 409
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
    orders = [order * 100 + i for i in range(5)]

    async def released() -> list[Program]:
        async with Redlock(*urls) as other:
            leases = [await other(f"order:{each}").acquire(timeout=None) for each in orders]
            workers = [start(urls, "worker.py", "--timeout", "2", *map(str, orders)) for _ in range(2)]
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


def test_a_killed_workers_job_is_done_by_another(
    start: Start, journal: Journal, payments: Payments, urls: list[str], order: int
) -> None:
    """kill -9 in the middle of a job: the worker that skipped it comes back to it, once the lease of the dead one is
    over. The payment provider had the first request, and takes no money for the second one."""
    dies = start(urls, "worker.py", *LEASE, str(order), SHOP_LATENCY="3600")
    wait_for(lambda: (dies.process.poll() is not None) or pays(payments, order), f"no job began: {dies.said}")
    other = start(urls, "worker.py", "--timeout", "2", str(order))
    other.says(f"order {order}: another worker charges it")
    dies.kill()
    assert other.ends() == 0
    assert [what for _, what in journal(order)] == ["begin", "begin", "charged"]
    assert payments(order) == 1


def test_a_frozen_worker_is_refused_by_its_fence(
    start: Start, journal: Journal, payments: Payments, shared_urls: list[str], order: int
) -> None:
    """No lease can stop a process that is frozen in the middle of a charge. When it wakes, another has charged the
    order: its charge fails, and the shop takes no entry under its old token."""
    sleeper = start(shared_urls, "worker.py", *LEASE, str(order), SHOP_LATENCY="3600")
    # Once the provider has its request it waits, and has no lock of the shop's file.
    wait_for(lambda: (sleeper.process.poll() is not None) or pays(payments, order), f"no job began: {sleeper.said}")
    sleeper.process.send_signal(signal.SIGSTOP)
    other = start(shared_urls, "worker.py", "--timeout", "2", str(order))
    assert other.ends() == 0, other.said
    sleeper.process.send_signal(signal.SIGCONT)
    assert sleeper.ends() != 0
    assert "LockLost" in sleeper.said
    entries = journal(order)
    assert [what for _, what in entries] == ["begin", "begin", "charged"]
    assert entries[0][0] < entries[1][0] == entries[2][0]


# -- the long job ----------------------------------------------------------------------------------------------------


def test_a_long_job_keeps_its_name_for_many_leases(start: Start, urls: list[str], name: str) -> None:
    """Two leases long: another process tries in vain until the job is done, and has the name as soon as it ends."""
    job = start(urls, "long_job.py", "--name", name, *LEASE, "--seconds", "18")
    job.says("%")

    async def try_on() -> int:
        tries = 0
        async with Redlock(*urls) as other:
            while (lease := await other(name).acquire(timeout=0)) is None:
                tries += 1
                assert job.process.poll() is None, job.said
                await asyncio.sleep(0.05)  # a breath: the job has two cores to share with us
            # The job prints its last step before it gives the name back, so that the line is there before our grant.
            assert "100%" in job.said, f"taken after {tries} tries, while the job ran: {job.said}"
            await lease.release()
        return tries

    assert asyncio.run(try_on()) > 0
    assert job.ends() == 0
    assert job.said.endswith("done\n")
    assert job.said.count("%") == 180


def test_a_killed_long_job_frees_its_name(start: Start, urls: list[str], name: str) -> None:
    """kill -9: the name is free once the lease is over."""
    job = start(urls, "long_job.py", "--name", name, *LEASE, "--seconds", "3600")
    job.says("%")
    job.kill()
    assert job.process.returncode == -signal.SIGKILL
    assert asyncio.run(take(urls, name, timeout=20)) is not None


def test_a_long_job_runs_once_at_a_time(start: Start, urls: list[str], name: str) -> None:
    """A second run at the same time ends at once, and says so with its exit code."""
    job = start(urls, "long_job.py", "--name", name, "--lease", "30", "--seconds", "3600")
    job.says("%")
    second = start(urls, "long_job.py", "--name", name, "--lease", "30", "--seconds", "3600")
    assert second.ends() == os.EX_TEMPFAIL
    assert second.said == f"{name} runs elsewhere\n"


async def test_a_long_job_with_a_busy_lock_of_its_own_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lock that the job waits for in vain is an error. It does not say that the job runs elsewhere."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    main = runpy.run_path(str(EXAMPLES / "long_job.py"))["main"]

    async def job(lease: Lease, seconds: float) -> None:
        raise LockTimeout("another")

    main.__globals__["job"] = job
    with use(FakeStore()), pytest.raises(LockTimeout):
        await main("nightly", 1, 30)


def test_a_long_job_that_loses_its_lease_fails(start: Start, urls: list[str], name: str) -> None:
    """An operator deletes the key: the job stops in the middle, and its exit code says that it is not done."""
    job = start(urls, "long_job.py", "--name", name, *LEASE, "--seconds", "3600")
    job.says("%")
    deleted = 0
    for url in urls:  # most have the hold; once most have lost it, the job itself may delete the rest
        with contextlib.closing(redis.Redis.from_url(url)) as operator:
            deleted += int(operator.delete(key_of(name)))
    assert deleted > 0
    assert job.ends() == 1
    assert "stopped: lost the lock" in job.said
    assert "done" not in job.said
