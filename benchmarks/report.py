"""Prints the tables."""

from __future__ import annotations

import math
import sys
from statistics import mean, median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.crowd import Crowd
    from benchmarks.flood import Flooded
    from benchmarks.goals import Verdict
    from benchmarks.holding import Held
    from benchmarks.runner import Runs
    from benchmarks.stores import Store
    from benchmarks.waiting import Hot

console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)

_WORD = {True: "yes", False: "NO", None: "not judged"}


def runs(title: str, each: Mapping[str, Runs]) -> None:
    """A line for each side; for a side that failed, its error."""
    rows: list[tuple[str, ...]] = []
    for name, its in each.items():
        if its.error:
            rows.append((name, "failed:", its.error))
            continue
        rate = its.median_of(lambda turn: turn.rate)
        ours = its.median_of(lambda turn: turn.cpu_per_cycle)
        servers = its.median_of(lambda turn: turn.server_cpu_per_cycle)
        rows.append((name, f"{rate:,.0f}", *map(_time, (its.p(50), its.p(99), ours, servers))))
    _print(title, ("side", "cycles/s", "p50", "p99", "client CPU per cycle", "servers' CPU per cycle"), rows)


def crowds(title: str, each: Iterable[Crowd]) -> None:
    rows: list[tuple[str, ...]] = []
    for one in each:
        errors = ", ".join(f"{count} {name}" for name, count in one.errors.items()) or "0"
        cells = (
            one.nodes,
            one.tasks,
            one.cycles,
            f"{one.wall:.2f} s",
            errors,
            one.logged,
            one.connections,
            one.subscriptions,
        )
        rows.append((one.side, *map(str, cells), str(one.opened)))
    heads = ("side", "nodes", "tasks", "cycles", "took", "errors", "logged", "connections", "subscriptions", "opened")
    _print(title, heads, rows)


def imports(title: str, seconds: Mapping[str, Sequence[float]], failed: Mapping[str, str] | None = None) -> None:
    """A line for each; for a side that failed, its error."""
    rows = [(name, _time(median(took))) for name, took in seconds.items()]
    rows += [(name, f"failed: {why}") for name, why in (failed or {}).items()]
    _print(title, ("what", "median"), rows)


def hot(title: str, each: Mapping[str, Sequence[Hot]], failed: Mapping[str, str]) -> None:
    """A line for each side; for a side that failed, its error."""
    rows: list[tuple[str, ...]] = []
    for name, turns in each.items():
        waits = sorted(wait for turn in turns for wait in turn.waits)
        rate, asked = median(turn.rate for turn in turns), median(turn.commands for turn in turns)
        times = map(_time, (mean(waits), waits[len(waits) * 99 // 100], waits[-1]))
        rows.append((name, f"{rate:,.0f}", *times, f"{asked:.2f}"))
    rows += [(name, "failed:", why) for name, why in failed.items()]
    _print(title, ("side", "acquisitions/s", "mean wait", "p99", "longest", "commands each, per node"), rows)


def costs(title: str, each: Mapping[int, Mapping[str, float]]) -> None:
    """A line for each number of waiters. The last column is that of shorter tickets than the others, in all lines."""
    rows = [
        (f"{count:,}", f"{its['commands']:.2f}", f"{its['messages']:.2f}", _time(its["us"] / 1e6), f"{its['idle']:.3f}")
        for count, its in each.items()
    ]
    heads = ("waiters", "commands per release", "messages", "server CPU", "commands per idle waiter and second")
    _print(title, heads, rows)


def held(title: str, each: Iterable[Held]) -> None:
    """A line per phase. All but the last two columns are without the pauses of the garbage collector."""
    rows: list[tuple[str, ...]] = []
    for one in each:
        for phase, its in one.phases.items():
            times = map(_time, (its.took, its.used, its.cpu, its.wall))
            pauses = map(_time, (its.gc_longest, its.gc_total))
            rows.append((f"{one.nodes}", f"{one.leases:,}", phase, *times, f"{its.long:,} of {its.count:,}", *pauses))
    turns = ("longest turn, CPU", "by the clock", "turns above 5 ms")
    _print(title, ("nodes", "leases", "phase", "took", "CPU", *turns, "longest GC pause", "all of them"), rows)


def stores(title: str, each: Iterable[Store]) -> None:
    """A line for each store; for a store that failed, its error."""
    rows: list[tuple[str, ...]] = []
    for one in each:
        if one.error:
            rows.append((one.name, "failed:", one.error))
            continue
        free, crowd = _time(median(one.alone)), f"{median(one.crowd):,.0f}"
        rows.append(
            (one.name, free, crowd, _time(median(one.hand_over)), f"{median(one.hot):,.0f}", _time(one.longest))
        )
    heads = (
        "store",
        "free, 1 task",
        "free, 64 tasks: cycles/s",
        "hand-over",
        "hot name: acquisitions/s",
        "longest wait",
    )
    _print(title, heads, rows)


def floods(title: str, each: Iterable[Flooded]) -> None:
    """A line for each store; for a store that failed, its error."""
    rows: list[tuple[str, ...]] = []
    for one in each:
        if one.error:
            rows.append((one.name, "failed:", one.error))
            continue
        errors = [
            ", ".join(f"{count:,} {name}" for name, count in each.items()) or "0"
            for each in (one.few_errors, one.errors)
        ]
        few, many = (f"{median(rates):,.0f}" for rates in (one.few, one.many))
        rows.append((one.name, few, many, _spread(one.ratios), str(min(one.kept)), *errors))
    heads = ("store", "cycles/s of the few", "of the many", "ratio", "leases kept, least", "errors of the few")
    _print(title, (*heads, "of the many"), rows)


def beside_bare(title: str, each: Iterable[Store]) -> None:
    """A line for each store that was measured beside its bare driver: the medians, and of the ratios the least and the
    greatest, too."""
    rows = [
        (one.name, _time(median(one.bare_alone)), _spread(one.ratios[0]), f"{median(one.bare_crowd):,.0f}",
         _spread(one.ratios[1]), *_relay(one))
        for one in each
        if one.bare_alone and not (one.error or one.bare_error)
    ]  # fmt: skip
    if rows:
        bare = ("bare, 1 task", "rate, of the bare one", "bare, 64 tasks: cycles/s", "rate, of the bare one",
                "bare hand-over", "time, of the bare one")  # fmt: skip
        _print(title, ("store", *bare), rows)


def _relay(one: Store) -> tuple[str, str]:
    if not one.bare_hand_over:
        return "-", "-"
    return _time(median(one.bare_hand_over)), _spread(one.slower_hand_over)


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def verdicts(title: str, each: Iterable[Verdict]) -> None:
    """The targets, and whether they are reached: the median of the rounds' ratios, and the least and the greatest."""
    rows = [(one.what, one.target, one.measured, _WORD[one.reached]) for one in each]
    _print(title, ("target", "wanted", "measured", "reached"), rows)


def _print(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table()
    for index, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
