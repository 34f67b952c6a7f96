"""Python programs that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).parents[2]
LEAN = str(Path(__file__).parent / "lean")
"""The folder of sitecustomize.py, which makes the start of a program cheaper."""

PYTHONPATH = os.pathsep.join([LEAN, str(REPO)])
"""Of the programs that a test starts."""

QUIET = "import logging; logging.getLogger('asyncio').setLevel('ERROR')\n"  # in dev mode it complains of slow machines
PATIENT = "1"
"""$ASYNCLOCK_NODE_TIMEOUT of programs over several nodes: on a busy machine a healthy node needs more than 50 ms."""


def run_python(program: str, *args: str, **env: str) -> str:
    """The output of a program of its own; it must end well, and print no warning."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", QUIET + textwrap.dedent(program), *args],
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
