"""How commands print: JSON, durations, and tables whose cells cannot do anything to the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from asynclock._untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asynclock.info import Holder, NodeHealth


NO_SPARE = "ok, but no node to spare"
"""What `health` and `doctor` say where a node casts no vote, and no other node may fail."""


class Unwritten(Exception):
    """Stdout cannot be written, as on a full disk."""


def write(text: str) -> bool:
    """Print it on stdout, at once. False: its reader has gone, as with `| head`. That is no error, and the exit code of
    the command stays what it is. Raises Unwritten."""
    return _delivered(lambda: print(text, flush=True))


def flush() -> None:
    """Write what is left of stdout. Raises Unwritten. If this is left to Python, it exits with 120 where that fails."""
    if sys.stdout is not None:
        _delivered(sys.stdout.flush)


def _delivered(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError as error:
        drop_rest()
        if isinstance(error, BrokenPipeError):
            return False
        raise Unwritten(error.strerror) from error
    return True


def drop_rest() -> None:
    """Stdout cannot be written: drop what is left in its buffer. Python would write it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def escape_the_unknown() -> None:
    """Stdout escapes the characters that its encoding lacks: the text may be that of another program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """Print it on stderr, at once. An error of stderr is ignored: the caller has more to do, and cannot report it."""
    if sys.stderr is not None:  # it was closed: then `print` would write to stdout
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def is_lively() -> bool:
    """Whether stdout is a terminal that can show a live picture."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def print_json(value: Any, *, error: bool = False) -> None:
    """One line, on stdout or stderr."""
    text = json.dumps(plain(value))
    if error:
        tell(text)
    else:
        write(text)


def plain(value: Any) -> Any:
    """The value as JSON can show it. Pure."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return value


def length(seconds: float) -> str:
    """A time as people read it: 0.21ms, 1.5s, 41s, 3m05s, 2h10m, 4d03h. Pure."""
    if seconds < 1:
        return f"{seconds * 1000:.2g}ms" if seconds < 0.1 else f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.2g}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def count(number: int, what: str) -> str:
    """1 hold, 2 holds. Pure."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def age(since: float) -> str:
    """The time since a Unix time; "?": unknown."""
    return length(max(0.0, time.time() - since)) if since else "?"


def who(host: str, pid: int) -> str:
    """The process of a holder or waiter."""
    return f"{host}:{pid}" if host else "another program"


def why(node: NodeHealth) -> str:
    """Why a server casts no vote, without its address, which stands beside it. Pure."""
    return node.error.removeprefix(node.node).lstrip(": ")


def taken(name: str, holders: Sequence[Holder], now: float) -> str:
    """Why a name could not be had, in a sentence that people read. `now`: Unix time. Pure."""
    first, who = next(iter(holders), None), "another owner"
    if first is None:
        return f"{name} is held by {who}"
    if is_mark(first):
        return f"{name} is taken{_another(first)}: {why_taken(first)}"
    if first.host:
        who = f"{first.host}, pid {first.pid}, which asked for it {length(max(0.0, now - first.since))} ago"
    elif first.remaining is not None:
        who = f"a key of another program{_another(first)}"
    else:
        who = (
            "a key of another program, without an expiry: if nothing needs it, delete it with asynclock break --foreign"
        )
    return f"{name} is held by {who}"


def _another(holder: Holder) -> str:
    return "" if holder.remaining is None else f" for another {length(holder.remaining)}"


def why_taken(mark: Holder) -> str:
    """Why a name is taken that nobody holds (`is_mark`). Pure."""
    return "a --once run has succeeded" if mark.metadata == "(done)" else "it rests after a release (min_hold)"


def is_mark(holder: Holder) -> bool:
    """Whether nobody holds it: the name stays taken after a release with min_hold, or after a run of `once`. Pure."""
    return not holder.host and holder.metadata in ("(resting)", "(done)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of aligned columns. No cell is cut, whatever the width of the terminal. Pure."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
