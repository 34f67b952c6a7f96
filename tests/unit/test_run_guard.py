"""When `asynclock run` ends its command, and what exit codes mean: the pure part."""

from __future__ import annotations

import pytest

from asynclock.cli.guard import OnLost, cannot_run, due_in, exit_code, grace, look_again
from asynclock.cli.options import duration

TERM, KILL, IGNORE = OnLost


@pytest.mark.parametrize(
    ("policy", "remaining", "expected"),
    [
        (TERM, 30.0, 20.0),
        (TERM, 12.0, 2.0),
        (TERM, 10.0, 0.0),
        (TERM, 0.0, 0.0),
        (KILL, 30.0, 27.0),
        (KILL, 3.0, 0.0),
        (IGNORE, 0.0, None),
    ],
)
def test_when_it_must_end(policy: OnLost, remaining: float, expected: float | None) -> None:
    """Of a lease of 30 s: SIGTERM with a third left, --on-lost kill with a tenth."""
    assert due_in(policy, 30.0, remaining) == pytest.approx(expected)


@pytest.mark.parametrize("remaining", [10.0, 6.0, 3.0, 1.0, 0.1])
def test_sigkill_comes_before_the_end(remaining: float) -> None:
    """However little is left at SIGTERM."""
    assert 0 < grace(TERM, 30.0, remaining) < remaining


def test_the_time_to_end() -> None:
    """Usually until a tenth of the lease is left; a tenth where the lease is over already; none with kill."""
    assert grace(TERM, 30.0, 10.0) == pytest.approx(7.0)
    assert grace(TERM, 30.0, 0.0) == pytest.approx(3.0)
    assert grace(KILL, 30.0, 3.0) == 0.0


def test_looks_are_not_far_apart() -> None:
    """A timer does not count the time for which the machine sleeps."""
    assert look_again(30.0, 20.0) == look_again(30.0, None) == 2.5
    assert look_again(30.0, 1.0) == 1.0


def test_exit_codes() -> None:
    """As shells give them."""
    assert [exit_code(code) for code in (0, 7, -9, -15)] == [0, 7, 137, 143]
    assert [cannot_run(error) for error in (FileNotFoundError(), PermissionError(), OSError())] == [127, 126, 126]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1h", 3600.0), ("1d", 86400.0), ("1.5h", 5400.0), ("250ms", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    """With or without a unit."""
    assert duration(text) == seconds
