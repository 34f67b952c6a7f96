"""The running asyncio event loop, or a clear error where there is none; and how asyncio knows coroutine functions."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_F = TypeVar("_F", bound="Callable[..., Any]")


def no_loop() -> ConfigError:
    """For a caller that caught asyncio's RuntimeError: on hot paths a `try` costs less than `running_loop`."""
    return ConfigError(
        "asynclock needs a running asyncio event loop, and there is none: call it from a coroutine that asyncio runs "
        "(asyncio.run, or anyio.run with the asyncio backend; trio is not supported)"
    )


def running_loop() -> asyncio.AbstractEventLoop:
    """The running event loop. Raises ConfigError where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise no_loop() from None


def coroutine_function(function: _F) -> _F:
    """Mark a plain function that returns a coroutine, as `asyncio.iscoroutinefunction` and autospec mocks read it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined] # noqa: SLF001
    return function
