"""docker-compose.yml as a project of a test's own: its nodes, its ports, and what fails.

Containers outlive the test that started them. So a project has the name of a file that its test keeps locked, and the
next test removes the projects whose files no process has locked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.example_programs import wait_for
from tests.support.ports import free_ports
from tests.support.programs import PYTHONPATH

ROOT = Path(__file__).parents[2]
OFFICIAL, LOCAL = "redis:7-alpine", "asynclock-test/redis:debian"
_PROJECT = "com.docker.compose.project"
_PULL = 30  # seconds


class Missing(Exception):
    """What this machine lacks to run docker-compose.yml."""


def docker(*words: str, limit: float = 60.0) -> str:
    """The output of the docker command."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=limit, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def compose_command() -> list[str]:
    """Version 2, a plugin of docker, or version 1, a program. Raises Missing."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if _succeeds(*command, "version"):
            return command
    raise Missing("there is neither `docker compose` nor docker-compose")


def image() -> str:
    """$ASYNCLOCK_TEST_IMAGE, or the one of docker-compose.yml, or what stands in for it. Raises Missing."""
    if not _succeeds("docker", "version"):
        raise Missing("no engine answers (`docker version`)")
    if given := os.environ.get("ASYNCLOCK_TEST_IMAGE"):
        return given
    for name in (OFFICIAL, LOCAL):
        if _succeeds("docker", "image", "inspect", name):
            return name
    if _succeeds("docker", "pull", "--quiet", OFFICIAL):
        return OFFICIAL
    raise Missing(f"{OFFICIAL} cannot be pulled (tests/support/services/image.sh makes one that stands in for it)")


def _succeeds(*command: str) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return not subprocess.run(command, capture_output=True, timeout=_PULL, check=False).returncode
    return False


# -- projects ----------------------------------------------------------------------------------------------------------

_HOST = re.sub("[^a-z0-9]", "", socket.gethostname().lower())
_PREFIX = f"asynclock-test-{_HOST}-"
"""Of the projects of this machine. The engine may serve others."""


def _lock_of(project: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{project}.lock"


@contextlib.contextmanager
def locked_project(word: str) -> Iterator[str]:
    """The name of a project that is not swept while this process lives."""
    project = f"{_PREFIX}{word}-{os.getpid()}"
    with _lock_of(project).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield project
        finally:
            _lock_of(project).unlink(missing_ok=True)


_KINDS = {
    "rm --force --volumes": ("ps", "--all"),
    "volume rm --force": ("volume", "ls"),
    "network rm": ("network", "ls"),
}
"""What a project consists of: how it is removed, and how it is listed. Containers first, for they use the others."""


def left_of(project: str) -> dict[str, list[str]]:
    """The containers, volumes and networks of a project, by the command that removes them."""
    label = ("--quiet", "--filter", f"label={_PROJECT}={project}")
    return {remove: ids for remove, words in _KINDS.items() if (ids := docker(*words, *label).split())}


def remove(project: str) -> None:
    """All that is left of it, whatever state it is in."""
    for words, ids in left_of(project).items():
        docker(*words.split(), *ids)


def sweep() -> list[str]:
    """Remove the projects of this machine whose tests have ended. Returns their names."""
    label = f'{{{{.Label "{_PROJECT}"}}}}'
    listed = [docker(*words, "--format", label) for words in _KINDS.values()]
    projects = {each for text in listed for each in text.split() if each.startswith(_PREFIX)}
    ended = sorted(each for each in projects if _has_ended(each))
    for each in ended:
        remove(each)
    return ended


def _has_ended(project: str) -> bool:
    try:
        with _lock_of(project).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _lock_of(project).unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except (BlockingIOError, PermissionError):  # its test runs, or is another user's
        return False
    return True


# -- the nodes ---------------------------------------------------------------------------------------------------------


class Compose:
    """The commands of the README, for one project. The nodes have numbers from 1 on."""

    def __init__(self, project: str, command: list[str], image: str) -> None:
        self.project = project
        self._command = command
        self._containers: dict[str, str] = {}
        self.ports = dict(enumerate(free_ports(5), 1))
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("ASYNCLOCK_", "COMPOSE_"))},
            **{f"ASYNCLOCK_PORT_{node}": str(port) for node, port in self.ports.items()},
            "ASYNCLOCK_TEST_IMAGE": image,
            "ASYNCLOCK_WORKER_IMAGE": image,
            "COMPOSE_PROJECT_NAME": project,
        }

    def url(self, node: int) -> str:
        return f"redis://127.0.0.1:{self.ports[node]}"

    @property
    def urls(self) -> list[str]:
        return [self.url(node) for node in self.ports]

    def shell(self, lines: str, **env: str) -> str:
        """Run lines of the README with the ports, the python and the compose of this test. Returns what they print."""
        for node, port in self.ports.items():
            lines = lines.replace(f":{7000 + node}", f":{port}")
        lines = re.sub("^python ", f"{shlex.quote(sys.executable)} ", lines, flags=re.M)
        if self._command == ["docker-compose"]:
            lines = lines.replace("docker compose", "docker-compose").replace(" --wait", "")
        own = self._env | env
        done = subprocess.run(
            ["sh", "-ec", lines], cwd=ROOT, env=own, capture_output=True, text=True, timeout=120, check=False
        )
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    def container(self, service: str) -> str:
        """The id of its container."""
        if service not in self._containers:
            labels = (f"{_PROJECT}={self.project}", f"com.docker.compose.service={service}")
            filters = (word for each in labels for word in ("--filter", f"label={each}"))
            self._containers[service] = docker("ps", "--all", "--quiet", *filters).strip()
        return self._containers[service]

    def inspect(self, *services: str) -> list[dict[str, Any]]:
        """What the engine knows of their containers."""
        found: list[dict[str, Any]] = json.loads(docker("inspect", *map(self.container, services)))
        return found

    def passes(self, service: str) -> bool:
        """Run its health check now. Whether it passes, and says that all is well."""
        (config,) = (each["Config"] for each in self.inspect(service))
        kind, *command = config["Healthcheck"]["Test"]
        assert kind == "CMD"
        words = ["docker", "exec", self.container(service), *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60.0, check=False)
        return not done.returncode and "ok" in done.stdout

    def wait_healthy(self) -> None:
        """What --wait does, which version 1 has not."""
        services = [f"node{node}" for node in self.ports]

        def healthy() -> bool:
            return {each["State"]["Health"]["Status"] for each in self.inspect(*services)} == {"healthy"}

        wait_for(healthy, "the nodes are not healthy", 60.0)

    def on(self, words: str, *nodes: int) -> None:
        """Such as `docker kill`, for these nodes; or `docker network disconnect`."""
        containers = [self.container(f"node{node}") for node in nodes]
        if words.startswith("network"):
            for each in containers:
                docker(*words.split(), f"{self.project}_default", each)
        else:
            docker(*words.split(), *containers)


def python_of_this_machine(**environment: str) -> dict[str, Any]:
    """For a service of compose: it runs the examples with this Python, over the libraries of this machine, in the place
    of an image with Python. Any image for this kind of machine will do."""
    folders = {Path("/usr"), Path("/lib"), Path("/lib64"), Path(sys.base_prefix), Path(sys.prefix), ROOT}
    return {
        "entrypoint": ["/usr/bin/env"],  # the one of the image may need its libraries
        "working_dir": str(ROOT / "examples"),
        "environment": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": PYTHONPATH, **environment},
        "volumes": [f"{each}:{each}:ro" for each in sorted(folders) if each.is_dir()],
    }
