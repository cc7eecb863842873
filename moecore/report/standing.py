"""Where a difference stands: tests of two methods on the same images or over the same seeds, corrected for their number."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moecore.evaluation.intervals import Interval, over_seeds
from moecore.evaluation.paired import holm, mcnemar, paired_difference, paired_t, pairs
from moecore.files import StageError
from moecore.report.metric import Metric, number
from moecore.report.results import Measured

LEVEL = 0.05
Seeds = Mapping[int, Measured]
WORDS = {
    "mcnemar": "shares of images by McNemar's exact test of what two methods get right on the same images, Holm's correction over the column",
    "paired t": "by Student's paired test over the seeds, Holm's correction over the column",
    "intervals": "where there is no paired test, by intervals that do not overlap",
}


class Tested(NamedTuple):
    """A method minus another, with its interval, the test's p-value, and that p-value corrected for its family."""

    difference: Interval
    p: float
    holm: float
    test: str  # "mcnemar" or "paired t"
    only: tuple[int, int] | None = None  # images that the first alone gets right, and the second alone


def way_of(metric: Metric, methods: Sequence[Seeds]) -> str:
    """The test that can be made between these methods: "paired t" for several seeds, "mcnemar" for one with hits, else "intervals"."""
    if not metric.better:
        return ""
    if all(len(seeds) > 1 for seeds in methods):
        return "paired t"
    known = metric.hits is not None and all(metric.hits(model) is not None for seeds in methods for model in seeds.values())
    return "mcnemar" if known else "intervals"


def against(metric: Metric, models: Mapping[str, Seeds], reference: str) -> dict[str, Tested]:
    """Every other method of ``models``, which all have the metric, tested against ``reference``; {} where no test can be made.

    The p-values are corrected by Holm's method over these comparisons.  Raises StageError where two methods met different images or seeds.
    """
    others = [method for method in models if method != reference]
    test = way_of(metric, list(models.values()))
    if reference not in models or not others or test not in ("mcnemar", "paired t"):
        return {}
    compare = _by_images if test == "mcnemar" else _by_seeds
    found = [compare(metric, method, models[method], models[reference]) for method in others]
    corrected = holm([tested.p for tested in found])
    return {method: tested._replace(holm=p) for method, tested, p in zip(others, found, corrected, strict=True)}


def leader(metric: Metric, models: Mapping[str, Seeds], values: Mapping[str, float]) -> str | None:
    """The method that is better than every other one by tests, or None; ``values``: the mean of each method of ``models``.

    The method with the best mean is tested against each of the others; it leads where all corrected p-values are below 5 %.
    """
    sign = 1 if metric.better == "higher" else -1
    first = max(values, key=lambda method: sign * values[method])
    found = against(metric, models, first)
    return first if found and all(tested.holm < LEVEL for tested in found.values()) else None


def as_json(tested: Tested) -> dict[str, Any]:
    """difference, its limits, p, p_holm and the test; of McNemar's also how many images one of the two alone gets right."""
    difference, low, high = tested.difference
    counts = {"only_first": tested.only[0], "only_second": tested.only[1]} if tested.only else {}
    return {"difference": difference, "low": low, "high": high, "p": tested.p, "p_holm": tested.holm, "test": tested.test, **counts}


def _by_images(metric: Metric, method: str, ours: Seeds, theirs: Seeds) -> Tested:
    first, second = (metric.hits(next(iter(seeds.values()))) for seeds in (ours, theirs))
    if len(first) != len(second):
        raise StageError(f"compare: {metric.name} of {method} is of {len(first)} images, another method's of {len(second)}; run the measuring stages again")
    found = pairs(first, second)
    p = mcnemar(found.first_only, found.second_only)
    return Tested(paired_difference(found), p, p, "mcnemar", (found.first_only, found.second_only))


def _by_seeds(metric: Metric, method: str, ours: Seeds, theirs: Seeds) -> Tested:
    if ours.keys() != theirs.keys():
        raise StageError(f"compare: {method} has seeds {list(ours)}, another method {list(theirs)}; run.seeds is for all")
    differences = [number(metric.read(ours[seed])) - number(metric.read(theirs[seed])) for seed in ours]
    p = paired_t(differences)
    return Tested(over_seeds(differences), p, p, "paired t")
