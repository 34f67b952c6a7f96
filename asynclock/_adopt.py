"""Taking over a hold that another process detached: an attempt that goes ahead of everybody, since it knows the id.

One new id is asked with until a majority has answered: each node gives the hold to it at most once, and answers it the
same again. So an answer that was lost costs nothing; a second adoption finds another id, and is refused everywhere.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, LockNotHeld, brief
from asynclock._op import Op, Queueing, Verb
from asynclock._pace import Pace
from asynclock._quorum import Outcome
from asynclock._tries import Recipe, Tries

if TYPE_CHECKING:
    from asynclock._handle import Known
    from asynclock._lease import Lease
    from asynclock._options import LockSettings
    from asynclock._session import Session


async def adopt(
    session: Session, lock: Recipe, settings: LockSettings, task: asyncio.Task[Any] | None, known: Known
) -> Lease:
    """Raises LockNotHeld, QuorumUnavailable, ConfigError."""
    tries = Tries(session, lock, settings, task, 0)
    seed = max(int(session.clock.wall() * 1_000_000), known.token + 1)
    op = Op(
        Verb.ADOPT, lock._kind, known.name, session.new_id(seed, settings.metadata, known.mode),
        settings.lease, seed,
        settings.lease + session.settings.fence_memory, queueing=Queueing(session.quorum.serve, waiter=known.id),
    )  # fmt: skip
    pace = Pace(session.settings.patience)
    try:
        while True:
            asked = ballot = session.quorum.ask(op, session.within(settings))
            outcome = await ballot.settled(session.loop)
            session.check_open()
            if outcome is Outcome.WON:
                top, sure = ballot.token()
                if not sure:
                    second = tries.confirm(ballot, top)
                    await second.settled(session.loop)
                    session.check_open()
                    sure = second.witnesses(top)
                    asked = second
                lease = tries.begun(ballot, top, contended=True) if sure else None
                if lease is not None:
                    return lease
            if outcome is Outcome.REFUSED:
                raise LockNotHeld(
                    f"{brief(known.name)}: this handle was adopted already, or its time is over, or it is of other "
                    "servers or another prefix",
                    name=known.name,
                )
            look = pace.after_outage(session.clock.now(), math.inf)
            error = session.quorum.unavailable(asked, known.name)
            if look is None or isinstance(error, ConfigError):
                raise error
            await asyncio.sleep(look.at - session.clock.now())
    except BaseException:
        op.undone = True
        tries.take_back(op.id)
        raise
