"""Players of histories: what `decide` makes of each step, and what a real server makes of it.

Two of them compare reply, full state and all notices, after each step:

    Still   the server's clock stands still between steps and its TIME is ours, so that hours pass at once
    Live    its own clock and TIME, with leases of some ten ms"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import hiredis
import redis

from asynclock.rules.decide import decide
from asynclock.rules.model import ID_LENGTH, MARK, Kind, Notice, Op, Reply, State, Ticket
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.encoding import encode_whole
from asynclock.stores.redis.keys import channel
from tests.support.histories import AT, IDS, TAGS, Ask, Foreign, Listen, Pass, Permit, Step, number
from tests.support.on_the_wire import notice_on_wire, reply_on_wire
from tests.support.stage import Published, Stage

KEYS = (AT.hold, AT.fence, AT.queue, AT.tickets, *(AT.undone + each[:ID_LENGTH] for each in IDS))

# -- states as keys ----------------------------------------------------------------------------------------------------

View = dict[str, tuple[Any, float]]
"""A state as its keys: value and ms left (inf: no end)."""


def view(state: State, now: float) -> View:
    """The keys that a node in `state` has."""
    found: View = {}
    for entry in state.holds:
        left = math.inf if entry.ends is None else (entry.ends - now) * 1000
        found[AT.hold] = MARK * state.marked + entry.id, left
    if state.fence:
        found[AT.fence] = str(state.fence), (state.fence_ends - now) * 1000
    if state.queue:
        left = (state.queue_ends - now) * 1000
        found[AT.queue] = [(each.id, each.order) for each in state.queue], left
        if tickets := {each.id[:ID_LENGTH]: _ticket(each) for each in state.queue if each.number}:
            found[AT.tickets] = tickets, left
    for entry in state.undone:
        assert entry.ends is not None
        found[AT.undone + entry.id[:ID_LENGTH]] = "", (entry.ends - now) * 1000
    return found


def _ticket(ticket: Ticket) -> str:
    """The ticket in the hash."""
    times = f"{int(ticket.fresh * 1000)} {int(ticket.ends * 1000)}"
    return f"{ticket.number} {times} {ticket.span} {ticket.tasks}{' !' if ticket.notified else ''}"


def view_of(rows: Sequence[Any]) -> View:
    """The keys that a server has, from [value or nil, PTTL] of each; a fence that is no number is none."""
    found: View = {}
    for key, (value, left) in zip(KEYS, rows, strict=True):
        if left != -2 and (key != AT.fence or number(value.decode())):
            found[key] = _read(key, value), math.inf if left == -1 else left
    return found


def _read(key: str, value: Any) -> Any:
    if key == AT.queue:
        pairs = zip(value[::2], value[1::2], strict=True)
        return [(who.decode(), int(float(order))) for who, order in pairs]
    if key == AT.tickets:
        return {who.decode(): ticket.decode() for who, ticket in zip(value[::2], value[1::2], strict=True)}
    return value.decode()


def assert_same_view(model: View, real: View, early: float, late: float) -> None:
    """Same keys and values; the time left on the server is from `early` ms less to `late` ms more."""
    assert {key: value for key, (value, _) in real.items()} == {key: value for key, (value, _) in model.items()}
    for key, (_, left) in model.items():
        found = real[key][1]
        assert left - early <= found <= left + late, f"{key}: {found} ms left, not {left}"


def assert_same_reply(op: Op, reply: Reply, now: float, real: Any, early: float, late: float) -> None:
    """The reply on the wire is what decide says; a pttl may differ as that of a key."""
    wire = reply_on_wire(reply, now)
    if op.plain:  # the server's plain SET says no more than yes or no
        wire, real = [wire[0] == 1], [real is not None]
    elif wire[0] == 0 and wire[1] >= 0:
        assert wire[1] - early <= real[1] <= wire[1] + late, f"{op}: {real}, not {wire}"
        wire[1] = real[1]
    assert real == wire, f"{op}: {real}, not {wire}"


def assert_same_notices(notices: Sequence[Notice], published: Published, early: float = 0.0, late: float = 0.0) -> None:
    """The same notices, to the same clients, in the same order. The rest of a name may differ as the time of a key."""
    expected = [(channel(notice.tag), notice_on_wire(notice)) for notice in notices]
    assert list(map(_without_rest, published)) == list(map(_without_rest, expected))
    for (_, found), (_, notice) in zip(published, expected, strict=True):
        left, rest = (int(text.split()[3]) for text in (found, notice))
        assert (left == rest) if min(left, rest) < 0 else (rest - early <= left <= rest + late), (
            f"{found!r}, {notice!r}"
        )


def _without_rest(published: tuple[Any, bytes]) -> tuple[Any, list[bytes]]:
    words = published[1].split()
    return published[0], [*words[:3], *words[4:]]


# -- players -----------------------------------------------------------------------------------------------------------


class Player:
    """One name on a real server, and the model's state of it. The server is emptied first. `turned` has scripts to be
    run in place of others."""

    def __init__(self, stage: Stage, kind: Kind = MUTEX, turned: Mapping[str, str] | None = None) -> None:
        self.stage = stage
        self.kind = kind
        self.turned = turned or {}
        self.state = State()
        self.may = True
        stage.reset()

    def play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Listen(who, listens):
                    self.stage.listen(self.stage.tags | {TAGS[who]} if listens else self.stage.tags - {TAGS[who]})
                case Permit(may):
                    self.may = may
                case Pass(ms):
                    self.let_pass(ms)
                case _:
                    self.step(step)

    def step(self, step: Ask | Foreign) -> None:
        raise NotImplementedError

    def let_pass(self, ms: int) -> None:
        raise NotImplementedError

    def listens(self, tag: str) -> bool | None:
        return tag in self.stage.tags if self.may else None

    @property
    def cli(self) -> redis.Redis:
        return self.stage.cli if self.may else self.stage.hushed


STAND_STILL = """
local real = redis
local function begin_ms()
  local time, again = real.call('TIME')
  repeat
    again, time = time[2], real.call('TIME')
  until time[2] == again or math.fmod(time[2], 1000) < 100
