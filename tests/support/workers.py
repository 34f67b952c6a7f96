"""The workers of pytest-xdist, as copies of one process.

Half the CPU of a worker's start goes into its imports: 1.5 s, twelve times. So one process imports the packages that
cost most (preloaded.py), and each worker is a copy of it (programs.py). asynclock and the tests are imported by each
worker: what a module makes at its import, such as a range of ports, is of one worker, and its warnings are errors. All
workers of a run have the same seed of the hashes, and so the same order of sets."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.support.programs import Program

_Fresh = gateway_io.Popen2IOMaster


class _Copy(_Fresh):  # type: ignore[misc,valid-type]  # execnet has no types
    """A worker and its pipes. execnet starts it as `python -u -c TEXT`."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        program, *options, option, text = args
        if program != sys.executable or option != "-c":  # `--tx` names another Python, or another machine
            super().__init__(args, execmodel)
            return
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.popen = worker = Program([option, text], ["tests.support.preloaded"], options, **pipes)
        Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel=execmodel)


def copy_workers() -> None:
    """Let xdist start its workers as copies."""
    gateway_io.Popen2IOMaster = _Copy  # type: ignore[misc]
