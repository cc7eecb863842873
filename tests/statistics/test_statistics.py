"""Paired tests and intervals against hand-worked and published numbers; intervals' coverage."""

import math
from math import comb, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from moecore.core.arrays_as_text import decode_float_array, pack_numbers
from moecore.statistics import comparisons as compare
from moecore.statistics import intervals
from moecore.tasks.image_text import ImageText

COUNTS = st.integers(0, 40)
PEOPLE = np.array(["d", "a", "b", "a", "c", "b", "b", "b", "c"])  # 1, 2, 4 and 2 images


def test_wilson_against_published_values():
    published = {(8, 10): (0.4902, 0.9433), (0, 10): (0, 0.2775), (10, 10): (0.7225, 1)}
    for (successes, count), limits in (published | {(50, 100): (0.4038, 0.5962)}).items():
        found = intervals.wilson(successes, count)
        assert found == pytest.approx((successes / count, *limits), abs=5e-5)


def test_over_seeds_by_hand():
    # Mean 2, deviation 1, t(0.975, 2) = 4.3027: 2 ± 4.3027 / √3.
    limits = (2 - 2.4841, 2 + 2.4841)
    assert intervals.mean_over_seeds([1, 2, 3]) == pytest.approx((2, *limits), abs=1e-4)
    assert intervals.mean_over_seeds([0.7]) == intervals.Interval(0.7)
    with pytest.raises(ValueError, match="no values"):
        intervals.mean_over_seeds([])


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found, again, other = (
        intervals.bootstrap_interval(lambda chosen: values[chosen].mean(), 400, seed=seed)
        for seed in (0, 0, 1)
    )
    mean, half = values.mean(), 1.96 * values.std() / 20
    assert found.value == pytest.approx(mean) and found == again != other
    assert found.limits == pytest.approx((mean - half, mean + half), abs=0.05)


def test_bootstrap_reflects_a_biased_statistic():
    # |mean| of data around 0 is biased upward; so are its resamples, and the reflected interval
    # lies lower than their quantiles.
    values = np.random.default_rng(0).normal(0.01, 1, 200)
    found = intervals.bootstrap_interval(lambda chosen: abs(values[chosen].mean()), 200, lowest=0.0)
    assert found.low == 0 and found.high <= 2 * found.value


def test_the_table_of_pairs():
    first = np.array([1, 1, 1, 0, 0, 1, 0], dtype=bool)
    second = np.array([1, 0, 0, 1, 0, 1, 0], dtype=bool)
    table = compare.PairedHits(both=2, first_only=2, second_only=1, neither=2)
    assert compare.count_paired_hits(first, second) == table


