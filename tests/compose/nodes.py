"""docker-compose.yml by what the README says of it: its commands, its worker, and nodes that fail.

The tests run in the order of this file. One project of compose serves all of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.embedded.server import die_with_parent
from tests.support import compose
from tests.support.compose import ROOT, Compose, docker, left_of, locked_project, python_of_this_machine, sweep
from tests.support.contender import entries
from tests.support.example_programs import wait_for
from tests.support.programs import PATIENT, PYTHONPATH
from tests.support.waiters import LIMIT

README = (ROOT / "README.md").read_text()
UP, *WORKER, DOWN = re.findall(r"```\n(docker compose up.*?)\n```", README, re.DOTALL)[0].splitlines()
ENOUGH = 10
"""Holds of each process, so that it certainly goes on."""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def image() -> str:
    """Of a server; also what a container of any kind is made of. Without an engine or an image there are no tests."""
    try:
        return compose.image()
    except compose.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def nodes(image: str) -> Iterator[Compose]:
    """The five nodes, started as the README starts them."""
    try:
        command = compose.compose_command()
    except compose.Missing as missing:
        pytest.skip(str(missing))
    sweep()
    with locked_project("nodes") as project:
        five = Compose(project, command, image)
        try:
            five.shell(UP)
            five.wait_healthy()
            yield five
        finally:
            compose.remove(project)


@pytest.fixture(scope="module")
def journal(nodes: Compose, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three processes contend for one name, as long as nodes fail. The folder of their journal."""
    folder = tmp_path_factory.mktemp("contenders")
    (folder / "journal").touch()
    env = {
        "PYTHONPATH": PYTHONPATH,
        "ASYNCLOCK_URLS": ",".join(nodes.urls),
        "ASYNCLOCK_NODE_TIMEOUT": PATIENT,
        "ASYNCLOCK_TRUST_RESTARTS": "true",  # as the README allows for these nodes
    }
    command = [sys.executable, "-m", "tests.support.contender", "contended", str(folder)]
    with (folder / "said").open("w") as said:
        end = die_with_parent if sys.platform == "linux" else None
        processes = [
            subprocess.Popen(command, env=env, stdout=said, stderr=said, cwd=ROOT, preexec_fn=end)  # noqa: PLW1509 - short
            for _ in range(3)
        ]
        try:
            yield folder
            assert [each.poll() for each in processes] == [None] * 3, (folder / "said").read_text()
        finally:
            for each in processes:
                each.kill()
                each.wait()


@pytest.fixture
def client(nodes: Compose, patient_nodes: None) -> Redlock:
    """A client of the test."""
    return Redlock(*nodes.urls, trust_restarts=True, patience=1.0)


def go_on(journal: Path) -> None:
    """From now on each of the processes gets the lock many times. None was ever beside another, and the tokens rose."""
    before = len(entries(journal))

    def enough() -> bool:
        holds = Counter(each.pid for each in entries(journal)[before:])
        return len(holds) == 3 and min(holds.values()) >= ENOUGH

    wait_for(enough, f"they do not go on: {(journal / 'said').read_text()[-2000:]}", 60.0)
    written = entries(journal)
    assert {each.what for each in written} == {"alone"}
    assert all(one.fence < other.fence for one, other in itertools.pairwise(written))


async def until_votes(client: Redlock, nodes: Compose, *numbers: int) -> None:
    """Wait until these nodes would vote, and no others."""
    wanted, voting = {f"127.0.0.1:{nodes.ports[each]}" for each in numbers}, set[str]()
    for _ in range(300):
        voting = {each.node for each in (await client.health()).nodes if each.ok}
        if voting == wanted:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{voting} vote, and not {wanted}")


def test_the_worker_of_the_readme(nodes: Compose, tmp_path: Path) -> None:
    """It charges its three orders, each once, over the urls that the README exports."""
    said = nodes.shell("\n".join(WORKER), SHOP=str(tmp_path / "shop.sqlite"), ASYNCLOCK_NODE_TIMEOUT=PATIENT)
    assert re.findall(r"order (\d): charged, fencing token \d+", said) == ["6", "7", "8"]
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as shop:
        assert shop.execute("SELECT order_id, what FROM journal ORDER BY entry").fetchall() == [
            (order, what) for order in (6, 7, 8) for what in ("begin", "charged")
        ]


@pytest.mark.parametrize(
    ("fault", "end", "two"),
    [
        ("kill", "start", (1, 2)),
        ("pause", "unpause", (2, 3)),
        ("network disconnect", "network connect", (3, 4)),
        ("stop", "start", (4, 5)),
    ],
)
async def test_workers_go_on_while_two_nodes_fail(
    nodes: Compose, journal: Path, client: Redlock, fault: str, end: str, two: tuple[int, ...]
) -> None:
    """And after they are back. One at a time is inside, and the tokens rise, all the time."""
    async with client:
        nodes.on(fault, *two)
        await until_votes(client, nodes, *(nodes.ports.keys() - set(two)))
        await asyncio.to_thread(go_on, journal)
        nodes.on(end, *two)
        await until_votes(client, nodes, *nodes.ports)
        await asyncio.to_thread(go_on, journal)


