"""What should come of a contest, and whether it did: ratios within each round, and their median."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.runner import Runs, Slice


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal, judged. `reached` is None where it could not be."""

    what: str
    target: str
    measured: str
    reached: bool | None


Goal = Callable[["Mapping[str, Runs]"], Verdict]


def rate(side: str, rival: str, at_least: float) -> Goal:
    """`side` does at least so many times the cycles of `rival` in the same time."""
    return _ratio(f"cycles/s, {side} / {rival}", side, rival, lambda turn: turn.rate, at_least, more=True)


def p50(side: str, rival: str, at_most: float) -> Goal:
    """The median cycle of `side` takes at most so many times that of `rival`."""
    return _ratio(f"p50, {side} / {rival}", side, rival, lambda turn: turn.p50, at_most, more=False)


def cpu(side: str, rival: str, at_most: float) -> Goal:
    """A cycle of `side` takes at most so many times the CPU that one of `rival` takes of the client."""
    what = f"client CPU per cycle, {side} / {rival}"
    return _ratio(what, side, rival, lambda turn: turn.cpu_per_cycle, at_most, more=False)


def none_slower(side: str, than: float, why: str) -> Goal:
    """No cycle of `side` takes `than` seconds, once warm."""

    def judge(runs: Mapping[str, Runs]) -> Verdict:
        what, target = f"slowest cycle, {side} ({why})", f"< {than * 1000:g} ms"
        if error := runs[side].error:
            return Verdict(what, target, error, None)
        worst = max(max(turn.times) for turn in runs[side].slices)
        return Verdict(what, target, f"{worst * 1000:.2f} ms", worst < than)

    return judge


def elsewhere(what: str, target: str, why: str) -> Goal:
    """Not measured here; said, so that it is not forgotten."""
    return lambda _: Verdict(what, target, why, None)


def judge_ratio(what: str, ratios: list[float], bound: float, *, more: bool) -> Verdict:
    """The median of the rounds against the bound, and how far the rounds lie apart."""
    middle = median(ratios)
    measured = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return Verdict(what, f"{'>=' if more else '<='} {bound:g}", measured, middle >= bound if more else middle <= bound)


def _ratio(what: str, side: str, rival: str, measure: Callable[[Slice], float], bound: float, *, more: bool) -> Goal:
    def judge(runs: Mapping[str, Runs]) -> Verdict:
        if error := runs[side].error or runs[rival].error:
            return Verdict(what, f"{'>=' if more else '<='} {bound:g}", error, None)
        pairs = zip(runs[side].slices, runs[rival].slices, strict=True)
        return judge_ratio(what, [measure(ours) / measure(theirs) for ours, theirs in pairs], bound, more=more)

    return judge
