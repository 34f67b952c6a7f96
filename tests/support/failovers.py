"""Clients in processes of their own, which use a few names for as long as they run, while the database behind them
fails over. Each writes what it did as lines of JSON: its tenures, and what it was told.

    python -m tests.support.failovers sync crash --driver postgresql --seconds 20

    crash      the primary is killed, and the standby promoted
    mute       the primary stands still (SIGSTOP) before that, as a machine that is cut off
    second     nobody stops the primary: it runs on beside the new one
    returns    the primary is killed, and comes back as a second primary
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from asynclock import LockError, Redlock
from asynclock.stores.embedded.server import die_with_parent
from tests.support.services.postgresql_pair import Pair, postgresql_pair

LEASE = 3.0
NAMES = 5
TASKS = 8


# -- a client ----------------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """Log lines, as the rest is written."""

    def emit(self, record: logging.LogRecord) -> None:
        write(log=record.levelname, text=record.getMessage()[:400])


def write(**words: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **words}), flush=True)


async def client_of(url: str, shift: int) -> None:
    """Until it is killed."""
    logging.getLogger("asynclock").addHandler(Told())
    logging.getLogger("asynclock").setLevel(logging.INFO)
    async with Redlock(url, lease=LEASE, patience=60.0) as client:
        client.subscribe(tell)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(client))
            for number in range(TASKS):
                group.create_task(use(client, f"f:{(number + shift) % NAMES}"))


def tell(event: object) -> None:
    if type(event).__name__ not in ("Acquired", "Released"):
        write(event=type(event).__name__, text=str(event)[:300])


async def watch(client: Redlock) -> None:
    before: object = None
    while True:
        health = await client.health()
        now = health.ok, [each.error for each in health.nodes]
        if now != before:
            write(health=now[0], text=str(now[1])[:300])
        before = now
        await asyncio.sleep(0.2)


async def use(client: Redlock, name: str) -> None:
    lock = client(name)
    while True:
        try:
            asked = time.monotonic()
            async with lock as lease:
                began = time.monotonic()
                try:
                    await asyncio.sleep(0.005)
                finally:
                    ended = min(time.monotonic(), began + LEASE) if lease.held else time.monotonic()
                    write(name=name, fence=lease.fence, asked=asked, began=began, ended=ended)
        except LockError as error:
            write(failed=type(error).__name__, text=str(error)[:300])


# -- what happened -----------------------------------------------------------------------------------------------------


def summary(lines: list[dict[str, Any]], moment: float) -> dict[str, Any]:
    """Of the lines of all clients; `moment`: of the failover."""
    tenures = sorted((each for each in lines if "began" in each), key=lambda each: each["began"])
    double, falling, gaps = [], [], {}
    for name in sorted({each["name"] for each in tenures}):
        last: dict[str, Any] | None = None
        until, top = 0.0, 0
        for each in (each for each in tenures if each["name"] == name):
            if each["began"] < until:
                double.append((name, round(each["began"] - moment, 3), round(until - each["began"], 3)))
            if each["fence"] <= top:
                falling.append((name, round(each["began"] - moment, 3), top - each["fence"]))
            if last is not None and each["began"] - last["ended"] > gaps.get(name, 0.0):
                gaps[name] = each["began"] - last["ended"]
            until, top, last = max(until, each["ended"]), max(top, each["fence"]), each
    return {
        "tenures": len(tenures),
        "after": sum(each["began"] > moment for each in tenures),
        "last": round(max(each["began"] for each in tenures) - moment, 2),
        "double": len(double),
        "doubles": double[:5],
        "falling": len(falling),
        "falls": falling[:5],
        "gap": round(max(gaps.values(), default=0.0), 2),
    }


def show(lines: list[dict[str, Any]], moment: float) -> None:
    for each in lines:
        if said := next((key for key in ("log", "event", "health", "failed") if key in each), None):
            print(f"  {each['at'] - moment:+8.2f} {each['pid']} {said}={each[said]} {each['text']}")


class Clients:
    def __init__(self, folder: Path, urls: list[str]) -> None:
        self._files = [folder / str(number) for number in range(len(urls))]
        self._processes = []
        for number, (url, file) in enumerate(zip(urls, self._files, strict=True)):
            with file.open("wb") as out:
                command = [sys.executable, "-m", "tests.support.failovers", "client", url, str(number)]
                end = die_with_parent if sys.platform == "linux" else None
                self._processes.append(subprocess.Popen(command, stdout=out, preexec_fn=end))  # noqa: PLW1509 - see there

    def lines(self) -> list[dict[str, Any]]:
        """So far."""
        found = []
        for number, file in enumerate(self._files):
            for line in file.read_text().splitlines():
                with suppress(ValueError):  # one that is not complete
                    found.append({"pid": number, **json.loads(line)})
        return sorted(found, key=lambda each: each["at"])

    def wait_for(self, tenures: int, after: float, within: float) -> bool:
        """Until each has had so many tenures after that moment."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            had = Counter(each["pid"] for each in self.lines() if each.get("began", 0.0) > after)
            if all(had[number] >= tenures for number in range(len(self._files))):
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        for each in self._processes:
            each.kill()
            each.wait()


def fail_over(pair: Pair, how: str) -> None:
    old = pair.primary
    if how in ("crash", "returns"):
        old.stop()
    elif how == "mute":
        for pid in old.group:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    pair.promote()


def play(synchronous: bool, how: str, driver: str, seconds: float, order: str) -> dict[str, Any]:
    """A failover in the middle of `seconds` of load."""
    with postgresql_pair(synchronous=synchronous) as pair, tempfile.TemporaryDirectory() as folder:
        both = (pair.primary, pair.standby) if order == "first" else (pair.standby, pair.primary)
        clients = Clients(Path(folder), [pair.url(driver, *both)] * 2)
        try:
            if not clients.wait_for(5, 0.0, 30):
                show(clients.lines(), time.monotonic())
                raise SystemExit("no tenure")
            time.sleep(seconds / 4)
            moment = time.monotonic()
            fail_over(pair, how)
            promoted = time.monotonic()
            print(f"promoted after {promoted - moment:.2f} s")
            clients.wait_for(5, promoted, seconds)
            time.sleep(seconds / 4)
            if how == "returns":
                pair.standby.start()
                print(f"the old one is back at {time.monotonic() - moment:+.2f}")
                time.sleep(seconds / 2)
        finally:
            clients.kill()
        lines = clients.lines()
        show(lines, moment)
        return summary(lines, moment)


def main() -> None:
    if sys.argv[1] == "client":
        asyncio.run(client_of(sys.argv[2], int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("replication", choices=["sync", "async"])
    parser.add_argument("how", choices=["crash", "mute", "second", "returns"])
    parser.add_argument("--driver", default="postgresql")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--order", default="first")
    given = parser.parse_args()
    found = play(given.replication == "sync", given.how, given.driver, given.seconds, given.order)
    print(json.dumps({"run": [given.replication, given.how, given.driver], **found}))


if __name__ == "__main__":
    main()
