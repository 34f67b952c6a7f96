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
from asynclock.acquire.attempt import Attempt, Pause
from asynclock.acquire.backoff import Pace
from asynclock.acquire.ticket import withdraw
from asynclock.quorum.ballot import REFUSED, WON
from asynclock.rules.model import ADOPT, ID_LENGTH, Op, Queueing, mode_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Tenure, Terms
    from asynclock.quorum.ballot import Ballot, Outcome

_MARK = "asynclock1."
_SUM = 6  # bytes of the checksum: a damaged handle is not reported as one that came too late


class Handle(NamedTuple):
    """The content of a handle."""

    name: str
    id: str
    token: int

    @property
    def mode(self) -> str:
        """The part of the id that names the kind of hold; the next id has it, too. "" for a mutex."""
        return self.id[ID_LENGTH + 1 :].partition(".")[0] + "." if mode_of(self.id) else ""


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


async def adopt(session: Session, terms: Terms, handle: Handle) -> Tenure:
    """A tenure of the hold of that handle. Raises LockNotHeld, QuorumUnavailable, ConfigError."""
    return await Adoption(session, terms, handle).run()


class Adoption:
    """One adoption of one handle."""

    def __init__(self, session: Session, terms: Terms, handle: Handle) -> None:
        self._session = session
        self._terms = terms
        self._since = session.clock.now()  # its id is not older
        seed = max(int(session.clock.wall() * 1_000_000), handle.token + 1)
        queueing = Queueing(session.quorum.serve, waiter=handle.id)
        settings = terms.settings
        new_id = session.new_id(seed, settings.metadata, handle.mode)
        memory = settings.lease + session.settings.fence_memory
        self._op = Op(ADOPT, terms.kind, terms.name, new_id, settings.lease, seed, memory, queueing=queueing)
        self._attempt = Attempt(session, terms, None)
        self._round: Ballot | None = None  # the last round that it waited for
        self._pause = Pause(session)  # between two rounds

    async def run(self) -> Tenure:
        """See `adopt`."""
        session = self._session
        session.under_way.add(self)
        try:
            return await self._ask()
        except BaseException:
            self._op.revoke()
            withdraw(session, self._terms, self._op.id, since=self._since)
            raise
        finally:
            session.under_way.discard(self)

    async def _ask(self) -> Tenure:
        session, attempt, name = self._session, self._attempt, self._terms.name
        pace = Pace(session.settings.patience)
        traces: set[int] = set()  # the nodes where an earlier round took effect or still may
        while True:
            ballot = last = attempt.ask(self._op)
            outcome = ballot.outcome or await self._outcome(ballot)
            session.check_open()
            if outcome is REFUSED:
                raise LockNotHeld(
                    f"{brief(name)}: this handle was adopted already, or its hold has ended, or it comes from other "
                    "servers or another prefix",
                    name=name,
                )
            if outcome is WON:
                top, sure = ballot.token()
                if sure:
                    hold = attempt.hold(ballot, top, contended=True)
                else:
                    raised = attempt.ask_to_raise(ballot)
                    if raised.outcome is None:
                        await self._outcome(raised)
                    session.check_open()
                    hold, last, _ = attempt.confirmed(ballot, raised, contended=True)
                if hold is not None:
                    hold.may_be_at(traces)
                    return hold.begin(self._terms)
            traces.update(ballot.traces())
            plan = pace.after_outage(session.clock.now(), math.inf)
            error = session.quorum.unavailable(last, name)
            if plan is None or isinstance(error, ConfigError):
                raise error
            await self._pause.wait(plan.at)
            session.check_open()

    def _outcome(self, ballot: Ballot) -> Awaitable[Outcome]:
        self._round = ballot
        return ballot.waiter(self._session.loop)

    def close(self) -> None:
        """The client closes: the task wakes, and finds that out."""
        if self._round is not None:
            self._round.expire()
        self._pause.end()
