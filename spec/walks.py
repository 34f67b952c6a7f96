"""Walks drawn at random through worlds of `machine.py` that are too large to explore: three nodes, two faults at once,
servers that restart empty, and callers that acquire more than once.

A walk is drawn from a seed, and a seed repeats it exactly. Each walk also draws how fast each actor is, and how soon
things go wrong: one client may be slow for the whole walk, or one connection.
"""

from __future__ import annotations

import argparse
import sys
from random import Random
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._options import LockSettings
from asynclock.locks.multi import Multi
from asynclock.rules.model import Part
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from spec.explorer import Flaw
from spec.machine import BOTH, FIRES, LEASE, Scene, Want, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asynclock.rules.model import Kind

ENDS = (30, 80, 4_000, 4_000, 4_000)
"""After so many steps the order is drawn no longer: nothing goes wrong any more, and all callers must be served. Most
walks end earlier."""


def _each(letters: str, kind: Kind = MUTEX, **settings: Any) -> tuple[Want, ...]:
    """Each of these clients has one caller, which acquires twice."""
    return tuple(Want(letter, kind, times=2, settings=LockSettings(lease=LEASE, **settings)) for letter in letters)


IN_ORDER = Multi([Part("x", FAIR), Part("y", FAIR)])
SECOND = Multi([Part("y", FAIR)])
OF_KINDS = Multi([Part("x", READ), Part("y", FAIR)])

CALLERS = {
    "mutex": _each("abc"),
    "local": _each("aab"),
    "timeouts": (Want("a", times=2), Want("b", timeout=12.0, times=2), Want("c", timeout=0, times=2)),
    "fair": _each("abc", FAIR),
    "read-write": (*_each("ac", READ), *_each("b", WRITE), Want("a", WRITE)),
    "semaphore": _each("aabc", Semaphore(2)),
    "multi": (*_each("ab", BOTH), Want("c", times=2)),
    "multi in order": (*_each("abcd", IN_ORDER), Want("e", FAIR, times=2), Want("f", SECOND, times=2)),
    "multi of kinds": (*_each("abcd", OF_KINDS), Want("e", WRITE, times=2), Want("f", SECOND, times=2)),
    "reentrant": (Want("a", entries=3, times=2), Want("b", entries=2, times=2), Want("c")),
    "handover": (Want("a", ends="detaches"), Want("b", adopts=True), Want("c", times=2)),
    "once": tuple(Want(letter, done_for=5.0, times=2) for letter in "abc"),
    "plain": _each("abc", fencing=False),
    "min_hold": _each("abc", min_hold=4.0),
    "max_hold": _each("abc", max_hold=8.0),
}
"""Three callers or more, by the name of the scene."""

FAULTS: dict[str, dict[str, int]] = {
    "calm": {},
    "gives up": {"gives_up": 2},
    "cut": {"cuts": 2, "gives_up": 1},
    "late": {"overdue": 2, "cuts": 1, "gives_up": 1},
    "closes": {"closes": 1, "cuts": 1, "gives_up": 1},
    "restart": {"restarts": 1, "cuts": 1},
    "forgets": {"forgets": 3, "cuts": 1, "gives_up": 1},
}
"""How often something goes wrong, at most."""

TIMERS = {1: 40, 3: 80}
"""By the number of nodes: how many timers may fire. Most walks end before."""


def scenes() -> Iterator[tuple[str, Scene]]:
    """All of them, by name."""
    for nodes, timers in TIMERS.items():
        for name, wants in CALLERS.items():
            for fault, most in FAULTS.items():
                if fault != "restart" or nodes > 1:  # docs/safety.md assumes that the only server forgets nothing
                    yield f"{name}, {fault}, {nodes}", Scene(wants, nodes, timers=timers, hasty=True, **most)


class Walk(NamedTuple):
    """What a walk found."""

    steps: int
    flaw: Flaw | None


def walk(scene: Scene, seed: int) -> Walk:
    """One walk, until nothing more must happen, or for some steps. Then the world goes on in an order that is fair."""
    world = World(scene, random=Random(seed).random)  # noqa: S311 - no secret
    pace = _Pace(Random(f"pace {seed}"))  # noqa: S311 - no secret
    longest = Random(f"end {seed}").choice(ENDS)  # noqa: S311 - no secret
    trace: list[tuple[str, str]] = []
    while len(trace) < longest and (step := pace.choose(list(world.choices()))) is not None:
        trace.append(step)
        world.do(*step)
        if (what := world.wrong()) is not None:
            return Walk(len(trace), Flaw(what, tuple(trace)))
    flaw = world.end_fairly(trace)
    return Walk(len(trace), None if flaw is None else Flaw(flaw, tuple(trace)))


class _Pace:
    """Which step comes next."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._weights: dict[tuple[str, str], float] = {}
        self._whims = random.choice((0.002, 0.02, 0.1))
        self._timers = random.choice((1e-9, 1e-9, 0.01, 0.1))  # the least: only when nothing else can happen

    def choose(self, choices: list[tuple[str, str, bool]]) -> tuple[str, str] | None:
        """None: nothing more must happen."""
        must = [(who, what) for who, what, whim in choices if not whim]
        whims = [(who, what) for who, what, whim in choices if whim]
        if not must:
            return None
        if whims and self._random.random() < self._whims:
            return self._random.choice(whims)
        return self._random.choices(must, [self._weight(each) for each in must])[0]

    def _weight(self, step: tuple[str, str]) -> float:
        if step not in self._weights:
            self._weights[step] = self._random.choice((0.05, 1.0, 1.0, 4.0))
            if step[1] == FIRES:
                self._weights[step] *= self._timers
        return self._weights[step]


def main() -> None:
    """Walk, and print what was found. The exit code is 1 if a scene has a flaw."""
    parser = argparse.ArgumentParser(prog="python -m spec.walks", description=__doc__)
    parser.add_argument("--walks", type=int, default=100, help="through each scene")
    parser.add_argument("--base", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--scene", default="", help="how the names of the scenes begin, such as 'fair' or 'fair, cut, 3'"
    )
    given = parser.parse_args()
    steps = walked = flaws = 0
    for name, scene in scenes():
        for seed in range(given.base, given.base + given.walks) if name.startswith(given.scene) else ():
            done = walk(scene, seed)
            steps, walked = steps + done.steps, walked + 1
            if done.flaw is not None:
                flaws += 1
                print(f"{name}, seed {seed}:\n{done.flaw}", flush=True)
                break
    print(f"{walked} walks, {steps} steps, {process_time():.0f} s of CPU: {flaws or 'no'} scenes with a flaw")
    sys.exit(min(flaws, 1))


if __name__ == "__main__":
    main()
