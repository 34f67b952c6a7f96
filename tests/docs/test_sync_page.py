"""The examples of docs/sync.md run with the real thing: Django, Flask under gunicorn, a Celery worker, dramatiq."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
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
from tests.support.servers import Server, Servers
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


def environment(folder: Path, server: Server, **more: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{folder}{os.pathsep}{PYTHONPATH}",
        "ASYNCLOCK_URLS": server.url,
        "BROKER_URL": f"redis+socket://{server.path}",
        "ASYNCLOCK_CONNECT_TIMEOUT": "5",
        **more,
    }


@contextmanager
def running(folder: Path, server: Server, *command: str, **more: str) -> Iterator[Path]:
    """The output of that program, while it runs; it must end well at SIGTERM. `more`: of its environment."""
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment(folder, server, **more),
            cwd=folder,
            stdout=file,
            stderr=file,
        )
        try:
            yield output
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0, output.read_text()
        finally:
            process.kill()
            process.wait()


def until(true: Callable[[], Any], output: Path | None = None) -> None:
    """Programs with large frameworks take seconds of CPU to start."""
    end = time.monotonic() + 3 * LIMIT
    while not true():
        assert time.monotonic() < end, output.read_text() if output else ""
        time.sleep(0.05)


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if not each.startswith("# ")])
def test_a_snippet_of_the_page(snippet: str, shared_urls: list[str], name: str) -> None:
    """Its function does its work under the lock."""
    charged: list[object] = []
    world: dict[str, Any] = {
        "charge": lambda what, fence: charged.append((what, fence > 0)),
        "is_charged": lambda what: False,
    }
    exec(compile(snippet, "snippet", "exec"), world)
    with Redlock(shared_urls[0]) as client:
        world["redlock"] = client
        (function,) = (each for each in world.values() if getattr(each, "__qualname__", "") in ("pay", "report"))
        function(name)
    assert charged


def test_an_order_is_charged_once(shared_urls: list[str], name: str) -> None:
    """By the first program of the page: one that was charged before it had the lock is not charged again."""
    charged: list[str] = []
    world: dict[str, Any] = {"charge": lambda order, fence: charged.append(order), "is_charged": charged.__contains__}
    exec(compile(SNIPPETS[0], "snippet", "exec"), world)
    with Redlock(shared_urls[0]) as world["redlock"]:
        for _ in range(2):
            world["pay"](name)
    assert charged == [name]


DJANGO = """
import os
import time
import shop_views
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path
from redis import Redis

settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF="site_of_shop", MIDDLEWARE=["shop_views.LockAnswers"])
urlpatterns = [path("orders/<int:order_id>/pay", shop_views.pay)]
broker = Redis.from_url(os.environ["BODIES"])


def answer(data, **options):
    if "order" in data:  # the body of the view: the test sees that it runs, and lets it end
        broker.rpush("begun", data["order"])
        while not broker.lpop("may end"):
            time.sleep(0.01)
        broker.rpush("ended", data["order"])
    return JsonResponse(data, **options)


