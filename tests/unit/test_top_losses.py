"""Which holds `asynclock top` counts as lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asynclock import Holder, LockInfo
from asynclock.cli.output import length, printable, table
from asynclock.cli.watching import Moment, contention, longest, lost, without_marks


def holder(**fields: Any) -> Holder:
    known: dict[str, Any] = {"name": "x", "host": "a", "pid": 1, "since": 50.0, "remaining": 10.0, "metadata": ""}
    return Holder(**(known | fields))


def moment(at: float, *holders: Holder, error: str = "", took: float = 0.0, more: bool = False) -> Moment:
    health: Any = None  # not read
    locks = tuple(LockInfo(each.name, "mutex", 1, (each,), (), None, {}) for each in holders)
    return Moment(at - took, at, health, locks, more, error)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (moment(100.0, holder(remaining=0.5)), moment(101.0), 1),
        (moment(100.0, holder(remaining=20.0)), moment(101.0), 0),  # it was released
        (moment(100.0, holder(remaining=1.5), took=0.9), moment(101.0), 1),  # read at the begin of a slow look
        (moment(100.0, holder(remaining=0.5)), moment(101.0, holder(remaining=30.0)), 0),  # it was renewed
        (moment(100.0, holder(remaining=0.5)), moment(101.0, holder(pid=2)), 1),  # another one has it now
        (moment(100.0, holder(remaining=0.5, host="")), moment(101.0), 0),  # another program does not renew
        (moment(100.0, holder(remaining=None)), moment(200.0), 0),  # a key without expiry was deleted
        (moment(100.0, holder(remaining=0.5)), moment(101.0, error="no quorum"), 0),  # nobody knows
        (moment(100.0, holder(remaining=20.0)), moment(130.0), 0),  # the looks are far apart: it was released
        (moment(100.0, holder(remaining=14.0)), moment(130.0), 1),  # it was not renewed
        (moment(100.0, holder(remaining=0.5)), moment(101.0, more=True), 0),  # it may be one of those left out
    ],
)
def test_losses(before: Moment, after: Moment, expected: int) -> None:
    """Only a hold that ended by time was lost. Each had 30 s before."""
    rests = longest({}, moment(90.0, holder(remaining=30.0), holder(host="", remaining=30.0)))
    assert len(lost(before, after, longest(rests, before))) == expected


def test_the_longest_rest_of_a_hold() -> None:
    """In all looks; a hold that is gone is forgotten, and one without an end has none."""
    rests = longest({}, moment(1.0, holder(remaining=30.0), holder(name="y", remaining=9.0), holder(name="z")))
    rests = longest(rests, moment(2.0, holder(remaining=29.0), holder(name="y", remaining=10.0)))
    assert [(hold[0], rest) for hold, rest in rests.items()] == [("x", 30.0), ("y", 10.0)]
    assert longest(rests, moment(3.0, holder(remaining=None))) == {}


def test_marks_are_no_holds() -> None:
    """Nobody holds a name that stays taken after min_hold, or after a run of `once`."""
    held, mark = holder(), holder(host="", metadata="(done)")
    (lock,) = moment(0.0, held).locks
    assert without_marks(replace(lock, holders=(mark, held))).holders == (held,)


def test_the_most_contended_comes_first() -> None:
    """Then the oldest."""
    (young,) = moment(0.0, holder(since=9.0)).locks
    (old,) = moment(0.0, holder(since=1.0)).locks
    assert sorted([young, old], key=contention) == [old, young]


def test_times() -> None:
    """Short enough for a column."""
    known = (0.00021, 0.0456, 0.25, 1.5, 41.0, 185.0, 7800.0, 270000.0)
    assert [length(each) for each in known] == ["0.21ms", "46ms", "250ms", "1.5s", "41s", "3m05s", "2h10m", "3d03h"]


def test_tables() -> None:
    """Aligned, not cut, and harmless."""
    assert table(("A", "B"), [("long name", "x"), ("\x1b[2J", "y")]) == "A          B\nlong name  x\n\\x1b[2J    y"
    assert printable("größe 1") == "größe 1"
