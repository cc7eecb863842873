import math
from math import comb, sqrt

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.looks import hold_until
from moecore.core.arrays_as_text import decode_float_array, encode_rounded
from moecore.statistics import comparisons as compare
from moecore.statistics import intervals
from moecore.statistics.comparisons import (
    OVER_ITEMS_AND_SEEDS,
    Difference,
    SourceVariance,
    paired_seed_difference,
)
from moecore.tasks.image_text import ImageText
from tools import designs

COUNTS = st.integers(0, 40)
PEOPLE = np.array(["d", "a", "b", "a", "c", "b", "b", "b", "c"])  # 1, 2, 4 and 2 images
FEW = Difference(
    0.02, (SourceVariance(4e-4, 3), SourceVariance(1e-4, 99)), OVER_ITEMS_AND_SEEDS, 4, 100
)
MANY = Difference(
    0.04, (SourceVariance(1e-4, 11), SourceVariance(4e-4, 399)), OVER_ITEMS_AND_SEEDS, 12, 400
)


def test_wilson_against_published_values_and_seeds_by_hand():
    published = {(8, 10): (0.4902, 0.9433), (0, 10): (0, 0.2775), (10, 10): (0.7225, 1)}
    for (successes, count), limits in (published | {(50, 100): (0.4038, 0.5962)}).items():
        found = intervals.wilson(successes, count)
        assert found == pytest.approx((successes / count, *limits), abs=5e-5)
    # Mean 2, deviation 1, t(0.975, 2) = 4.3027: 2 ± 4.3027 / √3.
    limits = (2 - 2.4841, 2 + 2.4841)
    assert intervals.mean_over_seeds([1, 2, 3]) == pytest.approx((2, *limits), abs=1e-4)
    assert intervals.mean_over_seeds([0.7]) == intervals.Interval(0.7)
    with pytest.raises(ValueError, match="no values"):
        intervals.mean_over_seeds([])


def test_bootstrap_is_near_the_normal_interval_and_reflects_a_bias():
    values = np.random.default_rng(1).normal(5, 2, 400)
    mean, draw = (lambda chosen: values[chosen].mean()), intervals.bootstrap_statistic
    found, again, other = (draw(mean, 400, seed=seed) for seed in (0, 0, 1))
    mean, half = values.mean(), 1.96 * values.std() / 20
    assert found.value == pytest.approx(mean) and found == again != other
    assert found.limits == pytest.approx((mean - half, mean + half), abs=0.05)
    # |mean| of data around 0 is biased upward; so are its resamples, and the reflected interval
    # lies lower than their quantiles.
    values = np.random.default_rng(0).normal(0.01, 1, 200)
    found = intervals.bootstrap_statistic(lambda rows: abs(values[rows].mean()), 200, lowest=0.0)
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
    found = compare.compute_newcombe_interval(compare.PairedHits(1, 1, 7, 12))
    assert found == pytest.approx((-6 / 21, -0.5069, -0.0256), abs=1e-4)
    # 20, 12, 2, 16: φ = (320 − 24 − 25) / √(32·18·22·28) = 0.4550; Wilson (0.5014, 0.7586) and
    # (0.3116, 0.5769) √(0.1386² + 0.1369² − 2·0.4550·0.1386·0.1369) = 0.1438,
    # √(0.1186² + 0.1284² − 2·0.4550·0.1186·0.1284) = 0.1292
    found = compare.compute_newcombe_interval(compare.PairedHits(20, 12, 2, 16))
    assert found == pytest.approx((0.2, 0.0562, 0.3292), abs=1e-4)


def test_a_negative_correlation_widens_the_interval():
    # 2, 10, 8, 0: φ = (0 − 80) / √(12·8·10·10) = −0.8165, without a correction
    found = compare.compute_newcombe_interval(compare.PairedHits(2, 10, 8, 0))
    first, second = intervals.wilson(12, 20), intervals.wilson(10, 20)
    below, above = first.value - first.low, second.high - second.value
    half = sqrt(below**2 + above**2 + 2 * 0.816497 * below * above)
    assert found[:2] == pytest.approx((0.1, 0.1 - half), abs=1e-6)


@given(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS).filter(any))
def test_the_interval_is_symmetric_and_holds_its_value(counts):
    both, first_only, second_only, neither = counts
    value, low, high = compare.compute_newcombe_interval(compare.PairedHits(*counts))
    assert -1 <= low <= value <= high <= 1
    assert value == pytest.approx((first_only - second_only) / sum(counts))
    pairs = compare.PairedHits(both, second_only, first_only, neither)
    mirrored = compare.compute_newcombe_interval(pairs)
    assert mirrored == pytest.approx((-value, -high, -low), abs=1e-12)
    # wrong for right, and so second for first
    pairs = compare.PairedHits(neither, first_only, second_only, both)
    swapped = compare.compute_newcombe_interval(pairs)
    assert swapped == pytest.approx((value, low, high), abs=1e-12)


