"""What the tests of metrics share."""

from __future__ import annotations

import pytest

from tests.support.meters import Meters
from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture


@pytest.fixture
def meters() -> Meters:
    return Meters()