shop_views.JsonResponse = answer
application = get_wsgi_application()
"""
"""A site with the view and the middleware of the page, of which the test controls the body of the view."""


@pytest.fixture
def bodies(servers: Servers) -> Server:
    """The server by which the test controls the body of the view. It has no lock."""
    return servers.start()


@contextmanager
def django_site(folder: Path, server: Server, bodies: Server) -> Iterator[str]:
    """The url of an order of the site, which runs under gunicorn in two processes. Each has one request at a time."""
    pytest.importorskip("gunicorn")
    (folder / "site_of_shop.py").write_text(DJANGO)
    port = free_port()
    command = ("gunicorn", "--preload", "--workers=2", "--timeout=60", f"--bind=127.0.0.1:{port}", "site_of_shop")
    with running(folder, server, *command, BODIES=bodies.url) as output:
        until(lambda: output.read_text().count("Booting worker") == 2, output)
        yield f"http://127.0.0.1:{port}/orders/7/pay"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=2 * LIMIT)


def test_django_requests_for_one_order_take_turns(folder: Path, server: Server, bodies: Server) -> None:
    """While the view of one request runs, a second request for the same order waits. Its view begins after the first
    one has ended."""
    view = (folder / "shop_views.py").read_text()
    assert view.count("timeout=2)") == 1
    (folder / "shop_views.py").write_text(view.replace("timeout=2)", "timeout=60)"))  # the machine may be slow
    with (
        Redlock(server.url) as client,
        bodies.cli() as control,
        django_site(folder, server, bodies) as url,
        ThreadPoolExecutor(2) as pool,
    ):
        try:
            first = pool.submit(get, url)
            until(lambda: control.llen("begun") == 1)
            second = pool.submit(get, url)
            until(lambda: control.llen("begun") == 2 or client.inspect("order:7").waiters)
            assert control.llen("begun") == 1
            control.rpush("may end", "first")
            until(lambda: control.llen("begun") == 2)
            assert control.llen("ended") == 1
        finally:
            control.rpush("may end", *["each"] * 2)
        assert [each.result().json() for each in (first, second)] == [{"order": 7}] * 2


def test_django_answers_409_for_a_taken_lock_and_503_for_an_outage(
    folder: Path, server: Server, bodies: Server
) -> None:
    """The view does not run. The middleware of the page answers, with Retry-After."""
    with django_site(folder, server, bodies) as url:
        with Redlock(server.url) as client, client("order:7"):
            until(lambda: get(url).status_code == 409)  # 503: it had no answer at the end of its two seconds
            taken = get(url)
        server.kill()
        down = get(url)
    assert (taken.status_code, taken.headers["Retry-After"]) == (409, "1")
    assert taken.json() == {"error": "another request works on it"}
    assert (down.status_code, down.headers["Retry-After"]) == (503, "1")
    with bodies.cli() as control:
        assert control.llen("begun") == 0


def test_a_management_command_of_django_runs_once_at_a_time(folder: Path, server: Server) -> None:
    """A second run of the command is refused while the first one has the lock. Afterwards it runs."""
    program = """
        import django, sys
        from django.conf import settings
        from django.core.management import call_command
        from django.core.management.base import CommandError

        settings.configure()
        django.setup()
        import shop_views
        from asynclock.blocking import Redlock

        with Redlock(sys.argv[1]) as other, other("nightly-report"):
            try:
                call_command(shop_views.Command())
            except CommandError as error:
                print("another run" in str(error))
        call_command(shop_views.Command())
        """
    output = run_python(program, server.url, **environment(folder, server))
    assert output.split() == ["True", "done"]


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


def sent_again(send: list[str], given: dict[str, str], folder: Path, output: Path, mend: Callable[[], object]) -> bytes:
    """What a program prints that sends a task. Once the worker has put the task off, `mend` lets it run."""
    with subprocess.Popen([sys.executable, *send], env=given, cwd=folder, stdout=subprocess.PIPE) as sent:
        try:
            until(lambda: "Retry in" in output.read_text(), output)
            mend()
            return sent.communicate(timeout=2 * LIMIT)[0]
        finally:
            sent.kill()


def test_celery_tries_again_when_the_lock_is_taken(folder: Path, server: Server) -> None:
    """A worker with two forked processes: the task comes back while the lock is held, and runs once it is free."""
    pytest.importorskip("celery")
    (folder / "send.py").write_text(
        "from shop_tasks import pay\nresults = [pay.delay(7), pay.delay(8)]\n"
        "print(*[each.get(timeout=60) for each in results])\n"
    )
    command = ("celery", "-A", "shop_tasks", "worker", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle")
    with running(folder, server, *command, "--without-heartbeat") as output, Redlock(server.url) as client:
        held = client("order:7").acquire(timeout=None)
        fences = sent_again(["send.py"], environment(folder, server), folder, output, held.release)
        assert len(set(fences.split())) == 2
        assert not client("order:7").locked()


def test_celery_tries_again_after_an_outage(folder: Path, servers: Servers) -> None:
    """The server of the locks is down: the task comes back, and runs once the server is up."""
    pytest.importorskip("celery")
    locks, broker = servers.start_together(2)
    more = {"BROKER_URL": f"redis+socket://{broker.path}", "ASYNCLOCK_TRUST_RESTARTS": "1"}
    locks.kill()
    send = ["-c", "from shop_tasks import pay; print(pay.delay(7).get(timeout=60))"]
    command = ("celery", "-A", "shop_tasks", "worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle")
    with running(folder, locks, *command, "--without-heartbeat", **more) as output:
        fence = sent_again(send, environment(folder, locks, **more), folder, output, locks.restart)
        assert int(fence) > 0


DRAMATIQ = """
import queue, sys
import dramatiq, shop_actors
from asynclock.blocking import Redlock

