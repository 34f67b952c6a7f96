"""asynclock.blocking: `on_lost` of a client, and the functions that run under its locks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asynclock import LockLost, blocking
from asynclock.blocking import Redlock, loop_thread
from asynclock.testing import FakeStore, use
from tests.support.threads import until


@pytest.fixture
def told() -> list[LockLost]:
    """What `on_lost` of the client was told."""
    return []


@pytest.fixture
def watched(shared_urls: list[str], told: list[LockLost]) -> Iterator[Redlock]:
    """A client with an `on_lost`."""
    with Redlock(shared_urls[0], on_lost=told.append) as client:
        yield client


def test_a_run_of_once_tells_its_loss(watched: Redlock, told: list[LockLost], name: str) -> None:
    """`on_lost` of the client holds for the locks of its runs, too."""

    @watched.once(name, within=60)
    def run() -> None:
        watched.break_lock(name)
        until(lambda: told)

    with pytest.raises(LockLost):
        run()
    assert [(error.name, error.reason) for error in told] == [(name, "broken")]


def test_on_lost_counts_for_locks_that_were_made_before(
    shared_urls: list[str], told: list[LockLost], name: str
) -> None:
    """As the other options of `configure` do: for a lock, and for a function that was decorated."""
    client = Redlock()
    lock = client(name)

    @client.synchronized(name + ":{number}")
    def work(number: int) -> None:
        client.break_lock(f"{name}:{number}")
        until(lambda: len(told) > number)

    client.configure(shared_urls[0], on_lost=told.append)
    with client:
        lease = lock.acquire(timeout=None)
        client.break_lock(name)
        until(lambda: told)
        assert not lease.held
        with pytest.raises(LockLost):
            work(1)
    assert [error.name for error in told] == [name, f"{name}:1"]


def test_lead_refuses_an_async_main(client: Redlock, name: str) -> None:
    """Its body would run after the block, without the lock, or never."""

    async def main(lease: Any) -> None: ...

    with pytest.raises(TypeError, match="async def"):
        client.lead(name, main)


def test_a_loss_in_another_deployment_ends_lead(client: Redlock, name: str) -> None:
    """A LockLost that `main` raises is not that of its own lease only because the name is the same."""
    elsewhere, runs = Redlock("memory:"), list[int]()

    def main(lease: blocking.Lease) -> None:
        runs.append(lease.fence)
        with elsewhere(name) as other:
            elsewhere.break_lock(name)
            other.wait_lost()
            other.ensure_held()

    with elsewhere, pytest.raises(LockLost):
        client.lead(name, main)
    assert len(runs) == 1


def test_use_replaces_a_client_without_nodes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, shared_urls: list[str]
) -> None:
    """It takes them from the environment, and has used them already."""
    monkeypatch.setenv("ASYNCLOCK_URLS", shared_urls[0])
    with Redlock() as client:
        with client("a"):
            pass
        with use(store := FakeStore()):
            store.busy("a")
            assert client("a").acquire(timeout=0) is None
        with client("a"):
            pass


class Changing:
    """Clients, one of which is made while they are read."""

    def __init__(self, *clients: Any) -> None:
        self._clients = clients
        self._read = False

    def __iter__(self) -> Iterator[Any]:
        if not self._read:
            self._read = True
            raise RuntimeError("Set changed size during iteration")
        return iter(self._clients)


def test_a_client_that_is_made_while_the_interpreter_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a daemon thread. The others are closed all the same."""
    closed = list[str]()

    class Client:
        async def aclose(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(loop_thread, "_clients", Changing(Client()))
    thread = loop_thread.LoopThread()
    thread.start()
    thread.close()
    assert closed == ["closed"]
