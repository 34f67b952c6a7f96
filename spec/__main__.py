"""Explore scenes of the models, and of the shipped client.

    python -m spec                              all of them
    python -m spec quorum machine:closes        those of one model, and one scene

It prints the number of states of each scene, and a flaw with the way there. The exit code is 1 if a scene has a flaw.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import TYPE_CHECKING

from simulation.cli import in_order
from spec import batches, machine, one_node, quorum, restart, several, span, split
from spec.explorer import explore

if TYPE_CHECKING:
    from types import ModuleType

    from spec.explorer import Report

MODULES: tuple[ModuleType, ...] = (one_node, quorum, split, restart, span, several, batches, machine)


def large(module: ModuleType) -> dict[str, object]:
    """Its scenes that take many seconds, by name: the tests do not explore them."""
    return getattr(module, "LARGE", {})


def places() -> list[str]:
    """MODEL:SCENE of all scenes; the large ones come last."""
    names = {each: each.__name__.removeprefix("spec.") for each in MODULES}
    small = [f"{names[each]}:{scene}" for each in MODULES for scene in each.SCENES]
    return small + [f"{names[each]}:{scene}" for each in MODULES for scene in large(each)]


def report_of(place: str) -> Report:
    """What is found in one scene."""
    name, _, scene = place.partition(":")
    module = next(each for each in MODULES if each.__name__ == f"spec.{name}")
    gc.disable()  # a walk keeps a million tuples and makes no cycles
    try:
        return explore(module.scene(scene), cycles=getattr(module, "CYCLES", False))
    finally:
        gc.enable()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spec", description=__doc__)
    parser.add_argument("scenes", nargs="*", help="MODEL or MODEL:SCENE; default is all")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes; 0: one for each core")
    parser.add_argument("--within", type=float, help="begin no more scenes after so many seconds")
    given = parser.parse_args(arguments)
    known = places()
    for each in given.scenes:
        if not any(place == each or place.startswith(f"{each}:") for place in known):
            parser.error(f"{each!r} is none of {', '.join(known)}")
    chosen = [place for place in known if not given.scenes or {place, place.partition(":")[0]} & set(given.scenes)]
    began, flaws, found = time.monotonic(), 0, in_order(report_of, chosen, given.jobs)
    for number, (place, report) in enumerate(zip(chosen, found, strict=False), 1):
        flaws += report.flaw is not None
        print(f"{place}: {report.states:,} states, {report.flaw or 'no flaw found'}", flush=True)
        if given.within is not None and time.monotonic() - began > given.within:
            print(f"{len(chosen) - number} scenes are left")
            break
    return min(flaws, 1)


if __name__ == "__main__":
    sys.exit(main())
