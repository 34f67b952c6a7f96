"""P5 to P7: the cost of waiting between processes. P5: a hand-over. P6: one hot name. P7: many waiters."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from redis import Redis

from benchmarks.contender import LATE
from benchmarks.goals import Verdict, judge_ratio
from benchmarks.runner import in_turn
from benchmarks.servers import running

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from benchmarks.servers import Server

T = TypeVar("T")

OURS, FAIR, REDIS_PY, FAST, NODE = "ours", "fair", "redis-py", "redis-py-1ms", "redis-semaphore"
HOT: dict[int, tuple[str, ...]] = {1: (OURS, FAIR, REDIS_PY, FAST, NODE), 5: (OURS, FAIR, "pottery")}
"""P6: the numbers of nodes, and the sides of each."""

HANG = 60.0
"""A contender that prints nothing for this many seconds has hung."""

_IN_NODE = Path(__file__).with_name("node")

PROCESSES, TASKS = 4, 8
WAITERS = (12, 1000)
IDLE, SHORT = 6.0, 6.0
"""For how many seconds idle waiters are measured, and the life of their tickets, in seconds."""


@dataclass(frozen=True, slots=True)
class Hot:
    """One side's turn at one hot name."""

    rate: float  # acquisitions per second
    waits: Sequence[float]
    commands: float  # sent by clients, per acquisition and node

    @property
    def worst(self) -> float:
        """The longest wait, in mean waits."""
        return max(self.waits) / mean(self.waits)


class Failed(Exception):
    """A side is not installed, died, or hangs. The message says so in one line."""


