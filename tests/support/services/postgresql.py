"""A PostgreSQL of the tests, on a unix socket and a free port, and a PgBouncer before it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.services import needs, program
from tests.support.services.shared import shared
from tests.support.services.templates import copy_of_template

_WHERE = "/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin"
_FAST = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}


def _programs() -> Sequence[Path]:
    return needs("PostgreSQL", program("initdb", *_WHERE), program("postgres", *_WHERE))


def as_user(name: str) -> dict[str, Any]:
    """Arguments of subprocess: PostgreSQL and MariaDB do not run as root."""
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}


def own(folder: Path, name: str) -> None:
    if os.geteuid() == 0:
        shutil.chown(folder, name)


def until(check: Any, what: str, within: float = 60.0) -> None:
    """Wait until check() is true."""
    end = time.monotonic() + within
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


_ENDS = 15.0
"""Seconds that a server has to end after a signal."""


def _make(folder: Path) -> None:
    initdb, _ = _programs()
    own(folder, "postgres")
    options = ["-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
    subprocess.run([initdb, *options], check=True, capture_output=True, cwd=folder, **as_user("postgres"))


class PostgreSQL:
    """One server. The user postgres needs no password; others can be made with `sql`."""

    def __init__(self, folder: Path, port: int = 0, **settings: str) -> None:
        self.folder = folder
        self.settings = settings
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def make(self) -> None:
        copy_of_template("postgresql", _make, self.folder)

    def start(self) -> PostgreSQL:
        _, postgres = _programs()
        settings = {
            **_FAST,
            "listen_addresses": "127.0.0.1",
            **self.settings,
            "unix_socket_directories": str(self.folder),
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [postgres, "-D", str(self.folder / "data"), "-p", str(self.port), *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **as_user("postgres"),
            )
        until(self._is_ready, "PostgreSQL does not start")
        return self

    def _is_ready(self) -> bool:
        status = self.folder / "data" / "postmaster.pid"
        try:
            return status.read_text().splitlines()[7].strip() in ("ready", "standby")
        except (OSError, IndexError):
            return False

    def copy(self, folder: Path) -> PostgreSQL:
        """A standby of this server, not started yet."""
        (backup,) = needs("PostgreSQL", program("pg_basebackup", *_WHERE))
        own(folder, "postgres")
        options = ["-D", str(folder / "data"), "-R", "-c", "fast", "--no-sync", "-h", "127.0.0.1", "-U", "postgres"]
        command = [backup, *options, "-p", str(self.port)]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **as_user("postgres"))
        return PostgreSQL(folder)

    def ask(self, sql: str) -> str:
        """The answer to a statement, as psql prints it. Raises CalledProcessError."""
        (psql,) = needs("PostgreSQL", program("psql", *_WHERE))
        command = [psql, "-h", str(self.folder), "-p", str(self.port), "-U", "postgres", "-XAtqc", sql]
        done = subprocess.run(command, check=True, capture_output=True, cwd=self.folder, text=True, timeout=20)
        return done.stdout.strip()

    @property
    def group(self) -> list[int]:
        """The process and its children."""
        assert self.process is not None
        return processes_of(self.process.pid)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: at once, as after a crash. What has not ended after `_ENDS` is killed."""
        if self.process is not None:
            group = self.group
            self.process.send_signal(how)
            try:
                self.process.wait(_ENDS)
            except subprocess.TimeoutExpired:
                for pid in group:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.wait()
            self.process = None


def processes_of(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


@contextmanager
def own_postgresql(**settings: str) -> Iterator[PostgreSQL]:
    """A server of the test's own, with these settings, which it may freeze and kill."""
    folder = Path(tempfile.mkdtemp(prefix="asynclock-pg-"))
    server = PostgreSQL(folder, **settings)
    try:
        server.make()
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_postgresql() -> Iterator[str]:
    """The url of a server that all workers share."""
    _programs()

    def start(folder: Path) -> dict[str, Any]:
        server = PostgreSQL(folder)
        server.make()
        server.start()
        assert server.process is not None
        return {"folder": str(folder), "url": server.url, "pid": let_run(server.process)}

    with shared("postgresql", start, _stop) as service:
        yield service["url"]


def let_run(process: subprocess.Popen[bytes]) -> int:
    """The id of a process that this one need not end."""
    process.returncode = 0  # else Popen warns that it still runs
    return process.pid


def _stop(service: dict[str, Any]) -> None:
    """It may be the child of another worker."""
    stop_process(service["pid"], signal.SIGQUIT)
    shutil.rmtree(service["folder"], ignore_errors=True)


def stop_process(pid: int, how: signal.Signals) -> None:
    """End a server that this process, or another one, has started."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return

    def gone() -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            stat = Path(f"/proc/{pid}/stat")
            return not stat.exists() or ") Z " in stat.read_text()

    until(gone, f"process {pid} does not end")


@contextmanager
def pgbouncer(server: str, mode: str = "transaction", pool: int = 2, user: str = "postgres") -> Iterator[str]:
    """The url of a PgBouncer before the server with that url. Its pool has so many connections, of that user."""
    (found,) = needs("PgBouncer", program("pgbouncer", "/usr/sbin"))
    folder = Path(tempfile.mkdtemp(prefix="asynclock-pgbouncer-"))
    folder.chmod(0o755)
    own(folder, "postgres")
    behind = server.rpartition(":")[2].partition("/")[0]
    port = free_port()
    (folder / "users.txt").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\npostgres = host=127.0.0.1 port={behind} dbname=postgres user={user}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {folder}/users.txt\npool_mode = {mode}\ndefault_pool_size = {pool}\nmax_client_conn = 200\n"
    )
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen([found, folder / "pgbouncer.ini"], stdout=log, stderr=log, **as_user("postgres"))
    try:
        until(lambda: answers(port), "PgBouncer does not start")
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
