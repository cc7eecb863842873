"""Simulated people who are in no split of a cohort, and what a model says of their scans."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moecore.data.sources.phantom import Phantom
from moecore.data.workers import each
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predictions

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
        return np.stack(list(each(lambda scan: self.source.draw(*scan)[0], scans)))


def sex_of(number: int) -> str:
    """Women and men in turn."""
    return "FM"[number % 2]


def predicted_ages(model: Model, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Years (N,) fp64, of volumes (N, 1, D, H, W)."""
    prediction, _ = predictions(model, volumes, batch, routing=False)
    return prediction[:, 0].double().numpy()
