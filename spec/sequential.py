"""What each kind of lock allows, as if all calls happened one after the other: the specs of `linearizability.py`.

A call of a client is one or two calls of a spec, since a wait has a begin of its own:

    enqueue   a fair acquire takes its place in the queue
    acquire   it enters; the value is the fencing token
    release   it leaves. A lease that is lost ends, too: it may do so at any time after its holder last held it
    leave     a waiter gives up
    run       a call of `once` begins to run the function
    return    the function has returned. A run that failed, or whose process died, is a release
    skip      the call does not run it, since another run is under way or has returned

The token of an exclusive hold is greater than all before it. A shared hold (readers, permits) has a greater one than
each hold that had ended when it began; `falling` compares those that overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec.linearizability import Call


class Held(NamedTuple):
    """An exclusive lock, perhaps entered several times by its owner."""

    by: str = ""
    times: int = 0
    fence: int = 0  # the greatest so far


@dataclass(frozen=True)
class Mutex:
    """One holder. With `reentrant` its owner may enter again, and keeps its token."""

    reentrant: bool = False

    def start(self) -> Held:
        return Held()

    def after(self, state: Held, call: Call) -> Held | None:
        mine = state.times > 0 and state.by == call.who
        match call.what:
            case "acquire" if state.times == 0 and call.value > state.fence:
                return Held(call.who, 1, call.value)
            case "acquire" if self.reentrant and mine and call.value == state.fence:
                return state._replace(times=state.times + 1)
            case "release" if mine:
                return state._replace(times=state.times - 1) if state.times > 1 else Held(fence=state.fence)
        return None


class Queue(NamedTuple):
    """A fair lock."""

    by: str = ""
    waiting: tuple[str, ...] = ()
    fence: int = 0


class Fair:
    """One holder, in the order in which they came."""

    def start(self) -> Queue:
        return Queue()

    def after(self, state: Queue, call: Call) -> Queue | None:
        match call.what:
            case "enqueue" if call.who not in (state.by, *state.waiting):
                return state._replace(waiting=(*state.waiting, call.who))
            case "acquire" if not state.by and state.waiting[:1] == (call.who,) and call.value > state.fence:
                return Queue(call.who, state.waiting[1:], call.value)
            case "release" if state.by == call.who:
                return state._replace(by="")
            case "leave" if call.who in state.waiting:
                return state._replace(waiting=tuple(each for each in state.waiting if each != call.who))
        return None


class Inside(NamedTuple):
    """A shared lock: each holder with its token."""

    holders: frozenset[tuple[str, int]] = frozenset()
    ended: int = 0  # the greatest token of the holds that have ended


@dataclass(frozen=True)
class Semaphore:
    """At most so many holders."""

    permits: int

    def start(self) -> Inside:
        return Inside()

    def after(self, state: Inside, call: Call) -> Inside | None:
        if call.what == "acquire" and len(state.holders) < self.permits:
            return _entered(state, call)
        return _left(state, call) if call.what == "release" else None


class ReadWrite:
    """Readers (`read`) together, or one writer (`write`)."""

    def start(self) -> Inside:
        return Inside()

    def after(self, state: Inside, call: Call) -> Inside | None:
        has_writer = any(who.startswith("write ") for who, _ in state.holders)
        match call.what:
            case "read" if not has_writer:
                return _entered(state, call)
            case "write" if not state.holders:
                return _entered(state, call._replace(who=f"write {call.who}"))
            case "release":
                return _left(state, call) or _left(state, call._replace(who=f"write {call.who}"))
        return None


def _entered(state: Inside, call: Call) -> Inside | None:
    if call.value <= state.ended or any(who == call.who for who, _ in state.holders):
        return None
    return state._replace(holders=state.holders | {(call.who, call.value)})


def _left(state: Inside, call: Call) -> Inside | None:
    found = [each for each in state.holders if each[0] == call.who]
    return Inside(state.holders - {*found}, max(state.ended, found[0][1])) if found else None


class Runs(NamedTuple):
    """A name of `once`."""

    by: str = ""  # whose run is under way
    done: bool = False


class Once:
    """One run at a time, and none after one has returned."""

    def start(self) -> Runs:
        return Runs()

    def after(self, state: Runs, call: Call) -> Runs | None:
        match call.what:
            case "run" if not state.by and not state.done:
                return Runs(by=call.who)
            case "return" if state.by == call.who:
                return Runs(done=True)
            case "release" if state.by == call.who:
                return Runs()
            case "skip" if state.by or state.done:
                return state
        return None


def falling(history: Iterable[Call]) -> tuple[Call, Call] | None:
    """Two holds of a shared lock whose tokens are in the wrong order: the second acquire began after the first one had
    been answered, and its token is not greater. None: there are none."""
    given = [call for call in history if call.value]
    answered = sorted(given, key=lambda call: call.ended)
    greatest, number = None, 0
    for call in sorted(given, key=lambda call: call.began):
        while number < len(answered) and answered[number].ended < call.began:
            if greatest is None or answered[number].value > greatest.value:
                greatest = answered[number]
            number += 1
        if greatest is not None and call.value <= greatest.value:
            return greatest, call
    return None
