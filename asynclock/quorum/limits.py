"""How long the nodes of a client have to answer, where the user has not said it: as long as the farthest one needs."""

from __future__ import annotations


class Limits:
    """The limits that the nodes have measured."""

    __slots__ = ("_of", "longest")

    def __init__(self, nodes: int) -> None:
        self._of = [0.0] * nodes
        self.longest = 0.0  # seconds; 0.0: none was measured

    def measured(self, index: int, limit: float) -> None:
        """The answers of node `index` come within `limit` seconds."""
        self._of[index] = limit
        self.longest = max(self._of)
