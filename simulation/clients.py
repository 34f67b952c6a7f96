"""A client: the shipped machine over a Core in virtual time, and the tasks of its program.

What a caller does is short here, and as `locks/lock.py` and `locks/lease.py` do it. The wait for a claim is the shipped
one (`runtime/calls.py`).
"""

from __future__ import annotations

import math
from asyncio import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, LockError, QuorumUnavailable, SelfDeadlock, client_closed
from asynclock._options import ClientSettings, node_timeout
from asynclock.protocol.core import SLICE
from asynclock.protocol.handover import handle_of, parse_handle
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import Machine
from asynclock.protocol.terms import Terms
from asynclock.protocol.watchdog import LoopLag
from asynclock.quorum.ballot import WON
from asynclock.quorum.limits import Limits
from asynclock.quorum.quarantine import Quarantine
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import ID_LENGTH, TAG_LENGTH, Op, Queueing, Verb, parts_of
from asynclock.rules.registry import FAMILIES, RULES_BY_FAMILY
from asynclock.runtime import calls
from asynclock.runtime.shutdown import MARKS
from simulation.loop import Clock, Loop, Result, Task
from simulation.nodes import SimulatedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock._errors import Reason
    from asynclock._options import LockSettings
    from asynclock.events import Event
    from asynclock.protocol.machine import Claim
    from asynclock.quorum.ballot import Ballot
    from asynclock.stores.port import Notice
    from simulation.plan import Job, LockPlan
    from simulation.world import World

_CLOSING = 1.8
"""Seconds for which a close waits for the answers to releases."""

_REREADS = (0.02, 0.05, 0.1, 0.2)
"""Seconds after which the marks of a deployment that may be new are read again."""


class Silent:
    """Nobody listens to the events."""

    active = ()

    def tell(self, event: object) -> None: ...


