"""The thread of renew="thread": when it runs and when it ends; forks; stores; and the votes that two threads count."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, Lease, LockLost, Redlock, Unsupported
from asynclock._flood import BURST
from asynclock.protocol.watchdog import RENEW_BELOW, thread_extends_by
from asynclock.quorum.ballot import Ballot, drift
from asynclock.rules.model import EXTEND, Op
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Refused
from asynclock.stores.sql.store import SQLStore
from tests.support.blocked_loop import block_until, renewal_threads
from tests.support.fake_clock import FakeClock
from tests.support.probes import clock_of, hold_of, replace_ask, session_of, valid_until
from tests.support.programs import run_python
from tests.support.servers import Server
from tests.support.user_store import DictStore
from tests.support.waiters import until

pytestmark = pytest.mark.both_loops("the thread has to wake the loop")

# -- when it runs ------------------------------------------------------------------------------------------------------


async def test_it_starts_with_the_first_lease_and_ends_with_the_client(server: Server, name: str) -> None:
    """Not before; a second lease has the same thread; and no socket is left."""
    with server.cli() as cli:
        before = len(cli.client_list())
        async with Redlock(server.url, renew="thread") as redlock:
            assert renewal_threads() == []
            async with redlock(name), redlock(f"{name}:2"):
                assert len(renewal_threads()) == 1
                while len(cli.client_list()) < before + 2:
                    await asyncio.sleep(0.01)
        assert renewal_threads() == []
        await until(lambda: len(cli.client_list()) == before)  # the server reads the end of a connection a moment later


async def test_it_ends_although_a_server_is_frozen(server: Server, name: str) -> None:
    """Closing the client does not wait for the server's word."""
    async with Redlock(server.url, renew="thread", lease=1.0) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        while len(server.cli().client_list()) < 3:
            await asyncio.sleep(0.01)
        server.freeze()
        block_until(lambda: not lease.held)
        with pytest.raises(LockLost):
            await lease.release()
    assert renewal_threads() == []
    server.thaw()


