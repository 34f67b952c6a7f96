"""Draws the diagrams of the documentation: NAME.txt beside this file becomes NAME.svg.

    python docs/diagrams/draw.py            write all SVG files
    python docs/diagrams/draw.py --check    exit with 1 if an SVG file differs from its text

The first line of a text names its kind. `title:` and `foot:` are the lines above and below the picture. `#` begins a
comment, and `\\n` breaks a line. The kinds:

    sequence    `actors:` names the columns, and `X: NAME` gives each a short name.
                `X -> Y: TEXT` is a message, `X --> Y: TEXT` a reply, `X --x Y: TEXT` a refusal, `note X: TEXT` a box,
                `gap` an empty step. `hold X: TEXT` starts a bar on a column, and so do `wait`, `lost` and `stale`;
                `end X` ends the bar. A column has one bar at a time.
    timeline    `axis: FROM TO STEP UNIT`, then `row NAME`, each followed by its bars and marks:
                `bar FROM TO STYLE TEXT`, `mark AT STYLE TEXT`.
    floors      `NUMBER | FILES | TEXT`, from the top floor to the bottom.
    states      `FROM -> TO: EVENT`: a table with a row for each FROM and a column for each TO.

It needs the standard library only. Each picture has a background of its own, so that it is readable on light and dark
pages, and refers to no other file.
"""

from __future__ import annotations

import re
import sys
from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
FONT = "-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
SIZE = 13  # of the text, in pixels
LINE = 17  # from one line of text to the next
MARGIN = 24
INK, MUTED, RULE, PAPER, PANEL = "#1f2328", "#59636e", "#d1d9e0", "#ffffff", "#f6f8fa"
STYLES = {  # fill, edge
    "hold": ("#aceebb", "#1a7f37"),
    "valid": ("#ddf4ff", "#0969da"),
    "wait": ("#fff1b8", "#9a6700"),
    "lost": ("#eaeef2", "#59636e"),
    "stale": ("#ffcecb", "#cf222e"),
    "good": ("#1a7f37", "#1a7f37"),
    "bad": ("#cf222e", "#cf222e"),
}


def width_of(text: str, size: float = SIZE) -> float:
    """Pixels that a line of text may take: the widest of the fonts above needs about 0.6 em a character."""
    return len(text) * size * 0.6


