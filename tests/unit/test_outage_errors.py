"""The error for nodes that cast no vote: its class, and its text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import ConfigError, QuorumUnavailable
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import WrongKind
from tests.support.fake_clock import FakeClock

REFUSED = ConnectionError("refused")
FORBIDDEN = ConfigError("give it the rights")
OTHER_KIND = WrongKind("it is a semaphore")


class Named:
    """A node of which only the name counts."""

    def __init__(self, label: str) -> None:
        self.label = label


class Slow(Named):
    """A node that may know why its answer is late."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(label)
        self.why = why

    def delay(self, since: float, name: str) -> str:
        del since, name
        return self.why


def over(*nodes: Named) -> Quorum:
    given: Any = nodes
    return Quorum(given, FakeClock(), print)


def labelled(count: int) -> Quorum:
    return over(*(Named(f"node {number}") for number in range(count)))


@pytest.mark.parametrize(
    ("nodes", "errors", "raised"),
    [
        (1, [FORBIDDEN], FORBIDDEN),
        (3, [FORBIDDEN, REFUSED], None),
        (3, [FORBIDDEN, FORBIDDEN], FORBIDDEN),
        (3, [REFUSED, OTHER_KIND, FORBIDDEN], OTHER_KIND),  # the first of them, with its text
        (3, [REFUSED, FORBIDDEN, OTHER_KIND], FORBIDDEN),
        (4, [FORBIDDEN, FORBIDDEN, REFUSED], None),
        (5, [FORBIDDEN, FORBIDDEN, REFUSED], None),
        (5, [FORBIDDEN, FORBIDDEN, FORBIDDEN], FORBIDDEN),
    ],
)
def test_what_only_the_user_can_solve_is_a_config_error(
    nodes: int, errors: list[Exception], raised: Exception | None
) -> None:
    """If a majority has such errors. Else the outage may end by itself: it is QuorumUnavailable."""
    error = labelled(nodes).unavailable_nodes(dict(enumerate(errors)), "x")
    assert error.name == "x"
    if raised is None:
        assert isinstance(error, QuorumUnavailable)
        assert error.errors == {f"node {number}": each for number, each in enumerate(errors)}
    else:
        assert (type(error), str(error)) == (type(raised), str(raised))


def test_the_text_of_an_outage() -> None:
    """The name, so many of all nodes, and the reason of each with its address: once, also where the reason has it. An
    error without a text is shown by its class."""
    errors = {0: REFUSED, 1: ConnectionError("node 1 is away"), 2: ConnectionResetError()}
    says = "3 of 5 nodes cast no vote: node 0: refused; node 1 is away; node 2: ConnectionResetError()"
    assert str(labelled(5).unavailable_nodes(errors, "x")) == f"'x': {says}"
    assert str(labelled(5).unavailable_nodes(errors, "")) == says  # it is about no name


def test_what_is_no_exception_is_reported_as_one() -> None:
    """A task that asks a node may be cancelled by the program. `errors` has exceptions alone, which a caller may
    raise."""
    cancelled = asyncio.CancelledError()
    error = labelled(3).unavailable_nodes({0: cancelled, 1: REFUSED}, "x")
    assert isinstance(error, QuorumUnavailable)
    assert error.errors["node 1"] is REFUSED
    assert isinstance(error.errors["node 0"], Exception)
    assert str(error.errors["node 0"]) == "CancelledError()"


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (Named("a"), "a has not answered yet"),
        (Slow("a", ""), "a has not answered yet"),
        (Slow("a", "its queue is long"), "a has not answered yet: its queue is long"),
    ],
)
def test_a_silent_node_may_say_why(node: Named, says: str) -> None:
    """It may still answer. A node that knows what holds its answers up says it."""
    ballot = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 1, 1_000.0, 1_001.0)
    error = over(node).unavailable(ballot, "x")
    assert isinstance(error, QuorumUnavailable)
    assert {label: str(each) for label, each in error.errors.items()} == {"a": says}


def test_answers_that_came_too_late_are_an_outage() -> None:
    """The time was up, and all nodes answer before the task of the caller wakes."""
    ballot = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 3, 1_000.0, 1_001.0)
    ballot.expire()
    for index in range(3):
        ballot.answer(index, (42, False))
    error = labelled(3).unavailable(ballot, "x")
    assert isinstance(error, QuorumUnavailable)
    assert {str(each) for each in error.errors.values()} == {f"node {index} answered too late" for index in range(3)}
