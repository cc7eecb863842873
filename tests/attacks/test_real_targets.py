"""Attacks on models that answer with a real number: the absolute error grows; volumes; the
background that stays 0.
"""

import pytest
import torch
from torch import nn

from moecore.attacks.apgd import Apgd
from moecore.attacks.apgd_reference import ApgdReference
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.gradient import image_gradient
from moecore.attacks.objectives import goal_of
from moecore.attacks.pgd import Pgd
from moecore.attacks.square import Square
from moecore.core.files import UserError
from moecore.core.records import ModelOutput
from tests.attacks.models import YEARS
from tests.attacks.test_attacks import run as attacked


def run(attack, model, volumes, labels, epsilon):
    return attacked(attack, model, volumes, labels, epsilon, task=YEARS)


class Regressor(nn.Module):
    """ŷ = w·x + bias over all voxels, whatever the axes."""

    def __init__(self, weight: torch.Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias

    def forward(self, images: torch.Tensor) -> ModelOutput:
        return ModelOutput((images.flatten(1) @ self.weight + self.bias)[:, None])


class Wave(nn.Module):
    """A bent function of one voxel, ŷ = sin(9·x₀): one large step overshoots, small ones do not."""

    def forward(self, images: torch.Tensor) -> ModelOutput:
        return ModelOutput(torch.sin(9 * images.flatten(1)[:, :1]))


WEIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, 1.0, -4.0])
VOLUMES = torch.full((2, 1, 2, 2, 2), 0.5)
LABELS = torch.tensor([-10.0, 10.0])  # ŷ is −0.625: too high for the first, too low for the second


@pytest.mark.parametrize(
    "attack",
    [
        Fgsm(),
        Pgd(steps=5),
        Pgd(steps=5, form="strong"),
        Apgd(steps=10),
        Pgd(steps=5, objective="balance"),
    ],
)
def test_an_attack_on_volumes_reaches_the_optimum(attack):
    # ŷ is a line in the voxels: the error of the first grows with w, that of the second against it,
    # each voxel by ε.
    expected = 0.5 + 0.1 * torch.tensor([1.0, -1.0])[:, None] * WEIGHT.sign()
    assert torch.allclose(
        run(attack, Regressor(WEIGHT), VOLUMES, LABELS, 0.1).flatten(1), expected, atol=1e-6
    )


@pytest.mark.parametrize("attack", [Fgsm(), Pgd(steps=4, form="strong"), Apgd(steps=4)])
def test_epsilon_0_and_the_bounds_of_pixels(attack):
    edge = VOLUMES.clone()
    edge[0], edge[1] = 0.98, 0.01
    assert torch.equal(run(attack, Regressor(WEIGHT), edge, LABELS, 0.0), edge)
    found = run(attack, Regressor(WEIGHT), edge, LABELS, 0.1)
    assert found.min() >= 0 and found.max() <= 1 and (found - edge).abs().max() <= 0.1 + 1e-6


def test_the_gradient_is_the_error_s():
    found = image_gradient(Regressor(WEIGHT), YEARS, VOLUMES, LABELS).flatten(1)
    assert torch.allclose(found, torch.stack([WEIGHT, -WEIGHT]))


def test_small_steps_reach_more_than_one_large_one():
    # sin(9x) from x = 0.4 (ŷ = −0.44), label 0: the error is largest (1) at 9x = 3π/2, x = 0.524;
    # one step of 0.3 goes to 0.7, |sin 6.3| = 0.02.
    volumes, labels = torch.full((1, 1, 2, 2, 2), 0.4), torch.zeros(1)
    once, often, best = (
        YEARS.attack_loss(Wave()(run(a, Wave(), volumes, labels, 0.3)).prediction, labels)
        for a in (Fgsm(), Pgd(steps=40), Apgd(steps=40))
    )
    assert (
        float(once) == pytest.approx(0.0168, abs=1e-3)
        and float(best) == pytest.approx(1, abs=1e-3)
        and float(often) > 0.9
    )


@pytest.mark.parametrize(
    "attack",
    [Fgsm(inside=True), Pgd(steps=5, form="strong", inside=True), Apgd(steps=10, inside=True)],
)
def test_inside_leaves_the_background(attack):
    volumes = VOLUMES.clone()
    volumes[0, 0, 0], volumes[1, 0, :, 1] = 0, 0
    there = (volumes != 0).flatten(1)
    found = run(attack, Regressor(WEIGHT), volumes, LABELS, 0.1)
    assert (found[volumes == 0] == 0).all()
    expected = volumes.flatten(1) + 0.1 * torch.tensor([1.0, -1.0])[:, None] * WEIGHT.sign() * there
    assert torch.allclose(found.flatten(1), expected, atol=1e-6)


def test_the_model_never_sees_a_changed_background():
    volumes, seen = VOLUMES.clone(), []
    volumes[:, :, 0] = 0
    model = Regressor(WEIGHT)
    model.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].detach().clone())
    )
    run(Pgd(steps=3, form="strong", inside=True), model, volumes, LABELS, 0.2)
    assert len(seen) == 3 and all(
        (images[:, :, 0] == 0).all() and not torch.equal(images, volumes) for images in seen
    )


def test_without_inside_the_background_is_attacked():
    volumes = torch.zeros(1, 1, 2, 2, 2)
    found = run(Fgsm(), Regressor(WEIGHT), volumes, torch.tensor([-10.0]), 0.1).flatten()
    assert torch.allclose(found, 0.1 * (WEIGHT > 0).float())


@pytest.mark.parametrize("objective", ["dlr", "cross_entropy"])
def test_objectives_of_classes_refuse_real_labels(objective):
    with pytest.raises(
        UserError,
        match=f"objective {objective} needs classes, and these labels are real numbers; choose",
    ):
        goal_of(objective, 0.0, Regressor(WEIGHT), YEARS, VOLUMES, LABELS)


@pytest.mark.parametrize("attack", [ApgdReference(steps=2), Square(queries=2)])
def test_the_reference_package_refuses_real_labels(attack):
    with pytest.raises(
        UserError, match=f"{attack.kind} needs classes, and these labels are real numbers"
    ):
        run(attack, Regressor(WEIGHT), VOLUMES, LABELS, 0.1)
