"""The same run as root of a container, for a user of this machine who is not root and may use its engine.

The container has the programs and libraries of this machine, and a network, processes and temporary files of its own.
Its hosts are network namespaces as well. A container for each host would need a network filter in its image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support import compose
from tests.support.chaos.network import NAMED, Impossible
from tests.support.containers import LABEL, Run

_AS_ROOT = ("--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN", "--security-opt", "apparmor=unconfined")
"""It makes network namespaces, which are mounts, and sets packet filters."""
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def run(words: list[str]) -> int:
    """The exit code of a run with these arguments. Raises Impossible without an engine or an image."""
    try:
        image = compose.image()
    except compose.Missing as missing:
        raise Impossible(f"network namespaces need root, or a container: {missing}") from missing
    machine = compose.python_of_this_machine(
        PATH=_PATH, **{key: value for key, value in os.environ.items() if key.startswith("ASYNCLOCK_")}
    )
    options = ["--rm", "--init", "--network", "none", "--tmpfs", "/run", "--workdir", str(compose.ROOT), *_AS_ROOT]
    options += ["--name", f"{NAMED}-{os.getpid()}", "--label", f"{LABEL}={Run.get().label}"]
    options += ["--entrypoint", *machine["entrypoint"]]
    for volume in (*machine["volumes"], "/etc:/etc:ro"):
        options += ["--volume", volume]
    for key, value in machine["environment"].items():
        options += ["--env", f"{key}={value}"]
    command = ["docker", "run", *options, image, sys.executable, "-u", "-m", "tests.support.chaos", *words]
    # In a session of its own: a ^C in a terminal reaches the run once, by the handler.
    with subprocess.Popen(command, start_new_session=True) as running:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: running.send_signal(number))
        return running.wait()
