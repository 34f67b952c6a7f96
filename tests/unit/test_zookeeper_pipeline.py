"""What passes between an event loop and the thread of kazoo."""

from __future__ import annotations

import asyncio
from typing import Any

from asynclock.stores.backlog import SLICE
from asynclock.stores.zookeeper.pipeline import MOST, Inbox, Requests


async def test_many_events_are_handled_in_several_turns_of_the_loop_and_in_order() -> None:
    """As when an operator deletes thousands of nodes that are watched. Those that come meanwhile are the last."""
    handled = list[int]()
    inbox = Inbox(asyncio.get_running_loop(), lambda: None)
    for number in range(5 * SLICE):
        inbox.put(handled.append, number)
    for turn in range(1, 9):
        await asyncio.sleep(0)
        assert len(handled) <= turn * SLICE
        if turn == 2:
            inbox.put(handled.append, 5 * SLICE)
    assert handled == list(range(5 * SLICE + 1))


async def test_many_requests_fail_in_several_turns_of_the_loop() -> None:
    """The connection is lost while they wait in the client."""
    loop = asyncio.get_running_loop()

    def keep(request: Any, answer: Any) -> None:
        del request, answer

    requests = Requests(loop, Inbox(loop, lambda: None), keep)
    sent = [requests.ask(number) for number in range(MOST)]
    waiting = [requests.ask(number) for number in range(4 * SLICE)]
    requests.fail()
    for turn in range(1, 5):
        assert sum(each.done() for each in waiting) <= turn * SLICE
        await asyncio.sleep(0)
    assert all(each.exception() is not None for each in waiting)
    assert not any(each.done() for each in sent)
