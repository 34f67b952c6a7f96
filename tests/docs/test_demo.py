"""The demo: the real command leaves nothing behind, and its verdict can be negative."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asynclock.cli import app
from asynclock.cli.demo import stage
from asynclock.cli.demo.chaos import Step, plan
from asynclock.cli.demo.ledger import Ledger
from asynclock.cli.demo.records import Blow, Hold, Run, Stale, Struck, Write, scene, verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The demo's only place for temporary files; its short path is in the command line of each of its processes."""
    with tempfile.TemporaryDirectory(prefix="ald-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def start(wheel: None, folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `asynclock demo`, and ends it afterwards."""
    del wheel
    started: list[subprocess.Popen[str]] = []

    def demo(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "asynclock", "demo", "--plain", *options]
        env = {**os.environ, "TMPDIR": str(folder)}
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield demo
    for process in started:
        process.kill()
        process.communicate()


def processes(folder: Path) -> list[str]:
    """The command lines of all processes that name the folder."""
    if Path("/proc/self/cmdline").exists():
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it has just ended
    else:
        found = subprocess.run(
            ["ps", "axww", "-o", "command="], capture_output=True, text=True, check=True
        ).stdout.split("\n")
    return [line for line in found if str(folder) in line]


def at_work(process: subprocess.Popen[str]) -> None:
    """Return once a worker holds."""
    assert process.stdout is not None
    for line in process.stdout:
        if " holds, fence " in line:
            return
    pytest.fail("the demo ended before anybody held the lock")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_demo_proves_it(start: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    """Exit code 0, a verdict on each point, and no process or file is left."""
    process = start("--seconds", "6", "--nodes", "5", "--workers", "4")
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert said.count("\n  ok   ") == 9, said
    assert "FAIL" not in said
    assert "REFUSED" in said
    assert "\n  SET         accepted: what fence" in said
    assert "\n  fenced_set  refused, the key keeps what fence" in said
    assert said.rstrip().endswith("verdict: the lock held")
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(180)
def test_demo_as_json(folder: Path) -> None:
    """The verdict is one line on stdout; here of the fewest servers and workers."""
    command = [sys.executable, "-m", "asynclock", "demo", "--json", "--seconds", "6", "--nodes", "3", "--workers", "2"]
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], len(answer["checks"])) == (0, True, 9), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(
    start: Callable[..., subprocess.Popen[str]], folder: Path, number: signal.Signals
) -> None:
    """Ctrl-C or SIGTERM in the middle: no verdict, no process, no file; the exit code is the signal's."""
    process = start("--nodes", "3", "--workers", "2")
    at_work(process)
    assert len(processes(folder)) >= 3 + 2 - 1  # on a busy machine the demo has killed a server by now
    process.send_signal(number)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 128 + number, said
    assert "verdict:" not in said
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to the life of its parent")
def test_killed_demo_leaves_no_process(start: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    """Its servers and workers die with it even if it cannot clear up."""
    process = start("--nodes", "3", "--workers", "2")
    at_work(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while processes(folder):  # the kernel kills them, without a notice
        assert time.monotonic() < deadline, processes(folder)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--nodes", "2"),
        ("--nodes", "10"),
        ("--nodes", "many"),
        ("--workers", "1"),
        ("--seconds", "1"),
        ("--seconds", "999"),
        ("--seconds", "nan"),
    ],
)
def test_bad_options_are_refused(option: str, value: str) -> None:
    """The error comes before anything is started."""
    result = CliRunner().invoke(app, ["demo", option, value], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 64
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing: str) -> None:
    """The message says what to install."""
    program = f"import sys; sys.modules[{missing!r}] = None; from asynclock.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'asynclock[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("nodes", range(3, 10))
def test_a_majority_stays_up(nodes: int) -> None:
    """The plan never has more servers down than a quorum survives; one that was restarted counts as down."""
    down = worst = 0
    for _, step in plan(nodes):
        down += (step in {Step.KILL_SERVER, Step.FREEZE_SERVER}) - (step is Step.THAW_SERVER)
        worst = max(worst, down)
    assert 1 <= worst <= (nodes - 1) // 2
    assert [share for share, _ in plan(nodes)] == sorted(share for share, _ in plan(nodes))


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_ledger_refuses_old_fences() -> None:
    """Neither behind a write nor behind a read of a newer hold; and a tenure writes once."""
    ledger = Ledger()
    assert ledger.write(5, ledger.read(5) + 1)
    assert not ledger.write(5, 2)
    assert not ledger.write(4, 2)
    assert ledger.read(7) == 1
    assert not ledger.write(6, 2)
    assert ledger.write(7, 2)
    assert ledger.total == 2


