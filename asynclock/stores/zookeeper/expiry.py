"""The end of holds that are not extended: the session lives on, so the client deletes their nodes itself."""

from __future__ import annotations

import asyncio
import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from asynclock.stores.backlog import SLICE

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock, Timer
    from asynclock.stores.zookeeper.contender import Contender


class Expiry:
    """Of the contenders of one node, which `contender_of` finds by their ids. `end` is called with each hold whose time
    is over, some of them in each turn of the loop.

    A hold that is extended stays where it was, and is put behind when its earlier end has come. One that is released
    leaves a time and its id until then."""

    def __init__(
        self, clock: Clock, contender_of: Callable[[str], Contender | None], end: Callable[[Contender], object]
    ) -> None:
        self._clock = clock
        self._contender_of = contender_of
        self._end = end
        self._heap: list[tuple[float, str]] = []  # when to look at a hold
        self._timer: Timer | None = None
        self._due = math.inf  # when the next look is, at the latest

    def ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended."""
        contender.ends = ends if contender.ends == math.inf else max(ends, contender.ends)
        if contender.ends < contender.looked_at:
            self._look_at(contender)
            self._arm()

    def _look_at(self, contender: Contender) -> None:
        contender.looked_at = contender.ends
        heappush(self._heap, (contender.ends, contender.id))

    def _arm(self) -> None:
        if self._heap and self._heap[0][0] < self._due:
            if self._timer is not None:  # a hold was granted by a ticket that was sent long ago
                self._timer.cancel()
            self._due = self._heap[0][0]
            self._timer = self._clock.call_at(self._due, self._sweep)

    def _sweep(self) -> None:
        self._timer, now = None, self._clock.now()
        ended: list[Contender] = []
        for _ in range(SLICE):
            if not self._heap or self._heap[0][0] > now:
                break
            at, whose = heappop(self._heap)
            contender = self._contender_of(whose)
            if contender is None or contender.looked_at != at:  # a later contender of that id, or an earlier end
                continue
            contender.looked_at = math.inf
            if not contender.granted or contender.is_unwanted:
                continue
            if contender.ends <= now:
                ended.append(contender)
            else:
                self._look_at(contender)
        if self._heap and self._heap[0][0] <= now:
            self._due = -math.inf
            asyncio.get_running_loop().call_soon(self._sweep)
        else:
            self._due = math.inf
            self._arm()
        for contender in ended:
            self._end(contender)

    def stop(self) -> None:
        """The node closes."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
