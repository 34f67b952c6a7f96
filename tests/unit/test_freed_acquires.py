"""An acquisition that has ended refers to nothing that refers to it. So it is freed at once, and not by a collection,
which would have to look at all that a busy client has made since."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from spec.machine import Task
from tests.support.stepped_acquires import acquiring
from tests.support.stepped_quorum import clients_over, settle
from tests.support.stepped_waits import fail, outcome_of, pass_time, refusal_of


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("timeout", [0, 1.0])
def test_one_that_was_refused(nodes: int, timeout: float) -> None:
    """Another client has the name."""
    holder, client, _ = clients_over(nodes)
    held, task = holder.acquire(), Task()
    settle(holder)
    acquisition, gone = acquiring(client, timeout, task=task), ref(task)
    settle(client)
    pass_time(client, timeout)
    settle(client)
    pass_time(client, timeout)
    settle(client)
    assert refusal_of(acquisition).waited == timeout
    del acquisition, task
    assert gone() is None
    assert outcome_of(held) == "ended"


@pytest.mark.parametrize("nodes", [1, 3])
def test_one_that_met_an_outage(nodes: int) -> None:
    """No majority answered it."""
    client, _, _ = clients_over(nodes)
    task = Task()
    acquisition, gone = acquiring(client, 0, task=task), ref(task)
    fail(client)
    assert outcome_of(acquisition) is not None
    del acquisition, task
    assert gone() is None