# -- the verdict -----------------------------------------------------------------------------------------------------


def good_run() -> Run:
    """Worker 1 is killed while it holds, worker 3 frozen and woken; 2 and 4 hold undisturbed."""
    return Run(
        start=0.0,
        holds=[
            Hold(2, 12, 100, 0.0, 1.0, left=0.5),
            Hold(1, 11, 200, 1.0, 2.0),
            Hold(3, 13, 300, 2.1, 3.1, lost="expired"),
            Hold(4, 14, 400, 3.2, 4.2, left=3.6),
            Hold(2, 12, 500, 5.0, 6.0, left=5.5),
        ],
        writes=[
            Write(0.4, 2, 12, 100, True),
            Write(3.5, 4, 14, 400, True),
            Write(4.1, 3, 13, 300, False),
            Write(5.4, 2, 12, 500, True),
        ],
        confirmed=[100, 400, 500],
        stale=[Stale(13, 300, before=400, refused=True, kept=400)],
        struck=[
            Struck(Blow.SERVER_KILLED, 0.1, 2, 22),
            Struck(Blow.SERVER_FROZEN, 0.2, 5, 25),
            Struck(Blow.HOLDER_KILLED, 1.2, 1, 11, 200),
            Struck(Blow.HOLDER_FROZEN, 2.2, 3, 13, 300),
            Struck(Blow.HOLDER_WOKEN, 4.0, 3, 13, 300),
        ],
        total=3,
    )


def failures(run: Run) -> list[str]:
    return [check.text for check in verdict(run) if not check.ok]


def test_the_verdict_of_a_good_run() -> None:
    """A run without a failure passes."""
    assert failures(good_run()) == []


def overlap_of_live_holds(run: Run) -> None:
    run.holds[3].left = 4.19
    run.holds[4].entered = 4.1


def overlap_with_the_dead(run: Run) -> None:
    run.holds[2].entered = 1.9


def overlap_with_the_frozen(run: Run) -> None:
    run.holds[3].entered = 3.0


def overlap_with_one_long_before(run: Run) -> None:
    run.holds[0].until = run.holds[0].left = 2.5


def left_after_the_end(run: Run) -> None:
    run.holds[3].left = 4.3


def fence_of_holds_falls(run: Run) -> None:
    run.holds[1].fence = 90
    run.struck[2] = replace(run.struck[2], fence=90)


def accepted_fence_falls(run: Run) -> None:
    run.writes[1], run.writes[3] = run.writes[3], run.writes[1]


def accepted_fence_repeats(run: Run) -> None:
    run.writes.insert(1, run.writes[0])
    run.confirmed.append(100)
    run.total = 4


def fence_of_nobody(run: Run) -> None:
    run.writes.append(Write(7.0, 2, 12, 600, True))
    run.confirmed.append(600)
    run.total = 4


def update_is_lost(run: Run) -> None:
    run.total = 2


def worker_got_no_reply(run: Run) -> None:
    run.confirmed.remove(400)


def worker_got_too_many_replies(run: Run) -> None:
    run.confirmed.append(300)


def stale_write_is_accepted(run: Run) -> None:
    run.writes[2] = replace(run.writes[2], accepted=True)


def stale_write_is_not_tried(run: Run) -> None:
    del run.writes[2]


def stale_write_of_the_keys_is_not_tried(run: Run) -> None:
    run.stale[0] = replace(run.stale[0], fence=100)


def nothing_to_overwrite(run: Run) -> None:
    run.stale[0] = replace(run.stale[0], before=0)


def fenced_key_takes_the_stale_write(run: Run) -> None:
    run.stale[0] = replace(run.stale[0], refused=False, kept=300)


def frozen_holder_is_not_notified(run: Run) -> None:
    run.holds[2].lost = ""


