"""Each line of the mutex script is needed: without it, or with a change in it, a history or an odd server fails.

EQUIVALENT has the changes that cannot be noticed, with the reasons.
`make mutants` tries every change; else some of them are tried.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.agreement import Still
from tests.support.directed import DIRECTED
from tests.support.directed_operators import OPERATORS
from tests.support.histories import STILL, Step
from tests.support.mutants import ALL, Jury, Member, survivors
from tests.support.odd_servers import FOREIGN, FULL, Odd
from tests.support.stage import Stage

SCRIPT = SCRIPTS[""]


def corpus(size: int) -> list[list[Step]]:
    """The named histories, and so many random ones, always the same."""
    found = [*DIRECTED.values(), *OPERATORS.values()]

    @settings(
        max_examples=size,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(steps=STILL)
    def collect(steps: list[Step]) -> None:
        found.append(steps)

    collect()
    return found


@pytest.mark.parametrize("promise", FOREIGN, ids=lambda promise: promise.__name__)
def test_c14_keys_of_other_programs(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Keys of other types, and tickets that no client of this library leaves."""
    promise(Odd(stage, MUTEX))


@pytest.mark.parametrize("promise", FULL, ids=lambda promise: promise.__name__)
def test_c15_without_memory(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Out of memory, release and extend work and acquire leaves nothing."""
    promise(Odd(stage, MUTEX))


def jury_of(stage: Stage) -> Jury:
    def history(steps: list[Step]) -> Member:
        return lambda script: Still(stage, MUTEX, {SCRIPT: script}).play(steps)

    def promise(kept: Callable[[Odd], None]) -> Member:
        return lambda script: kept(Odd(stage, MUTEX, {SCRIPT: script}))

    return Jury([*map(history, corpus(150)), *map(promise, (*FOREIGN, *FULL))])


EQUIVALENT = {
    # the end of a key is set to what it is
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    ("redis.call('PTTL', queue) < lease", "redis.call('PTTL', queue) <= lease"),
    # two marks of `once` that end at the same time
    ("left > tonumber(rest)", "left >= tonumber(rest)"),
    # an acquire brings no tombstone
    ("if verb == 'release' and ARGV[7] == '1' then", "if  ARGV[7] == '1'  then"),
    # any write serves as the first one
    ("'ZREM', queue, id)", "'ZREM', queue, waiter)"),
    # of a ticket that is lost, that it is not fresh is enough
    ("'0 0', '(%S+) (%S+)'", "'0 1', '(%S+) (%S+)'"),
    # the end of a rest in the last ms of it
    ("return left > 0 and", "return left > 1 and"),
    ("string.format('%.0f', left)", "left"),
    ("string.format('%.0f', left)", "string.format('%s', left)"),
    # a waiter for a mutex that was woken finds it free
    ("local index = unserved", "local index = 0"),
    ("nil, 0, nil, 0", "nil, 1, nil, 0"),
    # the first one that would be woken is enough
    ("          return no(0)", ""),
    ("queue, place, place)[1]", "queue, place, -1)[1]"),
    ("queue, unserved, unserved)[1]", "queue, unserved, -1)[1]"),
    # of a mutex that is released without a rest no place rests
    ("(held or place == 0", "(adopted or place == 0"),
    # a key with 0 ms left has expired
    ("left < 0", "left <= 0"),
    ("left < 0", "left < 1"),
    # where no queue is, nothing is found in it; not to look is quicker
    ("or id, false", "or id, true"),
    ("if waited then", "if true then"),
    ("barges and ARGV[10] ~= '' or", "barges and ARGV[10] == '' or"),
    ("barges and ARGV[10] ~= '' or", "barges and ARGV[11] ~= '' or"),
    ("barges and ARGV[10] ~= '' or", "barges or ARGV[10] ~= '' or"),
    # what most releases find is found more slowly below, too
    ("release' and not marked", "release' and marked"),
    ("release' and not marked", "release' and not true"),
    (
        "held and verb == 'release' and not marked and ARGV[6] .. ARGV[7] .. ARGV[11] == '00'",
        " held  and  verb == 'release'  and  ARGV[6] .. ARGV[7] .. ARGV[11] == '00' ",
    ),
    ("held and verb == 'release' and not marked and ARGV[6] .. ARGV[7] .. ARGV[11] == '00'", "false"),
    ("quick and redis.call('EXISTS', queue) == 0", "false"),
    ("quick and redis.call('EXISTS', queue)", "quick and redis.call('EXISTS', hold)"),
    ("if quick and redis.call('EXISTS', queue) == 0 then return {redis.call('DEL', hold), f} end", ""),
    # so is a refusal, and a function that is not called may be defined
    ("verb == 'acquire' and not admits(id)", "false"),
    ("return not holder", "return not false"),
    ("if number then", "if true then"),
    ("if number then", "if 0 then"),
    # more than no client received it
    ("received, polled = 1", "received, polled = 2"),
    # it is the holder that releases, and a mutex has no other
    ("admits(id)", "admits(waiter)"),
    ("leave(id, rest)", "leave(waiter, rest)"),
    ("leave(head)", "leave(id)"),
    # nobody is served while the name rests
    ("      serving = '0'", ""),
    ("serving = '0'", "serving = '1'"),
    # of what is read the first alone is used
    ("'ZRANGE', queue, index, index)[1]", "'ZRANGE', queue, index, -1)[1]"),
    # a break and a peek have no ticket, and all tickets after the 64th are left out in any case
    ("id ~= ''", "waiter ~= ''"),
    ("'ZRANGE', queue, 0, 63)", "'ZRANGE', queue, 0, -1)"),
    # a name that rests begins with a character that counts as a digit
    ("'^~', '0'", "'^~', '1'"),
    # of a ticket that is lost, that it is not fresh is enough
    ("'0 0', '%S+", "'0 1', '%S+"),
    ("'0 0 0 0'", "'0 0 0 1'"),
    ("'0 0 0 0'", "'0 0 1 0'"),
    ("'0 0 0 0'", "'0 1 0 0'"),
    # these servers write a whole number out; Lua's own formats would not, and others may use them
    ("string.format('%.0f', f)", "f"),
    ("string.format('%.0f', order)", "order"),
    ("string.format('%.0f', order)", "string.format('%.3f', order)"),
}


SHARED = (
    "for _, each in ipairs(shared and redis.call('ZRANGE', hold",
    "if admits(each) then",
    "woken, last = woken + 1, each",
    "elseif not passes or not passes(each) then",
    "for _ = 1, serving ~= '0' and (shared or",
    "shared and served >= 56",
    "local polled, served",
    "served = served + 1",
    "if served == 64",
    "not (shared and redis.call('ZSCORE', hold, head))",
    "if not admits(head) then",
    "if not passes or not passes(head) then break end",
    "place, blocked = place + 1, true",
    "if unserved == place then",
    "woken, last, place = woken + 1, head, place + 1",
    "elseif not blocked then",
    "local comes = wakes",
    "elseif comes then",
    "received = 1",
    "if shared and not comes then",
    "turn = not reply and admits(id)",
    "if not shared and holder and not marked",
    "received > 0 and not shared",
    "return no(number and redis.call('ZRANK', queue, waiter) or -1, turn)",
)
"""Of kinds that several ids can hold: parts of lines, judged in test_shared_mutants.py."""


@pytest.mark.timeout(3600 if ALL else 180)
def test_each_line_of_the_script_is_needed(stage: Stage) -> None:
    """Every change is noticed, but for those in EQUIVALENT."""
    jury = jury_of(stage)
    jury.check(SCRIPT)
    assert survivors(jury, SCRIPT, EQUIVALENT, each=120, others=SHARED) == []
