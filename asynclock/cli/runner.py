"""What `asynclock run` does: wait for the lock, run the command under it, pass signals on, and end it in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, LockError, LockLost, LockTimeout
from asynclock._untrusted import printable
from asynclock.cli.child import Child
from asynclock.cli.children import Children
from asynclock.cli.guard import OnLost, cannot_run, due_in, exit_code, grace, look_again
from asynclock.cli.options import MAX_LEASE, PREFIX
from asynclock.cli.output import length, print_json, taken
from asynclock.cli.program import Code, code_of, complain, log
from asynclock.locks.decorators import RUN, Skipped
from asynclock.stores import URLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.client import Redlock
    from asynclock.info import Holder
    from asynclock.locks.lease import Lease
    from asynclock.locks.lock import Lock

_FORWARDED = tuple(
    getattr(signal, each)
    for each in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, each)  # Windows has not all of them, and imports this module as well
)
_POLL = (0.05, 0.5)
"""The shortest and the longest pause between two looks at another run, in seconds, where no notice can come."""
_ENDED = 20
"""So many times a name may turn out to be free after an error. Then the error has another reason."""

_EITHER = {"mutex", "read-write lock"}
"""Runs with and without --shared exclude each other, although their holds are of two kinds."""


class Mode(Enum):
    """What is held while the command runs."""

    EXCLUSIVE = "mutex"
    SHARED = "read-write lock"
    PERMITS = "semaphore"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class Plan:
    """The command line, checked."""

    name: str
    command: tuple[str, ...]
    urls: tuple[str, ...]
    prefix: str | None
    mode: Mode
    permits: int
    within: float
    lease: float
    max_lease: float | None
    wait: float | None
    on_lost: OnLost
    held_code: int


class _Failed(Exception):
    """A --once run that does not count, with the exit code of the command."""

    def __init__(self, code: int) -> None:
        self.code = code


class _Messages(logging.Handler):
    """Passes the warnings of the library on, once it speaks."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self.speaks = False
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if self.speaks:
            self._say("warning", record.getMessage().removeprefix("asynclock: "))