def woken_too_early(run: Run) -> None:
    run.struck[4] = replace(run.struck[4], at=3.0)


def frozen_when_it_did_not_hold(run: Run) -> None:
    run.struck[3] = replace(run.struck[3], at=3.15)


def killed_when_it_did_not_hold(run: Run) -> None:
    run.holds[1].left = 1.1


def nobody_worked_afterwards(run: Run) -> None:
    run.writes[3] = replace(run.writes[3], accepted=False)
    run.confirmed.remove(500)
    run.total = 2


def server_was_not_killed(run: Run) -> None:
    del run.struck[0]


def server_was_not_frozen(run: Run) -> None:
    del run.struck[1]


def holder_was_not_killed(run: Run) -> None:
    del run.struck[2]


def holder_was_not_woken(run: Run) -> None:
    del run.struck[4]


def accident(run: Run) -> None:
    run.accidents.append("worker 1 ended by itself with exit code 1")


def nothing_was_held(run: Run) -> None:
    run.holds.clear()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (overlap_of_live_holds, "before the hold of worker 4"),
        (overlap_with_the_dead, "before the hold of worker 1"),
        (overlap_with_the_frozen, "before the hold of worker 3"),
        (overlap_with_one_long_before, "before the hold of worker 2"),
        (left_after_the_end, "left its block after its validity ended"),
        (fence_of_holds_falls, "not greater than that of the hold before"),
        (accepted_fence_falls, "accepted fence 400 after"),
        (accepted_fence_repeats, "accepted fence 100 after"),
        (fence_of_nobody, "a fence of no recorded hold"),
        (update_is_lost, "the ledger says 2, it accepted 3"),
        (worker_got_no_reply, "the workers received 2 such replies"),
        (worker_got_too_many_replies, "the workers received 4 such replies"),
        (stale_write_is_accepted, "its stale write was accepted"),
        (stale_write_is_not_tried, "its stale write was never tried"),
        (stale_write_of_the_keys_is_not_tried, "it was never tried"),
        (nothing_to_overwrite, "no newer value to overwrite"),
        (fenced_key_takes_the_stale_write, "let fence 300 overwrite newer data"),
        (frozen_holder_is_not_notified, "got no LockLost"),
        (woken_too_early, "woken before its lease had ended"),
        (frozen_when_it_did_not_hold, "did not hold at that time"),
        (killed_when_it_did_not_hold, "but did not hold"),
        (nobody_worked_afterwards, "after: 0"),
        (server_was_not_killed, "no server was killed"),
        (server_was_not_frozen, "no server was frozen"),
        (holder_was_not_killed, "no holder was killed"),
        (holder_was_not_woken, "no holder was frozen and woken"),
        (accident, "ended by itself"),
        (nothing_was_held, "too few to judge"),
    ],
)
def test_the_verdict_finds_each_failure(spoil: Callable[[Run], None], complaint: str) -> None:
    """It finds each failure, and names it."""
    run = good_run()
    spoil(run)
    assert any(complaint in text for text in failures(run)), failures(run)


def test_the_scene_tells_both_answers() -> None:
    """In plain words: the plain key took the stale write, and the fenced one did not; and also if it did."""
    run = good_run()
    assert [line.split()[:2] for line in scene(run)] == [
        ["worker", "3"],
        ["SET", "accepted:"],
        ["fenced_set", "refused,"],
    ]
    fenced_key_takes_the_stale_write(run)
    assert scene(run)[-1].split() == ["fenced_set", "accepted"]
    run.stale.clear()
    assert scene(run) == []


def test_a_killed_worker_may_lack_a_reply() -> None:
    """A worker that was killed before the ledger's reply came is no miscount; any other worker is."""
    run = good_run()
    run.writes.insert(1, Write(1.1, 1, 11, 200, True))
    run.total = 4
    assert failures(run) == []
    run.struck[2] = replace(run.struck[2], pid=99)
    assert any("the count is right" in text for text in failures(run))


async def test_a_server_that_died_before_it_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody confirms that it is stopped, and the demo goes on: its end is told as an accident."""
    monkeypatch.setattr(stage, "_CONFIRM", 0.0)
    actor = stage.Actor(1)
    actor.process = subprocess.Popen(["true"])
    actor.process.wait()
    assert not await actor.freeze()
