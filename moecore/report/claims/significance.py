"""Whether two methods differ: on the same items, over the same seeds, or both; corrected."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.report.column import Metric
from moecore.report.measured import Measured
from moecore.statistics.crossed import (
    BOTH,
    SEEDS,
    Difference,
    crossed_difference,
    paired_seed_difference,
)
from moecore.statistics.intervals import Interval
from moecore.statistics.paired import count_paired_hits, holm, mcnemar, paired_difference

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


class Tested(NamedTuple):
    """A method minus another, with its interval, and the p-value of the test between them."""

    difference: Interval
    p: float
    holm: float  # p, corrected for the family of tests that it is one of
    test: str  # "mcnemar", BOTH, SEEDS, or "" where several seeds leave no interval
    # Images that the first method alone gets right, and the second alone.
    only: tuple[int, int] | None = None


def possible_test(metric: Metric, methods: Sequence[Seeds]) -> str:
    """The test that can be made between these methods; "" where neither direction is better.

    Of several seeds BOTH where the results keep one value per item, else SEEDS; "mcnemar" for one
    seed with hits, else "intervals".
    """
    if not metric.column.better:
        return ""
    models = [model for seeds in methods for model in seeds.values()]
    if all(len(seeds) > 1 for seeds in methods):
        return BOTH if all(metric.items(model) is not None for model in models) else SEEDS
    known = all(metric.hits(model) is not None for model in models)
    return "mcnemar" if known else "intervals"


def differences_from(
    metric: Metric, models: Mapping[str, Seeds], reference: str
) -> dict[str, Tested]:
    """Every other method tested against ``reference``; {} where no test can be made.

    models: those that have the metric. The p-values are corrected by Holm's method over these
    comparisons.  Raises UserError where two methods met different images or seeds.
    """
    others = [method for method in models if method != reference]
    test = possible_test(metric, list(models.values()))
    if reference not in models or not others or test not in ("mcnemar", BOTH, SEEDS):
        return {}
    compare = _by_images if test == "mcnemar" else _by_seeds
    tests = [compare(metric, method, models[method], models[reference]) for method in others]
    corrected = holm([tested.p for tested in tests])
    return {
        method: tested._replace(holm=p)
        for method, tested, p in zip(others, tests, corrected, strict=True)
    }


def find_leader(
    metric: Metric, models: Mapping[str, Seeds], values: Mapping[str, float]
) -> str | None:
    """The method that is better than every other one by tests, or None.

    values: the mean of each method of ``models``. The method with the best mean is tested against
    each of the others; it leads where all corrected p-values are below 5 %.
    """
    sign = 1 if metric.column.better == "higher" else -1
    first = max(values, key=lambda method: sign * values[method])
    tests = differences_from(metric, models, first)
    if tests and all(tested.holm < LEVEL for tested in tests.values()):
        return first
    return None


def tested_to_json(tested: Tested) -> dict[str, Any]:
    """difference, its limits, p, p_holm and the test.

    Of McNemar's also how many images one of the two alone gets right.
    """
    difference, low, high = tested.difference
    values = {
        "difference": difference,
        "low": low,
        "high": high,
        "p": tested.p,
        "p_holm": tested.holm,
        "test": tested.test,
    }
    if tested.only is not None:
        values["only_first"], values["only_second"] = tested.only
    return values


class Side(NamedTuple):
    """One metric of one method, seed by seed."""

    metric: Metric
    seeds: Seeds

    def items(self, seed: int) -> np.ndarray | None:
        """One value per item, (N,); None where the metric has none."""
        return self.metric.items(self.seeds[seed])

    def number(self, seed: int) -> float:
        """The value."""
        return self.metric.number(self.seeds[seed])


def difference_of(ours: Side, theirs: Side, place: str) -> Difference:
    """Ours minus theirs over items and seeds; over seeds alone where the metrics have no items.

    Raises UserError where the two sides' items differ, or only some results keep theirs.
    """
    pairs = [(ours.items(seed), theirs.items(seed)) for seed in ours.seeds]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not both and all(one is None and other is None for one, other in pairs):
        return paired_seed_difference(
            [ours.number(seed) - theirs.number(seed) for seed in ours.seeds]
        )
    again = "run the stage that measures it again for all methods"
    names = " or ".join(dict.fromkeys((ours.metric.name, theirs.metric.name)))
    if len(both) < len(pairs):
        raise UserError(f"{place}: only some results keep the items of {names}; {again}")
    numbers = sorted({len(values) for pair in both for values in pair})
    if len(numbers) > 1:
        problem = f"{names} is of {' and of '.join(map(str, numbers))} items"
        raise UserError(f"{place}: found {problem}; allowed: the same items of all; {again}")
    return crossed_difference(np.stack([one - other for one, other in both]))


def _by_images(metric: Metric, method: str, ours: Seeds, theirs: Seeds) -> Tested:
    first = _hits(metric, ours)
    second = _hits(metric, theirs)
    if len(first) != len(second):
        images = f"{len(first)} images, another method's of {len(second)}"
        again = "run the measuring stages again"
        raise UserError(f"compare: {metric.name} of {method} is of {images}; {again}")
    counts = count_paired_hits(first, second)
    only = (counts.first_only, counts.second_only)
    p = mcnemar(*only)
    return Tested(paired_difference(counts), p, p, "mcnemar", only)


def _hits(metric: Metric, seeds: Seeds) -> np.ndarray:
    hits = metric.hits(next(iter(seeds.values())))
    assert hits is not None  # possible_test saw them
    return hits


def _by_seeds(metric: Metric, method: str, ours: Seeds, theirs: Seeds) -> Tested:
    if ours.keys() != theirs.keys():
        seeds = f"seeds {list(ours)}, another method {list(theirs)}"
        raise UserError(f"compare: {method} has {seeds}; run.seeds is for all")
    difference = difference_of(Side(metric, ours), Side(metric, theirs), f"compare: {method}")
    # Values that are all alike leave no interval, and nothing to tell the two apart by.
    p = 1.0 if difference.p is None else difference.p
    return Tested(difference.interval(), p, p, difference.kind)