def test_two_equal_models_do_not_differ():
    hits = np.arange(40) % 3 == 0
    found = compare.compute_newcombe_interval(compare.count_paired_hits(hits, hits))
    assert found.value == 0 and found.low < 0 < found.high
    assert compare.mcnemar(*compare.count_paired_hits(hits, hits)[1:3]) == 1
    assert compare.bootstrap_interval(hits, hits) == (0, 0, 0)


def test_the_bootstrap_keeps_images_together():
    second = np.random.default_rng(0).normal(size=500) * 100
    first = second + np.random.default_rng(1).normal(1, 0.5, size=500)
    value, low, high = compare.bootstrap_interval(first, second, seed=3)
    # standard error 0.5 / √500 = 0.0224 whatever the images' own spread; 1.96 of them on each side
    assert value == pytest.approx(float((first - second).mean())) and low < value < high
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / sqrt(500), rel=0.15)
    with pytest.raises(ValueError, match="one shape"):
        compare.bootstrap_interval(first, second[1:])


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
    both = compare.bootstrap_interval(values, np.zeros(200), people=people)
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
    assert found.value == 0.5 and (found.kind, found.seeds, found.items) == (
        compare.OVER_ITEMS_AND_SEEDS,
        2,
        4,
    )
    half = math.sqrt(12.70620**2 * 0.0625 + 3.182446**2 / 12)
    assert found.half_width() == pytest.approx(half, rel=1e-5)
    assert found.interval() == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-5)


def test_one_seed_is_student_over_items():
    values = np.random.default_rng(0).standard_normal((1, 30)) + 0.3
    found = compare.crossed_difference(values)
    expected = scipy.stats.ttest_1samp(values[0], 0)
    assert found.kind == compare.OVER_ITEMS and found.p == pytest.approx(expected.pvalue)
    limits = expected.confidence_interval(0.95)
    assert found.interval().limits == pytest.approx((limits.low, limits.high))


def test_without_items_it_is_student_over_seeds():
    found = compare.paired_seed_difference([0.1, 0.2, 0.3])
    assert found.kind == compare.OVER_SEEDS
    assert found.interval() == pytest.approx(intervals.mean_over_seeds([0.1, 0.2, 0.3]))
    assert found.p == pytest.approx(scipy.stats.ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)
    alone = compare.paired_seed_difference([0.1])
    assert (alone.kind, alone.p, alone.detectable_difference) == ("", None, None)
    assert alone.interval() == (0.1, None, None)


def test_where_seeds_change_nothing_only_items_count():
    row = np.random.default_rng(1).standard_normal(50)
    both = compare.crossed_difference(np.stack([row, row, row]))
    assert both.half_width() == pytest.approx(compare.crossed_difference(row[None]).half_width())


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_p_and_interval_say_the_same(level):
    generator = np.random.default_rng(2)
    values = generator.standard_normal((3, 40)) + generator.standard_normal((3, 1))
    found = compare.crossed_difference(values)
    assert found.p_at_distance(found.half_width(level)) == pytest.approx(1 - level, rel=1e-6)
    assert found.p_at_distance(0) == 1 and found.p_at_distance(1e6) < 1e-9


def test_what_never_varies_and_the_smallest_effect_seen_four_times_in_five():
    same = compare.crossed_difference(np.zeros((3, 20)))
    assert (same.value, same.kind, same.interval().limits) == (0, "", None)
    for value, p in ((2.0, 0), (0.0, 1)):
        assert compare.paired_seed_difference([value, value]).p == p
    generator = np.random.default_rng(3)
    effect = compare.crossed_difference(generator.standard_normal((1, 2000))).detectable_difference
    assert effect == pytest.approx((1.9612 + 0.8418) / math.sqrt(2000), rel=0.05)
    drawn = (generator.standard_normal((1, 2000)) + effect for _ in range(400))
    seen = [compare.crossed_difference(values).p < 0.05 for values in drawn]
    assert 0.74 <= np.mean(seen) <= 0.87


def test_a_person_of_several_images_and_a_ratio_are_one_item_each():
    values = np.array([1.0, 3, 2, 5])  # mean 2.75, of persons 2 + 1 + 1 images
    items = compare.linearize_by_person(values, np.array([7, 7, 3, 9]))
    # v + (n_p / (4/3))·(mean_p − v): 3: 2.75 − 0.5625, 7: 2.75 − 1.125, 9: 2.75 + 1.6875
    assert items == pytest.approx([2.1875, 1.625, 4.4375]) and items.mean() == pytest.approx(2.75)
    assert compare.linearize_by_person(values, np.arange(4)).tolist() == values.tolist()
    assert compare.linearize_by_person(values, None).tolist() == values.tolist()
    items = compare.linearize_ratio(np.array([1.0, 0, 3]), np.array([2.0, 0, 4]))
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
        encode_rounded(np.array([1.0, np.inf]))


