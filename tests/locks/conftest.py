"""A fixture of this folder."""

from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture
