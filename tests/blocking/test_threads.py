"""The locks of asynclock.blocking, as threads use them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy

import asynclock
from asynclock import (
    ConfigError,
    LockLost,
    LockNotHeld,
    LockTimeout,
    SelfDeadlock,
    Skipped,
    blocking,
)
from asynclock.blocking import Lock, Redlock, current_lease
from asynclock.blocking.loop_thread import call
from asynclock.events import Acquired, Event, Lost, Released
from asynclock.fencing import StaleToken, fenced_sync
from tests.support.threads import in_thread, until
from tests.support.waiters import LIMIT, SHORT


def wait_for_waiters(client: Redlock, name: str) -> None:
    until(lambda: client.inspect(name).waiters)


# -- the same interface ------------------------------------------------------------------------------------------------

ELSEWHERE = {"aclose": "close", "__aenter__": "__enter__", "__aexit__": "__exit__"}


@pytest.mark.parametrize("kind", ["Redlock", "Lock", "Lease"])
def test_each_public_method_has_a_twin_with_the_same_parameters(kind: str) -> None:
    """What a user knows of the async class holds here: names, parameters, their kinds and their defaults."""
    ours, theirs = getattr(blocking, kind), getattr(asynclock, kind)
    public = {name for name in vars(theirs) if not name.startswith("_")} | ({"__call__"} & set(vars(theirs)))
    public |= {"__aenter__", "__aexit__"}
    assert {ELSEWHERE.get(name, name) for name in public} <= set(vars(ours))
    for name in public:
        theirs_here, ours_here = vars(theirs)[name], vars(ours)[ELSEWHERE.get(name, name)]
        if isinstance(theirs_here, property):
            assert isinstance(ours_here, property), name
            continue
        theirs_takes, ours_takes = (
            [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
            for function in (theirs_here, ours_here)
        )
        assert ours_takes == theirs_takes, name
        assert not inspect.iscoroutinefunction(ours_here), name


def test_an_option_that_cannot_work_is_refused(client: Redlock) -> None:
    """A thread cannot be cancelled, and on_lost has to be a function."""
    with pytest.raises(ConfigError, match="cannot be cancelled"):
        client("a", cancel_on_lost=True)
    with pytest.raises(ConfigError, match="on_lost is a function"):
        Redlock("memory:", on_lost="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'lease'"):
        client("a", leese=3)  # type: ignore[call-arg]
    client("a", cancel_on_lost=False)


# -- owners ------------------------------------------------------------------------------------------------------------


def test_fifty_threads_exclude_each_other(client: Redlock, name: str) -> None:
    """A counter that is read and written in the block misses no step, and the tokens rise."""
    counts, fences = [0], []

    def count() -> None:
        for _ in range(3):
            with client(name) as lease:
                before = counts[0]
                fences.append(lease.fence)
                time.sleep(0)
                counts[0] = before + 1

    with ThreadPoolExecutor(50) as pool:
        for each in [pool.submit(count) for _ in range(50)]:
            each.result(LIMIT)
    assert counts == [150]
    assert fences == sorted(set(fences))
    assert not client(name).locked()


def test_threads_of_two_clients_get_a_fair_lock_in_turn(client: Redlock, other: Redlock, name: str) -> None:
    """The one that waited first is next."""
    order: list[int] = []

    def wait(each: Redlock, number: int) -> None:
        with each(name, fair=True):
            order.append(number)

    with client(name, fair=True):
        first = in_thread(lambda: wait(other, 1))
        wait_for_waiters(client, name)
        second = in_thread(lambda: wait(client, 2))
        until(lambda: sum(each.tasks for each in client.inspect(name).waiters) == 2)
    first.join()
    second.join()
    assert order == [1, 2]


def test_the_owner_is_the_thread(client: Redlock, name: str) -> None:
    """Its second acquire would wait for itself; another thread waits; and neither releases what the other took."""
    lock, found = client(name), []
    with lock as lease:
        assert (lease.name, lease.held) == (name, True)
        with pytest.raises(SelfDeadlock, match="this thread holds"):
            lock.acquire()

        def elsewhere() -> None:
            found.append(lock.acquire(timeout=0))
            with pytest.raises(LockNotHeld, match="this thread holds no"):
                lock.release()

        in_thread(elsewhere).join()
        assert found == [None]
        assert lease.held
    with pytest.raises(LockNotHeld):
        lock.release()


def test_a_reentrant_lock_is_entered_again_by_its_thread_only(client: Redlock, name: str) -> None:
    """With `owner=` a thread of the same owner enters, too."""
    with client(name, reentrant=True) as outer, client(name, reentrant=True) as inner:
        assert outer.fence == inner.fence
        refused: list[object] = []
        in_thread(lambda: refused.append(client(name, reentrant=True).acquire(timeout=0))).join()
        assert refused == [None]
    found: list[int] = []

    def again() -> None:
        with client(name, reentrant=True, owner="order") as same:
            found.append(same.fence)

    with client(name, reentrant=True, owner="order") as lease:
        in_thread(again).join()
    assert found == [lease.fence]


def test_what_an_ended_thread_took_may_be_released_by_another(client: Redlock, name: str) -> None:
    """As the set-up and the tear-down of a fixture, which may be two threads."""
    lock = client(name)
    in_thread(lock.acquire).join()
    assert lock.locked()
    lock.release()
    assert not lock.locked()


def test_a_block_that_ends_in_another_thread(client: Redlock, name: str) -> None:
    """A framework may resume a generator in another thread. Each block ends its own lease."""
    lock = client.semaphore(name, 9)

    @contextmanager
    def block() -> Iterator[blocking.Lease]:
        with lock as lease:
            yield lease

    with ExitStack() as stack:
        mine = stack.enter_context(lock)
        theirs = block()
        lease = theirs.__enter__()
        in_thread(lambda: theirs.__exit__(None, None, None)).join()
        assert (mine.held, lease.held) == (True, False)
    assert not mine.held


def test_a_dropped_generator_releases(client: Redlock, name: str) -> None:
    """Also where the garbage collector ends it in the background thread, which must not wait for itself."""
    leases: list[blocking.Lease] = []

    class Cycle:
        """It refers to itself, so that only a collection ends its generator."""

        def __init__(self) -> None:
            self.me = self
            self.block = self.run()
            next(self.block)

        def run(self) -> Iterator[None]:
            with client(name) as lease:
                leases.append(lease)
                yield

    gc.disable()
    try:
        Cycle()
        assert client(name).locked()

        async def collect() -> None:
            gc.collect()

        call(collect)
        until(lambda: not client(name).locked())
    finally:
        gc.enable()


# -- losses ------------------------------------------------------------------------------------------------------------


def test_a_block_raises_at_its_end_what_was_lost(client: Redlock, name: str) -> None:
    """The body goes on until it asks. An exception of the body takes precedence, with a note."""
    with pytest.raises(LockLost, match="broke it") as lost:
        with client(name) as lease:
            client.break_lock(name)
            assert lease.wait_lost()
            with pytest.raises(LockLost):
                lease.ensure_held()
    assert lost.value.reason == "broken"
    with pytest.raises(ValueError, match="body") as raised:
        with client(name) as lease:
            client.break_lock(name)
            assert lease.wait_lost()
            raise ValueError("body")
    assert any("broke it" in note for note in raised.value.__notes__)


def test_on_lost_may_block_and_use_locks(client: Redlock, name: str) -> None:
    """It runs in a thread of its own, and the leases of the process are renewed meanwhile. It may use the client."""
    told: list[object] = []
    may_end = threading.Event()

    def on_lost(error: LockLost) -> None:
        with client(f"{name}:log"):
            told.append((error.name, error.reason))
        may_end.wait(LIMIT)
        raise RuntimeError("logged, and nothing else")

    kept = client(f"{name}:kept", lease=6.0).acquire(timeout=None)
    lease = client(name, on_lost=on_lost).acquire(timeout=None)
    client.break_lock(name)
    until(lambda: told)
    left: list[float] = []

    def renewed() -> bool:
        """Twice; its time goes down in between."""
        left.append(kept.remaining)
        return sum(later > earlier for earlier, later in pairwise(left)) >= 2

    until(renewed)
    kept.ensure_held()
    may_end.set()
    assert told == [(name, "broken")]
    assert not lease.held
    kept.release()


def test_on_lost_is_not_called_at_a_release(client: Redlock, name: str) -> None:
    """Nor at a detach. The one of the client holds for its locks."""
    told: list[LockLost] = []
    with Redlock(*_urls(client), on_lost=told.append) as mine:
        with mine(name):
            pass
        handle = mine(name).acquire(timeout=None).detach()
        lease = mine.adopt(handle)
        mine.break_lock(name)
        assert lease.wait_lost()
        until(lambda: told)
    assert [error.name for error in told] == [name]


def _urls(client: Redlock) -> list[str]:
    return [node.node for node in client.health().nodes]


# -- waits -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_wait_and_leaves_nothing(client: Redlock, other: Redlock, name: str) -> None:
    """No ticket is left, and no hold: not even where the lock was granted as the signal came."""
    lease = other(name).acquire(timeout=None)

    def interrupt() -> None:
        wait_for_waiters(other, name)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        helper.start()
        client(name).acquire()
    helper.join()
    until(lambda: not other.inspect(name).waiters)
    lease.release()
    assert not other(name).locked()
    with client(name):
        pass


# A signal may come while the coroutine of a call is made: Python then drops it, and warns.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_interrupted_waits_leave_no_descriptors(client: Redlock, other: Redlock, name: str) -> None:
    """A thread that waits has two of them, which its next wait takes."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the descriptors of a process are not listed here")

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    before, counts = signal.signal(signal.SIGALRM, interrupt), []
    try:
        with client(name):
            for _ in range(32):
                with pytest.raises(TimeoutError):
                    signal.setitimer(signal.ITIMER_REAL, 0.01)
                    other(name).acquire()
                counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert counts[-1] < counts[0] + 16  # one signal or two may come too early or too late for its wait