def test_headroom_recovered_by_hand():
    """Four items, three seeds; R = 2.2 / 4.3 of the sums."""
    scores = np.array([[0.7, 0.6, 0.8, 0.9], [0.6, 0.7, 0.7, 0.8], [0.8, 0.6, 0.9, 0.8]])
    floor = np.array([[0.5, 0.4, 0.6, 0.7], [0.5, 0.5, 0.6, 0.6], [0.6, 0.4, 0.7, 0.6]])
    ceiling = np.array([[0.9, 0.8, 1, 1], [0.9, 0.8, 0.9, 1], [1, 0.8, 1, 0.9]])
    room = compare.crossed_difference(ceiling - floor)
    assert (room.value, room.half_width()) == pytest.approx((0.358333, 0.062165), abs=1e-6)
    share = compare.headroom_recovered(scores, floor, ceiling)
    assert share.value == pytest.approx(2.2 / 4.3)
    variances = [source.variance for source in share.sources]
    assert variances == pytest.approx([0.001751, 0.001609], abs=1e-6)
    assert share.interval()[1:] == pytest.approx((0.290896, 0.732359), abs=1e-6)
    assert compare.headroom_recovered(scores, floor, floor + np.array([1, -1, 1, -1]) / 10) is None


@pytest.mark.parametrize("people", [None, np.array([4, 0, 3, 1, 2])])
def test_images_of_as_many_people_are_exchanged_freely(people):
    random = np.random.default_rng(7)
    for order in intervals.draw_image_permutations(5, 3, 7, people):
        assert order.tolist() == random.permutation(5).tolist()
    assert intervals.every_second_mask(5).tolist() == [True, False, True, False, True]


def test_people_are_exchanged_among_alike_and_halved_whole():
    # Only a and c, of two images each: exchanged or not
    exchanged, kept = [0, 4, 2, 8, 1, 5, 6, 7, 3], list(range(9))
    orders = [order.tolist() for order in intervals.draw_image_permutations(9, 20, 0, PEOPLE)]
    assert exchanged in orders and kept in orders
    assert all(order in (exchanged, kept) for order in orders)
    # In their order: a and c, b and d
    is_first = intervals.every_second_mask(9, PEOPLE)
    assert is_first.tolist() == [False, True, False, True, True, False, False, False, True]


def test_two_runs_by_hand():
    # Weights 1/4 and 3/4. A = 4e-4/16 + 9e-4/16·1 = 2.5e-5 + 5.625e-5, with Satterthwaite's
    # 8.125e-5² / (2.5e-5²/3 + 5.625e-5²/11) = 13.31 degrees; √B = 0.01/4 + 0.02·3/4 = 0.0175.
    pooled = designs.pool_differences([FEW, MANY])
    assert pooled.value == pytest.approx(0.035)
    by_seeds, by_items = pooled.sources
    assert by_seeds == pytest.approx((8.125e-5, 13.31), rel=1e-3)
    assert by_items == pytest.approx((0.0175**2, 99))
    assert (pooled.kind, pooled.seeds, pooled.items) == (OVER_ITEMS_AND_SEEDS, 16, 400)
    apart = designs.pool_differences([FEW, MANY], same_items=False)
    assert apart.sources[1].variance == pytest.approx(0.0025**2 + 0.015**2)
    assert designs.pool_differences([FEW]) is FEW


def test_runs_of_drawn_items_are_pooled_as_by_loops_and_without_items_by_seeds():
    generator = np.random.default_rng(5)
    draws = [generator.standard_normal((seeds, 40)) for seeds in (3, 5, 9)]
    runs = [compare.crossed_difference(values) for values in draws]
    pooled = designs.pool_differences(runs)
    by_seeds = squares = root = 0.0  # slowly
    for run in runs:
        by_seeds += (run.seeds / 17) ** 2 * run.sources[0].variance
        squares += ((run.seeds / 17) ** 2 * run.sources[0].variance) ** 2 / (run.seeds - 1)
        root += run.seeds / 17 * math.sqrt(run.sources[1].variance)
    assert pooled.value == pytest.approx(np.concatenate(draws).mean())
    assert pooled.sources[0] == pytest.approx((by_seeds, by_seeds**2 / squares))
    assert pooled.sources[1].variance == pytest.approx(root**2)
    alone = [paired_seed_difference(values.mean(axis=1).tolist()) for values in draws]
    assert designs.pool_differences(alone).kind == compare.OVER_SEEDS
    mixed = designs.pool_differences([alone[0], runs[1]])
    assert mixed.sources[1].variance == pytest.approx(runs[1].sources[1].variance)
    differences = [paired_seed_difference([0.5] * number) for number in (2, 3)]
    flat = designs.pool_differences(differences)
    assert flat.sources == ((0.0, 3),)
    with pytest.raises(ValueError, match="found variances over .'items'.; over seeds is needed"):
        designs.pool_differences([FEW, compare.crossed_difference(draws[0][:1])])
    assert compare.crossed_difference(draws[0][:1]).kind == compare.OVER_ITEMS


