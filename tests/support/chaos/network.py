"""Hosts on this machine: network namespaces, joined by a switch in one more. No packet leaves them, and nothing is made
in the network of the machine itself. The names carry the process id of the run."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Self

NAMED = "asynclock-chaos"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_PROGRAMS = ("ip", "iptables")

DROP = "drop"
FILTERS = {
    DROP: ("--jump", "DROP"),
    "reset": ("--protocol", "tcp", "--jump", "REJECT", "--reject-with", "tcp-reset"),
    "30 % lost": ("--match", "statistic", "--mode", "random", "--probability", "0.3", "--jump", "DROP"),
}
"""What a host can do with packets that arrive."""


class Impossible(Exception):
    """This machine has no network namespaces for this user, or a program is missing."""


def ensure_possible() -> None:
    """Raise Impossible where a look is enough to know."""
    if missing := [each for each in _PROGRAMS if which(each, path=_path()) is None]:
        raise Impossible(f"{' and '.join(missing)} not installed (iproute2, iptables): make services")
    if os.geteuid() != 0:
        raise Impossible("network namespaces and iptables need root")


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def run(*command: str) -> None:
    """Run a command of iproute2 or iptables. Raises RuntimeError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread is in that network namespace. The processes, threads and sockets that it starts stay there."""
    with open("/proc/thread-self/ns/net") as here, open(_FOLDER / namespace) as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(descriptor: int) -> None:
    """os.setns, which is there from Python 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Network:
    """Hosts with these names, and a folder for the files of the run."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._run = f"{NAMED}-{os.getpid()}"
        self._hosts = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, 10)}
        self.folder = Path(tempfile.gettempdir()) / self._run

    def __enter__(self) -> Self:
        """Raises Impossible where the system refuses."""
        ensure_possible()
        sweep()
        self.folder.mkdir(mode=0o755)
        try:
            self._make()
        except RuntimeError as error:
            self._remove()
            raise Impossible(f"no network of its own here: {error}") from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave what is not removed yet
        self._remove()

    def address(self, host: str) -> str:
        return self._hosts[host]

    def namespace(self, host: str) -> str:
        return f"{self._run}-{host}"

    def fail(self, receiver: str, sender: str, how: str) -> None:
        """From now on the receiver does this with the packets of the sender."""
        self.iptables(receiver, "--append", "INPUT", "--source", self._hosts[sender], *FILTERS[how])

    def heal(self, receiver: str, sender: str, how: str) -> None:
        """End one fault like that."""
        self.iptables(receiver, "--delete", "INPUT", "--source", self._hosts[sender], *FILTERS[how])

    def iptables(self, host: str, *rule: str) -> None:
        """Change the packet filter of a host."""
        run("ip", "netns", "exec", self.namespace(host), "iptables", "--wait", *rule)

    def _make(self) -> None:
        switch = self.namespace("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "name", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, (host, address) in enumerate(self._hosts.items()):
            space, port = self.namespace(host), f"v{os.getpid()}x{number}"
            run("ip", "netns", "add", space)
            run(
                "ip",
                "link",
                "add",
                "name",
                port,
                "netns",
                switch,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
        for fault in FILTERS.values():  # a kernel without one of these modules cannot run it
            self.iptables(next(iter(self._hosts)), "--append", "INPUT", *fault)
        self.iptables(next(iter(self._hosts)), "--flush", "INPUT")

    def _remove(self) -> None:
        _remove(self._run)


def sweep() -> None:
    """Remove what runs have left that were killed."""
    left = {path.name for folder in (_FOLDER, Path(tempfile.gettempdir())) for path in folder.glob(f"{NAMED}-*")}
    for run_id in {found[0] for name in left if (found := re.match(rf"{NAMED}-(\d+)", name))}:
        if not _is_run(int(run_id.rpartition("-")[2])):
            _remove(run_id)


def _is_run(pid: int) -> bool:
    """Whether that process is a run: another program may have the process id of a dead one by now."""
    try:
        return pid == os.getpid() or b"chaos" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _remove(run_id: str) -> None:
    """End the processes in the namespaces of a run, and delete these and its folder. The links go with them."""
    for space in sorted(path.name for path in _FOLDER.glob(f"{run_id}-*")):
        asked = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        for pid in map(int, asked.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(RuntimeError):  # another run sweeps at the same time
            run("ip", "netns", "delete", space)
    shutil.rmtree(Path(tempfile.gettempdir()) / run_id, ignore_errors=True)
