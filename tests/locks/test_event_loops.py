"""One client object over several event loops, threads and forked processes (HAZARDS C8)."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asynclock import ConfigError, Lease, LockLost, Redlock
from asynclock.stores.redis.keys import RESERVED
from tests.support.programs import run_python
from tests.support.servers import Server
from tests.support.waiters import LIMIT

pytestmark = pytest.mark.both_loops("it is about event loops")


def held_keys(server: Server) -> list[str]:
    """The keys on the server without the library's own counters and marks."""
    with server.cli() as cli:
        keys: Any = cli.keys("*")
    return [key.decode() for key in keys if RESERVED.encode() not in key]


# -- loops -----------------------------------------------------------------------------------------------------------


def test_c8_one_client_over_loops_in_sequence(server: Server) -> None:
    """asyncio.run again and again: each loop connects anew, and fences rise over all of them."""
    redlock = Redlock(server.url)
    fences = []

    async def main() -> None:
        async with redlock("job") as lease:
            fences.append(lease.fence)

    for _ in range(3):
        asyncio.run(main())
    assert fences == sorted(set(fences))
    assert held_keys(server) == []


def test_c8_a_closed_client_serves_the_next_loop(server: Server) -> None:
    """aclose is of one loop."""
    redlock = Redlock(server.url)

    async def main() -> bool:
        async with redlock, redlock("job") as lease:
            return lease.held

    assert asyncio.run(main())
    assert asyncio.run(main())


def test_c8_a_lock_made_outside_any_loop(server: Server) -> None:
    """A Lock is a recipe: one object serves all loops."""
    lock = Redlock(server.url)("job")

    async def main() -> int:
        async with lock as lease:
            return lease.fence

    assert asyncio.run(main()) < asyncio.run(main())


