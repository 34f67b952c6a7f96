"""Python programs that a test starts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).parents[2]
QUIET = "import logging; logging.getLogger('asyncio').setLevel('ERROR')\n"  # in dev mode it complains of slow machines


def run_python(program: str, *args: str, **env: str) -> str:
    """The output of a program of its own; it must end well, and print no warning."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", QUIET + textwrap.dedent(program), *args],
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
