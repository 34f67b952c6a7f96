"""A store made of `decide` and one transaction: the memory store, and the stores that users write (docs/stores.md).

Such a store keeps one `State` for each key. It implements:

    transact   run a step over the states of some keys, in one transaction and at the server's time; push its notices
    listen     receive the notices for one client; `unlisten` ends that
    keys       list the keys that are held

This module does the rest. The step computes the new states from an op. The node carries out the ops of a name in the
order in which they are sent (`jobs.py`), lets renewals and releases of other names overtake acquires (`backlog.py`),
keeps the deadlines of ops, and lets no notice overtake the reply to an op that was carried out before.
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError
from asynclock._loop import own_task
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.decide import decide
from asynclock.rules.model import ID_LENGTH, PEEK, PEEK_ID, Notice, Op, State, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.closing import AT_MOST, AWAITED, CANCELLING, closing_time
from asynclock.stores.deadlines import Deadlines
from asynclock.stores.deciding import Change, Step, copy_of, decided, keys_of, view_of
from asynclock.stores.doubts import Doubts
from asynclock.stores.forks import Origin
from asynclock.stores.jobs import Job, Jobs
from asynclock.stores.port import CHECK_LIMIT, PROBE, Checked, NodeView, Reconnecting, Refused, Unfit, WrongKind
from asynclock.stores.redelivery import Redelivery
from asynclock.stores.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from asynclock._time import Clock
    from asynclock.stores.jobs import Running
    from asynclock.stores.port import Grant, NodeConfig, ReplyHandler, Undone
    from asynclock.stores.undelivered import PendingRelease

__all__ = [
    "Change",
    "Notice",
    "State",
    "Step",
    "TransactionalNode",
    "TransactionalStore",
]

_REOPEN = (0.05, 1.0)
"""Seconds between two attempts to open a node that is down: the least and the greatest; doubled after each."""

_PATIENT = 2 / 3
"""The part of the time for which a close awaits answers. After that it cancels the transactions that had begun before
it, unless the store limits them: one that hangs may be in the way of a release."""

_PROBE_LEASE = 1.0
"""Seconds for which a check may leave its hold, if its second transaction fails."""


class TransactionalStore(ABC):
    """Subclass it, and give instances to `Redlock`. All clients of one store share its locks."""

    label: str  # for messages; without a password
    clock: Clock | None = None  # the clock that its clients must use; None: the clock of the machine
    thread_safe = False  # whether several threads may use it at the same time, each in an event loop of its own
    concurrency = 1  # transactions of one node at the same time; more than one: of different keys only
    limits_transactions = False  # whether each ends by itself; else the node cancels one that does not end

    @abstractmethod
    def transact(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None] | None:
        """Read the states of `keys` (State() where none is stored), call `step` with them and the server's time, store
        the states that it returns, and push its notices after the commit. This is one atomic and isolated transaction.
        `keys` are distinct, and may be empty. Return None if the work is done, else a coroutine; the node awaits it
        before it begins its next op (with a `concurrency`, its next op of one of these keys), and cancels it if it does
        not end. Raise any exception if the transaction failed."""

    def read(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None] | None:
        """As `transact`, for a step that returns the states as they are: for `locked` and `inspect`. Override it where
        a read can do without locks and without the right to write. The states must be committed, of one moment, and
        the time must not be later than that."""
        return self.transact(keys, step)

    @abstractmethod
    def listen(self, tag: str, receive: Callable[[Notice], object]) -> Coroutine[Any, Any, None] | None:
        """From now on call `receive` with each notice for `tag`, in the running loop. Raise any exception if that
        fails."""

    @abstractmethod
    def unlisten(self, tag: str) -> Coroutine[Any, Any, None] | None:
        """The client of that tag has closed. Must not raise."""

    @abstractmethod
    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """The next cursor, and some of the keys that are held and begin with `begin`. The cursor "0" starts the
        listing, and marks its end when it is returned."""

    def has_listener(self, tag: str) -> bool | None:
        """Whether a client listens to that tag; True if the store cannot know. When a ticket without a listener is
        served, it is dropped if this returns False; otherwise it absorbs one notice."""
        del tag
        return True

    def is_down(self, error: Exception) -> bool:
        """Whether an error of `transact` says that the database cannot be reached. Then the node opens again in the
        background, and meanwhile its ops fail at once."""
        del error
        return False

    def delay(self, keys: Sequence[str], since: float) -> str:
        """Why ops of these keys that were sent at `since`, on the client's clock, have no answer yet; "" if unknown.
        The key "" stands for the first connect."""
        del keys, since
        return ""

    def undone(self, tag: str) -> Sequence[Op]:
        """Take the releases of the client of that tag that were carried out, and that an outage of the database may
        have undone. The node sends them again once it has opened again."""
        del tag
        return ()

    def view(self) -> str:
        """What a reader must know of the states that were read last; "" if they are those on which ops are decided."""
        return ""

    def remark(self) -> str:
        """What does not work although locks do, for `health`; "" if nothing."""
        return ""

    def open(self, config: NodeConfig) -> TransactionalNode:
        """Make its node for one event loop."""
        return TransactionalNode(self, config)

    def decide(
        self, prefix: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]
    ) -> tuple[Running, list[Grant | Refused | Undone]] | None:
        """Carry out an op. None: it is carried out, and `answer` was called. Else a coroutine or a future, and a list
        that contains the answer once that has been awaited. Raises WrongKind, or the exception of the store."""
        asked = [op]
        step, votes = self.step_of(asked)
        running = (self.read if op.verb is PEEK else self.transact)(keys_of(prefix, op), step)
        if running is None:
            if not votes:
                raise _unanswered(self.label)
            answer(votes[0])
            return None
        asked[0] = copy_of(op)
        return running, votes

    def deliver(
        self, prefix: str, release: PendingRelease, answer: Callable[[Grant | Refused | Undone], object]
    ) -> tuple[Running, list[Grant | Refused | Undone]] | None:
        """Carry out a release that failed before, as `decide` does. It may fail again and again: a store with a limit
        for waits in its database sets a short one here, so that other names do not wait for it."""
        return self.decide(prefix, release, answer)

    def step_of(self, asked: Sequence[Op]) -> tuple[Step, list[Grant | Refused | Undone]]:
        """The step for the op in `asked`, and the list that contains its answer after each run of the step."""
        votes: list[Grant | Refused | Undone] = []

        def step(states: Sequence[State], now: float) -> Change:
            change, vote = decided(asked[0], states, now, self.has_listener)
            votes[:] = [vote]
            return change

        return step, votes


class TransactionalNode:
    """The store, as one event loop sees it. It never answers before the next turn of the loop."""

    check_limit = CHECK_LIMIT

    def __init__(self, store: TransactionalStore, config: NodeConfig) -> None:
        self.label = store.label
        self.error: Exception | None = None
        self.listens = False
        self._store = store
        self._index = config.position
        self._prefix = config.prefix
        self._listener = config.listener
        self._clock = config.clock
        self._reports = Reports(store.label, config.tell, config.clock)
        self._due = 0  # the number of replies that are scheduled
        self._notices: deque[Notice] = deque()  # received while a reply was scheduled
        self._jobs = Jobs(store.label, store.concurrency, config, self._finished, limited=not store.limits_transactions)
        self._doubts = Doubts()
        self._redelivery = Redelivery(config.clock, self._send_again, self._opens)
        self._held_back: dict[str, list[Notice]] = {}  # by key: received while a transaction of that key ran
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._origin = Origin()
        self._last_deadline = -math.inf
        self._releasing = 0  # releases under way, of which some may be overdue
        self._closed = False
        self._under_way = Deadlines[Job](config.clock, self._overdue)  # ops that have begun, and are not overdue
        self._down: asyncio.Event | None = None  # set once the database is up again; None: it is not down
        self._undone: Sequence[Op] = ()  # see `TransactionalStore.undone`

    async def open(self) -> None:
        if self._down is not None:  # it opens again in the background, for as long as the outage lasts
            return
        if self._opening is None or self._opening.done():
            listening = self._begin_to_listen()
            if listening is None:
                return
            if not self._opened and self.error is None:
                self.error = ConnectionError(f"{self.label} is not connected yet")
            self._open_soon(self._listens_after(listening))
        if self._opening is not None:
            await asyncio.wait({self._opening})  # it goes on if this is cancelled

    async def _open_again(self) -> None:
        if (listening := self._begin_to_listen()) is not None:
            await self._listens_after(listening)

    def _begin_to_listen(self) -> Coroutine[Any, Any, None] | None:
        """What is left to await; None: nothing. The copy of a node in a forked child never opens again: the notices are
        those of the parent."""
        try:
            self._origin.check()
            listening = self._store.listen(self._listener.tag, self._received)
        except Exception as error:  # a store may fail in any way; `error` keeps the reason, and the next op tries again
            self._is_not_open(error)
            return None
        if listening is None:
            self._is_open()
        return listening

    async def _listens_after(self, listening: Coroutine[Any, Any, None]) -> None:
        try:
            await listening
        except Exception as error:  # the same
            self._is_not_open(error)
        else:
            self._is_open()

    def _is_not_open(self, error: Exception) -> None:
        self.error = error
        self._reports.down(error)

    def _is_open(self) -> None:
        again, self._opened = self._opened, True
        self.error, self.listens = None, True
        if self._down is not None:
            self._down.set()
            self._down = None
        self._reports.up()
        if again:  # some were answered after the outage was noticed
            self._redelivery.keep_undone([*self._undone, *self._store.undone(self._listener.tag)])
            self._undone = ()
        self._redelivery.retry()
        if again:
            self._listener.connected(self._index)

    def lost(self, error: Exception) -> None:
        """The database cannot be reached, or must not be used as it is now (ConfigError): ops fail at once, while the
        node opens again in the background. A store calls it, from the loop of the node. Releases wait until then, but
        for those after a ConfigError."""
        if self.error is None and not self._closed:
            self.error, self._down = error, asyncio.Event()
            if isinstance(error, ConfigError):  # it answers, and can still free a name
                self._down.set()
            self._undone = self._store.undone(self._listener.tag)
            self._jobs.backlog.fail(lambda: self.error)
            self._reports.down(error)  # of an idle connection that was closed: only if it cannot be made again
            self._open_soon(self._reopen())

    async def _reopen(self) -> None:
        pause = _REOPEN[0]
        while not self._closed and self._origin.is_here:
            await self._open_again()
            if self.error is None:
                return
            await self._pause(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause = min(2 * pause, _REOPEN[1])

    async def _pause(self, seconds: float) -> None:
        """Before it opens again."""
        await asyncio.sleep(seconds)

    def _open_soon(self, opening: Coroutine[Any, Any, None]) -> None:
        self._opening = own_task(opening, f"asynclock {self.label}")

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if op.verb is Verb.RELEASE and self._jobs.backlog.undo(op.id):
            self._reply(lambda: handler.answer(self._index, Refused(None)))
            return
        waits = self._down is not None and op.verb is Verb.RELEASE  # a hold that is not released stays for its lease
        if self.error is not None and not waits:
            self._failed(handler, self._reason(self.error), maybe=False)
            self._open_unless_opening()
            return
        if self._redelivery:
            self._redelivery.send_before(op)
        self._releasing += op.verb is Verb.RELEASE
        if op.verb in AWAITED:
            self._last_deadline = max(self._last_deadline, handler.deadline)
        self._jobs.add(Job(self, op, handler, keys_of(self._prefix, op)))

    def begin(self, job: Job) -> Running | None:
        """Carry an op out. None: it is answered, or has failed. Raises the error of the store."""
        running: Running | None
        if self._down is not None and job.op.verb is Verb.RELEASE:
            job.waits_for_store = True
            running = self._decide_once_up(job)
        elif self.error is not None:  # it came while the op was waiting
            self._failed(job.handler, self.error, maybe=job.may_be_done)
            return None
        elif (running := self._decide(job)) is None:
            return None
        self._under_way.add(job, min(job.handler.deadline, job.until))
        return running

    def _decide(self, job: Job) -> Running | None:
        if job.op.verb is Verb.ACQUIRE:
            job.op.sent = self._clock.now()
        elif job.op.verb is Verb.RELEASE and (job.op.rest or job.op.id in self._doubts):
            self._prepare_release(job)
        pending = self._store.decide(self._prefix, job.asked, partial(self._answer, job.handler))
        if pending is None:
            return None
        running, job.votes = pending
        return running

    def _prepare_release(self, job: Job) -> None:
        job.asked = copy_of(job.op)
        job.asked.tombstone |= job.op.id in self._doubts
        job.asked.rest = max(0.0, job.op.rest - (self._clock.now() - job.sent))  # min_hold counts from the release

    async def _decide_once_up(self, job: Job) -> None:
        if self._down is not None:
            await self._down.wait()
        self._jobs.limit(job)
        if (running := self._decide(job)) is not None:
            await running

    def ended(self, job: Job, error: Exception | None) -> None:
        self._releasing -= job.op.verb is Verb.RELEASE
        self._under_way.remove(job)
        if error is None and job.votes is not None and not job.votes:
            error = _unanswered(self.label)
        if error is None:
            if job.votes and job.is_begun_earlier:
                job.handler.answer(self._index, job.votes[0])
            elif job.votes:
                self._answer(job.handler, job.votes[0])
            return
        error, is_down = self._judged(error)
        if is_down:
            error = self._interrupted(error)
        maybe = not isinstance(error, WrongKind | Unfit)
        if maybe:
            self._doubts.add(job.op)
        self._failed(job.handler, error, maybe=maybe)
        if is_down:
            self.lost(error)

    def _judged(self, error: Exception) -> tuple[Exception, bool]:
        """The error of an op, and whether the node is down. If the store cannot say that, its failure is the error: a
        caller must have an answer."""
        if isinstance(error, WrongKind):  # of the step
            return error, False
        try:
            return error, self._store.is_down(error)
        except Exception as failure:
            self._reports.fault("is_down", failure)
            if failure is not error:
                failure.__cause__ = error
            return failure, False

    def _why(self, keys: Sequence[str], since: float) -> str:
        """What the store says of ops without an answer."""
        try:
            return self._store.delay(keys, since)
        except Exception as failure:
            self._reports.fault("delay", failure)
            return f"delay() of the store failed: {failure!r}"

    def _send_again(self, release: PendingRelease, done: Callable[[Exception | None], object]) -> None:
        """Carry out a release that failed before, in its turn, and call `done` with its error."""

        def build() -> Running | None:
            release.send_at(self._clock.now())
            pending = self._store.deliver(self._prefix, release, lambda vote: None)
            return None if pending is None else pending[0]

        def ended(error: Exception | None) -> None:
            done(error)
            if error is not None and self._judged(error)[1]:
                self.lost(self._interrupted(error))

        errand = _Errand(release, self._clock.now(), build, ended)
        self._jobs.add(Job(errand, release, errand, keys_of(self._prefix, release)))

    def _opens(self) -> bool:
        """Whether it is open, or closes: then what is left is tried nevertheless. If it is down, it opens again."""
        if self.error is None or self._closed:
            return True
        self._open_unless_opening()
        return False

    def _reason(self, error: Exception) -> Exception:
        """Why it is not open, with what the database has said so far."""
        why = "" if self._opened else self._why([""], math.inf)
        return ConnectionError(f"{error}: {why}") if why else error

    def _open_unless_opening(self) -> None:
        if self._opening is None or self._opening.done():
            self._open_soon(self._open_again())

    def _interrupted(self, error: Exception) -> Exception:
        """Of an op whose connection is gone: it may have been idle for long. A connection without an answer was not."""
        if isinstance(error, TimeoutError) or not (self.error is None or isinstance(self.error, Reconnecting)):
            return error
        interrupted = Reconnecting(str(error) or repr(error))
        interrupted.__cause__ = error
        return interrupted

    def _overdue(self, job: Job) -> None:
        handler = job.handler
        within, keys = handler.deadline - handler.sent, keys_of(self._prefix, handler.op)
        said = f"{self.label} did not answer within {within:.3g} s"
        why = self._why(keys, handler.sent)
        handler.fail(self._index, TimeoutError(f"{said}: {why}" if why else said), maybe=True)

    def _answer(self, handler: ReplyHandler, vote: Grant | Refused | Undone) -> None:
        self._reply(lambda: handler.answer(self._index, vote))

    def _failed(self, handler: ReplyHandler, error: Exception, *, maybe: bool) -> None:
        """An op has failed. A release is kept, and sent again."""
        if handler.op.verb is Verb.RELEASE:
            self._redelivery.keep(handler.op, handler.sent, error)
        self._reply(lambda: handler.fail(self._index, error, maybe=maybe))

    # -- the order of ops, replies and notices -------------------------------------------------------------------

    def _finished(self, keys: Sequence[str]) -> None:
        """The transactions of these keys have ended, and their replies are scheduled. Their notices come after them."""
        for key in keys:
            for notice in self._held_back.pop(key, ()):
                self._notices.append(notice)
                asyncio.get_running_loop().call_soon(self._pass_notice_on)

    def _reply(self, deliver: Callable[[], object]) -> None:
        self._due += 1
        asyncio.get_running_loop().call_soon(self._deliver, deliver)

    def _deliver(self, deliver: Callable[[], object]) -> None:
        self._due -= 1
        deliver()

    def _received(self, notice: Notice) -> None:
        """A notice arrived. It may belong to an op that is committed, but whose reply is not delivered yet. Then it
        waits for that reply."""
        if notice.fence:
            self._jobs.backlog.granted(notice.id)
        if self._jobs.runs(key := self._prefix + notice.name):
            self._held_back.setdefault(key, []).append(notice)
            return
        self._notices.append(notice)
        if self._due or len(self._notices) > 1:
            asyncio.get_running_loop().call_soon(self._pass_notice_on)
        else:
            self._pass_notice_on()

    def _pass_notice_on(self) -> None:
        if self._notices:
            self._listener.received(self._index, self._notices.popleft())

    async def _in_turn(self, keys: Sequence[str], run: Callable[[], Coroutine[Any, Any, None] | None]) -> None:
        """Run a transaction after those of the ops that were sent earlier."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if not ended.done():
                ended.set_result(None) if error is None else ended.set_exception(error)

        op = Op(PEEK, MUTEX, "", PEEK_ID, 0.0)
        errand = _Errand(op, self._clock.now(), run, done)
        job = Job(errand, op, errand, keys)
        job.urgent = True
        self._jobs.add(job)
        try:
            await ended
        except asyncio.CancelledError:
            self._jobs.backlog.drop(job, LookupError("its caller gave up"))
            raise

    # -- the rest ------------------------------------------------------------------------------------------------

    async def check_vote(self) -> Checked:
        if self.error is not None:
            if isinstance(self.error, ConfigError):  # the client does not ask again by itself
                self._open_unless_opening()
            raise self._reason(self.error)
        began = self._clock.now()
        random = self._listener.tag.ljust(ID_LENGTH, "0")

        def step(verb: Verb, states: Sequence[State], now: float) -> Change:
            op = Op(verb, MUTEX, PROBE, f"{random}|", _PROBE_LEASE, memory=_PROBE_LEASE)
            state = decide(MUTEX, states[0], op, now, self._store.has_listener).state
            return Change([state if state.holds else State()])

        for verb in (Verb.ACQUIRE, Verb.RELEASE):  # two transactions: the first one writes
            keys = [self._prefix + PROBE]
            await self._in_turn(keys, partial(self._store.transact, keys, partial(step, verb)))
        notes = filter(None, (self._redelivery.note, self._store.remark()))
        return Checked(self._clock.now() - began, "; ".join(notes))

    def delay(self, since: float, name: str = PROBE) -> str:
        return self._why([self._prefix + name], since)

    async def probe(self, name: str) -> NodeView:
        views: list[NodeView] = []

        def look(states: Sequence[State], now: float) -> Change:
            views[:] = [view_of(states[0].at(now), now)]
            return Change(states)

        keys = [self._prefix + name]
        await self._in_turn(keys, partial(self._store.read, keys, look))
        return views[0]._replace(note=self._store.view())

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        after, keys = await self._store.keys(self._prefix + begin, cursor)
        return after, [key[len(self._prefix) :] for key in keys]

    async def aclose(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()  # a driver may lose it: then the connection is there, and `unlisten` closes it
            await asyncio.wait({self._opening}, timeout=CANCELLING)
        if self._down is not None:
            self._down.set()  # a release that waits for the database is tried now
        began = self._clock.now()
        within = AT_MOST if self._releasing else closing_time(self._last_deadline - began)
        await self._jobs.rest(within * _PATIENT)
        self._jobs.cancel_begun_before(began)
        await self._jobs.rest(began + within - self._clock.now())
        await self._redelivery.finish(began + AT_MOST)
        self._redelivery.stop()
        await self._jobs.aclose()
        if not self._under_way:
            self._under_way.stop()
        self.listens = False
        if (closing := self._store.unlisten(self._listener.tag)) is not None:
            await closing


def _unanswered(label: str) -> RuntimeError:
    """The error of an op whose transaction has ended without its step."""
    return RuntimeError(f"{label}: transact() has ended, and did not call the step, so the op has no answer")


class _Errand:
    """A transaction that no op of a lock waits for: the owner of its job, and the handler that the queue tells of a
    failure."""

    def __init__(
        self,
        op: Op,
        now: float,
        build: Callable[[], Running | None],
        done: Callable[[Exception | None], object],
    ) -> None:
        self.op = op
        self.sent, self.deadline = now, now + ANSWER_TIMEOUT  # to begin
        self._build = build
        self._done = done

    def begin(self, job: Job) -> Running | None:
        del job
        return self._build()

    def ended(self, job: Job, error: Exception | None) -> None:
        del job
        self._done(error)

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        """Its job tells its end."""

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        """It did not begin in time. A release begins all the same (rule 3 of `backlog.py`)."""
        del index, maybe
        if self.op.verb is not Verb.RELEASE:
            self._done(error)
