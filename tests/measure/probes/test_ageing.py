import numpy as np
import pytest
from scipy.stats import spearmanr

from moecore.measure.probes.ageing import aged, ageing, monotone_share, rank_correlations
from moecore.measure.probes.people import People
from tests.measure.brightness import Brightness, Source


def test_steps_that_rise():
    # 5 of 6: the second subject's last step falls; standing still is no rise.
    assert monotone_share(np.array([[1.0, 2, 3, 4], [1, 2, 3, 2.5]])) == pytest.approx(5 / 6)
    assert monotone_share(np.array([[1.0, 1.0, 2.0]])) == 0.5


def test_rank_correlations_are_spearmans():
    predictions = np.array(
        [[1.0, 4, 9, 16], [4, 3, 2, 1], [1, 1, 2, 2], [5, 5, 5, 5], [2, 1, 4, 3]]
    )
    found = rank_correlations([20, 40, 60, 90], predictions)
    assert found[:2] == pytest.approx([1, -1])
    assert found[3] == 0
    assert found[4] == pytest.approx(0.6)  # 1 − 6·4/(4·15)
    assert found[2] == pytest.approx(spearmanr([20, 40, 60, 90], predictions[2]).statistic)


def test_ageing_says_everything_of_the_subjects():
    found = ageing([20.0, 40.0], np.array([[30.0, 40.0], [50.0, 40.0]]))
    assert found.subjects == 2
    assert found.ages == (20, 40)
    assert found.predictions == ((30, 40), (50, 40))
    assert found.monotone_share == 0.5
    assert found.rank_correlations == pytest.approx([1, -1])
    assert found.rank_correlation == pytest.approx(0)
    assert found.mean_predictions == (40, 40)
    assert found.slope == pytest.approx(0)  # 0.5 and −0.5 years a year


def test_only_age_changes_when_a_subject_is_aged():
    source = Source()
    found = aged(Brightness(), People(source, 0), 3, (20, 50, 80), 2)
    assert np.allclose(found.predictions, [[20, 50, 80]] * 3, atol=1e-4)
    assert found.monotone_share == 1
    assert found.rank_correlation == pytest.approx(1)
    # people from number 40 on are in no split
    asked = [(age, "FMF"[n], 7_000_040 + n, 0, 0) for n in range(3) for age in (20, 50, 80)]
    assert source.asked == asked
