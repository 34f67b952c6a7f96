"""Each line of mutex.lua is needed: without it, or with it turned, a history or a server without memory tells.

The mutants are made from the script's text. Which ones cannot be told apart stands in EQUIVALENT, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis

from asynclock._op import Kind, Op, Verb
from asynclock.locks.mutex import MUTEX, Mutex
from tests.agreement import AT, IDS, KEYS, NAME, Step, Still, command_of
from tests.servers import Servers
from tests.test_agreement import corpus

SCRIPT = MUTEX.script


class Mutant(Mutex):
    """The mutex under another script."""

    def __init__(self, script: str) -> None:
        self.script = script


# -- without memory ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cli() -> Iterator[redis.Redis]:
    """A server of this module's own."""
    pool = Servers()
    with pool.start().cli() as cli:
        yield cli
    pool.stop()


class Full:
    """A server without memory: from the first op on, no command that may need some is let through."""

    def __init__(self, cli: redis.Redis, kind: Kind) -> None:
        self.cli = cli
        self.kind = kind
        cli.flushall()

    def ask(self, verb: Verb, fence: int = 0, rest: float = 0.0, tombstone: bool = False) -> list[object]:
        """The first id asks."""
        op = Op(verb, self.kind, NAME, IDS[0], 20.0, fence, 60.0, rest, tombstone=tombstone)
        self.cli.config_set("maxmemory", 1)
        try:
            reply: list[object] = self.cli.execute_command(*command_of(op))  # type: ignore[no-untyped-call]
        finally:
            self.cli.config_set("maxmemory", 0)
        return reply

    def holds(self, fence: int = 5) -> None:
        """Before: the first id holds for 10 s, F is kept for 10 s."""
        self.cli.set(AT.hold, IDS[0], px=10_000)
        self.cli.set(AT.fence, fence, px=10_000)

    def left(self, key: str) -> float:
        """Seconds that it has left, rounded up to ten: 10 before, 20 and 60 once renewed; negative: none, or no end."""
        ms: int = self.cli.pttl(key)
        return -(-ms // 10_000) * 10


def full_acquire_leaves_nothing(full: Full) -> None:
    """An acquire fails whole."""
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        full.ask(Verb.ACQUIRE, fence=7)
    assert not full.cli.exists(*KEYS)


def full_acquire_of_own_id_is_answered(full: Full) -> None:
    """An id that holds already needs no memory, and moves its end."""
    full.holds()
    assert full.ask(Verb.ACQUIRE, fence=7) == [1, 5]
    assert full.left(AT.hold) == 20


def full_extend_goes_on(full: Full) -> None:
    """The lease is prolonged; the answer owns up that F could not be raised."""
    full.holds(fence=5)
    assert full.ask(Verb.EXTEND, fence=7) == [1, 5]
    assert full.left(AT.hold) == 20
    assert full.cli.get(AT.fence) == b"5"


def full_extend_renews_an_equal_fence(full: Full) -> None:
    """In steady state F is the token, and its memory goes on without a write."""
    full.holds(fence=7)
    assert full.ask(Verb.EXTEND, fence=7) == [1, 7]
    assert full.left(AT.fence) == 60


def full_release_frees(full: Full) -> None:
    """The name is free, though neither F nor a tombstone could be written."""
    full.holds(fence=5)
    assert full.ask(Verb.RELEASE, fence=7, tombstone=True) == [1, 5]
    assert not full.cli.exists(AT.hold)


def full_release_of_nothing_is_answered(full: Full) -> None:
    """Nor does an undo of what never came fail."""
    assert full.ask(Verb.RELEASE, tombstone=True) == [0, -2, b""]


def full_release_rests(full: Full) -> None:
    """A name that shall rest does, under the id it had."""
    full.holds()
    assert full.ask(Verb.RELEASE, rest=30.0) == [1, 5]
    assert full.left(AT.hold) == 30
    assert full.cli.get(AT.hold) == IDS[0].encode()


FULL: list[Callable[[Full], None]] = [
    full_acquire_leaves_nothing,
    full_acquire_of_own_id_is_answered,
    full_extend_goes_on,
    full_extend_renews_an_equal_fence,
    full_release_frees,
    full_release_of_nothing_is_answered,
    full_release_rests,
]


def tells_wrong_type(cli: redis.Redis, kind: Kind) -> None:
    """A name that is in use as a list is no lock: nobody is told that he has it."""
    cli.flushall()
    cli.lpush(AT.hold, "somebody's")
    op = Op(Verb.ACQUIRE, kind, NAME, IDS[0], 20.0, 7, 60.0)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        cli.execute_command(*command_of(op))  # type: ignore[no-untyped-call]
    assert cli.lrange(AT.hold, 0, -1) == [b"somebody's"]


def test_c14_wrong_type(cli: redis.Redis) -> None:
    """The name is in use as another type."""
    tells_wrong_type(cli, MUTEX)


@pytest.mark.parametrize("promise", FULL, ids=lambda promise: promise.__name__)
def test_c15_without_memory(cli: redis.Redis, promise: Callable[[Full], None]) -> None:
    """Out of memory, release and extend work and acquire leaves nothing."""
    promise(Full(cli, MUTEX))


# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Change:
    """One line, turned."""

    number: int
    line: str
    into: str

    def __str__(self) -> str:
        return f"{self.line.strip()}  ->  {self.into.strip() or '(gone)'}"

    def among(self, pairs: set[tuple[str, str]]) -> bool:
        """Whether it is one of these: a part of the line, and what stands there instead."""
        return any(part in self.line and self.line.replace(part, instead, 1) == self.into for part, instead in pairs)

    def script(self) -> str:
        lines = SCRIPT.splitlines()
        lines[self.number - 1] = self.into
        return "\n".join(lines)


SWAPS = {
    r"<(?!=)": "<=",
    r"(?<![~=])>=": ">",
    r"==": "~=",
    r"~=": "==",
    r"redis\.pcall": "redis.call",
    r"\.err\b": ".ok",
    r"math\.min": "math.max",
    r"math\.max": "math.min",
    r"f \+ 1\b": "f",
    r"now - 10000000": "now",
    r"now \+ 10000000": "now",
    r"string\.format\('%.0f', f\)": "f",
    r"\bnot ": "",
    r" or 0\b": "",
    r" or ''": "",
    r"\{1, f\}": "{1, 0}",
    r"\bor\b": "and",
    r"\band\b": "or",
    r"'PTTL', hold": "'PTTL', fence",
    r"'(PEXPIRE|SET|DEL|GET)', hold": r"'\1', fence",
    r"'(PEXPIRE|SET|GET)', fence": r"'\1', undone",
    r"'SET', undone": "'SET', hold",
}
CONDITION = re.compile(r"\b((?:else)?if) (.+) then\b")


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
    operator, argument or key."""
    yield ""
    if condition := CONDITION.search(code):
        for instead in ("true", "false", *without_a_clause(condition[2])):
            yield code[: condition.start(2)] + instead + code[condition.end(2) :]
    for pattern, instead in SWAPS.items():
        for found in re.finditer(pattern, code):
            yield code[: found.start()] + found.expand(instead) + code[found.end() :]
    for found in re.finditer(r"(ARGV|KEYS)\[(\d)\]", code):
        another = int(found[2]) % (7 if found[1] == "ARGV" else 3) + 1
        yield code[: found.start()] + f"{found[1]}[{another}]" + code[found.end() :]


def changes() -> list[Change]:
    """Each mutant once."""
    lines = list(code_lines())
    return sorted({Change(number, code, into) for number, code in lines for into in turned(code) if into != code})


def kills(cli: redis.Redis, kind: Kind, histories: list[list[Step]]) -> bool:
    """Whether anything tells this script from the rule."""
    try:
        for promise in FULL:
            promise(Full(cli, kind))
        tells_wrong_type(cli, kind)
        for steps in histories:
            Still(cli, kind).play(steps)
    except (AssertionError, TypeError, redis.ResponseError, pytest.fail.Exception):
        return True
    return False


EQUIVALENT = {
    # the end of a key is set to what it is
    ("redis.call('PTTL', hold) < lease", "redis.call('PTTL', hold) <= lease"),
    # SET refuses an end of 0 ms, and PEXPIRE then deletes; DEL says it, and costs less
    ("elseif ARGV[6] == '0' then", "elseif false then"),
    # these servers write a whole number out; Lua's own formats would not, and others may use them
    ("string.format('%.0f', f)", "f"),
}


def test_each_line_of_the_script_is_needed(cli: redis.Redis) -> None:
    """No change to it goes unnoticed, but for those that change nothing."""
    histories = corpus(250)
    assert not kills(cli, MUTEX, histories)
    survivors = [each for each in changes() if not kills(cli, Mutant(each.script()), histories)]
    assert [str(each) for each in survivors if not each.among(EQUIVALENT)] == []
    for pair in EQUIVALENT:
        assert any(each.among({pair}) for each in survivors), f"no such change, or it is noticed: {pair}"