class Runner:
    """One `asynclock run`."""

    def __init__(self, plan: Plan, redlock: Redlock, as_json: bool) -> None:
        self._plan = plan
        self._redlock = redlock
        self._json = as_json
        self._began = time.monotonic()
        self._signal = 0  # that came before the command began
        self._task: asyncio.Task[Any] | None = None
        self._children = Children()
        self._child: Child | None = None
        self._over = False  # the command has ended: its exit code stands
        self._lease: Lease | None = None
        self._woken = asyncio.Event()

    async def run(self) -> int:
        """Wait, run the command, and return the exit code. Raises LockError, which is an event with
        --json."""
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (*_FORWARDED, signal.SIGTSTP, signal.SIGCONT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._received, number)
        self._children.begin()
        messages = _Messages(self.say)
        log.addHandler(messages)
        try:
            async with self._redlock:
                messages.speaks = True  # an error says what came before
                code = await (self._once() if self._plan.mode is Mode.ONCE else self._locked())
        except asyncio.CancelledError:
            if not self._signal:
                raise
            code = 128 + self._signal
            self.say("interrupted", f"{signal.Signals(self._signal).name} came before the command began")
        except LockError as error:
            if not self._json:
                raise
            self._tell("error", text=str(error))
            code = code_of(error)
        finally:
            log.removeHandler(messages)
        if self._json:
            self._tell("exit", code=int(code))
        return int(code)

    # -- signals -------------------------------------------------------------------------------------------------

    def _received(self, number: int) -> None:
        """Before the command begins a signal ends the wait; later it goes to the command's group."""
        if self._over:
            return
        if number == signal.SIGCONT:
            self._continued()
        elif self._child is not None:
            self._child.send(number)
        elif number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._task is not None and not self._signal:
            self._signal = number
            self._task.cancel()

    def _continued(self) -> None:
        """While this process was stopped, it renewed nothing. The command continues only if the lease is still held."""
        self._woken.set()
        held = self._plan.on_lost is OnLost.IGNORE or (self._lease is not None and self._lease.held)
        if self._child is not None and held:
            self._child.resume()

    # -- the lock ------------------------------------------------------------------------------------------------

    async def _locked(self) -> int:
        lease = await self._acquired()
        if lease is None:
            return await self._held()
        code = int(Code.LOST)  # of a lease that is lost before the command begins
        try:
            async with lease:
                code = await self._run(lease)
        except LockLost as lost:
            return self._lost(code, lost)
        return code

    async def _acquired(self) -> Lease | None:
        """A hold of the other kind counts as another owner: runs with and without --shared exclude each other. No
        server tells when such a hold ends, so it asks again."""
        lock, wait, ended = self._lock(), self._plan.wait, 0
        while True:
            left = None if wait is None else max(0.0, wait - (time.monotonic() - self._began))
            try:
                return await lock.acquire(timeout=left)
            except ConfigError:
                kind = (await self._redlock.inspect(self._plan.name)).kind
                ended += not kind  # it was held as the other kind until now; or the error has another reason
                if not self._may_be_held(kind) or ended > _ENDED:
                    raise
                if left == 0.0:
                    return None
                await asyncio.sleep(min(random.uniform(*_POLL), _POLL[1] if left is None else left))  # noqa: S311

    def _lock(self) -> Lock:
        plan = self._plan
        match plan.mode:
            case Mode.SHARED:
                return self._redlock.read(plan.name)
            case Mode.PERMITS:
                return self._redlock.semaphore(plan.name, plan.permits)
            case _:
                return self._redlock(plan.name)

    def _may_be_held(self, kind: str) -> bool:
        """Whether a name that could not be asked for is held by a run of the other kind; "": it is free now."""
        mine = self._plan.mode.value
        return mine in _EITHER and (not kind or (kind in _EITHER and kind != mine))

    async def _once(self) -> int:
        """Run the command, unless a run has succeeded. While another run is in progress, wait for its end."""
        plan = self._plan

        async def body() -> None:
            if code := await self._run(RUN.get()):
                raise _Failed(code)

        guarded = self._redlock.once(lambda: plan.name, within=plan.within)(body)
        while True:
            skipped: Skipped | None = Skipped.RUNNING
            try:
                skipped = await guarded()
            except _Failed as failed:
                return failed.code
            except LockLost as lost:
                return self._lost(Code.OK if self._over else Code.LOST, lost)
            except LockTimeout:  # votes were split for a while
                pass
            if skipped is None:
                return Code.OK
            if skipped is Skipped.DONE:
                self._tell("done", text=f"{printable(plan.name)} is done already")
                return Code.OK
            left = None if plan.wait is None else plan.wait - (time.monotonic() - self._began)
            if left is not None and left <= 0:
                return await self._held()
            await asyncio.sleep(min(random.uniform(*_POLL), _POLL[1] if left is None else left))  # noqa: S311

    async def _held(self) -> int:
        """Say who holds the name, as far as it is known."""
        holders: Sequence[Holder] = ()
        with contextlib.suppress(LockError):
            holders = (await self._redlock.inspect(self._plan.name)).holders
        self.say("held", printable(taken(self._plan.name, holders, time.time())))
        return self._plan.held_code

    def _lost(self, code: int, lost: LockLost) -> int:
        """The lease ended before its release, as the log of the library says. With --on-lost ignore the command's own
        code counts."""
        self._tell("lost", reason=lost.reason)
        return code if self._plan.on_lost is OnLost.IGNORE else Code.LOST

    # -- the command ---------------------------------------------------------------------------------------------

    async def _run(self, lease: Lease) -> int:
        """Run the command under the lease. Returns the exit code."""
        plan = self._plan
        try:
            tied = plan.on_lost is not OnLost.IGNORE
            child = Child(self._children, plan.command, self._environment(lease), tied=tied)
        except OSError as error:
            self.say("not started", f"{plan.command[0]}: {error.strerror}")
            return cannot_run(error)
        self._child, self._lease = child, lease
        lost = asyncio.create_task(lease.wait_lost())
        try:
            self._tell("started", fence=lease.fence, waited=round(time.monotonic() - self._began, 3))
            if await self._guarded(lease, child, lost):
                return Code.LOST
            return exit_code(child.ended.result())
        finally:
            self._over = True
            lost.cancel()
            child.close()

    async def _guarded(self, lease: Lease, child: Child, lost: asyncio.Task[bool]) -> bool:
        """Wait for the end of the command. True: it was told to end, before its lease ends."""
        plan = self._plan
        while not child.ended.done():
            due = due_in(plan.on_lost, plan.lease, lease.remaining)
            if due == 0.0:
                await self._end(lease, child)
                return True
            self._woken.clear()
            woken = asyncio.create_task(self._woken.wait())
            waited = [each for each in (child.ended, woken, lost) if each is not lost or not lost.done()]
            try:
                await asyncio.wait(waited, timeout=look_again(plan.lease, due), return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
        return False

    async def _end(self, lease: Lease, child: Child) -> None:
        """The lease cannot be kept: end the whole group before another owner can begin. Each signal is sent before the
        line that reports it, because a slow stderr may block."""
        left = lease.remaining
        why = f"has {length(left)} left and is not renewed" if left else "is lost"
        seconds = grace(self._plan.on_lost, self._plan.lease, left)
        if seconds:
            child.terminate()
            self.say("lost", f"the lease of {printable(self._plan.name)} {why}: SIGTERM, in {length(seconds)} SIGKILL")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await child.group_ended()
        child.send(signal.SIGKILL)
        if not seconds:
            self.say("lost", f"the lease of {printable(self._plan.name)} {why}: SIGKILL")
        await asyncio.shield(child.ended)

    def _environment(self, lease: Lease) -> dict[str, str]:
        """That of this process, with what the command may want to know of its lock."""
        plan = self._plan
        own = {
            "ASYNCLOCK_NAME": plan.name,
            "ASYNCLOCK_FENCE": str(lease.fence),
            "ASYNCLOCK_LEASE": _seconds(plan.lease),
            URLS: ",".join(plan.urls),
        }
        if plan.max_lease is not None:  # else a command with this lease could be refused
            own[MAX_LEASE] = _seconds(plan.max_lease)
        if plan.prefix is not None:
            own[PREFIX] = plan.prefix
        return {**os.environ, **own}

    # -- what it says --------------------------------------------------------------------------------------------

    def say(self, event: str, text: str) -> None:
        """A line on stderr: stdout belongs to the command."""
        if self._json:
            self._tell(event, text=text)
        else:
            complain(text, "run")

    def _tell(self, event: str, **facts: Any) -> None:
        """With --json only."""
        if self._json:
            print_json({"event": event, "name": self._plan.name, **facts}, error=True)


def _seconds(value: float) -> str:
    """As a variable of the environment has it: without an exponent."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
