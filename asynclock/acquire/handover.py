"""Taking over a hold that another process detached: an attempt that goes ahead of the queue, since it knows the id.

One new id is asked with until a majority has answered: each node gives the hold to it at most once, and answers it the
same again. So an answer that was lost costs nothing; a second adoption finds another id, and is refused everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from asynclock._clock import wake
from asynclock._errors import ConfigError, LockNotHeld, brief
from asynclock.acquire.attempt import Recipe, Tries
from asynclock.acquire.backoff import Pace
from asynclock.quorum.ballot import Outcome
from asynclock.rules.model import Op, Queueing, Verb

if TYPE_CHECKING:
    import asyncio

    from asynclock._options import LockSettings
    from asynclock.acquire.handle import Known
    from asynclock.acquire.session import Session
    from asynclock.locks.lease import Lease
    from asynclock.quorum.ballot import Ballot


class Adoption(Tries):
    """Made for one handle."""

    _pause: asyncio.Future[None] | None = None  # between two rounds

    def __init__(
        self, session: Session, lock: Recipe, settings: LockSettings, task: asyncio.Task[Any] | None, known: Known
    ) -> None:
        super().__init__(session, lock, settings, task, 0)
        self._since = session.clock.now()  # no id of this call is older
        seed = max(int(session.clock.wall() * 1_000_000), known.token + 1)
        self._adopt = Op(
            Verb.ADOPT, lock._kind, known.name, session.new_id(seed, settings.metadata, known.mode),
            settings.lease, seed,
            settings.lease + session.settings.fence_memory, queueing=Queueing(session.quorum.serve, waiter=known.id),
        )  # fmt: skip

    async def run(self) -> Lease:
        """The lease. Raises LockNotHeld, QuorumUnavailable, ConfigError."""
        session = self._session
        session.waits.add(self)
        try:
            return await self._ask()
        except BaseException:
            self._adopt.revoke()
            self.take_back(self._adopt.id)
            raise
        finally:
            session.waits.discard(self)

    async def _ask(self) -> Lease:
        session, pace = self._session, Pace(self._session.settings.patience)
        traces: set[int] = set()  # where an earlier round may have left the hold, or may yet
        while True:
            asked = ballot = session.quorum.ask(self._adopt, session.within(self.settings))
            outcome = await self._settled(ballot)
            if outcome is Outcome.WON:
                top, sure = ballot.token()
                if not sure:
                    asked = self.confirm(ballot, top)
                    await self._settled(asked)
                    sure = asked.witnesses(top)
                lease = self.begun(ballot, top, contended=True) if sure else None
                if lease is not None:
                    lease._hold.may_be_at(traces)
                    return lease
            if outcome is Outcome.REFUSED:
                raise LockNotHeld(
                    f"{brief(self.name)}: this handle was adopted already, or its time is over, or it is of other "
                    "servers or another prefix",
                    name=self.name,
                )
            traces.update(ballot.traces())
            look = pace.after_outage(session.clock.now(), math.inf)
            error = session.quorum.unavailable(asked, self.name)
            if look is None or isinstance(error, ConfigError):
                raise error
            await self._sleep_until(look.at)

    async def _settled(self, ballot: Ballot) -> Outcome:
        self._awaited = ballot
        outcome = await ballot.settled(self._session.loop)
        self._session.check_open()
        return outcome

    async def _sleep_until(self, when: float) -> None:
        pause = self._pause = self._session.loop.create_future()
        timer = self._session.clock.call_at(when, lambda: wake(pause))
        try:
            await pause
        finally:
            timer.cancel()
        self._session.check_open()

    def interrupt(self) -> None:
        """The client closes."""
        self.cut_short()
        if self._pause is not None:
            wake(self._pause)
