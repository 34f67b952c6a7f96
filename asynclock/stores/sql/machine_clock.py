"""The clock of a SQLite file: the same for all processes of the machine, and never going back.

A SQLite file has no server, so the clients read the clock. The wall clock can jump, and with it leases would end early
or late. So the time is that of CLOCK_BOOTTIME, which all processes of a machine share, plus an offset. The first client
after a boot writes the offset into the file; it is such that no time is earlier than one that was used before.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asynclock._clock import now as since_boot
from asynclock.stores.sql.rows import CLOCK, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/timens_offsets")

_MOMENT = re.compile(r"boot at (-?\d+)")
"""What `boot` says where the system has no id for a boot: Unix seconds, in tens."""

_SLEWED = 10
"""Seconds by which the clocks of one boot may say another moment, at most."""


def boot() -> str:
    """What is the same for all processes until the machine boots again."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the moment of the boot, which moves with the wall clock
        return f"boot at {round((time.time() - since_boot()) / 10) * 10}"


def _is_same(stored: str, booted: str) -> bool:
    """Whether two answers of `boot` are those of one boot. The moment may be near the middle between two tens."""
    before, after = map(_MOMENT.fullmatch, (stored, booted))
    if before is None or after is None:
        return stored == booted
    return abs(int(before[1]) - int(after[1])) <= _SLEWED


def boottime() -> float:
    """Seconds since the boot, for all processes. A time namespace may shift the clock of a container."""
    return since_boot() - _shift()


def _shift() -> float:
    try:
        lines = _TIME_NAMESPACE.read_text().splitlines()
    except OSError:
        return 0.0
    found = [words for words in map(str.split, lines) if len(words) == 3 and words[0] in ("boottime", "7")]
    return float(found[0][1]) + float(found[0][2]) / 1e9 if found else 0.0


class Offset(NamedTuple):
    """Unix time less the seconds since the boot."""

    seconds: float
    stored: bool  # by a client, since the boot
    exists: bool  # there is a row for it


async def offset_of(table: str, line: Line, booted: str, since: float, wall: float) -> Offset:
    """The offset of the file; `since`: the seconds since the boot. It only reads."""
    params = {"name": CLOCK}
    found = await line.fetch(f"SELECT owner, expires_at FROM {table} WHERE resource_name = :name", params)  # noqa: S608
    if found and _is_same(found[0][0], booted):
        return Offset(float(found[0][1]), stored=True, exists=True)
    ((last,),) = await line.fetch(f"SELECT max(update_time) FROM {table}")  # noqa: S608
    return Offset(max(wall, last or 0.0) - since, stored=False, exists=bool(found))


async def read_clock(dialect: Dialect, line: Line, booted: str, since: float, wall: float) -> float:
    """The offset of the file, which is stored if no client has done so since the boot. In a transaction that writes."""
    found = await offset_of(dialect.table, line, booted, since, wall)
    if not found.stored:
        row = Row(CLOCK, owner=booted, expires_at=found.seconds, keep_until=None)
        await (dialect.update if found.exists else dialect.insert)(line, row, since + found.seconds)
    return found.seconds


def clock_with(offset: float) -> Callable[[], float]:
    """The clock of a file with that offset."""
    shift = _shift()
    return lambda: since_boot() - shift + offset
