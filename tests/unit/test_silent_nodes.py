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
    """A quorum of three nodes, and rounds in which some of them fail and others answer."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        listener: Any = None
        config = NodeConfig(0, "", self.clock, listener, {}, None)
        later = asyncio.get_running_loop().call_soon
        self.quorum = Quorum([MemoryStore(self.clock).open(config) for _ in range(3)], self.clock, later)
        self._numbers = {node.label: number for number, node in enumerate(self.quorum.nodes)}

    def named(self, failed: tuple[int, ...] = (), answered: tuple[int, ...] = ()) -> set[int]:
        """The nodes in the error of a round."""
        now = self.clock.now()
        ballot = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 3, now, now + 0.05)
        for index in answered:
            ballot.answer(index, (1, False))
        for index in failed:
            ballot.fail(index, SILENT, maybe=True)
        error = self.quorum.unavailable(ballot, "x")
        assert isinstance(error, QuorumUnavailable)
        assert str(error).startswith(f"'x': {len(error.errors)} of 3 nodes")
        return {self._numbers[label] for label in error.errors}


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


YES, NO = Checked(0.001), SILENT


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