class Client:
    """One process with one client. It is the Core of its machine."""

    observers = Silent()
    forked = False

    def __init__(self, world: World, slot: int, number: int) -> None:
        plan = world.plan.clients[slot]
        self.world, self.slot = world, slot
        self.name = f"client {slot}.{number}"
        self._random = world.random_of(f"client {slot} {number}")
        self.random = self._random.random
        self.tag = f"{slot:02x}{number:02x}{self._random.getrandbits(32):08x}"
        self.loop = Loop(world.schedule, partial(world.judge.escaped, self), timers_first=plan.timers_first)
        self.clock: Any = Clock(self.loop, plan.rate, plan.offset, plan.wall_offset)
        self.own_clock = self.clock.beside()  # of the program
        self.settings: ClientSettings = world.plan.settings
        self.closed = False
        self.opened = False
        self._is_probed = False
        self.breaks = 0
        self.tasks: dict[int, Task] = {}
        self.servers: dict[int, tuple[str, float | None]] = {}  # node -> run_id, and when it replaced another one
        nodes = len(world.servers)
        length = 0.0 if self.settings.trust_restarts else self.settings.max_lease + 1.0
        self.quarantine = Quarantine(length, self.clock) if nodes > 1 else None
        self.lag = LoopLag()
        self.machine: Machine
        self.nodes = [SimulatedNode(self, server, world.links[slot, server.index]) for server in world.servers]
        nodes_of_port: Any = self.nodes
        self.quorum = Quorum(nodes_of_port, self.clock, self.loop.later, self.quarantine, Limits(nodes))
        self.machine = Machine(self, self.lag, nodes)
        self._opening: list[Result] = []  # of those that wait for its connections
        self._judging = False
        self.loop.post(self._open)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # -- the outside of the machine ------------------------------------------------------------------------------

    def within(self, settings: LockSettings) -> float:
        if settings.lease < self.lag.lease:
            self.lag.use(settings.lease)
        return node_timeout(self.settings, settings, len(self.nodes))

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        length = ID_LENGTH - TAG_LENGTH
        drawn = f"{self._random.getrandbits(4 * length):0{length}x}"
        return f"{self.tag}{drawn}{'|' if self.quorum.listens else '!'}{mode}{seed}|1|{self.name}|{metadata}"

    def spent(self) -> float:
        return 0.0

    def later(self, call: Callable[..., object], *args: object) -> None:
        self.loop.later(call, *args)

    def result(self) -> Result:
        return Result(self.loop)

    def judge_again(self) -> None:
        if not self._judging and self.quorum.quarantines:
            self._judging = True
            self._run(self._judge_again)

    def renews(self, tenures: Sequence[Tenure]) -> None: ...

    def dropped(self, tenure: Tenure) -> None:
        if not self.loop.dead:
            self.loop.call_soon_threadsafe(tenure.hold.dropped, tenure.weak_self)

    def tell_lost(self, terms: Terms, reason: str, held_for: float, why: Callable[[], object]) -> None:
        self.world.trace(self.name, f"loses {terms.name} ({reason}): {why()}")

    def fault(self, where: object, error: Exception) -> None:
        self.world.judge.escaped(self, error)

    def check_open(self) -> None:
        if self.closed:
            raise client_closed()

    def check_heal(self, op: Op) -> None:
        """An acquire that does not wait behind the queue belongs to a hold of this client that has not ended."""
        holds = self.machine.holds.of(parts_of(op)[0].name)
        if not any(hold.op.id == op.id and not hold.over for hold in holds):
            self.world.judge.fail("an acquire before the queue, without a hold", f"{op!r} of {self.name}")

    # -- what the nodes tell -------------------------------------------------------------------------------------

    def noticed(self, index: int, notice: Notice) -> None:
        self.machine.received(index, notice)

    def reported(self, event: Event) -> None:
        self.machine.reported(event)

    def node_connected(self, missed: bool) -> None:
        self.machine.connected(missed)

    def node_tried(self) -> None:
        """An attempt to connect has ended. Once a majority is up, the others get a moment, and then the client judges
        whether the deployment is new."""
        if self.opened or self.closed:
            return
        if all(node.tried for node in self.nodes):
            self._judge()
        elif self.quorum.is_up and not self.quorum.judge().new:
            self.own_clock.call_at(self.clock.now() + 0.2, self._judge)

    def _open(self) -> None:
        for node in self.nodes:
            node.connect()
        self.own_clock.call_at(self.clock.now() + self.settings.connect_timeout + 0.2, self._judge)

    def _judge(self) -> None:
        if self.opened or self.closed:
            return
        self.opened = True
        for opening in self._opening:
            _wake(opening)
        if self.quorum.is_up and self.quorum.quarantines:
            self._run(partial(self._judge_restarts, self.quorum.reaches_all_known()))

    async def _judge_restarts(self, current: bool, task: Task) -> None:
        """As `runtime/opening.py`."""
        del task
        for pause in _REREADS:
            ruling = self.quorum.judge()
            if ruling.new and current:
                self.quorum.end_quarantine()
            if not ruling.doubtful:
                return
            await self.sleep(pause)
            await self._read_marks()
            current = self.quorum.reaches_all_known()

    async def _judge_again(self, task: Task) -> None:
        del task
        await self._read_marks()
        known = all(node.error is None and node.facts for node in self.nodes)
        if known and self.quorum.reaches_all_known() and self.quorum.judge().new:
            self.quorum.end_quarantine()
        self._judging = False

    async def _read_marks(self) -> None:
        results = [self.result() for _ in self.nodes]
        for node, result in zip(self.nodes, results, strict=True):
            node.read_mark(result)
        for result in results:
            await result

    # -- its program ---------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[Task], Any]) -> Task:
        number = self.world.count("tasks")
        task = self.tasks[number] = Task(self.loop, work, partial(self._ended, number))
        return task

    def _ended(self, number: int) -> None:
        self.tasks.pop(number, None)

    async def sleep(self, seconds: float) -> None:
        result = self.result()
        self.own_clock.call_at(self.clock.now() + seconds, partial(_wake, result))
        await result

    def begin(self, job: Job) -> None:
        """The program does a job, in a task of its own."""
        if self.closed:
            return
        self.world.waits[job.number] = self
        self._cancel_after(job.cancelled_after, self._run(partial(self._work, job)))

    def _cancel_after(self, seconds: float | None, task: Task) -> None:
        if seconds is not None:
            self.world.schedule.at(self.world.schedule.now + seconds, self.loop.post, task.cancel)

    def probe(self, job: Job) -> None:
        """The same, after which an outage is a flaw."""
        self._is_probed = True
        self.begin(job)

    async def _work(self, job: Job, task: Task) -> None:
        try:
            await self._opened()
            await self._use(job, task, job.depth)
        except LockError as error:
            self.world.trace(self.name, f"job {job.number} of {job.lock.name} ends: {error}")
            answered = self.world.calm.is_answered(error, self.within(job.lock.settings))
            wrong = (self._is_probed and answered) or isinstance(error, ConfigError | SelfDeadlock)
            if wrong and not self.closed:
                self.world.judge.fail("a wrong error", f"job {job.number} of {job.lock.name}: {error!r}")
        finally:
            self.world.waits.pop(job.number, None)
            self.world.ended(job, self)

    async def _opened(self) -> None:
        """As the first use of a client, it waits for its connections."""
        if not self.opened:
            opening = self.result()
            self._opening.append(opening)
            await opening
        self.check_open()

    async def _use(self, job: Job, task: Task, depth: int) -> None:
        """Acquire it, work, and end it as the job says."""
        lock, timeout = job.lock, job.timeout
        owner = (job.owner or task) if lock.reentrant else None
        terms = Terms(lock.name, lock.kind, lock.settings, task, timeout, owner)
        self.world.called(self.name, f"job {job.number} acquires {lock.name} (timeout={timeout})")
        session: Any = self
        began, called = self.world.schedule.now, self.clock.now()
        wait = self.world.waiting.begins(job, self)
        self.world.starvation.waits(job, self)
        try:
            result = await calls.acquire(session, terms)
            self.world.waiting.check_in_time(wait)
            if not isinstance(result, Tenure):
                self.world.judge.check_waited(self, job, self.clock.now() - called, math.inf, "refused")
                self.world.waiting.check_reason(wait)
                return
        except QuorumUnavailable as error:
            self.world.judge.check_waited(self, job, self.clock.now() - called, self.settings.patience, repr(error))
            self.world.waiting.check_in_time(wait)
            self.world.waiting.check_reason(wait, repr(error))
            raise
        finally:
            self.world.waiting.ends(wait)
            self.world.starvation.waits_no_more(job, self)
        await self._hold(job, result, task, depth, began)

    async def _hold(self, job: Job, tenure: Tenure, task: Task, depth: int, began: float) -> None:
        self.world.waits.pop(job.number, None)
        entered = self.world.schedule.now
        self.world.judge.entered(self, tenure, job.lock, job.number)
        stay = self.world.histories.entered(self, job.owner or f"job {job.number}", job.lock, tenure, began)
        self.world.promptness.entered(job.lock)
        self.world.waiting.entered(tenure)
        try:
            if not await self._works(tenure, task, job.holds_for / 2):
                if depth and not self.closed:
                    await self._use(job, task, depth - 1)
                if job.extends_by is not None:
                    await self._extend(tenure, job.extends_by)
                await self._works(tenure, task, job.holds_for / 2)
        except (LockError, CancelledError):
            self.world.histories.left(stay, tenure)
            self._release(job, tenure, entered)
            raise
        self.world.histories.left(stay, tenure)
        if job.ends_by == "drop":
            self.world.judge.dropped(tenure)
            self.world.promptness.left(job.lock)
        elif job.ends_by == "detach" and tenure.held:
            await self._detach(job, tenure, entered)
        else:
            self._release(job, tenure, entered)

    async def _works(self, tenure: Tenure, task: Task, seconds: float) -> bool:
        """The body, for so many seconds. True: the lease is lost."""
        tenure.check_clock()
        if not tenure.held:
            return True
        lost: list[Reason] = []
        woken = self.result()
        timer = self.own_clock.call_at(self.clock.now() + seconds, partial(_wake, woken))

        def tell(loss: Reason) -> None:
            self.world.judge.told(self, tenure, loss)
            lost.append(loss)
            _wake(woken)

        tenure.enter(task, tell)
        try:
            await woken
        finally:
            timer.cancel()
            tenure.leave()
        if tenure.loss is not None and not lost:
            self.world.judge.fail("a loss was not told", f"{tenure.hold.name}: {tenure.loss}")
        tenure.check_clock()
        if tenure.held and not lost:
            self.world.judge.writes(tenure)
        return bool(lost) or not tenure.held

    def _release(self, job: Job, tenure: Tenure, entered: float) -> None:
        self.world.called(self.name, f"job {job.number} releases {job.lock.name}")
        tenure.check_clock()
        if job.lock.once and tenure.held:
            tenure.mark_done(job.lock.once)
        held = tenure.held
        self.world.judge.released(tenure, job.lock, entered, self.clock.true_time(tenure.ends))
        if held:
            self.world.promptness.released(job.lock)
        if not self.closed and (ballot := tenure.hold.end(tenure)) is not None and held:
            ballot.when_settled(partial(self._released, tenure, job.lock, entered, self.world.schedule.now))

    def _released(self, tenure: Tenure, lock: LockPlan, entered: float, sent: float, ballot: Ballot) -> None:
        if ballot.outcome is WON:
            self.world.judge.delivered(tenure, lock, entered, sent)
            if tenure.done_for:
                self.world.judge.done(tenure)

    async def _extend(self, tenure: Tenure, lease: float) -> bool:
        """As `Lease.extend`. True: it has the new end."""
        self.world.called(self.name, f"extends {tenure.hold.name}")
        tenure.check_clock()
        if not tenure.held:
            return False
        ballot = tenure.hold.extend(lease)
        settled = self.result()
        ballot.wakes(settled)
        await settled
        return tenure.held and ballot.outcome is WON

    async def _detach(self, job: Job, tenure: Tenure, entered: float) -> None:
        """As `Lease.detach`; another client adopts it later."""
        hold = tenure.hold
        if hold.op.kind.parts or not await self._extend(tenure, job.lock.settings.lease) or len(hold.tenures) > 1:
            self._release(job, tenure, entered)
            return
        self.world.called(self.name, f"job {job.number} detaches {job.lock.name}")
        self.world.judge.detached(tenure)
        hold.detach(tenure)
        self.world.promptness.left(job.lock)
        handle = handle_of(hold.op, hold.last_fence)
        self.world.handovers.detached(handle)
        self.world.detached(job, handle)

    def adopt(self, job: Job, handle: str) -> None:
        """The program takes a hold over."""
        if not self.closed:
            self._cancel_after(job.adoption_cancelled_after, self._run(partial(self._adopt, job, handle)))

    async def _adopt(self, job: Job, handle: str, task: Task) -> None:
        terms = Terms(job.lock.name, job.lock.kind, job.lock.settings, task, None)
        session: Any = self
        adopting = None
        try:
            await self._opened()
            self.world.called(self.name, f"adopts {job.lock.name} of job {job.number}")
            began = self.world.schedule.now
            adopting = self.world.handovers.adopts(handle, job, self)
            result = await calls.adopt(session, terms, parse_handle(handle))
        except LockError as error:
            if adopting is not None:
                self.world.handovers.check_failed(adopting, error)
            self.world.trace(self.name, f"the adoption of job {job.number} ends: {error}")
            return
        if isinstance(result, Tenure):
            self.world.judge.adopted(handle, result)
            await self._hold(job.adopted, result, task, 0, began)

    def break_lock(self, lock: LockPlan) -> None:
        """An operator breaks a lock."""
        self.world.called(self.name, f"breaks {lock.name}")
        settings, part = self.settings, lock.parts[0]
        rule = RULES_BY_FAMILY[FAMILIES[part.kind.letter]]
        queueing = Queueing(self.quorum.serve, waiter=f"1|{self.name}|")
        memory = settings.lock.lease + settings.fence_memory
        op = Op(Verb.BREAK, rule, part.name, "", 0.0, memory=memory, queueing=queueing)
        self.machine.holds.done_marks.forget(part.name)
        self.quorum.ask(op, self.within(settings.lock), everyone=True)

    # -- its end -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The process ends at once."""
        self.loop.kill()
        for task in list(self.tasks.values()):
            task.drop()
        self._gone()
        for node in self.nodes:
            node.close()

    def close(self) -> None:
        """As `Session.aclose`."""
        if self.closed:
            return
        self.closed = True
        self.machine.begin_close()
        for hold in self.machine.holds.in_slices():
            if hold is not None:
                self.machine.close_hold(hold)
        self._gone()
        self._close_claims(list(reversed(self.machine.under_way)))

    def _close_claims(self, left: list[Claim]) -> None:
        """In slices, between which its loop runs: here each claim is a slice."""
        if left:
            left.pop().close()
            self.own_clock.call_at(self.clock.now() + SLICE, partial(self._close_claims, left))
            return
        self.machine.watchdog.stop()
        self.machine.holds.done_marks.begin_close(self.result())
        self.own_clock.call_at(self.clock.now() + 0.01, partial(self._hang_up, self.clock.now()))

    def _hang_up(self, since: float) -> None:
        lasts = self.clock.now() - since
        marks = self.machine.holds.done_marks
        if lasts >= MARKS:
            marks.stop()
        if marks or (lasts < _CLOSING and any(node.awaits_releases for node in self.nodes)):
            self.own_clock.call_at(self.clock.now() + 0.01, partial(self._hang_up, since))
            return
        for node in self.nodes:
            node.close()
        self.world.judge.closed(self)
        self.loop.later(self.kill)

    def _gone(self) -> None:
        self.world.judge.gone(self)
        self.world.histories.gone(self)
        for number, client in list(self.world.waits.items()):
            if client is self:
                del self.world.waits[number]


def _wake(result: Result) -> None:
    if not result.done():
        result.set_result()
