"""The log lines of events: their levels and attributes, and how a flood of them is counted."""

from __future__ import annotations

import logging
from dataclasses import fields
from logging import DEBUG, INFO, WARNING

import pytest

from asynclock import events
from asynclock._flood import BURST, WINDOW, Flood
from asynclock.events import Event, Lost, NodeDown
from asynclock.runtime.observers import LINES, Journal, write
from tests.support.fake_clock import FakeClock

VALUES = {"name": "order:42", "kind": "mutex", "label": "order:{id}", "node": "redis://a", "reason": "expired"}
VALUES |= {
    "outcome": "failed",
    "error": "no answer",
    "seconds": 2.5,
    "waited": 1.5,
    "held_for": 7.5,
    "had_to_wait": True,
}
LEVELS = {
    WARNING: {"NodeDown", "Lost", "ReleaseFailed", "LoopLagged"},
    INFO: {"NodeUp", "Quarantined", "QuarantineEnded", "Broken"},
    DEBUG: {"Acquired", "TimedOut", "Unavailable", "Released", "Detached", "Renewed"},
}
LOST = Lost("order:42", "mutex", "", "expired", 12.0)


def all_events() -> list[type[Event]]:
    """All classes of events that are told."""
    found = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    return [each for each in found if each not in (Event, events.LockEvent)]


def example(event: type[Event]) -> Event:
    return event(**{field.name: VALUES[field.name] for field in fields(event)})


def test_each_event_has_a_line_and_a_level() -> None:
    """No event is told without a line in the log; its level is that of the documentation."""
    assert set(LINES) == set(all_events())
    for level, names in LEVELS.items():
        assert {event.__name__ for event, line in LINES.items() if line.level == level} == names


@pytest.mark.parametrize("event", all_events(), ids=lambda event: event.__name__)
def test_a_record_has_the_values_of_its_event(event: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    """As attributes with a prefix, which no attribute of a LogRecord has; and its text can be formatted."""
    caplog.set_level(DEBUG, "asynclock")
    write(example(event), LINES[event].level, "why")
    (record,) = caplog.records
    assert record.name == "asynclock"
    assert record.levelno == LINES[event].level
    assert record.getMessage().startswith("asynclock: ") or event is Lost
    own = {key: value for key, value in vars(record).items() if key.startswith("asynclock_")}
    assert own.pop("asynclock_event") == event.__name__
    names = {"name": "lock", "waited": "seconds", "held_for": "seconds"}
    assert own == {f"asynclock_{names.get(f.name, f.name)}": VALUES[f.name] for f in fields(event)}


def test_a_long_name_is_cut_in_the_text_only(caplog: pytest.LogCaptureFixture) -> None:
    """The attribute has the whole name."""
    write(events.Broken("n" * 500), WARNING)
    (record,) = caplog.records
    assert len(record.getMessage()) < 200
    assert vars(record)["asynclock_lock"] == "n" * 500


@pytest.mark.parametrize(
    ("lines", "printed", "counted"),
    [(1, 1, []), (BURST, BURST, []), (BURST + 1, BURST, [1]), (10_000, BURST, [10_000 - BURST])],
)
def test_a_flood_is_counted(lines: int, printed: int, counted: list[int]) -> None:
    """The first lines are printed at once, the others are one count at the end of the window."""
    clock, reported = FakeClock(), []
    flood = Flood(clock, lambda kind, count: reported.append((kind, count)))
    assert sum(flood.admits("lost") for _ in range(lines)) == printed
    assert reported == []
    clock.advance(WINDOW)
    assert reported == [("lost", count) for count in counted]
    assert clock.armed == 0
    assert flood.admits("lost")  # a new window


def test_a_flood_that_goes_on_is_counted_once_a_window() -> None:
    """Each window prints some lines and one count: all lines are accounted for."""
    clock, reported = FakeClock(), []
    flood = Flood(clock, lambda kind, count: reported.append(count))
    printed = 0
    for _ in range(300):
        printed += flood.admits("lost")
        clock.advance(0.1)
    clock.advance(WINDOW)
    assert printed + sum(reported) == 300
    assert len(reported) == 3


def test_kinds_of_lines_do_not_count_together() -> None:
    """A flood of one kind hides no line of another."""
    flood = Flood(FakeClock(), print)
    for _ in range(BURST):
        assert flood.admits("lost")
    assert not flood.admits("lost")
    assert flood.admits("node down")


def test_ten_thousand_losses_are_some_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    """The last line says how many there were beside those that were printed."""
    clock = FakeClock()
    journal = Journal(clock)
    for _ in range(10_000):
        journal.write(LOST)
    clock.advance(WINDOW)
    assert len(caplog.records) == BURST + 1
    assert caplog.records[-1].getMessage() == "asynclock: and 9,990 more lost leases"
    assert vars(caplog.records[-1])["asynclock_more"] == 9_990
    assert caplog.records[-1].levelno == WARNING


def test_a_session_that_closes_prints_its_counts(caplog: pytest.LogCaptureFixture) -> None:
    """It does not wait for the end of the window, and leaves no timer."""
    clock = FakeClock()
    journal = Journal(clock)
    for _ in range(BURST + 5):
        journal.write(NodeDown("redis://a", "refused"))
    journal.stop()
    assert caplog.records[-1].getMessage() == "asynclock: and 5 more times that a node went down"
    assert clock.armed == 0


def test_lines_below_the_level_of_the_logger_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A logger that prints errors only gets no count of warnings either."""
    caplog.set_level(logging.ERROR, "asynclock")
    clock = FakeClock()
    journal = Journal(clock)
    for _ in range(BURST + 5):
        journal.write(LOST)
    assert clock.armed == 0
    journal.stop()
    assert caplog.records == []
