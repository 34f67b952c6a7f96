"""The children of `asynclock run`, and the orphans that the kernel gives to it.

A process whose parent has ended becomes a child of process 1, which is asynclock where a container starts it, or of the
next ancestor that asked for orphans (PR_SET_CHILD_SUBREAPER). When it ends, it stays a zombie until its parent has read
its exit status. A container that collects zombies ends with no process ids left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_GET_CHILD_SUBREAPER = 37


class Children:
    """Looks at the children after each SIGCHLD."""

    def __init__(self) -> None:
        self._own: dict[int, Callable[[], bool]] = {}
        self._adopts = adopts_orphans()

    def begin(self) -> None:
        """In the running event loop. Orphans that ended before are reaped now."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._changed)
        self._changed()

    def watch(self, pid: int, ended: Callable[[], bool]) -> None:
        """Call `ended` now and after each SIGCHLD, until it returns True: then it has read the exit status."""
        self._own[pid] = ended
        self._changed()  # it may have ended before this call

    def _changed(self) -> None:
        for pid, ended in tuple(self._own.items()):
            if ended():
                del self._own[pid]
        if self._adopts:
            self._reap()

    def _reap(self) -> None:
        """Read the exit status of each orphan that has ended, and of no other child: `waitpid(-1)` would take the exit
        status of the command."""
        with contextlib.suppress(ChildProcessError):  # there is no child
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in self._own:
                    return  # It has ended since it was asked. Its SIGCHLD follows, and then this continues.
                os.waitpid(found.si_pid, 0)


def adopts_orphans() -> bool:
    """Whether the kernel makes orphans children of this process."""
    return os.getpid() == 1 or _is_subreaper()


def _is_subreaper() -> bool:
    if sys.platform != "linux":
        return False
    import ctypes  # 5 ms, needed by `run` only

    answer = ctypes.c_int()
    return not ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) and bool(answer.value)
