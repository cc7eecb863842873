"""Checks of measurements, calibrators and attacks."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moecore.attacks.attack_setup import Target
from moecore.attacks.base import Attack
from moecore.core.config import Config
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.calibrators.base import Calibrator
from moecore.tasks.base import Task
from moecore.tasks.regression import Regression
from moecore.testing.check_helpers import (
    CLASSES,
    IMAGE,
    SIDE,
    assert_that,
    seeded_randn,
    settings_of,
    small_data,
    small_vit,
)


class Killed(Exception):
    """Simulates a process that is killed after it has stored a piece."""


class Pieces:
    """A ``PartStore`` in memory, which is killed after ``until_kill`` computed pieces."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.until_kill: int | None = None  # None: never killed

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.stored:
            self.stored[name] = json.dumps(compute())
            if self.until_kill is not None:
                self.until_kill -= 1
            if self.until_kill == 0:
                raise Killed
        return json.loads(self.stored[name])


def check_measurement(
    measurement: Measurement | type[Measurement], subject: MeasuredModel | None = None
) -> Config:
    """Check that a measurement keeps the promises of measurements, and return its result.

    The result survives JSON. The measurement draws no global random number and does not change the
    model. If it is killed after any piece and resumed, it has the same result.

    Args:
        measurement: settings, or their class, whose defaults are checked.
        subject: the model and data to measure; None: a small ViT with two MoE layers, and 24 images
            of 8 × 8 pixels of four classes.

    Returns:
        The result of the measurement.

    Raises:
        AssertionError: a promise is broken; one line with the measurement's name.
    """
    settings = settings_of(measurement)
    subject = subject or MeasuredModel(small_vit(), small_data())
    reason = settings.applies(subject)
    assert_that(settings, reason is None, f"it applies to what it is checked with ({reason})")
    before = torch.get_rng_state()
    weights = copy.deepcopy(subject.model.state_dict())
    result = settings.collect_result(subject, Pieces())
    decoded = type(result).model_validate_json(result.model_dump_json())
    assert_that(settings, decoded == result, "its result is the same behind JSON")
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "it draws no global number")
    state = subject.model.state_dict()
    same = all(torch.equal(state[name], value) for name, value in weights.items())
    assert_that(settings, same and not subject.model.training, "it leaves the model as it was")
    resumed = _measure_over_kills(settings, subject)
    promise = "killed after any piece and resumed it has the same result"
    assert_that(settings, resumed == result, promise)
    return result


def _measure_over_kills(settings: Measurement, subject: MeasuredModel) -> Config:
    """Return the result of a measurement that is killed after each stored piece, and resumed."""
    pieces = Pieces()
    while True:
        pieces.until_kill = 1
        try:
            return settings.collect_result(subject, pieces)
        except Killed:
            continue


def check_calibrator(calibrator: Calibrator | type[Calibrator]) -> None:
    """Check that a calibrator keeps the promises of calibrators.

    It is fitted to overconfident logits (N, K), or to numbers (N,) in two groups that are biased
    towards their mean. The fit draws no random number, is the same twice and after JSON, and has
    the calibrator's kind. Calibrated predictions are finite, keep their shape, and do not depend on
    other predictions.

    Args:
        calibrator: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the calibrator's name.
    """
    settings = settings_of(calibrator)
    predictions, labels = _logits() if settings.predicts == "classes" else _numbers()
    groups = ["F", "M"] * (len(labels) // 2) if settings.predicts == "numbers" else None
    before = torch.get_rng_state()
    fitted = settings.fit(predictions, labels, groups)
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "its fit draws no number")
    fits = isinstance(fitted, settings.fitted) and fitted.kind == settings.kind
    assert_that(settings, fits, "fit returns what fitted says, of its kind")
    repeated = settings.fit(predictions, labels, groups)
    assert_that(settings, repeated == fitted, "it fits the same twice")
    read = settings.fitted.model_validate_json(fitted.model_dump_json())
    assert_that(settings, read == fitted, "what is fitted is the same behind JSON")
    for chosen_groups in [None] if groups is None else [None, groups]:
        ages = {"ages": labels} if fitted.uses_age else {}
        values = fitted.apply(predictions, chosen_groups, **ages)
        fits = values.shape == predictions.shape and np.isfinite(np.asarray(values)).all()
        assert_that(settings, fits, "what it calibrates is finite and keeps its shape")
        first = {name: all_ages[1:2] for name, all_ages in ages.items()}
        alone = fitted.apply(predictions[1:2], chosen_groups and chosen_groups[1:2], **first)
        same = np.allclose(np.asarray(alone), np.asarray(values[1:2]))
        assert_that(settings, same, "a prediction is calibrated the same in any batch")
    if groups:
        assert_that(settings, len(fitted.used(groups)) == len(groups), "used has one for each")


