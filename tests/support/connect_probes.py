"""The steps of an attempt to connect to a Redis server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def after_handshake(node: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call it in the turn in which an attempt to connect succeeds, before the node has the connection."""
    real = node._rights.read

    async def read(ask: Any) -> None:
        await real(ask)
        call()

    monkeypatch.setattr(node._rights, "read", read)


def before_use(node: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call it once the handshake of an attempt to connect is done, before the node has the connection."""
    real = node._delivery.send_all_but_a_slice

    async def send(connection: Any) -> None:
        await real(connection)
        call()

    monkeypatch.setattr(node._delivery, "send_all_but_a_slice", send)
