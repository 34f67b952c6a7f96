"""Why ops have no answer yet, as far as the client knows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._clock import now
from asynclock.stores.sql.errors import remedied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONNECT = ("",)
"""In place of keys: what must be done before the first op."""

_ALIVE = "it answers other statements: another session may have locked the row, or the table"


class Delays:
    """Of one event loop. Times are of the client's clock. `tell` is called with each error that is repeated."""

    def __init__(self, tell: Callable[[Exception], object] = lambda error: None) -> None:
        self._tell = tell
        self._errors: dict[str, Exception] = {}  # by key: why its transaction is repeated
        self._answered = -math.inf  # the last answer of the database

    def answered(self) -> None:
        """The database has answered a statement."""
        self._answered = now()

    def repeated(self, keys: Sequence[str], error: Exception) -> None:
        """The transaction of these keys is repeated, because of that error."""
        for key in keys:
            self._errors[key] = error
        self._tell(error)

    def ended(self, keys: Sequence[str]) -> None:
        """The transaction of these keys has ended."""
        for key in keys:
            self._errors.pop(key, None)

    def why(self, keys: Sequence[str], since: float) -> str:
        """Why ops of these keys that were sent at `since` have no answer; "": unknown. Pure."""
        found = next((error for key in keys if (error := self._errors.get(key)) is not None), None)
        if found is not None:
            return remedied(found)
        return _ALIVE if self._answered > since else ""
