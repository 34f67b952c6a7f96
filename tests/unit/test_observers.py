"""The listeners of a client whose event loops run in several threads."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asynclock.runtime.observers import Observers, write_debug


class Together(list[object]):
    """A list in which two threads look for the first time at the same moment: both find it as it was."""

    def __init__(self, *items: object) -> None:
        super().__init__(items)
        self._both = threading.Barrier(2)
        self._seen = threading.local()

    def __contains__(self, item: object) -> bool:
        found = super().__contains__(item)
        if not getattr(self._seen, "once", False):
            self._seen.once = True
            self._both.wait(20)
        return found


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_two_threads_find_a_new_level_at_the_same_moment(level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each acquire is logged once at DEBUG, and not at all above it; and neither thread raises."""
    caplog.set_level(level, "asynclock")
    observers, wanted = Observers(), level == logging.DEBUG
    observers.active = Together(*([] if wanted else [write_debug]))  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as threads:
        for looking in [threads.submit(observers.look_at_level) for _ in range(2)]:
            looking.result(20)
    assert list(observers.active) == [write_debug] * wanted
