"""`python -m simulation`: an hour for each seed."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.plan import RUNS, plan_of
from simulation.world import Outcome, simulate


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulation")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--base", type=int, default=None)
    given = parser.parse_args()
    base = given.base if given.base is not None else int(time.time())
    tot = [0, 0, 0.0, 0.0]
    bad = 0
    for seed in range(base, base + given.seeds):
        for run in range(RUNS):
            o = simulate(plan_of(seed, run))
            tot[0] += o.calls; tot[1] += o.faults; tot[2] += o.seconds; tot[3] += o.cpu
            if o.flaw:
                bad += 1
                print(seed, run, o.flaw, flush=True)
    print(tot, bad)
