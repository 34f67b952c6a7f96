"""Scripts with one line changed, for a jury that must distinguish each of them from the rule."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pytest
import redis

ALL = os.environ.get("ASYNCLOCK_MUTANTS") == "all"
"""Whether every change is tried; else some of each line are, always the same."""

SWAPS = [
    # operators
    (r"<(?!=)", "<="),
    (r"<=", "<"),
    (r"(?<![~=<>])>(?!=)", ">="),
    (r"==", "~="),
    (r"~=", "=="),
    (r"\bnot ", ""),
    (r"\bor\b", "and"),
    (r"\band\b", "or"),
    (r" or [\w']+( \w+ \w+ \w+')?", ""),
    (r" \+ [1\w]+\b", ""),
    (r" - [1\w]+\b", ""),
    (r" \+ \(\w+ - 1\)", ""),
    (r"math\.min", "math.max"),
    (r"math\.max", "math.min"),
    (r"'[^' ]*' \.\. ", ""),
    (r"string\.sub\(([^,]+), [^,]+, [^,]+\)", r"\1"),
    # values
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"(?<![\w'.%\[])-1\b", "0"),
    (r"(?<![\w'.%\[-])0\b", "1"),
    (r"(?<![\w'.%\[-])1\b", "2"),
    (r"\b64\b", "63"),
    (r"\b32\b", "33"),
    (r"\b12\b", "13"),
    (r"\b33\b", "32"),
    (r"\b1000\b", "1001"),
    (r"'0'", "'1'"),
    (r"'1'", "'0'"),
    (r"'%\.0f', (\w+)\)", r"'%s', \1)"),
    (r"string\.format\('%\.0f', (\w+)\)", r"\1"),
    (r"\(%S\+\) \(%S\+\)'", "(%S+)'"),
    # commands
    (r"redis\.pcall", "redis.call"),
    (r"\.err\b", ".ok"),
    (r", 'NX'", ""),
    (r", 'KEEPTTL'", ""),
    (r"'PTTL', hold", "'PTTL', fence"),
    (r"'PTTL', queue", "'PTTL', hold"),
    (r"'(PEXPIRE|SET|DEL|GET)', hold", r"'\1', fence"),
    (r"'(PEXPIRE|SET|GET)', fence", r"'\1', undone"),
    (r"'SET', undone", "'SET', hold"),
    # names
    (r"\bwaiter\b", "id"),
    (r"\bid\b", "waiter"),
    (r"\bus\b", "now"),
    (r"\bnow\b", "us"),
    (r"\bwants\b", "span"),
    (r"\bfresh\b", "ends"),
    (r"\bends\b", "fresh"),
    (r"\btop\b", "us"),
    (r"\bnumber\b", "0"),
    (r"\bf\b", "0"),
    (r"\blease\b", "1"),
    (r"\bspan\b", "1"),
    (r"\bmarked\b", "true"),
    (r"\bheld\b", "true"),
    (r"\bholder\b", "false"),
    (r"\bshared\b", "true"),
    (r"\bshared\b", "false"),
    (r"\breply\b", "false"),
    (r"\bwakes\b", "true"),
    (r"\bwakes\b", "false"),
    (r"\bturn\b", "true"),
    (r"\bturn\b", "false"),
    (r"\brest\b", "'1'"),
    (r"\btoken\b", "'0'"),
    (r"\bserving\b", "'2'"),
    (r"\bfound\b", "{}"),
    (r"\border\b", "0"),
    # of shared kinds
    (r"'ZRANGE', hold, 0, 0", "'ZRANGE', hold, -1, -1"),
    (r"'ZRANGE', hold, -1, -1", "'ZRANGE', hold, 0, 0"),
    (r"'ZRANGE', queue, (\w+), \w+", r"'ZRANGE', queue, \1, -1"),
    (r"'(ZREM|ZADD|ZSCORE|ZCARD|ZRANGE)', hold", r"'\1', queue"),
    (r"'(ZREM|ZADD|ZRANK|EXISTS|PEXPIRE)', queue", r"'\1', hold"),
    (r"'EXISTS', undone", "'EXISTS', fence"),
    (r"'\[rw\]'", "'[r]'"),
    (r"'([rsw])'", "'x'"),
    (r"'rr'", "'rw'"),
    (r"\b34\b", "33"),
    (r"\bhead\b", "id"),
    (r"\bwho\b", "id"),
    (r"\bheld\b", "adopted"),
    (r"\badopted\b", "held"),
    (r"\bwoken\b", "0"),
    (r"\bwoken\b", "1"),
    (r"\blast\b", "nil"),
    (r"\bslot\b", "permits"),
    (r"\bn\b", "1"),
    (r"\bcount\b", "1"),
    (r"\bfences\b", "1"),
    (r"\bticket\b", "''"),
    (r"\btop\b", "0"),
    (r"\bmode\b", "''"),
    (r"\brank\b", "0"),
    (r"\bpcall\((kinds[^,]+), ", r"true, \1("),
    (r"'%.0f', ", "'%.3f', "),
]
CONDITION = re.compile(r"\b((?:else)?if|enter =|turn =|quick =|reply =|rank =) (.+?)(?: then\b|$)")


@dataclass(frozen=True, order=True)
class Change:
    """One line of a script, changed."""

    number: int
    line: str
    into: str

    def __str__(self) -> str:
        return f"{self.number}: {self.line.strip()}  ->  {self.into.strip() or '(gone)'}"

    def among(self, pairs: Collection[tuple[str, str]]) -> bool:
        """Whether it is one of these: a part of the line, and its replacement."""
        return any(part in self.line and self.into in _replaced(self.line, part, instead) for part, instead in pairs)

    def script(self, whole: str) -> str:
        lines = whole.splitlines()
        lines[self.number - 1] = self.into
        return "\n".join(lines)


def _replaced(line: str, part: str, instead: str) -> Iterator[str]:
    """With that part replaced, at each place."""
    for found in re.finditer(re.escape(part), line):
        yield line[: found.start()] + instead + line[found.end() :]


def changes(script: str) -> list[Change]:
    """Each mutant once."""
    lines = [(number, line.partition("--")[0].rstrip()) for number, line in enumerate(script.splitlines(), 1)]
    found = {Change(number, code, into) for number, code in lines if code for into in turned(code)}
    return sorted(each for each in found if each.into != each.line)


def without_a_clause(condition: str) -> Iterator[str]:
    """`a and b` as `b` and as `a`."""
    clauses = re.split(r" (and|or) ", condition)
    if len(clauses) > 1:
        yield "".join(f" {part} " for part in clauses[2:])
    for i in range(1, len(clauses), 2):
        yield "".join(f" {part} " for part in clauses[:i] + clauses[i + 2 :])


def turned(code: str) -> Iterator[str]:
    """All changes of a line: deleted; its condition always true, never, or without one of its clauses; another
    operator, value, name, argument or key."""
    yield ""
    if condition := CONDITION.search(code):
        for instead in ("true", "false", *without_a_clause(condition[2])):
            yield code[: condition.start(2)] + instead + code[condition.end(2) :]
    for pattern, instead in SWAPS:
        for found in re.finditer(pattern, code):
            yield code[: found.start()] + found.expand(instead) + code[found.end() :]
    for found in re.finditer(r"(ARGV|KEYS)\[(\d+)\]", code):
        another = int(found[2]) % (14 if found[1] == "ARGV" else 5) + 1
        yield code[: found.start()] + f"{found[1]}[{another}]" + code[found.end() :]


KILLED = (
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    *(redis.ResponseError, pytest.fail.Exception),
)

Member = Callable[[str], None]
"""Plays something with this text in place of the script; raises one of KILLED if they differ."""


class Jury:
    """All checks that may distinguish a script from the rule. The check that noticed the last change is asked first
    about the next one, which is mostly of the same line."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    def check(self, script: str) -> None:
        """Raise one of KILLED if any check distinguishes it from the rule."""
        for member in self._members:
            member(script)

    def kills(self, script: str) -> bool:
        """Whether any check distinguishes it from the rule."""
        for i, member in enumerate(self._members):
            try:
                member(script)
            except KILLED:
                self._members.insert(0, self._members.pop(i))
                return True
        return False


def survivors(
    jury: Jury, script: str, equivalent: Collection[tuple[str, str]], each: int, others: Collection[str] = ()
) -> list[str]:
    """The changes of the script that the jury did not notice, but for those that change nothing; if not ALL, one in
    `each` is tried. With ALL, also changes that were noticed though they are listed as changing nothing. A line that
    has one of `others` in it is shared text for kinds of another sort: their jury notices its changes."""
    found = [one for one in changes(script) if not one.among(equivalent) or ALL]
    unnoticed = [one for one in (found if ALL else found[::each]) if not jury.kills(one.script(script))]
    mine = [one for one in unnoticed if not any(part in one.line for part in others)]
    if not ALL:
        return [str(one) for one in mine]
    needless = [pair for pair in equivalent if not any(one.among({pair}) for one in mine)]
    spare = [part for part in others if not any(part in one.line for one in unnoticed)]
    kept = [str(one) for one in mine if not one.among(equivalent)]
    return kept + [f"noticed: {pair}" for pair in needless] + [f"noticed all of: {part}" for part in spare]
