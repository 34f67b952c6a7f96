"""Where a SQLite file is. Its locks do not work over a network file system, so such a file is refused."""

from __future__ import annotations

from pathlib import Path

from asynclock._errors import ConfigError

NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "9p", "afs", "ceph", "coda", "gfs2", "glusterfs", "lustre"),
    *("ncpfs", "ocfs2", "vboxsf", "virtiofs", "vmhgfs", "davfs", "beegfs", "gpfs", "orangefs"),
}
"""Types of file systems that several machines share."""

_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.unionfs", "fuse.mergerfs", "fuse.bindfs", "fuse.lxcfs"}

_MOUNTS = Path("/proc/self/mountinfo")


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
