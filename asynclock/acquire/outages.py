"""Outages: wakes the acquisitions of one session when its nodes go down, and when they are back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asynclock.acquire.acquisition import Acquisition
from asynclock.acquire.backoff import waking_time
from asynclock.acquire.holds import SLICE
from asynclock.events import NodeDown, NodeUp

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    from asynclock.acquire.handover import Adoption
    from asynclock.acquire.planner import Planner
    from asynclock.events import Event
    from asynclock.stores.port import Node


class Outages:
    """See the module. A node is down once it told so: an attempt to connect has failed, or it was silent for too long.
    A connection that was lost a moment ago is no outage."""

    __slots__ = ("_down", "_loop", "_under_way")

    def __init__(self, under_way: Collection[Acquisition | Adoption], loop: asyncio.AbstractEventLoop) -> None:
        self._down: set[str] = set()  # the labels of nodes
        self._under_way = under_way
        self._loop = loop

    def told(self, event: Event, nodes: int) -> None:
        """A node tells something. If no majority of so many `nodes` is left, those that wait for a notice ask now: none
        will come, and their patience begins."""
        if isinstance(event, NodeUp):
            self._down.discard(event.node)
        elif isinstance(event, NodeDown):
            self._down.add(event.node)
            self._wake_all(lambda: len(self._down) >= nodes - nodes // 2, lambda planner: not planner.in_outage)

    def connected(self, nodes: Collection[Node], with_ticket: list[Acquisition]) -> None:
        """A node is connected again. Its notices may have been lost meanwhile, so all tickets are sent again. If a
        majority is connected, those that wait for that ask again."""
        self._wake(with_ticket, waking_time(1), lambda: True, lambda planner: True)
        self._wake_all(
            lambda: sum(node.error is None for node in nodes) > len(nodes) // 2,
            lambda planner: planner.in_outage or planner.interrupted is not None,
        )

    def _wake_all(self, needed: Callable[[], bool], wanted: Callable[[Planner], bool]) -> None:
        if needed():
            self._wake(list(self._under_way), waking_time(len(self._under_way)), needed, wanted)

    def _wake(
        self,
        left: list[Any],
        within: float,
        needed: Callable[[], bool],
        wanted: Callable[[Planner], bool],
    ) -> None:
        """Those of `left` whose planner is `wanted` ask within so many seconds: those that a majority has refused renew
        their tickets, and the others try. They are woken in slices, for as long as it is `needed`: other tasks of the
        loop run in between."""
        began = time.perf_counter()
        while left and needed():
            each = left.pop()
            if isinstance(each, Acquisition) and each.planner is not None and wanted(each.planner):
                each.ask_soon(within, probe=each.planner.refused is not None)
            if time.perf_counter() - began > SLICE:
                self._loop.call_soon(self._wake, left, within, needed, wanted)
                return
