"""What a node tells its client about itself: down, up, in quarantine. Each change is told once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.events import NodeDown, NodeUp, Quarantined, QuarantineEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.events import Event


class Reports:
    """The reports of one node."""

    __slots__ = ("_label", "_quarantined", "_tell", "_up")

    def __init__(self, label: str, tell: Callable[[Event], object]) -> None:
        self._label = label
        self._tell = tell
        self._up: bool | None = None  # None: nothing is known yet
        self._quarantined = False

    def up(self) -> None:
        """It is connected."""
        if self._up is not True:
            self._up = True
            self._tell(NodeUp(self._label))

    def down(self, error: Exception) -> None:
        """It cannot be asked."""
        if self._up is not False:
            self._up = False
            self._tell(NodeDown(self._label, str(error) or repr(error)))

    def quarantine(self, left: float) -> None:
        """Its server casts no vote for so many seconds; 0: it votes."""
        if left > 0 and not self._quarantined:
            self._quarantined = True
            self._tell(Quarantined(self._label, left))
        elif left <= 0 and self._quarantined:
            self._quarantined = False
            self._tell(QuarantineEnded(self._label))
