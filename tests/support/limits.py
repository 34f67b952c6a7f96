"""A test that hangs fails, and its report shows where each task waits.

pytest-timeout interrupts the test by SIGALRM. Its other method, a thread, ends the whole process and so the tests after
it. Three things are missing in the signal method. Its exception is lost where a callback of the loop or a background
task raises it. The traceback of a loop that waits shows the loop, not the coroutine that hangs in it. And the timer is
cancelled at the first failure, so that a tear-down that hangs as well would hang for ever. Where even the signal is
swallowed, pytest's `faulthandler_timeout` ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections import Counter
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

_SETTINGS = pytest.StashKey[Any]()
_MANY = 20  # so many different places are shown
_AGAIN = 5.0  # seconds until the next signal, if the test goes on after one


class Hung(pytest.fail.Exception, SystemExit):
    """Fails the test. asyncio and uvloop let no exception out of a callback but SystemExit and KeyboardInterrupt, and
    the latter would end pytest."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Show the tasks, and raise through the loop what pytest-timeout's own handler raises."""
    done = yield
    item.stash[_SETTINGS] = settings
    fail = signal.getsignal(signal.SIGALRM)

    def hung(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)  # a finalizer, say, may swallow the exception
        print(tasks_shown(), file=sys.stderr)
        assert callable(fail)
        try:
            fail(number, frame)
        except pytest.fail.Exception as failed:
            raise Hung(failed.msg) from None

    if callable(fail):
        signal.signal(signal.SIGALRM, hung)
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """The tear-down of a test that failed has a limit, too: the same time again."""
    settings = item.stash.get(_SETTINGS, None)
    if settings is not None:
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """While pytest writes a failure down, no signal interrupts it: that would end the whole run. And no garbage is
    collected while it parses source: asyncio logs the exceptions of collected tasks, which parses source as well, and
    CPython before 3.11.8 raises SystemError where one parser runs inside another."""
    if call.excinfo is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def tasks_shown() -> str:
    """Where each task of the running loop waits; tasks that wait in the same place are counted."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return "no event loop runs"
    places = Counter("\n".join(_chain(task.get_coro())) for task in tasks)
    lines = [f"{len(tasks)} tasks"]
    lines += [f"{number} wait here:\n{place}" for place, number in places.most_common(_MANY)]
    return "\n".join(lines)


def _chain(waits: Any) -> list[str]:
    """The frames from a task's coroutine down to its innermost await; Task.print_stack shows the first one only."""
    lines = []
    while waits is not None:
        for prefix in ("cr", "ag", "gi"):
            if (frame := getattr(waits, f"{prefix}_frame", None)) is not None:
                lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
                waits = getattr(waits, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
                break
        else:
            lines.append(f"  {waits!r}")
            break
    return lines
