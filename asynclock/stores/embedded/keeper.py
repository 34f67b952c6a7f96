"""The process that keeps an embedded server: it starts the server, and ends it after its last user has ended."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

from asynclock.stores.embedded import server as valkey

if TYPE_CHECKING:
    import subprocess


def keep(folder: Path) -> None:
    """Serve until no process holds `users`. Two keepers would start two servers, so a second keeper ends at once."""
    path = folder / "valkey.sock"
    alive = (folder / "alive").open("w")
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    server = valkey.start(path)
    users = (folder / "users").open("w")
    threading.Thread(target=_end_with_the_last, args=(users, server), daemon=True).start()
    server.wait()  # for any reason: when this process ends, a user finds `alive` unlocked and starts another keeper
    path.unlink(missing_ok=True)


def _end_with_the_last(users: IO[str], server: subprocess.Popen[bytes]) -> None:
    fcntl.flock(users, fcntl.LOCK_EX)  # granted after the last user of the server has ended; a new user now waits
    server.kill()


if __name__ == "__main__":
    os.umask(0o077)
    keep(Path(sys.argv[1]))