class Canvas:
    """Collects the elements of one picture."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        fill: str = INK,
        size: float = SIZE,
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Lines of text, the first with its baseline at `y`. A halo keeps it readable on top of lines."""
        more = ' font-weight="600"' if bold else ""
        if halo:
            more += f' stroke="{PAPER}" stroke-width="4" paint-order="stroke"'
        for number, line in enumerate(text.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * LINE:g}" text-anchor="{anchor}" fill="{fill}" '
                f'font-size="{size:g}"{more}>{escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str, radius: float = 4) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{edge}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, edge: str = RULE, more: str = "") -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{edge}" fill="none"{more}/>')

    def arrow(self, x: float, to_x: float, y: float, edge: str, dashed: bool) -> None:
        """A horizontal arrow."""
        back = 8 if to_x > x else -8
        self.line(x, y, to_x - back / 2, y, edge, ' stroke-width="1.5"' + (' stroke-dasharray="5 4"' if dashed else ""))
        self.parts.append(f'<path d="M{to_x:g} {y:g}l{-back} -4v8z" fill="{edge}"/>')

    def svg(self, title: str, width: float, height: float) -> str:
        """The whole file, with its title and its background."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="{FONT}">'
        )
        paper = (
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" '
            f'fill="{PAPER}" stroke="{RULE}"/>'
        )
        return "\n".join([head, f"<title>{escape(title)}</title>", paper, *self.parts, "</svg>"]) + "\n"


class Source:
    """The text of one diagram: its kind, title and foot, and all other lines."""

    def __init__(self, text: str) -> None:
        self.kind = self.title = ""
        self.foot: list[str] = []
        self.lines: list[str] = []
        for line in text.splitlines():
            word, _, rest = line.partition(": ")
            if word == "kind":
                self.kind = rest
            elif word == "title":
                self.title = rest
            elif word == "foot":
                self.foot.append(rest)
            elif line.strip() and not line.startswith("#"):
                self.lines.append(line.strip().replace("\\n", "\n"))

    def finish(self, canvas: Canvas, width: float, bottom: float) -> str:
        """The file: the title above, the foot below."""
        canvas.text(MARGIN, 34, self.title, size=16, bold=True)
        for number, line in enumerate(self.foot):
            canvas.text(MARGIN, bottom + LINE + number * LINE, line, fill=MUTED)
        longest = max(width_of(self.title, 16), *map(width_of, self.foot or [""]))
        return canvas.svg(self.title, max(width, longest + 2 * MARGIN), bottom + len(self.foot) * LINE + MARGIN)


# -- sequence ----------------------------------------------------------------------------------------------------------

MESSAGE = re.compile(r"(\w+) (->|-->|--x) (\w+): (.*)", re.DOTALL)
STATE = re.compile(r"(hold|wait|lost|stale|note) (\w+):\s*(.*)", re.DOTALL)
TOP, STEP, BAR, HEAD = 56, 40, 12, 32


def sequence(source: Source) -> str:
    """Messages between columns, from top to bottom."""
    names = [name.strip() for name in source.lines[0].removeprefix("actors:").split("|")]
    short = {line.partition(":")[0]: line.partition(": ")[2] for line in source.lines if re.match(r"\w+: ", line)}
    index = {key: names.index(name) for key, name in short.items() if name in names}
    steps = [line for line in source.lines[1:] if not re.match(r"\w+: ", line)]
    columns = _columns(names, index, steps)
    canvas, bars, y = Canvas(), Canvas(), TOP + HEAD + 8.0
    open_bars: dict[str, tuple[str, str, float]] = {}

    def close(key: str) -> None:
        style, label, begin = open_bars.pop(key)
        fill, edge = STYLES[style]
        x = columns[index[key]]
        bars.box(x - BAR / 2, begin, BAR, y - begin, fill, edge, 2)
        left = index[key] == 0
        bars.text(x - BAR if left else x + BAR, begin + 14, label, anchor="end" if left else "start", fill=edge)

    for step in steps:
        if message := MESSAGE.fullmatch(step):
            y += STEP
            _message(canvas, columns, index, message, y)
        elif state := STATE.fullmatch(step):
            word, key, label = state.groups()
            if word == "note":
                y += 12
                y = _note(canvas, columns[index[key]], y, label)
            else:
                open_bars[key] = word, label, y
        elif step == "gap":
            y += STEP
        else:
            close(step.removeprefix("end "))
    y += 24
    for key in list(open_bars):
        close(key)
    lines = Canvas()
    for name, x in zip(names, columns, strict=True):
        lines.line(x, TOP + HEAD, x, y, RULE, ' stroke-width="1.5"')
        lines.box(x - width_of(name) / 2 - 14, TOP, width_of(name) + 28, HEAD, PANEL, MUTED)
        lines.text(x, TOP + 21, name, anchor="middle", bold=True)
    canvas.parts = lines.parts + bars.parts + canvas.parts
    return source.finish(canvas, columns[-1] + _side(len(names) - 1, index, steps), y + 12)


def _columns(names: list[str], index: dict[str, int], steps: list[str]) -> list[float]:
    """Where each column stands: far enough from the one before it for each message and box between the two."""
    gaps = [max(170.0, width_of(one + two) / 2 + 60) for one, two in pairwise(names)]
    for step in steps:
        if (message := MESSAGE.fullmatch(step)) and abs(index[message[1]] - index[message[3]]) == 1:
            gap = min(index[message[1]], index[message[3]])
            gaps[gap] = max(gaps[gap], max(map(width_of, message[4].split("\n"))) + 40)
    columns = [_side(0, index, steps)]
    for gap in gaps:
        columns.append(columns[-1] + gap)
    return columns


def _side(column: int, index: dict[str, int], steps: list[str]) -> float:
    """Room beside an outer column for the labels of its bars, its boxes and its name."""
    room = 70.0
    for step in steps:
        if (state := STATE.fullmatch(step)) and index[state[2]] == column:
            width = max(map(width_of, state[3].split("\n")))
            room = max(room, width / 2 + 12 if state[1] == "note" else width + BAR)
    return room + MARGIN


def _message(canvas: Canvas, columns: list[float], index: dict[str, int], message: re.Match[str], y: float) -> None:
    sender, head, receiver, label = message.groups()
    x, to_x = columns[index[sender]], columns[index[receiver]]
    side = BAR / 2 + 1 if to_x > x else -BAR / 2 - 1
    edge = STYLES["bad"][1] if head == "--x" else INK
    canvas.arrow(x + side, to_x - side, y, edge, dashed=head != "->")
    near = columns[index[sender] + (1 if to_x > x else -1)]  # a label stands beside its sender
    canvas.text((x + near) / 2, y - 6, label, anchor="middle", fill=edge, halo=True)


def _note(canvas: Canvas, x: float, y: float, label: str) -> float:
    lines = label.split("\n")
    width, height = max(map(width_of, lines)) + 20, len(lines) * LINE + 10
    canvas.box(x - width / 2, y, width, height, *STYLES["wait"])
    canvas.text(x, y + 18, label, anchor="middle")
    return y + height


# -- timeline ----------------------------------------------------------------------------------------------------------

LABELS, SECOND = 150, 12.6  # pixels for the names of the rows, and for one unit of time


def timeline(source: Source) -> str:
    """Bars and marks over one axis, a row each."""
    low, high, every, unit = source.lines[0].removeprefix("axis: ").split()
    begin, end = float(low), float(high)

    def at(time: str | float) -> float:
        return MARGIN + LABELS + (float(time) - begin) * SECOND

    canvas, grid, y = Canvas(), Canvas(), float(TOP)
    for name, items in _rows(source.lines[1:]):
        for number, part in enumerate(_wrapped(name, LABELS - 16)):
            canvas.text(MARGIN, y + 17 + number * LINE, part, bold=True)
        bars = [item.split(" ", 4)[1:] for item in items if item.startswith("bar ")]
        marks = [item.split(" ", 3)[1:] for item in items if item.startswith("mark ")]
        for first, last, style, label in bars:
            canvas.box(at(first), y, at(last) - at(first), 24, *STYLES[style], radius=3)
            canvas.text(at(first) + 8, y + 17, label)
            y += 28
        centre = y - 16 if bars else y + 12
        for time, style, *label in marks:
            _mark(canvas, at(time), centre, STYLES[style][1], "".join(label), at(end), 30 if bars else 22)
        y = centre + 48 if any(len(mark) > 2 for mark in marks) else y + 14
    y += 6
    for tick in range(int(begin), int(end) + 1, int(every)):
        grid.line(at(tick), TOP - 6, at(tick), y)
        grid.text(at(tick), y + LINE, f"{tick} {unit}", anchor="middle", fill=MUTED)
    canvas.parts = grid.parts + canvas.parts
    return source.finish(canvas, at(end) + MARGIN, y + LINE + 14)


def _rows(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Each row's name and its bars and marks."""
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("row "):
            rows.append((line.removeprefix("row "), []))
        else:
            rows[-1][1].append(line)
    return rows


