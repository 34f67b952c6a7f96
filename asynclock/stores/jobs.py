"""The order of the transactions of one node: those of one key in turn, those of different keys at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from asynclock._loop import own_task
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import ACQUIRE
from asynclock.stores.backlog import Asked, Backlog
from asynclock.stores.closing import CANCELLING
from asynclock.stores.deadlines import Deadlines
from asynclock.stores.deciding import copy_of
from asynclock.stores.forks import Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from asynclock._time import Clock
    from asynclock.rules.model import Op
    from asynclock.stores.port import Grant, NodeConfig, Refused, ReplyHandler, Undone

log = logging.getLogger("asynclock")

GRACE = 1.0
"""Seconds after its time, or after ANSWER_TIMEOUT if that is later, when a transaction is cancelled. Until then a store
that has a limit of its own ends it, and knows what it has done."""

_AGAIN = (ANSWER_TIMEOUT, 60.0)
"""Seconds until a transaction that goes on is cancelled again: a driver may lose a cancel, and a rollback takes time.
Doubled each time, up to the greatest."""

_WITHOUT_PLACE = 1000
"""Transactions that run without a place, at most."""


class _Place:
    """Of the task of a transaction. What that starts may refer to it for longer, so it forgets the transaction."""

    __slots__ = ("leave",)

    def __init__(self, leave: Callable[[], object]) -> None:
        self.leave: Callable[[], object] | None = leave


_PLACE: ContextVar[_Place] = ContextVar("asynclock_place")


def leave_place() -> None:
    """From inside a transaction: it waits for what another session has locked, perhaps for long. So it takes no place
    of its node from now on: else a stranger's transaction that locks many rows would stop all other names, with the
    renewals of their leases."""
    place = _PLACE.get(None)
    if place is not None and place.leave is not None:
        place.leave()


Left: TypeAlias = "Exception | Callable[[], Coroutine[Any, Any, None]] | None"
"""What a transaction without a task leaves: nothing, its error, or what builds the rest of it, which needs a task."""


class Begun:
    """A transaction that runs already, and needs no task."""

    __slots__ = ("_then", "is_over")

    def __init__(self) -> None:
        self.is_over = False  # it has ended, or nobody waits for it any more
        self._then: Callable[[Left], object] | None = None

    def then(self, ended: Callable[[Left], object]) -> None:
        """Call `ended` once, in a later turn of the loop, when it has ended."""
        self._then = ended

    def end(self, left: Left) -> None:
        """It has ended."""
        if not self.is_over:
            self.is_over = True
            if self._then is not None:
                self._then(left)

    def forget(self) -> None:
        """Nobody waits for it any more: `ended` is not called. If nothing was sent yet, nothing is."""
        self.is_over, self._then = True, None

    def __await__(self) -> Generator[Any, None, None]:
        """In place of `then`, with the rest. Raises the error."""
        answer: asyncio.Future[Left] = asyncio.get_running_loop().create_future()

        def ended(left: Left) -> None:
            if not answer.done():  # it is if the task that waits was cancelled
                answer.set_result(left)

        self.then(ended)
        left = yield from answer
        if isinstance(left, Exception):
            raise left
        if left is not None:
            yield from left().__await__()


Running: TypeAlias = "Coroutine[Any, Any, None] | Begun"
"""A transaction. A coroutine gets a task."""


class Owner(Protocol):
    """Whose transactions they are."""

    def begin(self, job: Job) -> Running | None:
        """Build the transaction. None: it is done already. Raises any exception if it failed."""

    def ended(self, job: Job, error: Exception | None) -> None:
        """It has ended, or has failed with that error."""


class Job(Asked):
    """An op and its transaction."""

    __slots__ = (
        "asked", "began", "begun", "cancels", "has_no_place", "is_begun_earlier", "keys", "owner", "runner", "sent",
        "votes", "waits_for_store",
    )  # fmt: skip

    def __init__(self, owner: Owner, op: Op, handler: ReplyHandler, keys: Sequence[str]) -> None:
        super().__init__(op, handler)
        self.owner = owner
        self.asked = op  # as it was when it was sent; its owner may change it while it waits
        self.keys = keys
        self.sent = handler.sent  # that of the handler may count from when it begins
        self.votes: Sequence[Grant | Refused | Undone] | None = None  # the answer, once its transaction has ended
        self.runner: asyncio.Task[None] | None = None  # runs it, if it needs a task
        self.waits_for_store = False  # its task waits until the store is up: `limit` is called then
        self.cancels = 0  # how often it was cancelled because it did not end
        self.began = math.inf  # when its transaction did, if that has a limit
        self.begun = False  # its task has had its first step
        self.has_no_place = False  # it takes no place (`leave_place`)
        self.is_begun_earlier = False  # it ends in another turn of the loop than that in which it was sent


class Jobs:
    """Those with a key in common run one after the other, in the order in which they were added. Others run at the same
    time, at most `most` of them, without those that wait for another session (`leave_place`); of those that wait, the
    urgent ones begin first (`backlog.py`). A job is urgent, too, if an urgent one waits for it. `finished` is called
    with the keys of each job that has run.

    `limited`: a transaction that does not end is cancelled. It may be carried out nevertheless, so its error is no
    answer, whatever it does after the cancel. If it goes on, no other one takes its place: the store may rely on
    `most`, and what it still does must come before the release of the same hold."""

    def __init__(
        self,
        label: str,
        most: int,
        config: NodeConfig,
        finished: Callable[[Sequence[str]], object],
        *,
        limited: bool,
    ) -> None:
        self._most = most
        self._finished = finished
        self._label = label
        self._clock: Clock = config.clock
        alone = config.quarantine is None
        self.backlog = Backlog[Job](label, config, self._has_room, self._begin, self._dropped, alone=alone)
        self._lines: dict[str, OrderedDict[Job, None]] = {}  # by key, in order: those that have not ended
        self._running: dict[str, int] = {}  # jobs by key
        self._runners: set[asyncio.Task[None]] = set()
        self._begun: dict[Job, Begun] = {}  # those that need no task
        self._active = 0  # runners whose job has not ended, and takes a place
        self._without_place = 0  # those that take none
        self._all_ended: asyncio.Event | None = None  # set when `_begun` is empty again
        self._closed = False
        self._limited = limited
        self._limits = Deadlines[Job](config.clock, self._cancel)  # those that run in a task
        self._left_behind: set[Job] = set()  # those that go on after a cancel
        self._origin = Origin()

    def runs(self, key: str) -> bool:
        """Whether a transaction of that key runs now."""
        return key in self._running

    def add(self, job: Job) -> None:
        """Run it in its turn."""
        is_first = True
        for key in job.keys:
            if (line := self._lines.get(key)) is None:
                line = self._lines[key] = OrderedDict()
            else:
                is_first = False
            line[job] = None
        if is_first and self._active < self._most and not self.backlog.can_begin:
            self._begin(job)
        elif self.backlog.put(job):
            if job.deferred is None:  # the owner of a deferred op sends it again only after it was dropped
                job.asked = copy_of(job.op)
            if is_first:
                self.backlog.ready(job)
            elif job.urgent:
                self._hurry(job)

    def _has_room(self) -> bool:
        return self._active < self._most and not self._closed

    def _is_first(self, job: Job) -> bool:
        return all(next(iter(self._lines[key])) is job for key in job.keys)

    def _hurry(self, job: Job) -> None:
        """Those before it at its keys are as urgent as it is. Before an urgent job all are."""
        later = [job]
        while later:
            job = later.pop()
            for key in job.keys:
                before = iter(reversed(self._lines[key]))
                while next(before) is not job:
                    pass
                for each in before:
                    if each.urgent:
                        break
                    self.backlog.hurry(each)
                    if len(each.keys) > 1:
                        later.append(each)

    # -- running -------------------------------------------------------------------------------------------------

    def _dropped(self, job: Job) -> None:
        """It does not begin any more. Those after it may, although none has ended."""
        self._remove(job)
        self.backlog.begin_soon()

    def _begin(self, job: Job) -> None:
        for key in job.keys:
            self._running[key] = self._running.get(key, 0) + 1
        try:
            self._origin.check()  # those that wait in a forked child are jobs of the parent
            running = job.owner.begin(job)
        except Exception as error:  # any failure of the store
            self._end(job, error)
            return
        if running is None:
            self._end(job, None)
            return
        self._active += 1
        if isinstance(running, Begun):
            self._begun[job] = running
            running.then(partial(self._begun_ended, job, self._clock.now()))
        else:
            self._run_in_task(job, running, self._clock.now())
        job.is_begun_earlier = True

    def _run_in_task(self, job: Job, running: Coroutine[Any, Any, None], began: float) -> None:
        name, ended = f"asynclock {self._label}", partial(self._runner_ended, job, running)
        if self._limited and not job.waits_for_store:
            self.limit(job)
        job.runner = own_task(self._run(job, running, began), name, ended)
        self._runners.add(job.runner)

    def limit(self, job: Job) -> None:
        """Its transaction begins."""
        if self._limited:
            job.began = self._clock.now()
            self._limits.add(job, max(job.handler.deadline, job.began + ANSWER_TIMEOUT) + GRACE)

    def _cancel(self, job: Job) -> None:
        """Its transaction has not ended in time."""
        if job.runner is None or job.runner.done():
            return
        job.cancels += 1
        if job.cancels > 1:
            self._is_left_behind(job)
        self._limits.add(job, self._clock.now() + min(_AGAIN[0] * 2 ** (job.cancels - 1), _AGAIN[1]))
        job.runner.cancel()

    def _is_left_behind(self, job: Job) -> None:
        """The log says so once, until none is left."""
        if not self._left_behind:
            fields = {"asynclock_node": self._label, "asynclock_lock": job.op.name}
            log.warning(
                "asynclock: a transaction of %s does not end, although it was cancelled: until it ends, requests for "
                "its names wait, and fewer others run at the same time",
                self._label,
                extra=fields,
            )
        self._left_behind.add(job)

    def _begun_ended(self, job: Job, began: float, left: Left) -> None:
        del self._begun[job]
        if not self._begun and self._all_ended is not None:
            self._all_ended.set()
        if left is None or isinstance(left, Exception):
            self._ran(job, began, left)
        else:
            self._run_in_task(job, left(), began)

    def _runner_ended(self, job: Job, running: Coroutine[Any, Any, None], runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not job.begun:  # it was cancelled before its first step
            running.close()
            self._was_cancelled(job)

    async def _run(self, job: Job, running: Coroutine[Any, Any, None], began: float) -> None:
        error, job.begun = None, True
        _PLACE.set(place := _Place(partial(self._leave_place, job)))
        try:
            await running
        except Exception as failure:  # any failure of the store; its next transaction may work
            error = failure
        except GeneratorExit:  # the loop has ended without it
            raise
        except BaseException as failure:
            if not (job.cancels and isinstance(failure, asyncio.CancelledError)):
                self._was_cancelled(job)
                raise
        finally:
            place.leave = None
        if job.cancels:
            said = f"{self._label}: its transaction did not end in time, so it was cancelled, and may be carried out"
            cancelled = TimeoutError(said)
            cancelled.__cause__ = error
            error = cancelled
        self._ran(job, began, error)

    def _ran(self, job: Job, began: float, error: Exception | None) -> None:
        self._is_over(job)
        if job.op.verb is ACQUIRE and error is None and not job.has_no_place:
            self.backlog.took(self._clock.now() - began)
        try:
            self._end(job, error)
        finally:
            self.backlog.begin_more()

    def _was_cancelled(self, job: Job) -> None:
        """By a close, after which its handler gets the error at its deadline; or by the program, which cancels all
        tasks of its loop."""
        self._is_over(job)
        if self._closed:
            self._leave(job)
        else:
            self._end(job, ConnectionError(f"{self._label}: the task of this request was cancelled"))
            self.backlog.begin_soon()

    def _leave_place(self, job: Job) -> None:
        if not job.has_no_place and self._without_place < _WITHOUT_PLACE:
            job.has_no_place = True
            self._active -= 1
            self._without_place += 1
            self.backlog.begin_soon()

    def _is_over(self, job: Job) -> None:
        if job.has_no_place:
            self._without_place -= 1
        else:
            self._active -= 1
        if self._limited:
            self._limits.remove(job)
            self._left_behind.discard(job)

    def _end(self, job: Job, error: Exception | None) -> None:
        try:
            job.owner.ended(job, error)
        finally:  # its handler may raise an exception: those after it run nevertheless
            self._leave(job)

    def _leave(self, job: Job) -> None:
        """It does not run any more."""
        for key in job.keys:
            if self._running[key] == 1:
                del self._running[key]
            else:
                self._running[key] -= 1
        self._finished(job.keys)
        self._remove(job)

    def _remove(self, job: Job) -> None:
        """Those after it may begin. A second call does nothing."""
        for key in job.keys:
            line = self._lines.get(key)
            if line is None or job not in line:
                continue
            del line[job]
            if not line:
                del self._lines[key]
            elif (first := next(iter(line))).waits and not first.in_lane and self._is_first(first):
                self.backlog.ready(first)

    async def rest(self, within: float) -> None:
        """Wait at most that many seconds for the jobs to end."""
        until = self._clock.now() + within
        while (self._runners or self._begun) and (left := until - self._clock.now()) > 0:
            if self._runners:
                await asyncio.wait(set(self._runners), timeout=left)
                continue
            self._all_ended = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._all_ended.wait()

    def cancel_begun_before(self, when: float) -> None:
        """Cancel those that have a limit, before it is reached, if they began before that moment."""
        for job in self._limits:
            if job.began < when:
                self._cancel(job)

    async def aclose(self) -> None:
        """Cancel those that run, and drop the others."""
        self._closed = True
        self._limits.stop()
        for job, begun in list(self._begun.items()):
            begun.forget()
            self._active -= 1
            self._leave(job)
        self._begun.clear()
        for runner in (running := set(self._runners)):
            runner.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCELLING)
        await self.backlog.aclose(ConnectionError(f"{self._label} is closed"))
        self._lines.clear()
