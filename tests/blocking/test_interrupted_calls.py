"""asynclock.blocking where an exception, such as a KeyboardInterrupt, ends a call in its thread."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from asynclock import LockNotHeld, blocking
from asynclock.blocking import Redlock
from asynclock.events import Acquired, Event, Released
from tests.support.servers import Server
from tests.support.threads import until

FOLDER = str(Path(blocking.__file__).parent)


def test_a_grant_that_nobody_takes_is_given_back(client: Redlock, name: str) -> None:
    """An exception in the thread after the grant, here of a listener, must not leave a hold that nobody releases."""

    def interrupt(event: Event) -> None:
        if isinstance(event, Acquired):
            raise KeyboardInterrupt

    stop = client.subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        client(name).acquire()
    stop()
    until(lambda: not client(name).locked())
    stop = client.subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt), client(name):
        pytest.fail("the body must not run")
    stop()
    until(lambda: not client(name).locked())


def test_an_event_is_told_once(client: Redlock, name: str) -> None:
    """A listener raises as it is told of a grant. The next listener is told of it in a thread of the library, and
    neither of them is told again."""
    told: list[tuple[str, str, str]] = []

    def listen(listener: str, event: Event) -> None:
        told.append((listener, type(event).__name__, threading.current_thread().name))
        if listener == "first" and isinstance(event, Acquired):
            raise KeyboardInterrupt

    client.subscribe(lambda event: listen("first", event))
    client.subscribe(lambda event: listen("second", event))
    with pytest.raises(KeyboardInterrupt):
        client(name).acquire()
    until(lambda: ("second", Released.__name__, "asynclock listeners") in told)
    assert [each for each in told if each[1] == Acquired.__name__] == [
        ("first", "Acquired", "MainThread"),
        ("second", "Acquired", "asynclock listeners"),
    ]


# A signal may come while the coroutine of a call is made: Python then drops it, and warns.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("how", ["acquire", "with", "once"])
def test_a_signal_at_any_point_of_a_call_leaves_no_hold(client: Redlock, name: str, how: str) -> None:
    """KeyboardInterrupt comes at each point at which Python calls signal handlers, one after the other: where a
    function of the library begins, and where one in C has returned. The leases last for longer than this test."""
    lock, held = client(name, lease=60), False

    @client.once(name, within=60)
    def run(stop: Callable[[], None]) -> bool:
        stop()
        return True

    for point in itertools.count(1):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(point) as stop:
            if how == "acquire":
                lock.acquire()
                held = True
            elif how == "with":
                with lock:
                    stop()
                    held = True
            else:
                held = run(stop) is True
        if held:
            break
        until(lambda: not lock.locked())
    assert point > 10
    if how == "acquire":
        lock.release()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("how", ["lock", "lease"])
def test_a_signal_at_any_point_of_an_exit_leaves_no_hold(client: Redlock, name: str, how: str) -> None:
    """The same, at the end of a block. The program keeps the Lease, so it would be renewed. The first point is left
    out: there `__exit__` has not begun, so it cannot catch the exception."""
    lock, kept = client(name, lease=60), list[object]()
    for point in itertools.count(2):
        ended = False
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(point, at_once=False) as start:
            with lock if how == "lock" else lock.acquire(timeout=None) as lease:
                kept.append(lease)
                start()
            ended = True
        until(lambda: not lock.locked())
        if ended:
            break
    assert point > 10


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_signal_at_any_point_of_an_entry_leaves_no_hold(client: Redlock, name: str) -> None:
    """The same, where a block of a Lease begins, which the program keeps."""
    lock, kept = client(name, lease=60), list[object]()
    for point in itertools.count(2):
        entered, lease = False, lock.acquire(timeout=None)
        kept.append(lease)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(point, at_once=False) as start:
            start()
            with lease:
                sys.setprofile(None)
                entered = True
        until(lambda: not lock.locked())
        if entered:
            break
        with pytest.raises(LockNotHeld), lease:  # and not that it guards a block already
            pytest.fail("it was released")
    assert point > 5


def test_a_release_is_carried_out_if_a_signal_comes_before_the_loop_has_it(client: Redlock, name: str) -> None:
    """KeyboardInterrupt comes where the thread is about to pass its call of `release` to the background loop."""
    lease, functions = client(name, lease=60).acquire(timeout=None), list[str]()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            functions.append(frame.f_code.co_name)
            if functions[-2:] == ["run", "begin"]:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(profile)
        lease.release()
    until(lambda: not client(name).locked())


def test_ctrl_c_in_holders_is_raised(server: Server) -> None:
    """KeyboardInterrupt comes while the server has not answered. It reaches the program, and no error of the generator
    that is closed takes its place."""

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER) and frame.f_code.co_name == "wait":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with Redlock(server.url) as client:
        server.freeze()
        try:
            with pytest.raises(KeyboardInterrupt):
                sys.setprofile(profile)
                next(client.holders())
        finally:
            server.thaw()


@contextlib.contextmanager
def interrupted_at(point: int, at_once: bool = True) -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt in this thread at such a point of asynclock.blocking. Yields a function that ends this,
    or without `at_once` one that begins it."""
    points = itertools.count(1)

    def start() -> None:
        sys.setprofile(profile)

    def stop() -> None:
        sys.setprofile(None)

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDER) and next(points) == point:
            stop()
            raise KeyboardInterrupt

    if at_once:
        start()
    try:
        yield stop if at_once else start
    finally:
        stop()
