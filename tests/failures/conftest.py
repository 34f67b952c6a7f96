"""Fixtures of this folder."""

from tests.support.no_looks import no_looks  # noqa: F401 - a fixture
from tests.support.patient_connections import patient_connections  # noqa: F401 - a fixture
from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture
from tests.support.patient_farewells import patient_farewells  # noqa: F401 - a fixture
