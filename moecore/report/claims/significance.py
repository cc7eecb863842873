"""Whether two methods differ: on the same items, over the same seeds, or both; corrected."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.report.column import Column
from moecore.report.typed_results import Measured
from moecore.statistics.crossed import (
    BOTH,
    SEEDS,
    Difference,
    crossed_difference,
    paired_seed_difference,
)
from moecore.statistics.intervals import Interval
from moecore.statistics.paired import count_paired_hits, holm, mcnemar, paired_share_difference

LEVEL = 0.05
Seeds = Mapping[int, Measured]
WORDS = {
    "mcnemar": "shares of images by McNemar's exact test of what two methods get right on the same "
    "images, Holm's correction over the column",
    BOTH: "over test items and seeds at once (docs/intervals.md), Holm's correction over the "
    "column",
    SEEDS: "where no items are kept, by Student's paired test over the seeds, with the same "
    "correction",
    "intervals": "where there is no paired test, by intervals that do not overlap",
}


class TestedDifference(NamedTuple):
    """A method minus another, with its interval, and the p-value of the test between them."""

    difference: Interval
    p: float
    holm: float  # p, corrected for the family of tests that it is one of
    test: str  # "mcnemar", BOTH, SEEDS, or "" where several seeds leave no interval
    # Images that the first method alone gets right, and the second alone.
    only: tuple[int, ...] = ()


def possible_test(metric: Column, methods: Sequence[Seeds]) -> str:
    """The test that can be made between these methods; "" where neither direction is better.

    Of several seeds BOTH where the results keep one value per item, else SEEDS; "mcnemar" for one
    seed with hits, else "intervals".
    """
    if not metric.better:
        return ""
    models = [model for seeds in methods for model in seeds.values()]
    least = 3 if metric.of_pairs else 2  # one pair of seeds says nothing of their scatter
    if all(len(seeds) >= least for seeds in methods):
        return BOTH if all(metric.items(model) is not None for model in models) else SEEDS
    if all(metric.hits(model) is not None for model in models):
        return "mcnemar"
    return "intervals"


def differences_from(
    metric: Column, models: Mapping[str, Seeds], reference: str
) -> dict[str, TestedDifference]:
    """Every other method tested against ``reference``; {} where no test can be made.

    models: those that have the metric. The p-values are corrected by Holm's method over these
    comparisons. A method with a value that is only a bound is not tested.  Raises UserError where
    two methods met different images or seeds.
    """
    models = {name: seeds for name, seeds in models.items() if not metric.has_bound(seeds.values())}
    others = [method for method in models if method != reference]
    test = possible_test(metric, list(models.values()))
    if reference not in models or not others or test not in ("mcnemar", BOTH, SEEDS):
        return {}
    compare = {"mcnemar": _by_images}.get(test, _by_seeds)
    tests = [compare(metric, method, models[method], models[reference]) for method in others]
    corrected = holm([tested.p for tested in tests])
    return {
        method: tested._replace(holm=p)
        for method, tested, p in zip(others, tests, corrected, strict=True)
    }


def find_leader(
    metric: Column, models: Mapping[str, Seeds], values: Mapping[str, float]
) -> str | None:
    """The method that is better than every other one by tests, or None.

    values: the mean of each method of ``models``. The method with the best mean is tested against
    each of the others; it leads where all corrected p-values are below 5 %.
    """
    sign = {"higher": 1, "lower": -1}.get(metric.better, 0)
    first = max(values, key=lambda method: sign * values[method])
    tests = differences_from(metric, models, first)
    if len(tests) == len(models) - 1 and all(tested.holm < LEVEL for tested in tests.values()):
        return first
    return None


def tested_to_json(tested: TestedDifference) -> dict[str, Any]:
    """Return difference, its limits, p, p_holm and the test.

    Of McNemar's also how many images one of the two alone gets right.
    """
    names = ("difference", "low", "high", "p", "p_holm", "test")
    numbers = (*tested.difference, tested.p, tested.holm, tested.test)
    only = zip(("only_first", "only_second"), tested.only, strict=False)
    return dict(zip(names, numbers, strict=True)) | dict(only)


def crossed_or_paired_difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    """Return ours minus theirs, of ``paired_values``: over items and seeds, or seeds alone."""
    if ours.ndim == 1:
        return paired_seed_difference((ours - theirs).tolist())
    return crossed_difference(ours - theirs)


def paired_values(
    ours: Seeds, metric: Column, theirs: Seeds, against_metric: Column, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides' values, (S, N) of seeds and items; (S,) where there are no items.

    Raises UserError where the two sides' items differ, or only some results keep theirs.
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
        problem = f"{names} is of {' and of '.join(map(str, counts))} items"
        raise UserError(f"{place}: found {problem}; allowed: the same items of all; {again}")
    return np.stack(arrays[::2]), np.stack(arrays[1::2])


def _by_images(metric: Column, method: str, ours: Seeds, theirs: Seeds) -> TestedDifference:
    first, second = (metric.hits(model) for seeds in (ours, theirs) for model in seeds.values())
    assert first is not None and second is not None  # possible_test saw them
    if len(first) != len(second):
        images = f"{len(first)} images, another method's of {len(second)}"
        again = "run the measuring stages again"
        raise UserError(f"compare: {metric.name} of {method} is of {images}; {again}")
    counts = count_paired_hits(first, second)
    only = (counts.first_only, counts.second_only)
    p = mcnemar(*only)
    return TestedDifference(paired_share_difference(counts), p, p, "mcnemar", only)


def _by_seeds(metric: Column, method: str, ours: Seeds, theirs: Seeds) -> TestedDifference:
    if ours.keys() != theirs.keys():
        seeds = f"seeds {list(ours)}, another method {list(theirs)}"
        raise UserError(f"compare: {method} has {seeds}; run.seeds is for all")
    values = paired_values(ours, metric, theirs, metric, f"compare: {method}")
    difference = crossed_or_paired_difference(*values)
    # Values that are all alike leave no interval, and nothing to tell the two apart by.
    p = 1.0 if difference.p is None else difference.p
    return TestedDifference(difference.interval(), p, p, difference.kind)
