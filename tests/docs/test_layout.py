"""Where the parts of this suite stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 400


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_helpers_stand_in_support(path: Path) -> None:
    """A test module imports no other: what two of them use is a helper. And no file is long."""
    text = path.read_text("utf-8")
    imported = set(re.findall(r"^\s*(?:from|import) tests(?:\.| import )(\w+)", text, re.M))
    assert imported <= {"support"}
    assert text.count("\n") <= MAX_LINES
