"""Each line of the scripts of shared kinds and of several names is needed: without it, or with it changed, a history or
an odd server tells.

`make mutants` tries every change; else some of each script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from asynclock.stores.redis.scripts import SCRIPTS as JOINED
from asynclock.stores.redis.scripts import read
from tests.support.mutants import ALL, Jury, Member, survivors
from tests.support.shared_agreement import Ensemble
from tests.support.shared_directed import corpus
from tests.support.shared_histories import Step, World
from tests.support.shared_servers import WHERE, Odd, Promise, odd
from tests.support.stage import Stage

SCRIPTS = {"read-write": JOINED["r"], "semaphore": JOINED["s"], "multi": read("multi")}


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
        return {JOINED["multi"]: JOINED["multi"].removesuffix(SCRIPTS["multi"]) + script}
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
    ("string.format('%.0f', now + lease)", "string.format('%.3f', now + lease)"),
}
SHARED = NUMBERS | {
    # a break has no ticket
    ("id ~= ''", "waiter ~= ''"),
    ("'ZRANGE', queue, index, index)[1]", "'ZRANGE', queue, index, -1)[1]"),
    # any write serves as the first one
    ("'ZREM', queue, id)", "'ZREM', hold, id)"),
    # of a ticket that is lost, that it is not fresh is enough
    ("'0 0', '(%S+) (%S+)'", "'0 1', '(%S+) (%S+)'"),
    ("'0 0', '%S+", "'0 1', '%S+"),
    # all tickets after the 64th are left out in any case
    ("'ZRANGE', queue, 0, 63)", "'ZRANGE', queue, 0, -1)"),
    # a round serves, so it finds below that nobody waits
    ("string.sub(ARGV[8], 1, 1) == '0' or redis.call('EXISTS', queue) == 0", " string.sub(ARGV[8], 1, 1) == '0' "),
    # a later command finds the wrong type, too
    ("  return first", ""),
    ("redis.pcall('ZRANGE', hold, 0, 0)", "redis.pcall('ZRANGE', hold, -1, -1)"),
    ("redis.pcall('ZRANGE', hold, 0, 0)", "redis.pcall('ZRANGE', hold, 0, 1)"),
    # an attempt that holds has returned before
    ("if number and held and verb == 'release' then", "if  number  and  held  then"),
    # of a mutex alone the value says that it rests
    ("if made or rests or id", "if made or id"),
    ("if made or rests or id ~= '' then", "if  made  or  id ~= ''  then"),
    # a name that rests begins with a character that counts as a digit
    ("'^~', '0'", "'^~', '1'"),
    # holds of one name are of one family, and the first alone is used
    ("'ZRANGE', hold, 0, 0, 'WITHSCORES'", "'ZRANGE', hold, 0, 1, 'WITHSCORES'"),
    ("'ZRANGE', hold, 0, 0)[1]", "'ZRANGE', hold, -1, -1)[1]"),
    ("'ZRANGE', hold, 0, 0)[1]", "'ZRANGE', hold, 0, 1)[1]"),
    ("queue, place, place)[1]", "queue, place, -1)[1]"),
    ("queue, unserved, unserved)[1]", "queue, unserved, -1)[1]"),
    # no command is refused for lack of memory where another has written before
    ("redis.pcall('ZADD', hold", "redis.call('ZADD', hold"),
    # the end of a key, or of a hold, is set to what it is
    ("< ends - now then", "<= ends - now then"),
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    ("redis.call('PTTL', queue) < lease", "redis.call('PTTL', queue) <= lease"),
    ("tonumber(held) < now + lease", "tonumber(held) <= now + lease"),
    # a hold that is there ends after now
    ("lease > 0 and tonumber(held) < now + lease", " tonumber(held) < now + lease "),
    ("lease > 0", "1 > 0"),
    ("lease > 0", "lease > 1"),
    ("lease > 0", "lease >= 0"),
    ("adopted or 0", "adopted or 1"),
    # of a ticket that is lost, that it is not fresh is enough
    ("'0 0 0 0'", "'0 0 0 1'"),
    ("'0 0 0 0'", "'0 0 1 0'"),
    ("'0 0 0 0'", "'0 1 0 0'"),
    # what most releases find is found more slowly below, too; a function that is not called may be defined
    ("held and verb == 'release' and ARGV[6] .. ARGV[7] .. ARGV[11] == '00'", "false"),
    ("quick and redis.call('EXISTS', queue) == 0", "false"),
    ("quick and redis.call('EXISTS', queue)", "quick and redis.call('EXISTS', hold)"),
    ("if quick and redis.call('EXISTS', queue) == 0 then return {redis.call('ZREM', hold, id), f} end", ""),
    ("if number then", "if true then"),
    ("if number then", "if 0 then"),
    # more than no client received it, or would
    ("received, polled = 1", "received, polled = 2"),
    ("      received = 1", "      received = 2"),
    # several can hold it
    ("if shared and not comes then", "if  not comes  then"),
    ("if shared and not comes then", "if true and not comes then"),
    # a ticket that is stored twice is there once
    ("number and verb == 'release'", " number "),
    # it is the id of the release that rests
    ("string.sub(who, 2)", "string.sub(id, 2)"),
}
MUTEX = (
    "if not shared and holder and not marked",
    "redis.call('SET', hold, '+' .. holder, 'KEEPTTL')",
    "notify(holder, '0', '0', '-1')",
    "for _, each in ipairs(shared and redis.call('ZRANGE', hold",
    "local rests = each ==",
    "for _ = 1, serving ~= '0' and (shared or",
    "shared and served >= 56",
    "not (shared and redis.call('ZSCORE', hold, head))",
    "received > 0 and not shared",
)
"""Of the mutex: parts of lines, judged in test_mutants.py."""

OTHERS = {
    "read-write": (
        *MUTEX,
        "if not passes or not passes(head) then",
        "place, blocked = place + 1, true",
        "if unserved == place then",
        "elseif not blocked then",
    ),
    "semaphore": MUTEX,
    "multi": (),
}
"""What lets an op pass a ticket is judged with the semaphore."""

WOKEN = "head, place + 1"

EQUIVALENT = {
    "read-write": SHARED
    | {
        # a break has no id, and so is no reader
        ("not reply and admits(id)", " admits(id) "),
        ("not reply and admits(id)", "not false and admits(id)"),
        # an attempt has the mode of its waiter
        ("admits(id)", "admits(waiter)"),
        # how many readers are woken does not matter
        ("true, 0, 0, nil, 0", "true, 0, 1, nil, 0"),
        *(("woken + 1, each", instead) for instead in ("0 + 1, each", "1 + 1, each", "woken + 2, each", "woken, each")),
        *((f"woken + 1, {WOKEN}", f"{instead}, {WOKEN}") for instead in ("0 + 1", "1 + 1", "woken + 2", "woken")),
        # no reader and no writer passes another one
        ("not passes or not passes(each)", " not passes "),
        ("not passes or not passes(each)", "not passes or passes(each)"),
        ("not passes or not passes(each)", "true"),
    },
    "semaphore": SHARED
    | {
        # where it does not pass, it cannot enter itself
        ("elseif not passes or not passes(each) then", "elseif  not passes  then"),
        ("elseif not passes or not passes(each) then", "elseif  not passes(each)  then"),
        ("elseif not passes or not passes(each) then", "elseif false then"),
        ("elseif not passes or not passes(each) then", "elseif not passes and not passes(each) then"),
        ("          return no(0)", ""),
        ("not passes or not passes(head)", " not passes(head) "),
        # no number of permits is 0, and a ticket wants as many as its attempt
        ("wants(blocked) or 0", "wants(blocked) or 1"),
        ("wants(id) or 0", "wants(id) or 1"),
        ("wants(id)", "wants(waiter)"),
        ("permits or 0", "permits or 1"),
        # no op asks it to be fair
        ("string.sub(ARGV[8], 1, 1)", "ARGV[8]"),
        ("string.sub(ARGV[8], 1, 1)", "string.sub(ARGV[8], 1, 2)"),
        # a peek has no ticket
        ("no(admits(id) and", "no(admits(waiter) and"),
        ("0, admits(id))", "0, admits(waiter))"),
        # it is their number that counts
        ("+ 1, head", "+ 1, id"),
    },
    "multi": {
        ("string.format('%.0f', top)", "top"),
        # a fence is far greater
        ("local fences, top = {}, 0", "local fences, top = {}, 1"),
        # an answer is a table, and an error is one or a text, by the version of the server
        ("if not ran then", "if true then"),
        ("type(reply)", "type(false)"),
        ("'table' and reply", "'table' and false"),
        # a release and a look take no fences
        ("'release', id, '0', '1'", "'release', id, '0', '0'"),
        ("'release', waiter, '0', '1'", "'release', waiter, '0', '0'"),
    },
}


@pytest.mark.timeout(3600 if ALL else 180)
@pytest.mark.parametrize("family", SCRIPTS)
def test_each_line_of_the_scripts_is_needed(stage: Stage, family: str) -> None:
    """Every change is noticed, but for those in EQUIVALENT."""
    jury, others = jury_of(stage, family), OTHERS[family]
    jury.check(SCRIPTS[family])
    assert survivors(jury, SCRIPTS[family], EQUIVALENT[family], each=144, others=others) == []
