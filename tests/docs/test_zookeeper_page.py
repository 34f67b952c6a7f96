"""The page about ZooKeeper is true: its programs run on a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import run_python
from tests.support.services.zookeeper import ZooKeeper

PAGE = Path(__file__).parents[2] / "docs" / "stores" / "zookeeper.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)

USED = """
import asyncio


async def use() -> None:
    async with redlock("order:42") as lease:
        print("fencing token", lease.fence)


asyncio.run(use())
"""


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_program_of_the_page_runs(number: int, shared_zookeeper: ZooKeeper) -> None:
    """Unchanged but for the servers, the path and the lease, without a warning; a client that it makes is used. A busy
    machine may take longer for an op than a tenth of a lease of 10 seconds."""
    program = re.sub(r"zk1:2181[^/]*", shared_zookeeper.address, SNIPPETS[number]).replace("/locks", f"/page-{number}")
    program = program.replace("=10.0", "=40.0")
    program += "" if "asyncio.run(" in program else USED
    assert "fencing token" in run_python(program)


def test_there_are_programs() -> None:
    """A page that is written differently would pass."""
    assert len(SNIPPETS) == 3
