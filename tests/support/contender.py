"""A process that takes one lock again and again, and writes down what it sees: for tests in which nodes fail.

    python -m tests.support.contender NAME FOLDER

FOLDER/inside exists only while a process is inside: a second one finds it there. FOLDER/journal has a line for each
hold: the fencing token, the process id, and whether it was alone. It is written inside, so its tokens rise."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NamedTuple

from asynclock import LockLost, QuorumUnavailable, redlock

_HOLD = 0.02  # seconds; an instant would hide an overlap


class Entry(NamedTuple):
    """A line of the journal."""

    fence: int
    pid: int
    what: str


def entries(folder: Path) -> list[Entry]:
    """The journal."""
    lines = (folder / "journal").read_text().splitlines()
    return [Entry(int(fence), int(pid), what) for fence, pid, what in map(str.split, lines)]


async def hold(folder: Path, fence: int) -> None:
    """What the lock protects."""
    what = "alone"
    try:
        os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        what = "beside-another"
    write(folder, fence, what)
    try:
        await asyncio.sleep(_HOLD)
    finally:
        (folder / "inside").unlink(missing_ok=True)


def write(folder: Path, fence: int, what: str) -> None:
    """One line, in one write."""
    with (folder / "journal").open("a") as journal:
        journal.write(f"{fence} {os.getpid()} {what}\n")


async def main(name: str, folder: Path) -> None:
    """Until it is killed."""
    async with redlock:
        while True:
            try:
                async with redlock(name) as lease:
                    await hold(folder, lease.fence)
            except QuorumUnavailable:
                print("QuorumUnavailable", flush=True)
            except LockLost as lost:
                print(f"LockLost: {lost}", flush=True)


if __name__ == "__main__":
    redlock.configure(lease=6.0, patience=1.0)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
