"""What the tests of metrics share."""

from __future__ import annotations

import pytest

from tests.support.meters import Meters


@pytest.fixture
def meters() -> Meters:
    return Meters()
