"""P8: one process that holds very many leases. How long their renewals, `release_all` and `aclose` hold its loop, and
what a held lease costs. `python -m benchmarks.holding LEASES LEASE SECONDS URL...` is the process, and prints JSON.

What counts is a turn of the loop: from the return of one `select` to the call of the next, since nothing else runs
meanwhile. It is measured in CPU seconds of the thread, which the load of the machine changes little, and on the clock.
The pauses of the garbage collector are taken out and shown apart; its settings are the user's, and are left as they
are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import selectors
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynclock import Lease, LockError, Redlock
from benchmarks.goals import Verdict
from benchmarks.servers import running
from benchmarks.waiting import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD = 100_000
OVER = {1: 1, 5: 5}
"""Nodes, and which part of the leases is held on them."""

LEASE = 30.0
LEASES = 3
"""They are held for so many times the lease."""

HANG = 600.0
"""A process that takes this many seconds more than planned has hung."""

LONGEST = 0.005
"""Seconds of CPU that a turn of the loop may take."""
MOST_BYTES, MOST_CPU = 2048, 0.25

FEW = 64
"""Tasks that take the leases one after the other, where memory is measured: what a task takes is the user's."""

PHASES = ("taking", "renewals", "release_all", "aclose")
JUDGED = PHASES[1:]


@dataclass(slots=True)
class Turns:
    """The turns of the loop in one phase, in seconds, without the pauses of the garbage collector."""

    count: int = 0
    long: int = 0  # turns that took more CPU than LONGEST
    cpu: float = 0.0  # the longest by CPU
    wall: float = 0.0  # the longest by the clock
    took: float = 0.0  # the whole phase, by the clock
    used: float = 0.0  # the whole phase, CPU of the process
    gc_longest: float = 0.0  # the longest pause, by CPU
    gc_total: float = 0.0


@dataclass(slots=True)
class Held:
    """What one process saw."""

    nodes: int
    leases: int
    kept: int = 0  # still held after the last renewals
    bytes_each: float = math.nan  # of the process's memory, per held lease
    phases: dict[str, Turns] = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        where = f"{self.leases:,} leases, {self.nodes} node{'s' * (self.nodes > 1)}:"
        share = self.phases["renewals"].used / self.phases["renewals"].took
        memory = Verdict(
            f"{where} memory of a held lease",
            f"<= {MOST_BYTES} B",
            "not known on this system" if math.isnan(self.bytes_each) else f"{self.bytes_each:,.0f} B",
            None if math.isnan(self.bytes_each) else self.bytes_each <= MOST_BYTES,
        )
        return [
            Verdict(f"{where} kept", "all", f"{self.kept:,}", self.kept == self.leases),
            Verdict(f"{where} CPU while held, of a core", f"<= {MOST_CPU:.0%}", f"{share:.0%}", share <= MOST_CPU),
            memory,
            *(
                Verdict(
                    f"{where} longest turn of the loop, {phase}, without GC",
                    f"<= {LONGEST * 1000:g} ms",
                    f"{self.phases[phase].cpu * 1000:,.1f} ms of CPU",
                    self.phases[phase].cpu <= LONGEST,
                )
                for phase in JUDGED
            ),
        ]


# -- the process -----------------------------------------------------------------------------------------------------