class Process:
    """A contender process. Raises Failed if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._in = cast("IO[str]", self._popen.stdin)
        self._out = cast("IO[str]", self._popen.stdout)

    def read_line(self) -> str:
        """Its next line. Raises Failed if none comes."""
        if not select.select([self._out], [], [], HANG)[0]:
            raise Failed(f"a contender printed nothing for {HANG:g} s")
        if not (line := self._out.readline()):
            self._errors.seek(0)
            raise Failed((self._errors.read().strip() or "a contender died").splitlines()[-1])
        return line.strip()

    def go(self, word: str = "") -> None:
        """Send the line that it waits for."""
        self._in.write(f"{word}\n")
        self._in.flush()

    def end(self) -> None:
        self._popen.kill()
        self._popen.communicate()
        self._errors.close()


def command_of(side: str, tasks: int, servers: Sequence[Server]) -> list[str]:
    """What starts a contender. Raises Failed where it is not installed."""
    if side != NODE:
        urls = [server.url for server in servers]
        return [sys.executable, "-m", "benchmarks.contender", side, str(tasks), *urls]
    if shutil.which("node") is None or not (_IN_NODE / "node_modules").is_dir():
        raise Failed("it is not installed: get Node.js and run npm install --prefix benchmarks/node")
    return ["node", str(_IN_NODE / "contender.js"), str(tasks), str(servers[0].path)]


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[Process]]:
    """Contenders that are ready, each in a process of its own."""
    processes: list[Process] = []
    try:
        for command in commands:
            processes.append(Process(command))  # noqa: PERF401 - those that started are ended below
        for process in processes:
            process.read_line()
        yield processes
    finally:
        for process in processes:
            process.end()


def contenders(
    sides: Sequence[str], tasks: int, servers: Sequence[Server]
) -> contextlib.AbstractContextManager[list[Process]]:
    """One of each side, ready."""
    return started([command_of(side, tasks, servers) for side in sides])


def contest(sides: Sequence[str], tasks: int, servers: Sequence[Server], seconds: float) -> list[dict[str, Any]]:
    """They contend for so long: what each saw."""
    return contended([command_of(side, tasks, servers) for side in sides], servers, seconds)


def contended(commands: Sequence[Sequence[str]], servers: Sequence[Server], seconds: float) -> list[dict[str, Any]]:
    """The same of processes started by these commands, on servers without keys."""
    for server in servers:
        with Redis(unix_socket_path=str(server.path)) as cli:
            cli.flushall()
            cli.config_resetstat()
    return seen_by(commands, seconds)


def seen_by(commands: Sequence[Sequence[str]], seconds: float) -> list[dict[str, Any]]:
    """What contenders saw that worked for so long. Raises Failed if one of their tasks never got the lock again: its
    wait is not among those that they measured, so the longest wait would be too short."""
    with started(commands) as processes:
        for process in processes:
            process.go()
        for process in processes:
            process.read_line()
        time.sleep(seconds)
        for process in processes:
            process.go()
        seen = [json.loads(process.read_line()) for process in processes]
    if late := sum(each.get("late", 0) for each in seen):
        raise Failed(f"{late} of the tasks did not get the lock within {LATE:g} s after the end of the turn")
    return seen


def calls(servers: Sequence[Server]) -> dict[str, int]:
    """The counts of the servers since their last reset: commands of clients, messages to clients, and CPU in us."""
    found = {"commands": 0, "messages": 0, "us": 0}
    for server in servers:
        with Redis(unix_socket_path=str(server.path)) as cli:
            stats: Mapping[str, Any] = cli.info("commandstats")
        asked = {name.removeprefix("cmdstat_"): each for name, each in stats.items()}
        # The statistics also count the commands of scripts, but only those of clients are wanted. asynclock sends no
        # SET itself, and the scripts of the other sides run none.
        sent = {"evalsha", "eval", "delifeq", "delex"} | (set() if "mget" in asked else {"set"})
        found["commands"] += sum(each["calls"] for name, each in asked.items() if name in sent)
        found["messages"] += asked.get("publish", {"calls": 0})["calls"]
        found["us"] += int(server.cpu() * 1_000_000)
    return found


# -- P5 --------------------------------------------------------------------------------------------------------------


TENURE = 0.001
"""Seconds of each tenure: so the other process already waits when the lock is released. It is also the pause between
two round trips, so that processes and servers have slept for the same time."""


def hand_over(sides: Sequence[str], servers: Sequence[Server], seconds: float) -> float:
    """Two processes that always want it: median seconds from giving here to having it there, of those that waited."""
    return handed_over(contest([f"{side}@{TENURE}" for side in sides], 1, servers, seconds))


def handed_over(seen: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """The median of what these saw."""
    tenures = sorted(
        (took, took - wait, gave)
        for each in seen
        for took, wait, gave in zip(each["took"], each["waits"], each["gave"], strict=True)
    )
    between = [took - gave for (_, _, gave), (took, asked, _) in pairwise(tenures) if asked < gave]
    return float(median(between))


def round_trip(servers: Sequence[Server]) -> float:
    """Median seconds of one question of the bare protocol to all nodes, without other clients."""
    with contenders([f"trip@{TENURE}"], 1, servers) as (process,):
        process.go()
        return float(json.loads(process.read_line())["rtt"])


def p5(rounds: int, seconds: float) -> tuple[dict[str, list[float]], dict[str, str], list[Verdict]]:
    """Median hand-overs of each round, why sides failed, and the verdicts."""
    bare, one, five, rtt = "bare, 1 node", "asynclock, 1 node", "asynclock, 5 nodes", "bare round trip, 5 nodes"
    with running(5) as servers:
        measures: dict[str, Callable[[], float]] = {
            bare: lambda: hand_over(("relay-a", "relay-b"), servers[:1], seconds),
            one: lambda: hand_over((OURS, OURS), servers[:1], seconds),
            five: lambda: hand_over((OURS, OURS), servers, seconds),
            rtt: lambda: round_trip(servers),
        }
        found, failed = _turns(measures, rounds, lambda side: measures[side]())

    def judge(what: str, bound: float, ours: str, theirs: str) -> Verdict:
        why = failed.get(ours) or failed.get(theirs) or ""
        return _judge(what, bound, False, lambda: _ratios(found[ours], found[theirs]), why)

    return (
        found,
        failed,
        [
            judge("hand-over, 1 node: p50, asynclock / bare", 2, one, bare),
            judge("hand-over, 5 nodes: p50, in bare round trips", 3, five, rtt),
        ],
    )


def _turns(sides: Collection[str], rounds: int, turn: Callable[[str], T]) -> tuple[dict[str, list[T]], dict[str, str]]:
    """The recorded turns of each side, but for those that failed; and why they did."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for side, recorded in in_turn(sides, rounds):
        if side in failed:
            continue
        try:
            took = turn(side)
        except Failed as error:  # go on with the others
            failed[side] = str(error)
            del found[side]
        else:
            if recorded:
                found[side].append(took)
    return found, failed


def _judge(what: str, bound: float, more: bool, ratios: Callable[[], list[float]], why: str) -> Verdict:
    """The verdict; not judged, with the reason, if there is one."""
    if why:
        return Verdict(what, f"{'>=' if more else '<='} {bound:g}", why, None)
    return judge_ratio(what, ratios(), bound, more=more)


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


# -- P6 --------------------------------------------------------------------------------------------------------------


