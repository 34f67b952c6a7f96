"""The simulation finds no violation in the shipped code, repeats a run exactly, and finds what a rule prevents when
that rule is taken out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from asynclock.protocol import planner, watchdog
from asynclock.protocol.hold import Tenure
from asynclock.protocol.planner import Next
from asynclock.quorum.quarantine import Quarantine
from simulation import cli
from simulation.ablations import find, find_in_directed, without
from simulation.checks import Judge
from simulation.directed import PLANS
from simulation.mutants import mutants
from simulation.plan import FAULTS, LONG_RUNS, RUNS, SECONDS, Fault, LockPlan, plan_of
from simulation.shrink import shrink
from simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

FOUND = {
    "OWN_ID_MOVES_END": {"held past its end"},
    "ONLY_OWN_HOLD": {"two holders", "a token was given twice"},
    "CLOCK_SEEDS": {"a token did not rise", "a token was given twice"},
    "DRIFT": {"held past its end"},
    "FREER_SERVES": {"served late"},
    "ROUND_SERVES": {"an acquire before the queue, without a hold"},
    "LEAVE": {"a ticket is left", "an id is left at a server", "a timer is left"},
    "LOSS_IS_TOLD": {"a loss was not told"},
    "OTHERS_STAY": {"another's key was deleted"},
    "HANDLE_ONCE": {"a handle was adopted twice"},
    "EXPIRES": {"a server keeps what has ended", "not served"},
}
"""Of each rule that is taken out: the promises of which one is broken in an hour."""

SOON = {"EXPIRES": 4}
"""The hour in which that is found soon; else the first."""


@pytest.mark.parametrize("runs", [range(RUNS), LONG_RUNS], ids=["short", "long"])
def test_no_violation(runs: range) -> None:
    """In an hour of it; enough happens in it to count."""
    hour = cli.hour_of(1, runs)
    assert hour.flaw is None
    assert hour.counts
    assert hour.histories > hour.undecided


def test_a_plan_gives_the_same_run_again() -> None:
    """So that a seed repeats a failure."""
    plan = plan_of(2, 3)
    assert simulate(plan, tracing=True).trace == simulate(plan, tracing=True).trace


@pytest.mark.parametrize("rule", FOUND)
def test_a_missing_rule_is_found(rule: str) -> None:
    """Each check can fail."""
    found = find(rule, base=SOON.get(rule, 0), hours=1)
    assert found is not None
    assert found[2].what in FOUND[rule], found


@pytest.mark.parametrize(("rule", "flaw"), [("REFUSAL_COUNTS", "two holders"), ("WITNESSES", "a token did not rise")])
def test_what_no_draw_finds(rule: str, flaw: str) -> None:
    """A plan made by hand has no flaw with the rule, and that flaw without it."""
    assert simulate(PLANS[rule]).flaw is None
    found = find_in_directed(rule)
    assert found is not None
    assert found.what == flaw


@pytest.mark.usefixtures("histories_only")
def test_a_wrong_history_is_found() -> None:
    """Without the other checks, what the programs saw is enough."""
    assert find("ONLY_OWN_HOLD", hours=1) is not None


@pytest.mark.parametrize(
    ("what", "lock", "name"),
    [("", None, "lock1"), ("evict", 1, "lock2"), ("evict", 0, "lock1"), ("step", None, "lock0")],
)
def test_a_broken_assumption_excuses_its_names_for_a_time(
    what: str, lock: int | None, name: str, checked_alone: Callable[[str], None]
) -> None:
    """In a plan that is not safe, an eviction excuses two holders of the evicted name only, and a step of a server's
    clock those of all names; each only for some time, after which two holders of any name are found again."""
    plan = plan_of(0, 7)
    evicted = plan.locks[lock] if lock is not None else None
    fault = Fault(0.5, what, node=0, lock=evicted)
    excused_until = 0.5 + plan.settings.max_lease + 1.2 * plan.longest_lease + 25.0 if what == "step" else 0.0
    checked_alone("two holders")
    with without("ONLY_OWN_HOLD"):
        outcome = simulate(replace(plan, faults=(fault, *plan.faults) if what else plan.faults))
    assert not plan.safe
    assert outcome.flaw is not None
    assert outcome.flaw.about.startswith(f"of {name}:")
    assert outcome.seconds >= excused_until


@pytest.mark.parametrize(("seed", "run"), [(847239273, 4), (20015, 2)])
def test_c4_a_late_undo_stores_no_ticket(seed: int, run: int) -> None:
    """In these runs a server reads an undo from a connection that was cut, after its waiter has withdrawn the ticket.
    The undo put the ticket back, until a longer run of the simulation found that."""
    plan = plan_of(seed, run)
    assert simulate(plan).flaw is None
    with without("BACK_WHERE_IT_HELD"):
        flaw = simulate(plan).flaw
    assert flaw is not None
    assert flaw.what == "an id came back after its release"


@pytest.mark.parametrize(
    ("seed", "run"),
    [
        (5018, 6), (5039, 11), (600023, 6), (600266, 11), (20000110, 13), (20001315, 12), (20001480, 13),
        (26002000, 13), (1033, 12), (2001, 12), (78000892, 16),
    ],
)  # fmt: skip
def test_runs_in_which_a_check_was_wrong(seed: int, run: int) -> None:
    """A server's clock is stepped between a ticket and its grant. A job begins after all has healed. Many tasks wait
    until the runs of `once` of others do not count any more. An owner that does not know of a break enters again. A
    break ends the mark of a run of `once` before its client has the answer. An idle client does not know that its
    connection ended in an earlier fault. A time was too short for a second slot, and for a poll
    by which a waiter finds its hold."""
    assert simulate(plan_of(seed, run)).flaw is None


def test_waiters_for_several_names_do_not_keep_each_other_out() -> None:
    """Those of two names stood in the queues of both, and each was the last where it had no ticket. Nobody held the
    names, and nobody got them."""
    assert simulate(plan_of(26001255, 13)).flaw is None


@pytest.mark.parametrize(("seed", "run"), [(63000300, 16), (62000297, 12), (75000130, 16), (75000216, 15)])
def test_a_waiter_for_a_lock_that_others_share_is_not_passed_over(seed: int, run: int) -> None:
    """Over several nodes, by writers of a client that acquires again at once; by a reader that enters by itself; by
    permits beside which a waiter with fewer permits has no room. It does not take a rest for an attempt."""
    assert simulate(plan_of(seed, run)).flaw is None


def test_a_silent_server_in_quarantine_is_noticed() -> None:
    """The renewals that it gets cast no vote, but have a time limit. Without it the connection stayed as it was."""
    assert simulate(plan_of(700023, 9)).flaw is None


def test_a_failure_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """With its seed, the command that repeats it, and a shorter schedule; the exit code is 1."""
    with without("ONLY_OWN_HOLD"):
        code = cli.main(["--base", "0", "--run", "0"])
    said = capsys.readouterr().out
    assert code == 1
    assert "seed 0, run 0: a token was given twice" in said
    assert "again: python -m simulation --base 0 --run 0" in said
    assert "violations in 1 seeds" in said


def test_a_shorter_plan_fails_in_the_same_way() -> None:
    """With few jobs, and no fault that is not needed."""
    plan = plan_of(0, 0)
    with without("ONLY_OWN_HOLD"):
        shorter = shrink(plan, "a token was given twice")
        flaw = simulate(shorter).flaw
    assert len(shorter.jobs) <= 3
    assert not shorter.faults
    assert flaw is not None
    assert flaw.what == "a token was given twice"


def test_plans_differ() -> None:
    """They have one, three and five nodes, are safe or not, and have enough faults."""
    plans = [plan_of(seed, run) for seed in range(4) for run in range(RUNS)]
    assert {len(plan.nodes) for plan in plans} == {1, 3, 5}
    assert {plan.safe for plan in plans} == {True, False}
    assert all(len(plan.faults) >= FAULTS[0] for plan in plans)


def test_each_mutant_is_a_change() -> None:
    """Of files that decide something."""
    found = mutants()
    assert len(found) > 2000
    assert {each.path.parent.name for each in found} == {"protocol", "quorum", "rules"}


def _at_once(facts: object) -> Next:
    del facts
    return Next.STOP


@pytest.mark.parametrize(
    ("owner", "attribute", "instead", "what"),
    [
        (Tenure, "rest", lambda tenure: tenure.done_for, "min_hold was not kept"),
        (watchdog, "TICK", 0.3, "a loss was not told in time"),
        (planner, "after_refusal", _at_once, "given up too soon"),
        (planner.Pace, "outage_limit", lambda pace, began, give_up: began, "given up too soon"),
        (Quarantine, "until", lambda quarantine, facts: math.inf, "a wrong error"),
    ],
)
def test_a_promise_of_time_is_checked(
    owner: object, attribute: str, instead: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client must not do too soon or too late, in the first hours in which it does."""
    monkeypatch.setattr(owner, attribute, instead)
    found = (simulate(plan_of(seed, run)).flaw for seed in range(4) for run in range(RUNS))
    assert next(flaw for flaw in found if flaw is not None).what == what


def test_a_tenure_beyond_max_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has asked for less than its client keeps."""
    entered = Judge.entered

    def asked_for_less(judge: Judge, client: Any, tenure: Tenure, lock: LockPlan, job: int) -> None:
        less = replace(lock, settings=replace(lock.settings, max_hold=0.1))
        entered(judge, client, tenure, less, job)

    monkeypatch.setattr(Judge, "entered", asked_for_less)
    flaw = simulate(plan_of(0, 0)).flaw
    assert flaw is not None
    assert flaw.what == "held for longer than max_hold"


def test_a_hold_that_is_held_again_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a hold that began while it was in doubt: at each look, and not only as a program enters."""
    looks = list[float]()
    check = Judge._check_alone  # noqa: SLF001 - what is called

    def counted(judge: Judge) -> None:
        looks.append(judge.now)
        check(judge)

    monkeypatch.setattr(Judge, "_check_alone", counted)
    assert simulate(plan_of(0, 0)).flaw is None
    assert len(looks) > SECONDS / 0.5
