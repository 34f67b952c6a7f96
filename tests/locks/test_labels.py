"""The option `label`: what events call a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asynclock import ConfigError, Redlock
from asynclock.events import Acquired, Released
from tests.support.still_clock import Still
from tests.support.told import told
from tests.support.waiters import LIMIT


@pytest.mark.parametrize("nodes", [1, 5])
async def test_tasks_with_different_labels_wait_in_one_queue(name: str, nodes: int) -> None:
    """The label is not sent: a hold is passed on to a task with another label without a request, as to one with the
    same label; and each task's own label is told."""
    requests: list[int] = []
    for labels in (["x"] * 5, [f"label {number}" for number in range(5)]):
        still = Still(nodes, name)
        async with still.client() as client, client(f"{name}:connected"):
            still.asked()

            async def work(label: str, client: Redlock = client) -> None:
                async with client(name, label=label):
                    await asyncio.sleep(0)

            with told(client) as seen:
                async with asyncio.timeout(LIMIT):
                    await asyncio.gather(*map(work, labels))
            assert sorted(event.label for event in seen.of(Acquired)) == labels
            assert sorted(event.label for event in seen.of(Released)) == labels
            requests.append(len(still.asked()))
    assert requests[0] == requests[1]


async def test_a_decorator_labels_with_its_template(redlock: Redlock, name: str) -> None:
    """All names of a template have one label, unless the user gives another; `once` does the same."""

    @redlock.synchronized(name + ":{order}")
    async def charge(order: int) -> None: ...

    @redlock.synchronized(name + ":{order}", label="mine")
    async def refund(order: int) -> None: ...

    @redlock.once(name + ":mail:{order}", within=60)
    async def mail(order: int) -> None: ...

    @redlock.synchronized(lambda order: f"{name}:{order}")
    async def ship(order: int) -> None: ...

    with told(redlock) as seen:
        for function in (charge, refund, mail, ship):
            for order in (1, 2):
                await function(order)
    labels = [name + ":{order}"] * 2 + ["mine"] * 2 + [name + ":mail:{order}"] * 2 + [""] * 2
    assert [event.label for event in seen.of(Acquired)] == labels


async def test_a_clients_label_is_the_default_of_its_locks(make: Callable[..., Redlock], name: str) -> None:
    """As of any other option of a lock."""
    client = make(label="checkout")
    with told(client) as seen:
        async with client(name):
            pass
        async with client(name, label="order"):
            pass
    assert [event.label for event in seen.of(Released)] == ["checkout", "order"]


def test_a_label_is_a_str() -> None:
    """Anything else is refused at once."""
    with pytest.raises(ConfigError, match="label is a str, not int"):
        Redlock("memory:")("k", label=3)  # type: ignore[arg-type]
