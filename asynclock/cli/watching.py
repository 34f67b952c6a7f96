"""What `asynclock top` sees at one moment, and what happened between two moments. Pure, but for `look`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from asynclock._errors import LockError
from asynclock.cli.output import count, is_mark, length, table, who, why

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asynclock.client import Redlock
    from asynclock.info import Health, Holder, LockInfo

Hold: TypeAlias = tuple[str, str, int, float]
"""What tells a hold from others: its name, host and pid, and since when it is held."""

_AT_ONCE = 50  # names that are inspected at the same time
_UNRENEWED = 0.5  # a hold with less of its longest rest was not renewed


@dataclass(frozen=True, slots=True)
class Moment:
    """The locks at one moment."""

    began: float
    """Unix time before the servers were asked."""
    at: float
    """Unix time after they have answered."""
    health: Health
    """Which servers answer: not whether they vote, which a look that changes nothing does not find out."""
    locks: tuple[LockInfo, ...]
    """Those that are held, the most contended first."""
    more: bool = False
    """Whether there are more than were asked for."""
    error: str = ""
    """Why locks are missing; "" if none is."""

    @property
    def holders(self) -> list[Holder]:
        """All holds."""
        return [holder for lock in self.locks for holder in lock.holders]

    @property
    def waiters(self) -> int:
        """The number of tasks that wait."""
        return sum(map(waiting, self.locks))


def waiting(lock: LockInfo) -> int:
    """The number of tasks that wait for a name."""
    return sum(waiter.tasks for waiter in lock.waiters)


async def look(redlock: Redlock, begin: str, most: int) -> Moment:
    """Ask the servers; at most for so many names."""
    began, health = time.time(), await redlock._answers()
    names: dict[str, None] = {}
    locks: list[LockInfo] = []
    errors: list[str] = []
    try:
        async for holder in redlock.holders(begin):
            if is_mark(holder):  # thousands of these must not use up the `most` names
                continue
            names[holder.name] = None
            if len(names) > most:
                break
    except LockError as error:  # one master of a cluster is down: the names of the others are shown
        errors.append(str(error))
    for some in _batches(list(names)[:most]):
        try:
            locks += await asyncio.gather(*map(redlock.inspect, some))
        except LockError as error:
            errors.append(str(error))
            break
    held = sorted((lock for lock in map(without_marks, locks) if lock.holders), key=contention)
    return Moment(began, time.time(), health, tuple(held), len(names) > most, next(iter(errors), ""))


def without_marks(lock: LockInfo) -> LockInfo:
    """The lock with the holders that can hold it. Pure."""
    return replace(lock, holders=tuple(holder for holder in lock.holders if not is_mark(holder)))


def contention(lock: LockInfo) -> tuple[int, float, str]:
    """The order of the rows: many waiters first, then the oldest hold."""
    return -waiting(lock), min(holder.since for holder in lock.holders), lock.name


def longest(known: Mapping[Hold, float], moment: Moment) -> dict[Hold, float]:
    """The longest rest of each hold that is there at this moment, in all looks so far. Pure."""
    return {
        _identity(each): max(known.get(_identity(each), 0.0), each.remaining)
        for each in moment.holders
        if each.remaining is not None
    }


def lost(before: Moment, after: Moment, rests: Mapping[Hold, float]) -> list[Holder]:
    """The holds that expired between the two moments. A holder renews its hold when two thirds of the lease are left.
    So a hold that had less than half of the longest of its `rests` was not renewed: its holder died, hangs, or does not
    reach the servers. One that had more was released, if the looks are far apart. Holds of other programs do not count,
    because such a program may not renew its holds. The rest of a lease was read at some time after the look began. If
    there are more names than were asked for, one that is missing may still be held."""
    if after.error or after.more:
        return []
    known = {_identity(each) for each in after.holders}
    return [
        each
        for each in before.holders
        if each.host
        and each.remaining is not None
        and each.remaining < _UNRENEWED * rests.get(_identity(each), 0.0)
        and before.began + each.remaining <= after.at
        and _identity(each) not in known
    ]


def rows(moment: Moment) -> list[tuple[str, ...]]:
    """A row for each hold: its name, holder, age and rest, the waiters of the name, and how long the first waits."""
    found: list[tuple[str, ...]] = []
    for lock in moment.locks:
        for number, holder in enumerate(lock.holders):
            since = min((waiter.since for waiter in lock.waiters if waiter.since), default=None)
            found.append(
                (
                    lock.name,
                    lock.kind,
                    who(holder.host, holder.pid),
                    length(max(0.0, moment.at - holder.since)) if holder.since else "?",
                    "for ever" if holder.remaining is None else length(holder.remaining),
                    str(waiting(lock)) if not number else "",
                    length(max(0.0, moment.at - since)) if since and not number else "",
                )
            )
    return found


def summary(moment: Moment, losses: int) -> str:
    """The line above the rows."""
    up = sum(node.ok for node in moment.health.nodes)
    state = "ok" if moment.health.ok else "NOT OK"
    more = " (and more)" if moment.more else " known" if moment.error else ""
    return (
        f"{state}: {up} of {count(len(moment.health.nodes), 'server')}; {count(len(moment.holders), 'hold')}{more}, "
        f"{count(moment.waiters, 'waiter')}, {losses} lost"
    )


def screen(moment: Moment, losses: int, most: int | None = None) -> str:
    """All that is shown; at most so many rows."""
    lines = [summary(moment, losses)]
    lines += [f"{node.node}: {why(node)}" for node in moment.health.nodes if not node.ok]
    if moment.error:
        lines.append(moment.error)
    if moment.error and not moment.locks:
        return "\n".join(lines)
    head = ("NAME", "KIND", "HOLDER", "AGE", "LEFT", "WAITERS", "LONGEST WAIT")
    return "\n".join([*lines, "", table(head, rows(moment)[:most])])


def _identity(holder: Holder) -> Hold:
    return holder.name, holder.host, holder.pid, holder.since


def _batches(names: list[str]) -> Iterable[list[str]]:
    return (names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE))
