"""The Python rule and the Lua script are one: random histories, replies and full state compared after each step.

`ASYNCLOCK_EXAMPLES=20000 pytest tests/test_agreement.py` plays that many, other ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import redis
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from asynclock._op import Verb
from tests.agreement import (
    BREAK,
    FLUSH,
    IDS,
    KEEP_FENCE,
    LOSE_FENCE,
    NOBODY,
    OWNER,
    PERSIST,
    Ask,
    Live,
    Pass,
    Stalled,
    Step,
    Still,
    set_fence,
    take,
)
from tests.servers import Servers

EXAMPLES = int(os.environ.get("ASYNCLOCK_EXAMPLES", "0"))
HUGE = 2**53 - 5_000  # what a history adds to F keeps it below 2^53
SKEW = 10_000_000

whoever = st.sampled_from([OWNER, OWNER, OWNER, *range(len(IDS))])
tokens = st.one_of(st.none(), st.sampled_from([-1, 0, 1]), st.integers(-50, 50))
clocks = st.one_of(
    st.sampled_from([0, -SKEW - 1, -SKEW, 1 - SKEW, SKEW - 1, SKEW, SKEW + 1]), st.integers(-3 * SKEW, 3 * SKEW)
)
fences = st.sampled_from(["garbage", "", "0", "7", "12x", str(HUGE)])  # F is never negative


def histories(
    lengths: st.SearchStrategy[int], memories: st.SearchStrategy[int], passes: st.SearchStrategy[int], most: int
) -> st.SearchStrategy[list[Step]]:
    """Lists of at most `most` steps, with leases, fence memories and pauses of those lengths, in ms."""
    or_none = st.one_of(st.just(0), lengths)
    plain = st.sampled_from([False, False, False, True])
    ask = partial(st.builds, Ask, memory=memories)
    acquires = ask(st.just(Verb.ACQUIRE), whoever, lengths, clock=clocks, plain=plain)
    extends = ask(st.just(Verb.EXTEND), whoever, or_none, tokens, tombstone=st.booleans())
    releases = ask(st.just(Verb.RELEASE), whoever, lengths, tokens, rest=or_none, tombstone=st.booleans())
    looks = st.just(Ask(Verb.EXTEND, NOBODY, lease=0))
    foreign = st.one_of(
        st.builds(take, st.sampled_from(["another's", ""]), or_none),
        st.builds(set_fence, fences, or_none),
        st.sampled_from([BREAK, PERSIST, LOSE_FENCE, KEEP_FENCE, FLUSH]),
    )
    waits = st.builds(Pass, passes)
    return st.lists(st.one_of(acquires, acquires, extends, releases, looks, foreign, waits), min_size=1, max_size=most)


STILL = histories(
    lengths=st.one_of(st.sampled_from([1, 2, 1_000, 10_000]), st.integers(1, 60_000)),
    memories=st.one_of(st.sampled_from([1_000, 60_000, 3_600_000]), st.integers(1, 120_000)),
    passes=st.one_of(st.sampled_from([1, 999, 1_000, 10_000]), st.integers(1, 4 * 3_600_000)),
    most=25,
)
LIVE = histories(st.integers(30, 120), st.integers(30, 240), st.integers(1, 120), most=8)


def playing(examples: int) -> settings:
    """The same histories each time, unless ASYNCLOCK_EXAMPLES asks for more."""
    return settings(max_examples=EXAMPLES or examples, derandomize=not EXAMPLES, database=None, deadline=None)


@pytest.fixture(scope="module")
def cli() -> Iterator[redis.Redis]:
    """A server of this module's own."""
    pool = Servers()
    with pool.start().cli() as cli:
        yield cli
    pool.stop()


@playing(1000)
@given(steps=STILL)
def test_decide_and_script_agree_over_hours(cli: redis.Redis, steps: Sequence[Step]) -> None:
    """Replies and full state, while the clock stands still between steps and leaps with Pass."""
    Still(cli).play(steps)


@playing(150)
@given(steps=LIVE)
def test_decide_and_script_agree_in_real_time(cli: redis.Redis, steps: Sequence[Step]) -> None:
    """Replies and full state, on the server's own clock and TIME, with leases of some ten ms."""
    try:
        Live(cli).play(steps)
    except Stalled:
        assume(False)


acquire = partial(Ask, Verb.ACQUIRE)
extend = partial(Ask, Verb.EXTEND, token=0)
release = partial(Ask, Verb.RELEASE, token=0)

DIRECTED: dict[str, list[Step]] = {
    "an id that holds is answered the same": [acquire(0), acquire(0, lease=20_000), acquire(0, lease=5_000)],
    "a hold whose fence was lost gets a new one": [acquire(0), LOSE_FENCE, acquire(0, clock=SKEW)],
    "a stranger that never ends": [take("another's", 0), acquire(0), extend(0), release(0)],
    "a look at a hold that lost its end takes nothing": [acquire(0), PERSIST, extend(0, lease=0), acquire(1)],
    "a look at an empty value takes nothing": [take("", 0), extend(NOBODY, lease=0, token=None), acquire(0)],
    "a hold that lost its end gets one": [acquire(0), PERSIST, extend(0), acquire(1)],
    "a plain id is not known again": [acquire(0, plain=True), acquire(0, plain=True, lease=20_000)],
    "a plain hold of a script's id": [acquire(0), acquire(0, plain=True)],
    "a script finds its id held plainly": [acquire(0, plain=True), acquire(0)],
    "an undone id is refused until its tombstone ends": [
        *(release(0, lease=1_000, tombstone=True), acquire(0), Pass(999), acquire(0), Pass(1), acquire(0)),
    ],
    "a name rests": [acquire(0), release(0, rest=500), acquire(1), Pass(499), acquire(1), Pass(1), acquire(1)],
    "who brings no token hears F": [acquire(0), extend(0, token=None), release(0, token=None)],
    "the last fence that Lua counts": [set_fence(str(2**53 - 1), 0), acquire(0), extend(0, token=0)],
    "no number": [set_fence("garbage", 0), acquire(0), set_fence("12x", 0), release(0, token=5), acquire(0)],
    "an old dump": [acquire(0), set_fence("7", 1_000), release(0, token=9), Pass(60_000), acquire(1)],
    "a fence that outlived its memory": [acquire(0, memory=1_000), Pass(1_000), extend(0, token=0), acquire(0)],
}


@pytest.mark.parametrize("steps", DIRECTED.values(), ids=DIRECTED.keys())
def test_decide_and_script_agree_on(cli: redis.Redis, steps: list[Step]) -> None:
    """Histories that were worth a name."""
    Still(cli).play(steps)


def corpus(count: int) -> list[list[Step]]:
    """The named histories, and so many random ones, always the same."""
    found = list(DIRECTED.values())

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(steps=STILL)
    def collect(steps: list[Step]) -> None:
        found.append(steps)

    collect()
    return found
