"""The page about ZooKeeper is true: its programs run on a real server, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import QUIET
from tests.support.services.zookeeper import ZooKeeper

PAGE = Path(__file__).parents[2] / "docs" / "stores" / "zookeeper.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)

pytestmark = pytest.mark.one_loop("programs have their own")

USED = """
import asyncio


async def use() -> None:
    async with redlock("order:42") as lease:
        print("fencing token", lease.fence)


asyncio.run(use())
"""


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_program_of_the_page_runs(number: int, shared_zookeeper: ZooKeeper) -> None:
    """Unchanged but for the servers and the path, without a warning; a client that it makes is used."""
    program = re.sub(r"zk1:2181[^/]*", shared_zookeeper.address, SNIPPETS[number]).replace("/locks", f"/page-{number}")
    program += "" if "asyncio.run(" in program else USED
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", QUIET + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fencing token" in done.stdout
    assert not done.stderr


def test_there_are_programs() -> None:
    """A page that is written differently would pass."""
    assert len(SNIPPETS) == 3


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text("utf-8")):
        assert link.startswith("https://") or (PAGE.parent / link).exists(), link
