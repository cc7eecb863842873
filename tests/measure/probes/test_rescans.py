import numpy as np
import pytest

from moecore.data.prepared import Prepared
from moecore.measure.probes.people import People, predicted_ages
from moecore.measure.probes.rescans import repeated, scanned_again, sessions_again
from tests.cohort import write_cohort
from tests.measure.brightness import Brightness, Source


def test_a_scan_again_and_at_another_site():
    source = Source()
    ages = np.linspace(20, 80, 4)
    found = scanned_again(Brightness(), People(source, 2), 5.0, ages, 2, 100)
    assert found.pairs == 4
    assert found.mae == 5
    assert found.of == "simulated scans"
    assert found.mean_abs_difference == pytest.approx(0.1, abs=1e-4)
    assert found.other_site_mean_abs_difference == pytest.approx(10.1, abs=1e-4)
    assert [asked[0] for asked in source.asked[:4]] == [20, 40, 60, 80]
    assert {asked[3:] for asked in source.asked} == {(0, 0), (1, 0), (1, 1)}
    # other people than those who are aged
    assert {asked[2] for asked in source.asked} == {7_002_540 + n for n in range(4)}


def test_sessions_within_the_time_are_pairs():
    rows = [("a", 50.0), ("b", 30.0), ("a", 51.0), ("a", 53.0), ("b", 30.5), ("c", 30.6)]
    subjects = [{"participant_id": name, "age": str(age)} for name, age in rows]
    # a: 50 → 51 yes, 51 → 53 no; b: 30 → 30.5; c is another person
    assert repeated(subjects) == [(0, 2), (1, 4)]
    assert repeated(subjects, years=2.0) == [(0, 2), (2, 3), (1, 4)]
    assert repeated(subjects[:2]) == []


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("cohort") / "pretrain"
    folder.mkdir()
    return write_cohort(folder, simulated=False)


def test_sessions_of_one_person_are_compared_less_the_years_between(cohort):
    rows = cohort.subjects("test")
    (a, b) = [place for place, row in enumerate(rows) if row["participant_id"] == "sub-test001"]
    years = abs(float(rows[a]["age"]) - float(rows[b]["age"]))
    assert repeated(rows, years / 2) == []
    pairs = repeated(rows, years + 1)
    found = sessions_again(Brightness(), cohort, pairs, 5.0, 2, 100)
    over = predicted_ages(Brightness(), cohort.test.images, 16) - cohort.test.labels
    assert found.pairs == 1
    assert found.of == "sessions"
    assert found.mean_abs_difference == pytest.approx(abs(over[a] - over[b]))
