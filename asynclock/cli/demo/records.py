"""The records of a run of the demo, and the checks on them. Pure: no clock, no process, no terminal.

All times are seconds of CLOCK_BOOTTIME (elsewhere of the monotonic clock), which the processes of one machine share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise


@dataclass(slots=True)
class Hold:
    """One tenure, as its holder reported it."""

    worker: int
    pid: int
    fence: int
    entered: float
    """Read as the first thing in the block."""
    until: float
    """The end of its validity, as last reported: at entry, after each renewal, and at the end."""
    left: float | None = None
    """Read as the last thing in the block, before the release is sent."""
    lost: str = ""
    """LockLost.reason, if its holder got a LockLost."""

    @property
    def open(self) -> bool:
        """Whether its end was not reported yet."""
        return self.left is None and not self.lost

    @property
    def end(self) -> float:
        """When the hold ended. A holder that left its block held until then. A holder that was killed or frozen, or
        lost the lease, held until its validity ended: the fencing token must stop what its process does later."""
        return self.until if self.left is None or self.lost else self.left


@dataclass(frozen=True, slots=True)
class Write:
    """A write that reached the ledger, and the ledger's answer."""

    at: float
    worker: int
    pid: int
    fence: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Stale:
    """A write to two keys, one plain and one fenced, by a holder after it lost its lease."""

    pid: int
    fence: int
    before: int
    """The token of the hold whose value the plain key had before it. 0: none."""
    refused: bool
    """Whether the fenced key refused it."""
    kept: int
    """The token of the hold whose value the fenced key had after it."""


class Blow(Enum):
    """A failure that the demo injects into its own servers and workers, or its end."""

    SERVER_KILLED = "killed"
    SERVER_RESTARTED = "restarted"
    SERVER_FROZEN = "frozen"
    SERVER_THAWED = "thawed"
    HOLDER_KILLED = "killed while it held"
    HOLDER_FROZEN = "frozen while it held"
    HOLDER_WOKEN = "woken"


@dataclass(frozen=True, slots=True)
class Struck:
    """An injected failure. It is recorded only after the operating system has confirmed it."""

    blow: Blow
    at: float
    number: int
    """The number of the server or worker."""
    pid: int
    fence: int = 0
    """The token of the hold that it hit; 0: none."""


@dataclass(slots=True)
class Run:
    """The records of one run."""

    start: float
    holds: list[Hold] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    """The tokens of the writes that were accepted, as the workers received the replies."""
    stale: list[Stale] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    accidents: list[str] = field(default_factory=list)
    """Unexpected failures."""
    total: int = 0
    """The total of the ledger at the end: each tenure read it, added 1, and wrote it back."""

    def accepted(self) -> list[Write]:
        return [write for write in self.writes if write.accepted]

    def refused(self) -> list[Write]:
        return [write for write in self.writes if not write.accepted]

    def first(self, blow: Blow) -> Struck | None:
        return next((struck for struck in self.struck if struck.blow is blow), None)

    def hold_of(self, struck: Struck) -> Hold | None:
        return next((hold for hold in self.holds if (hold.pid, hold.fence) == (struck.pid, struck.fence)), None)

    def later(self, at: float) -> int:
        """The number of accepted writes of holds that began after `at`: the work that went on."""
        fresh = {(hold.pid, hold.fence) for hold in self.holds if hold.entered > at}
        return sum((write.pid, write.fence) in fresh for write in self.accepted())


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    ok: bool
    text: str


def verdict(run: Run) -> tuple[Check, ...]:
    """The checks on the records. The run was good if every check is."""
    return (
        _one_at_a_time(run),
        _fences_rise(run),
        _count_is_right(run),
        _server_struck(run, Blow.SERVER_KILLED, "SIGKILL"),
        _server_struck(run, Blow.SERVER_FROZEN, "SIGSTOP"),
        _holder_killed(run),
        _holder_frozen(run),
        _stale_write(run),
        _no_accidents(run),
    )


def scene(run: Run) -> list[str]:
    """What became of the write of a holder that was frozen beyond its lease, without fencing and with it."""
    stale = _write_of_the_woken(run)
    woken = run.first(Blow.HOLDER_WOKEN)
    if stale is None or woken is None:
        return []
    fenced = f"refused, the key keeps what fence {stale.kept} wrote" if stale.refused else "accepted"
    return [
        f"worker {woken.number} (fence {stale.fence}) slept beyond its lease, and wrote without a look at it:",
        f"  SET         accepted: what fence {stale.before} wrote is gone, older data took its place",
        f"  fenced_set  {fenced}",
    ]


def figures(run: Run) -> str:
    """The run in one line."""
    losses = sum(bool(hold.lost) for hold in run.holds)
    processes = len({hold.pid for hold in run.holds})
    return (
        f"{len(run.holds)} holds by {processes} processes, {len(run.accepted())} writes accepted, "
        f"{len(run.refused())} refused, {losses} {'loss' if losses == 1 else 'losses'} seen by a holder"
    )


def _one_at_a_time(run: Run) -> Check:
    holds = sorted(run.holds, key=lambda hold: hold.entered)
    if len(holds) < 2:
        return Check(False, f"one holder at a time: {len(holds)} holds are too few to judge")
    late = [hold for hold in holds if hold.left is not None and not hold.lost and hold.left > hold.until]
    if late:
        return Check(
            False, f"one holder at a time: the holder of fence {late[0].fence} left its block after its validity ended"
        )
    gaps = []
    last = holds[0]
    for hold in holds[1:]:
        gap = hold.entered - last.end
        if gap < 0:
            return Check(
                False,
                f"one holder at a time: worker {hold.worker} (fence {hold.fence}) entered {-gap * 1000:.1f} ms "
                f"before the hold of worker {last.worker} (fence {last.fence}) was over",
            )
        gaps.append(gap)
        last = max(last, hold, key=lambda each: each.end)
    closest = f"{min(gaps) * 1000:.1f} ms"
    return Check(True, f"one holder at a time: {len(holds)} holds, no two overlap; closest {closest} apart")


