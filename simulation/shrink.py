"""A shorter plan that fails in the same way, for its reader."""

from __future__ import annotations

from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING, Any, TypeVar

from simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulation.world import Outcome

_P = TypeVar("_P", bound=Any)
"""A plan, of this simulation or of another one with `jobs`, `faults` and `seconds`."""

SECONDS = 60.0
"""Of CPU, at most."""


def shrink(plan: _P, what: str, seconds: float = SECONDS, run: Callable[[Any], Outcome] = simulate) -> _P:
    """Leave out faults and jobs for as long as the same promise is broken: first halves of them, then single ones."""
    until = process_time() + seconds

    def fails(shorter: _P) -> bool:
        flaw = run(shorter).flaw
        return flaw is not None and flaw.what == what

    def is_over() -> bool:
        return process_time() > until

    plan = _cut_off(plan, fails)
    before = None
    while before != (len(plan.jobs), len(plan.faults)) and not is_over():
        before = len(plan.jobs), len(plan.faults)
        plan = _fewer(plan, "faults", fails, is_over)
        plan = _fewer(plan, "jobs", fails, is_over)
    return plan


def _cut_off(plan: _P, fails: Callable[[_P], bool]) -> _P:
    """End the plan earlier."""
    for share in (0.1, 0.25, 0.5, 0.75):
        end = plan.seconds * share
        shorter = replace(
            plan,
            seconds=end,
            jobs=tuple(job for job in plan.jobs if job.at < end),
            faults=tuple(fault for fault in plan.faults if fault.at < end),
        )
        if fails(shorter):
            return shorter
    return plan


def _fewer(plan: _P, what: str, fails: Callable[[_P], bool], is_over: Callable[[], bool]) -> _P:
    """With fewer jobs, or fewer faults."""
    size = max(1, len(getattr(plan, what)) // 2)
    while size and not is_over():
        start = 0
        while start < len(parts := getattr(plan, what)) and not is_over():
            shorter = _with(plan, what, [*parts[:start], *parts[start + size :]])
            if fails(shorter):
                plan = shorter
            else:
                start += size
        size //= 2
    return plan


def _with(plan: _P, what: str, parts: Sequence[Any]) -> _P:
    changes: dict[str, Any] = {what: tuple(parts)}
    return replace(plan, **changes)
