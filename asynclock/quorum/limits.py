"""The time limit for the answers of the nodes, if the user set no node timeout. The farthest node decides it."""

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
