"""Data that several tests of measurements read and none changes."""

import pytest

from moecore.data.prepared import Prepared
from tests.measure.subjects import digits
from tests.volumes import write_cohort


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Prepared:
    """Return 60 test images of digits, of 12 × 12 pixels."""
    return digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def cohort(tmp_path_factory) -> Prepared:
    """Return a small cohort of volumes that does not say that it is simulated."""
    return write_cohort(tmp_path_factory.mktemp("cohort"), simulated=False)
