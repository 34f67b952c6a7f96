"""Each line of the scripts of shared kinds and of several names is needed: without it, or with it turned, a history or
an odd server tells.

`ASYNCLOCK_MUTANTS=all pytest tests/agreement/test_shared_mutants.py` tries every change; else some of each script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from asynclock.client import _MULTI
from asynclock.locks.multi import _SCRIPT
from asynclock.rules.rwlock import READ
from asynclock.rules.semaphore import SEMAPHORE
from tests.support.mutants import ALL, Jury, Member, survivors
from tests.support.shared_agreement import Ensemble
from tests.support.shared_directed import corpus
from tests.support.shared_histories import Step, World
from tests.support.shared_servers import WHERE, Odd, Promise, odd
from tests.support.stage import Stage

SCRIPTS = {"read-write": READ.script, "semaphore": SEMAPHORE.script, "multi": _SCRIPT}


PROMISES = [
    pytest.param(*each, id=f"{each[0].__name__} {'/'.join(m[0] for m in each[1].modes)}")
    for found in WHERE.values()
    for each in found
]


@pytest.mark.parametrize(("promise", "where"), PROMISES)
def test_c15_without_memory_and_among_others_keys(stage: Stage, promise: Promise, where: World) -> None:
    """Out of memory, release and extend work and acquire is whole; keys of other kinds are left alone."""
    promise(Odd(stage, where, {}))


def in_place(family: str, script: str) -> Mapping[str, str]:
    """That script in place of the family's own, by the text it is in."""
    if family == "multi":
        return {_MULTI: _MULTI.removesuffix(_SCRIPT) + script}
    return {SCRIPTS[family]: script}


def jury_of(stage: Stage, family: str) -> Jury:
    def history(world: World, steps: list[Step]) -> Member:
        return lambda script: Ensemble(stage, world, in_place(family, script)).play(steps)

    def promise(kept: Callable[[Stage, Mapping[str, str]], None]) -> Member:
        return lambda script: kept(stage, in_place(family, script))

    return Jury([*(history(*play) for play in corpus(family, 150 if ALL else 50)), *map(promise, odd(family))])


# these servers write a whole number out; Lua's own formats would not, and others may use them
NUMBERS = {
    (f"string.format('%.0f', {what})", instead)
    for what in ("ends", "order")
    for instead in (what, f"string.format('%.3f', {what})")
} | {
    ("string.format('%.0f', ends)", "string.format('%s', ends)"),
    ("string.format('%.0f', f)", "f"),
    ("string.format('%.0f', top)", "top"),
}
SHARED = NUMBERS | {
    # holds of one name are of one family, and the first alone is used
    ("'ZRANGE', hold, 0, 0)[1]", "'ZRANGE', hold, -1, -1)[1]"),
    ("'ZRANGE', hold, 0, 0)[1]", "'ZRANGE', hold, 0, 1)[1]"),
    ("'ZRANGE', queue, 0, 0)[1]", "'ZRANGE', queue, 0, 1)[1]"),
    ("'ZRANGE', queue, 0, 0)[1]", "'ZRANGE', queue, 0, -1)[1]"),
    ("'ZRANGE', queue, at, at)[1]", "'ZRANGE', queue, at, -1)[1]"),
    # no command is refused for lack of memory where another has written before
    ("redis.pcall('ZADD', hold", "redis.call('ZADD', hold"),
    # the end of a key, or of a hold, is set to what it is
    ("< ends - now then", "<= ends - now then"),
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    ("redis.call('PTTL', queue) < lease", "redis.call('PTTL', queue) <= lease"),
    ("tonumber(score) < now + lease", "tonumber(score) <= now + lease"),
    # a hold that is there ends after now
    ("lease > 0 and tonumber(score) < now + lease", " tonumber(score) < now + lease "),
    ("lease > 0", "1 > 0"),
    ("lease > 0", "lease > 1"),
    ("lease > 0", "lease >= 0"),
    ("adopted or 0", "adopted or 1"),
    # of a ticket that is lost, that it is not fresh is enough
    ("'0 0 0 0'", "'0 0 0 1'"),
    ("'0 0 0 0'", "'0 0 1 0'"),
    ("'0 0 0 0'", "'0 1 0 0'"),
    # nil, or false, is no better than another word for it
    ("or heard > 0 and 'woken' or 'gone'", "or heard > 0 and 'woken'"),
    ("  return false", ""),
    # who adopts leaves no ticket
    ("if verb == 'adopt' and not score and not adopted then return no(-1) end", ""),
    ("verb == 'adopt' and not score and not adopted then", "false then"),
}
EQUIVALENT = {
    "read-write": SHARED
    | {
        # before the letter stands a bar
        ("string.sub(first, 34, 34)", "string.sub(first, 33, 34)"),
        # an attempt has the mode of its waiter
        ("admits(id)", "admits(waiter)"),
    },
    "semaphore": SHARED
    | {
        ("'ZRANGE', hold, 0, 0, 'WITHSCORES'", "'ZRANGE', hold, 0, 1, 'WITHSCORES'"),
        # none is ever told to be fair
        ("string.sub(ARGV[8], 1, 1)", "ARGV[8]"),
        ("string.sub(ARGV[8], 1, 1)", "string.sub(ARGV[8], 1, 2)"),
    },
    "multi": {
        ("string.format('%.0f', top)", "top"),
        # it is any second letter that says fair
        ("fair = '', 'f'", "fair = '', '0'"),
        # a fence is far greater
        ("local top = 0", "local top = 1"),
        # an answer is a table
        ("if not ran then", "if true then"),
        # who is refused for ever is so again, and what is broken is broken still
        ("said[1] ~= 0 or ticket == ''", " ticket == '' "),
        # a release and a look take no fences
        ("'release', id, '0', '1'", "'release', id, '0', '0'"),
        ("'release', waiter, '0', '1'", "'release', waiter, '0', '0'"),
        ("'wait', id, '0'", "'wait', id, '1'"),
    },
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", SCRIPTS)
def test_each_line_of_the_scripts_is_needed(stage: Stage, family: str) -> None:
    """No change to it goes unnoticed, but for those that change nothing."""
    jury = jury_of(stage, family)
    assert not jury.kills(SCRIPTS[family])
    assert survivors(jury, SCRIPTS[family], EQUIVALENT[family], each=12) == []
