"""asynclock.blocking where an exception, such as a KeyboardInterrupt, ends a call in its thread."""

from __future__ import annotations

import threading

import pytest

from asynclock.blocking import Redlock
from asynclock.events import Acquired, Event, Released
from tests.support.threads import until


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
