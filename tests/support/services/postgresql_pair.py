"""A PostgreSQL primary with a standby, which can be promoted; and an old primary that comes back."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.services import needs, program
from tests.support.services.postgresql import _WHERE, PostgreSQL, as_user, own, until


class Pair:
    """`primary` streams to `standby`. They change their parts with `promote` and `rewind`."""

    def __init__(self, primary: PostgreSQL, standby: PostgreSQL) -> None:
        self.primary = primary
        self.standby = standby

    def url(self, driver: str = "postgresql", *servers: PostgreSQL) -> str:
        """Of both, in that order; a driver connects to the one that writes. `standby` may be the first."""
        hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in servers or (self.primary, self.standby))
        return f"{driver}://postgres@/postgres?{hosts}&target_session_attrs=read-write"

    def promote(self) -> None:
        """The standby is the primary from now on. What becomes of the old primary is for the caller to say."""
        signal_file = self.standby.folder / "data" / "promote"
        signal_file.touch()
        own(signal_file, "postgres")
        assert self.standby.process is not None
        self.standby.process.send_signal(signal.SIGUSR1)
        self.primary, self.standby = self.standby, self.primary
        until(lambda: not is_in_recovery(self.primary), "the standby is not promoted")

    def rewind(self) -> None:
        """The old primary, which has ended, follows the new one."""
        (found,) = needs("PostgreSQL", program("pg_rewind", *_WHERE))
        old, new = self.standby, self.primary
        new.ask("CHECKPOINT")  # before one it does not know that it has a timeline of its own
        source = f"host=127.0.0.1 port={new.port} user=postgres dbname=postgres"
        command = [found, "-D", str(old.folder / "data"), f"--source-server={source}", "-R", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, cwd=old.folder, **as_user("postgres"))
        old.start()


def is_in_recovery(server: PostgreSQL) -> bool:
    return server.ask("SELECT pg_is_in_recovery()") == "t"


def _standbys(server: PostgreSQL, which: str) -> bool:
    return server.ask(f"SELECT count(*) FROM pg_stat_replication WHERE {which}") == "1"


@contextmanager
def postgresql_pair(*, synchronous: bool) -> Iterator[Pair]:
    """Two servers of the test's own. `synchronous`: a commit waits until the standby has it."""
    folders = [Path(tempfile.mkdtemp(prefix="asynclock-pg-")) for _ in range(2)]
    first = PostgreSQL(folders[0], full_page_writes="on")
    started = [first]
    try:
        first.make()
        with open(folders[0] / "data" / "postgresql.conf", "a") as settings:  # where pg_rewind finds it, too
            settings.write("wal_log_hints = on\nwal_keep_size = 64MB\n")
        first.start()
        second = first.copy(folders[1])
        started.append(second)
        second.settings.update(first.settings)
        second.start()
        until(
            lambda: first.ask("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'") == "1", "no standby"
        )
        if synchronous:
            first.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
            first.ask("SELECT pg_reload_conf()")
            until(
                lambda: first.ask("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == "1",
                "no sync",
            )
        yield Pair(first, second)
    finally:
        for each in started:
            each.stop()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
