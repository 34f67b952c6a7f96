"""What tests of `asynclock.blocking` do with threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.waiters import LIMIT


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(true: Callable[[], object]) -> None:
    """Return once it is true."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
