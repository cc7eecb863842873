"""Simulated people who are in no split of a cohort, aged and scanned again; sessions of real ones.

S subjects, A ages; ages and predictions in years.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.data.sources.phantom import Phantom
from moecore.data.workers import map_in_threads
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_mean

PEOPLE = 1000  # set aside for each seed; those who are scanned again begin at half of them


class Scan(NamedTuple):
    """Which scan of whom is drawn."""

    age: float
    sex: str
    person: int  # their seed
    scan: int = 0
    site: int = 0


class People(NamedTuple):
    """The people whom ``seed`` sets aside."""

    source: Phantom  # of the cohort
    seed: int

    def person(self, number: int) -> int:
        """The seed of person ``number``, below ``PEOPLE``."""
        first = self.source.subjects + self.seed * PEOPLE
        return self.source.person_seed(first + number)

    def draw(self, scans: Sequence[Scan]) -> np.ndarray:
        """Volumes float16 (N, 1, D, H, W), as `prepare` would store them."""
        return np.stack(list(map_in_threads(lambda scan: self.source.draw(*scan)[0], scans)))


def alternating_sex(number: int) -> str:
    """Women and men in turn."""
    return "FM"[number % 2]


def predicted_ages(model: Model, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Years (N,) fp64, of volumes (N, 1, D, H, W)."""
    prediction, _ = predict_in_batches(model, volumes, batch, routing=False)
    return prediction[:, 0].double().numpy()


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


def age_subjects(
    model: Model, people: People, subjects: int, ages: Sequence[float], batch: int
) -> Ageing:
    """Age the same subjects over all ages; anatomy, scanner and lead or lag of brain age stay."""
    rows = []
    for number in range(subjects):
        person = people.person(number)
        scans = [Scan(age, alternating_sex(number), person) for age in ages]
        rows.append(predicted_ages(model, people.draw(scans), batch))
    return summarize_ageing(ages, np.stack(rows))


def summarize_ageing(ages: Sequence[float], predictions: np.ndarray) -> Ageing:
    """Return how predictions (S, A) follow age."""
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
    """Spearman's correlation of age (A,) and prediction (S, A), one value per subject.

    A constant prediction has 0.
    """
    # Here: scipy.stats takes a second, and all stages import the table of measurements.
    from scipy.stats import rankdata

    wanted = rankdata(ages) - (len(ages) + 1) / 2
    centred_ranks = rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((wanted @ wanted) * (centred_ranks * centred_ranks).sum(axis=1))
    return [
        float(total / length) if length else 0.0
        for total, length in zip(centred_ranks @ wanted, lengths, strict=True)
    ]


class Rescan(Config):
    """The mean absolute difference with its 95 % limits, beside the test error."""

    pairs: int
    mean_abs_difference: float
    low: float | None
    high: float | None
    mae: float
    of: str  # "simulated scans" or "sessions"
    other_site_mean_abs_difference: float | None = None  # simulated scans only
    other_site_low: float | None = None
    other_site_high: float | None = None


def rescan_people(
    model: Model,
    people: People,
    mae: float,
    ages: Sequence[float] | np.ndarray,
    batch: int,
    resamples: int,
) -> Rescan:
    """One person of each of the ages, scanned again at the same site, and at another one."""
    who = [
        (float(age), alternating_sex(number), people.person(PEOPLE // 2 + number))
        for number, age in enumerate(ages)
    ]
    first, again, elsewhere = (
        predicted_ages(model, people.draw([Scan(*one, scan, site) for one in who]), batch)
        for scan, site in ((0, 0), (1, 0), (1, 1))
    )
    same = bootstrap_mean(np.abs(again - first), resamples)
    other = bootstrap_mean(np.abs(elsewhere - first), resamples)
    return Rescan(
        pairs=len(who),
        mean_abs_difference=same.value,
        low=same.low,
        high=same.high,
        mae=mae,
        of="simulated scans",
        other_site_mean_abs_difference=other.value,
        other_site_low=other.low,
        other_site_high=other.high,
    )


def compare_sessions(
    model: Model,
    data: Prepared,
    pairs: Sequence[tuple[int, int]],
    mae: float,
    batch: int,
    resamples: int,
) -> Rescan:
    """Two sessions of a test participant, less the years between; pairs of places, one or more."""
    places = sorted({place for pair in pairs for place in pair})
    over = predicted_ages(model, data.test.images[places], batch) - data.test.labels[places]
    ahead = dict(zip(places, over, strict=True))
    gaps = np.array([abs(ahead[later] - ahead[earlier]) for earlier, later in pairs])
    whose = data.test.people_at(np.array([earlier for earlier, _ in pairs]))
    apart = bootstrap_mean(gaps, resamples, people=whose)
    return Rescan(
        pairs=len(pairs),
        mean_abs_difference=apart.value,
        low=apart.low,
        high=apart.high,
        mae=mae,
        of="sessions",
    )


def session_pairs(
    subjects: Sequence[Mapping[str, str]], years: float = 1.0
) -> list[tuple[int, int]]:
    """Pairs of places: sessions that follow each other in age, of one participant.

    At most ``years`` apart.
    """
    order = sorted(
        range(len(subjects)),
        key=lambda place: (subjects[place]["participant_id"], float(subjects[place]["age"]), place),
    )
    return [
        (earlier, later)
        for earlier, later in pairwise(order)
        if _is_same_person(subjects[earlier], subjects[later])
        and float(subjects[later]["age"]) - float(subjects[earlier]["age"]) <= years
    ]


def _is_same_person(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return one["participant_id"] == other["participant_id"]
