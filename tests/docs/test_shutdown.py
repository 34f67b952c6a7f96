"""SIGTERM releases at once: the examples and the programs of docs/shutdown.md, as real processes that hold a lock.

The leases are 30 s. So a key that is gone when the process has just ended was released, and did not expire."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import asynclock
from asynclock import Redlock
from asynclock._options import RELEASE_TIMEOUT
from tests.support.default_keys import key_of
from tests.support.example_programs import Journal, Program, Start, accepts, began, wait_for
from tests.support.ports import free_port
from tests.support.programs import PYTHONPATH
from tests.support.web import http

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "shutdown.md").read_text("utf-8")
OWN, WEB, GUNICORN, MIDDLEWARE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(KUBERNETES,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

WORK = """
import asyncio


async def hours_of_work() -> None:
    print("holds", flush=True)
    await asyncio.sleep(3600)


async def is_charged(order_id: int) -> bool:
    return False


async def charge(order_id: int, fence: int) -> None:
    await hours_of_work()


"""


def held(url: str, name: str) -> bool:
    """Whether the server has a hold of that name."""
    with redis.Redis.from_url(url) as operator:
        return bool(operator.exists(key_of(name)))


def request(port: int, order: int) -> socket.socket:
    """A customer who asks for a charge, and waits for the reply."""
    customer = socket.create_connection(("127.0.0.1", port))
    customer.sendall(f"POST /orders/{order}/charge HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n".encode())
    return customer


def terminate(program: Program) -> int:
    """SIGTERM; returns the exit code."""
    program.process.send_signal(signal.SIGTERM)
    return program.ends()


def test_a_long_job_releases_at_once(start: Start, shared_urls: list[str], name: str) -> None:
    """The name is free when the process ends, and no error is printed."""
    job = start(shared_urls[:1], "long_job.py", "--name", name, "--lease", "30", "--seconds", "3600")
    job.says("%")
    assert held(shared_urls[0], name)
    assert terminate(job) == 128 + signal.SIGTERM
    assert not held(shared_urls[0], name)
    assert "Traceback" not in job.said


def test_a_worker_releases_at_once(start: Start, journal: Journal, shared_urls: list[str], order: int) -> None:
    """Its charge was cancelled, and the order is free."""
    worker = start(shared_urls[:1], "worker.py", str(order), SHOP_LATENCY="3600")
    wait_for(lambda: (worker.process.poll() is not None) or began(journal, order), f"no job began: {worker.said}")
    assert held(shared_urls[0], f"order:{order}")
    assert terminate(worker) == 128 + signal.SIGTERM
    assert not held(shared_urls[0], f"order:{order}")
    assert [what for _, what in journal(order)] == ["begin", "in doubt"]


@pytest.mark.parametrize(("example", "grace"), [("fastapi_app.py", "0"), ("aiohttp_app.py", "0.1")])
def test_a_web_app_releases_when_its_grace_is_over(
    start: Start, journal: Journal, shared_urls: list[str], order: int, example: str, grace: str
) -> None:
    """A request that would take an hour is cancelled, and the order is free."""
    app = start(shared_urls[:1], example, "--port", str(port := free_port()), "--grace", grace, SHOP_LATENCY="3600")
    app.port = port
    app.serves()
    with request(port, order):
        wait_for(lambda: journal(order), "the charge did not begin")
        assert held(shared_urls[0], f"order:{order}")
        terminate(app)
    assert not held(shared_urls[0], f"order:{order}")
    assert [what for _, what in journal(order)] == ["begin", "in doubt"]


@pytest.fixture
def shown(shared_urls: list[str], tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Programs of the page; they are killed at the end, with their workers."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def run(shown: list[subprocess.Popen[bytes]], program: str, url: str, log: Path) -> subprocess.Popen[bytes]:
    return begin(shown, ["-c", WORK + program], url, log)


def begin(shown: list[subprocess.Popen[bytes]], args: list[str], url: str, log: Path) -> subprocess.Popen[bytes]:
    """A program in the folder of its log."""
    with log.open("wb") as said:
        shown.append(
            subprocess.Popen(
                [sys.executable, *args],
                cwd=log.parent,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{log.parent}",
                    "ASYNCLOCK_URLS": url,
                    "ASYNCLOCK_CONNECT_TIMEOUT": "5",
                },
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    return shown[-1]


def test_the_program_of_the_page_releases_at_once(
    shown: list[subprocess.Popen[bytes]], shared_urls: list[str], tmp_path: Path, name: str
) -> None:
    """It prints no error, and its exit code says that the job is not done."""
    log = tmp_path / "log"
    process = run(shown, OWN.replace('"nightly"', f'"{name}"'), shared_urls[0], log)
    wait_for(lambda: "holds" in log.read_text(), "it does not hold")
    assert held(shared_urls[0], name)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert log.read_text() == "holds\n"
    assert not held(shared_urls[0], name)


def assert_it_releases(process: subprocess.Popen[bytes], port: int, url: str, order: int, log: Path) -> None:
    """At SIGTERM, while a request holds the lock."""
    wait_for(lambda: accepts(port), "no program listens at the port")
    with request(port, order):
        wait_for(lambda: "holds" in log.read_text(), "it does not hold")
        assert held(url, f"order:{order}")
        process.send_signal(signal.SIGTERM)
        process.wait(50)
    assert not held(url, f"order:{order}"), log.read_text()


@pytest.mark.parametrize("again", ["7", "07"])
async def test_the_web_app_of_the_page_charges_an_order_once(
    shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """The second request finds it charged, also where it writes the number of the order in another way."""
    monkeypatch.setattr(asynclock, "redlock", Redlock(shared_urls[0], prefix=name))
    charged: list[int] = []

    async def is_charged(order_id: int) -> bool:
        return order_id in charged

    async def charge(order_id: int, fence: int) -> None:
        charged.append(order_id)

    world: dict[str, Any] = {"__name__": "page", "is_charged": is_charged, "charge": charge}
    exec(compile(WEB, "page", "exec"), world)
    async with world["lifespan"](world["app"]), http(world["app"]) as web:
        for order in ("7", again):
            assert (await web.post(f"/orders/{order}/charge")).status_code == 200
    assert charged == [7]


def test_the_web_app_of_the_page_releases_when_its_limit_is_over(
    shown: list[subprocess.Popen[bytes]], shared_urls: list[str], tmp_path: Path, order: int
) -> None:
    """With a limit of 0 s in the place of 10 s."""
    port, log = free_port(), tmp_path / "log"
    program = WEB.replace("8000", str(port)).replace("timeout_graceful_shutdown=10", "timeout_graceful_shutdown=0")
    assert program.count("shutdown=0") == 1
    process = run(shown, program, shared_urls[0], log)
    assert_it_releases(process, port, shared_urls[0], order, log)


SERVERS = {
    "gunicorn": ("uvicorn_worker", "-m gunicorn app:app -k workers.Worker -b 127.0.0.1:{port} --graceful-timeout 60"),
    "hypercorn": ("hypercorn", "-m hypercorn app:app -w 2 -b 127.0.0.1:{port} --graceful-timeout 60"),
    "granian": ("granian", "-m granian app:app --interface asgi --port {port} --workers-kill-timeout 60"),
}
"""The package that each needs, and its command."""


@pytest.mark.parametrize("server", SERVERS)
def test_the_workers_of_a_server_release_when_their_limit_is_over(
    shown: list[subprocess.Popen[bytes]], shared_urls: list[str], tmp_path: Path, order: int, server: str
) -> None:
    """By the worker class or by the middleware of the page, with a limit of 0 s. The server waits for far longer."""
    package, command = SERVERS[server]
    pytest.importorskip(package, reason=f"pip install {package}")
    port, log = free_port(), tmp_path / "log"
    added = "" if server == "gunicorn" else MIDDLEWARE + "\n\napp.add_middleware(CancelAfterSigterm, grace=0)\n"
    (tmp_path / "app.py").write_text(WORK + WEB + added)
    (tmp_path / "workers.py").write_text(GUNICORN.replace('shutdown": 10', 'shutdown": 0'))
    process = begin(shown, command.format(port=port).split(), shared_urls[0], log)
    assert_it_releases(process, port, shared_urls[0], order, log)


def test_the_period_of_kubernetes_is_long_enough() -> None:
    """It covers preStop, the limit of the web server, and the releases."""
    spec = yaml.safe_load(KUBERNETES)["spec"]
    (container,) = spec["containers"]
    *_, option, limit = container["command"]
    *_, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert option == "--timeout-graceful-shutdown"
    assert f"timeout_graceful_shutdown={limit})" in WEB
    assert spec["terminationGracePeriodSeconds"] > int(pause) + int(limit) + RELEASE_TIMEOUT
