"""A player of histories on names of mixed kinds: what `decide` and `decide_all` make of each step, and what a real
server makes of it, on a clock that stands still between steps and leaps with Pass.

Reply, full state of each name, and all notices are compared after each step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import redis

from asynclock.rules.decide import decide
from asynclock.rules.model import ID_LENGTH, MARK, Entry, Notice, Op, Rule, State, letter_of
from asynclock.rules.several import decide_all
from asynclock.stores.redis.keys import Keys
from tests.support.agreement import STAND_STILL, View, assert_same_notices, command_of
from tests.support.agreement import _ticket as ticket_text
from tests.support.histories import MUTE, Ask, Listen, Pass, Permit, number
from tests.support.on_the_wire import reply_on_wire
from tests.support.shared_histories import AT, IDS, TAGS, Play, Step, World, Write, kind_of, op_of
from tests.support.stage import Stage


def keys_of(at: Keys) -> list[str]:
    return [at.hold, at.fence, at.queue, at.tickets, *(at.undone + each[:ID_LENGTH] for each in IDS)]


def view(at: Keys, state: State, shared: bool, now: float) -> View:
    """The keys that a name in `state` has; those of a hold that is a sorted set end with its last."""
    found: View = {}

    def left(ends: float | None) -> float:
        return math.inf if ends is None else (ends - now) * 1000

    if state.holds and shared:
        found[at.hold] = [(each.id, _ms(each.ends)) for each in state.holds], left(state.holds[-1].ends)
    elif state.holds:
        found[at.hold] = MARK * state.marked + state.holds[0].id, left(state.holds[0].ends)
    if state.fence:
        found[at.fence] = str(state.fence), left(state.fence_ends)
    if state.queue:
        found[at.queue] = [(each.id, each.order) for each in state.queue], left(state.queue_ends)
        if tickets := {each.id[:ID_LENGTH]: ticket_text(each) for each in state.queue if each.number}:
            found[at.tickets] = tickets, left(state.queue_ends)
    for entry in state.undone:
        found[at.undone + entry.id[:ID_LENGTH]] = "", left(entry.ends)
    return found


def view_of(keys: Sequence[str], rows: Sequence[Any], now: float) -> View:
    """The keys that a server has, from [type, value, PTTL] of each; a fence that is no number is none, nor is a hold
    that has ended."""
    found: View = {}
    for key, (kind, value, left) in zip(keys, rows, strict=True):
        read: Any = None
        if kind == b"zset":
            pairs = [(who.decode(), int(float(score))) for who, score in zip(value[::2], value[1::2], strict=True)]
            read = pairs if key in _QUEUES else [pair for pair in pairs if pair[1] > int(now * 1000)]
        elif kind == b"hash":
            read = {who.decode(): ticket.decode() for who, ticket in zip(value[::2], value[1::2], strict=True)}
        elif kind == b"string" and (key not in _FENCES or number(value.decode())):
            read = value.decode()
        if read is not None and read != []:
            found[key] = read, math.inf if left == -1 else left
    return found


_QUEUES = {at.queue for at in AT}
_FENCES = {at.fence for at in AT}


def _ms(ends: float | None) -> int:
    return int((ends or 0) * 1000)


_FRAME = (
    """
