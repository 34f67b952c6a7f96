"""A program whose event loop has one thread for `asyncio.to_thread`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
async def one_thread() -> AsyncIterator[None]:
    """The program of the test is such a one."""
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    yield
    executor.shutdown(wait=False)