async def test_a_thread_that_cannot_start_is_logged(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system has no more threads. The lease is held, and the next one tries again."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with Redlock("memory:", renew="thread") as redlock:
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", refused)
            async with redlock(name) as lease:
                assert lease.held
        assert "cannot start" in caplog.text
        assert renewal_threads() == []
        async with redlock(name):
            assert len(renewal_threads()) == 1


async def test_threads_that_cannot_start_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each lease tries again, so a program that takes many would log as many tracebacks."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    async with Redlock("memory:", renew="thread") as redlock:
        for _ in range(3 * BURST):
            async with redlock(name):
                pass
        assert caplog.text.count("cannot start") == BURST
    assert f"and {2 * BURST} more times that the renewal thread could not start" in caplog.text


async def test_there_is_none_by_default(redlock: Redlock, name: str) -> None:
    """renew=True needs no thread."""
    async with redlock(name):
        assert renewal_threads() == []


async def test_a_lock_may_ask_for_it(server: Server, name: str) -> None:
    """It is an option of the lock as well as of the client, and a lock can decline it."""
    async with Redlock(server.url) as redlock, redlock(name, renew="thread"):
        assert len(renewal_threads()) == 1
    async with Redlock(server.url, renew="thread") as redlock, redlock(name, renew=True):
        assert renewal_threads() == []


async def test_while_the_loop_is_on_time_only_the_loop_renews(server: Server, name: str) -> None:
    """If the loop does not renew a lease although it runs, the thread does not do so either."""
    async with Redlock(server.url, lease=1.0, renew="thread") as redlock:
        lease = await redlock(name).acquire(timeout=None)
        hold_of(lease).renew_at = math.inf
        assert await lease.wait_lost()


# -- programs ----------------------------------------------------------------------------------------------------------

FORKED = """
    import asyncio, logging, os, signal, sys, warnings
    from asynclock import Redlock
    from tests.support.blocked_loop import renewal_threads, try_elsewhere

    logging.getLogger("asynclock").setLevel("ERROR")
    warnings.simplefilter("ignore", DeprecationWarning)     # a program that forks while it has threads is warned
    redlock = Redlock(sys.argv[1], lease=6.0, renew="thread", node_timeout=2.0)

    async def child(inherited):
        assert not inherited.held
        async with redlock("child") as lease:
            assert len(renewal_threads()) == 1
            assert not try_elsewhere([sys.argv[1]], "child", 7.2)
            assert lease.held
        await redlock.aclose()
        assert renewal_threads() == []

    async def parent():
        return await redlock("parent").acquire(timeout=0)

    loop = asyncio.SelectorEventLoop()
    lease = loop.run_until_complete(parent())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(40)
            assert renewal_threads() == []
            asyncio.run(child(lease))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0                # blocks the parent's loop for more than a lease
    assert lease.held
    loop.run_until_complete(lease.release())
    loop.run_until_complete(redlock.aclose())
    loop.close()
    print("fine")
"""


def test_c8_a_forked_child_has_a_thread_of_its_own(server: Server) -> None:
    """The parent's thread is not in the child, and keeps the lease of the parent."""
    assert run_python(FORKED, server.url) == "fine\n"


ENDED = """
    import asyncio, sys, warnings
    from asynclock import Redlock
    from tests.support.blocked_loop import renewal_threads

    warnings.simplefilter("ignore")                  # the program leaves all open: that is what this test is about
    redlock = Redlock(sys.argv[1], renew="thread")

    async def use():
        return await redlock("job").acquire(timeout=0)

    loop = asyncio.SelectorEventLoop()
    lease = loop.run_until_complete(use())
    assert len(renewal_threads()) == 1
    print("fine")
    if sys.argv[2] == "close the loop":
        [thread] = renewal_threads()
        loop.close()
        thread.join(20)
        assert not thread.is_alive()
"""


@pytest.mark.parametrize("how", ["leave all open", "close the loop"])
def test_a_program_that_closes_nothing_ends(server: Server, how: str) -> None:
    """The thread does not keep the interpreter alive; and it ends with the loop that it serves."""
    assert run_python(ENDED, server.url, how) == "fine\n"


# -- stores and options ------------------------------------------------------------------------------------------------


async def test_a_store_that_threads_cannot_share_is_refused(name: str) -> None:
    """By the client and by the lock; the error of a store of asynclock says why it is none. A store that says that it
    can be shared is accepted."""
    for make in (
        lambda: Redlock(DictStore(), renew="thread"),
        lambda: Redlock(DictStore())(name, renew="thread"),
    ):
        with pytest.raises(Unsupported, match="thread_safe"):
            make()

    with pytest.raises(Unsupported, match="give the url in place of the engine"):
        Redlock(SQLStore(create_async_engine("sqlite+aiosqlite://")), renew="thread")
    with pytest.raises(Unsupported, match="its session is the lease"):
        Redlock("zookeeper://127.0.0.1:1/locks", renew="thread")

    class Shared(DictStore):
        thread_safe = True

    assert Redlock(Shared(), renew="thread")(name, renew="thread").name == name


@pytest.mark.parametrize("where", ["lock", "synchronized", "client"])
async def test_a_client_that_learns_its_store_later_refuses_at_the_first_acquire(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was unknown when the lock was made, or the function decorated; or the option is the client's, and the
    store comes from the environment."""
    client = Redlock()
    options: dict[str, Any] = {}
    if where == "client":
        client.configure(renew="thread")
        monkeypatch.setenv("ASYNCLOCK_URLS", "zookeeper://127.0.0.1:1/locks")
    else:
        options = {"renew": "thread"}
    lock = client(name, **options)

    @client.synchronized(name, **options)
    async def work() -> None: ...

    if where != "client":
        client.configure(DictStore())
    with pytest.raises(Unsupported, match="renew='thread' needs a store that threads can share"):
        await (work() if where == "synchronized" else lock.acquire(timeout=0))
    await client.aclose()


async def test_a_store_with_a_clock_of_its_own_has_no_thread(name: str) -> None:
    """Real time does not pass there. The loop renews, as ever."""
    clock = FakeClock()
    redlock = Redlock(MemoryStore(clock), renew="thread")
    async with redlock(name) as lease:
        for _ in range(10):
            clock.advance(10.0)
            for _ in range(5):
                await asyncio.sleep(0)
            assert lease.held
        assert renewal_threads() == []
    await redlock.aclose()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"renew": "threads"}, "renew is True, False or 'thread', not 'threads'"),
        ({"renew": 1}, "renew is True, False or 'thread', not 1"),
        ({"max_block": 0}, "max_block=0 s is out of range"),
        ({"max_block": 400}, "max_block=400 s is above fence_memory=300 s"),
    ],
)
def test_wrong_options_are_refused(options: Any, said: str) -> None:
    """With what to write instead."""
    with pytest.raises(ConfigError, match=said):
        Redlock("memory:", **options)


# -- what is due (pure), and the votes that two threads count ----------------------------------------------------------

FAR = math.inf
FULL = 30.0 - drift(30.0)


@pytest.mark.parametrize(
    ("now", "ends", "limit", "expected"),
    [
        (0.0, FULL, FAR, 0.0),  # granted a moment ago
        (9.0, FULL, FAR, 0.0),  # more than two thirds remain
        (11.0, FULL, FAR, 30.0),
        (FULL, FULL, FAR, 0.0),  # over: it is not extended
        (29.0, -math.inf, FAR, 0.0),  # a majority has refused
        (11.0, FULL, 60.0, 30.0),
        (40.0, 59.0, 60.0, 20.0),  # it may end at 60 at the latest
        (50.0, 59.9, 60.0, 0.0),  # nothing would be gained
        (11.0, FULL, 5.0, 0.0),  # the limit is over
    ],
)
def test_what_the_thread_extends(now: float, ends: float, limit: float, expected: float) -> None:
    """A lease of 30 s: by how many seconds."""
    assert thread_extends_by(now, ends, 30.0, limit) == pytest.approx(expected)
    assert RENEW_BELOW == 2 / 3


def renewal(lease: Lease, sent: float) -> Ballot:
    """A renewal that was sent then, with a grant of each of three nodes."""
    grant = hold_of(lease).op
    ballot = Ballot(Op(EXTEND, grant.kind, grant.name, grant.id, 30.0), 3, sent, sent + 1.0)
    ballot.votes[:] = [(0, False)] * 3
    return ballot


@pytest.mark.parametrize("thread_is_refused", [False, True])
async def test_an_older_grant_does_not_undo_a_refusal(name: str, thread_is_refused: bool) -> None:
    """A node refuses a renewal of one thread. Then the other thread handles a grant of an earlier renewal. The node may
    have given it while it still had the key, so it does not count. The grant of a later renewal counts."""
    redlock = Redlock(MemoryStore(), MemoryStore(), MemoryStore(), renew="thread")
    async with redlock(name) as lease:
        hold, now, promised = hold_of(lease), clock_of(redlock).now(), valid_until(lease)
        early, soon, late = (renewal(lease, now + after) for after in (0.0, 5.0, 6.0))
        refuse, grant = hold.count, hold.count_in_thread
        if thread_is_refused:
            refuse, grant = grant, refuse
        grant(soon, 0)  # from here on one more node makes the difference
        refused = renewal(lease, now)
        refused.votes[1] = Refused(None)
        refuse(refused, 1)
        grant(early, 1)
        assert valid_until(lease) == promised
        grant(late, 1)
        assert valid_until(lease) == pytest.approx(soon.sent + FULL, abs=1e-6)
    await redlock.aclose()


async def test_a_late_refusal_interrupts_the_body_at_once(name: str) -> None:
    """The thread reads it when the loop runs again, long before the watchdog checks the lease next."""
    async with Redlock("memory:", lease=60.0, renew="thread") as redlock:
        with pytest.raises(LockLost) as caught:
            async with redlock(name) as lease:
                refused = Ballot(renewal(lease, 0.0).op, 1, 0.0, 1.0, on_vote=hold_of(lease).count_in_thread)
                await asyncio.to_thread(refused.answer, 0, Refused(None))
                await asyncio.Event().wait()
    assert caught.value.reason == "broken"


async def test_a7_the_thread_does_not_extend_a_released_lease(name: str) -> None:
    """It may have seen the hold a moment before the release."""
    async with Redlock("memory:", lease=30.0, renew="thread") as redlock:
        for released in (False, True):
            lease = await redlock(name).acquire(timeout=0)
            assert lease is not None
            hold, asked = hold_of(lease), list[Any]()
            hold.valid_until = clock_of(redlock).now() + 1.0  # so that a renewal is due
            if released:
                await lease.release()
            ask = replace_ask(redlock, lambda op, *args, **kwargs: asked.append(op))  # noqa: B023 - called in this round
            hold.extend_in_thread(session_of(redlock).quorum, 1.0, FAR)
            replace_ask(redlock, ask)
            assert len(asked) == (not released)
            if not released:
                await lease.release()
