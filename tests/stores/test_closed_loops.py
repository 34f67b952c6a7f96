"""Event loops that were closed before the client, as a bridge from sync code may do for each call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import REPO

PROGRAM = """
import asyncio, os, socket, sys, time
from asynclock import Redlock

url, port = sys.argv[1:]
redlock = Redlock(url)

async def use():
    async with redlock("job"):
        pass

def connections():
    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                found += sock.getpeername()[1] == int(port)
        except OSError:
            continue
    return found

most = 0
for _ in range(5):
    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(use())
    loop.close()                      # without shutdown_asyncgens, and without aclose
    most = most or connections()
    end = time.monotonic() + 20
    while connections() > most:       # the server has to close them, too
        assert time.monotonic() < end, (connections(), most)
        time.sleep(0.01)
print("fine")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the descriptors of a process are read in /proc")
def test_f12_closed_loops_leave_no_connections(postgresql_url: str) -> None:
    """The connections of a loop that was closed end with the first use in the next one. uvloop closes them itself."""
    url, port = f"{postgresql_url}?asynclock_table=loops", postgresql_url.rpartition(":")[2].partition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, port],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "fine\n", done