client, ends = Redlock(sys.argv[1]), queue.Queue()


class Watch(dramatiq.Middleware):
    def after_process_message(self, broker, message, *, result=None, exception=None):
        ends.put(exception)


shop_actors.broker.add_middleware(Watch())
shop_actors.print = lambda *words: print(*words, client("order:7").locked())  # the actor's body
worker = dramatiq.Worker(shop_actors.broker, worker_threads=1, worker_timeout=100)
worker.start()
"""
"""A worker for the actor of the page, which prints whether its lock is held."""


@contextmanager
def dramatiq_worker(
    folder: Path, locks: Server, broker: Server, program: str, runs: int = 1
) -> Iterator[subprocess.Popen[str]]:
    """The worker with that program. It must end well, and the actor runs so often, under its lock."""
    pytest.importorskip("dramatiq")
    given = environment(folder, locks, BROKER_URL=f"unix://{broker.path}", ASYNCLOCK_TRUST_RESTARTS="1")
    end = "worker.stop()\nassert not client('order:7').locked()\nclient.close()\n"
    command = [sys.executable, "-c", DRAMATIQ + textwrap.dedent(program) + end, locks.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=given, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
            output, errors = process.communicate(timeout=50)
            assert (process.returncode, output) == (0, "paid 7 True\n" * runs), output + errors
        finally:
            process.kill()


def test_dramatiq_runs_an_actor_under_its_lock(folder: Path, server: Server) -> None:
    """The lock is held while the actor runs, and free afterwards. While another has it, the message fails with Busy,
    and the actor does not run. When the lock is free again, the message comes again, however often it was tried."""
    program = """
        shop_actors.pay.send(7)
        assert ends.get(timeout=20) is None
        with client("order:7"):
            shop_actors.pay.send_with_options(args=(7,), retries=25)
            assert isinstance(ends.get(timeout=20), shop_actors.Busy)
        while ends.get(timeout=20) is not None:
            pass
        """
    with dramatiq_worker(folder, server, server, program, runs=2):
        pass


def test_dramatiq_sends_a_message_again_after_an_outage(folder: Path, servers: Servers) -> None:
    """The server of the locks is down: the message fails with Busy, and the actor does not run without the lock. When
    the server is up, the message comes again."""
    program = """
        shop_actors.pay.send(7)
        error = ends.get(timeout=20)
        print(type(error).__name__, type(error.__cause__).__name__, flush=True)
        while ends.get(timeout=20) is not None:
            pass
        """
    locks, broker = servers.start_together(2)
    locks.kill()
    with dramatiq_worker(folder, locks, broker, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Busy QuorumUnavailable\n"
        locks.restart()


def test_dramatiq_runs_no_actor_whose_message_names_no_lock(folder: Path, server: Server) -> None:
    """The template of the actor asks for a first argument, and the message has only others: it fails with an
    error that says so."""
    program = """
        shop_actors.pay.send_with_options(kwargs={"order_id": 7}, retries=20)
        error = ends.get(timeout=20)
        print(type(error).__name__, type(error.__cause__).__name__, flush=True)
    """
    with dramatiq_worker(folder, server, server, program, runs=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "MiddlewareError IndexError\n"
