"""Ageing and rescans of simulated people who are in no split; sessions of real people."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy
from torch import Tensor

from moecore.data.prepared import Prepared
from moecore.data.sources.phantom import Phantom
from moecore.data.thread_map import map_in_threads
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_mean

RESCAN_YEARS = 1.0  # two sessions of a participant within this time count as a rescan
PEOPLE = 1000  # reserved for these checks; rescans use the second half


class ScanRequest(NamedTuple):
    """Arguments of one simulated scan."""

    age: float
    sex: str
    person: int  # seed
    scan: int = 0
    site: int = 0


class UnseenPeopleSimulator(NamedTuple):
    """Simulator of a cohort's people who are in no split."""

    source: Phantom

    def person(self, number: int) -> int:
        """Return the seed of person ``number``, below ``PEOPLE``."""
        return self.source.person_seed(self.source.subjects + number)

    def draw(self, scans: Sequence[ScanRequest]) -> np.ndarray:
        """Simulate volumes, float16 (N, 1, D, H, W), as `prepare` would store them."""
        return np.stack(list(map_in_threads(lambda scan: self.source.draw(*scan)[0], scans)))


def alternating_sex(number: int) -> str:
    """Return "F" for even and "M" for odd numbers."""
    return "FM"[number % 2]


def predicted_ages(model: Model, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Return predicted years (N,) fp64 of volumes (N, 1, D, H, W)."""
    prediction, _ = predict_in_batches(model, volumes, batch, routing=False)
    return prediction[:, 0].double().numpy()


def predict_ageing(
    model: Model, people: UnseenPeopleSimulator, subjects: int, ages: Sequence[float], batch: int
) -> np.ndarray:
    """Return predicted ages (S, A) of ``subjects`` simulated people, each at all ``ages``."""
    # Anatomy, scanner and the difference of brain age from age do not change.
    rows = []
    for number in range(subjects):
        person = people.person(number)
        scans = [ScanRequest(age, alternating_sex(number), person) for age in ages]
        rows.append(predicted_ages(model, people.draw(scans), batch))
    return np.stack(rows)


def rising_step_share(predictions: np.ndarray) -> float:
    """Return the share of steps between ages at which predictions (S, A) rise; A ≥ 2."""
    return float((np.diff(predictions, axis=1) > 0).mean())


def rank_correlations(ages: Sequence[float], predictions: np.ndarray) -> list[float]:
    """Return each subject's Spearman correlation of ages (A,), predictions (S, A); 0: constant."""
    age_ranks = scipy.stats.rankdata(ages) - (len(ages) + 1) / 2
    ranks = scipy.stats.rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((age_ranks @ age_ranks) * (ranks * ranks).sum(axis=1))
    return [
        float(total / length) if length else 0.0
        for total, length in zip(ranks @ age_ranks, lengths, strict=True)
    ]


def measure_simulated_rescans(
    model: Model, people: UnseenPeopleSimulator, ages: Sequence[float] | np.ndarray, batch: int
) -> tuple[Interval, Interval]:
    """Return the mean |difference| in years of two scans per person, at one site and at two."""
    scans = [
        ScanRequest(float(age), alternating_sex(number), people.person(PEOPLE // 2 + number))
        for number, age in enumerate(ages)
    ]

    def predict(scan: int, site: int) -> np.ndarray:
        volumes = people.draw([request._replace(scan=scan, site=site) for request in scans])
        return predicted_ages(model, volumes, batch)

    first, again, elsewhere = predict(0, 0), predict(1, 0), predict(1, 1)
    return bootstrap_mean(np.abs(again - first)), bootstrap_mean(np.abs(elsewhere - first))


def compare_sessions(
    model: Model, data: Prepared, pairs: Sequence[tuple[int, int]], batch: int
) -> Interval:
    """Return the mean |change of predicted age − years between|; pairs: of test sessions."""
    indices, inverse = np.unique(pairs, return_inverse=True)
    gaps = predicted_ages(model, data.test.images[indices], batch) - data.test.labels[indices]
    earlier, later = gaps[inverse.reshape(-1, 2)].T
    people = data.test.people_at(np.array(pairs)[:, 0])
    return bootstrap_mean(np.abs(later - earlier), people=people)


def session_pairs(subjects: Sequence[Mapping[str, str]]) -> list[tuple[int, int]]:
    """Return index pairs of a person's consecutive sessions at most RESCAN_YEARS apart."""
    visits = sorted(
        (subject["participant_id"], float(subject["age"]), index)
        for index, subject in enumerate(subjects)
    )
    return [
        (earlier, later)
        for (person, age, earlier), (other, later_age, later) in pairwise(visits)
        if person == other and later_age - age <= RESCAN_YEARS
    ]
