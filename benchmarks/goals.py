"""The targets of a contest, and whether they are reached: ratios within each round, and their median."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.runner import Runs, Slice


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, judged. `reached` is None if it could not be judged."""

    what: str
    target: str
    measured: str
    reached: bool | None


Goal = Callable[["Mapping[str, Runs]"], Verdict]


def rate(side: str, rival: str, at_least: float) -> Goal:
    """`side` does at least `at_least` times the cycles of `rival` in the same time."""
    return _ratio(f"cycles/s, {side} / {rival}", side, rival, lambda turn: turn.rate, at_least, more=True)


def p50(side: str, rival: str, at_most: float) -> Goal:
    """The median cycle of `side` takes at most `at_most` times the median cycle of `rival`."""
    return _ratio(f"p50, {side} / {rival}", side, rival, lambda turn: turn.p50, at_most, more=False)


def cpu(side: str, rival: str, at_most: float) -> Goal:
    """A cycle of `side` takes at most so many times the CPU that one of `rival` takes of the client."""
    what = f"client CPU per cycle, {side} / {rival}"
    return _ratio(what, side, rival, lambda turn: turn.cpu_per_cycle, at_most, more=False)


def none_slower(side: str, than: float, why: str) -> Goal:
    """After the warm-up, each cycle of `side` takes less than `than` seconds."""

    def judge(runs: Mapping[str, Runs]) -> Verdict:
        what, target = f"slowest cycle, {side} ({why})", f"< {than * 1000:g} ms"
        if error := runs[side].error:
            return Verdict(what, target, error, None)
        worst = max(max(turn.times) for turn in runs[side].slices)
        return Verdict(what, target, f"{worst * 1000:.2f} ms", worst < than)

    return judge


def elsewhere(what: str, target: str, why: str) -> Goal:
    """A target that is not measured here. The table shows it, so that it is not forgotten."""
    return lambda _: Verdict(what, target, why, None)


def judge_ratio(what: str, ratios: list[float], bound: float, *, more: bool) -> Verdict:
    """Compares the median of the rounds with the bound, and shows the least and the greatest round."""
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