end
local function with_our_time(run)
  return function(command, ...)
    if command == 'TIME' then return frame.time end
    if command == 'PEXPIRE' and tonumber((select(2, ...))) == 1 then begin_ms() end
    return run(command, ...)
  end
end
local stage = {call = with_our_time(real.call), pcall = with_our_time(real.pcall), error_reply = real.error_reply}
for key, left in pairs(frame.left) do
  if left > 0 then stage.call('PEXPIRE', key, left) else real.call('DEL', key) end
end
"""
"""For a step in a script, inside which a server's clock stands still: our TIME, and each key with the time it has left.
Before Redis 7.2 the clock goes on, and PEXPIRE reads it twice; a key that gets 1 ms in between is gone. So that comes
early in a ms."""

_FRAME = (
    """
local frame = cjson.decode(table.remove(ARGV))
"""
    + STAND_STILL
    + """
local reply = (function(redis)
%s
end)(stage)
local readers = {none = {}, string = {'GET'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, hash = {'HGETALL'}}
local after = {}
for i = frame.first, #KEYS do
  local reader = readers[real.call('TYPE', KEYS[i]).ok]
  local found = reader[1] and real.call(reader[1], KEYS[i], unpack(reader, 2))
  after[#after + 1] = {found or false, real.call('PTTL', KEYS[i])}
  real.call('PERSIST', KEYS[i])
end
real.call('PUBLISH', unpack(frame.last))
return {reply or false, after}
"""
)
"""One step in one script: run the text, read all keys, and take their ends away, so that none passes before the next
step."""

_VERBATIM = "return redis.call(unpack(ARGV))"


class Still(Player):
    """Time passes only by Pass. A step starts with the ends that were read after the one before, less the time that
    passed."""

    def __init__(self, stage: Stage, kind: Kind = MUTEX, turned: Mapping[str, str] | None = None) -> None:
        super().__init__(stage, kind, turned)
        self._us = 1_700_000_000_123_457
        self._left: dict[str, int] = {}

    @property
    def now(self) -> float:
        """For decide: half a us later, so that its rounding down of a float of seconds gives the us of TIME."""
        return (self._us + 0.5) / 1_000_000

    def let_pass(self, ms: int) -> None:
        self._us += ms * 1000 + 1  # the us: no end coincides with a step
        self._left = {key: left - ms for key, left in self._left.items()}

    def step(self, step: Ask | Foreign) -> None:
        now, state = self.now, self.state.at(self.now)
        if isinstance(step, Foreign):
            self.state = step.becomes(state, now)
            self._run(_VERBATIM, list(step.command), [], ())
            return
        op = step.op(self.kind, state, self._us)
        decided = decide(self.kind, state, op, now, self.listens)
        self.state = decided.state.at(now)  # a tombstone of no length has ended
        text, words, own = _script_of(op)
        reply, early = self._run(self.turned.get(text, text), words, own, decided.notices)
        assert_same_reply(op, decided, now, reply, early, 0.5)

    def _run(
        self, text: str, arguments: list[Any], own_keys: list[Any], notices: Sequence[Notice]
    ) -> tuple[Any, float]:
        """Run it, compare the state and what was told, and answer the reply and what its PTTLs may lack."""
        seconds, us = divmod(self._us, 1_000_000)
        frame = {
            "time": [str(seconds), str(us)],
            "left": self._left,
            "first": len(own_keys) + 1,
            "last": self.stage.last(),
        }
        script = self.cli.register_script(_FRAME % text)
        begun = time.monotonic()
        reply, after = script(keys=[*own_keys, *KEYS], args=[*arguments, json.dumps(frame)], client=self.cli)
        early = (time.monotonic() - begun) * 1000 + 1.5  # before Redis 7.2 PTTL goes on inside a script
        assert_same_notices(notices, self.stage.published(), early)
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
    keys = int(command[2])
    return command[1].decode(), command[3 + keys :], command[3 : 3 + keys]


class Stalled(Exception):
    """The machine stopped for a moment where two clocks had to agree: this history proves nothing."""


class Live(Player):
    """Time passes on the server, and its TIME tells `now`. A step waits while an end is so near that the two sides
    might see it differently, until the server says that the key is gone."""

    NEAR = 0.015
    _late = 0.0  # ms: keys got their ends up to so much later than the model says

    def let_pass(self, ms: int) -> None:
        until = self._time() + ms / 1000
        while (left := until - self._time()) > 0:
            time.sleep(max(0.0, left - 0.002))  # the rest is too short for a sleep

    def step(self, step: Ask | Foreign) -> None:
        checked = self._pass_near_ends()
        if isinstance(step, Foreign):
            now, _, after, took = self._run(step.command, checked)
            self.state = step.becomes(self.state.at(now), now)
            notices: Sequence[Notice] = ()
        else:
            op = step.op(self.kind, self.state.at(checked), int(checked * 1_000_000))
            now, reply, after, took = self._run(command_of(op), checked)
            decided = decide(self.kind, self.state, op, now, self.listens)
            decided = _as_timed(decided, self.state.at(now), op, view_of(after), took)
            assert_same_reply(op, decided, now, reply, took + 2, 2 + self._late)
            self.state, notices = decided.state, decided.notices
        assert_same_notices(notices, self.stage.published(), took + 2, 2 + self._late)
        assert_same_view(view(self.state.at(now), now), view_of(after), took + 2, 2 + self._late)  # both round to a ms
        self._late = max(self._late, took)

    def _time(self) -> float:
        seconds, us = self.stage.cli.time()
        return (seconds * 1_000_000 + us + 0.5) / 1_000_000

    def _pass_near_ends(self) -> float:
        """A moment with no end near it, at which both sides have dropped what ended before."""
        while True:
            now = self._time()
            ends = self._ends()
            over = [key for key, end in ends.items() if end <= now]
            if not any(now - 0.002 < end <= now + self.NEAR for end in ends.values()) and not self._exist(over):
                self.state = self.state.at(now)
                return now

    def _exist(self, names: Sequence[str]) -> bool:
        return bool(names) and bool(self.stage.cli.exists(*names))

    def _ends(self) -> dict[str, float]:
        """When each key of the model ends, if it does; and when tickets are no longer fresh, under names of no key."""
        ends = {AT.hold: self.state.holds[0].ends} if self.state.holds else {}
        ends |= {AT.undone + each.id[:ID_LENGTH]: each.ends for each in self.state.undone}
        ends[AT.fence] = self.state.fence_ends or None
        ends[AT.queue] = ends[AT.tickets] = self.state.queue_ends or None
        ends |= {f"fresh:{each.id}": each.fresh for each in self.state.queue}
        return {key: end for key, end in ends.items() if end is not None}

    def _run(self, command: Sequence[Any], checked: float) -> tuple[float, Any, list[Any], float]:
        """Run it and read all keys: the server's time before, its answer, the rows, and the ms that it took."""
        pipe = self.cli.pipeline(transaction=True)
        pipe.time()
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        for key in KEYS:
            pipe.execute_command("EVAL", _READ[key], 1, key)  # type: ignore[no-untyped-call]
            pipe.pttl(key)
        pipe.time()
        pipe.publish(*self.stage.last())
        before, reply, *rows, later, _ = pipe.execute()
        now = before[0] + (before[1] + 0.5) / 1_000_000
        took = later[0] + (later[1] + 0.5) / 1_000_000 - now
        if took > 0.01 or any(checked < end <= now + took + 0.003 for end in self._ends().values()):
            raise Stalled
        return now, reply, list(zip(rows[::2], rows[1::2], strict=True)), took * 1000


_READ: Mapping[str, str] = dict.fromkeys(KEYS, "return redis.call('GET', KEYS[1])") | {
    AT.queue: "return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')",
    AT.tickets: "return redis.call('HGETALL', KEYS[1])",
}


def _as_timed(decided: Reply, before: State, op: Op, real: View, took: float) -> Reply:
    """The reply with the server's times where it read its clock: the server reads it for itself, later than the model
    and at most `took` ms later. Values that come from F, from P or from an explicit order stay as decided."""
    reply = _with_tickets(decided, op, real, took)
    found = number(real.get(AT.fence, ("0", 0))[0])
    late = found - reply.state.fence
    if op.plain or reply.state.fence in _exact_fences(before, op) or not 0 < late <= took * 1000 + 1:
        return reply
    notices = tuple(each._replace(fence=found) if each.fence == reply.state.fence else each for each in decided.notices)
    fence = found if decided.fence == reply.state.fence else decided.fence
    return replace(reply, fence=fence, notices=notices, state=replace(reply.state, fence=found))


def _exact_fences(before: State, op: Op) -> set[int]:
    """What F may become without a look at the clock."""
    spans = {op.queueing.span, *(ticket.span for ticket in before.queue)}
    return {0, before.fence, op.fence} | {base + span for base in (before.fence, op.fence - 1) for span in spans}


def _with_tickets(decided: Reply, op: Op, real: View, took: float) -> Reply:
    """With the server's times of tickets, which it keeps in ms."""
    texts, scores = real.get(AT.tickets, ({}, 0))[0], dict(real.get(AT.queue, ([], 0))[0])
    waiter, queue, late = op.queueing.waiter or op.id, [], 0
    for each in decided.state.queue:
        given, fresh, ends = map(int, texts.get(each.id[:ID_LENGTH], "0 0 0 0 1").split()[:3])
        near = all(0 <= a - int(b * 1000) <= took + 1 for a, b in ((fresh, each.fresh), (ends, each.ends)))
        if each.id == waiter and each.order != op.queueing.order:
            late = scores.get(each.id, 0) - each.order
            late = late if 0 < late <= took * 1000 + 1 else 0
        same = (
            each
            if given != each.number or not near
            else each._replace(fresh=(fresh + 0.5) / 1000, ends=(ends + 0.5) / 1000)
        )
        queue.append(same._replace(order=each.order + (late if each.id == waiter else 0)))
    order = decided.order and decided.order + late
    return replace(decided, order=order, state=replace(decided.state, queue=tuple(sorted(queue))))
