"""The diagrams of the documentation are drawn from the texts beside them."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from asynclock.protocol.states import NEXT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "diagrams"
TEXTS = sorted(FOLDER.glob("*.txt"))


def test_each_diagram_is_drawn_from_its_text() -> None:
    """A change of a text or of the program is drawn again before it is committed."""
    done = subprocess.run(
        [sys.executable, FOLDER / "draw.py", "--check"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in FOLDER.glob("*.svg")} == {path.stem for path in TEXTS}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_diagram_needs_no_other_file_and_has_its_own_background(path: Path) -> None:
    """GitHub shows it as an image: without scripts, without other files, on a light or a dark page."""
    svg = path.with_suffix(".svg").read_text("utf-8")
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    background = next(each for each in root if each.tag.endswith("rect"))
    assert float(background.attrib["width"]) >= width - 1
    assert float(background.attrib["height"]) >= height - 1
    assert "url(" not in svg
    assert "href" not in svg
    assert "<script" not in svg


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_diagram_is_shown_in_the_docs(path: Path) -> None:
    """Each on a page of docs/."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert any(f"](diagrams/{path.stem}.svg)" in page for page in pages)


def test_the_readme_shows_the_lease_and_the_stale_writer() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in ("lease", "fencing"):
        assert f"][{name}]" in readme
        assert f"/docs/diagrams/{name}.svg\n" in readme


def test_the_picture_of_the_states_is_the_table_that_runs() -> None:
    """Each line of the text is a state, the next one, and the event."""
    drawn = re.findall(r"^(\w+) -> (\w+): (.*)$", (FOLDER / "states.txt").read_text("utf-8"), re.M)
    assert drawn == [(one.__name__, two.__name__, why) for one, follow in NEXT.items() for two, why in follow.items()]
