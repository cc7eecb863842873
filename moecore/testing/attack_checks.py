"""What every attack promises, as a function that a test calls in one line."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from moecore.attacks.attack_setup import Target
from moecore.attacks.base import Attack
from moecore.tasks.base import Task
from moecore.tasks.regression import Regression
from moecore.testing.check_helpers import (
    CLASSES,
    IMAGE,
    SIDE,
    assert_that,
    seeded_randn,
    settings_of,
    small_vit,
)

EPSILON = 0.1
YEARS = Regression(target="age", unit="years")


def check_attack(attack: Attack | type[Attack]) -> None:
    """Raise AssertionError, in one line, where an attack breaks a promise of attacks.

    attack: settings, or their class, whose defaults are then checked. Images stay in [0, 1] and
    within ε of the clean ones, and have all their bits for ε = 0; the same seeds give the same
    images whatever the batch. The model is left as it was, and so are global draws. An attack that
    climbs the task's loss raises it.
    """
    settings = settings_of(attack)
    task = CLASSES if settings.refuses(CLASSES) is None else YEARS
    assert_that(
        settings, settings.refuses(task) is None, "it attacks a classification or a regression"
    )
    target = small_target(task)
    target.model.head.requires_grad_(False)
    random = torch.get_rng_state()
    clean = target.clean_images()
    before = copy.deepcopy(target.model.state_dict())
    attacked = target.attacked(settings, EPSILON)
    _check_images(settings, clean, attacked)
    assert_that(
        settings, torch.equal(target.attacked(settings, 0.0), clean), "ε = 0 changes no bit"
    )
    promise = "the same seeds give the same images in batches of another size"
    for batch in (1, len(clean)):
        again = target._replace(batch=batch).attacked(settings, EPSILON)
        assert_that(settings, torch.allclose(again, attacked, atol=1e-5), promise)
    assert_that(settings, torch.equal(random, torch.get_rng_state()), "it draws no global number")
    _check_model_is_unchanged(settings, target.model, before)
    if settings.climbs_task:
        losses = [_task_loss(target, images) for images in (clean, attacked)]
        assert_that(settings, losses[1] > losses[0], "it raises the mean loss of the task")


def small_target(task: Task) -> Target:
    """Eight images, of which one is black and one white, and a small model of this task."""
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
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    clean = all(one.grad is None for one in model.parameters())
    alike = same and clean and frozen == ["head.weight", "head.bias"]
    assert_that(attack, alike, "it leaves the model as it was, without gradients")


def _task_loss(target: Target, images: Tensor) -> float:
    with torch.no_grad():
        prediction = target.model(images).prediction
    return float(target.task.loss(prediction, target.labels, 0.0))
