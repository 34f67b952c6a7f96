"""`python -m benchmarks compare REV`: is HEAD slower than REV? Each is checked out into a worktree, and has an
environment of its own; both do the same work (`workload.py`) in turn, on the same servers.

A pair is two fresh processes, one of each version. Where cycles are counted they take short turns (old, new, new, old),
so that what drifts drifts for both. The ratio is taken within each pair, and the median of the pairs is what counts.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.servers import Server, running
from benchmarks.waiting import PROCESSES, TASKS, TENURE, contended, handed_over, started

WORKLOAD = Path(__file__).with_name("workload.py")
ROOT = Path(__file__).parents[1]

CPU, WALL = 1.03, 1.10
"""What HEAD may cost at most, in what REV costs."""

TURNS = 4
"""Turns of each side in a pair, where cycles are counted."""

Figures = dict[str, float]
"""What a cycle, a hand-over or an acquisition costs, in seconds."""

BOUNDS = {"client CPU per cycle": CPU, "servers' CPU per cycle": CPU, "wait, p99": None}
"""All other figures are on the clock. None: it is shown and not judged, for it differs widely from run to run."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version, and the Python in whose environment it is installed."""

    name: str
    python: str

    def command(self, what: str, tasks: int, servers: Sequence[Server]) -> list[str]:
        return [self.python, "-I", str(WORKLOAD), what, str(tasks), *(server.url for server in servers)]


Seen = Sequence[Mapping[str, list[float]]]
"""What each process of a contest saw."""

Measure = Callable[[Sequence[Version], float, bool], tuple[Figures, ...]]


def cycles(nodes: int, tasks: int) -> Measure:
    """P1 to P3: cycles of free locks."""

    def measure(versions: Sequence[Version], seconds: float, turned: bool) -> tuple[Figures, ...]:
        sums = [dict.fromkeys(("cycles", "wall", "cpu", "servers"), 0.0) for _ in versions]
        with running(nodes) as servers, started([each.command("cycles", tasks, servers) for each in versions]) as both:
            for turn in range(TURNS):
                order = list(zip(both, sums, strict=True))
                for process, total in reversed(order) if turned ^ bool(turn % 2) else order:
                    before = sum(server.cpu() for server in servers)
                    process.go(str(seconds))
                    took = json.loads(process.read_line())
                    for what, value in {**took, "servers": sum(server.cpu() for server in servers) - before}.items():
                        total[what] += value
        return tuple(
            {
                "client CPU per cycle": total["cpu"] / total["cycles"],
                "servers' CPU per cycle": total["servers"] / total["cycles"],
                "time per cycle": total["wall"] / total["cycles"],
            }
            for total in sums
        )

    return measure


def contest(nodes: int, processes: int, what: str, tasks: int, of: Callable[[Seen, float], Figures]) -> Measure:
    """P5 and P6: several processes of one version at a time want one name."""

    def measure(versions: Sequence[Version], seconds: float, turned: bool) -> tuple[Figures, ...]:
        found: dict[str, Figures] = {}
        with running(nodes) as servers:
            for version in reversed(versions) if turned else versions:
                seen = contended([version.command(what, tasks, servers)] * processes, servers, TURNS * seconds)
                found[version.name] = of(seen, TURNS * seconds)
        return tuple(found[version.name] for version in versions)

    return measure


def _hand_over(seen: Seen, _: float) -> Figures:
    return {"hand-over, p50": handed_over(seen)}


