"""The server on which the histories of this folder are played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stage import Stage, staged


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A server of the module's own."""
    with staged() as stage:
        yield stage
