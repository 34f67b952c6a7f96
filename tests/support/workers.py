"""The workers of pytest-xdist, as copies of one process.

Half the CPU of a worker's start goes into its imports: 1.5 s, twelve times. So one process imports the packages that
cost most, and each worker is a copy of it (programs.py). No module of the tests is among them: what they make at their
import, such as a range of ports or a process id, is of one worker."""

from __future__ import annotations

import subprocess
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.support.programs import STORES, Program

PACKAGES = (
    *STORES,
    "aiohttp.test_utils",
    "aiohttp.web",
    "asynclock.cli",
    "asynclock.fastapi",
    "asynclock.otel",
    "fakeredis",
    "fastapi.testclient",
    "hypothesis.stateful",
    "opentelemetry.exporter.prometheus",
    "pytest",
    "rich.live",
    "sqlalchemy.dialects.mysql.asyncmy",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "trustme",
    "typer.testing",
    "uvicorn",
    "uvloop",
    "yaml",
)
"""Those that take more than 10 ms."""


class _Copy(gateway_io.Popen2IOMaster):
    """A worker and its pipes. execnet starts it as `python -u -c TEXT`."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        _, *options, option, text = args
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.popen = worker = Program([option, text], PACKAGES, options, **pipes)
        Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel=execmodel)


def copy_workers() -> None:
    """From now on xdist starts its workers so."""
    gateway_io.Popen2IOMaster = _Copy  # type: ignore[misc]
