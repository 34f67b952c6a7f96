"""Each line of mutex.lua is needed: without it, or with it turned, a history or an odd server tells.

The mutants are made from the script's text. Which ones cannot be told apart stands in EQUIVALENT, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis

from asynclock._op import Kind
from asynclock.locks.mutex import MUTEX, Mutex
from tests.agreement import Still
from tests.directed import corpus
from tests.histories import Step
from tests.odd_servers import FOREIGN, FULL, Odd
from tests.stage import Stage, staged

SCRIPT = MUTEX.script


class Mutant(Mutex):
    """The mutex under another script."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A server of this module's own."""
    with staged() as stage:
        yield stage


@pytest.mark.parametrize("promise", FOREIGN, ids=lambda promise: promise.__name__)
def test_c14_what_others_left(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Keys of other types, and tickets that no client of ours leaves."""
    promise(Odd(stage, MUTEX))


@pytest.mark.parametrize("promise", FULL, ids=lambda promise: promise.__name__)
def test_c15_without_memory(stage: Stage, promise: Callable[[Odd], None]) -> None:
    """Out of memory, release and extend work and acquire leaves nothing."""
    promise(Odd(stage, MUTEX))


# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Change:
    """One line, turned."""

    number: int
    line: str
    into: str

    def __str__(self) -> str:
        return f"{self.number}: {self.line.strip()}  ->  {self.into.strip() or '(gone)'}"

    def among(self, pairs: set[tuple[str, str]]) -> bool:
        """Whether it is one of these: a part of the line, and what stands there instead."""
        return any(part in self.line and self.line.replace(part, instead, 1) == self.into for part, instead in pairs)

    def script(self) -> str:
        lines = SCRIPT.splitlines()
        lines[self.number - 1] = self.into
        return "\n".join(lines)


SWAPS = {
    # operators
    r"<(?!=)": "<=",
    r"<=": "<",
    r"(?<![~=<>])>(?!=)": ">=",
    r"==": "~=",
    r"~=": "==",
    r"\bnot ": "",
    r"\bor\b": "and",
    r"\band\b": "or",
    r" or [\w']+( \w+ \w+ \w+')?": "",
    r" \+ [1\w]+\b": "",
    r" - [1\w]+\b": "",
    r" \+ \(\w+ - 1\)": "",
    r"math\.min": "math.max",
    r"math\.max": "math.min",
    r"'[^' ]*' \.\. ": "",
    r"string\.sub\(([^,]+), [^,]+, [^,]+\)": r"\1",
    # values
    r"\btrue\b": "false",
    r"\bfalse\b": "true",
    r"(?<![\w'.%\[])-1\b": "0",
    r"(?<![\w'.%\[-])0\b": "1",
    r"(?<![\w'.%\[-])1\b": "2",
    r"\b64\b": "63",
    r"\b32\b": "33",
    r"\b12\b": "13",
    r"\b33\b": "32",
    r"\b1000\b": "1001",
    r"'0'": "'1'",
    r"'1'": "'0'",
    r"'%\.0f', (\w+)\)": r"'%s', \1)",
    r"string\.format\('%\.0f', (\w+)\)": r"\1",
    r"\(%S\+\) \(%S\+\)'": "(%S+)'",
    # commands
    r"redis\.pcall": "redis.call",
    r"\.err\b": ".ok",
    r", 'NX'": "",
    r", 'KEEPTTL'": "",
    r"'PTTL', hold": "'PTTL', fence",
    r"'PTTL', queue": "'PTTL', hold",
    r"'(PEXPIRE|SET|DEL|GET)', hold": r"'\1', fence",
    r"'(PEXPIRE|SET|GET)', fence": r"'\1', undone",
    r"'SET', undone": "'SET', hold",
    r"\bserve\(waiter\)": "serve()",
    # names
    r"\bwaiter\b": "id",
    r"\bid\b": "waiter",
    r"\bus\b": "now",
    r"\bnow\b": "us",
    r"\bwants\b": "span",
    r"\bfresh\b": "ends",
    r"\bends\b": "fresh",
    r"\btop\b": "us",
    r"\bnumber\b": "0",
    r"\bf\b": "0",
    r"\blease\b": "1",
    r"\bspan\b": "1",
    r"\bmarked\b": "true",
    r"\border\b": "0",
}
CONDITION = re.compile(r"\b((?:else)?if|enter =|rank =) (.+?)(?: then\b|$)")


def code_lines() -> Iterator[tuple[int, str]]:
    """Numbers from 1, without comments and blank lines."""
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        code = line.partition("--")[0].rstrip()
        if code:
            yield number, code


def without_a_clause(condition: str) -> Iterator[str]:
    """`a and b` as `b` and as `a`."""
    clauses = re.split(r" (and|or) ", condition)
    if len(clauses) > 1:
        yield "".join(f" {part} " for part in clauses[2:])
    for i in range(1, len(clauses), 2):
        yield "".join(f" {part} " for part in clauses[:i] + clauses[i + 2 :])


def turned(code: str) -> Iterator[str]:
    """All that is tried on a line: out with it; its condition always, never, or without one of its clauses; another
    operator, value, name, argument or key."""
    yield ""
    if condition := CONDITION.search(code):
        for instead in ("true", "false", *without_a_clause(condition[2])):
            yield code[: condition.start(2)] + instead + code[condition.end(2) :]
    for pattern, instead in SWAPS.items():
        for found in re.finditer(pattern, code):
            yield code[: found.start()] + found.expand(instead) + code[found.end() :]
    for found in re.finditer(r"(ARGV|KEYS)\[(\d+)\]", code):
        another = int(found[2]) % (14 if found[1] == "ARGV" else 5) + 1
        yield code[: found.start()] + f"{found[1]}[{another}]" + code[found.end() :]


def changes() -> list[Change]:
    """Each mutant once."""
    lines = list(code_lines())
    return sorted({Change(number, code, into) for number, code in lines for into in turned(code) if into != code})


class Jury:
    """All that may tell a script from the rule. Who told the last one apart is asked first about the next: it is
    mostly of the same line."""

    def __init__(self, stage: Stage, size: int) -> None:
        def history(steps: list[Step]) -> Callable[[Kind], None]:
            return lambda kind: Still(stage, kind).play(steps)

        def promise(kept: Callable[[Odd], None]) -> Callable[[Kind], None]:
            return lambda kind: kept(Odd(stage, kind))

        self._members = [*map(history, corpus(size)), *map(promise, (*FOREIGN, *FULL))]

    def kills(self, kind: Kind) -> bool:
        """Whether anything tells this script from the rule."""
        for i, member in enumerate(self._members):
            try:
                member(kind)
            except (AssertionError, AttributeError, TypeError, ValueError, redis.ResponseError, pytest.fail.Exception):
                self._members.insert(0, self._members.pop(i))
                return True
        return False


EQUIVALENT = {
    # the end of a key is set to what it is
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    ("redis.call('PTTL', queue) < lease", "redis.call('PTTL', queue) <= lease"),
    # where no queue is, nothing is found in it; not to look is quicker
    ("or id, false, verb", "or id, true, verb"),
    ("if waited then", "if true then"),
    # what most releases find is found more slowly below, too
    ("'00' and not marked", "'00' and marked"),
    ("'00' and not marked", "'00' and not true"),
    ("quick and holder == id and redis.call('EXISTS', queue) == 0", "false"),
    (
        "if quick and holder == id and redis.call('EXISTS', queue) == 0 then return {redis.call('DEL', hold), f} end",
        "",
    ),
    # to look at a hold that is there does no harm
    ("if not holder then redis.call('GET', hold)", "if true then redis.call('GET', hold)"),
    # of what is read the first alone is used
    ("'ZRANGE', queue, 0, 0)[1]", "'ZRANGE', queue, 0, 1)[1]"),
    # a ticket has all of its words or none
    ("if not fresh or", "if not ends or"),
    # nil is no better than false
    ("    return false", ""),
    # these servers write a whole number out; Lua's own formats would not, and others may use them
    ("string.format('%.0f', f)", "f"),
    ("string.format('%.0f', top)", "top"),
    ("string.format('%.0f', order)", "order"),
}


def test_each_line_of_the_script_is_needed(stage: Stage) -> None:
    """No change to it goes unnoticed, but for those that change nothing."""
    jury = Jury(stage, 150)
    assert not jury.kills(MUTEX)
    survivors = [each for each in changes() if not jury.kills(Mutant(each.script()))]
    assert [str(each) for each in survivors if not each.among(EQUIVALENT)] == []
    for pair in EQUIVALENT:
        assert any(each.among({pair}) for each in survivors), f"no such change, or it is noticed: {pair}"
