"""Histories for the oracle: steps to play on a node, what `decide` makes of them, and what a real server makes of them.

A step is told apart from the state it meets ("whoever holds it", "a token 3 above F"), so that a history shrinks and
plays on a mutant as well. Two players compare reply and full state after each step:

    Still   the server's clock stands still between steps and its TIME is ours, so that hours pass at once
    Live    its own clock and TIME, with leases of some ten ms
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hiredis
import redis

from asynclock._decide import decide
from asynclock._op import Kind, Op, Verb
from asynclock._state import ID_LENGTH, Entry, Reply, State
from asynclock.locks.mutex import MUTEX
from asynclock.stores._keys import keys
from asynclock.stores._wire import PLAIN_NO, PLAIN_YES, encode_whole

NAME = "agreed"
IDS = tuple(f"{letter * ID_LENGTH}|17|host:1|" for letter in "abc")
OWNER = -1
"""Instead of an index of IDS: whoever of them holds the name."""

NOBODY = -2
"""The empty id, under which `Lock.locked` looks."""

AT = keys("", NAME)
KEYS = (AT.hold, AT.fence, *(AT.undone + each[:ID_LENGTH] for each in IDS))


@dataclass(frozen=True)
class Ask:
    """One op. `token` is told from F (None: none); `clock` is the client's, in us ahead of the node's."""

    verb: Verb
    who: int = 0
    lease: int = 10_000
    token: int | None = None
    clock: int = 0
    memory: int = 60_000
    rest: int = 0
    plain: bool = False
    tombstone: bool = False

    def op(self, kind: Kind, state: State, now_us: int) -> Op:
        fence = now_us + self.clock if self.verb is Verb.ACQUIRE else self._token(state)
        lease, memory, rest = self.lease / 1000, self.memory / 1000, self.rest / 1000
        return Op(self.verb, kind, NAME, self._id(state), lease, fence, memory, rest, self.plain, self.tombstone)

    def _id(self, state: State) -> str:
        if self.who == OWNER:
            holder = state.holds[0].id if state.holds else ""
            return holder if holder in IDS else IDS[0]
        return "" if self.who == NOBODY else IDS[self.who]

    def _token(self, state: State) -> int:
        return 0 if self.token is None else max(1, state.fence + self.token)


@dataclass(frozen=True)
class Foreign:
    """A write by somebody else: the command, and what it makes of the state."""

    command: tuple[str, ...]
    becomes: Callable[[State, float], State] = field(repr=False)


@dataclass(frozen=True)
class Pass:
    """Time passes, in ms."""

    ms: int


Step = Ask | Foreign | Pass


def take(token: str, ms: int) -> Foreign:
    """Another Redlock library takes the name if it is free; 0 ms: for ever."""

    def becomes(state: State, now: float) -> State:
        return state if state.holds else replace(state, holds=(Entry(token, now + ms / 1000 if ms else None),))

    return Foreign(("SET", AT.hold, token, "NX", *(("PX", str(ms)) if ms else ())), becomes)


def set_fence(text: str, ms: int) -> Foreign:
    """Somebody, or an old dump, puts this into the fence key; what is no number counts as 0."""

    def becomes(state: State, now: float) -> State:
        return replace(state, fence=number(text), fence_ends=now + ms / 1000 if ms else math.inf)

    return Foreign(("SET", AT.fence, text, *(("PX", str(ms)) if ms else ())), becomes)


BREAK = Foreign(("DEL", AT.hold), lambda state, _: replace(state, holds=()))
PERSIST = Foreign(
    ("PERSIST", AT.hold), lambda state, _: replace(state, holds=tuple(Entry(each.id, None) for each in state.holds))
)
LOSE_FENCE = Foreign(("DEL", AT.fence), lambda state, _: replace(state, fence=0, fence_ends=0.0))
KEEP_FENCE = Foreign(
    ("PERSIST", AT.fence), lambda state, _: replace(state, fence_ends=math.inf) if state.fence else state
)
FLUSH = Foreign(("FLUSHALL",), lambda _, __: State())


def number(text: str) -> int:
    """What Lua's tonumber makes of a fence, of those that histories write."""
    return int(text) if re.fullmatch(r"-?\d+", text) else 0


View = dict[str, tuple[str, float]]
"""A state as its keys: value and ms left (inf: no end)."""


def view(state: State, now: float) -> View:
    """The keys that a node in `state` has."""
    found: View = {}
    for entry in state.holds:
        found[AT.hold] = entry.id, math.inf if entry.ends is None else (entry.ends - now) * 1000
    if state.fence:
        found[AT.fence] = str(state.fence), (state.fence_ends - now) * 1000
    for entry in state.undone:
        assert entry.ends is not None
        found[AT.undone + entry.id[:ID_LENGTH]] = "", (entry.ends - now) * 1000
    return found


