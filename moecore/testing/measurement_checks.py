"""What every measurement promises, as a function that a test calls in one line."""

import copy
import json
from collections.abc import Callable
from typing import Any

import torch

from moecore.core.config import Config
from moecore.measure.base import MeasuredModel, Measurement
from moecore.testing.check_helpers import assert_that, settings_of, small_data, small_vit


class Killed(Exception):
    """Stands for a process that is killed after it has kept a finished piece."""


class Pieces:
    """A ``PartStore`` in memory that is killed after some computed pieces; None: never."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.left: int | None = None

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.kept:
            self.kept[name] = json.dumps(compute())
            if self.left is not None:
                self.left -= 1
            if self.left == 0:
                raise Killed
        return json.loads(self.kept[name])


def check_measurement(
    measurement: Measurement | type[Measurement], subject: MeasuredModel | None = None
) -> Config:
    """Raise AssertionError, in one line, where a measurement breaks a promise; return its result.

    measurement: settings, or their class, whose defaults are then checked.  subject: the model and
    data to measure; None: a small ViT with two MoE layers, and 24 images of 8 × 8 pixels of four
    classes. The result is JSON and back the same, draws no global random number and leaves the
    model as it was. Killed after any piece and resumed it ends alike.
    """
    settings = settings_of(measurement)
    subject = subject or MeasuredModel(small_vit(), small_data())
    reason = settings.applies(subject)
    assert_that(settings, reason is None, f"it applies to what it is checked with ({reason})")
    before = torch.get_rng_state()
    weights = copy.deepcopy(subject.model.state_dict())
    result = settings.collect_result(subject, Pieces())
    again = type(result).model_validate_json(result.model_dump_json())
    assert_that(settings, again == result, "its result is the same behind JSON")
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "it draws no global number")
    state = subject.model.state_dict()
    same = all(torch.equal(state[name], value) for name, value in weights.items())
    assert_that(settings, same and not subject.model.training, "it leaves the model as it was")
    resumed = _measure_over_kills(settings, subject)
    assert_that(settings, resumed == result, "killed after any piece and resumed it ends alike")
    return result


def _measure_over_kills(settings: Measurement, subject: MeasuredModel) -> Config:
    """Return the result of a measurement that is killed after each piece that it keeps."""
    pieces = Pieces()
    while True:
        pieces.left = 1
        try:
            return settings.collect_result(subject, pieces)
        except Killed:
            continue
