"""Differences over items and seeds: by hand, in both limits, and how often their interval holds."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from benchmarks import coverage
from moecore.core.tensors import packed_values, unpacked_values
from moecore.statistics.crossed import (
    BOTH,
    ITEMS,
    SEEDS,
    by_person,
    crossed,
    kept_items,
    of_ratio,
    paired_seeds,
)
from moecore.statistics.intervals import over_seeds
from moecore.statistics.paired import paired_t
from tests.project import ROOT


def test_by_hand():
    # Seed means 0.25, 0.75: variance 0.125, A = 0.0625. Item means 0, 0, 1, 1: variance 1/3,
    # B = 1/12. t(1) = 12.7062, t(3) = 3.18245.
    found = crossed(np.array([[0, 0, 0, 1], [0, 0, 2, 1.0]]))
    assert found.value == 0.5 and (found.kind, found.seeds, found.items) == (BOTH, 2, 4)
    half = math.sqrt(12.70620**2 * 0.0625 + 3.182446**2 / 12)
    assert found.half() == pytest.approx(half, rel=1e-5)
    assert found.interval() == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-5)


def test_one_seed_is_student_over_items():
    values = np.random.default_rng(0).standard_normal((1, 30)) + 0.3
    found = crossed(values)
    expected = ttest_1samp(values[0], 0)
    assert found.kind == ITEMS and found.p == pytest.approx(expected.pvalue)
    limits = expected.confidence_interval(0.95)
    assert found.interval().limits == pytest.approx((limits.low, limits.high))


def test_without_items_it_is_student_over_seeds():
    found = paired_seeds([0.1, 0.2, 0.3])
    assert found.kind == SEEDS and found.interval() == pytest.approx(over_seeds([0.1, 0.2, 0.3]))
    assert found.p == pytest.approx(paired_t([0.1, 0.2, 0.3]))
    alone = paired_seeds([0.1])
    assert (alone.kind, alone.p, alone.smallest) == ("", None, None)
    assert alone.interval() == (0.1, None, None)


def test_where_seeds_change_nothing_only_items_count():
    row = np.random.default_rng(1).standard_normal(50)
    both = crossed(np.stack([row, row, row]))
    assert both.half() == pytest.approx(crossed(row[None]).half())


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_p_and_interval_say_the_same(level):
    generator = np.random.default_rng(2)
    found = crossed(generator.standard_normal((3, 40)) + generator.standard_normal((3, 1)))
    assert found.p_at(found.half(level)) == pytest.approx(1 - level, rel=1e-6)
    assert found.p_at(0) == 1 and found.p_at(1e6) < 1e-9


def test_what_never_varies():
    same = crossed(np.zeros((3, 20)))
    assert (same.value, same.kind, same.interval().limits) == (0, "", None)
    assert paired_seeds([2.0, 2.0]).p == 0 and paired_seeds([0.0, 0.0]).p == 1


def test_the_smallest_effect_is_seen_four_times_in_five():
    generator = np.random.default_rng(3)
    effect = crossed(generator.standard_normal((1, 2000))).smallest
    assert effect == pytest.approx((1.9612 + 0.8418) / math.sqrt(2000), rel=0.05)
    seen = [crossed(generator.standard_normal((1, 2000)) + effect).p < 0.05 for _ in range(400)]
    assert 0.74 <= np.mean(seen) <= 0.87


@pytest.mark.parametrize(
    "values", [np.zeros(3), np.zeros((0, 3)), np.zeros((2, 1)), np.array([[0, np.nan]])]
)
def test_what_is_no_design(values):
    with pytest.raises(ValueError):
        crossed(values)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("case", coverage.CASES, ids=lambda case: case.words)
def test_it_holds_at_small_size(case, seeds):
    row = coverage.counted(case, seeds, 100, 1000)
    # 1000 trials: 94 % is three standard errors above 0.917
    assert row.covered[coverage.CHOSEN] >= 0.925
    assert row.width[coverage.CHOSEN] <= 2.5


def test_the_simulated_interval_is_the_one_in_use():
    drawn = coverage.normal(1, 1, 1)(np.random.default_rng(4), 5, 3, 30)
    halves = coverage.weighted(drawn, np.random.default_rng(0)).below
    assert halves == pytest.approx([crossed(one).half() for one in drawn])


def test_the_others_do_not_hold():
    """Why they were not chosen."""
    few = coverage.counted(coverage.CASES[2], 3, 100, 1000)
    assert few.covered["crossed bootstrap"] < 0.85
    items = coverage.counted(coverage.CASES[0], 3, 100, 1000)
    assert items.covered["seeds alone"] < 0.6


def test_a_person_with_several_images_is_one_item():
    values = np.array([1.0, 3, 2, 5])  # mean 2.75, of persons 2 + 1 + 1 images
    items = by_person(values, np.array([7, 7, 3, 9]))
    # v + (n_p / (4/3))·(mean_p − v): 3: 2.75 − 0.5625, 7: 2.75 − 1.125, 9: 2.75 + 1.6875
    assert items == pytest.approx([2.1875, 1.625, 4.4375]) and items.mean() == pytest.approx(2.75)
    assert by_person(values, np.arange(4)).tolist() == values.tolist()
    assert by_person(values, None).tolist() == values.tolist()


def test_a_ratio_as_one_value_an_image():
    above = np.array([1.0, 0, 3])
    below = np.array([2.0, 0, 4])
    items = of_ratio(above, below)
    # r = 4/6, mean below 2: r + (1 − 4/3)/2, r, r + (3 − 8/3)/2
    assert items == pytest.approx([2 / 3 - 1 / 6, 2 / 3, 2 / 3 + 1 / 6])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_items_are_kept_to_three_digits_and_their_mean_exactly(scale):
    values = scale * np.random.default_rng(5).standard_normal(1000) + 3
    found = unpacked_values(kept_items(values))
    assert found.mean() == pytest.approx(values.mean(), rel=1e-12)
    assert np.abs(found - values).max() < 1e-3 * np.abs(values - values.mean()).max()
    assert unpacked_values(kept_items(np.full(5, 0.25))).tolist() == [0.25] * 5
    with pytest.raises(ValueError):
        packed_values(np.array([1.0, np.inf]))


def test_the_table_stands_in_the_docs():
    text = (ROOT / "docs/intervals.md").read_text(encoding="utf-8")
    table = text[text.index(coverage.BEGIN) : text.index(coverage.END)]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(coverage.CASES) * len(coverage.SEEDS) * len(coverage.ITEMS) + 1
    place = rows[0].index(coverage.CHOSEN)
    found = [float(row[place].split()[0]) for row in rows[2:-1]]
    assert min(found) >= 94.0
