"""docs/events.md names each event with its fields, and each log line of WARNING or above with what to do."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from logging import WARNING
from pathlib import Path

import asynclock
from asynclock import events
from asynclock.events import Event, LockEvent
from asynclock.runtime.observers import LINES

PACKAGE = Path(asynclock.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "events.md").read_text("utf-8")
LOUD = ("warning", "error", "exception", "critical")


def written() -> set[str]:
    """The text of each line of WARNING or above that the package writes, as it stands in the source."""
    found = {line.text for line in LINES.values() if line.level >= WARNING}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_log(node.func.value):
                if node.func.attr in LOUD:
                    found.add(_text(node.args[0]))
                elif node.func.attr == "log" and isinstance(node.args[1], ast.Constant):
                    found.add(_text(node.args[1]))
    return {text.removeprefix("asynclock: ") for text in found}


def _is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("log", "logger", "logging")


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def pattern(text: str) -> re.Pattern[str]:
    """What a heading may be: a word in capitals for each value."""
    parts = re.split(r"%(?:\(\w+\))?[.\d]*[sdgfr]", text)
    return re.compile(".+".join(map(re.escape, parts)))


def runbook() -> list[str]:
    return re.findall(r"^### (.*)$", PAGE.partition("## Runbook")[2], re.MULTILINE)


def test_each_warning_has_a_paragraph() -> None:
    """What it means and what to do; and each paragraph is about a line that the package writes."""
    texts, headings = written(), runbook()
    assert len(texts) > 8
    assert len(headings) == len(set(headings))
    assert [text for text in texts if not any(pattern(text).fullmatch(heading) for heading in headings)] == []
    assert [heading for heading in headings if not any(pattern(text).fullmatch(heading) for text in texts)] == []
    for heading in headings:
        paragraph = PAGE.partition(f"### {heading}\n\n")[2].partition("\n\n")[0]
        assert len(paragraph.split()) > 8, heading


def test_the_page_names_each_event_and_its_fields() -> None:
    """One row of the table for each class, with the fields in their order."""
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", PAGE, re.MULTILINE))
    told = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    expected = {each.__name__: ", ".join(f.name for f in fields(each)) for each in told}
    del expected[Event.__name__], expected[LockEvent.__name__]
    assert rows == expected


def test_the_page_names_each_attribute_of_a_record() -> None:
    """With its prefix."""
    named = set(re.findall(r"`(asynclock_\w+)`", PAGE))
    renamed = {"name": "lock", "waited": "seconds", "held_for": "seconds"}
    used = {renamed.get(f.name, f.name) for event in LINES for f in fields(event)}
    assert named == {f"asynclock_{each}" for each in (*used, "event", "more")}