def test_c8_f12_a_hold_left_in_a_loop_that_is_gone(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The end of a loop released its holds, so the next loop is granted at once. The lease may be in use still (a sync
    bridge returned it), so a WARNING and a ResourceWarning say what to do."""
    redlock = Redlock(server.url)
    leases = []

    async def leave() -> None:
        leases.append(await redlock("job").acquire(timeout=None))

    async def next_one() -> bool:
        async with redlock("job", timeout=5):
            return True

    with pytest.warns(ResourceWarning, match="the lease of 'job' was held at the end of its event loop"):
        asyncio.run(leave())
    assert not leases[0].held
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "'job'" in line
    assert "async_to_sync" in line
    assert asyncio.run(next_one())


def test_c8_threads_fight_over_one_name(server: Server) -> None:
    """Four threads, a loop each, one client: one holder at a time."""
    redlock = Redlock(server.url)
    inside = threading.Lock()
    total = 0

    async def worker() -> None:
        nonlocal total
        for _ in range(10):
            async with redlock("counter"):
                assert inside.acquire(blocking=False), "two threads are inside"
                before = total
                await asyncio.sleep(0)
                total = before + 1
                inside.release()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(asyncio.run, worker()) for _ in range(4)]:
            done.result()
    assert total == 40
    assert held_keys(server) == []


def test_c8_threads_meet_a_client_at_once(server: Server) -> None:
    """The first use from many threads at the same moment makes a session for each."""
    redlock = Redlock(server.url)
    together = threading.Barrier(8)

    async def worker(number: int) -> int:
        together.wait()
        async with redlock(f"job:{number}") as lease:
            return lease.fence

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: asyncio.run(worker(number)), range(8)))
    assert len(found) == 8


async def test_c8_another_loop_acquires_while_ended_tasks_are_forgotten(server: Server) -> None:
    """One Lock of many tasks. While this loop looks for those that have ended, each look lets a task of another thread
    acquire."""
    client, here = Redlock(server.url), threading.current_thread()
    lock, elsewhere = client.read("job"), asyncio.new_event_loop()
    thread = threading.Thread(target=elsewhere.run_forever)
    thread.start()
    leases: list[Any] = []
    looks = False

    class Watched(asyncio.Task[Any]):
        def done(self) -> bool:
            nonlocal looks
            if looks and threading.current_thread() is here:
                looks = False
                leases.append(asyncio.run_coroutine_threadsafe(lock.acquire(timeout=None), elsewhere).result(LIMIT))
                looks = True
            return super().done()

    loop = asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, coro, **options: Watched(coro, loop=loop, **options))  # type: ignore[arg-type]
    try:
        for number in range(70):
            looks = number > 60
            leases.append(await loop.create_task(lock.acquire(timeout=None)))
        looks = False
        assert len(leases) > 70
        assert all(lease.held for lease in leases)
    finally:
        looks = False
        loop.set_task_factory(None)
        await client.aclose()
        asyncio.run_coroutine_threadsafe(client.aclose(), elsewhere).result(LIMIT)
        elsewhere.call_soon_threadsafe(elsewhere.stop)
        thread.join(LIMIT)
        elsewhere.close()


# -- a lease elsewhere -----------------------------------------------------------------------------------------------


async def elsewhere(lease: Lease) -> list[str]:
    """The error of each use of a lease in another loop than its own."""
    said = []
    for use in (lease.release, lease.extend, lease.wait_lost, lease.__aenter__):
        with pytest.raises(ConfigError) as caught:
            await use()
        said.append(str(caught.value))
    return said


async def test_c8_a_lease_belongs_to_its_loop(server: Server) -> None:
    """In another loop each use raises; in its own it is still held."""
    async with Redlock(server.url) as redlock, redlock("job") as lease:
        with ThreadPoolExecutor(1) as pool:
            said = await asyncio.wrap_future(pool.submit(asyncio.run, elsewhere(lease)))
        assert all("another event loop" in each for each in said)
        assert lease.held
        await lease.extend()


async def test_c8_another_loop_is_excluded_too(server: Server) -> None:
    """Two loops of one client exclude each other like two clients."""
    redlock = Redlock(server.url)

    async def other() -> Lease | None:
        return await redlock("job").acquire(timeout=0)

    async with redlock, redlock("job"):
        with ThreadPoolExecutor(1) as pool:
            assert await asyncio.wrap_future(pool.submit(asyncio.run, other())) is None


async def test_a_lease_does_not_pickle(redlock: Redlock, name: str) -> None:
    """It is the tenure of one process."""
    async with redlock(name) as lease:
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(lease)


async def test_a_closed_client_says_so(server: Server) -> None:
    """After aclose: a clear error; after entering it again, it serves."""
    redlock = Redlock(server.url)
    lock = redlock("job")
    lease = await lock.acquire(timeout=None)
    await redlock.aclose()
    assert not lease.held
    with pytest.raises(ConfigError, match="closed"):
        await lock.acquire()
    with pytest.raises(LockLost) as caught:
        await lease.release()
    assert caught.value.reason == "closed"
    assert held_keys(server) == []
    async with redlock, lock as again:
        assert again.held


# -- fork ------------------------------------------------------------------------------------------------------------

FORK = """
    import asyncio, os, sys
    from pathlib import Path
    from asynclock import ConfigError, Redlock

    url, counter, count, how = sys.argv[1], Path(sys.argv[2]), 10, sys.argv[3]
    redlock = Redlock(url)

    async def add(times):
        for _ in range(times):
            async with redlock("counter"):
                before = int(counter.read_text())
                await asyncio.sleep(0)
                counter.write_text(str(before + 1))

    def child():
        asyncio.run(add(count))

    def forked():
        children = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child()
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        return children

    counter.write_text("0")
    asyncio.run(add(count))                      # used before the fork
    if how == "os.fork":
        children = forked()
        asyncio.run(add(count))
        for pid in children:
            assert os.waitpid(pid, 0)[1] == 0
    else:
        import multiprocessing
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=child) for _ in range(3)]
        for worker in workers:
            worker.start()
        asyncio.run(add(count))
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
    asyncio.run(add(count))                      # and after
    print(counter.read_text())
