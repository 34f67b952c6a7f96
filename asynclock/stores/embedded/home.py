"""The folder of an embedded server: where it is, and that no other user can write there."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from asynclock._errors import ConfigError, brief

DIR = "ASYNCLOCK_EMBEDDED_DIR"
"""The variable that moves the folders of all embedded servers."""


_LONGEST = 107 if sys.platform == "linux" else 103
"""The most bytes in the path of a unix socket."""


class Home:
    """The private folder of this user for one server. The variable is read once: a program that changes it, or its
    working folder, keeps its server. Raises ConfigError."""

    def __init__(self, name: str) -> None:
        # Not $TMPDIR: a login shell, cron and sudo have different ones, so they would use different servers.
        # By default /tmp, because the path of a socket must be short. An empty variable is one that is not set:
        # compose and CI write it so.
        base = Path(os.environ.get(DIR) or "/tmp")  # noqa: S108 - `make` checks the folder
        if not base.is_absolute():
            raise ConfigError(
                f"{DIR} is {brief(str(base))}: give an absolute path, because a relative one is another folder, with "
                "another server, in each working folder"
            )
        self._base, self._name = base, name
        _ = self.socket  # its path may be too long

    @property
    def path(self) -> Path:
        """The user may change: a program that is started by root may give its rights up after it made the store."""
        return self._base / f"asynclock-{os.getuid()}-{self._name}"

    @property
    def socket(self) -> Path:
        path = self.path / "valkey.sock"
        if (length := len(os.fsencode(path))) > _LONGEST:
            raise ConfigError(
                f"the path of the embedded server's socket has {length} bytes, and this system allows {_LONGEST}: set "
                f"{DIR} to a shorter folder than {brief(str(self._base))}"
            )
        return path

    def make(self) -> Path:
        """The folder, which is made if it does not exist. Raises ConfigError if it is open to other users."""
        folder = self.path
        folder.mkdir(mode=0o700, exist_ok=True)
        known = folder.lstat()
        if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
            raise ConfigError(f"{folder} is not a private folder of this user: remove it, or set {DIR}")
        return folder