def _mark(canvas: Canvas, x: float, y: float, edge: str, label: str, end: float, below: float) -> None:
    """A dot, with its label below: in the middle if it is short, else from the dot on, or up to the end of the axis."""
    canvas.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{edge}"/>')
    if not label:
        return
    anchor = "middle" if width_of(label) < 90 else "start"
    if x + width_of(label) / (2 if anchor == "middle" else 1) > end:
        x, anchor = end, "end"
    canvas.text(x - 5 if anchor == "start" else x, y + below, label, anchor=anchor, fill=edge, halo=True)


def _wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


# -- floors ------------------------------------------------------------------------------------------------------------

FLOOR = 40
FILLS = ("#f6f8fa", "#ddf4ff")


def floors(source: Source) -> str:
    """One box per floor, the lowest at the bottom."""
    rows = [[cell.strip() for cell in line.split("|")] for line in source.lines]
    files = max(width_of(row[1]) for row in rows)
    width = 60 + files + 24 + max(width_of(row[2]) for row in rows)
    canvas, y = Canvas(), float(TOP)
    for number, row in enumerate(rows):
        canvas.box(MARGIN, y, width, FLOOR - 6, FILLS[number % 2], MUTED)
        canvas.text(MARGIN + 18, y + 22, row[0], fill=MUTED, bold=True)
        canvas.text(MARGIN + 48, y + 22, row[1], bold=True)
        canvas.text(MARGIN + 48 + files + 16, y + 22, row[2])
        y += FLOOR
    x = MARGIN + width + 24
    canvas.line(x, TOP, x, y - 14, INK, ' stroke-width="1.5"')
    canvas.parts.append(f'<path d="M{x:g} {y - 6:g}l-4 -8h8z" fill="{INK}"/>')
    return source.finish(canvas, x + MARGIN, y)


# -- states ------------------------------------------------------------------------------------------------------------

CELL, NAME = 132, 120  # pixels for an event, and for the name of a state


def states(source: Source) -> str:
    """What follows what: a row for each state, and a column for each state that follows one."""
    edges = [re.split(" -> |: ", line, maxsplit=2) for line in source.lines]
    begins = list(dict.fromkeys(begin for begin, _, _ in edges))
    ends = list(dict.fromkeys(end for _, end, _ in edges))
    ends.sort(key=lambda end: begins.index(end) if end in begins else len(begins))
    canvas, y = Canvas(), float(TOP)
    columns = {end: MARGIN + NAME + number * CELL for number, end in enumerate(ends)}
    for end, x in columns.items():
        canvas.text(x + 8, y + 14, end, bold=True)
    y += 24
    for number, begin in enumerate(begins):
        cells = {end: _wrapped(event, CELL - 16) for start, end, event in edges if start == begin}
        height = max(len(lines) for lines in cells.values()) * LINE + 14
        canvas.box(MARGIN, y, NAME + CELL * len(ends), height, FILLS[number % 2], RULE, 0)
        canvas.text(MARGIN + 8, y + 18, begin, bold=True)
        for end, lines in cells.items():
            canvas.text(columns[end] + 8, y + 18, "\n".join(lines))
        y += height
    return source.finish(canvas, MARGIN * 2 + NAME + CELL * len(ends), y + 8)


KINDS = {"sequence": sequence, "timeline": timeline, "floors": floors, "states": states}


def draw(text: str) -> str:
    """The SVG of a diagram's text."""
    source = Source(text)
    return KINDS[source.kind](source)


def main(check: bool) -> int:
    """Write all files; or name those that differ. Returns the exit code."""
    code = 0
    for path in sorted(HERE.glob("*.txt")):
        svg, target = draw(path.read_text("utf-8")), path.with_suffix(".svg")
        if not check:
            target.write_text(svg, "utf-8")
        elif not target.exists() or target.read_text("utf-8") != svg:
            print(f"{target.name} differs from {path.name}: run python docs/diagrams/draw.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
