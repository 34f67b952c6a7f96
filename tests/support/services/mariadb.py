"""A MariaDB of the tests, on a free port. Its user is `asynclock`, without a password."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.services import needs, program
from tests.support.services.postgresql import answers, as_user, let_run, own, stop_process, until
from tests.support.services.shared import shared
from tests.support.services.templates import copy_of_template

_USER = "CREATE DATABASE locks;\nCREATE USER asynclock@'%';\nGRANT ALL ON *.* TO asynclock@'%' WITH GRANT OPTION;\n"


def _programs() -> Sequence[Path]:
    where = "/usr/sbin", "/usr/bin"
    return needs("MariaDB", program("mariadb-install-db", *where), program("mariadbd", *where))


def _make(folder: Path) -> None:
    install, _ = _programs()
    own(folder, "mysql")
    (folder / "init.sql").write_text(_USER)
    options = [
        "--no-defaults",
        f"--datadir={folder}/data",
        f"--tmpdir={folder}",  # a server that starts deletes the temporary tables that it finds there
        "--skip-test-db",
        "--auth-root-authentication-method=normal",
    ]
    subprocess.run([install, *options], check=True, capture_output=True, cwd=folder, **as_user("mysql"))


class MariaDB:
    """One server."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mariadb://asynclock@127.0.0.1:{self.port}/locks"

    def make(self) -> None:
        copy_of_template("mariadb", _make, self.folder)

    def start(self, *, first: bool = False) -> MariaDB:
        _, mariadbd = _programs()
        options = ["--no-defaults", f"--datadir={self.folder}/data", f"--socket={self.folder}/socket"]
        options += [f"--tmpdir={self.folder}"]
        options += [f"--port={self.port}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=16M"]
        options += ["--innodb-flush-log-at-trx-commit=0", "--max-connections=300", f"--pid-file={self.folder}/pid"]
        options += ["--skip-name-resolve", "--innodb-log-file-size=8M", "--skip-log-bin"]
        options += self.options
        options += [f"--init-file={self.folder}/init.sql"] if first else []
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [mariadbd, *options],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **as_user("mysql"),
            )
        until(lambda: answers(self.port), "MariaDB does not start")
        return self

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None


@contextmanager
def own_mariadb(*options: str) -> Iterator[MariaDB]:
    """A server of the test's own, with these options, which it may freeze and kill."""
    folder = Path(tempfile.mkdtemp(prefix="asynclock-mariadb-"))
    folder.chmod(0o755)
    server = MariaDB(folder, *options)
    try:
        server.make()
        yield server.start(first=True)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_mariadb() -> Iterator[str]:
    """The url of a server that all workers share."""
    _programs()

    def start(folder: Path) -> dict[str, Any]:
        server = MariaDB(folder)
        server.make()
        server.start(first=True)
        assert server.process is not None
        return {"folder": str(folder), "url": server.url, "pid": let_run(server.process)}

    def stop(service: dict[str, Any]) -> None:
        stop_process(service["pid"], signal.SIGKILL)
        shutil.rmtree(service["folder"], ignore_errors=True)

    with shared("mariadb", start, stop) as service:
        yield service["url"]
