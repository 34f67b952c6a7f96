"""The hard plans of the simulation, and its check that nobody starves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from asynclock.rules.model import CLOCK_SKEW, LAST
from asynclock.rules.rwlock import READ
from simulation import cli
from simulation.ablations import without
from simulation.directed import LOADS
from simulation.plan import HARD_RUNS, Fault, Job, plan_of
from simulation.world import simulate

if TYPE_CHECKING:
    from simulation.plan import Plan

PLANS = [plan_of(seed, run) for seed in range(80) for run in HARD_RUNS]


def test_no_violation() -> None:
    """In the hard runs of a few seeds."""
    assert [cli.hour_of(seed, HARD_RUNS).flaw for seed in range(1, 6)] == [None] * 5


def _names_of(plan: Plan) -> dict[str, set[object]]:
    found = dict[str, set[object]]()
    for lock in plan.locks:
        if not lock.kind.parts:
            found.setdefault(lock.name, set()).add((lock.kind, lock.settings, lock.once))
    return found


def _wide(plan: Plan) -> bool:
    return any(len(lock.kind.parts) > 2 for lock in plan.locks)


def _far(plan: Plan) -> bool:
    return any(abs(each.wall_offset) > CLOCK_SKEW for each in plan.clients)


def _partly_deaf(plan: Plan) -> bool:
    """A client gets the notices of some nodes."""
    deaf = [len([node for each, node in plan.deaf if each == client]) for client in range(len(plan.clients))]
    return any(0 < each < len(plan.nodes) for each in deaf)


def _killed_with_many(plan: Plan) -> bool:
    """A client is killed soon after dozens of its tasks asked for one name."""
    killed = [(each.at, each.client) for each in plan.faults if each.what == "kill"]
    return any(_waiting(plan.jobs, client, at) > 4 * LAST for at, client in killed)


def _waiting(jobs: tuple[Job, ...], client: int, at: float) -> int:
    return len([job for job in jobs if job.client == client and at - 4.0 < job.at < at])


@pytest.mark.parametrize(
    "has",
    [
        lambda plan: len(plan.nodes) in (2, 4),
        _far,
        _wide,
        _killed_with_many,
        lambda plan: any(len(each) > 1 for each in _names_of(plan).values()),
        lambda plan: any(job.turns > 10 for job in plan.jobs),
        _partly_deaf,
    ],
    ids=["even nodes", "far clocks", "three names", "killed with many", "mixed settings", "load", "partly deaf"],
)
def test_what_the_hard_plans_have(has: object) -> None:
    """Each of these, in a share of them."""
    assert callable(has)
    found = [plan for plan in PLANS if has(plan)]
    assert len(PLANS) / 20 <= len(found) <= len(PLANS) / 2


def test_the_tasks_of_a_load_acquire_again() -> None:
    """Each of them, until the end of its window."""
    plan = LOADS["many readers"]
    loads = [job for job in plan.jobs if job.turns > 1]
    trace = simulate(plan, tracing=True).trace
    for job in loads:
        times = [float(line.split()[0]) for line in trace if f"job {job.number} acquires" in line]
        assert len(times) > 50
        assert job.until - 1.0 < times[-1] <= job.until + 30.0


def test_a_client_that_comes_back_goes_on_with_its_load() -> None:
    """After a kill its tasks begin again, if their window is open."""
    plan = LOADS["many readers"]
    trace = simulate(replace(plan, faults=(Fault(10.0, "kill", seconds=1.0),)), tracing=True).trace
    begun = [float(line.split()[0]) for line in trace if "client 0.2" in line and "acquires" in line]
    assert len(begun) > 50
    assert all(later - sooner < 1.0 for sooner, later in pairwise(begun[:50]))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_nobody_starves(load: str, nodes: int) -> None:
    """Beside tasks that ask again at once."""
    plan = LOADS[load]
    assert simulate(replace(plan, nodes=plan.nodes[:nodes])).flaw is None


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_writer_that_readers_overtake_is_found(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that do not wait behind the queue, so that there is always one."""
    monkeypatch.setattr(type(READ), "respects_queue", False)
    _starves(LOADS["many readers"], nodes)


def test_a_waiter_that_loses_its_place_is_found() -> None:
    """Each renewal of a ticket puts it behind all others."""
    with without("ORDER_KEY"):
        _starves(LOADS["often renewed"], nodes=1)


def _starves(plan: Plan, nodes: int) -> None:
    flaw = simulate(replace(plan, nodes=plan.nodes[:nodes])).flaw
    assert flaw is not None
    assert flaw.what == "starved"
