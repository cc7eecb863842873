import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from moecore.evaluation.cohort import ageing, mean_interval, monotone_share, rank_correlations, repeated


def test_steps_that_rise():
    # 5 of 6: the second subject's last step falls; standing still is no rise.
    assert monotone_share(np.array([[1.0, 2, 3, 4], [1, 2, 3, 2.5]])) == pytest.approx(5 / 6)
    assert monotone_share(np.array([[1.0, 1.0, 2.0]])) == 0.5


def test_rank_correlations_are_spearmans():
    predictions = np.array([[1.0, 4, 9, 16], [4, 3, 2, 1], [1, 1, 2, 2], [5, 5, 5, 5], [2, 1, 4, 3]])
    found = rank_correlations([20, 40, 60, 90], predictions)
    assert found[:2] == pytest.approx([1, -1]) and found[3] == 0 and found[4] == pytest.approx(0.6)  # 1 − 6·4/(4·15)
    assert found[2] == pytest.approx(spearmanr([20, 40, 60, 90], predictions[2]).statistic)


def test_ageing_says_everything_of_the_subjects():
    found = ageing([20.0, 40.0], np.array([[30.0, 40.0], [50.0, 40.0]]))
    assert found["subjects"] == 2 and found["ages"] == [20, 40] and found["predictions"] == [[30, 40], [50, 40]]
    assert found["monotone_share"] == 0.5 and found["rank_correlations"] == pytest.approx([1, -1]) and found["rank_correlation"] == pytest.approx(0)
    assert found["mean_predictions"] == [40, 40] and found["slope"] == pytest.approx(0)  # 0.5 and −0.5 years a year


def test_sessions_within_the_time_are_pairs():
    rows = [("a", 50.0), ("b", 30.0), ("a", 51.0), ("a", 53.0), ("b", 30.5), ("c", 30.6)]
    subjects = [{"participant_id": name, "age": str(age)} for name, age in rows]
    assert repeated(subjects) == [(0, 2), (1, 4)]  # a: 50 → 51 yes, 51 → 53 no; b: 30 → 30.5; c is another person
    assert repeated(subjects, years=2.0) == [(0, 2), (2, 3), (1, 4)] and repeated(subjects[:2]) == []


def test_the_interval_of_a_mean():
    assert mean_interval(np.full(4, 3.0), 100) == {"value": 3.0, "low": 3.0, "high": 3.0}
