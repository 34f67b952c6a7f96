"""docs/stores/cluster.md: its snippets run on a real cluster."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import asynclock
from asynclock import Redlock
from tests.support.services.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "stores" / "cluster.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


async def test_the_snippets_run(shared_cluster: Cluster, name: str) -> None:
    """Clients are made, and each function is called with a client of a real cluster."""
    called: list[str] = []

    async def transfer() -> None:
        called.append("transfer")

    async with Redlock(shared_cluster.url) as redlock:
        for snippet in SNIPPETS:
            world: dict[str, Any] = {**vars(asynclock), "redlock": redlock, "transfer": transfer}
            exec(compile(snippet, "snippet", "exec"), world)
            world["redlock"] = redlock
            for each in [each for each in world.values() if inspect.iscoroutinefunction(each)]:
                if each.__code__.co_filename == "snippet":
                    await each(name)
    assert called == ["transfer"]
