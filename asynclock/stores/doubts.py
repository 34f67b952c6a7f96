"""The ids of acquires whose outcome is unknown, of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.rules.model import ACQUIRE, ADOPT

if TYPE_CHECKING:
    from asynclock.rules.model import Op

_MOST = 10_000


class Doubts:
    """Ids whose acquire or adoption has failed. It may be carried out all the same, and after its undo: a commit whose
    answer was lost, a server that stood still, a transaction that was cancelled. So the undo leaves a tombstone. The
    last ones are remembered; an undo follows soon."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, its_id: str) -> bool:
        return its_id in self._ids

    def add(self, op: Op) -> None:
        """It has failed, if it is an acquire or an adoption."""
        if op.verb in (ACQUIRE, ADOPT):
            self._ids[op.id] = None
            if len(self._ids) > _MOST:
                del self._ids[next(iter(self._ids))]