def _hot(seen: Seen, seconds: float) -> Figures:
    waits = sorted(wait for each in seen for wait in each["waits"])
    return {"time per acquisition": seconds / len(waits), "wait, p99": waits[len(waits) * 99 // 100]}


CASES: dict[str, Measure] = {
    "P1, 1 node, 64 tasks": cycles(1, 64),
    "P2, 1 node, 1 task": cycles(1, 1),
    "P3, 5 nodes, 64 tasks": cycles(5, 64),
    "P5, 1 node": contest(1, 2, f"hot@{TENURE}", 1, _hand_over),
    "P5, 5 nodes": contest(5, 2, f"hot@{TENURE}", 1, _hand_over),
    "P6, 1 node": contest(1, PROCESSES, "hot", TASKS, _hot),
    "P6, 5 nodes": contest(5, PROCESSES, "hot", TASKS, _hot),
}
NAMES = sorted({case[:2] for case in CASES})


@dataclass(slots=True)
class Row:
    """One figure of one case, in all pairs."""

    case: str
    figure: str
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def line(self) -> str:
        """A line of the table."""
        ratios = [new / old for old, new in self.pairs]
        bound, ratio = BOUNDS.get(self.figure, WALL), median(ratios)
        times = (f"{median(each) * 1e6:,.1f} us" for each in zip(*self.pairs, strict=True))
        cells = (
            *(self.case, self.figure, *times, f"{ratio:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"),
            *(("-", "-") if bound is None else (f"<= {bound:g}", "yes" if ratio <= bound else "**NO**")),
        )
        return f"| {' | '.join(cells)} |"


def measured(versions: Sequence[Version], cases: Sequence[str], pairs: int, seconds: float) -> list[Row]:
    """All figures of all cases. The versions swap the first place from pair to pair."""
    rows: dict[str, dict[str, Row]] = {case: {} for case in cases}
    for number in range(pairs):
        for case in cases:
            print(f"pair {number + 1} of {pairs}: {case}", file=sys.stderr, flush=True)
            old, new = CASES[case](versions, seconds, bool(number % 2))
            for figure, value in old.items():
                rows[case].setdefault(figure, Row(case, figure)).pairs.append((value, new[figure]))
    return [row for figures in rows.values() for row in figures.values()]


def table_of(versions: Sequence[Version], rows: Sequence[Row], pairs: int) -> str:
    """The table, as Markdown."""
    old, new = (version.name for version in versions)
    heads = ("case", "figure", old, new, "ratio", "least to greatest", "wanted", "reached")
    title = f"{new} beside {old}: median of the ratios of {pairs} pair{'s' * (pairs > 1)}, below 1 is faster"
    lines = (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(row.line() for row in rows))
    return "\n".join((f"{title}; Python {sys.version.split()[0]}, asyncio.", "", *lines))


@contextlib.contextmanager
def installed(revisions: Sequence[str]) -> Iterator[list[Version]]:
    """Each in a worktree with an environment of its own; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="asynclock-compare-") as folder, contextlib.ExitStack() as stack:
        versions = []
        for index, revision in enumerate(revisions):
            commit = _git("rev-parse", "--short", f"{revision}^{{commit}}")
            tree, venv = Path(folder) / f"tree{index}", Path(folder) / f"venv{index}"
            print(f"installing {revision} ({commit})", file=sys.stderr, flush=True)
            _git("worktree", "add", "--detach", str(tree), commit)
            stack.callback(_git, "worktree", "remove", "--force", str(tree))
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            python = str(venv / "bin" / "python")
            pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", f"{tree}[cli]"]
            subprocess.run(pip, check=True)
            asked = [python, "-I", "-c", "import asynclock; print(asynclock.__file__)"]
            found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
            if not Path(found).is_relative_to(tree):
                raise typer.BadParameter(f"{revision} is not what its environment imports ({found})")
            versions.append(Version(commit if revision == commit else f"{revision} ({commit})", python))
        yield versions


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


app = typer.Typer(add_completion=False)


@app.command()
def main(
    revision: Annotated[str, typer.Argument(metavar="REV", help="The version to compare with.")],
    head: Annotated[str, typer.Option(help="The other one. What is not committed does not count.")] = "HEAD",
    cases: Annotated[
        list[str] | None, typer.Option("--case", help=f"Any of {', '.join(NAMES)}; all by default.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="How often both are measured.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.01, help=f"How long each of the {TURNS} turns takes.")] = 0.5,
) -> None:
    """Measure two versions in turn and print a table of ratios as Markdown. Use a machine with nothing else to do."""
    for name in cases or ():
        if name.upper() not in NAMES:
            raise typer.BadParameter(f"{name}: there are {', '.join(NAMES)}")
    chosen = [case for case in CASES if not cases or case[:2] in map(str.upper, cases)]
    with installed([revision, head]) as versions:
        rows = measured(versions, chosen, pairs, seconds)
        print(table_of(versions, rows, pairs))
