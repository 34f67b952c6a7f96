"""Prints the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

    python tests/support/lowest.py embedded cli examples > constraints.txt

The arguments are extras. Only the package's own dependencies are constrained; theirs are as new as they can be."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)[^;]*(;.*)?")


def lowest(requirements: Iterable[str]) -> list[str]:
    """Each requirement with `==` in the place of `>=`, without its extras. Raises ValueError if one has no `>=`."""
    found = []
    for requirement in requirements:
        if (match := _REQUIREMENT.fullmatch(requirement.strip())) is None:
            raise ValueError(f"{requirement!r} does not say which version is the lowest: write name>=version")
        name, version, marker = match.groups()
        found.append(f"{name}=={version}{marker or ''}")
    return found


def of_project(extras: Iterable[str]) -> list[str]:
    """The lowest versions for the package with these extras."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return lowest(each for each in wanted if not each.startswith("asynclock["))


if __name__ == "__main__":
    print("\n".join(of_project(sys.argv[1:])))
