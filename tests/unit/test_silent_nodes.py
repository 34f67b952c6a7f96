"""Which nodes the error of an outage names: pure, from ballots made by hand (HAZARDS C20)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import QuorumUnavailable
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.runtime.opening import is_decided
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Checked, NodeConfig
from tests.support.fake_clock import FakeClock

SILENT = TimeoutError("silent")


class Rounds:
    """A quorum, and rounds in which some of its nodes fail and others answer."""

    def __init__(self, nodes: int = 3) -> None:
        self.clock = FakeClock()
        listener: Any = None
        config = NodeConfig(0, "", self.clock, listener, {}, None)
        later = asyncio.get_running_loop().call_soon
        self.quorum = Quorum([MemoryStore(self.clock).open(config) for _ in range(nodes)], self.clock, later)
        self._numbers = {node.label: number for number, node in enumerate(self.quorum.nodes)}

    def named(self, failed: tuple[int, ...] = (), answered: tuple[int, ...] = ()) -> set[int]:
        """The nodes in the error of a round."""
        return set(self.errors(self.round(failed, answered)))

    def round(self, failed: tuple[int, ...] = (), answered: tuple[int, ...] = ()) -> Ballot:
        now = self.clock.now()
        ballot = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), len(self._numbers), now, now + 0.05)
        for index in answered:
            ballot.answer(index, (1, False))
        for index in failed:
            ballot.fail(index, SILENT, maybe=True)
        return ballot

    def errors(self, ballot: Ballot, before: dict[int, Exception] | None = None) -> dict[int, Exception]:
        """What the error of a round has for each node."""
        error = self.quorum.unavailable(ballot, "x", before)
        assert isinstance(error, QuorumUnavailable)
        assert str(error).startswith(f"'x': {len(error.errors)} of {len(self._numbers)} nodes")
        return {self._numbers[label]: each for label, each in error.errors.items()}

    def checked(self, *found: Checked | Exception | None) -> dict[int, Exception] | None:
        """The same of a check with these results; None: there is no error."""
        error = self.quorum.unavailable_by_checks(found)
        if error is None:
            return None
        assert isinstance(error, QuorumUnavailable)
        return {self._numbers[label]: each for label, each in error.errors.items()}


async def test_c20_a_round_without_any_answer_names_all() -> None:
    """Nothing is known of any node."""
    assert Rounds().named() == {0, 1, 2}
    assert Rounds().named(answered=(2,)) == {0, 1}


async def test_c20_a_round_that_was_just_sent_names_the_nodes_that_failed_before() -> None:
    """Of other acquires, for a second; and not those that have answered since."""
    rounds = Rounds()
    assert rounds.named(failed=(0, 1), answered=(2,)) == {0, 1}
    assert rounds.named() == {0, 1}
    assert rounds.named(failed=(0,)) == {0, 1}
    assert rounds.named(failed=(2,), answered=(0,)) == {1, 2}
    rounds.clock.advance(0.9)
    assert rounds.named() == {1, 2}
    rounds.clock.advance(0.2)
    assert rounds.named() == {0, 1, 2}


@pytest.mark.parametrize(("nodes", "failed"), [(3, (0, 1)), (4, (0, 1)), (5, (0, 1, 2))])
async def test_c20_nodes_that_were_just_asked_are_not_named_beside_those_that_prevent_a_majority(
    nodes: int, failed: tuple[int, ...]
) -> None:
    """They had no time to answer. As long as the known errors leave a majority, each silent node is a part of the
    outage."""
    rounds = Rounds(nodes)
    assert rounds.named(failed=failed[1:]) == {*range(nodes)}
    assert rounds.named(failed=failed) == {*failed}
    assert rounds.named() == {*failed}


async def test_c20_a_silent_node_is_named_with_what_the_same_acquire_heard_of_it_before() -> None:
    """However long ago. Of the others it says that they have not answered."""
    rounds, refused = Rounds(), ConnectionError("refused")
    errors = rounds.errors(rounds.round(), {1: refused})
    assert errors.keys() == {0, 1, 2}
    assert errors[1] is refused
    assert all("has not answered yet" in str(errors[each]) for each in (0, 2))


async def test_an_op_that_waits_in_the_queue_of_its_node_is_named_with_the_queue() -> None:
    """And not with what other acquires heard of the node; what the same acquire heard of it comes first."""
    rounds, full, refused = Rounds(1), TimeoutError("the queue is long"), ConnectionError("refused")
    rounds.named(failed=(0,))
    waiting = rounds.round()
    waiting.defer(lambda: full)
    assert rounds.errors(waiting) == {0: full}
    assert rounds.errors(waiting, {0: refused}) == {0: refused}


YES, NO = Checked(0.001), SILENT


@pytest.mark.parametrize(("nodes", "outage"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
async def test_a_check_fails_where_no_majority_would_vote(nodes: int, outage: int) -> None:
    """The error names each node that would not; a node without a result is none of them."""
    assert Rounds(nodes).checked(*[YES] * nodes) is None
    assert Rounds(nodes).checked(*[NO] * (outage - 1), *[None] * (nodes - outage + 1)) is None
    assert Rounds(nodes).checked(*[NO] * outage, *[YES] * (nodes - outage)) == dict.fromkeys(range(outage), SILENT)


async def test_a_node_that_is_silent_in_a_check_is_named_with_its_last_error() -> None:
    """If that was less than a second ago: it says more than a silence. A node that would vote has none, and another
    error replaces it."""
    rounds, refused, reset = Rounds(), ConnectionError("refused"), ConnectionError("reset")
    assert rounds.checked(refused, refused, YES) == {0: refused, 1: refused}
    rounds.clock.advance(0.9)
    assert rounds.checked(SILENT, YES, SILENT) == {0: refused, 2: SILENT}
    assert rounds.checked(SILENT, reset, YES) == {0: refused, 1: reset}
    rounds.clock.advance(0.2)
    assert rounds.checked(SILENT, SILENT, YES) == {0: SILENT, 1: reset}


@pytest.mark.parametrize(
    ("found", "decided"),
    [
        ([None], False),
        ([YES], True),
        ([NO], True),
        ([YES, None, None], False),
        ([NO, YES, None], False),
        ([YES, None, YES], True),
        ([NO, None, NO], True),
        ([NO, None, None, YES], False),
        ([NO, None, NO, YES], True),
    ],
)
def test_when_a_checkis_decided(found: list[Any], decided: bool) -> None:
    """A majority would vote, or no majority can."""
    assert is_decided(found) is decided
