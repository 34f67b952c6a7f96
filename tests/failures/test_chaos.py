"""Clients on hosts of their own, while links and servers fail (F27): a short run of `make chaos`, and its oracle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.faults import LINKS, NODES, schedule
from tests.support.chaos.network import Impossible, ensure_possible
from tests.support.chaos.servers import ensure_processes
from tests.support.chaos.verdict import Past, as_hosts_had_them, first_entries, longest_pause, outages, violations
from tests.support.programs import PATIENT, PYTHONPATH
from tests.support.services import needs, program

SEED = 4

ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "ASYNCLOCK_NODE_TIMEOUT": PATIENT}
in_namespaces = pytest.mark.xdist_group("chaos")


def command(*words: str) -> list[str]:
    """A run; skipped where this machine cannot have it."""
    needs("iproute2 or iptables", *(program(each, "/usr/sbin", "/sbin") for each in ("ip", "iptables")))
    try:
        ensure_possible()
        ensure_processes()
    except Impossible as reason:
        pytest.skip(str(reason))
    return [sys.executable, "-u", "-m", "tests.support.chaos", "--hosts", "2", "--tasks", "3", *words]


def played(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    return done


@in_namespaces
@pytest.mark.timeout(180)
def test_f27_no_two_holders_while_links_and_nodes_fail() -> None:
    """No two holders, tokens rise, every task is served after all is healed, and no key is left."""
    done = played("--seconds", "5", "--seed", str(SEED), "--lease", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keys       none is left" in done.stdout
    (faults,) = re.findall("^faults     (.*)", done.stdout, re.M)
    assert [each for each in (*LINKS, *NODES) if each not in faults] == []


@in_namespaces
@pytest.mark.timeout(180)
def test_the_oracle_notices_locks_that_do_not_exclude() -> None:
    """With a prefix for each client a run has two holders, and says so."""
    done = played("--seconds", "2", "--seed", str(SEED), "--broken")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "two holders" in done.stdout


def of_run(pid: int) -> list[str]:
    """What the machine has of that run: namespaces and folders."""
    return [str(each) for where in ("/run/netns", "/tmp") for each in Path(where).glob(f"asynclock-chaos-{pid}*")]


@in_namespaces
@pytest.mark.timeout(180)
def test_nothing_is_left_of_a_run() -> None:
    """One that is interrupted removes what it has made, and what is left of another one that was killed."""
    killed = []
    for how in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(command("--seconds", "60"), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as run:
            try:
                assert run.stdout is not None
                assert any("faults begin" in line for line in run.stdout)
                assert of_run(run.pid)
                killed.append(run.pid)
            finally:
                run.send_signal(how)
    assert [of_run(pid) for pid in killed] == [[], []]


@pytest.mark.parametrize(("seconds", "nodes"), [(60.0, 5), (5.0, 5), (5.0, 1)])
@pytest.mark.parametrize("seed", range(7, 27))
def test_a_seed_has_one_schedule(seed: int, seconds: float, nodes: int) -> None:
    """The same faults at the same times, of each kind. Each ends within the run, and no node has two at once."""
    faults = schedule(seed, seconds, hosts=3, nodes=nodes)
    assert faults == schedule(seed, seconds, hosts=3, nodes=nodes) != schedule(seed + 1, seconds, hosts=3, nodes=nodes)
    assert {each.kind for each in faults} == {*LINKS, *NODES}
    assert faults == sorted(faults)
    assert all(0.0 < each.at < each.until <= seconds for each in faults)
    for node in range(nodes):
        own = [each for each in faults if each.host < 0 and each.node == node]
        assert all(before.until < after.at for before, after in pairwise(own))


def entry(host: int, began: float, ended: float, fence: int, **words: Any) -> dict[str, Any]:
    """The line of a body over the name m0, with a lease of 5 s."""
    line = {"host": host, "task": 0, "name": "m0", "shared": False, "at": ended, "until": began + 5.0}
    return {**line, "began": began, "ended": ended, "fence": fence, **words}


def conflict(line: dict[str, Any]) -> dict[str, Any]:
    return {**{key: line[key] for key in line if key != "ended"}, "at": line["began"] + 0.001, "conflict": line["name"]}


def test_two_holders_are_a_violation_while_both_leases_are_valid() -> None:
    """A body that outlives its lease is none, and neither is one that began after its own."""
    second = entry(1, 102.0, 103.0, 2)
    assert len(violations([entry(0, 100.0, 104.0, 1), second, conflict(second)])) == 1
    assert len(violations([second, conflict(second)])) == 1, "the other body is not known"
    assert violations([entry(0, 100.0, 104.0, 1, until=101.0), second, conflict(second)]) == []
    late = entry(1, 102.0, 103.0, 2, until=101.0)
    assert violations([entry(0, 100.0, 104.0, 1), late, conflict(late)]) == []


def test_tokens_rise_for_each_name() -> None:
    """A writer's is above all before it, a reader's above those of the writers before it."""
    assert violations([entry(0, 100.0, 101.0, 1), entry(1, 102.0, 103.0, 2)]) == []
    assert len(violations([entry(0, 100.0, 101.0, 2), entry(1, 102.0, 103.0, 2)])) == 1
    reads = {"name": "rw0", "shared": True}
    assert violations([entry(0, 100.0, 103.0, 9, **reads), entry(1, 101.0, 102.0, 8, **reads)]) == []
    writer = entry(0, 100.0, 101.0, 9, name="rw0")
    assert len(violations([writer, entry(1, 102.0, 103.0, 8, **reads)])) == 1
    assert len(violations([entry(0, 100.0, 101.0, 9, **reads), entry(1, 102.0, 103.0, 8, name="rw0")])) == 1


def test_other_errors_are_violations() -> None:
    """An exception that no lock may raise, and a log line of the level ERROR."""
    assert (
        len(violations([{"host": 0, "unexpected": "ZeroDivisionError"}, {"host": 0, "log": "ERROR", "text": "?"}])) == 2
    )


def test_an_outage_ends_when_a_majority_may_vote() -> None:
    """Not while a node is in quarantine, or the links to others lose packets. The first entry after that is counted."""
    cut = [Past(10.0, 12.0, "cut", 0, node) for node in range(2)]
    lossy = [Past(11.5, 13.0, "30 % lost", 0, node) for node in (3, 4)]
    found = outages([*cut, *lossy, Past(11.0, 20.0, "killed", -1, 2)], hosts=2, nodes=5)
    assert [(each.host, each.began, each.returned) for each in found] == [(0, 11.0, 13.0)]
    lines = [entry(0, at, at + 0.1, int(at)) for at in (10.5, 12.5, 13.25)] + [entry(1, 13.1, 13.2, 7)]
    assert first_entries(found, lines) == ([0.25], [])
    again = outages([*cut, *(Past(13.0, 14.0, "frozen", -1, node) for node in range(2))], hosts=1, nodes=3)
    assert first_entries(again, [entry(0, 14.5, 15.0, 1)]) == ([0.5], [1.0])
    lossy = [Past(12.5, 14.0, "30 % lost", 0, node) for node in range(3)]
    assert first_entries(outages([*cut, *lossy], hosts=1, nodes=3), [entry(0, 13.0, 13.1, 1)]) == ([], [0.5])


def test_a_quarantine_counts_from_the_moment_at_which_a_client_finds_the_server() -> None:
    """A host that was cut off finds it late. Until then the node casts no vote for it, and is no part of a majority."""
    faults = [Past(10.0, 17.0, "killed", -1, 1), Past(12.0, 13.0, "cut", 0, 0)]
    lines = [
        {"host": 0, "at": at, "quarantined": node, "seconds": 6.0} for at, node in ((9.0, 1), (13.0, 2), (18.0, 1))
    ]
    assert [*as_hosts_had_them(faults, lines, hosts=2)] == [
        Past(10.0, 24.0, "killed", 0, 1),
        Past(10.0, 17.0, "killed", 1, 1),
        Past(12.0, 13.0, "cut", 0, 0),
    ]


def test_a_pause_is_the_time_between_two_entries_while_a_majority_votes() -> None:
    """It votes for 2 s already: the way back to it is told apart. While a majority has a fault no host can enter."""
    faults = [
        Past(10.0, 20.5, "cut", 0, 0),
        Past(14.0, 16.0, "killed", -1, 1),
        Past(17.0, 18.0, "30 % lost", 0, 2),
        Past(20.0, 20.1, "frozen", -1, 0),
    ]
    entered = (10.5, 11.5, 13.5, 15.0, 18.1, 20.5, 21.75)
    lines = [entry(0, at, at + 0.1, int(10 * at)) for at in entered] + [entry(1, 11.0, 11.1, 1)]
    assert longest_pause(faults, lines, hosts=1, nodes=3) == 2.0
    del lines[2]
    assert longest_pause(faults, lines, hosts=1, nodes=3) == 2.5, "until the majority was lost"
    assert longest_pause(faults, lines, hosts=1, nodes=5) == 3.5, "two nodes are a minority of five"
