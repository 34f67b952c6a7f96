"""The Python rule and the Lua script agree: random histories; replies, full state and notices are compared after each
step.

`ASYNCLOCK_EXAMPLES=20000 pytest tests/agreement/test_mutex_agreement.py` plays that many, other ones each time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis
from hypothesis import assume, given

from asynclock.rules.model import Kind
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.stores.redis.encoding import NATIVE_RELEASES
from tests.support.agreement import Live, Stalled, Still
from tests.support.directed import DIRECTED, acquire, tries
from tests.support.directed_operators import OPERATORS
from tests.support.histories import LIVE, STILL, YOUNGER, Step, native_release
from tests.support.stage import Stage, playing

KINDS = pytest.mark.parametrize("kind", [MUTEX, FAIR], ids=["mutex", "fair"])


@pytest.mark.timeout(180)
@KINDS
@playing(150)
@given(steps=STILL)
def test_decide_and_script_agree_over_hours(stage: Stage, kind: Kind, steps: Sequence[Step]) -> None:
    """While the clock stands still between steps and leaps with Pass."""
    Still(stage, kind).play(steps)


@KINDS
@playing(25)
@given(steps=LIVE)
def test_decide_and_script_agree_in_real_time(stage: Stage, kind: Kind, steps: Sequence[Step]) -> None:
    """On the server's own clock and TIME, with leases of some ten ms."""
    try:
        Live(stage, kind).play(steps)
    except Stalled:
        assume(False)


@KINDS
@pytest.mark.parametrize("steps", (DIRECTED | OPERATORS).values(), ids=(DIRECTED | OPERATORS).keys())
def test_decide_and_script_agree_on(stage: Stage, kind: Kind, steps: list[Step]) -> None:
    """The named histories."""
    Still(stage, kind).play(steps)


QUICK = {name: steps for name, steps in DIRECTED.items() if sum(getattr(step, "ms", 0) for step in steps) <= 100}


@pytest.mark.parametrize("steps", QUICK.values(), ids=QUICK.keys())
def test_decide_and_script_agree_in_real_time_on(stage: Stage, steps: list[Step]) -> None:
    """Those named histories that take no time."""
    for _ in range(50):
        try:
            return Live(stage).play(steps)
        except Stalled:
            continue
    raise Stalled


@pytest.mark.parametrize("command", NATIVE_RELEASES, ids=" ".join)
def test_rule_9_the_servers_own_release_misses_a_marked_hold(stage: Stage, command: tuple[str, ...]) -> None:
    """It deletes an unmarked hold, and nothing where there are waiters."""
    try:
        stage.cli.execute_command(command[0], "nothing", *command[1:], "nobody")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        pytest.skip("not a command of this server")
    native = native_release(command)
    Still(stage).play([acquire(), native, acquire(), tries(YOUNGER), native, acquire(YOUNGER)])
