"""Claims judged anew from what compare.json keeps of a run: also where the claim was put otherwise
since, and with Holm's correction over studies.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import stdtrit

from moecore.report.claims.evaluation import judge_difference, p_of, verdict_to_json
from moecore.report.tables.cells import interval_from_json
from moecore.report.tables.number_format import ROUNDING_WIDTH
from moecore.statistics.crossed import BOTH, ITEMS, LEVEL, POWER, SEEDS, Difference, VarianceSource
from moecore.study.sections import Claim, Question


def judge_again(
    entry: Mapping[str, Any], claim: Claim | Question, good: str = ""
) -> dict[str, Any]:
    """Return an entry of ``claims`` or ``questions`` with the verdict on ``claim``, uncorrected.

    entry: of the same quantity (``compared_quantity_key``); good: what is better for the metric.
    """
    difference = rebuild_difference(entry)
    verdict = judge_difference(difference, claim, good)
    p = p_of(difference, claim, good)
    kept = {key: entry[key] for key in ("method", "against", "form", "settings") if key in entry}
    judged = verdict_to_json(difference, entry["form"], verdict, p, None)
    return kept | judged | {"asked": claim.model_dump(mode="json", exclude_none=True)}


def rebuild_difference(entry: Mapping[str, Any]) -> Difference:
    """Return the difference of an entry, with the variances that its numbers follow from.

    half² = t²(S − 1)·A + t²(n − 1)·B at two tails t: that of the interval, and that of the power,
    or of p in older entries, which lack ``smallest`` where they are decided. An interval of no
    width is none.
    """
    stored = entry["difference"]
    value, low, high = interval_from_json(stored)
    seeds, items = stored["seeds"], stored.get("items", 0)
    if low is None or high is None or high - low < 2 * ROUNDING_WIDTH:
        return Difference(value, (), "", seeds, items)
    kind = stored["interval"]
    freedoms = {BOTH: (seeds - 1, items - 1), ITEMS: (items - 1,), SEEDS: (seeds - 1,)}[kind]
    half = (high - low) / 2
    widths = {(1 - LEVEL) / 2: half}
    if len(freedoms) > 1:
        widths |= _second_width(entry, half)
    squares = [
        [(float(stdtrit(freedom, tail)) / width) ** 2 for freedom in freedoms]
        for tail, width in widths.items()
    ]
    variances = np.linalg.solve(np.array(squares), np.ones(len(widths)))
    sources = [
        VarianceSource(max(0.0, float(variance)), freedom)
        for variance, freedom in zip(variances, freedoms, strict=True)
    ]
    return Difference(value, tuple(sources), kind, seeds, items)


def _second_width(entry: Mapping[str, Any], half: float) -> dict[float, float]:
    """Return another tail → the distance that the difference's variance reaches there."""
    if "smallest" in entry:
        return {1 - POWER: entry["smallest"] - half}
    value = entry["difference"]["mean"]
    margin = entry["asked"].get("margin")
    if margin is None:
        return {entry["p"] / 2: abs(value)}
    distance = margin - abs(value)
    return {entry["p"] if distance >= 0 else entry["p"] / 2: abs(distance)}
