"""A service that the workers of one test run share: the first one starts it, the last one stops it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def shared(name: str, start: Callable[[Path], dict[str, Any]], stop: Callable[[dict[str, Any]], None]) -> Iterator[Any]:
    """What `start` returned, in this or in another worker. It gets an empty folder."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    lock = Path(tempfile.gettempdir()) / f"asynclock-{name}-{run}.json"
    with _locked(lock) as known:
        if not known.get("users"):
            folder = Path(tempfile.mkdtemp(prefix=f"asynclock-{name}-"))
            folder.chmod(0o755)
            known["service"] = start(folder)
        known["users"] = known.get("users", 0) + 1
        service = known["service"]
    try:
        yield service
    finally:
        with _locked(lock) as known:
            known["users"] -= 1
            if not known["users"]:
                stop(known.pop("service"))
                lock.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a file, which no other process has open meanwhile."""
    while True:
        with open(path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                continue  # the last user has just removed it
            file.seek(0)
            known = json.loads(file.read() or "{}")
            yield known
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known))
            file.flush()
            return
