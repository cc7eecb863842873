"""Significance tests between two methods, paired by test items, by seeds or by both."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.report.column import Column
from moecore.report.result_types import ModelResults, Models
from moecore.statistics import comparisons, intervals
from moecore.statistics.comparisons import OVER_ITEMS_AND_SEEDS, OVER_SEEDS

LEVEL = 0.05
Seeds = Mapping[int, ModelResults]
TEST_DESCRIPTIONS = {
    "mcnemar": "McNemar's exact test for shares of images, with Holm's correction over the column",
    OVER_ITEMS_AND_SEEDS: "a test over test items and seeds together (docs/intervals.md), "
    "with Holm's correction over the column",
    OVER_SEEDS: "Student's paired test over seeds for values without items, "
    "with the same correction",
    "intervals": "intervals that do not overlap for values without a paired test",
}


class TestedDifference(NamedTuple):
    """The difference between two methods, with its interval and the p-value of a paired test."""

    difference: intervals.Interval
    p: float
    holm: float  # p with Holm's correction over its family of tests
    test: str  # "mcnemar", OVER_ITEMS_AND_SEEDS, OVER_SEEDS, or "" if seeds give no interval
    # For McNemar's test: numbers of images that only the first, or only the second, has right.
    only: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return an entry of ``against`` in compare.json: difference, limits, p-values, test."""
        (value, low, high), p, holm, test, only = self
        entry = {"difference": value, "low": low, "high": high, "p": p, "p_holm": holm}
        return entry | {"test": test} | dict(zip(("only_first", "only_second"), only, strict=False))


def choose_test(metric: Column, methods: Sequence[Seeds]) -> str:
    """Return the test to use, a key of ``TEST_DESCRIPTIONS``; "" if neither direction is better."""
    # Several seeds: OVER_ITEMS_AND_SEEDS if all results have a value per item, else OVER_SEEDS.
    # One seed: "mcnemar" if all have hits (which images are right), else "intervals".
    if not metric.better:
        return ""
    models = [model for seeds in methods for model in seeds.values()]
    min_seeds = 3 if metric.of_pairs else 2  # two seeds are one pair, without a variance
    if all(len(seeds) >= min_seeds for seeds in methods):
        if all(metric.items(model) is not None for model in models):
            return OVER_ITEMS_AND_SEEDS
        return OVER_SEEDS
    if all(metric.hits(model) is not None for model in models):
        return "mcnemar"
    return "intervals"


def compare_with_reference(
    metric: Column, models: Models, reference: str
) -> dict[str, TestedDifference]:
    """Test each method against ``reference``: method → difference; {} if no test is possible."""
    # models: methods with the metric; those with a value that is only a bound are not tested.
    # Holm's correction is over these tests.
    models = {name: seeds for name, seeds in models.items() if not metric.has_bound(seeds.values())}
    rivals = [method for method in models if method != reference]
    test = choose_test(metric, list(models.values()))
    known = ("mcnemar", OVER_ITEMS_AND_SEEDS, OVER_SEEDS)
    if reference not in models or not rivals or test not in known:
        return {}
    compare = {"mcnemar": _mcnemar_on_images}.get(test, _test_seeds)
    tests = [compare(metric, method, models[method], models[reference]) for method in rivals]
    corrected = comparisons.holm([tested.p for tested in tests])
    return {
        method: tested._replace(holm=p)
        for method, tested, p in zip(rivals, tests, corrected, strict=True)
    }


def find_significant_leader(
    metric: Column, models: Models, values: Mapping[str, float]
) -> str | None:
    """Return the method that is significantly better than all others (Holm), or None."""
    sign = {"higher": 1, "lower": -1}.get(metric.better, 0)
    first = max(values, key=lambda method: sign * values[method])
    tests = compare_with_reference(metric, models, first)
    if len(tests) == len(models) - 1 and all(tested.holm < LEVEL for tested in tests.values()):
        return first
    return None


def crossed_or_paired_difference(ours: np.ndarray, theirs: np.ndarray) -> comparisons.Difference:
    """Return the mean of ours − theirs with its interval; (S seeds, N items), or (S,)."""
    if ours.ndim == 1:
        return comparisons.paired_seed_difference((ours - theirs).tolist())
    return comparisons.crossed_difference(ours - theirs)


def pair_values_by_seed(
    ours: Seeds, metric: Column, theirs: Seeds, against_metric: Column, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides' values, paired by seed: (S, N) of seeds and items, or (S,) without items.

    place: key in messages. Raises UserError for different items, or if only some results have any.
    """
    sides = [(metric.items(ours[seed]), against_metric.items(theirs[seed])) for seed in ours]
    arrays = [items for pair in sides for items in pair if items is not None]
    if not arrays:
        first = metric.seed_numbers(list(ours.values()))
        return first, against_metric.seed_numbers([theirs[seed] for seed in ours])
    again = "run the stage that measures it again for all methods"
    names = " or ".join(dict.fromkeys((metric.name, against_metric.name)))
    if len(arrays) < 2 * len(sides):
        raise UserError(f"{place}: only some results keep the items of {names}; {again}")
    counts = sorted({len(items) for items in arrays})
    if len(counts) > 1:
        items = f"{names} is of {' and of '.join(map(str, counts))} items"
        raise UserError.at(place, found=items, allowed=f"the same items of all; {again}")
    return np.stack(arrays[::2]), np.stack(arrays[1::2])


def _mcnemar_on_images(metric: Column, method: str, ours: Seeds, theirs: Seeds) -> TestedDifference:
    first, second = (metric.hits(model) for seeds in (ours, theirs) for model in seeds.values())
    assert first is not None and second is not None  # choose_test requires hits of all
    if len(first) != len(second):
        images = f"{len(first)} images, another method's of {len(second)}"
        again = "run the measuring stages again"
        raise UserError(f"compare: {metric.name} of {method} is of {images}; {again}")
    counts = comparisons.count_paired_hits(first, second)
    only = (counts.first_only, counts.second_only)
    p = comparisons.mcnemar(*only)
    return TestedDifference(comparisons.compute_newcombe_interval(counts), p, p, "mcnemar", only)


def _test_seeds(metric: Column, method: str, ours: Seeds, theirs: Seeds) -> TestedDifference:
    if ours.keys() != theirs.keys():
        seeds = f"seeds {list(ours)}, another method {list(theirs)}"
        raise UserError(f"compare: {method} has {seeds}; run.seeds is for all")
    values = pair_values_by_seed(ours, metric, theirs, metric, f"compare: {method}")
    difference = crossed_or_paired_difference(*values)
    # Identical differences have no variance: no interval, and no test.
    p = 1.0 if difference.p is None else difference.p
    return TestedDifference(difference.interval(), p, p, difference.kind)
