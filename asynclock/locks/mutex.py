"""The mutex: one holder per name (Redlock's, https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynclock._op import Op, State


class Mutex:
    """Let in whoever finds nobody."""

    name = "mutex"
    script = Path(__file__).with_suffix(".lua").read_text("utf-8")

    def admits(self, state: State, op: Op) -> bool:
        del op
        return not state.holds


MUTEX = Mutex()