async def test_three_nodes_fail(nodes: Compose, journal: Path, client: Redlock) -> None:
    """Then nobody is let in: QuorumUnavailable, which names the nodes. The processes go on once the nodes are back."""
    async with client:
        nodes.on("kill", 1, 3, 5)
        await until_votes(client, nodes, 2, 4)
        with pytest.raises(QuorumUnavailable) as raised:
            await client("another").acquire(timeout=5.0)
        assert len(raised.value.errors) == 3
        outages = (journal / "said").read_text().count("QuorumUnavailable")
        wait_for(lambda: (journal / "said").read_text().count("QuorumUnavailable") >= outages + 3, "it is no outage")
        before = len(entries(journal))
        nodes.on("start", 1, 3, 5)
        await until_votes(client, nodes, *nodes.ports)
        assert before <= len(entries(journal))
        await asyncio.to_thread(go_on, journal)


async def test_nodes_that_were_killed_remember_holds(nodes: Compose, client: Redlock) -> None:
    """Each write is on disk before its reply. So trust_restarts=True lets all five vote at once."""
    async with client, Redlock(*nodes.urls, lease=60.0, renew=False) as holder:
        lease = await holder("kept").acquire(timeout=10.0)
        assert lease is not None
        nodes.on("kill", *nodes.ports)
        nodes.on("start", *nodes.ports)
        await until_votes(client, nodes, *nodes.ports)
        assert await client("kept").acquire(timeout=0) is None
        assert lease.held


def test_a_node_that_crashes_is_started_again(nodes: Compose) -> None:
    """By the engine, with its data."""
    with redis.Redis.from_url(nodes.url(1)) as node:
        node.set("kept", "yes")
        with suppress(redis.ConnectionError):
            node.shutdown(nosave=True)
    with redis.Redis.from_url(nodes.url(1), retry=Retry(ConstantBackoff(0.1), 300)) as node:
        assert node.get("kept") == b"yes"


async def test_workers_in_containers_release_at_sigterm(nodes: Compose, client: Redlock, tmp_path: Path) -> None:
    """Those of examples/worker.compose.yml. Their health check passes. After `docker stop`, which sends SIGTERM, their
    names are free, long before the leases of 30 s end."""
    patient = {"ASYNCLOCK_NODE_TIMEOUT": PATIENT, "ASYNCLOCK_CONNECT_TIMEOUT": PATIENT}
    service = python_of_this_machine(SHOP_LATENCY="3600", **patient)
    override = tmp_path / "override.yml"
    override.write_text(json.dumps({"services": {"worker": service, "report": service}}))
    files = f"-f docker-compose.yml -f examples/worker.compose.yml -f {override}"
    names = ("order:1", "report")
    async with client:
        await asyncio.to_thread(nodes.shell, f"docker compose {files} up -d worker report")
        while not all([(await client.inspect(name)).holders for name in names]):
            await asyncio.sleep(0.1)
        async with asyncio.timeout(LIMIT):
            while not await asyncio.to_thread(nodes.passes, "worker"):  # a name server of containers may be late
                await asyncio.sleep(0.1)
        workers = [nodes.container(each) for each in ("worker", "report")]
        await asyncio.to_thread(docker, "stop", *workers)
        for name in names:
            async with client(name, timeout=0):
                pass
    assert [each["State"]["ExitCode"] for each in nodes.inspect("worker", "report")] == [128 + signal.SIGTERM] * 2
    docker("rm", "--volumes", *workers)
    docker("volume", "rm", f"{nodes.project}_shop")


def test_down_leaves_nothing(nodes: Compose) -> None:
    """No container, no network, and with -v no volume."""
    assert {len(each) for each in left_of(nodes.project).values()} == {5, 1}
    nodes.shell(re.sub(r"\s+#.*", "", DOWN))
    assert left_of(nodes.project) == {}


def test_what_a_killed_test_has_left_is_removed(image: str) -> None:
    """By the next one. The projects of tests that run are left alone."""
    with locked_project("running") as running:
        ended = running.replace("running", "ended")
        for project, begin in ((running, ["create"]), (ended, ["run", "--detach"])):
            label = ("--label", f"com.docker.compose.project={project}")
            volume = docker("volume", "create", *label).strip()
            docker("network", "create", *label, f"{project}_default")
            docker(*begin, *label, "--volume", f"{volume}:/data", "--network", f"{project}_default", image)
        try:
            assert ended in sweep()
            assert left_of(ended) == {}
            assert len(left_of(running)) == 3
        finally:
            compose.remove(running)
            compose.remove(ended)
