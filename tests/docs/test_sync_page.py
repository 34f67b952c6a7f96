"""The examples of docs/sync.md run with the real thing: Django, Flask under gunicorn, a Celery worker, dramatiq."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from asynclock.blocking import Redlock
from tests.support.ports import free_port
from tests.support.programs import PYTHONPATH, run_python
from tests.support.servers import Server
from tests.support.waiters import LIMIT

PAGE = (Path(__file__).parents[2] / "docs" / "sync.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The programs of the page, each as the file that its first line names."""
    for snippet in SNIPPETS:
        if named := re.match(r"# (\w+\.py)\n", snippet):
            (tmp_path / named[1]).write_text(snippet)
    return tmp_path


def environment(folder: Path, server: Server) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{folder}{os.pathsep}{PYTHONPATH}",
        "ASYNCLOCK_URLS": server.url,
        "BROKER_URL": f"redis+socket://{server.path}",
    }


@contextmanager
def running(folder: Path, server: Server, *command: str) -> Iterator[Path]:
    """The output of that program, while it runs; it must end well at SIGTERM."""
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment(folder, server), cwd=folder, stdout=file, stderr=file
        )
        try:
            yield output
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0, output.read_text()
        finally:
            process.kill()
            process.wait()


def until(true: Callable[[], Any], output: Path | None = None) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, output.read_text() if output else ""
        time.sleep(0.05)


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if not each.startswith("# ")])
def test_a_snippet_of_the_page(snippet: str, shared_urls: list[str], name: str) -> None:
    """Its function does its work under the lock."""
    charged: list[object] = []
    world: dict[str, Any] = {"charge": lambda what, fence: charged.append((what, fence > 0))}
    exec(compile(snippet, "snippet", "exec"), world)
    with Redlock(shared_urls[0]) as client:
        world["redlock"] = client
        (function,) = (each for each in world.values() if getattr(each, "__qualname__", "") in ("pay", "report"))
        function(name)
    assert charged


def test_django(folder: Path, server: Server) -> None:
    """Two requests for one order take turns, a third one gives up with 409, and a second run of the command is
    refused."""
    program = """
        import threading, django
        from django.conf import settings
        from django.urls import path

        settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF="urls", MIDDLEWARE=["shop_views.LockAnswers"])
        django.setup()
        import sys, types
        import shop_views
        from asynclock.blocking import Redlock, redlock
        urls = sys.modules["urls"] = types.ModuleType("urls")
        urls.urlpatterns = [path("orders/<int:order_id>/pay", shop_views.pay)]
        from django.core.management import call_command
        from django.core.management.base import CommandError
        from django.test import Client

        assert Client().get("/orders/7/pay").json() == {"order": 7}
        other = Redlock(sys.argv[1])
        with other("order:7"), other("nightly-report"):
            busy = Client().get("/orders/7/pay")
            print(busy.status_code, busy["Retry-After"])
            try:
                call_command(shop_views.Command())
            except CommandError as error:
                print("another run" in str(error))
        call_command(shop_views.Command())
        """
    output = run_python(program, server.url, **environment(folder, server))
    assert output.split() == ["409", "1", "True", "done"]


def test_flask_under_gunicorn_with_a_preloaded_client(folder: Path, server: Server) -> None:
    """The master uses the client before it forks. Requests for one order take turns over both workers, the tokens rise
    with time, and both workers end at SIGTERM."""
    pytest.importorskip("gunicorn")
    pytest.importorskip("flask")
    port = free_port()
    (folder / "preloaded.py").write_text(
        "from asynclock.blocking import redlock\n"
        "with redlock('warm-up'):\n    pass\n"
        "from shop_web import app as application\n"
    )
    command = ("gunicorn", "--preload", "--workers=2", "--threads=2", f"--bind=127.0.0.1:{port}", "preloaded")
    with running(folder, server, *command) as output:
        until(lambda: output.read_text().count("Booting worker") == 2, output)

        def post(_: int) -> dict[str, Any]:
            answer = httpx.post(f"http://127.0.0.1:{port}/orders/7/pay", timeout=LIMIT)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        paid: list[dict[str, Any]] = []
        with ThreadPoolExecutor(4) as pool:
            until(lambda: paid.extend(pool.map(post, range(8))) or len({each["pid"] for each in paid}) == 2, output)
        paid.sort(key=lambda each: each["began"])
        for before, after in pairwise(paid):
            assert before["ended"] <= after["began"]
            assert before["fence"] < after["fence"]


def test_celery_tries_again_when_the_lock_is_taken(folder: Path, server: Server) -> None:
    """A worker with two forked processes: the task comes back while the lock is held, and runs once it is free."""
    pytest.importorskip("celery")
    (folder / "send.py").write_text(
        "from shop_tasks import pay\nresults = [pay.delay(7), pay.delay(8)]\n"
        "print(*[each.get(timeout=30) for each in results])\n"
    )
    command = ("celery", "-A", "shop_tasks", "worker", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle")
    with running(folder, server, *command, "--without-heartbeat") as output, Redlock(server.url) as client:
        with client("order:7"):
            sent = subprocess.Popen(
                [sys.executable, "send.py"], env=environment(folder, server), cwd=folder, stdout=subprocess.PIPE
            )
            until(lambda: "Retry in" in output.read_text(), output)
        fences, _ = sent.communicate(timeout=LIMIT)
        assert len(set(fences.split())) == 2
        assert not client("order:7").locked()


def test_dramatiq(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose lock is taken fails and comes again; the actor runs under the lock, which is free after it."""
    pytest.importorskip("dramatiq")
    program = """
        import sys, time, threading
        import dramatiq, shop_actors
        from asynclock.blocking import Redlock

        client, ran, tried = Redlock(sys.argv[1]), threading.Event(), threading.Event()

        class Watch(dramatiq.Middleware):
            def after_process_message(self, broker, message, *, result=None, exception=None):
                if exception is None:
                    ran.set()
                elif isinstance(exception, shop_actors.Busy):
                    tried.set()

        shop_actors.broker.add_middleware(Watch())
        worker = dramatiq.Worker(shop_actors.broker, worker_threads=1, worker_timeout=100)
        worker.start()
        with client("order:7"):
            shop_actors.pay.send(7)
            assert tried.wait(20)
            assert not ran.is_set()
        assert ran.wait(20)
        worker.stop()
        assert not client("order:7").locked()
        client.close()
        """
    given = {**environment(folder, server), "BROKER_URL": f"unix://{server.path}"}
    done = subprocess.run(
        [sys.executable, "-c", "import textwrap, sys; exec(textwrap.dedent(sys.argv.pop(1)))", program, server.url],
        env=given,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, "paid 7" in done.stdout) == (0, True), done.stdout + done.stderr