def hot(side: str, servers: Sequence[Server], seconds: float) -> Hot:
    """One turn: 4 processes of 8 tasks, an empty body."""
    seen = contest([side] * PROCESSES, TASKS, servers, seconds)
    asked = calls(servers)["commands"]
    waits = [wait for each in seen for wait in each["waits"]]
    if not waits:
        raise Failed("no process got the lock in the whole turn")
    return Hot(len(waits) / seconds, waits, asked / len(servers) / len(waits))


def p6(nodes: int, rounds: int, seconds: float) -> tuple[dict[str, list[Hot]], dict[str, str], list[Verdict]]:
    """The turns of each side, why sides failed, and the verdicts."""
    with running(nodes) as servers:
        turns, failed = _turns(HOT[nodes], rounds, lambda side: hot(side, servers, seconds))
    return turns, failed, _judge_hot(nodes, turns, failed)


def _judge_hot(nodes: int, turns: Mapping[str, Sequence[Hot]], failed: Mapping[str, str]) -> list[Verdict]:
    """The targets; one that needs a side that failed is not judged."""
    rival = REDIS_PY if nodes == 1 else "pottery"
    where = f"{nodes} node{'s' * (nodes > 1)}:"

    def judge(what: str, bound: float, more: bool, ratios: Callable[[], list[float]], *sides: str) -> Verdict:
        why = next((failed[side] for side in (OURS, *sides) if side in failed), "")
        return _judge(f"{where} {what}", bound, more, ratios, why)

    def rates(side: str) -> list[float]:
        return [turn.rate for turn in turns[side]]

    return [
        judge(f"acquisitions/s, asynclock / {rival}", 5, True, lambda: _ratios(rates(OURS), rates(rival)), rival),
        judge("longest wait / mean wait, worst turn", 20, False, lambda: [max(turn.worst for turn in turns[OURS])]),
        judge("commands per acquisition and node", 3, False, lambda: [turn.commands for turn in turns[OURS]]),
    ]


# -- P7 --------------------------------------------------------------------------------------------------------------


def lined_up(waiters: int, server: Server, lease: float) -> dict[str, float]:
    """`waiters` clients in 4 processes wait. Returns the cost per release until the last was served, and the commands
    that a waiter sends while it waits. Raises Failed."""
    each = round(waiters / PROCESSES)
    with contextlib.ExitStack() as stack:
        cli = stack.enter_context(Redis(unix_socket_path=str(server.path)))
        cli.flushall()
        (holder,) = stack.enter_context(contenders(["hold"], 1, [server]))
        processes = stack.enter_context(contenders([f"line:{lease}"] * PROCESSES, each, [server]))
        for process in processes:
            process.go()
        for process in processes:
            process.read_line()
        until = time.monotonic() + HANG
        while cli.zcard("lock:asynclock~{lock:hot}queue") != each * PROCESSES:
            if time.monotonic() > until:
                raise Failed(f"not all {waiters:,} waiters stood in the queue after {HANG:g} s")
            time.sleep(0.01)
        cli.config_resetstat()
        time.sleep(IDLE)
        idle = calls([server])["commands"]
        cli.config_resetstat()
        before = calls([server])
        holder.go()
        for process in processes:
            process.go()
        for process in processes:
            process.read_line()
        after = calls([server])
    handed = each * PROCESSES  # from the holder to the first, and so on to the last
    cost = {what: (after[what] - before[what]) / handed for what in after}
    return {**cost, "idle": idle / handed / IDLE}


def p7() -> tuple[dict[int, dict[str, float]], list[Verdict]]:
    """The cost of a release with 12 and with 1,000 waiters, and the verdicts: not judged, if a process failed."""
    found: dict[int, dict[str, float]] = {}
    why = ""
    with running(1) as servers:
        try:
            found = {waiters: lined_up(waiters, servers[0], 60.0) for waiters in WAITERS}
            for waiters, its in found.items():
                its["idle"] = lined_up(waiters, servers[0], SHORT)["idle"]
        except Failed as error:
            found, why = {}, str(error)
    few, many = WAITERS

    def per_release(what: str) -> list[float]:
        return [found[many][what] / found[few][what]]

    return found, [
        _judge("1,000 waiters / 12: commands per release", 1.1, False, lambda: per_release("commands"), why),
        _judge("1,000 waiters / 12: messages per release", 1.1, False, lambda: per_release("messages"), why),
        _judge(
            f"1,000 waiters with tickets of {SHORT:g} s: commands per idle waiter, in renewals due",
            1.25,  # a renewal is due after a third of its life, jittered down to four fifths of that
            False,
            lambda: [found[many]["idle"] * SHORT / 3],
            why,
        ),
    ]
