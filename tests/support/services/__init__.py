"""Real servers of other programs than Redis, from the packages of Debian: one module starts one service.

`make services` installs them (install.sh). A test whose service is absent is skipped, and the reason says so; where
$ASYNCLOCK_SERVICES is "all", as in CI, it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shutil import which

import pytest

from tests.support.containers import image

INSTALL = "make services"


def program(name: str, *folders: str) -> Path | None:
    """A program on the PATH, or in one of these folders, which may be patterns; None: it is not installed."""
    if found := which(name):
        return Path(found)
    for folder in folders:
        for path in sorted(Path("/").glob(folder.lstrip("/") + "/" + name), reverse=True):
            return path
    return None


def redis_server() -> Path:
    """Debian's Redis, for deployments of several servers; in containers, the program of their image."""
    return Path("redis-server") if image() else needs("Redis", program("redis-server"))[0]


def needs(service: str, *programs: Path | None) -> Sequence[Path]:
    """These programs. Skips the test if one is absent, and fails it where all services must be there."""
    found = [path for path in programs if path is not None]
    if len(found) < len(programs):
        reason = f"{service} is not installed: {INSTALL}"
        if os.environ.get("ASYNCLOCK_SERVICES") == "all":
            pytest.fail(reason)
        pytest.skip(reason)
    return found
