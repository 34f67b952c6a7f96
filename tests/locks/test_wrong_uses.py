"""Uses of a Lock or a Lease for which Python raises TypeError (docs/blocks.md), and what passes for what."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

from asynclock import Lease, Lock, Redlock

PAGE = (Path(__file__).parents[2] / "docs" / "blocks.md").read_text("utf-8")


@pytest.fixture
def client() -> Redlock:
    return Redlock("memory:")


async def use_as_awaitable(client: Redlock, name: str) -> None:
    lock: Any = client(name)
    await lock


async def use_with(client: Redlock, name: str) -> None:
    lock: Any = client(name)
    with lock:
        pass


async def use_acquire(client: Redlock, name: str) -> None:
    lock: Any = client(name)
    acquiring = lock.acquire()
    try:
        async with acquiring:
            pass
    finally:
        acquiring.close()


async def use_none(client: Redlock, name: str) -> None:
    async with client, client(name):
        nothing: Any = await client.semaphore(name + ":b", 1).acquire(timeout=0)
        async with nothing:
            refused: Any = await client.semaphore(name + ":b", 1).acquire(timeout=0)
            async with refused:
                pass


@pytest.mark.parametrize("use", [use_as_awaitable, use_with, use_acquire, use_none])
async def test_the_page_of_blocks_has_the_text_of_python(client: Redlock, name: str, use: Any) -> None:
    """A reader who searches the page for the error finds the right form."""
    with pytest.raises(TypeError) as raised:
        await use(client, name)
    cells = re.findall(r"^\| `(.+)` \| ", PAGE, re.MULTILINE)
    texts = [text for cell in cells for text in cell.split("`, or `")]
    assert any(str(raised.value).startswith(text) for text in texts)


async def test_a_lock_is_an_asynchronous_context_manager_alone(client: Redlock, name: str) -> None:
    """Frameworks look at what an object is: a Lock is no awaitable, and neither a Lock nor a Lease is a context manager
    for `with`."""
    async with client, client(name) as lease:
        lock = client(name)
        assert not inspect.isawaitable(lock)
        for each in (lock, lease):
            assert isinstance(each, AbstractAsyncContextManager)
            assert not isinstance(each, AbstractContextManager)


async def test_a_lease_is_not_pushed_on_a_stack_for_good(client: Redlock, name: str) -> None:
    """`push` in place of `push_async_exit`: the stack raises TypeError. It must not end as if it had released."""
    async with client:
        lease: Any = await client(name).acquire(timeout=0)
        stack = AsyncExitStack()
        stack.push(lease)
        with pytest.raises(TypeError):
            await stack.aclose()
        await lease.release()


@pytest.mark.parametrize("of", [Lock, Lease])
async def test_mocks_made_after_a_lock(of: type[Any]) -> None:
    """`async with` accepts what unittest.mock makes after the class, or after an object."""
    client = Redlock("memory:")
    for mock in (create_autospec(of, instance=True), MagicMock(spec=of), create_autospec(client("any"))):
        async with mock:
            pass
        mock.__aexit__.assert_awaited_once()
