"""A canonical picture of the state of the machine, so that an explorer can tell two states apart.

Two states have the same fingerprint if their parts have the same values in the same places. Objects are numbered in the
order in which the walk visits them; addresses and hashes play no part. The picture contains everything that can change
the next step, including the callbacks of timers and of ops in flight, with their arguments.
"""

from __future__ import annotations

from collections import deque
from contextvars import Context
from enum import Enum, EnumType
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PLAIN = frozenset({str, int, bytes, bool, type(None), type, EnumType})

_DIGITS = 6
"""The decimals of a time that are kept: two sums of the same pauses may differ by a rounding error."""


def fingerprint(state: object, outside: Sequence[object] = ()) -> tuple[object, ...]:
    """The picture of all that `state` refers to. `outside`: objects that are the same in all states, such as the Core
    and the settings."""
    walk = _Walk(outside)
    return walk.of(state), *walk.found


class _Walk:
    """One walk. An object gets the number of its first visit."""

    def __init__(self, outside: Sequence[object]) -> None:
        self.found: list[object] = []
        self._numbers: dict[int, str] = {id(each): f"outside {number}" for number, each in enumerate(outside)}
        self._kept: list[object] = [*outside]  # an id is used again after its object has gone

    def of(self, each: object) -> object:
        """The picture of one value: itself, or the number of an object that is in `found`."""
        kind = each.__class__
        if kind in _PLAIN or isinstance(each, Enum):
            return each
        if kind is float:
            return round(each, _DIGITS)  # type: ignore[call-overload]
        if (number := self._numbers.get(id(each))) is not None:
            return number
        if isinstance(each, Context):
            return "context"
        if isinstance(each, ref):
            return self.of(each())
        if isinstance(each, tuple):
            return type(each).__name__, *map(self.of, each)
        number = self._numbers[id(each)] = f"object {len(self._numbers)}"
        self._kept.append(each)
        self.found.append((number, kind.__name__, *self._parts(each)))
        return number

    def _parts(self, each: Any) -> Iterable[object]:
        kind = each.__class__
        if issubclass(kind, dict):
            return [part for pair in each.items() for part in map(self.of, pair)]
        if kind is list or kind is deque:
            return map(self.of, each)
        if kind is MethodType:
            return each.__name__, self.of(each.__self__)
        if kind is partial:
            return map(self.of, (each.func, each.args, each.keywords))
        if kind is FunctionType:
            return each.__qualname__, *map(self.of, each.__closure__ or ())
        if kind is CellType:
            return [self.of(each.cell_contents)]
        if issubclass(kind, BaseException):
            return [str(each)]
        if issubclass(kind, set | frozenset):
            raise TypeError("the order of a set is no state: use a dict")
        slots = [part for name in _slots(kind) if hasattr(each, name) for part in (name, self.of(getattr(each, name)))]
        values = getattr(each, "__dict__", {})
        return slots + [part for name in sorted(values) for part in (name, self.of(values[name]))]


@cache
def _slots(kind: type) -> Sequence[str]:
    names = {name for each in kind.__mro__ for name in getattr(each, "__slots__", ())}
    return sorted(names - {"__weakref__", "__dict__"})
