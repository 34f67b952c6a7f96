"""Generators that are ended inside a block of asynclock.blocking, by the program or by the garbage collector."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from asynclock.blocking import Redlock, lease
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