class TimedSelector(selectors.DefaultSelector):
    """Measures the turns of the loop that waits in it."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()  # of no phase
        self._began = self._began_cpu = 0.0
        self._paused = self._paused_cpu = 0.0  # by the garbage collector in this turn
        self._pause = (0.0, 0.0)
        gc.callbacks.append(self._collected)

    def phase(self, turns: Turns) -> None:
        """What comes from now on belongs to it: the turn under way is cut in two."""
        self._end_turn()
        now, used = time.perf_counter(), time.process_time()
        self._turns.took += now
        self._turns.used += used
        turns.took -= now
        turns.used -= used
        self._turns = turns
        self._begin_turn()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._end_turn()
        ready = super().select(timeout)
        self._begin_turn()
        return ready

    def _begin_turn(self) -> None:
        self._paused = self._paused_cpu = 0.0
        self._began, self._began_cpu = time.perf_counter(), time.thread_time()

    def _end_turn(self) -> None:
        turns, cpu = self._turns, time.thread_time() - self._began_cpu - self._paused_cpu
        turns.count += 1
        turns.wall = max(turns.wall, time.perf_counter() - self._began - self._paused)
        turns.cpu = max(turns.cpu, cpu)
        turns.long += cpu > LONGEST

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        """A hook of the garbage collector."""
        now = time.perf_counter(), time.thread_time()
        if phase == "start":
            self._pause = now
            return
        pause = now[1] - self._pause[1]
        self._paused += now[0] - self._pause[0]
        self._paused_cpu += pause
        self._turns.gc_longest = max(self._turns.gc_longest, pause)
        self._turns.gc_total += pause


class Takers:
    """Tasks that take leases and live on until `end`: a lease whose task has ended is unattended."""

    def __init__(self, client: Redlock, leases: int) -> None:
        self.held: list[Lease] = []
        self._client = client
        self._names = range(leases)
        self._errors: list[LockError] = []
        self._over, self._taken = asyncio.Event(), asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    async def take(self, tasks: int) -> None:
        """Take them all, by so many tasks that start together, each the next one when it has one. Raises LockError."""
        self.held.clear()
        shares = [self._names[first::tasks] for first in range(tasks)]
        self._tasks += [asyncio.create_task(self._take(share)) for share in shares]
        for _ in shares:
            await self._taken.acquire()
        if self._errors:
            raise self._errors[0]

    async def _take(self, share: range) -> None:
        try:
            for number in share:
                self.held.append(await self._client(f"order:{number}").acquire(timeout=None))
        except LockError as error:  # the machine is overloaded
            self._errors.append(error)
        self._taken.release()
        await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)


async def hold(selector: TimedSelector, leases: int, lease: float, seconds: float, urls: Sequence[str]) -> Held:
    """Take them one after the other and look at the memory. Then take them together, for those are renewed together;
    hold them, give them back, take them again and close the client."""
    seen = Held(len(urls), leases, phases={phase: Turns() for phase in PHASES})

    def begin(phase: str) -> None:
        selector.phase(Turns())
        gc.collect()
        selector.phase(seen.phases.get(phase) or Turns())

    # So many at once keep the servers busy for seconds, and that is no outage.
    client = await Redlock(*urls, lease=lease, node_timeout=lease / 3, patience=lease).__aenter__()
    takers = Takers(client, leases)
    begin("none")
    before = _memory()
    await takers.take(FEW)
    begin("none")
    seen.bytes_each = (_memory() - before) / leases
    await client.release_all()
    begin("taking")
    await takers.take(leases)
    begin("renewals")
    await asyncio.sleep(seconds)
    begin("none")
    seen.kept = sum(each.held for each in takers.held)
    begin("release_all")
    await client.release_all()
    begin("none")
    await takers.take(leases)
    begin("aclose")
    await client.aclose()
    begin("none")
    await takers.end()
    return seen


def _memory() -> float:
    """Bytes that this process has in memory; NaN elsewhere than on Linux."""
    if sys.platform != "linux":
        return math.nan
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    leases, lease, seconds, *urls = sys.argv[1:]
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        seen = runner.run(hold(selector, int(leases), float(lease), float(seconds), urls))
    print(json.dumps(asdict(seen)))


# -- the process that starts it --------------------------------------------------------------------------------------


def run(nodes: int, leases: int, lease: float = LEASE, seconds: float = LEASE * LEASES) -> Held:
    """One such process, on fresh servers. Raises Failed."""
    with running(nodes) as servers:
        urls = [server.url for server in servers]
        command = [sys.executable, "-m", "benchmarks.holding", str(leases), str(lease), str(seconds), *urls]
        limit = seconds + HANG
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"the process did not end within {limit:g} s") from None
    if done.returncode:
        raise Failed((done.stderr.strip() or "the process died").splitlines()[-1])
    printed: dict[str, Any] = json.loads(done.stdout)
    printed["phases"] = {phase: Turns(**turns) for phase, turns in printed["phases"].items()}
    return Held(**printed)


if __name__ == "__main__":
    main()
