"""The asyncio loop that runs here; a clear error where there is none."""

from __future__ import annotations

import asyncio

from asynclock._errors import ConfigError


def no_loop() -> ConfigError:
    """For a caller that caught asyncio's RuntimeError: on hot paths a `try` costs less than a call from here."""
    return ConfigError(
        "asynclock needs an asyncio event loop, and none runs here: call it from a coroutine that asyncio runs "
        "(asyncio.run, or anyio.run with the asyncio backend; trio is not supported)"
    )


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here. Raises ConfigError."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise no_loop() from None
