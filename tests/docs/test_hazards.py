"""docs/hazards.md and the names of the tests say the same: each id has a row, and each row names the tests it has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/hazards.md").read_text(), re.M)


def files_by_id() -> dict[str, set[str]]:
    """Id -> the test files in which a test carries it in its name, as `test_c13_...` or `test_e6_e17_...`."""
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for ids in re.findall(r"^(?:async )?def test_((?:[a-f]\d+_)+)", path.read_text("utf-8"), re.M):
            for each in ids.strip("_").split("_"):
                found[each.upper()].add(path.relative_to(ROOT).as_posix())
    return found


def test_every_id_in_a_test_name_has_a_row() -> None:
    """And only one."""
    rows = Counter(row[0] for row in ROWS)
    assert set(files_by_id()) - set(rows) == set()
    assert {each for each, count in rows.items() if count > 1} == set()


def test_every_row_names_its_tests() -> None:
    """All the files with such tests; a row without any is marked."""
    names = files_by_id()
    for hazard, _, _, where in ROWS:
        claimed = set(re.findall(r"\]\(\.\./([^)]+)\)", where))
        assert claimed == names.get(hazard, set()), hazard
        assert claimed or where == "*not yet*", hazard


def test_rows_are_read() -> None:
    """A page that is written differently would pass everything."""
    assert len(ROWS) == (ROOT / "docs/hazards.md").read_text().count("\n| ") - 6  # one heading in each of six tables
    assert len(ROWS) > 70