@pytest.mark.parametrize(
    ("first_only", "second_only", "expected"),
    [
        (10, 2, 158 / 4096),  # 2 · (1 + 12 + 66) / 2¹²
        (5, 0, 2 / 32),
        (8, 1, 2 * (1 + 9) / 512),
        (3, 3, 1.0),  # 2 · 42 / 64 is more than 1
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(first_only, second_only, expected):
    for counts in ((first_only, second_only), (second_only, first_only)):
        assert compare.mcnemar(*counts) == pytest.approx(expected, rel=1e-12)


@given(COUNTS, COUNTS)
def test_mcnemar_against_the_sum_of_binomials(first_only, second_only):
    count = first_only + second_only
    tail = sum(comb(count, i) for i in range(min(first_only, second_only) + 1))
    assert compare.mcnemar(first_only, second_only) == pytest.approx(min(1, 2 * tail / 2**count))


def test_newcombes_interval_by_hand_and_as_published():
    # 1 both, 1 first only, 7 second only, 12 neither (Bentur et al. 2009 in Fagerland, Lydersen &
    # Laake 2014): −0.286 (−0.507, −0.026) 1·12 − 1·7 = 5 is below 21 / 2, so φ = 0: Wilson
    # (0.0265, 0.2891) and (0.2075, 0.5912)
    # 0.2212 = √(0.0687² + 0.2103²), 0.2601 = √(0.1939² + 0.1734²)
    found = compare.paired_share_difference(compare.PairedHits(1, 1, 7, 12))
    assert found == pytest.approx((-6 / 21, -0.5069, -0.0256), abs=1e-4)
    # 20, 12, 2, 16: φ = (320 − 24 − 25) / √(32·18·22·28) = 0.4550; Wilson (0.5014, 0.7586) and
    # (0.3116, 0.5769) √(0.1386² + 0.1369² − 2·0.4550·0.1386·0.1369) = 0.1438,
    # √(0.1186² + 0.1284² − 2·0.4550·0.1186·0.1284) = 0.1292
    found = compare.paired_share_difference(compare.PairedHits(20, 12, 2, 16))
    assert found == pytest.approx((0.2, 0.0562, 0.3292), abs=1e-4)


def test_a_negative_correlation_widens_the_interval():
    # 2, 10, 8, 0: φ = (0 − 80) / √(12·8·10·10) = −0.8165, without a correction
    found = compare.paired_share_difference(compare.PairedHits(2, 10, 8, 0))
    first, second = intervals.wilson(12, 20), intervals.wilson(10, 20)
    below, above = first.value - first.low, second.high - second.value
    half = sqrt(below**2 + above**2 + 2 * 0.816497 * below * above)
    assert found[:2] == pytest.approx((0.1, 0.1 - half), abs=1e-6)


@given(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS).filter(any))
def test_the_interval_is_symmetric_and_holds_its_value(counts):
    both, first_only, second_only, neither = counts
    value, low, high = compare.paired_share_difference(compare.PairedHits(*counts))
    assert -1 <= low <= value <= high <= 1
    assert value == pytest.approx((first_only - second_only) / sum(counts))
    mirrored = compare.paired_share_difference(
        compare.PairedHits(both, second_only, first_only, neither)
    )
    assert mirrored == pytest.approx((-value, -high, -low), abs=1e-12)
    # wrong for right, and so second for first
    swapped = compare.paired_share_difference(
        compare.PairedHits(neither, first_only, second_only, both)
    )
    assert swapped == pytest.approx((value, low, high), abs=1e-12)


def test_two_equal_models_do_not_differ():
    hits = np.arange(40) % 3 == 0
    found = compare.paired_share_difference(compare.count_paired_hits(hits, hits))
    assert found.value == 0 and found.low < 0 < found.high
    assert compare.mcnemar(*compare.count_paired_hits(hits, hits)[1:3]) == 1
    assert compare.paired_bootstrap(hits, hits) == (0, 0, 0)


def test_the_bootstrap_keeps_images_together():
    second = np.random.default_rng(0).normal(size=500) * 100
    first = second + np.random.default_rng(1).normal(1, 0.5, size=500)
    value, low, high = compare.paired_bootstrap(first, second, seed=3)
    # standard error 0.5 / √500 = 0.0224 whatever the images' own spread; 1.96 of them on each side
    assert value == pytest.approx(float((first - second).mean())) and low < value < high
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / sqrt(500), rel=0.15)
    with pytest.raises(ValueError, match="one shape"):
        compare.paired_bootstrap(first, second[1:])


def test_holm_by_hand():
    # smallest first: 3 · 0.01, 2 · 0.03, then 1 · 0.04, which may not be below its predecessor
    assert compare.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert compare.holm([0.5, 0.02, 0.9, 0.02]) == pytest.approx([1.0, 0.08, 1.0, 0.08])
    assert compare.holm([]) == [] and compare.holm([0.2]) == [0.2]


def test_people_are_resampled_and_not_their_images():
    """20 people with 10 equal images each: images would give an interval √10 times too narrow."""
    person = np.random.default_rng(0).standard_normal(20)
    values = np.repeat(person, 10)
    people = np.repeat(np.arange(20), 10)
    images = intervals.bootstrap_mean(values, lowest=-9)
    whole = intervals.bootstrap_mean(values, lowest=-9, people=people)
    alone = intervals.bootstrap_mean(person, lowest=-9)
    assert whole.value == images.value
    assert whole.high - whole.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert whole.high - whole.low > 2.5 * (images.high - images.low)
    # Where nobody has several images, the draws are those of images.
    assert intervals.bootstrap_mean(person, lowest=-9, people=np.arange(20)[::-1]) == alone
    both = compare.paired_bootstrap(values, np.zeros(200), people=people)
    assert both.limits == pytest.approx(whole.limits)


