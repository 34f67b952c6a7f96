"""The command of `asynclock run`: a process group of its own, with the terminal where there is one.

Where stdin is a terminal, the command gets it, as a job of a shell does: Ctrl-C reaches the command alone. Ctrl-Z stops
the command and then asynclock, with the script that called it, so that the shell takes over. A stopped asynclock renews
nothing, so the lease ends. `fg` continues the command only if the lease is still held. As process 1 of a container it
continues the command itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.cli.children import Children

_LOOK = 0.02  # seconds between two looks whether the group is empty, which no signal tells
_SUSPENDED = tuple(getattr(signal, each, None) for each in ("SIGTSTP", "SIGTTIN", "SIGTTOU"))


class Child:
    """The command, from its start to its end. Raises OSError if it cannot be executed."""

    def __init__(self, children: Children, command: Sequence[str], env: Mapping[str, str], *, tied: bool) -> None:
        """`tied`: the group ends if this process dies, for any reason."""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its return code, as `subprocess` gives it."""
        self._interrupted = False  # by a SIGINT that came through this process
        terminal = self._terminal = _terminal()
        self._guardian = _Guardian(children) if tied else None
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                close_fds=False,  # it gets what the caller handed down, such as /dev/fd/63; ours are not inherited
                process_group=0,
                # The program must not read before it has the terminal.
                preexec_fn=None if terminal is None else lambda: _give(terminal, os.getpgrp()),  # noqa: PLW1509
            )
        except OSError:
            if self._guardian is not None:
                self._guardian.dismiss()
            raise
        if self._guardian is not None:
            self._guardian.guard(self._process.pid)
        children.watch(self._process.pid, self._has_ended)

    def send(self, number: int) -> None:
        """To the whole group; harmless once it has ended."""
        self._interrupted = self._interrupted or number == signal.SIGINT
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def terminate(self) -> None:
        """SIGTERM. A stopped group gets SIGCONT as well, because it receives SIGTERM only when it runs."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def resume(self) -> None:
        """After SIGCONT: as the shell's `fg` and `bg` do."""
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # the terminal is gone: the group gets its SIGHUP only if it goes on
                if os.tcgetpgrp(self._terminal) == os.getpgrp():
                    _give(self._terminal, self._process.pid)
        self.send(signal.SIGCONT)

    async def group_ended(self) -> None:
        """Wait until no process of the group is left."""
        await asyncio.shield(self.ended)
        while True:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            await asyncio.sleep(_LOOK)

    def close(self) -> None:
        """The command has ended: take the terminal back. If it has not, this program gives up because of an error, and
        releases the lock next: a tied group is killed, as the guardian would do.

        A Ctrl-C that ended the command is passed on to the other processes of this job: without asynclock the terminal
        would send it to them, too. Otherwise a script that called asynclock would continue with its next line."""
        if self._guardian is not None:
            if not self.ended.done():
                self.send(signal.SIGKILL)
            self._guardian.dismiss()
        self._take_terminal()
        if self._terminal is not None and self._process.returncode == -signal.SIGINT and not self._interrupted:
            os.killpg(os.getpgrp(), signal.SIGINT)

    def _has_ended(self) -> bool:
        """The command has ended, was stopped, or goes on."""
        pid, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return False
        if os.WIFSTOPPED(status):
            if os.getpid() == 1:  # The kernel never stops process 1, so no shell would continue the command.
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    self.send(signal.SIGCONT)
            elif os.WSTOPSIG(status) in _SUSPENDED:
                self._take_terminal()
                if self._terminal is None or not _suspend_job():
                    os.kill(os.getpid(), signal.SIGSTOP)
            return False
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.ended.set_result(self._process.returncode)
        return True

    def _take_terminal(self) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # the terminal is gone, or another job's
                if os.tcgetpgrp(self._terminal) == self._process.pid:
                    _give(self._terminal, os.getpgrp())


class _Guardian:
    """A process that kills a group when this process is killed: then no process renews the lease. Its stdin is a pipe
    that only this process writes to, so the pipe ends with this process."""

    _PROGRAM = 'read -r group && { read -r dismissed || kill -s KILL -- "-$group"; }'

    def __init__(self, children: Children) -> None:
        self._guards = False
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # a machine without a shell: the group outlives this process
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._PROGRAM, "asynclock-guardian"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C must not reach it
            )
            children.watch(self._process.pid, self._has_ended)

    def guard(self, group: int) -> None:
        """From now on. It was started before, so that the group is without it for microseconds only."""
        self._guards = True
        self._write(b"%d\n" % group)

    def dismiss(self) -> None:
        """The group has ended, or was never begun."""
        if self._guards:
            self._write(b"dismissed\n")
        if self._process is not None:
            self._process.communicate()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # another process has killed it
                self._process.stdin.write(line)


def _terminal() -> int | None:
    """The terminal to hand over: stdin, if this job is in the foreground. Not if stdout is a pipe: its reader, such as
    `less`, is a part of this job and needs the terminal itself."""
    with contextlib.suppress(OSError):
        if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp() and not stat.S_ISFIFO(os.fstat(1).st_mode):
            return 0
    return None


def _suspend_job() -> bool:
    """SIGTSTP to the processes of this job: without asynclock the terminal would send it to them. Otherwise a script
    that called asynclock would go on to wait for it, and the shell would not see that the job has stopped. All of them
    stop at once: a SIGCONT that came between two stops would continue a part of the job only. Returns whether this
    process was stopped, and continued since. The kernel stops no job that no shell would continue."""
    continued: list[int] = []
    after = signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))  # the event loop gets it, too
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(0, signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, before)
        signal.signal(signal.SIGCONT, after)
    return bool(continued)


def _give(terminal: int, group: int) -> None:
    """Make a group the one in the foreground. A process in the background is stopped for that, unless it ignores
    SIGTTOU."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, before)
