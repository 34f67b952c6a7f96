"""The end of holds that are not extended: the session lives on, so the client deletes their nodes itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock.stores.zookeeper.pipeline import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asynclock._time import Clock, Timer
    from asynclock.stores.zookeeper.contender import Contender


class Expiry:
    """Of the contenders of one node. `end` is called with each hold whose time is over."""

    def __init__(
        self, clock: Clock, contenders: Callable[[], Iterable[Contender]], end: Callable[[Contender], object]
    ) -> None:
        self._clock = clock
        self._contenders = contenders
        self._end = end
        self._timer: Timer | None = None
        self._due = math.inf

    def ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended."""
        contender.ends = ends if contender.ends == math.inf else max(ends, contender.ends)
        if self._timer is not None and contender.ends >= self._due:
            return
        if self._timer is not None:  # it was granted by a ticket that was sent long ago
            self._timer.cancel()
        self._sweep_at(contender.ends)

    def _sweep(self) -> None:
        self._timer, now, soonest = None, self._clock.now(), math.inf
        ended: list[Contender] = []
        for contender in self._contenders():
            if not contender.granted or contender.is_unwanted:
                continue
            if contender.ends <= now:
                ended.append(contender)
            else:
                soonest = min(soonest, contender.ends)
        if soonest < math.inf:
            self._sweep_at(soonest)
        for_each(self._end, ended)

    def _sweep_at(self, when: float) -> None:
        self._due, self._timer = when, self._clock.call_at(when, self._sweep)

    def stop(self) -> None:
        """The node closes."""
        if self._timer is not None:
            self._timer.cancel()