"""


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_c8_forked_workers_exclude_each_other(server: Server, tmp_path: Path, how: str) -> None:
    """A client made and used before the fork serves parent and children; not one count is lost."""
    assert run_python(FORK, server.url, str(tmp_path / "counter"), how) == "60\n"
    assert held_keys(server) == []


FORK_WHILE_HELD = """
    import asyncio, os, sys
    from asynclock import ConfigError, LockNotHeld, Redlock

    redlock = Redlock(sys.argv[1])

    async def use(lease):
        for use in (lease.release, lease.extend, lease.wait_lost, lease.__aenter__):
            try:
                await use()
            except ConfigError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError(f"{use} did not raise")
        assert await redlock("job").acquire(timeout=0) is None      # the parent has it
        async with redlock("of the child") as own:
            assert own.held

    def child(lease):
        # A child of a running loop starts its own: as multiprocessing's does, forget that one runs here.
        asyncio._set_running_loop(None)
        assert not lease.held and lease.remaining == 0.0
        try:
            lease.ensure_held()
        except LockNotHeld as error:
            assert "belongs to the parent process" in str(error), error
        else:
            raise AssertionError("it did not raise")
        asyncio.run(use(lease))

    async def main():
        async with redlock("job") as lease:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child(lease)
                    status = 0
                finally:
                    os._exit(status)
            assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
            assert lease.held
            await lease.extend()                 # the parent's connection is as it was
            async with redlock("another"):
                pass
        assert not await redlock("job").locked()
        await redlock.aclose()

    asyncio.run(main())
    print("fine")
"""


def test_c8_f9_a_lease_stays_with_the_parent(server: Server) -> None:
    """In a forked child its copy is not held and every use raises the reason; the parent keeps lease and connection."""
    assert run_python(FORK_WHILE_HELD, server.url) == "fine\n"
    assert held_keys(server) == []


# -- leaving without goodbye -----------------------------------------------------------------------------------------

READY_MADE = """
    import asyncio
    from asynclock import redlock

    async def main():
        async with redlock("job") as lease:
            assert lease.held
        print("done")

    asyncio.run(main())
"""
LEFT_HELD = """
    import asyncio, logging, warnings
    from asynclock import redlock

    logging.getLogger("asynclock").setLevel("ERROR")  # it warns of the lease that was not released

    async def main():
        global lease
        lease = await redlock("job").acquire()

    with warnings.catch_warnings(record=True, action="always") as caught:
        asyncio.run(main())
    assert [each.category for each in caught] == [ResourceWarning]
    assert not lease.held
    print("done")
"""
OUT_OF_REACH = """
    import asyncio, logging
    from asynclock import QuorumUnavailable, Redlock

    logging.getLogger("asynclock").setLevel("ERROR")  # it warns of the nodes that are down

    async def main():
        try:
            await Redlock("unix:///nonexistent/a.sock", patience=0.1)("job").acquire()
        except QuorumUnavailable:
            print("done")

    asyncio.run(main())
"""
DOUBLED = """
    import asyncio, logging, os
    from asynclock import ConfigError, Redlock

    logging.getLogger("asynclock").setLevel("ERROR")  # it warns of the nodes that are down
    url = os.environ["ASYNCLOCK_URLS"]
    os.symlink(url.removeprefix("unix://"), os.environ["ALIAS"])

    async def main():
        try:
            await Redlock(url, f"unix://{os.environ['ALIAS']}", "unix:///nonexistent/c.sock")("job").acquire()
        except ConfigError as error:
            assert "same server" in str(error)
            print("done")

    asyncio.run(main())
"""
SIGNALLED = """
    import asyncio, os, signal
    from asynclock import redlock

    async def main():
        async with redlock("job"):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("done")
"""


@pytest.mark.parametrize(
    "program",
    [READY_MADE, LEFT_HELD, OUT_OF_REACH, DOUBLED, SIGNALLED],
    ids=["ready made", "left held", "out of reach", "doubled", "interrupted"],
)
def test_c8_a_client_that_is_not_closed(server: Server, tmp_path: Path, program: str) -> None:
    """asyncio.run without aclose, in dev mode with warnings as errors: no warning, and no key is left."""
    assert run_python(program, ASYNCLOCK_URLS=server.url, ALIAS=str(tmp_path / "alias.sock")) == "done\n"
    assert held_keys(server) == []
