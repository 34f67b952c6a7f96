"""docs/architecture.md is true: what its table names is there, and no modules of the package name each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
TABLE = [line for line in PAGE.partition("## Where do I find")[2].splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_row_names_what_is_there(row: str) -> None:
    """Each file that it names exists; each "`name` in [file]" is defined in that file."""
    links = re.findall(r"\]\(([^)]+)\)", row)
    assert links or row.startswith("|---")
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    named = re.findall(r"`(\w+)` in \[[^\]]+\]\(([^)]+)\)", row)
    for name, link in named:
        text = (ROOT / "docs" / link).read_text("utf-8")
        assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b|^{name}(?::| =)", text, re.M), (name, link)


def test_the_flow_names_what_is_there() -> None:
    """Each file beside a step of the acquire."""
    files = re.findall(r" ([a-z_/]+\.py) ", PAGE.partition("```")[2].partition("```")[0])
    assert len(files) > 9
    assert [file for file in files if not list((ROOT / "asynclock").glob(f"**/{file}"))] == []


def modules() -> dict[str, Path]:
    """Name -> file, of each module of the package."""
    found: dict[str, Path] = {}
    for path in (ROOT / "asynclock").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that one imports: anywhere in it, for its types and inside functions, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: import by the full name"
            module = node.module or ""
            found.update(f"{module}.{each.name}" if f"{module}.{each.name}" in known else module for each in node.names)
    return found & known.keys() - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle; none: there is no circle."""
    left = {name: set(found) for name, found in graph.items()}
    while free := [name for name, found in left.items() if not found]:
        for name in free:
            del left[name]
        for found in left.values():
            found.difference_update(free)
    if not left:
        return []
    way = [min(left)]
    while (after := min(left[way[-1]])) not in way:
        way.append(after)
    return way[way.index(after) :]


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert circle({"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": {"c"}}) == []


def test_no_modules_name_each_other() -> None:
    """So each can be read after those that it names. Imports for types and inside functions count."""
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    assert sum(map(len, graph.values())) > 500
    assert circle(graph) == []
