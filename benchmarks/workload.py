"""The work that `compare` measures, the same for both versions. `python workload.py cycles|hot[@SECONDS] TASKS URL...`

It uses the standard library and the public names that all versions have. Options whose defaults may differ are given.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import asynclock
from asynclock import Redlock

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP = 0.2
"""Seconds of work before the first turn that counts."""


def client_of(urls: Sequence[str]) -> Redlock:
    return Redlock(*urls, prefix="lock:", lease=30.0, max_lease=60.0, fence_memory=300.0)


async def cycles(tasks: int, urls: Sequence[str]) -> None:
    """Each line is a number of seconds: so long, each task acquires and releases a free lock of its own."""
    async with client_of(urls) as client:
        await _turn(client, tasks, WARM_UP)
        line = await _say_and_wait(asynclock.__file__)
        while line:
            line = await _say_and_wait(json.dumps(await _turn(client, tasks, float(line))))


async def _turn(client: Redlock, tasks: int, seconds: float) -> dict[str, float]:
    gc.collect()  # each turn pays for its own garbage
    done = 0

    async def work(i: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            async with client(f"order:{i}"):
                pass
            done += 1

    cpu, began = time.process_time(), time.perf_counter()
    end = began + seconds
    await asyncio.gather(*(work(i) for i in range(tasks)))
    return {"cycles": done, "wall": time.perf_counter() - began, "cpu": time.process_time() - cpu}


async def hot(tasks: int, tenure: float, urls: Sequence[str]) -> None:
    """From the first line to the second, each task takes the same name over and over and holds it for `tenure` seconds.
    Stamps are of CLOCK_MONOTONIC, which all processes of a machine share."""
    seen: dict[str, list[float]] = {"waits": [], "took": [], "gave": []}
    over, now = asyncio.Event(), time.monotonic

    async def work(client: Redlock) -> None:
        while not over.is_set():
            asked = now()
            async with client("hot"):
                took = now()
                if tenure:
                    await asyncio.sleep(tenure)
                gave = now()
            for what, value in ("waits", took - asked), ("took", took), ("gave", gave):
                seen[what].append(value)

    async with client_of(urls) as client:
        await client("free").locked()  # a first use connects
        await _say_and_wait(asynclock.__file__)
        working = [asyncio.create_task(work(client)) for _ in range(tasks)]
        await _say_and_wait("working")
        over.set()
        await asyncio.gather(*working)
    print(json.dumps(seen), flush=True)


async def _say_and_wait(what: str) -> str:
    """Say so, and wait for the next line; "" once there is none."""
    print(what, flush=True)
    line: Any = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return str(line).strip()


def main() -> None:
    what, tasks, *urls = sys.argv[1:]
    what, _, tenure = what.partition("@")
    asyncio.run(cycles(int(tasks), urls) if what == "cycles" else hot(int(tasks), float(tenure or 0), urls))


if __name__ == "__main__":
    main()
