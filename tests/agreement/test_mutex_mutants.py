"""Each line of mutex.lua is needed: without it, or with it turned, a history or an odd server tells.

Which changes cannot be told apart stands in EQUIVALENT, with the reason.
`ASYNCLOCK_MUTANTS=all pytest tests/agreement/test_mutex_mutants.py` tries every change; else some of them are tried.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynclock.rules.mutex import MUTEX, Mutex
from tests.support.agreement import Still
from tests.support.directed import corpus
from tests.support.histories import Step
from tests.support.mutants import Jury, Member, survivors
from tests.support.odd_servers import FOREIGN, FULL, Odd
from tests.support.stage import Stage


class Mutant(Mutex):
    """The mutex under another script."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script


@pytest.mark.parametrize("promise", FOREIGN, ids=lambda promise: promise.__name__)
def test_c14_what_others_left(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Keys of other types, and tickets that no client of ours leaves."""
    promise(Odd(stage, MUTEX))


@pytest.mark.parametrize("promise", FULL, ids=lambda promise: promise.__name__)
def test_c15_without_memory(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Out of memory, release and extend work and acquire leaves nothing."""
    promise(Odd(stage, MUTEX))


def jury_of(stage: Stage) -> Jury:
    def history(steps: list[Step]) -> Member:
        return lambda script: Still(stage, Mutant(script)).play(steps)

    def promise(kept: Callable[[Odd], None]) -> Member:
        return lambda script: kept(Odd(stage, Mutant(script)))

    return Jury([*map(history, corpus(150)), *map(promise, (*FOREIGN, *FULL))])


EQUIVALENT = {
    # the end of a key is set to what it is
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    ("redis.call('PTTL', queue) < lease", "redis.call('PTTL', queue) <= lease"),
    # where no queue is, nothing is found in it; not to look is quicker
    ("or id, false, verb", "or id, true, verb"),
    ("if waited then", "if true then"),
    ("barges and ARGV[10] ~= '' or", "barges and ARGV[10] == '' or"),
    ("barges and ARGV[10] ~= '' or", "barges and ARGV[11] ~= '' or"),
    # what most releases find is found more slowly below, too
    ("'00' and not marked", "'00' and marked"),
    ("'00' and not marked", "'00' and not true"),
    ("quick and holder == id and redis.call('EXISTS', queue) == 0", "false"),
    ("quick and holder == id and redis.call('EXISTS', queue)", "quick and holder == id and redis.call('EXISTS', hold)"),
    (
        "if quick and holder == id and redis.call('EXISTS', queue) == 0 then return {redis.call('DEL', hold), f} end",
        "",
    ),
    # to look at a hold that is there does no harm
    ("if not holder then redis.call('GET', hold)", "if true then redis.call('GET', hold)"),
    # of what is read the first alone is used
    ("'ZRANGE', queue, 0, 0)[1]", "'ZRANGE', queue, 0, 1)[1]"),
    ("'ZRANGE', queue, 0, 0)[1]", "'ZRANGE', queue, 0, -1)[1]"),
    # a ticket has all of its words or none
    ("heard = fresh and", "heard = ends and"),
    # these servers write a whole number out; Lua's own formats would not, and others may use them
    ("string.format('%.0f', f)", "f"),
    ("string.format('%.0f', order)", "order"),
    ("string.format('%.0f', order)", "string.format('%.3f', order)"),
}


@pytest.mark.timeout(180)
def test_each_line_of_the_script_is_needed(stage: Stage) -> None:
    """No change to it goes unnoticed, but for those that change nothing."""
    jury = jury_of(stage)
    assert not jury.kills(MUTEX.script)
    assert survivors(jury, MUTEX.script, EQUIVALENT, each=10) == []
