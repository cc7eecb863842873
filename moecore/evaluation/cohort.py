"""Does a model read age from the brain? Pure functions of predictions for the same subjects aged, scanned again, or reduced to one tissue.

S subjects, A ages; ages and predictions in years.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.stats import rankdata

from moecore.evaluation.intervals import bootstrap_mean


def mean_interval(values: np.ndarray, resamples: int) -> dict[str, float | None]:
    """The mean of one value an image or a pair, (N,), none below 0, with its 95 % bootstrap interval: value, low, high."""
    return bootstrap_mean(values, resamples)._asdict()


def monotone_share(predictions: np.ndarray) -> float:
    """Share of the steps from one age to the next, of all subjects, in which the prediction rises; predictions (S, A), A ≥ 2."""
    return float((np.diff(predictions, axis=1) > 0).mean())


def rank_correlations(ages: Sequence[float], predictions: np.ndarray) -> list[float]:
    """Spearman's correlation of age and prediction, one value a subject; ages (A,), predictions (S, A). A constant prediction has 0."""
    wanted = rankdata(ages) - (len(ages) + 1) / 2
    found = rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((wanted @ wanted) * (found * found).sum(axis=1))
    return [float(total / length) if length else 0.0 for total, length in zip(found @ wanted, lengths, strict=True)]


def repeated(subjects: Sequence[Mapping[str, str]], years: float = 1.0) -> list[tuple[int, int]]:
    """Pairs of places, of sessions that follow each other in age, of the same participant, at most ``years`` apart."""
    order = sorted(range(len(subjects)), key=lambda place: (subjects[place]["participant_id"], float(subjects[place]["age"]), place))
    return [(a, b) for a, b in pairwise(order) if _same(subjects[a], subjects[b]) and float(subjects[b]["age"]) - float(subjects[a]["age"]) <= years]


def ageing(ages: Sequence[float], predictions: np.ndarray) -> dict[str, Any]:
    """What predictions (S, A) say of subjects who age while all else stays: share of rising steps, rank correlations, means and slopes."""
    ranks = rank_correlations(ages, predictions)
    slopes = [float(np.polyfit(ages, row, 1)[0]) for row in predictions.astype(np.float64)]
    return {
        "subjects": len(predictions), "ages": list(ages), "predictions": predictions.tolist(), "monotone_share": monotone_share(predictions),
        "rank_correlation": float(np.mean(ranks)), "rank_correlations": ranks, "slope": float(np.mean(slopes)),
        "mean_predictions": predictions.mean(axis=0).tolist(),
    }  # fmt: skip


def _same(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    return a["participant_id"] == b["participant_id"]
