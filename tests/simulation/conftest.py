"""The simulation and the stack draw the node timeouts themselves, in virtual time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient_nodes() -> None:
    """In place of the fixture for real servers: with a second for each node, most drawn leases would be too short."""
