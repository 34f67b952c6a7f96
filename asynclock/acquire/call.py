"""Call: an acquire or an adoption, from its first round until it has a tenure or gives up.

It is a machine: events move it from one state to the next, and its caller waits for one future, which the last event
completes. No method of it waits, and none delivers its outcome inside the call: a round that fails at once is an event
of the next turn of the loop. So a release never runs through all waiters of a queue.

A cancel of the caller can arrive at one place only. What it finds there is under way, and is undone; or it is done, and
the tenure is passed on or released.
"""

from __future__ import annotations

import contextlib
import math
from contextvars import Context
from typing import TYPE_CHECKING

from asynclock._errors import client_closed
from asynclock.acquire.states import BEGAN, DONE, Asking, Began
from asynclock.acquire.tenure import Loss, Tenure

if TYPE_CHECKING:
    import asyncio

    from asynclock.acquire.causes import NoLease
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Terms
    from asynclock.quorum.ballot import Ballot


async def result_of(call: Call) -> Tenure | NoLease:
    """Start it, and wait for its end: a tenure; or the last refusal, if another owner held the name for the whole
    timeout. Raises what it fails with."""
    session = call.session
    while True:
        try:
            call.start()
            await call.future
            result = call.take()
        except GeneratorExit:  # the collector ends this coroutine, perhaps in the middle of another event
            with contextlib.suppress(RuntimeError):  # the loop is closed: it sends nothing any more
                session.loop.call_soon_threadsafe(call.abandon)
            raise
        except BaseException:
            call.abandon()
            call = None  # type: ignore[assignment] # the error refers to this frame, and the call to the error: a cycle
            raise
        if not (session.closed or (isinstance(result, Tenure) and result.lost_early)):
            return result
        give_back(result)  # it was lost before this task woke: ask again
        session.check_open()
        call = call.again()


def give_back(result: Tenure | NoLease) -> None:
    """Its caller does not wait for it any more: the hold is passed on or released. One that was lost is released, too,
    since some node may still have it."""
    if isinstance(result, Tenure) and result.loss is not Loss.CLOSED:
        result.mark_untaken()
        result.hold.end(result)


class Call:
    """See the module. The events that each has are `start`, the outcome of a round, the end of a pause, `abandon`,
    `fail` and `close`."""

    state: Began = BEGAN  # most calls end at once: what they do not need is not set for each of them

    def __init__(self, session: Session, terms: Terms, give_up: float = math.inf) -> None:
        self.terms = terms
        self.session = session
        self.future: asyncio.Future[None] = session.loop.create_future()  # its caller waits for it
        # Not in the future: the loop refers to that until the caller's task waits for something else.
        self._result: Tenure | NoLease | None = None
        self._give_up = give_up

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.terms.name!r}, {self.state!r}>"

    def start(self) -> None:
        """Begin it. Raises ConfigError, SelfDeadlock."""
        raise NotImplementedError

    def again(self) -> Call:
        """The same call once more, after its tenure was lost before its caller woke."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Undo what it sent. A second call does nothing."""
        raise NotImplementedError

    def _finish(self, has_it: bool) -> None:
        """It is done."""
        raise NotImplementedError

    def _settled(self, ballot: Ballot) -> None:
        """A round has its outcome."""
        raise NotImplementedError

    # -- its end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Its caller was cancelled, or has failed. What it sent is undone, and what it has is given back."""
        if self.state is not DONE:
            self.future.cancel()
            self._leave_and_finish()
        elif self._result is not None:
            give_back(self.take())
        elif not self.future.cancelled():
            self.future.exception()  # else its end is reported as an error that nobody saw

    def take(self) -> Tenure | NoLease:
        """The result, once."""
        result, self._result = self._result, None
        assert result is not None  # noqa: S101 - its future has ended
        return result

    def close(self) -> None:
        """The client closes."""
        if self.state is not DONE:
            self.fail(client_closed())

    def fail(self, error: BaseException) -> None:
        """Give up with that error."""
        if self.state is DONE:
            return
        error.__traceback__ = None  # else it refers to the frames of this object: a cycle
        if not self.future.done():
            self.future.set_exception(error)
        self._leave_and_finish()

    def _succeed(self, tenure: Tenure) -> None:
        self._finish(True)
        if self.future.done():  # its caller was cancelled in this turn
            give_back(tenure)
        else:
            self._result = tenure
            self.future.set_result(None)

    def _end_without(self, refusal: NoLease) -> None:
        """It gets no lease."""
        if not self.future.done():
            self._result = refusal
            self.future.set_result(None)
        self._leave_and_finish()

    def _leave_and_finish(self) -> None:
        """The next task may ask also if an error or a KeyboardInterrupt ends the first half."""
        try:
            self._leave()
        finally:
            self._finish(False)

    # -- its states ----------------------------------------------------------------------------------------------

    def _enter(self, state: Began) -> None:
        """The next state."""
        before, self.state = self.state, state
        before.end()

    def _await(self, state: Asking) -> bool:
        """Go on with the outcome of its round. False: it has failed at once, and that is an event of the next turn."""
        self._enter(state)
        if state.ballot.outcome is None:
            state.ballot.on_settled = self._settled
            return True
        self._later_settled(state.ballot)
        return False

    def _later_settled(self, ballot: Ballot) -> None:
        self.session.loop.call_soon(self._settled, ballot, context=Context())
