"""Outages: wakes the acquisitions of one session when its nodes go down, and when they are back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.acquire.acquisition import Acquisition
from asynclock.acquire.backoff import waking_time
from asynclock.events import NodeDown, NodeUp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asynclock.acquire.handover import Adoption
    from asynclock.acquire.planner import Planner
    from asynclock.events import Event
    from asynclock.stores.port import Node


class Outages:
    """See the module. A node is down once it told so: an attempt to connect has failed, or it was silent for too long.
    A connection that was lost a moment ago is no outage."""

    __slots__ = ("_down", "_under_way")

    def __init__(self, under_way: Collection[Acquisition | Adoption]) -> None:
        self._down: set[str] = set()  # the labels of nodes
        self._under_way = under_way

    def told(self, event: Event, nodes: int) -> None:
        """A node tells something. If no majority of so many `nodes` is left, those that wait for a notice ask now: none
        will come, and their patience begins."""
        if isinstance(event, NodeUp):
            self._down.discard(event.node)
        elif isinstance(event, NodeDown):
            self._down.add(event.node)
            if len(self._down) >= nodes - nodes // 2:
                self._wake(lambda planner: not planner.in_outage, probe=True)

    def connected(self, nodes: Collection[Node]) -> None:
        """A node is connected again. If a majority is, those that wait for that ask again."""
        if sum(node.error is None for node in nodes) > len(nodes) // 2:
            self._wake(lambda planner: planner.in_outage or planner.interrupted is not None, probe=False)

    def _wake(self, wanted: Callable[[Planner], bool], *, probe: bool) -> None:
        within = waking_time(len(self._under_way))
        for each in self._under_way:
            if isinstance(each, Acquisition) and each.planner is not None and wanted(each.planner):
                each.ask_soon(within, probe=probe)
