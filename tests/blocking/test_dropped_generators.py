"""Generators that are ended inside a block of asynclock.blocking, by the program or by the garbage collector."""

from __future__ import annotations

import contextlib
import linecache
import logging
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from asynclock.blocking import Redlock, lease, loop_thread
from tests.support.threads import until
from tests.support.waiters import LIMIT


class Counting(logging.Handler):
    """Counts the records, under the lock that each handler has."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.records += 1


@pytest.fixture
def handler() -> Iterator[Counting]:
    """A handler for all that the library logs."""
    log, made = logging.getLogger("asynclock"), Counting()
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(made)
    yield made
    log.removeHandler(made)
    log.setLevel(before)


def test_a_release_that_needs_a_lock_of_the_thread_that_collects(handler: Counting, client: Redlock, name: str) -> None:
    """The generator ends while its thread logs: the background thread logs the release, and waits for the handler. So
    the thread does not wait for that: it goes on, and the name is free then."""

    def block() -> Iterator[None]:
        with client(name):
            yield

    running = block()
    next(running)
    handler.acquire()
    try:
        before = handler.records
        running.close()  # type: ignore[attr-defined] # of a generator
        assert handler.records == before
    finally:
        handler.release()
    until(lambda: not client(name).locked())
    assert handler.records > before


def test_the_end_of_a_generator_frees_the_name(client: Redlock, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free when `close` returns."""
    monkeypatch.setattr(lease, "_PARTING", LIMIT)

    def block() -> Iterator[None]:
        with client(name):
            yield

    running = block()
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not client(name).locked()


def test_a_signal_while_a_generator_ends_does_not_stop_the_loop(client: Redlock, name: str) -> None:
    """A handler that raises within the wait for the release. In `Event.wait` it could leave a lock taken that the
    background thread needs."""

    def block() -> Iterator[None]:
        with client(name):
            yield

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is threading.Condition.__enter__.__code__:
            if event == "return":
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace
        return None

    running = block()
    next(running)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            running.close()  # type: ignore[attr-defined]
    finally:
        sys.settrace(before)
    until(lambda: not client(name).locked())


@pytest.mark.skipif(not hasattr(threading.Thread, "_wait_for_tstate_lock"), reason="of CPython 3.11 and 3.12")
def test_a_signal_in_a_look_at_the_background_thread_does_not_end_it(
    client: Redlock, other: Redlock, name: str
) -> None:
    """`Thread.is_alive` takes a thread for ended if a handler raises within it. The next calls work."""
    looked_at = threading.Thread._wait_for_tstate_lock.__code__  # type: ignore[attr-defined] # noqa: SLF001

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not looked_at:
            return None
        if event == "line" and "acquire" in linecache.getline(threading.__file__, frame.f_lineno):
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    with client(name):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                other(name).acquire(timeout=1.5)
        finally:
            sys.settrace(before)
        assert loop_thread.loop_thread().is_alive()
        assert other(name).acquire(timeout=0) is None