def _fences_rise(run: Run) -> Check:
    entered = [hold.fence for hold in sorted(run.holds, key=lambda hold: hold.entered)]
    if any(later <= earlier for earlier, later in pairwise(entered)):
        return Check(False, "fences rise: a hold got a fence that is not greater than that of the hold before it")
    written = [write.fence for write in run.accepted()]
    fallen = [later for earlier, later in pairwise(written) if later <= earlier]
    if fallen:
        return Check(False, f"fences rise: the ledger accepted fence {fallen[0]} after an equal or greater one")
    strangers = {(w.pid, w.fence) for w in run.accepted()} - {(h.pid, h.fence) for h in run.holds}
    if strangers:
        return Check(False, "fences rise: the ledger accepted a fence of no recorded hold")
    return Check(bool(written), f"fences rise: with each hold, and with each of {len(written)} accepted writes")


def _count_is_right(run: Run) -> Check:
    accepted = run.accepted()
    killed = {struck.pid for struck in run.struck if struck.blow is Blow.HOLDER_KILLED}
    confirmed = Counter(run.confirmed)
    unconfirmed = Counter(write.fence for write in accepted) - confirmed
    excused = Counter(write.fence for write in accepted if write.pid in killed)  # it died before the reply came
    invented = confirmed - Counter(write.fence for write in accepted)
    ok = run.total == len(accepted) and not (unconfirmed - excused) and not invented
    dead = f" (and {sum(unconfirmed.values())} more to a worker that was killed)" if unconfirmed else ""
    return Check(
        ok,
        f"the count is right: the ledger says {run.total}, it accepted {len(accepted)} writes, "
        f"and the workers received {len(run.confirmed)} such replies{dead}",
    )


def _server_struck(run: Run, blow: Blow, by: str) -> Check:
    struck = run.first(blow)
    if struck is None:
        return Check(False, f"no server was {blow.value}")
    later = run.later(struck.at)
    return Check(
        later > 0,
        f"server {struck.number} was {blow.value} ({by}) at {struck.at - run.start:.1f} s; "
        f"writes accepted from later holds: {later}",
    )


def _holder_killed(run: Run) -> Check:
    struck = run.first(Blow.HOLDER_KILLED)
    hold = run.hold_of(struck) if struck else None
    if struck is None or hold is None:
        return Check(False, "no holder was killed")
    held = hold.open and hold.entered <= struck.at < hold.until
    entries = [each.entered for each in run.holds if each.entered > struck.at]
    later = run.later(struck.at)
    next_one = "no worker held after it; "
    if entries:
        next_one = f"the next worker held {min(entries) - struck.at:.2f} s later; "
    return Check(
        held and later > 0,
        f"worker {struck.number} was killed (SIGKILL) {'while it held' if held else 'but did not hold'}, "
        f"at {struck.at - run.start:.1f} s; {next_one}writes accepted from later holds: {later}",
    )


def _holder_frozen(run: Run) -> Check:
    frozen, woken = run.first(Blow.HOLDER_FROZEN), run.first(Blow.HOLDER_WOKEN)
    hold = run.hold_of(frozen) if frozen else None
    if frozen is None or woken is None or hold is None:
        return Check(False, "no holder was frozen and woken")
    who = f"worker {frozen.number}, frozen (SIGSTOP) at {frozen.at - run.start:.1f} s,"
    if not (hold.entered <= frozen.at < hold.until) or woken.fence != hold.fence:
        return Check(False, f"{who} did not hold at that time")
    if woken.at <= hold.until:
        return Check(False, f"{who} was woken before its lease had ended")
    if not hold.lost:
        return Check(False, f"{who} was woken and got no LockLost")
    meanwhile = sum(frozen.at < write.at < woken.at and write.fence > hold.fence for write in run.accepted())
    if not meanwhile:
        return Check(False, f"{who} blocked all other workers")
    stale = [write for write in run.writes if write.fence == hold.fence and write.at > woken.at]
    if not stale or any(write.accepted for write in stale):
        return Check(False, f"{who} woke, and its stale write was {'accepted' if stale else 'never tried'}")
    later = run.later(woken.at)
    return Check(
        later > 0,
        f"{who} woke {woken.at - hold.until:.2f} s after the end of its lease and got LockLost ({hold.lost}); "
        f"its stale write was refused; writes accepted from others meanwhile: {meanwhile}, after: {later}",
    )


def _write_of_the_woken(run: Run) -> Stale | None:
    woken = run.first(Blow.HOLDER_WOKEN)
    return next((each for each in run.stale if woken and (each.pid, each.fence) == (woken.pid, woken.fence)), None)


def _stale_write(run: Run) -> Check:
    stale = _write_of_the_woken(run)
    if stale is None:
        return Check(False, "one stale write to two keys: it was never tried")
    if not stale.before:
        return Check(False, "one stale write to two keys: there was no newer value to overwrite")
    if not stale.refused or stale.kept <= stale.fence:
        return Check(False, f"one stale write to two keys: fenced_set let fence {stale.fence} overwrite newer data")
    return Check(True, "one stale write to two keys: SET overwrote newer data, asynclock.fencing refused it")


def _no_accidents(run: Run) -> Check:
    return Check(not run.accidents, "; ".join(run.accidents) or "nothing else failed")
