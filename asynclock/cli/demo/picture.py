"""The output of the demo: a live picture on a terminal, otherwise a line per event."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asynclock._clock import now
from asynclock.cli.demo.stage import LEASE, Note, State
from asynclock.cli.output import write

if TYPE_CHECKING:
    from asynclock.cli.demo.records import Hold
    from asynclock.cli.demo.stage import Actor, Stage, Worker

_LOOKS: dict[State, tuple[str, str]] = {
    State.STARTING: (" ", "dim"),
    State.UP: ("─", "green"),
    State.SILENT: ("╌", "yellow"),
    State.WAITING: ("·", "bright_black"),
    State.HOLDS: ("·", "bold green"),
    State.LOST: ("!", "bold magenta"),
    State.FROZEN: ("░", "cyan"),
    State.KILLED: (" ", "bold red"),
    State.ENDED: (" ", "dim"),
}
_HELD = ("█", "green")
_ORPHAN = ("▒", "red")  # the name is still taken, but its holder is dead or frozen
_MARKS = {State.KILLED: ("✗", "bold red"), State.LOST: ("!", "bold magenta")}
_WEIGHTS = ("bright_black", "bold yellow", "bold magenta")
_LABELS = 30  # columns before the strips
_EVENTS = 12
_FURNITURE = 8  # lines that are neither an actor nor an event, and the line of the cursor

_console = Console(highlight=False)


def print_line(text: str, lively: bool, style: str = "") -> None:
    """Print a line that stays. Plain lines are neither wrapped nor coloured."""
    if lively:
        width = _console.width
        for line in text.splitlines() or [""]:
            lines = textwrap.wrap(line, width, subsequent_indent=" " * 7, drop_whitespace=True) or [""]
            _console.print(Text("\n".join(lines), style=style))
    else:
        write(text)


class Picture:
    """Draws a stage. While it is entered, only `draw` writes to the terminal."""

    def __init__(self, stage: Stage, seconds: float, lively: bool) -> None:
        self._stage = stage
        self._seconds = seconds
        self._live = Live(console=_console, auto_refresh=False) if lively else None
        self._told = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            print_line(_title(self._stage), lively=False)
        nodes = len(self._stage.servers)
        if nodes % 2 == 0:
            self._stage.note(
                f"note: {nodes} servers survive no more failures than {nodes - 1} servers: use an odd number", 1
            )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def draw(self) -> None:
        """Draw the picture as it is now, or print the lines since the last call."""
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        for note in self._stage.notes[self._told :]:
            print_line(f"{note.at - self._stage.run.start:7.2f} s  {note.text}", lively=False)
        self._told = len(self._stage.notes)

    # -- the live picture ----------------------------------------------------------------------------------------

    def _panel(self) -> Panel:
        width = max(20, _console.width - _LABELS - 4)
        span = max(self._seconds, now() - self._stage.run.start)
        rows = Table.grid(padding=(0, 1))
        rows.add_column(width=9)
        rows.add_column(width=_LABELS - 11)
        rows.add_column(width=width, no_wrap=True)
        for server in self._stage.servers:
            rows.add_row(*_labels(server), self._strip(server, width, span))
        rows.add_row("", "", _axis(width, span))
        for worker in self._stage.workers:
            rows.add_row(*_labels(worker), self._strip(worker, width, span))
        body = Group(rows, Text(), self._ledger(), _legend(), Text(), *self._events())
        return Panel(body, title=_title(self._stage), title_align="left", border_style="blue")

    def _strip(self, actor: Actor, width: int, span: float) -> Text:
        """The actor's states, its holds on top of them, then the moments that would get lost between two cells."""
        start = self._stage.run.start
        per = width / span
        cells = [(" ", "")] * width
        shown = min(width, int((now() - start) * per) + 1)

        def paint(begin: float, end: float, look: tuple[str, str]) -> None:
            first = max(0, int((begin - start) * per))
            last = min(shown, max(first + 1, int((end - start) * per)))
            for cell in range(first, last):
                cells[cell] = look

        ends = [at for at, _ in actor.history[1:]] + [now()]
        for (at, state), end in zip(actor.history, ends, strict=True):
            if end > start:
                paint(at, end, _LOOKS[state])
        for hold in self._holds_of(actor):
            struck = next((s.at for s in self._stage.run.struck if s.fence == hold.fence), None)
            end = min(now(), hold.end)
            paint(hold.entered, end if struck is None else struck, _HELD)
            if struck is not None:
                paint(struck, end, _ORPHAN)
        for at, state in actor.history:
            if state in _MARKS and at > start:
                paint(at, at, _MARKS[state])
        return Text.assemble(*cells)

    def _holds_of(self, actor: Actor) -> list[Hold]:
        return [hold for hold in self._stage.run.holds if actor.title == "worker" and hold.worker == actor.number]

    def _ledger(self) -> Text:
        run, ledger = self._stage.run, self._stage.ledger
        refused = len(run.refused())
        return Text.assemble(
            ("ledger", "bold"),
            f"    total {ledger.total}, {len(run.accepted())} writes accepted, ",
            (f"{refused} refused", "bold magenta" if refused else ""),
            f", highest fence {ledger.highest}",
        )

    def _events(self) -> list[Text]:
        """The last events. Those with a weight stay longer than routine ones."""
        start = self._stage.run.start
        rows = len(self._stage.servers) + len(self._stage.workers)
        room = min(_EVENTS, max(4, _console.height - rows - _FURNITURE))
        heavy = [note for note in self._stage.notes if note.weight][3 - room :]
        light = [note for note in self._stage.notes if not note.weight][len(heavy) - room :]
        notes = sorted([*heavy, *light], key=lambda note: note.at)
        lines = [_event(note, start) for note in notes]
        return lines + [Text()] * (room - len(lines))


def _title(stage: Stage) -> str:
    nodes = len(stage.servers)
    return (
        f"asynclock demo: {len(stage.workers)} processes, one invoice, Redlock over {nodes} servers "
        f"(majority {nodes // 2 + 1}), lease {LEASE:g} s"
    )


def _labels(actor: Actor) -> tuple[Text, Text]:
    text, style = actor.state.value, _LOOKS[actor.state][1]
    if actor.title == "worker" and (left := _time_left(actor)):  # type: ignore[arg-type]
        text += f", {left}"
    return Text(actor.name, style="bold"), Text(text, style=style)


def _time_left(worker: Worker) -> str:
    hold = worker.hold
    if hold is None or not hold.open or worker.state not in {State.HOLDS, State.FROZEN, State.KILLED}:
        return ""
    left = hold.until - now()
    return f"{left:.1f} s left" if left > 0 else "lease over"


def _axis(width: int, span: float) -> Text:
    every = 1 if span <= 14 else 2
    cells = [" "] * (width + 4)
    for second in range(0, int(span) + 1, every):
        cell = int(second * width / span)
        label = str(second)
        cells[cell : cell + len(label)] = label
    return Text("".join(cells)[:width], style="bright_black")


def _legend() -> Text:
    return Text.assemble(
        ("█", "green"), " holds  ", ("▒", "red"), " still taken, its holder killed or frozen  ",
        ("░", "cyan"), " frozen  ", ("!", "bold magenta"), " lost  ", ("✗", "bold red"), " killed  ",
        ("╌", "yellow"), " no vote yet",
        style="",
    )  # fmt: skip


def _event(note: Note, start: float) -> Text:
    text = Text.assemble((f"{note.at - start:6.2f} s  ", "bright_black"), (note.text, _WEIGHTS[note.weight]))
    text.truncate(_console.width - 5, overflow="ellipsis")
    return text
