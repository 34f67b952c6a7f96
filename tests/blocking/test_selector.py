"""The selector of the background loop of asynclock.blocking."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any, NamedTuple

import pytest

from asynclock.blocking import selector as module
from asynclock.blocking.thread_wait import HAS_EVENTFD

pytestmark = pytest.mark.skipif(not HAS_EVENTFD, reason="there is no eventfd here")


NOBODY = None, None
"""Neither a reader nor a writer, as a loop registers them."""


class Begun(NamedTuple):
    """What the selector uses of a call."""

    begin: Any
    context: Any = copy_context()


@pytest.fixture
def selector() -> Iterator[module.EventSelector]:
    found = module.EventSelector()
    yield found
    found.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_a_call_of_another_thread_ends_the_wait(selector: module.EventSelector) -> None:
    """Its first step runs in the thread that waits, and once."""
    ran: list[threading.Thread] = []
    call = Begun(lambda: ran.append(threading.current_thread()))
    threading.Timer(0.1, selector.begin, [call]).start()
    assert selector.select(60) == []
    assert selector.select(0.001) == []
    assert ran == [threading.current_thread()]


def test_files_that_a_first_step_closes_are_not_ready(selector: module.EventSelector, pipe: tuple[int, int]) -> None:
    """Another file may have their number by then."""
    read, write = pipe
    key = selector.register(read, module.selectors.EVENT_READ, NOBODY)
    os.write(write, b"x")
    assert selector.select(60) == [(key, module.selectors.EVENT_READ)]
    selector.begin(Begun(lambda: selector.unregister(read)))  # type: ignore[arg-type]
    assert selector.select(60) == []


def test_what_an_answer_wakes_runs_in_the_same_turn(
    selector: module.EventSelector, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn more would take longer than the reader. A reader that another one has removed is not called."""
    loop, other = asyncio.SelectorEventLoop(selector), os.pipe()
    os.write(pipe[1], b"x")
    os.write(other[1], b"x")
    turns, ran = [0], list[tuple[int, str]]()
    select = selector.select

    def counted(timeout: float | None = None) -> Any:
        turns[0] += 1
        return select(timeout)

    monkeypatch.setattr(selector, "select", counted)

    def woken() -> None:
        ran.append((turns[0], "woken"))
        loop.stop()

    def read(own: int, others: int) -> None:
        ran.append((turns[0], "read"))
        loop.remove_reader(own)
        loop.remove_reader(others)
        loop.call_soon(woken)

    loop.add_reader(pipe[0], read, pipe[0], other[0])
    loop.add_reader(other[0], read, other[0], pipe[0])
    loop.call_later(60, loop.stop)
    loop.run_forever()
    assert ran == [(turns[0], "read"), (turns[0], "woken")]
    loop.close()
    for each in other:
        os.close(each)


def test_files_are_seen_while_callbacks_are_always_ready(selector: module.EventSelector, pipe: tuple[int, int]) -> None:
    """One poll in four is made: the loop then asks with a timeout of 0."""
    read, write = pipe
    selector.register(read, module.selectors.EVENT_READ, NOBODY)
    os.write(write, b"x")
    assert [len(selector.select(0)) for _ in range(8)] == [0, 0, 0, 1] * 2


def test_a_hang_up_is_told(selector: module.EventSelector, pipe: tuple[int, int]) -> None:
    """To a reader as ready to read, and to a writer as ready to write."""
    other_read, other_write = os.pipe()
    os.close(other_write)
    key = selector.register(other_read, module.selectors.EVENT_READ, NOBODY)
    assert selector.select(60) == [(key, module.selectors.EVENT_READ)]
    selector.unregister(other_read)
    os.close(other_read)
    read, write = os.pipe()
    os.close(read)
    key = selector.register(write, module.selectors.EVENT_WRITE, NOBODY)
    assert selector.select(60) == [(key, module.selectors.EVENT_WRITE)]
    os.close(write)


def test_calls_that_begin_others_do_not_keep_the_loop(selector: module.EventSelector) -> None:
    """A thread may begin its next call before the loop has looked at its timers. That call waits for the next turn."""
    ran: list[int] = []

    def first_step() -> None:
        ran.append(len(ran))
        if len(ran) < 100:
            selector.begin(call)  # type: ignore[arg-type]

    call = Begun(first_step)
    selector.begin(call)  # type: ignore[arg-type]
    assert selector.select(60) == []
    assert ran == [0]
    assert selector.select(60) == []
    assert ran == [0, 1]