def test_a_share_over_people():
    hits = np.repeat(np.arange(20) % 2 == 0, 5)
    narrow = intervals.mean_share(hits)
    assert narrow == intervals.wilson(50, 100) == intervals.mean_share(hits, np.arange(100))
    wide = intervals.mean_share(hits, np.repeat(np.arange(20), 5))
    assert wide.value == 0.5 and wide.high - wide.low > 1.8 * (narrow.high - narrow.low)
    sure = intervals.mean_share(np.ones(4, bool), np.array([0, 0, 1, 1]))
    assert (sure.value, sure.high) == (1, 1)


def test_limits_of_a_share_are_shares():
    hits = np.ones(100)
    hits[0] = 0.5  # not right or wrong alone: the bootstrap
    bounded = intervals.mean_share(hits)
    assert bounded.value == pytest.approx(0.995)
    assert 0.98 < bounded.low < bounded.value < bounded.high == 1
    assert intervals.bootstrap_mean(hits).high > 1
    task = ImageText(words=9, context=4, captions=2, end=2, vocabulary="0" * 64)
    assert task.interval(torch.from_numpy(hits)) == bounded


def test_by_hand():
    # Seed means 0.25, 0.75: variance 0.125, A = 0.0625. Item means 0, 0, 1, 1: variance 1/3,
    # B = 1/12. t(1) = 12.7062, t(3) = 3.18245.
    found = compare.crossed_difference(np.array([[0, 0, 0, 1], [0, 0, 2, 1.0]]))
    assert found.value == 0.5 and (found.kind, found.seeds, found.items) == (compare.BOTH, 2, 4)
    half = math.sqrt(12.70620**2 * 0.0625 + 3.182446**2 / 12)
    assert found.half() == pytest.approx(half, rel=1e-5)
    assert found.interval() == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-5)


def test_one_seed_is_student_over_items():
    values = np.random.default_rng(0).standard_normal((1, 30)) + 0.3
    found = compare.crossed_difference(values)
    expected = ttest_1samp(values[0], 0)
    assert found.kind == compare.ITEMS and found.p == pytest.approx(expected.pvalue)
    limits = expected.confidence_interval(0.95)
    assert found.interval().limits == pytest.approx((limits.low, limits.high))


def test_without_items_it_is_student_over_seeds():
    found = compare.paired_seed_difference([0.1, 0.2, 0.3])
    assert found.kind == compare.SEEDS
    assert found.interval() == pytest.approx(intervals.mean_over_seeds([0.1, 0.2, 0.3]))
    assert found.p == pytest.approx(ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)
    alone = compare.paired_seed_difference([0.1])
    assert (alone.kind, alone.p, alone.smallest) == ("", None, None)
    assert alone.interval() == (0.1, None, None)


def test_where_seeds_change_nothing_only_items_count():
    row = np.random.default_rng(1).standard_normal(50)
    both = compare.crossed_difference(np.stack([row, row, row]))
    assert both.half() == pytest.approx(compare.crossed_difference(row[None]).half())


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_p_and_interval_say_the_same(level):
    generator = np.random.default_rng(2)
    found = compare.crossed_difference(
        generator.standard_normal((3, 40)) + generator.standard_normal((3, 1))
    )
    assert found.p_at_distance(found.half(level)) == pytest.approx(1 - level, rel=1e-6)
    assert found.p_at_distance(0) == 1 and found.p_at_distance(1e6) < 1e-9


def test_what_never_varies():
    same = compare.crossed_difference(np.zeros((3, 20)))
    assert (same.value, same.kind, same.interval().limits) == (0, "", None)
    for value, p in ((2.0, 0), (0.0, 1)):
        assert compare.paired_seed_difference([value, value]).p == p


def test_the_smallest_effect_is_seen_four_times_in_five():
    generator = np.random.default_rng(3)
    effect = compare.crossed_difference(generator.standard_normal((1, 2000))).smallest
    assert effect == pytest.approx((1.9612 + 0.8418) / math.sqrt(2000), rel=0.05)
    seen = [
        compare.crossed_difference(generator.standard_normal((1, 2000)) + effect).p < 0.05
        for _ in range(400)
    ]
    assert 0.74 <= np.mean(seen) <= 0.87


