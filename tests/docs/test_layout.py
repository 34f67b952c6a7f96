"""The layout of this test suite."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
MAX_LINES = 600


def test_helpers_are_in_support() -> None:
    """No test module imports another: a helper of two modules is in support/."""
    imports = re.compile(r"^\s*(?:from|import) tests(?:\.| import )(\w+)", re.M)
    found = {path: imports.findall(text) for path, text in FILES.items()}
    assert any(found.values())
    assert {path: names for path, names in found.items() if set(names) - {"support"}} == {}


def test_no_file_is_long() -> None:
    """A reader can read one at once."""
    assert [path for path, text in FILES.items() if text.count("\n") > MAX_LINES] == []
