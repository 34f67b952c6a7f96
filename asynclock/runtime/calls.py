"""What the callers of a client wait for: the end of an acquire or of an adoption, and a majority of the nodes when a
client is entered."""

from __future__ import annotations

import contextlib
import math
from random import random
from typing import TYPE_CHECKING, Any

from asynclock._clock import running_for, sleep
from asynclock._errors import ConfigError
from asynclock._options import QUORUM_TIMEOUT
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.handover import Adoption
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import end_unwanted
from asynclock.protocol.planner import Pace
from asynclock.runtime import opening

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asynclock.protocol.causes import NoLease
    from asynclock.protocol.handover import Handle
    from asynclock.protocol.machine import Claim
    from asynclock.protocol.terms import Terms
    from asynclock.runtime.session import Session


def acquire(session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | NoLease]:
    """A tenure; or the last refusal, if another owner held the name for the whole timeout. Raises QuorumUnavailable,
    ConfigError, SelfDeadlock."""
    give_up = session.clock.now() + terms.timeout if terms.timeout else math.inf
    return _result_of(session, Acquisition(session.machine, terms, give_up))


def adopt(session: Session, terms: Terms, handle: Handle) -> Coroutine[Any, Any, Tenure | NoLease]:
    """A tenure of the hold of that handle. Raises LockNotHeld, QuorumUnavailable, ConfigError."""
    return _result_of(session, Adoption(session.machine, terms, handle))


async def _result_of(session: Session, claim: Claim) -> Tenure | NoLease:
    """Start it and wait for its end. If its tenure has ended before this task woke, start it again. Raises the error
    with which it fails."""
    while True:
        try:
            claim.start()
            await claim.future
            result = claim.take()
        except GeneratorExit:  # the collector ends this coroutine, perhaps in the middle of another event
            with contextlib.suppress(RuntimeError):  # the loop is closed: it sends nothing any more
                session.loop.call_soon_threadsafe(claim.abandon)
            raise
        except BaseException:
            claim.abandon()
            del claim  # the error refers to this frame, and the claim to the error: a cycle would stay
            raise
        if not (session.closed or (isinstance(result, Tenure) and result.ended_early)):
            return result
        end_unwanted(result)  # it has ended before this task woke: ask again
        session.check_open()
        claim = claim.again()


async def enter(session: Session, used_before: bool) -> None:
    """Connect, and wait until a majority of the nodes would vote. Raises QuorumUnavailable after `patience` seconds of
    an outage, and ConfigError at once. If it fails or is cancelled, the session is closed, unless another caller uses
    it: this one gets no client, so no `__aexit__` would close it."""
    session.begin_entry(used_before)
    try:
        await _wait_for_majority(session)
    except BaseException:
        await session.fail_entry()
        raise


async def _wait_for_majority(session: Session) -> None:
    settings, pace = session.settings.lock, Pace(random, session.settings.patience)
    within = session.settings.connect_timeout  # more than an acquire has, so that a busy machine is no outage
    error: Exception | None = await session.open(settings, session.connect_limit(None))
    if error is None and not session.ready:  # the attempts to connect still go on
        error = await opening.check(session.quorum, within)
    while error is not None:
        again = pace.after_outage(session.clock.now(), math.inf)
        if again is None or isinstance(error, ConfigError):
            raise error
        await sleep(again.at - session.clock.now(), session.clock)
        session.check_open()
        least = max(QUORUM_TIMEOUT, session.quorum.limits.longest)
        with contextlib.suppress(TimeoutError):  # the nodes go on, and a store may have no limit of its own
            async with running_for(max(pace.ends - session.clock.now(), least), session.clock):
                await opening.open_nodes(session.quorum, again=True)
        error = await opening.check(session.quorum, min(within, max(pace.ends - session.clock.now(), least)))
