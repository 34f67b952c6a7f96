"""The rule and the scripts of the kinds that several may hold agree: random histories over hours; replies, full state
and notices are compared after each step.

`ASYNCLOCK_EXAMPLES=20000 pytest tests/agreement/test_shared_agreement.py` plays that many, other ones each time."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.support.shared_agreement import Ensemble, agree_on
from tests.support.shared_directed import directed
from tests.support.shared_histories import Play, plays
from tests.support.stage import Stage, playing


@playing(60)
@given(play=plays(["read-write"]))
def test_decide_and_script_of_read_write_agree_over_hours(stage: Stage, play: Play) -> None:
    """Grants, the order of the waiters, service, expiry, and notices."""
    world, steps = play
    Ensemble(stage, world).play(steps)


@playing(60)
@given(play=plays(["semaphore"]))
def test_decide_and_script_of_semaphores_agree_over_hours(stage: Stage, play: Play) -> None:
    """The same, and which slots are taken."""
    world, steps = play
    Ensemble(stage, world).play(steps)


@pytest.mark.parametrize("family", ["read-write", "semaphore"])
def test_decide_and_script_agree_on_named_histories(stage: Stage, family: str) -> None:
    """The named histories of the mutex and of these kinds."""
    for name, play in directed(family).items():
        agree_on(stage, name, play)