def _logits() -> tuple[Any, Any]:
    logits = 6 * seeded_randn(300, 4)
    return logits, (logits / 3 + seeded_randn(300, 4, seed=2)).argmax(dim=1)


def _numbers() -> tuple[Any, Any]:
    ages = np.linspace(20, 90, 60)
    return 11 + 0.8 * ages + 3 * seeded_randn(60).double().numpy(), ages


EPSILON = 0.1
YEARS = Regression(target="age", unit="years")


def check_attack(attack: Attack | type[Attack]) -> None:
    """Check that an attack keeps the promises of attacks.

    Attacked images stay in [0, 1] and within ε of the clean images, and ε = 0 changes no bit. The
    same seeds give the same images in any batch. The model and the global random state do not
    change. An attack that climbs the task's loss raises it.

    Args:
        attack: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the attack's name.
    """
    settings = settings_of(attack)
    task = CLASSES if settings.refuses(CLASSES) is None else YEARS
    assert_that(
        settings, settings.refuses(task) is None, "it attacks a classification or a regression"
    )
    target = small_target(task)
    target.model.head.requires_grad_(False)
    random_state = torch.get_rng_state()
    clean = target.clean_images()
    before = copy.deepcopy(target.model.state_dict())
    attacked = target.attacked(settings, EPSILON)
    _check_images(settings, clean, attacked)
    assert_that(
        settings, torch.equal(target.attacked(settings, 0.0), clean), "ε = 0 changes no bit"
    )
    promise = "the same seeds give the same images in batches of another size"
    for batch in (1, len(clean)):
        repeated = target._replace(batch=batch).attacked(settings, EPSILON)
        assert_that(settings, torch.allclose(repeated, attacked, atol=1e-5), promise)
    assert_that(
        settings, torch.equal(random_state, torch.get_rng_state()), "it draws no global number"
    )
    _check_model_is_unchanged(settings, target.model, before)
    if settings.climbs_task:
        losses = [_task_loss(target, images) for images in (clean, attacked)]
        assert_that(settings, losses[1] > losses[0], "it raises the mean loss of the task")


def small_target(task: Task) -> Target:
    """Return a small model of the task with eight images, one of them black and one white."""
    images = seeded_randn(8, 1, SIDE, SIDE).sigmoid()
    images[0] = 0.0
    images[1] = 1.0
    labels = torch.arange(8) % 4
    if task is YEARS:
        labels = labels.float()[:, None]
    model = small_vit(IMAGE.model_copy(update={"task": task}))
    return Target(model, task, images, labels, batch=3)


def _check_images(attack: Any, clean: Tensor, attacked: Tensor) -> None:
    fits = attacked.shape == clean.shape and attacked.dtype == torch.float32
    assert_that(attack, fits, "it gives fp32 images of the same shape")
    assert_that(attack, not attacked.requires_grad, "its images are detached")
    near = (attacked - clean).abs().max() <= EPSILON + 1e-6
    assert_that(attack, near, "no pixel moves by more than ε")
    inside = attacked.min() >= 0 and attacked.max() <= 1
    assert_that(attack, inside, "pixels stay in [0, 1]")


def _check_model_is_unchanged(attack: Any, model: nn.Module, before: dict[str, Tensor]) -> None:
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    clean = all(weight.grad is None for weight in model.parameters())
    unchanged = same and clean and frozen == ["head.weight", "head.bias"]
    assert_that(attack, unchanged, "it leaves the model as it was, without gradients")


def _task_loss(target: Target, images: Tensor) -> float:
    with torch.no_grad():
        prediction = target.model(images).prediction
    return float(target.task.loss(prediction, target.labels, 0.0))
