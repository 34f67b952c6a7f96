"""The running asyncio event loop, or a clear error where there is none."""

from __future__ import annotations

import asyncio

from asynclock._errors import ConfigError


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
