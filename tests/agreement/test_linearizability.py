"""The checker of histories finds what is wrong in them, and nothing else (`spec/linearizability.py`)."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.linearizability import Call, Undecided, check
from spec.sequential import Fair, Mutex, Once, ReadWrite, Semaphore, falling


def history(*lines: str) -> list[Call]:
    """Calls from lines such as `a acquire 7 0-3`; `0-` was not answered, and with `?` it may have had no effect."""
    calls = []
    for line in lines:
        who, what, *value, times = line.split()
        began, _, ended = times.rstrip("?").partition("-")
        known = math.inf if ended == "" else float(ended)
        calls.append(Call(who, what, int(value[0]) if value else 0, float(began), known, not times.endswith("?")))
    return calls


RIGHT: dict[str, tuple[Any, list[Call]]] = {
    "nothing": (Mutex(), []),
    "one after the other": (Mutex(), history("a acquire 1 0-1", "a release 2-3", "b acquire 2 4-5")),
    "the release and the next acquire overlap": (
        Mutex(),
        history("a acquire 1 0-1", "a release 2-9", "b acquire 2 3-4"),
    ),
    "a release without an answer": (Mutex(), history("a acquire 1 0-1", "a release 2-", "b acquire 2 3-4")),
    "an acquire without an answer that took effect": (
        Mutex(),
        history("a acquire 5 0-?", "a release 3-?", "b acquire 6 4-5"),
    ),
    "an acquire without an answer that did not": (Mutex(), history("a acquire 5 0-?", "b acquire 1 1-2")),
    "entered again": (
        Mutex(reentrant=True),
        history("a acquire 1 0-1", "a acquire 1 2-3", "a release 4-5", "a release 6-7", "b acquire 2 8-9"),
    ),
    "in their order": (
        Fair(),
        history("a enqueue 0-1", "b enqueue 2-3", "a acquire 1 0-4", "a release 5-6", "b acquire 2 2-7"),
    ),
    "one that gave up": (
        Fair(),
        history("a enqueue 0-1", "b enqueue 2-3", "a leave 4-5", "b acquire 1 2-6"),
    ),
    "two that came at the same time, in either order": (
        Fair(),
        history("a enqueue 0-3", "b enqueue 1-2", "b acquire 1 1-4", "b release 5-6", "a acquire 2 0-7"),
    ),
    "as many as there are permits": (
        Semaphore(2),
        history("a acquire 2 0-1", "b acquire 1 0-1", "a release 2-3", "c acquire 3 2-4"),
    ),
    "readers together, then a writer": (
        ReadWrite(),
        history("a read 1 0-1", "b read 2 0-1", "a release 2-3", "b release 2-3", "c write 3 2-4"),
    ),
    "a run that failed is run again": (Once(), history("a run 0-1", "a release 2-3", "b run 4-5", "b return 6-7")),
    "a call while it runs, and one after it": (
        Once(),
        history("a run 0-1", "b skip 0-3", "a return 2-5", "c skip 6-7"),
    ),
}

WRONG: dict[str, tuple[Any, list[Call]]] = {
    "two holders": (Mutex(), history("a acquire 1 0-1", "b acquire 2 2-3", "a release 4-5", "b release 6-7")),
    "a token that does not rise": (Mutex(), history("a acquire 2 0-1", "a release 2-3", "b acquire 2 4-5")),
    "another one releases it": (Mutex(), history("a acquire 1 0-1", "b release 2-3")),
    "entered again by its owner, who may not": (Mutex(), history("a acquire 1 0-1", "a acquire 1 2-3")),
    "entered again with another token": (Mutex(reentrant=True), history("a acquire 1 0-1", "a acquire 2 2-3")),
    "left once, entered twice": (
        Mutex(reentrant=True),
        history("a acquire 1 0-1", "a acquire 1 2-3", "a release 4-5", "b acquire 2 6-7"),
    ),
    "one that overtakes": (
        Fair(),
        history("a enqueue 0-1", "b enqueue 2-3", "b acquire 1 2-4", "b release 5-6", "a acquire 2 0-7"),
    ),
    "served after it gave up": (Fair(), history("a enqueue 0-1", "a leave 2-3", "a acquire 1 4-5")),
    "more than there are permits": (
        Semaphore(2),
        history("a acquire 1 0-1", "b acquire 2 0-1", "c acquire 3 2-3", "a release 4-5"),
    ),
    "a permit with the token of a hold that has ended": (
        Semaphore(2),
        history("a acquire 7 0-1", "a release 2-3", "b acquire 7 4-5"),
    ),
    "a reader beside a writer": (ReadWrite(), history("a write 1 0-1", "b read 2 2-3", "a release 4-5")),
    "a writer beside a reader": (ReadWrite(), history("a read 1 0-1", "b write 2 2-3", "a release 4-5")),
    "run twice": (Once(), history("a run 0-1", "a return 2-3", "b run 4-5")),
    "two runs at once": (Once(), history("a run 0-1", "b run 2-3", "a release 4-5")),
    "not run, and nobody has run it": (Once(), history("a skip 0-1")),
}


@pytest.mark.parametrize("scene", RIGHT)
def test_a_right_history_has_an_order(scene: str) -> None:
    """Also where calls overlap, or have no answer."""
    spec, calls = RIGHT[scene]
    assert check(spec, calls) is None


@pytest.mark.parametrize("scene", WRONG)
def test_a_wrong_history_has_none(scene: str) -> None:
    """And the message names the calls that cannot be next."""
    spec, calls = WRONG[scene]
    violation = check(spec, calls)
    assert violation is not None
    assert violation.stuck
    assert all(str(call) in str(violation) for call in violation.stuck)
    assert {*violation.done, *violation.stuck} <= {*calls}


def test_shared_tokens_that_overlap() -> None:
    """A permit that is asked for after another one was given has the greater token, though both are held."""
    assert falling(history("a acquire 2 0-1", "b acquire 1 0-1")) is None  # they were given at the same time
    found = falling(history("a acquire 2 0-1", "b acquire 2 2-3"))
    assert found is not None
    assert [each.who for each in found] == ["a", "b"]


def by_trial(spec: Any, calls: list[Call]) -> bool:
    """Whether some order is allowed: all are tried."""
    unsure = [call for call in calls if not call.certain]
    for number in range(len(unsure) + 1):
        for left_out in combinations(unsure, number):
            kept = [call for call in calls if not any(call is each for each in left_out)]
            if any(is_allowed(spec, order) for order in permutations(kept)):
                return True
    return False


def is_allowed(spec: Any, order: tuple[Call, ...]) -> bool:
    if any(late.ended < early.began for early, late in combinations(order, 2)):
        return False
    state = spec.start()
    return all((state := spec.after(state, call)) is not None for call in order)


def calls_of(what: list[str]) -> st.SearchStrategy[list[Call]]:
    def call(who: str, what: str, value: int, began: int, lasts: int, certain: bool) -> Call:
        return Call(who, what, value, began, began + lasts if certain else math.inf, certain)

    each = st.builds(
        call,
        st.sampled_from("ab"),
        st.sampled_from(what),
        st.integers(1, 3),
        st.integers(0, 6),
        st.integers(1, 4),
        st.sampled_from([True, True, True, False]),
    )
    return st.lists(each, max_size=5)


@given(st.data())
def test_it_finds_what_trying_all_orders_finds(data: st.DataObject) -> None:
    """Over short random histories of each kind."""
    spec, what = data.draw(
        st.sampled_from(
            [
                (Mutex(), ["acquire", "release"]),
                (Mutex(reentrant=True), ["acquire", "release"]),
                (Fair(), ["enqueue", "acquire", "release", "leave"]),
                (Semaphore(1), ["acquire", "release"]),
                (ReadWrite(), ["read", "write", "release"]),
                (Once(), ["run", "return", "release", "skip"]),
            ]
        )
    )
    calls = data.draw(calls_of(what))
    assert (check(spec, calls) is None) == by_trial(spec, calls)


def test_a_long_history_takes_few_steps() -> None:
    """300 holds of 20 tasks that wait all the time: what would be as many orders as there are permutations."""
    calls, at = [], 0.0
    for fence in range(1, 301):
        who = f"task {fence % 20}"
        calls.append(Call(who, "acquire", fence, max(0.0, at - 19.5), at + 0.9))
        calls.append(Call(who, "release", 0, at + 0.5, at + 1.2))
        at += 1.0
    assert check(Mutex(), calls, most=20_000) is None
    with pytest.raises(Undecided, match="more than 100 steps"):
        check(Mutex(), calls, most=100)
