"""Servers that end with the worker that started them, even with one that is killed.

On Linux a process asks for that. If it asked in a `preexec_fn`, subprocess would fork, and copy the page tables of a
worker with 250 MB: 12 ms of CPU, in a thousand tests. setpriv asks, and then runs the command in the same process."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from asynclock.stores.embedded.server import die_with_parent

_ASKS = "setpriv", "--pdeathsig", "KILL", "--"


def start_tied(command: Sequence[Any], **options: Any) -> subprocess.Popen[bytes]:
    """Popen of a command that ends with the thread that called this (Linux)."""
    if sys.platform != "linux":
        return subprocess.Popen(command, **options)
    if _setpriv_can():
        return subprocess.Popen([*_ASKS, *command], **options)
    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)  # noqa: PLW1509 - two system calls


@functools.cache
def _setpriv_can() -> bool:
    """That of BusyBox cannot."""
    return (
        bool(shutil.which(_ASKS[0]))
        and subprocess.run([*_ASKS, "true"], capture_output=True, check=False).returncode == 0
    )
