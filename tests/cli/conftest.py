"""Commands that a test starts end with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support.commands import Begin, Running, environment
from tests.support.no_looks import no_looks  # noqa: F401 - a fixture
from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture
from tests.support.servers import Server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in the process of the tests gives the servers on a busy machine the time to connect and to answer."""
    monkeypatch.setattr("asynclock.cli.doctor.databases._PUSH", 1.0)
    monkeypatch.setattr("asynclock.locks.health.LIMIT", 10.0)
    monkeypatch.setattr("asynclock.runtime.opening._MOMENT", 5.0)


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
