"""What entering a client waits for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._clock import sleep
from asynclock._errors import ConfigError
from asynclock._options import QUORUM_TIMEOUT
from asynclock.acquire.backoff import Pace

if TYPE_CHECKING:
    from asynclock.acquire.session import Session


async def enter(session: Session, used_before: bool) -> None:
    """Connect, and wait until a majority of the nodes would vote. Raises QuorumUnavailable after `patience` seconds of
    an outage, and ConfigError at once. If it fails or is cancelled, the session is closed, unless it was in use before:
    the caller gets no client that could be left."""
    try:
        await _wait_for_majority(session)
    except BaseException:
        if not used_before:
            await session.aclose()
        raise


async def _wait_for_majority(session: Session) -> None:
    settings, pace = session.settings.lock, Pace(session.settings.patience)
    within = session.settings.connect_timeout  # more than an acquire has, so that a busy machine is no outage
    error: Exception | None = await session.open(settings, session.connect_limit(None))
    if error is None and not session.ready:  # the attempts to connect still go on
        error = await session.quorum.check(within)
    while error is not None:
        again = pace.after_outage(session.clock.now(), math.inf)
        if again is None or isinstance(error, ConfigError):
            raise error
        await sleep(again.at - session.clock.now(), session.clock)
        session.check_open()
        await session.quorum.open(again=True)
        least = max(QUORUM_TIMEOUT, session.quorum.limits.longest)
        error = await session.quorum.check(min(within, max(pace.ends - session.clock.now(), least)))
