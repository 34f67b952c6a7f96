"""Handover of a hold to another process: `detach` returns a handle, and `adopt` takes over the hold of that handle.

The handle is a secret, since it contains the id. An adoption does not wait in the queue, since it knows the id. It asks
with one new id until a majority has answered. Each node gives the hold to that id at most once, and repeats its reply
when it is asked again. So a lost reply does no harm. A second adoption finds another id at the nodes, and all of them
refuse it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import ConfigError, LockNotHeld, brief
from asynclock._options import RELEASE_TIMEOUT
from asynclock.protocol.machine import Claim
from asynclock.protocol.planner import Pace
from asynclock.protocol.rounds import withdraw
from asynclock.protocol.states import DONE, Asking, BackingOff
from asynclock.rules.model import ADOPT, ID_LENGTH, QUIET, RELEASE, Op, Queueing, Serve, letter_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.protocol.hold import Hold
    from asynclock.protocol.machine import Machine
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot, Outcome

_MARK = "asynclock1."
_SUM = 6  # bytes of the checksum, so that a damaged handle raises ConfigError and not LockNotHeld


class Handle(NamedTuple):
    """The content of a handle."""

    name: str
    id: str
    token: int

    @property
    def mode(self) -> str:
        """The part of the id that names the kind of hold; the next id has it, too. "" for a mutex."""
        return self.id[ID_LENGTH + 1 :].partition(".")[0] + "." if letter_of(self.id) else ""


def handle_of(op: Op, token: int) -> str:
    """The handle of the hold of `op`, with its fencing token."""
    content = json.dumps([op.name, op.id, token]).encode()
    return _MARK + base64.urlsafe_b64encode(_sum(content) + content).decode()


def parse_handle(handle: object) -> Handle:
    """The content of a handle. Raises ConfigError for all that detach() did not return."""
    if isinstance(handle, str) and handle.startswith(_MARK):
        try:
            raw = base64.b64decode(handle.removeprefix(_MARK), altchars=b"-_", validate=True)
            if raw[:_SUM] == _sum(raw[_SUM:]):
                return Handle(*json.loads(raw[_SUM:]))
        except (binascii.Error, ValueError, TypeError):
            pass
    raise ConfigError("this is no handle: pass the string that detach() returned, unchanged")


def _sum(content: bytes) -> bytes:
    return sha256(content).digest()[:_SUM]


class Adoption(Claim):
    """One adoption of one handle."""

    __slots__ = ("_handle", "_op", "_pace", "_since", "_traces")

    def __init__(self, machine: Machine, terms: Terms, handle: Handle) -> None:
        super().__init__(machine, terms)
        self._contended = True  # assumed: the client that detached the hold is not asked whether another client waits
        core = machine.core
        self._handle = handle
        self._since = core.clock.now()  # no node has seen its id before this time
        seed = max(int(core.clock.wall() * 1_000_000), handle.token + 1)
        queueing = Queueing(core.quorum.serve, waiter=handle.id)
        settings = terms.settings
        new_id = core.new_id(seed, settings.metadata, handle.mode)
        memory = settings.lease + core.settings.fence_memory
        self._op = Op(ADOPT, terms.kind, terms.name, new_id, settings.lease, seed, memory, queueing=queueing)
        self._pace = Pace(core.random, core.settings.patience)
        self._traces: dict[int, None] = {}  # the nodes where an earlier round took effect or still may

    def start(self) -> None:
        self._machine.under_way[self] = None
        self._ask()

    def again(self) -> Adoption:
        return Adoption(self._machine, self.terms, self._handle)

    def _ask(self) -> None:
        """While the client closes, end instead: no further node adopts the hold, so another client may. (`core.closed`
        is set in a forked child, too, which gets the error of its nodes.)"""
        if self._machine.queues.closed:
            self.close()
            return
        core = self._core
        within = core.within(self.terms.settings)
        self._enter(Asking(core.quorum.ask(self._op, within, on_settled=self.settled)))

    def settled(self, ballot: Ballot) -> None:
        if self._machine.queues.closed:
            self.close()
        else:
            super().settled(ballot)

    def _win(self, hold: Hold, ballot: Ballot) -> None:
        hold.may_be_at(self._traces)
        self._end_detached(ballot.nodes_without_grant())
        ballot.on_late_vote(
            lambda ballot, index: self._end_detached([index] if index in ballot.nodes_without_grant() else [])
        )
        self._succeed(hold.begin(self.terms))

    def _end_detached(self, nodes: Sequence[int]) -> None:
        """These nodes have not granted the adoption. They may have the detached hold, or get it from a command of its
        client that is still on its way: nobody else would release it there."""
        if nodes:
            op, core = self._op, self._core
            longest = core.settings.max_lease  # the tombstone lasts as long as the detached hold may
            release = Op(
                RELEASE, op.kind, op.name, self._handle.id, longest, 0, op.memory, tombstone=True,
                queueing=QUIET[Serve.NOBODY],
            )  # fmt: skip
            core.quorum.ask(release, RELEASE_TIMEOUT, only=nodes)

    def _without_grant(self, ballot: Ballot) -> None:
        if not ballot.may_be_granted:
            raise self._refused()
        self._ask_later(ballot, ballot)  # some may have refused, but a node that cast no vote may have the hold

    def _without_hold(self, won: Ballot, last: Ballot, outcome: Outcome) -> None:
        del outcome
        if self._op.revoked:  # granted, but too late: it was released, and no later op may bring it back
            raise self._refused()
        self._ask_later(won, last)

    def _ask_later(self, asked: Ballot, last: Ballot) -> None:
        """The same id asks again after a pause. Raises QuorumUnavailable if an outage lasts too long, and ConfigError
        at once."""
        self._traces.update(dict.fromkeys(asked.traces()))
        plan = self._pace.after_outage(self._core.clock.now(), math.inf)
        error = self._core.quorum.unavailable(last, self.terms.name)
        if plan is None or isinstance(error, ConfigError):
            raise error
        state = BackingOff(plan.at, False, last)
        self._enter(state)
        state.timer = self._core.clock.call_at(plan.at, self._ask_again)

    def _ask_again(self) -> None:
        """A timer: the pause is over."""
        try:
            self._ask()
        except BaseException as error:
            self._failed(error)

    def _refused(self) -> LockNotHeld:
        name = self.terms.name
        return LockNotHeld(
            f"{brief(name)}: this handle was adopted already, or its hold has ended, or it comes from other servers or "
            "another prefix",
            name=name,
        )

    def _leave(self) -> None:
        self._op.revoke()
        core = self._core
        withdraw(core, self.terms, self._op.id, since=self._since, lease=core.settings.max_lease)

    def _finish(self, has_it: bool) -> None:
        del has_it
        self._enter(DONE)
        self._machine.under_way.pop(self, None)
