"""How far a model's predictions for two scans of the same person are apart, in years."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure.probes.people import PEOPLE, People, Scan, predicted_ages, sex_of
from moecore.nn.backbones.model import Model
from moecore.statistics.intervals import bootstrap_mean


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


def scanned_again(
    model: Model,
    people: People,
    mae: float,
    ages: Sequence[float] | np.ndarray,
    batch: int,
    resamples: int,
) -> Rescan:
    """One person of each of the ages, scanned again at the same site, and at another one."""
    who = [
        (float(age), sex_of(number), people.person(PEOPLE // 2 + number))
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


def sessions_again(
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


def repeated(subjects: Sequence[Mapping[str, str]], years: float = 1.0) -> list[tuple[int, int]]:
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
        if _same(subjects[earlier], subjects[later])
        and float(subjects[later]["age"]) - float(subjects[earlier]["age"]) <= years
    ]


def _same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return one["participant_id"] == other["participant_id"]
