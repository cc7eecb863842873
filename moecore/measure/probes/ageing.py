"""Does a model read age from the brain? What it says of subjects who age while all else stays.

S subjects, A ages; ages and predictions in years.
"""

from collections.abc import Sequence

import numpy as np

from moecore.core.config import Config
from moecore.measure.probes.people import People, Scan, predicted_ages, sex_of
from moecore.nn.backbones.model import Model


class Ageing(Config):
    """What the model says of simulated subjects who age while all else stays."""

    subjects: int
    ages: tuple[float, ...]
    predictions: tuple[tuple[float, ...], ...]  # [subject][age]
    monotone_share: float  # of the steps from one age to the next: those that rise
    rank_correlation: float  # Spearman's, mean over subjects
    rank_correlations: tuple[float, ...]
    slope: float  # years predicted a year of age, mean over subjects
    mean_predictions: tuple[float, ...]


def aged(model: Model, people: People, subjects: int, ages: Sequence[float], batch: int) -> Ageing:
    """The same subjects at every age; anatomy, scanner and lead or lag of brain age stay."""
    rows = []
    for number in range(subjects):
        person = people.person(number)
        scans = [Scan(age, sex_of(number), person) for age in ages]
        rows.append(predicted_ages(model, people.draw(scans), batch))
    return ageing(ages, np.stack(rows))


def ageing(ages: Sequence[float], predictions: np.ndarray) -> Ageing:
    """Of predictions (S, A): how they follow age."""
    ranks = rank_correlations(ages, predictions)
    slopes = [float(np.polyfit(ages, row, 1)[0]) for row in predictions.astype(np.float64)]
    return Ageing(
        subjects=len(predictions),
        ages=ages,
        predictions=predictions.tolist(),
        monotone_share=monotone_share(predictions),
        rank_correlation=float(np.mean(ranks)),
        rank_correlations=ranks,
        slope=float(np.mean(slopes)),
        mean_predictions=predictions.mean(axis=0).tolist(),
    )


def monotone_share(predictions: np.ndarray) -> float:
    """Share of all subjects' steps in which the prediction rises; predictions (S, A), A ≥ 2."""
    return float((np.diff(predictions, axis=1) > 0).mean())


def rank_correlations(ages: Sequence[float], predictions: np.ndarray) -> list[float]:
    """Spearman's correlation of age (A,) and prediction (S, A), one value a subject.

    A constant prediction has 0.
    """
    # Here: scipy.stats takes a second, and all stages import the table of measurements.
    from scipy.stats import rankdata

    wanted = rankdata(ages) - (len(ages) + 1) / 2
    found = rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((wanted @ wanted) * (found * found).sum(axis=1))
    return [
        float(total / length) if length else 0.0
        for total, length in zip(found @ wanted, lengths, strict=True)
    ]
