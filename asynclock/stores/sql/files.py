"""Where a SQLite file is, and whether a connection still has the file open that is at its path.

File locks do not work over a network file system, so such a file is refused.

A file can be deleted, renamed or replaced while connections have it open, and so can the -wal and -shm files beside it.
Then a connection would go on with what others do not see any more. So it compares the device and the inode of all
three with what they were when it opened them. This module never opens one of them: a close would drop all file locks
that the process has on that file, those of the library of SQLite, too.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "9p", "afs", "ceph", "coda", "gfs2", "glusterfs", "lustre"),
    *("ncpfs", "ocfs2", "vboxsf", "virtiofs", "vmhgfs", "davfs", "beegfs", "gpfs", "orangefs"),
}
"""Types of file systems that several machines share."""

_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.unionfs", "fuse.mergerfs", "fuse.bindfs", "fuse.lxcfs"}

_MOUNTS = Path("/proc/self/mountinfo")

_LEAST = (3, 35)
"""The version of SQLite from which on it has all statements of this store."""


Inode: TypeAlias = "tuple[int, int] | None"
"""The device and the inode of a file; None: there is none."""


class FileReplaced(OSError):
    """The connection has another file open than the one at the path. It counts as a lost connection: the next
    connection opens the file at the path."""


OPENS_ALL = "SELECT 1 FROM sqlite_master LIMIT 1"
"""A statement with which SQLite opens -wal and -shm. A connect opens the file itself only."""


class OpenFile:
    """The files of one connection, which has just opened all of them (`OPENS_ALL`)."""

    def __init__(self, path: str) -> None:
        self.inode = inode_of(path)
        self.clock: tuple[str, float] | None = None  # a table, and the offset of its clock, as it was last read
        self._path = path
        real = os.path.realpath(path)  # SQLite has -wal and -shm there
        self._logs = f"{real}-wal", f"{real}-shm"
        self._inodes = self._found()

    def _found(self) -> list[Inode]:
        return [inode_of(each) for each in self._logs]

    @property
    def is_current(self) -> bool:
        """Whether all files are still those at their paths. An -wal may also be new, because the journal has another
        mode now; then it is unknown which one the connection has opened."""
        return inode_of(self._path) == self.inode and self._found() == self._inodes

    def check(self) -> None:
        """In a transaction. Raises FileReplaced."""
        if (now := inode_of(self._path)) != self.inode:
            done = "deleted" if now is None else "replaced"
            raise FileReplaced(
                f"the file was {done} after it was opened; locks that were held in it are not known any more"
            )
        before, self._inodes = self._inodes, self._found()
        for path, inode, first in zip(self._logs, self._inodes, before, strict=True):
            if first is not None and inode != first:  # without one before: the mode of the journal has changed
                done = "deleted" if inode is None else "replaced"
                raise FileReplaced(f"{path} was {done} while a client had it open; nothing may delete it then")


def inode_of(path: str) -> Inode:
    """By stat only."""
    try:
        found = os.stat(path)
    except OSError:  # there is none, or its folder cannot be read
        return None
    return found.st_dev, found.st_ino


def absolute(path: str) -> str:
    """The path as it is now, whatever the working folder of the process is later. Links stay: they may be switched. So
    does `..`, which leads from a link to the parent of its target."""
    return path if os.path.isabs(path) else str(Path(path).absolute())


def path_of(url: URL) -> str | None:
    """The file of an engine of the user; None: it is in memory. Raises ConfigError for a relative path."""
    path = url.database or ":memory:"
    if path.startswith("file:"):
        path = unquote(urlsplit(path).path)
    if (
        path in ("", ":memory:", "/:memory:")
        or url.query.get("mode") == "memory"
        or "mode=memory" in (url.database or "")
    ):
        return None
    if not os.path.isabs(path):
        raise ConfigError(
            f"{path} is a relative path, which is another file in another working folder: give the engine an absolute "
            "one, as in sqlite+aiosqlite:////var/lib/app/locks.db"
        )
    return path


def check_library() -> None:
    """Raise ConfigError where the library of SQLite, which is that of this Python, is too old."""
    if sqlite3.sqlite_version_info < _LEAST:
        raise ConfigError(
            f"SQLite {'.'.join(map(str, _LEAST))} or later is needed, for INSERT ... RETURNING: the sqlite3 of this "
            f"Python has {sqlite3.sqlite_version}"
        )


def check_file(path: str | None) -> None:
    """Raise ConfigError for a database without a file, and for a file that several machines may share."""
    if not path or path == ":memory:" or path.startswith("file:"):
        raise ConfigError("name a file, as in sqlite:////var/lib/app/locks.db: a database in memory has one client")
    try:
        mounts = _MOUNTS.read_text()
    except OSError:  # not Linux
        return
    kind = type_of(Path(path), mounts)
    if is_network(kind):
        raise ConfigError(
            f"{path} is on a file system of type {kind}: SQLite's file locks do not work over a network; "
            "use a local file, or a database server"
        )


def reason_of(path: Path) -> str:
    """Why a file cannot be opened, as far as that is seen from outside."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return f"{path} is a folder"
    return f"the user of the program needs write rights on the folder {folder}, and on the file"


def why_not_read(path: str) -> str | None:
    """Why a user who may not write a file cannot read it either; None: it may write the file, or can read it. SQLite
    reads a file in WAL mode with the help of its -wal and -shm, which the clients that have it open keep. Those that a
    reader made, if its folder lets it, would belong to the reader, and the clients that write could not use them."""
    if inode_of(path) is None or _may(path, os.W_OK):
        return None
    real = os.path.realpath(path)
    for each in (real, f"{real}-wal", f"{real}-shm"):
        if inode_of(each) is None:
            return (
                f"this user may read {path}, and not write it, and no client has it open: read it while a client has, "
                "or as a user who may write"
            )
        if not _may(each, os.R_OK):
            return f"this user has no right to read {each}"
    return None


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def is_network(kind: str) -> bool:
    """Whether several machines may share a file system of that type. Pure."""
    return kind in NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def type_of(path: Path, mounts: str) -> str:
    """The type of the file system of a path, after the text of /proc/self/mountinfo."""
    real = Path(path).resolve()
    found: tuple[int, str] = (-1, "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split(" ", 1)[0]
        if len(fields) < 5:
            continue
        at = Path(_plain(fields[4]))
        if (real == at or at in real.parents) and len(at.parts) >= found[0]:  # of two at one place the later one counts
            found = len(at.parts), kind
    return found[1]


def _plain(text: str) -> str:
    """Spaces and the like are octal there."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