local frame, keys, words = cjson.decode(ARGV[#ARGV]), {}, {}
for i = 1, frame.keys do keys[i] = KEYS[i] end
for i = 1, #ARGV - 1 do words[i] = ARGV[i] end
"""
    + STAND_STILL
    + """
local reply = (function(redis, KEYS, ARGV)
%s
end)(stage, keys, words)
local readers = {none = {}, string = {'GET'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, hash = {'HGETALL'}}
local after = {}
for i = frame.keys + 1, #KEYS do
  local is = real.call('TYPE', KEYS[i]).ok
  local reader, found = readers[is], false
  if reader[1] then found = real.call(reader[1], KEYS[i], unpack(reader, 2)) end
  after[#after + 1] = {is, found, real.call('PTTL', KEYS[i])}
  if reader[1] then real.call('PERSIST', KEYS[i]) end
end
real.call('PUBLISH', unpack(frame.last))
return {reply or false, after}
"""
)
"""One step in one script, as in `agreement.py`; the step sees no keys and words but its own."""

_VERBATIM = "for _, each in ipairs(cjson.decode(ARGV[1])) do redis.call(unpack(each)) end"


class Ensemble:
    """The names of a world on a real server, and the model's states of them. The server is emptied first. `turned` has
    scripts to be run in place of others."""

    def __init__(self, stage: Stage, world: World, turned: Mapping[str, str] | None = None) -> None:
        self.stage = stage
        self.world = world
        self.turned = turned or {}
        self.shared = [kind_of(modes[0]).shared for modes in world.modes]
        self.states = [State() for _ in world.modes]
        self.may = True
        stage.reset()
        stage.listen({*TAGS} - {TAGS[MUTE]})
        self._at = AT[: len(world.modes)]
        self._keys = [key for at in self._at for key in keys_of(at)]
        self._us = 1_700_000_000_123_457
        self._left: dict[str, int] = {}
        self._longest = [0.0 for _ in world.modes]  # no hold that is there, or was in this step, ended later

    @property
    def now(self) -> float:
        """For decide: half a us on, so that its rounding down of a float of seconds ends at the us that TIME says."""
        return (self._us + 0.5) / 1_000_000

    def play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Listen(who, listens):
                    self.stage.listen(self.stage.tags | {TAGS[who]} if listens else self.stage.tags - {TAGS[who]})
                case Permit(may):
                    self.may = may
                case Pass(ms):
                    self._us += ms * 1000 + 1  # the us: no end coincides with a step
                    self._left = {key: left - ms for key, left in self._left.items()}
                case Write():
                    self._write(step)
                case Ask():
                    self._ask(step)

    def _write(self, step: Write) -> None:
        now, kind = self.now, kind_of(self.world.modes[step.name][0])
        self.states = [state.at(now) for state in self.states]
        commands, state = step.does(self._at[step.name], kind, self.states[step.name], now)
        self._become({step.name: state}, 0.0)
        self._run(_VERBATIM, [json.dumps(commands)], [], [])

    def _ask(self, step: Ask) -> None:
        now = self.now
        self.states = [state.at(now) for state in self.states]
        op, names = op_of(step, self.world, self.states, self._us)
        met = [self.states[name] for name in names]
        if op.kind.parts:
            decided, part, states, notices = decide_all(op.kind.parts, met, op, now, self._listens)
            wire = reply_on_wire(decided, now, part)
        else:
            decided = decide(cast("Rule", op.kind), met[0], op, now, self._listens)
            wire, states, notices = reply_on_wire(decided, now), [decided.state], list(decided.notices)
        self._become(dict(zip(names, states, strict=True)), op.lease)
        command = command_of(op)
        count, text = int(command[2]), command[1].decode()
        own, words = command[3 : 3 + count], command[3 + count :]
        reply, early = self._run(self.turned.get(text, text), words, own, notices)
        assert_same_answer(op, wire, reply, early)

    def _listens(self, tag: str) -> bool | None:
        return tag in self.stage.tags if self.may else None

    def _become(self, after: Mapping[int, State], lease: float) -> None:
        """The states are these, with the ends of holds and tickets in whole ms, as a server has them."""
        now = self.now
        for name, state in after.items():
            before = self.states[name]
            ends = [each.ends or 0.0 for each in (*before.holds, *state.holds)]
            ends += [each.ends for each in (*before.queue, *state.queue)]
            self._longest[name] = max([self._longest[name] if before.holds else 0.0, now + lease, *ends])
            self.states[name] = _in_ms(state.at(now), self.shared[name])

    def _run(self, text: str, words: list[Any], own: list[Any], notices: Sequence[Notice]) -> tuple[Any, float]:
        """Run it, compare the states and what was told, and answer the reply and what its PTTLs may lack."""
        seconds, us = divmod(self._us, 1_000_000)
        frame = {"time": [str(seconds), str(us)], "left": self._left, "keys": len(own), "last": self.stage.last()}
        cli: redis.Redis = self.stage.cli if self.may else self.stage.hushed
        script = cli.register_script(_FRAME % text)
        begun = time.monotonic()
        reply, after = script(keys=[*own, *self._keys], args=[*words, json.dumps(frame)], client=cli)
        early = (time.monotonic() - begun) * 1000 + 1.5  # before Redis 7.2 PTTL goes on inside a script
        assert_same_notices(notices, self.stage.published(), early)
        self._compare(after, early)
        return reply, early

    def _compare(self, rows: Sequence[Any], early: float) -> None:
        model: View = {}
        for at, state, shared in zip(self._at, self.states, self.shared, strict=True):
            model |= view(at, state, shared, self.now)
        real = view_of(self._keys, rows, self.now)
        assert {key: value for key, (value, _) in real.items()} == {key: value for key, (value, _) in model.items()}
        latest = {
            at.hold: (longest - self.now) * 1000
            for at, longest, shared in zip(self._at, self._longest, self.shared, strict=True)
            if shared
        }
        for key, (_, left) in model.items():
            found = real[key][1]
            until = latest.get(key, left)
            assert left - early <= found <= until + 0.5, f"{key}: {found} ms left, not {left} to {until}"
        self._left = {key: left for key, (_, _, left) in zip(self._keys, rows, strict=True) if left >= 0}
        for key in self._left.keys() & model.keys():
            exact = round(model[key][1])
            self._left[key] = max(exact, self._left[key]) if key in latest else exact


def _in_ms(state: State, shared: bool) -> State:
    """With ends that no moment some us later precedes; the holds of a sorted set in its order."""

    def cut(ends: float) -> float:
        return (int(ends * 1000) + 0.1) / 1000

    holds = tuple(Entry(each.id, None if each.ends is None else cut(each.ends)) for each in state.holds)
    holds = tuple(sorted(holds, key=lambda each: (each.ends or 0.0, each.id))) if shared else holds
    queue = tuple(each._replace(fresh=cut(each.fresh), ends=cut(each.ends)) for each in state.queue if each.number)
    others = tuple(each for each in state.queue if not each.number)
    return replace(state, holds=holds, queue=tuple(sorted([*others, *queue])))


def assert_same_answer(op: Op, wire: list[Any], real: Any, early: float) -> None:
    """The reply on the wire is what decide says; a pttl may differ as that of a key, where it is one."""
    assert isinstance(real, list), f"{op}: {real!r}, not {wire}"
    if wire[0] == 0 and wire[1] >= 0 and (op.kind.parts or not letter_of(wire[2].decode())):
        assert wire[1] - early <= real[1] <= wire[1] + 0.5, f"{op}: {real}, not {wire}"
        wire[1] = real[1]
    assert real == wire, f"{op}: {real}, not {wire}"


def agree_on(stage: Stage, name: str, play: Play) -> None:
    """Both sides agree; an error names the history."""
    world, steps = play
    try:
        Ensemble(stage, world).play(steps)
    except AssertionError as error:
        error.add_note(f"in the history: {name}")
        raise
