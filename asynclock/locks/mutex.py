"""The mutex: one holder per name (Redlock's, https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

from __future__ import annotations

from os.path import splitext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynclock._op import Op
    from asynclock._state import State


with open(splitext(__file__)[0] + ".lua", encoding="utf-8") as file:  # pathlib would double the time to import us
    _SCRIPT = file.read()


class Mutex:
    """Let in whoever finds nobody."""

    name = "mutex"
    script = _SCRIPT

    def __init__(self, fair: bool = False) -> None:
        self.fair = fair

    def admits(self, state: State, op: Op) -> bool:
        del op
        return not state.holds


MUTEX = Mutex()

FAIR = Mutex(fair=True)
"""The same, in order of arrival: who finds others waiting lets the first of them in."""
