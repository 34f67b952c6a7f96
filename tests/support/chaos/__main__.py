"""One run: clients on hosts of their own, and links and servers that fail.

    python -m tests.support.chaos --seconds 60 --seed 7
    python -m tests.support.chaos --durable                # servers that forget nothing, and clients that trust them
    python -m tests.support.chaos --store postgresql       # or zookeeper: one node

Exit codes: 0 all is well; 1 a violation: two holders, a token that does not rise, a client that is not served after all
is healed, a key that is left, an error that no lock may raise; 77 this machine cannot run it (0 with --if-possible).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from asynclock.stores.embedded.server import die_with_parent
from tests.support.chaos import container
from tests.support.chaos.client import Settings, kind_of
from tests.support.chaos.faults import KILLED, LOSSY, NODES, Fault, schedule
from tests.support.chaos.network import DROP, Impossible, Network, inside
from tests.support.chaos.servers import Node, make
from tests.support.chaos.verdict import (
    SETTLES,
    Line,
    Past,
    as_hosts_had_them,
    errors,
    first_entries,
    longest_pause,
    outages,
    spread,
    unserved,
    violations,
)

CANNOT = 77
_STARTS, _SERVED, _CLOSES = 60.0, 20.0, 30.0
"""Seconds at most: until all clients have met all servers; until each task was served once no server is in quarantine;
until a client has closed."""


class Clients:
    """The processes of the client hosts."""

    def __init__(self, network: Network, given: argparse.Namespace, urls: list[str]) -> None:
        self._network, self._given = network, given
        (network.folder / "names").mkdir()
        self.settings = [self._settings(host, urls) for host in range(given.hosts)]
        self._files = [network.folder / f"client{host}" for host in range(given.hosts)]
        self._processes = [self._start(host, file) for host, file in enumerate(self._files)]

    def _settings(self, host: int, urls: list[str]) -> Settings:
        given = self._given
        return Settings(
            urls=urls,
            host=host,
            tasks=given.tasks,
            lease=given.lease,
            prefix=f"broken{host}:" if given.broken else "lock:",
            trust_restarts=given.durable,
            seed=given.seed,
            folder=str(self._network.folder / "names"),
        )

    def _start(self, host: int, file: Any) -> subprocess.Popen[bytes]:
        command = self.settings[host].command("use")
        with file.open("wb") as out, inside(self._network.namespace(f"client{host}")):
            # In a session of its own: ^C in a terminal is for this process only, which ends the others.
            return subprocess.Popen(command, stdout=out, start_new_session=True, preexec_fn=die_with_parent)  # noqa: PLW1509 - see there

    def lines(self) -> list[Line]:
        """So far."""
        found = []
        for host, file in enumerate(self._files):
            for line in file.read_text().splitlines():
                with suppress(ValueError):  # one that is not complete
                    found.append({"host": host, **json.loads(line)})
        return found

    def wait_for(self, check: Callable[[list[Line]], bool], within: float) -> bool:
        """Until the lines pass the check, or a client has ended."""
        end = time.monotonic() + within
        while not (done := check(self.lines())) and time.monotonic() < end and not self.ended():
            time.sleep(0.2)
        return done

    def ended(self) -> bool:
        return any(each.poll() is not None for each in self._processes)

    def close(self) -> list[str]:
        """Let them close, as a program does at its end. What went wrong."""
        for each in self._processes:
            each.send_signal(signal.SIGTERM)
        found = []
        for host, each in enumerate(self._processes):
            try:
                if code := each.wait(_CLOSES):
                    found.append(f"client {host} ended with {code}")
            except subprocess.TimeoutExpired:
                found.append(f"client {host} does not close")
        return found

    def kill(self) -> None:
        for each in self._processes:
            each.kill()
            each.wait()

    def left(self) -> list[str]:
        """The names that have a holder or a waiter, as a new client sees them."""
        with inside(self._network.namespace("client0")):
            out = subprocess.run(self.settings[0].command("look"), stdout=subprocess.PIPE, text=True, check=True).stdout
        return list(json.loads(out)["left"])


class Run:
    """The faults of one run, and when each was."""

    def __init__(self, network: Network, nodes: list[Node], quarantine: float) -> None:
        self._network, self._nodes, self._quarantine = network, nodes, quarantine
        self._since: dict[Fault, float] = {}
        self.past: list[Past] = []

    def play(self, faults: list[Fault], stopped: Callable[[], bool]) -> None:
        """From now on. At the end all is healed."""
        start = time.monotonic()
        steps = [(each.at, True, each) for each in faults] + [(each.until, False, each) for each in faults]
        for at, begins, fault in sorted(steps):
            if not (over := stopped()):
                time.sleep(max(0.0, start + at - time.monotonic()))
            if begins and not over:
                self._begin(fault)
            elif fault in self._since:
                self._end(fault)

    def _begin(self, fault: Fault) -> None:
        self._since[fault] = time.monotonic()
        if fault.kind in NODES:
            node = self._nodes[fault.node]
            (node.freeze if fault.kind == "frozen" else node.kill)()
        for receiver, sender, how in _filters(fault):
            self._network.fail(receiver, sender, how)

    def _end(self, fault: Fault) -> None:
        if fault.kind in NODES:
            node = self._nodes[fault.node]
            (node.thaw if fault.kind == "frozen" else node.restart)()
        for receiver, sender, how in _filters(fault):
            self._network.heal(receiver, sender, how)
        votes = time.monotonic() + (self._quarantine if fault.kind == KILLED else 0.0)
        self.past.append(Past(self._since.pop(fault), votes, fault.kind, fault.host, fault.node))


def _filters(fault: Fault) -> list[tuple[str, str, str]]:
    """The receivers and senders whose packets are lost, and how, for a fault of a link."""
    client, node = f"client{fault.host}", f"node{fault.node}"
    return {
        "request lost": [(node, client, DROP)],
        "reply lost": [(client, node, DROP)],
        "cut": [(node, client, DROP), (client, node, DROP)],
        "reset": [(node, client, "reset")],
        LOSSY: [(node, client, LOSSY), (client, node, LOSSY)],
    }.get(fault.kind, [])


def chaos(network: Network, given: argparse.Namespace) -> list[str]:
    """What went wrong; and the figures, printed."""
    with _servers(network, given) as nodes, ExitStack() as stack:
        clients = Clients(network, given, [node.url for node in nodes])
        stack.callback(clients.kill)
        if not clients.wait_for(lambda lines: _ready(lines) == given.hosts, _STARTS):
            return [f"only {_ready(clients.lines())} of {given.hosts} clients have met all servers", *_told(clients)]
        quarantine = 0.0 if given.durable or len(nodes) == 1 else given.lease + 1
        run = Run(network, nodes, quarantine)
        print(f"faults begin (process {network.folder.name})", flush=True)
        began = time.monotonic()
        run.play(schedule(given.seed, given.seconds, given.hosts, len(nodes)), clients.ended)
        time.sleep(0.0 if clients.ended() else max(0.0, began + given.seconds - time.monotonic()))
        found = _heal(clients, given, quarantine) + clients.close()
        lines = clients.lines()
        found += violations(lines)
        if given.lines:
            Path(given.lines).write_text("\n".join(json.dumps(each) for each in [*map(Past._asdict, run.past), *lines]))
        _report(lines, run.past, given, len(nodes))
        return found + _left(clients, nodes, given)


@contextmanager
def _servers(network: Network, given: argparse.Namespace) -> Iterator[list[Node]]:
    nodes: list[Node] = []
    try:
        for number in range(given.nodes):  # one after the other: those that were made must end if one cannot be made
            nodes.append(_node(network, given, number))  # noqa: PERF401 - see above
        yield nodes
    finally:
        for node in nodes:
            with suppress(AssertionError, AttributeError, OSError):  # it is killed already
                node.kill()


def _node(network: Network, given: argparse.Namespace, number: int) -> Node:
    return make(given.store, network, f"node{number}", lease=given.lease, durable=given.durable)


def _ready(lines: list[Line]) -> int:
    return sum("ready" in each for each in lines)


def _told(clients: Clients) -> list[str]:
    return [each["text"] for each in clients.lines() if "log" in each][-20:]


def _heal(clients: Clients, given: argparse.Namespace, quarantine: float) -> list[str]:
    """Wait until each task was served. What went wrong."""
    healed = time.monotonic()
    waits = lambda lines: unserved(lines, healed, given.hosts, given.tasks)  # noqa: E731 - used twice, here
    if clients.wait_for(lambda lines: not waits(lines), quarantine + _SERVED):
        print(f"healed     all {given.hosts * given.tasks} tasks were served within {time.monotonic() - healed:.1f} s")
        return []
    return [f"not served after all was healed: {waits(clients.lines())}"]


def _left(clients: Clients, nodes: list[Node], given: argparse.Namespace) -> list[str]:
    """The keys that are still there when all that ends by time has ended: tombstones, one lease after the last."""
    if given.broken:
        return []
    end = time.monotonic() + given.lease + 5.0
    while (found := _keys(nodes)) and time.monotonic() < end:
        time.sleep(0.2)
    found += clients.left()
    print(f"keys       {found or 'none is left'}")
    return [f"left: {found}"] if found else []


def _keys(nodes: list[Node]) -> list[str]:
    """Those that are neither a counter of tokens nor the mark of first use."""
    return [key for node in nodes for key in node.stored() if not key.endswith(("fence", "asynclock~used"))]


def _report(lines: list[Line], past: list[Past], given: argparse.Namespace, nodes: int) -> None:
    entered = [each for each in lines if "ended" in each]
    kinds = Counter(kind_of(each["name"]) + (" (reader)" if each["shared"] else "") for each in entered)
    print(f"entries    {len(entered):,}: {_counts(kinds)}")
    print(f"faults     {len(past)}: {_counts(Counter(each.kind for each in past))}")
    print(f"errors     {_counts(errors(lines))}")
    past = [*as_hosts_had_them(past, lines, given.hosts)]
    lost = outages(past, given.hosts, nodes)
    waited, again = first_entries(lost, lines)
    print(f"outages    {len(lost)} times a client host had no majority that may vote")
    print(f"           from the return of a majority to the first entry of that host: {spread(waited)}")
    print(f"           lost again before an entry: {len(again)} times, after {spread(again)}")
    pause = longest_pause(past, lines, given.hosts, nodes)
    print(f"pauses     at most {pause:.2f} s without an entry of a host that has had such a majority for {SETTLES:g} s")


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counted.most_common()) or "none"


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the schedule")
    parser.add_argument("--store", choices=["redis", "postgresql", "zookeeper"], default="redis")
    parser.add_argument("--durable", action="store_true", help="Redis with appendfsync always, and trust_restarts")
    parser.add_argument("--hosts", type=int, default=3, help="of clients")
    parser.add_argument("--tasks", type=int, default=6, help="of each client")
    parser.add_argument("--lease", type=float, default=5.0, help="also the max_lease")
    parser.add_argument("--if-possible", action="store_true", help="exit code 0 where this machine cannot run it")
    parser.add_argument("--lines", metavar="FILE", help="write the faults there, and what the clients wrote, as JSON")
    parser.add_argument("--broken", action="store_true", help="each client has its own prefix: the oracle must notice")
    parser.add_argument("--in-container", action="store_true", help="as for a user who is not root: in a container")
    given = parser.parse_args(words)
    given.nodes = 5 if given.store == "redis" else 1
    return given


def main(words: list[str]) -> int:
    """The exit code."""
    given = options(words)
    if given.in_container or os.geteuid() != 0:
        return _in_container(words, given)
    kind = " durable" if given.durable else ""
    print(
        f"seed       {given.seed}: {given.seconds:g} s, {given.nodes}{kind} {given.store}, {given.hosts} client hosts"
    )
    hosts = [f"node{number}" for number in range(given.nodes)] + [f"client{number}" for number in range(given.hosts)]
    for number in (signal.SIGTERM, signal.SIGHUP):  # the latter also comes if a shell ends while a node is frozen
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with Network(hosts) as network:
            found = chaos(network, given)
    except (Impossible, pytest.skip.Exception) as reason:
        return _skipped(reason, given)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for each in found[:20]:
        print(f"VIOLATION  {each}")
    print(f"violations {len(found)}" + (f"; the same schedule again: --seed {given.seed}" if found else ""))
    return 1 if found else 0


def _in_container(words: list[str], given: argparse.Namespace) -> int:
    try:
        return container.run([each for each in words if each != "--in-container"])
    except Impossible as reason:
        return _skipped(reason, given)


def _skipped(reason: BaseException, given: argparse.Namespace) -> int:
    print(f"chaos: skipped: {reason}", file=sys.stderr)
    return 0 if given.if_possible else CANNOT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
