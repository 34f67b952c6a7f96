"""The rule and the script of several names agree: random histories on three names of mixed kinds, of ops at one of them
and at some together; replies, full states and notices are compared after each step.

`ASYNCLOCK_EXAMPLES=20000 pytest tests/agreement/test_multi_agreement.py` plays that many, other ones each time."""

from __future__ import annotations

from hypothesis import given

from tests.support.shared_agreement import Ensemble, agree_on
from tests.support.shared_directed import FAMILIES, directed
from tests.support.shared_histories import Play, plays
from tests.support.stage import Stage, playing


@playing(50)
@given(play=plays(FAMILIES["multi"][0], count=3))
def test_decide_all_and_script_agree_over_hours(stage: Stage, play: Play) -> None:
    """All or none, the waiters of each name, who is served where, the one fence, and the notices."""
    world, steps = play
    Ensemble(stage, world).play(steps)


def test_decide_all_and_script_agree_on_named_histories(stage: Stage) -> None:
    """The named histories of the mutex and of several names."""
    for name, play in directed("multi").items():
        agree_on(stage, name, play)