def test_the_combination_is_stouffers_for_runs_without_items():
    runs = [paired_seed_difference(list(values)) for values in ([1, 3, 2], [0.5, 1, -0.2, 2, 1.4])]
    tails = [run.p / 2 for run in runs]  # both are above 0
    expected = scipy.stats.combine_pvalues(tails, "stouffer", weights=np.sqrt([3, 5])).pvalue
    assert designs.combined_p(runs, 0.0, 1.0) == pytest.approx(2 * expected)
    assert designs.combined_p(runs, 0.0, -1.0) == 1.0, "the scores are on the other side"
    assert designs.combined_p(runs[:1], 0.0, 1.0) == runs[0].p
    # Nothing but the shared items varies: a second run adds nothing.
    alike = Difference(
        0.02, (SourceVariance(0.0, 3), SourceVariance(1e-4, 99)), OVER_ITEMS_AND_SEEDS, 4, 100
    )
    assert designs.combined_p([alike, alike], 0.0, 1.0) == pytest.approx(alike.p)
    assert designs.combined_p([alike, alike], 0.0, 1.0, same_items=False) < alike.p


def test_each_look_spends_half_and_the_level_is_kept_by_the_correction_alone():
    assert [designs.correct_for_looks(0.01, looks) for looks in (1, 2, 3)] == [0.01, 0.04, 0.08]
    assert designs.correct_for_looks(0.3, 2) == 1.0
    spent = sum(0.05 / (designs.correct_for_looks(1e-9, looks) / 1e-9) for looks in range(2, 40))
    assert spent + 0.05 / 2 == pytest.approx(0.05)
    last, pooled, corrected, late = hold_until(np.random.default_rng(0), (3, 5, 5, 12), 20_000)
    assert last > 8 and pooled > 6, "the inflation that the correction is for"
    assert corrected < 2.3 and 2.5 < late < 3.5


def test_random_effects_by_hand_and_as_audited():
    # τ² = (Q − 1)/(2 − 2/2) = (2 − 1)/1; then both weights are 1/2, Q = 1 and the error 1.
    effects = designs.random_effects([0.0, 2.0], [1.0, 1.0])
    assert effects.interval == pytest.approx((1.0, 1 - 12.7062, 1 + 12.7062), abs=1e-3)
    assert effects[1:] == pytest.approx((1.0, scipy.stats.chi2.sf(2, 1)))
    values, errors = [1.33, -0.38, -1.77, 0.20, -5.79], [0.17, 0.15, 0.44, 0.25, 0.36]
    effects = designs.random_effects(values, np.square(errors).tolist())
    assert effects.interval == pytest.approx((-1.3, -4.7, 2.2), abs=0.06)
    assert effects.deviation == pytest.approx(2.1, abs=0.1) and effects.p < 1e-16
    for values, variances in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="two or more, variances > 0, are needed"):
            designs.random_effects(values, variances)


def test_a_collapsed_seed_and_the_sign_test():
    years = np.array([0.6, 0.7, 0.8, 0.75, 0.9, 1.1, 0.65, 0.5, 26.5])
    assert designs.has_collapsed_seed(years) and not designs.has_collapsed_seed(years[:-1])
    assert not designs.has_collapsed_seed(years[-4:]) and not designs.has_collapsed_seed(np.ones(6))
    assert designs.sign_test(years) == pytest.approx(2 / 2**9)
    assert designs.sign_test(np.zeros(3)) == 1


def test_linearity():
    noise = 0.05 * np.random.default_rng(1).standard_normal((6, 4))
    levels = np.array([1.0, 2.0, 4.0, 6.0])
    straight = designs.measure_linearity(5 + levels + noise, levels)
    assert straight.p < 0.01 < straight.p_exact and straight.share < 0.05
    # 0, 3, 0, 1: the least-squares line is 0.9661 + 0.0102 k, 2.0136 below the second value
    bent = designs.measure_linearity(np.array([0.0, 3.0, 0.0, 1.0]) + noise, levels)
    assert bent.p > 0.05 > bent.p_exact
    assert (bent.deviation, bent.share) == pytest.approx((2.0136, 2.0136), rel=0.1)
    assert math.isnan(designs.measure_linearity(5 + levels + noise[:2], levels).p_exact)
    with pytest.raises(ValueError, match=r"values of shape \(6, 4\) for 3 levels"):
        designs.measure_linearity(noise, levels[:3])
