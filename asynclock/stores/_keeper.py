"""The process that keeps an embedded server: it starts it, and ends it when the last user is gone."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from asynclock.stores import _valkey


def keep(folder: Path) -> None:
    """Serve until nobody holds `users`. Two keepers would be two servers: the second gives way."""
    path = folder / "valkey.sock"
    alive = (folder / "alive").open("w")
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    server = _valkey.start(path)
    try:
        with (folder / "users").open("w") as users:
            fcntl.flock(users, fcntl.LOCK_EX)  # granted when the last process that uses it has ended
            _valkey.stop([server])
            path.unlink(missing_ok=True)
    finally:
        _valkey.stop([server])


if __name__ == "__main__":
    os.umask(0o077)
    keep(Path(sys.argv[1]))