def view_of(rows: Sequence[Any]) -> View:
    """The keys that a server has, from [value or nil, PTTL] of each; a fence that is no number is none."""
    found: View = {}
    for key, (value, left) in zip(KEYS, rows, strict=True):
        if value is not None and (key != AT.fence or number(value.decode())):
            found[key] = value.decode(), math.inf if left == -1 else left
    return found


def assert_same_view(model: View, real: View, early: float, late: float) -> None:
    """Same keys and values; what is left on the server is from `early` ms less to `late` ms more."""
    assert {key: value for key, (value, _) in real.items()} == {key: value for key, (value, _) in model.items()}
    for key, (_, left) in model.items():
        found = real[key][1]
        assert left - early <= found <= left + late, f"{key}: {found} ms left, not {left}"


def assert_same_reply(op: Op, reply: Reply, now: float, real: Any, early: float, late: float) -> None:
    """The reply on the wire is what decide says; a pttl may differ as that of a key."""
    wire = reply.wire(now)
    if op.plain:  # the server's plain SET says no more than yes or no
        wire = PLAIN_YES if wire[0] == 1 else PLAIN_NO
        real = PLAIN_NO if real is None else PLAIN_YES
    if wire[0] == 0 and wire[1] >= 0:
        assert wire[1] - early <= real[1] <= wire[1] + late, f"{op}: {real}, not {wire}"
        wire[1] = real[1]
    assert real == wire, f"{op}: {real}, not {wire}"


class Player:
    """One name on a real server, and the model's state of it. The server is emptied first."""

    def __init__(self, cli: redis.Redis, kind: Kind = MUTEX) -> None:
        self.cli = cli
        self.kind = kind
        self.state = State()
        cli.flushall()

    def play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.step(step)

    def step(self, step: Step) -> None:
        raise NotImplementedError


_FRAME = """
local frame = cjson.decode(table.remove(ARGV))
local real = redis
local function with_our_time(run)
  return function(command, ...)
    if command == 'TIME' then return frame.time end
    return run(command, ...)
  end
end
for key, left in pairs(frame.left) do
  if left > 0 then real.call('PEXPIRE', key, left) else real.call('DEL', key) end
end
local reply = (function(redis)
%s
end)({call = with_our_time(real.call), pcall = with_our_time(real.pcall)})
local after = {}
for i = frame.first, #KEYS do
  after[#after + 1] = {real.call('GET', KEYS[i]), real.call('PTTL', KEYS[i])}
  real.call('PERSIST', KEYS[i])
end
return {reply or false, after}
"""
"""One step in one script, inside which a server's clock stands still: give each key the time it has left, run the text
with our TIME, read all keys, and take their ends away, so that none passes before the next step."""

_VERBATIM = "return redis.call(unpack(ARGV))"


class Still(Player):
    """Time passes only by Pass. The ends that a step meets are those read after the one before, less what passed."""

    def __init__(self, cli: redis.Redis, kind: Kind = MUTEX) -> None:
        super().__init__(cli, kind)
        self._us = 1_700_000_000_123_457
        self._left: dict[str, int] = {}

    @property
    def now(self) -> float:
        """For decide: half a us on, so that its rounding down of a float of seconds ends at the us that TIME says."""
        return (self._us + 0.5) / 1_000_000

    def step(self, step: Step) -> None:
        if isinstance(step, Pass):
            self._us += step.ms * 1000 + 1  # the us: no end coincides with a step
            self._left = {key: left - step.ms for key, left in self._left.items()}
            return
        now, state = self.now, self.state.at(self.now)
        if isinstance(step, Foreign):
            self.state = step.becomes(state, now)
            self._run(_VERBATIM, list(step.command), [])
            return
        op = step.op(self.kind, state, self._us)
        decided = decide(self.kind, state, op, now)
        self.state = decided.state.at(now)  # a tombstone of no length has ended
        reply, early = self._run(*_script_of(op))
        assert_same_reply(op, decided, now, reply, early, 0.5)

    def _run(self, text: str, arguments: list[Any], own_keys: list[Any]) -> tuple[Any, float]:
        """Run it, compare the state, and answer the reply and what its PTTLs may lack."""
        seconds, us = divmod(self._us, 1_000_000)
        first = len(own_keys) + 1
        frame = json.dumps({"time": [str(seconds), str(us)], "left": self._left, "first": first})
        script = self.cli.register_script(_FRAME % text)
        begun = time.monotonic()
        reply, after = script(keys=[*own_keys, *KEYS], args=[*arguments, frame])
        early = (time.monotonic() - begun) * 1000 + 1.5  # before Redis 7.2 PTTL goes on inside a script
        model = view(self.state, self.now)
        assert_same_view(model, view_of(after), early, 0.5)
        timed = [(key, left) for key, (_, left) in zip(KEYS, after, strict=True) if left >= 0]
        self._left = {key: round(model[key][1]) if key in model else left for key, left in timed}
        return reply, early


