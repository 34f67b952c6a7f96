"""The process that keeps an embedded server: it starts the server, and ends it after its last user has ended.

Somebody may delete the folder or its files meanwhile: `rm -rf /tmp/*`, or a program that cleans /tmp. The next program
makes them again and starts another server, and two owners would hold one name without end. So

- the keeper looks each second whether its files are still at their paths. If not, it ends its server: the clients see
  this at once, and connect to the other one;
- it deletes nothing at its end, because the file at that path may be another keeper's. A socket that nobody listens on
  is deleted at the next start;
- files that are an hour old get the time of now, so that none is deleted for its age.

Between the first two moments, for a second at most, two owners may hold one name (docs/safety.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from asynclock.stores.embedded import server as valkey

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

AGAIN = os.EX_TEMPFAIL
"""The exit code of a keeper that another one has come before, or whose files or users are gone: look again."""

ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a server, or its keeper, on purpose. One that ends in another way cannot be started."""

_LOOKS = 1.0  # seconds between two looks at the files
_OLD = 3600.0  # seconds; what cleans /tmp deletes files that nobody has used for days

_Inode: TypeAlias = tuple[int, int]


def keep(folder: Path, program: str) -> int:
    """Serve until no process holds `users`, with this program as the server. Two keepers would start two servers, so a
    second keeper ends at once. Returns the exit code."""
    path = folder / "valkey.sock"
    try:
        alive, users = (folder / "alive").open("a"), (folder / "users").open("a")  # "w" would delete what another wrote
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return AGAIN
    files = {folder / "alive": _inode(os.fstat(alive.fileno())), folder / "users": _inode(os.fstat(users.fileno()))}
    if not _are_there(files):
        return AGAIN
    server = valkey.start(path, program=program, output=None)
    with contextlib.suppress(OSError):  # a full disk: these ids are for messages only
        alive.truncate(0)
        os.write(alive.fileno(), text_of(os.getpid(), server.pid))
    locked = dict(files)
    threading.Thread(target=_end_with_the_last, args=(users, server), daemon=True).start()
    threading.Thread(target=_end_with_the_files, args=(files, path, server), daemon=True).start()
    # Whatever the reason: when this process ends, a user finds `alive` unlocked, and starts another keeper.
    code = server.wait()
    if code == 0 or -code in ENDING or not _are_there(locked):  # it cannot start in a folder that was deleted
        return AGAIN
    return code if code > 0 else 128 - code


def text_of(*ids: int) -> bytes:
    """Of a lock file: the processes that have locked it. Not shorter than the text of others before."""
    return " ".join(map(str, ids)).ljust(40).encode()


def _end_with_the_last(users: IO[str], server: subprocess.Popen[bytes]) -> None:
    fcntl.flock(users, fcntl.LOCK_EX)  # granted after the last user of the server has ended; a new user now waits
    server.kill()


def _end_with_the_files(files: dict[Path, _Inode], path: Path, server: subprocess.Popen[bytes]) -> None:
    while (bound := _known(path)) is None:  # the server starts; if it fails, this process ends
        time.sleep(0.01)
    files[path] = _inode(bound)
    while _are_there(files):
        time.sleep(_LOOKS)
    server.kill()


def _are_there(files: Mapping[Path, _Inode]) -> bool:
    """Whether each is still the file at its path. Files that are old get the time of now."""
    for path, inode in files.items():
        found = _known(path)
        if found is None or _inode(found) != inode:
            return False
        if found.st_mtime < time.time() - _OLD:
            with contextlib.suppress(OSError):
                os.utime(path)
    return True


def _known(path: Path) -> os.stat_result | None:
    """None: there is no such file, or it cannot be looked at, because the folder is another user's by now."""
    try:
        return path.lstat()
    except OSError:
        return None


def _inode(known: os.stat_result) -> _Inode:
    return known.st_dev, known.st_ino


def main() -> None:
    os.umask(0o077)
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
