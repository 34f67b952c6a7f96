"""A simulated database, and the store that reaches it: a `TransactionalStore` as a user would write it. A transaction
may take its time, fail before it has done anything, fail after its commit, or never answer; a driver may lose a cancel.

What the store promises is what docs/stores.md asks: a transaction that was given up is not carried out later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import ID_LENGTH, RESTING_MARK, TIMED, State
from asynclock.stores.transactional import TransactionalStore
from simulation.loop import WALL
from simulation.stack.loop import StackLoop
from simulation.stack.network import FROM, TO

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from random import Random

    from asynclock.rules.model import Notice, Op
    from asynclock.stores.transactional import Step
    from simulation.stack.network import Link
    from simulation.stack.world import World


class DatabaseError(Exception):
    """The database refuses."""


class _Request:
    """A transaction, or a connect, of one client."""

    def __init__(
        self, process: str, keys: Sequence[str], work: Callable[[], object], done: asyncio.Future[None]
    ) -> None:
        self.process = process
        self.keys = keys
        self.work = work
        self.done = done
        self.given_up = False


class _Names:
    """The stored names, as the keys of a server."""

    def __init__(self, states: dict[str, State]) -> None:
        self._states = states

    @property
    def values(self) -> dict[bytes, State]:
        return {key.encode(): state for key, state in self._states.items()}


class Database:
    """See the module."""

    node = index = 0
    role = "master"

    def __init__(self, world: World, random: Random, rate: float, offset: float) -> None:
        self.world = world
        self.host = self.label = "10.0.2.1"
        self.states: dict[str, State] = {}
        self.keys = _Names(self.states)
        self.state = "up"
        self.errs = ""
        self.listeners: dict[str, tuple[StackLoop, Callable[[Notice], object]]] = {}
        self._random = random
        self._rate, self._offset = rate, offset
        self._frozen = 0
        self._inbox: list[_Request] = []
        self._open: dict[_Request, None] = {}

    # -- as the judge sees it ----------------------------------------------------------------------------------------

    def now(self) -> float:
        return WALL + self._offset + self._rate * self.world.schedule.now

    def true_time(self, when: float) -> float:
        return (when - WALL - self._offset) / self._rate

    def holders(self, key: bytes) -> dict[str, float]:
        state = self.states.get(key.decode(), State()).at(self.now())
        return {
            each.id[:ID_LENGTH]: self.true_time(each.ends if each.ends is not None else self.now())
            for each in state.holds
            if each.id not in TIMED and each.id[0] != RESTING_MARK
        }

    def ids(self, key: bytes) -> list[str]:
        state = self.states.get(key.decode(), State()).at(self.now())
        ids = [each.id for each in state.holds] + [each.id for each in state.queue]
        return [each[:ID_LENGTH] for each in ids]

    def left(self) -> list[str]:
        """The names that have more than a counter."""
        found = []
        for key, state in self.states.items():
            now = state.at(self.now())
            if now.holds or now.queue or now.undone:
                found.append(key)
        return found

    # -- transactions ------------------------------------------------------------------------------------------------

    def link(self, loop: StackLoop) -> Link:
        return self.world.network.link(loop.name, self.host)

    async def ask(self, loop: StackLoop, keys: Sequence[str], work: Callable[[], object]) -> None:
        """Send a request, and wait for its end. A cancel gives it up."""
        link, schedule = self.link(loop), self.world.schedule
        request = _Request(loop.name, keys, work, loop.create_future())
        self._open[request] = None
        schedule.at(link.arrival(TO), self._received, request, link)
        link.written()
        try:
            await request.done
        finally:
            request.given_up = True
            self._open.pop(request, None)

    def _received(self, request: _Request, link: Link) -> None:
        if self._frozen:
            self._inbox.append(request)
            return
        if self.state != "up":
            if self.state == "refuses":
                self._end(request, ConnectionRefusedError(111, "no database listens there"))
            return
        if request.given_up or request.done.done():
            return
        if self.errs and request.keys:
            self._refuse(request, link)
            return
        request.work()
        self.world.schedule.at(link.arrival(FROM), self._end, request, None)

    def _refuse(self, request: _Request, link: Link) -> None:
        """With an error, which may hide that the transaction was committed; or with nothing."""
        if self.errs == "silent":
            return
        if self.errs == "ambiguous":
            request.work()
        self.world.schedule.at(link.arrival(FROM), self._end, request, DatabaseError(f"it is {self.errs}"))

    def _end(self, request: _Request, error: Exception | None) -> None:
        loop = request.done.get_loop()
        if isinstance(loop, StackLoop):
            loop.post(_settle, request.done, error)

    def run(self, op: Op | None, keys: Sequence[str], step: Step) -> None:
        """A transaction."""
        now = self.now()
        before = [self.states.get(key, State()) for key in keys]
        after, notices = step(before, now)
        for key, state in zip(keys, after, strict=True):
            self.states[key] = state
            if state == State():
                del self.states[key]
        if op is not None:
            self.world.judge.carried_out(self, op, None, before, after)  # type: ignore[arg-type]
        for notice in notices:
            loop, receive = self.listeners[notice.tag]  # `decide` notifies those that listen
            self.world.schedule.at(self.link(loop).arrival(FROM), loop.post, receive, notice)

    # -- what happens to it ------------------------------------------------------------------------------------------

    def cut(self, process: str, *, commits: bool) -> None:
        """The connections of a process are lost, with what is under way."""
        for request in [each for each in self._open if each.process.partition("#")[0] == process]:
            if request.done.done() or request.given_up:
                continue
            if commits and self.state == "up" and not self._frozen and self._random.random() < 0.5:
                request.work()
            request.given_up = True
            self._end(request, ConnectionResetError(104, "the connection was lost"))

    def hung_up(self, loop: StackLoop) -> None:
        """A process has ended."""
        self.listeners = {tag: its for tag, its in self.listeners.items() if its[0] is not loop}

    def swallow(self, process: str) -> None:
        """What is under way of a process gets no answer, ever."""
        for request in [each for each in self._open if each.process.partition("#")[0] == process]:
            request.given_up = True

    def freeze(self, seconds: float) -> None:
        self._frozen += 1
        self.world.schedule.at(self.world.schedule.now + seconds, self._thaw)

    def _thaw(self) -> None:
        self._frozen = max(0, self._frozen - 1)
        if not self._frozen:
            inbox, self._inbox = self._inbox, []
            for request in inbox:
                self._received(request, self.world.network.link(request.process, self.host))

    def crash(self, *, silent: bool) -> None:
        self.state = "silent" if silent else "refuses"
        for request in list(self._open):
            request.given_up = True
            if not silent:
                self._end(request, ConnectionResetError(104, "the database has stopped"))

    def snapshot(self) -> None:
        """It loses nothing."""

    def crash_now(self, detail: str) -> None:
        if self.state == "up":
            self.crash(silent=detail == "silent")

    def restart(self, lost: str) -> None:
        del lost
        self.state = "up"

    def heal(self) -> None:
        self.errs = ""
        self._frozen = min(self._frozen, 1)
        self._thaw()
        self.restart("")


class DatabaseStore(TransactionalStore):
    """The store of one process."""

    def __init__(self, database: Database, random: Random) -> None:
        self.label = "database"
        self.concurrency = random.choice((1, 4))
        self._database = database
        self._random = random
        self._asked: Op | None = None

    def decide(self, prefix: str, op: Op, answer: Any) -> Any:
        self._asked = op
        try:
            return super().decide(prefix, op, answer)
        finally:
            self._asked = None

    def transact(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None]:
        database, op = self._database, self._asked
        return self._within(keys, lambda: database.run(op, keys, step))

    def listen(self, tag: str, receive: Callable[[Notice], object]) -> Coroutine[Any, Any, None]:
        loop = _loop()
        limit = float(self._database.world.plan.options["connect_timeout"])
        return self._within((), lambda: self._database.listeners.__setitem__(tag, (loop, receive)), limit)

    def unlisten(self, tag: str) -> None:
        self._database.listeners.pop(tag, None)

    def has_listener(self, tag: str) -> bool:
        return tag in self._database.listeners

    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        del cursor
        return "0", [key for key in self._database.states if key.startswith(begin)]

    def is_down(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    async def _within(self, keys: Sequence[str], work: Callable[[], object], limit: float = ANSWER_TIMEOUT) -> None:
        """A request, with a limit, as each await on a driver has one. The driver may lose a cancel for a while."""
        async with asyncio.timeout(limit):
            try:
                await self._database.ask(_loop(), keys, work)
            except asyncio.CancelledError:
                if self._random.random() < 0.1:
                    await asyncio.sleep(self._random.uniform(0.0, 1.0))
                raise


def _loop() -> StackLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StackLoop)  # noqa: S101
    return loop


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if not done.done():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
