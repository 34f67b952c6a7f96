"""Commands that a test starts end with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support.commands import Begin, Running, environment
from tests.support.servers import Server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor in the process of the tests gives a database on a busy machine the time to answer."""
    monkeypatch.setattr("asynclock.cli.doctor.databases._PUSH", 1.0)


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts `asynclock ...` beside the test; `under`: by this command."""
    started: list[Running] = []

    def start(*args: str, on: Sequence[Server] | Server = (), under: Sequence[str] = (), **more: str) -> Running:
        started.append(Running(args, environment(on, **more), under))
        return started[-1]

    yield start
    for each in started:
        each.end()
