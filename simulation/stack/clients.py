"""A process: the real client over simulated sockets, and what its program does with it."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from asynclock import Redlock
from asynclock._errors import ConfigError, LockError, QuorumUnavailable
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.mutex import FAIR
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import CHECK_LIMIT
from simulation.stack.blocks import Body
from simulation.stack.loop import StackLoop

if TYPE_CHECKING:
    from asynclock.locks.lease import Lease
    from asynclock.locks.lock import Lock
    from asynclock.runtime.session import Session
    from simulation.plan import Job, LockPlan
    from simulation.stack.world import World

CLOSING = 3.0
"""Seconds within which a close ends, whatever the servers do (docs/shutdown.md)."""

_ROUNDING = 0.05

_LATE = 0.3
"""Seconds by which an acquire may end after its timeout: the last round has its node_timeout."""

_BACKLOG = 5.0
"""More of them while what this process sends does not arrive and notices come, as on a half-open connection: the server
seems to work through a long queue (`node.py`)."""

_HEALTH = 1.5
"""Seconds within which `health` answers: about 1 s. Of a database, CHECK_LIMIT more."""

_TURNS = 0.05
"""Seconds in which the tasks of the program end that the close has woken."""


class _Clock:
    """The clock of a process, for the judge."""

    def __init__(self, loop: StackLoop) -> None:
        self._loop = loop

    def true_time(self, when: float) -> float:
        return self._loop.true_time(when)


class Client:
    """See the module."""

    def __init__(self, world: World, slot: int, number: int) -> None:
        plan = world.plan.clients[slot]
        self.name = f"client{slot}#{number}"
        self.slot = slot
        self.world = world
        self.loop = StackLoop(
            world.schedule, world.network, self.name,
            rate=plan.rate, offset=plan.offset, wall_offset=plan.wall_offset,
        )  # fmt: skip
        self.clock = _Clock(self.loop)
        self.closed = False  # it closes, or has closed
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()  # the tasks that the program has cancelled
        self.redlock = Redlock(*world.deployment.nodes_for(self.name), **world.plan.options)
        self.tag = ""

    def session(self) -> Session | None:
        return self.redlock._sessions.of(self.loop)

    # -- its program -------------------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """The program does a job, in a task of its own."""
        if self.closed:
            return
        self.world.waits[job.number] = self
        self.world.watch.waits(job, self)
        task = self.tasks[job.number] = self.loop.create_task(self._work(job))
        task.add_done_callback(lambda _: self._ended(job))
        if job.cancelled_after is not None:
            schedule = self.world.schedule
            schedule.at(schedule.now + job.cancelled_after, self.loop.post, self._cancel, job.number)

    def cancel_one(self) -> None:
        """The program cancels the task that it began last."""
        if self.tasks and not self.loop.dead:
            self.loop.post(self._cancel, max(self.tasks))

    def _cancel(self, number: int) -> None:
        if (task := self.tasks.get(number)) is not None:
            self._cancelled.add(number)
            task.cancel()

    def _ended(self, job: Job) -> None:
        self.world.waits.pop(job.number, None)
        self.world.watch.ended(job)
        self._check_ended(job.number, f"job {job.number}")

    def _check_ended(self, number: int, what: str) -> None:
        task = self.tasks.pop(number)
        if task.cancelled():
            if number not in self._cancelled:
                self.world.judge.fail("a cancel that the program did not send", f"{self.name}, {what}")
        elif (error := task.exception()) is not None:
            self.world.judge.fail("an unexpected error", f"{self.name}, {what}: {error!r}")

    def _lock(self, plan: LockPlan) -> Lock:
        redlock, settings, kind = self.redlock, plan.settings, plan.kind
        options: Any = {
            "lease": settings.lease, "min_hold": settings.min_hold, "max_hold": settings.max_hold,
            "renew": settings.renew, "metadata": settings.metadata,
        }  # fmt: skip
        if kind.parts:
            each = [
                part.name if part.kind.letter == "" else redlock.semaphore(part.name, part.kind.slots)
                for part in kind.parts
            ]
            return redlock.multi(*each, **options)
        if kind is READ:
            return redlock.read(plan.name, **options)
        if kind is WRITE:
            return redlock.write(plan.name, **options)
        if isinstance(kind, Semaphore):
            return redlock.semaphore(plan.name, kind.slots, **options)
        return redlock(plan.name, fair=kind is FAIR, fencing=settings.fencing, **options)

    async def _work(self, job: Job) -> None:
        world = self.world
        world.called(self.name, f"job {job.number} acquires {job.lock.name} (timeout={job.timeout})")
        began = world.schedule.now
        try:
            lease = await self._acquire(job)
            if lease is not None:
                await self._hold(job, lease, began)
            else:
                world.trace(self.name, f"job {job.number} of {job.lock.name} timed out")
        except ConfigError as error:
            if not self.closed:
                raise
            world.trace(self.name, f"job {job.number} ends: {error}")
        except LockError as error:
            world.trace(self.name, f"job {job.number} of {job.lock.name} ends: {type(error).__name__}: {error}")

    async def _acquire(self, job: Job) -> Lease | None:
        """It ends in time, whatever happens, if the process runs; and without a lease not too soon."""
        began, at = self.loop.time(), self.world.schedule.now
        try:
            lease = await self._lock(job.lock).acquire(timeout=job.timeout)
        except QuorumUnavailable as error:
            patience = self.world.plan.options["patience"]
            self.world.judge.check_waited(self, job, self.loop.time() - began, patience, repr(error))
            raise
        else:
            if lease is None:
                self.world.judge.check_waited(self, job, self.loop.time() - began, math.inf, "refused")
            return lease
        finally:
            self._learn_tag()
            if job.timeout is not None and self.loop.runs_since <= at:
                took, options = self.loop.time() - began, self.world.plan.options
                limit = max(job.timeout, options["connect_timeout"]) + job.lock.settings.lease / 10 + _LATE
                links = [] if self.world.deployment.database is not None else self.world.network.links_of(self.name)
                if any(each.was_unheard_since(at) for each in links):
                    limit += _BACKLOG
                if took > limit:
                    self.world.judge.fail("an acquire ended late", f"{self.name}, job {job.number}: {took:.3f} s")

    async def _look(self, lock: LockPlan) -> None:
        """The program asks for the state of a name, and of the nodes."""
        name = lock.parts[0].name
        self.world.called(self.name, f"inspects {name}")
        began, at = self.loop.time(), self.world.schedule.now
        try:
            health = await self.redlock.health()
            took = self.loop.time() - began
            self.world.trace(self.name, f"health after {took:.3f} s: {health.ok}, {health.reason}")
            within = _HEALTH + (CHECK_LIMIT if self.world.plan.deployment == "database" else 0.0)
            if took > within and self.loop.runs_since <= at:
                self.world.judge.fail("health answers late", f"{self.name}: {took:.3f} s")
            await self.redlock.inspect(name)
            await self._lock(lock).locked()
        except LockError as error:
            self.world.trace(self.name, f"inspect: {type(error).__name__}: {error}")
            if isinstance(error, ConfigError) and not self.closed:
                self.world.judge.fail("an unexpected error", f"{self.name} inspects {name}: {error}")

    async def _break(self, lock: LockPlan) -> None:
        """An operator breaks a lock."""
        name = lock.parts[0].name
        self.world.called(self.name, f"breaks {name}")
        try:
            await self.redlock.break_lock(name)
        except LockError as error:
            self.world.trace(self.name, f"break: {type(error).__name__}: {error}")
            if isinstance(error, ConfigError) and not self.closed:
                self.world.judge.fail("an unexpected error", f"{self.name} breaks {name}: {error}")

    def operate(self, what: str, lock: LockPlan) -> None:
        """An operator looks, or breaks a lock."""
        if not self.closed:
            number = -self.world.count("operations")
            task = self.tasks[number] = self.loop.create_task((self._look if what == "look" else self._break)(lock))
            task.add_done_callback(lambda _: self._check_ended(number, "an operator"))

    def _learn_tag(self) -> None:
        if not self.tag and (session := self.session()) is not None:
            self.tag = session.tag

    async def _hold(self, job: Job, lease: Lease, began: float) -> None:
        """The program has a lease, for which it has asked at `began`."""
        world, judge, tenure = self.world, self.world.judge, lease._tenure
        world.waits.pop(job.number, None)
        world.watch.ended(job)
        world.watch.entered(job.lock)
        judge.entered(self, tenure, job.lock, job.number)  # type: ignore[arg-type]  # it has what the judge asks
        stay = world.histories.entered(self, f"job {job.number}", job.lock, tenure, began)
        body = Body(self, job, tenure, stay)
        if job.ends_by == "drop":
            world.histories.left(stay, tenure)
            judge.dropped(tenure)
            return
        if job.ends_by == "detach" and lease.held:
            await self._detach(job, lease, body)
            return
        async with lease:
            with body:
                await self._use(job, lease)
        body.check_told()

    async def _use(self, job: Job, lease: Lease) -> None:
        """The program works with the lock."""
        world = self.world
        await asyncio.sleep(job.holds_for / 2)
        if lease.held:
            world.judge.writes(lease._tenure)
        if job.extends_by is not None:
            world.called(self.name, f"job {job.number} extends {job.lock.name}")
            await lease.extend(lease=job.extends_by)
        await asyncio.sleep(job.holds_for / 2)
        if lease.held:
            world.judge.writes(lease._tenure)
        world.called(self.name, f"job {job.number} releases {job.lock.name}")

    async def _detach(self, job: Job, lease: Lease, body: Body) -> None:
        """Another client adopts it later."""
        self.world.called(self.name, f"job {job.number} detaches {job.lock.name}")
        async with lease:
            with body:
                handle = await lease.detach()
                self.world.judge.detached(lease._tenure)
        self.world.detached(job, handle)

    def adopt(self, job: Job, handle: str) -> None:
        """The program takes a hold over."""
        if not self.closed:
            number = -self.world.count("operations")
            task = self.tasks[number] = self.loop.create_task(self._adopt(job, handle))
            task.add_done_callback(lambda _: self._check_ended(number, f"an adoption of job {job.number}"))

    async def _adopt(self, job: Job, handle: str) -> None:
        self.world.called(self.name, f"adopts {job.lock.name} of job {job.number}")
        began = self.world.schedule.now
        try:
            lease = await self.redlock.adopt(handle)
            self._learn_tag()
            self.world.judge.adopted(handle, lease._tenure)
            await self._hold(job.adopted, lease, began)
        except ConfigError:
            if not self.closed:
                raise
        except LockError as error:
            self.world.trace(self.name, f"the adoption of job {job.number} ends: {type(error).__name__}: {error}")

    # -- its end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The program closes the client, while its tasks go on."""
        if not self.closed:
            self._learn_tag()
            self.closed = True
            self._gone()
            self._closing = self.loop.create_task(self._close())

    async def _close(self) -> None:
        world, began, at = self.world, self.loop.time(), self.world.schedule.now
        world.called(self.name, "closes")
        await self.redlock.aclose()
        took = self.loop.time() - began
        world.trace(self.name, f"closed after {took:.3f} s")
        if took > CLOSING + _ROUNDING and self.loop.runs_since <= at:
            world.judge.fail("a close took too long", f"{self.name}: {took:.3f} s")
        world.schedule.at(world.schedule.now + _TURNS, self._check_idle)

    def _check_idle(self, seconds: float = 0.0) -> None:
        """So many seconds after a close nothing is left in the process."""
        if self.loop.dead:
            return
        if self.loop.is_stopped or self.loop.runs_since > self.world.schedule.now - _TURNS / 2:
            self.world.schedule.at(self.world.schedule.now + _TURNS, self._check_idle, seconds)
            return
        if self.world.deployment.database is not None and seconds < ANSWER_TIMEOUT:
            # A caller that still waits for its release is told at the deadline of that release (`backlog.py`), and a
            # driver may lose the cancel of a task.
            self.world.schedule.at(self.world.schedule.now + ANSWER_TIMEOUT + 1.0, self._check_idle, ANSWER_TIMEOUT)
            return
        tasks = [each for each in asyncio.all_tasks(self.loop) if not each.done()]
        left: dict[str, list[Any]] = {"task": tasks, "socket": self.sockets, "timer": self.loop.timers}
        for what, some in left.items():
            if some:
                self.world.judge.fail(f"a {what} is left after a close", f"{self.name}: {some[0]!r:.300}")
        self.loop.dead = True
        self.world.gone(self)

    @property
    def sockets(self) -> list[Any]:
        return [each for each in self.world.network.sockets.values() if each.loop is self.loop]

    def kill(self, *, silent: bool) -> None:
        """The process ends at once. `silent`: its host, too, so that the servers do not learn it."""
        self._learn_tag()
        self.loop.dead = self.closed = True
        self._gone()
        for number, client in list(self.world.waits.items()):
            if client is self:
                del self.world.waits[number]
        for each in self.sockets:
            if each.connection is not None and silent:
                each.connection.vanish(None)
            elif each.connection is not None:
                each.connection.client_closed()
        if self.world.deployment.database is not None and not silent:
            self.world.deployment.database.hung_up(self.loop)

    def _gone(self) -> None:
        """Its process ends, or it closes: what it had may end at any time."""
        whose: Any = self
        self.world.judge.gone(whose)
        self.world.histories.gone(whose)

    def bury(self) -> None:
        """The run is over: let what is left in a killed process end, so that nothing of it runs later."""
        self.loop.dead = False
        self.loop.runs_since = math.inf
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.create_task(self.redlock.aclose())
