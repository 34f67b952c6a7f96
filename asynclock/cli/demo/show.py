"""`asynclock demo`: real servers and processes, some of which it kills and freezes, and a verdict from the records."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from asynclock._clock import now
from asynclock._errors import ConfigError
from asynclock.cli.demo.chaos import Chaos
from asynclock.cli.demo.ledger import LedgerServer
from asynclock.cli.demo.picture import Picture, print_line
from asynclock.cli.demo.records import figures, scene, verdict
from asynclock.cli.demo.stage import LEASE, Stage, State
from asynclock.cli.output import print_json
from asynclock.stores.embedded import server as valkey

if TYPE_CHECKING:
    from asynclock.cli.demo.records import Run

_GRACE = 20.0  # extra seconds for a slow machine to recover from the last injected failure
_GATHER = 30.0  # seconds for all processes to start
_PARTING = 5.0  # seconds for the workers to finish their tenures and end; on an idle machine they need one
_FRAME = 0.08  # seconds between two pictures

_SIGNALS = tuple(getattr(signal, each) for each in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, each))


def perform(nodes: int, workers: int, seconds: float, lively: bool, as_json: bool = False) -> int:
    """Run the demo, print the verdict, and return the exit code. Nothing is left behind. With `as_json` the verdict is
    a line of JSON on stdout, and all else goes to stderr. Raises ConfigError."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run, interrupted = _perform(nodes, workers, seconds, lively)
        if run is None:
            print_line(f"interrupted by {signal.Signals(interrupted).name}: no verdict, nothing is left behind", lively)
            return 128 + interrupted
        checks = verdict(run)
        good = all(check.ok for check in checks)
        print_line("", lively)
        for line in scene(run):
            print_line(line, lively, "bold")
        print_line("\nchecks on the records of this run:", lively)
        for check in checks:
            print_line(f"  {'ok  ' if check.ok else 'FAIL'} {check.text}", lively, "green" if check.ok else "bold red")
        print_line(f"figures: {figures(run)}", lively)
        said = "the lock held" if good else "NOT PROVEN"
        print_line(f"verdict: {said}", lively, "bold green" if good else "bold red")
    if as_json:
        print_json({"ok": good, "checks": checks, "figures": figures(run)})
    return 0 if good else 1


def _perform(nodes: int, workers: int, seconds: float, lively: bool) -> tuple[Run | None, int]:
    """The records, or the signal that ended the run early."""
    valkey.binary()
    with asyncio.Runner() as runner:
        return runner.run(_until_signal(nodes, workers, seconds, lively))


async def _until_signal(nodes: int, workers: int, seconds: float, lively: bool) -> tuple[Run | None, int]:
    """The run, or the signal that ended it early. After the first signal, others do not interrupt the clean-up."""
    loop = asyncio.get_running_loop()
    playing = asyncio.ensure_future(_play(nodes, workers, seconds, lively))
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            playing.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await playing, 0
    except asyncio.CancelledError:
        if not came:
            raise
        return None, came[0]


async def _play(nodes: int, workers: int, seconds: float, lively: bool) -> Run:
    with tempfile.TemporaryDirectory(prefix="asynclock-demo-") as folder, Stage(Path(folder), nodes, workers) as stage:
        async with LedgerServer(stage.socket, stage.ledger, stage.meet) as server:
            with Picture(stage, seconds, lively) as picture:
                watching = asyncio.create_task(_watch(stage, picture))
                acting = asyncio.create_task(_act(stage, server, seconds))
                try:
                    await asyncio.wait({watching, acting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (watching, acting):
                        task.cancel()
                    ended = await asyncio.gather(watching, acting, return_exceptions=True)
                for error in ended:
                    if isinstance(error, Exception):
                        raise error
                picture.draw()
            if stage.run.accidents:
                print_line(stage.log.read_text(errors="replace"), lively)
    stage.run.total = stage.ledger.total
    return stage.run


async def _watch(stage: Stage, picture: Picture) -> None:
    while True:
        stage.look()
        picture.draw()
        await asyncio.sleep(_FRAME)


async def _act(stage: Stage, server: LedgerServer, seconds: float) -> None:
    for node in stage.servers:
        node.start()
    for node in stage.servers:
        await node.ready()
    for worker in stage.workers:
        stage.start(worker)
    if not await _connected(stage, _GATHER):
        raise ConfigError(f"the workers did not start: {stage.log.read_text(errors='replace')}")
    stage.run.start = now()
    server.go.set()
    try:
        async with asyncio.timeout(seconds + _GRACE):
            await Chaos(stage, seconds).wreak()
    except TimeoutError:
        stage.run.accidents.append(f"the plan was not finished within {seconds + _GRACE:g} s")
    await _part(stage)


async def _connected(stage: Stage, limit: float) -> bool:
    """Whether all workers that were not killed are connected, after `limit` seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await stage.until(lambda: all(worker.connected or worker.state is State.KILLED for worker in stage.workers))
            return True
    return False


async def _part(stage: Stage) -> None:
    """Let each worker finish its tenure and end. A worker that was started again may still be connecting."""
    await _connected(stage, 2 * LEASE)
    for worker in stage.workers:
        if worker.state is not State.KILLED:
            worker.wake()
            worker.end()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PARTING + LEASE):
            await stage.until(lambda: all(worker.gone() and not worker.connected for worker in stage.workers))
            return
    stage.run.accidents.append("not all workers ended on SIGTERM")