def test_a_person_with_several_images_is_one_item():
    values = np.array([1.0, 3, 2, 5])  # mean 2.75, of persons 2 + 1 + 1 images
    items = compare.linearize_by_person(values, np.array([7, 7, 3, 9]))
    # v + (n_p / (4/3))·(mean_p − v): 3: 2.75 − 0.5625, 7: 2.75 − 1.125, 9: 2.75 + 1.6875
    assert items == pytest.approx([2.1875, 1.625, 4.4375]) and items.mean() == pytest.approx(2.75)
    assert compare.linearize_by_person(values, np.arange(4)).tolist() == values.tolist()
    assert compare.linearize_by_person(values, None).tolist() == values.tolist()


def test_a_ratio_as_one_value_an_image():
    above = np.array([1.0, 0, 3])
    items = compare.linearize_ratio(above, np.array([2.0, 0, 4]))
    # r = 4/6, mean below 2: r + (1 − 4/3)/2, r, r + (3 − 8/3)/2
    assert items == pytest.approx([2 / 3 - 1 / 6, 2 / 3, 2 / 3 + 1 / 6])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_items_are_kept_to_three_digits_and_their_mean_exactly(scale):
    values = scale * np.random.default_rng(5).standard_normal(1000) + 3
    found = decode_float_array(compare.encode_item_values(values))
    assert found.mean() == pytest.approx(values.mean(), rel=1e-12)
    assert np.abs(found - values).max() < 1e-3 * np.abs(values - values.mean()).max()
    assert decode_float_array(compare.encode_item_values(np.full(5, 0.25))).tolist() == [0.25] * 5
    with pytest.raises(ValueError):
        pack_numbers(np.array([1.0, np.inf]))


def test_headroom_recovered_by_hand():
    """Four items, three seeds; R = 2.2 / 4.3 of the sums."""
    scores = np.array([[0.7, 0.6, 0.8, 0.9], [0.6, 0.7, 0.7, 0.8], [0.8, 0.6, 0.9, 0.8]])
    floor = np.array([[0.5, 0.4, 0.6, 0.7], [0.5, 0.5, 0.6, 0.6], [0.6, 0.4, 0.7, 0.6]])
    ceiling = np.array([[0.9, 0.8, 1, 1], [0.9, 0.8, 0.9, 1], [1, 0.8, 1, 0.9]])
    room = compare.crossed_difference(ceiling - floor)
    assert (room.value, room.half()) == pytest.approx((0.358333, 0.062165), abs=1e-6)
    share = compare.headroom_recovered(scores, floor, ceiling)
    assert share.value == pytest.approx(2.2 / 4.3)
    variances = [source.variance for source in share.sources]
    assert variances == pytest.approx([0.001751, 0.001609], abs=1e-6)
    assert share.interval()[1:] == pytest.approx((0.290896, 0.732359), abs=1e-6)
    assert compare.headroom_recovered(scores, floor, floor + np.array([1, -1, 1, -1]) / 10) is None


@pytest.mark.parametrize("people", [None, np.array([4, 0, 3, 1, 2])])
def test_images_of_as_many_people_are_exchanged_freely(people):
    random = np.random.default_rng(7)
    for order in intervals.permuted_orders(5, 3, 7, people):
        assert order.tolist() == random.permutation(5).tolist()
    assert intervals.first_half(5).tolist() == [True, False, True, False, True]


def test_people_are_exchanged_with_those_who_have_as_many():
    """Only a and c, of two images each: exchanged or not."""
    exchanged, kept = [0, 4, 2, 8, 1, 5, 6, 7, 3], list(range(9))
    orders = [order.tolist() for order in intervals.permuted_orders(9, 20, 0, PEOPLE)]
    assert exchanged in orders and kept in orders
    assert all(order in (exchanged, kept) for order in orders)


def test_halves_are_of_people():
    """In their order: a and c, b and d."""
    is_first = intervals.first_half(9, PEOPLE)
    assert is_first.tolist() == [False, True, False, True, True, False, False, False, True]
