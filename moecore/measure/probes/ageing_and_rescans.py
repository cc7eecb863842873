"""Simulated people who are in no split of a cohort, aged and scanned again; sessions of real ones.

S subjects, A ages; ages and predictions in years.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moecore.data.prepared import Prepared
from moecore.data.sources.phantom import Phantom
from moecore.data.thread_map import map_in_threads
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_mean

RESCAN_YEARS = 1.0  # two sessions of a participant within this time count as a rescan
PEOPLE = 1000  # set aside; those who are scanned again begin at half of them


class ScanRequest(NamedTuple):
    """Which scan of whom is drawn."""

    age: float
    sex: str
    person: int  # their seed
    scan: int = 0
    site: int = 0


class UnseenPeopleSimulator(NamedTuple):
    """People of a cohort's simulation who are in no split."""

    source: Phantom

    def person(self, number: int) -> int:
        """The seed of person ``number``, below ``PEOPLE``."""
        return self.source.person_seed(self.source.subjects + number)

    def draw(self, scans: Sequence[ScanRequest]) -> np.ndarray:
        """Volumes float16 (N, 1, D, H, W), as `prepare` would store them."""
        return np.stack(list(map_in_threads(lambda scan: self.source.draw(*scan)[0], scans)))


def alternating_sex(number: int) -> str:
    """Women and men in turn."""
    return "FM"[number % 2]


def predicted_ages(model: Model, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Years (N,) fp64, of volumes (N, 1, D, H, W)."""
    prediction, _ = predict_in_batches(model, volumes, batch, routing=False)
    return prediction[:, 0].double().numpy()


def predict_ageing(
    model: Model, people: UnseenPeopleSimulator, subjects: int, ages: Sequence[float], batch: int
) -> np.ndarray:
    """Age the same subjects over all ages; anatomy, scanner and lead or lag of brain age stay.

    Returns what the model says, (S, A).
    """
    rows = []
    for number in range(subjects):
        person = people.person(number)
        scans = [ScanRequest(age, alternating_sex(number), person) for age in ages]
        rows.append(predicted_ages(model, people.draw(scans), batch))
    return np.stack(rows)


def rising_step_share(predictions: np.ndarray) -> float:
    """Share of all subjects' steps in which the prediction rises; predictions (S, A), A ≥ 2."""
    return float((np.diff(predictions, axis=1) > 0).mean())


def rank_correlations(ages: Sequence[float], predictions: np.ndarray) -> list[float]:
    """Spearman's correlation of age (A,) and prediction (S, A), per subject; 0 if constant."""
    # Here: scipy.stats takes a second, and all stages import the table of measurements.
    from scipy.stats import rankdata

    wanted = rankdata(ages) - (len(ages) + 1) / 2
    centred_ranks = rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((wanted @ wanted) * (centred_ranks * centred_ranks).sum(axis=1))
    return [
        float(total / length) if length else 0.0
        for total, length in zip(centred_ranks @ wanted, lengths, strict=True)
    ]


def measure_simulated_rescans(
    model: Model,
    people: UnseenPeopleSimulator,
    ages: Sequence[float] | np.ndarray,
    batch: int,
) -> tuple[Interval, Interval]:
    """Return the mean absolute difference of two scans of a person, at one site and at two.

    One person of each of the ages.
    """
    who = [
        (float(age), alternating_sex(number), people.person(PEOPLE // 2 + number))
        for number, age in enumerate(ages)
    ]
    first, again, elsewhere = (
        predicted_ages(model, people.draw([ScanRequest(*one, scan, site) for one in who]), batch)
        for scan, site in ((0, 0), (1, 0), (1, 1))
    )
    return bootstrap_mean(np.abs(again - first)), bootstrap_mean(np.abs(elsewhere - first))


def compare_sessions(
    model: Model, data: Prepared, pairs: Sequence[tuple[int, int]], batch: int
) -> Interval:
    """Return the mean absolute difference of two sessions of a participant of the test split, less
    the years between; pairs of places, one or more.
    """
    places, where = np.unique(pairs, return_inverse=True)
    over = predicted_ages(model, data.test.images[places], batch) - data.test.labels[places]
    earlier, later = over[where.reshape(-1, 2)].T
    whose = data.test.people_at(np.array(pairs)[:, 0])
    return bootstrap_mean(np.abs(later - earlier), people=whose)


def session_pairs(subjects: Sequence[Mapping[str, str]]) -> list[tuple[int, int]]:
    """Pairs of places: consecutive sessions of one person at most RESCAN_YEARS apart."""
    visits = sorted(
        (subject["participant_id"], float(subject["age"]), place)
        for place, subject in enumerate(subjects)
    )
    return [
        (earlier, later)
        for (who, age, earlier), (other, older, later) in pairwise(visits)
        if who == other and older - age <= RESCAN_YEARS
    ]