def test_an_error_of_the_library_does_not_end_the_loop() -> None:
    """An await that no event loop knows: its caller gets the error, and the next call works."""

    class Odd:
        def __await__(self) -> Iterator[int]:
            yield 5

    async def wait() -> None:
        await Odd()  # type: ignore[misc]

    async def nothing() -> int:
        return 7

    with pytest.raises(AttributeError):
        call(wait)
    assert call(nothing) == 7


def test_a_signal_handler_may_use_the_client_while_its_thread_waits(client: Redlock, other: Redlock, name: str) -> None:
    """A program that ends at SIGTERM closes its client there. The wait ends with an error that says so."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: other.close())
    try:
        with client(name):

            def send() -> None:
                wait_for_waiters(client, name)
                os.kill(os.getpid(), signal.SIGUSR1)

            helper = threading.Thread(target=send)
            found: list[BaseException] = []
            helper.start()
            wait_in_main(other, name, found)
            helper.join()
            assert "was closed" in str(found[0])
    finally:
        signal.signal(signal.SIGUSR1, before)


def wait_in_main(client: Redlock, name: str, found: list[BaseException]) -> None:
    try:
        client(name, timeout=LIMIT).acquire()
    except ConfigError as error:
        found.append(error)


def test_a_close_ends_the_waits_of_other_threads(client: Redlock, other: Redlock, name: str) -> None:
    """They get ConfigError, as each later use does, and health says it."""
    found: list[BaseException] = []
    with client(name):
        waiting = [in_thread(lambda: wait_in_main(other, name, found)) for _ in range(3)]
        wait_for_waiters(client, name)
        other.close()
        for each in waiting:
            each.join()
    assert len(found) == 3
    assert all("was closed" in str(error) for error in found)
    with pytest.raises(ConfigError, match="was closed"):
        other(name).acquire()
    assert not other.health().ok
    with other, other(name):  # it may be entered again
        pass


def test_a_time_out_names_the_holder(client: Redlock, other: Redlock, name: str) -> None:
    """`acquire` returns None, and `with` raises."""
    with client(name):
        assert other(name).acquire(timeout=0) is None
        with pytest.raises(LockTimeout, match=f"pid {os.getpid()}"), other(name, timeout=0):
            pytest.fail("the body must not run")


async def test_a_thread_that_runs_an_event_loop_is_refused(client: Redlock, name: str) -> None:
    """A wait would block the loop. The error names the async API; in a thread the same call works."""
    lock = client(name)
    for use in (lock.acquire, lock.locked, lock.__enter__, client.close, client.release_all):
        with pytest.raises(ConfigError, match=r"asynclock\.Redlock"):
            use()
    assert "event loop" in client.health().reason
    lease = await asyncio.to_thread(lock.acquire)
    assert lease is not None
    await asyncio.to_thread(lease.release)


# -- the rest of the client --------------------------------------------------------------------------------------------


def test_events_of_a_call_are_told_in_its_thread(client: Redlock, name: str) -> None:
    """Before it returns. Others come in a thread of the library, so that a listener may use locks. An exception of a
    listener is logged, and changes nothing."""
    told: list[tuple[type[Event], str]] = []

    def listen(event: Event) -> None:
        if getattr(event, "name", "") == name:
            with client(f"{name}:listener"):
                told.append((type(event), threading.current_thread().name))
            raise ValueError("logged")

    stop = client.subscribe(listen)
    with client(name):
        assert told == [(Acquired, "MainThread")]
    assert told[1:] == [(Released, "MainThread")]
    lease = client(name).acquire(timeout=None)
    client.break_lock(name)
    assert lease.wait_lost()
    until(lambda: len(told) == 5)
    assert {kind for kind, _ in told[3:]} >= {Lost}
    stop()
    with pytest.raises(ConfigError, match="plain function"):
        client.subscribe(asyncio.sleep)  # type: ignore[arg-type]


def test_decorators(client: Redlock, name: str) -> None:
    """Plain functions: each call under the lock of its arguments, or once in a time."""

    @client.synchronized(f"{name}:{{number}}")
    def add(number: int, more: int = 1) -> int:
        assert client(f"{name}:{number}").locked()
        return number + more

    @client.once(f"{name}:once:{{number}}", within=60)
    def run(number: int) -> int:
        if number < 0:
            raise ValueError(number)
        return number

    assert (add(3), add(3, more=2), add.__name__) == (4, 5, "add")
    assert (run(1), run(1)) == (1, Skipped.DONE)
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            run(-1)
    with pytest.raises(TypeError, match="async API"):
        client.synchronized("a")(asyncio.sleep)
    with pytest.raises(TypeError, match="generator"):
        client.synchronized("a")(_generator)


def _generator() -> Iterator[int]:
    yield 1


def test_lead_runs_again_after_a_loss(client: Redlock, name: str) -> None:
    """`main` learns of the loss from its lease; the next election runs it again, and its result ends `lead`."""
    fences: list[int] = []

    def main(lease: blocking.Lease) -> str:
        fences.append(lease.fence)
        if len(fences) == 1:
            client.break_lock(name)
            lease.wait_lost()
            lease.ensure_held()
        return "done"

    assert client.lead(name, main) == "done"
    assert fences == sorted(set(fences))
    assert len(fences) == 2


def test_kinds_and_looks(client: Redlock, name: str) -> None:
    """Readers, writers, permits, several names; and what an operator asks."""
    with client.read(name), client.read(name) as second:
        assert second.held
        assert client.write(name).acquire(timeout=0) is None or pytest.fail("a writer entered")
        assert {holder.name for holder in client.holders(name)} == {name}
        assert len(client.inspect(name).holders) == 2
    with client.multi(f"{name}:a", client.semaphore(f"{name}:b", 2)) as both:
        both.extend(lease=20)
        assert both.remaining > 0
        assert client(f"{name}:a").locked()
    until(lambda: client.health().ok)
    lease = client(name).acquire(timeout=None)
    client.release_all()
    assert not lease.held
    assert not client(name).locked()


def test_the_lease_of_the_block(client: Redlock, name: str) -> None:
    """`current_lease` of both modules finds it in this thread, and in no other."""
    with client(name) as lease:
        here, there = current_lease(), asynclock.current_lease()
        assert here is not None
        assert there is not None
        assert here.fence == there.fence == lease.fence
        elsewhere: list[object] = []
        in_thread(lambda: elsewhere.append(current_lease())).join()
        assert elsewhere == [None]
    assert current_lease() is None


def test_a_lock_is_shared_by_copies_and_not_pickled(client: Redlock) -> None:
    """As the async ones."""
    lock: Lock = client("a")
    with pytest.raises(TypeError, match="make a new Lock"):
        lock.__reduce__()
    assert "mutex 'a'" in repr(lock)


def test_a_lock_that_was_made_before_configure_has_the_new_settings(shared_urls: list[str], name: str) -> None:
    """A lease longer than the new max_lease would outlast the quarantine of a restarted server."""
    client = Redlock(shared_urls[0], lease=30)
    lock, long = client(name), client(f"{name}:long", lease=20)
    client.configure(lease=10, max_lease=15)
    with client:
        with lock as lease:
            assert 5 < lease.remaining <= 10
        with pytest.raises(ConfigError, match="above max_lease"):
            long.acquire()


def test_a_dropped_lease_warns_and_ends(client: Redlock, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """At once: neither the call that acquired it keeps it alive, nor on_lost."""
    caplog.set_level(logging.CRITICAL, "asynclock")
    names = name, f"{name}:told"
    for each, options in zip(names, ({}, {"on_lost": print}), strict=True):
        lock = client(each, lease=SHORT, timeout=LIMIT, **options)
        lease = lock.acquire()
        assert lease is not None
        with pytest.warns(ResourceWarning, match="dropped while held"):
            del lease, lock
    until(lambda: not any(client(each).locked() for each in names))


def test_data_refuses_an_older_holder(client: Redlock, name: str) -> None:
    """`fenced_sync` takes the token of the block, or of a lease that it is given."""
    metadata = sqlalchemy.MetaData()
    orders = sqlalchemy.Table(
        "orders", metadata, *(sqlalchemy.Column(each, sqlalchemy.BigInteger) for each in ("id", "paid", "fence"))
    )
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(orders.insert().values(id=42, paid=0))
        old = client(name).acquire(timeout=None)
        old.release()
        with client(name):
            assert fenced_sync(connection, orders.update().values(paid=1), orders.c.fence).rowcount == 1
        with pytest.raises(StaleToken):
            fenced_sync(connection, orders.update().values(paid=2), orders.c.fence, old)
    engine.dispose()