def command_of(op: Op) -> list[bytes]:
    """The op as it goes on the wire."""
    reader = hiredis.Reader()
    reader.feed(encode_whole(op, ""))
    command: list[bytes] = reader.gets()
    return command


def _script_of(op: Op) -> tuple[str, list[bytes], list[bytes]]:
    """The same as script, arguments and keys."""
    command = command_of(op)
    if command[0] == b"SET":
        return _VERBATIM, command, []
    count = int(command[2])
    return command[1].decode(), command[3 + count :], command[3 : 3 + count]


class Stalled(Exception):
    """The machine stood still where two clocks had to agree: this history proves nothing."""


class Live(Player):
    """Time passes on the server, and its TIME tells `now`. A step waits while an end is so near that the two might see
    it differently, until the server says that the key is gone."""

    NEAR = 0.015

    def step(self, step: Step) -> None:
        if isinstance(step, Pass):
            until = self._time() + step.ms / 1000
            while self._time() < until:
                pass
            return
        checked = self._pass_near_ends()
        if isinstance(step, Foreign):
            now, _, after, took = self._run(step.command, checked)
            self.state = step.becomes(self.state.at(now), now)
        else:
            op = step.op(self.kind, self.state.at(checked), int(checked * 1_000_000))
            now, reply, after, took = self._run(command_of(op), checked)
            decided = _seeded(decide(self.kind, self.state, op, now), self.state.at(now), op, reply, took)
            assert_same_reply(op, decided, now, reply, took + 2, 2)
            self.state = decided.state
        assert_same_view(view(self.state.at(now), now), view_of(after), took + 2, 2)  # each side rounds to a ms

    def _time(self) -> float:
        seconds, us = self.cli.time()
        return (seconds * 1_000_000 + us + 0.5) / 1_000_000

    def _pass_near_ends(self) -> float:
        """A moment with no end near it, at which both sides have let go of what ended before."""
        while True:
            now = self._time()
            ends = self._ends()
            over = [key for key, end in ends.items() if end <= now]
            if not any(now < end <= now + self.NEAR for end in ends.values()) and not self._exist(over):
                self.state = self.state.at(now)
                return now

    def _exist(self, names: Sequence[str]) -> bool:
        return bool(names) and bool(self.cli.exists(*names))

    def _ends(self) -> dict[str, float]:
        """When each key of the model ends, if it does."""
        ends = {AT.hold: self.state.holds[0].ends} if self.state.holds else {}
        ends |= {AT.undone + each.id[:ID_LENGTH]: each.ends for each in self.state.undone}
        ends[AT.fence] = self.state.fence_ends or None
        return {key: end for key, end in ends.items() if end is not None}

    def _run(self, command: Sequence[Any], checked: float) -> tuple[float, Any, list[Any], float]:
        """Run it and read all keys: the server's time before, its answer, the rows, and the ms that it took."""
        pipe = self.cli.pipeline(transaction=True)
        pipe.time()
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        for key in KEYS:
            pipe.get(key)
            pipe.pttl(key)
        pipe.time()
        before, reply, *rows, later = pipe.execute()
        now = before[0] + (before[1] + 0.5) / 1_000_000
        took = later[0] + (later[1] + 0.5) / 1_000_000 - now
        if took > 0.01 or any(checked < end <= now + took + 0.003 for end in self._ends().values()):
            raise Stalled
        return now, reply, list(zip(rows[::2], rows[1::2], strict=True)), took * 1000


def _seeded(decided: Reply, before: State, op: Op, reply: Any, took: float) -> Reply:
    """The reply with the server's fence, where that was seeded from its clock. Scripts read TIME for themselves, after
    we did and at most `took` ms later; a fence that comes from F or P has no such excuse and stays as decided."""
    exact = op.plain or decided.fence in (0, before.fence, before.fence + 1, op.fence)
    if exact or not 0 <= reply[1] - decided.fence <= took * 1000 + 1:
        return decided
    return replace(decided, fence=reply[1], state=replace(decided.state, fence=reply[1]))
