"""Draws dashboard.svg, a picture of the Grafana dashboard: the panels of dashboard.json with the values of sample.json.

    python docs/monitoring/draw.py            write the SVG file
    python docs/monitoring/draw.py --check    exit with 1 if it differs from the two files

sample.json has the answers of a real Prometheus to the queries of the dashboard (`record.py`). It needs the standard
library only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMN, ROW, GAP, TOP = 46, 25, 8, 56  # pixels of one cell of Grafana's grid, between two panels, above the first
PADDING = 12
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700")
WIDE = 7.2  # pixels of a character at size 12

_spec = importlib.util.spec_from_file_location("diagrams", HERE.parent / "diagrams" / "draw.py")
assert _spec is not None and _spec.loader is not None  # noqa: PT018, S101 - for the type checker
diagrams = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(diagrams)

Series = list[tuple[float, float]]


def shown(value: float, unit: str) -> str:
    """A value as Grafana shows it, about."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 1 or name == "µs":
                return f"{value * factor:.3g} {name}" if value else "0 s"
    return f"{value:.3g}" + (" ops/s" if unit == "ops" else "")


def draw(dashboard: Any, sample: Any) -> str:
    """The SVG of a dashboard, with these values."""
    canvas = diagrams.Canvas()
    right = bottom = 0.0
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        x, y = diagrams.MARGIN + grid["x"] * COLUMN, TOP + grid["y"] * ROW
        width, height = grid["w"] * COLUMN - GAP, grid["h"] * ROW - GAP
        right, bottom = max(right, x + width), max(bottom, y + height)
        canvas.box(x, y, width, height, diagrams.PAPER, diagrams.RULE)
        canvas.text(x + PADDING, y + 20, panel["title"], bold=True)
        series = [
            (each["legend"], [tuple(point) for point in each["values"]]) for each in sample["panels"][panel["title"]]
        ]
        if panel["type"] == "stat":
            stat(canvas, panel, series, x + width / 2, y + height - 24)
        else:
            chart(
                canvas,
                panel,
                series,
                (x + PADDING, y + 32, width - 2 * PADDING, height - 32 - PADDING),
                sample["length"],
            )
    canvas.text(diagrams.MARGIN, 34, dashboard["title"], size=16, bold=True)
    foot = textwrap.wrap(sample["about"], 150)
    canvas.text(diagrams.MARGIN, bottom + 22, "\n".join(foot), fill=diagrams.MUTED)
    svg: str = canvas.svg(
        f"{dashboard['title']}: the dashboard", right + diagrams.MARGIN, bottom + 22 + len(foot) * diagrams.LINE
    )
    return svg


def stat(canvas: Any, panel: Any, series: list[tuple[str, Series]], x: float, y: float) -> None:
    """One number, the last of the series, in the color of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    value = series[0][1][-1][1] if series else 0.0
    reached = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    fill = {"green": diagrams.STYLES["good"][1], "red": diagrams.STYLES["bad"][1]}[reached[-1]["color"]]
    text = f"{value:.{defaults['decimals']}f}" if "decimals" in defaults else shown(value, defaults["unit"])
    canvas.text(x, y, text, anchor="middle", fill=fill, size=32, bold=True)


def chart(
    canvas: Any, panel: Any, series: list[tuple[str, Series]], place: tuple[float, float, float, float], length: float
) -> None:
    """Lines over time, with a scale on the left and a legend below."""
    left, top, width, height = place
    unit, custom = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"]["custom"]
    highest = max([value for _, values in series for _, value in values], default=0.0)
    most = panel["fieldConfig"]["defaults"].get("max", round_above(highest))
    scale = 70
    floor = top + height - 40
    for part in (0.0, 0.5, 1.0):
        y = floor - part * (floor - top)
        canvas.line(left + scale, y, left + width, y)
        canvas.text(left + scale - 6, y + 4, shown(part * most, unit), anchor="end", fill=diagrams.MUTED, size=11)
    for minute in range(int(length // 60) + 1):
        at = left + scale + minute * 60 / length * (width - scale)
        anchor = "start" if not minute else "end" if minute * 60 == length else "middle"
        canvas.text(at, floor + 16, f"{minute} min", anchor=anchor, fill=diagrams.MUTED, size=11)
    legend = left
    for number, (name, values) in enumerate(series):
        color = COLORS[number % len(COLORS)]
        points = [
            (left + scale + time / length * (width - scale), floor - min(value / most, 1.0) * (floor - top))
            for time, value in values
        ]
        lines(canvas, points, color, custom, floor)
        after = legend + 18 + len(name) * WIDE
        if after <= left + width:
            canvas.box(legend, top + height - 10, 12, 4, color, color, 1)
            canvas.text(legend + 18, top + height - 4, name, size=12)
        elif legend <= left + width:  # the first name without room
            canvas.text(legend, top + height - 4, "...", size=12)
        legend = after + 16


def round_above(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least `value`."""
    if not value:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def lines(canvas: Any, points: Series, color: str, custom: Any, floor: float) -> None:
    """One series: bars, steps, or a line."""
    if custom["drawStyle"] == "bars":
        path = "".join(f"M{x:.1f} {floor:.1f}V{y:.1f}" for x, y in points if y < floor)
    elif custom.get("lineInterpolation") == "stepAfter":
        path = "".join(f"H{x:.1f}V{y:.1f}" if n else f"M{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
    else:
        # A query without a value leaves a gap.
        step = min((b[0] - a[0] for a, b in pairwise(points)), default=0.0)
        path = "".join(
            f"{'L' if before is not None and x - before < 1.5 * step else 'M'}{x:.1f} {y:.1f}"
            for before, (x, y) in zip([None, *(x for x, _ in points)], points, strict=False)
        )
    canvas.parts.append(f'<path d="{path}" stroke="{color}" stroke-width="2" fill="none"/>')


def main(check: bool) -> int:
    """Write the file; or say that it differs. Returns the exit code."""
    svg = draw(
        json.loads((HERE / "dashboard.json").read_text("utf-8")), json.loads((HERE / "sample.json").read_text("utf-8"))
    )
    target = HERE / "dashboard.svg"
    if not check:
        target.write_text(svg, "utf-8")
    elif not target.exists() or target.read_text("utf-8") != svg:
        print(
            "dashboard.svg differs from dashboard.json and sample.json: run python docs/monitoring/draw.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
