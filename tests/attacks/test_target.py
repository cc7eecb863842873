"""What surrounds an attack: batches, seeds, precision and the images that are attacked at all."""

import numpy as np
import pytest
import torch
from torch import nn

from moecore.attacks.apgd import Apgd
from moecore.attacks.attack_setup import BFloat16Model, Target, draw_image_indices
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.gradient import image_gradient
from moecore.attacks.pgd import Pgd
from moecore.core.routing_records import ModelOutput
from moecore.nn.predict import coupled_image_count, predict_in_batches, round_batch_to_groups
from tests.attacks.models import CLASSES, SETS, YEARS, Smooth, vit
from tests.attacks.test_attacks import case, named
from tests.attacks.test_attacks import run as attacked

BALANCE = Pgd(steps=2, objective="balance", weight=5, group=4)
ATTACKS = [Fgsm(), Pgd(steps=3, form="strong"), BALANCE, Apgd(steps=5)]


def target(batch: int = 5, images: int = 13, **changes) -> Target:
    pixels, labels = case(images)
    return Target(Smooth(), CLASSES, pixels, labels, batch)._replace(**changes)


@pytest.mark.parametrize("attack", ATTACKS, ids=named)
def test_some_images_are_attacked_as_among_all(attack):
    # of batch 0 one, of batch 1 two, of batch 2 two
    only = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1]).bool()
    whole, some = target().attacked(attack, 0.1), target(only=only).attacked(attack, 0.1)
    if attack.together:  # each image matters to the others of its group
        assert torch.equal(some, whole)
        return
    assert torch.allclose(some[only], whole[only], atol=1e-6)
    assert torch.equal(some[~only], target().clean_images()[~only])
    assert torch.equal(target(only=only & False).attacked(attack, 0.1), target().clean_images())


def test_the_seed_draws_the_starts():
    first, other = (target(seed=seed).attacked(ATTACKS[1], 0.1) for seed in (0, 1))
    assert not torch.equal(first, other)


def test_bytes_are_divided_by_255():
    pixels = (torch.rand(6, 1, 4, 4) * 255).to(torch.uint8)
    given = target(images=6)._replace(images=pixels.numpy())
    for images in (given.attacked(Fgsm(), 0.0), given.clean_images()):
        assert torch.equal(images, pixels.float() / 255)


def test_bf16_rounds_the_attack_and_not_the_score():
    model = vit({"kind": "noisy_top_k", "k": 1}).train()
    images, labels = case(6, side=8)
    full = Target(model, CLASSES, images, labels, 4)
    half = full._replace(precision="bfloat16")
    dtypes = []
    hook = model.blocks[0].attn.register_forward_hook(
        lambda _module, _inputs, output: dtypes.append(output[0].dtype)
    )
    attacked = half.attacked(Pgd(steps=2), 0.05)
    assert set(dtypes) == {torch.bfloat16} and attacked.dtype == torch.float32
    dtypes.clear()
    assert half.predict_images(attacked)[0].dtype == torch.float32
    assert set(dtypes) == {torch.float32} and model.training
    hook.remove()
    assert (attacked - images).abs().max() <= 0.05 + 1e-6 and (attacked != images).any()
    assert torch.equal(half.predict_images(attacked)[0], full.predict_images(attacked)[0])
    with torch.no_grad():
        assert BFloat16Model(model.eval())(images).prediction.dtype == torch.float32


def test_a_subset_is_drawn_once_in_order():
    some = draw_image_indices(20, 8, seed=3)
    assert len(set(some)) == 8 and (np.diff(some) > 0).all()
    assert draw_image_indices(20, 8, 4).tolist() != some.tolist()
    assert len(draw_image_indices(20, 99, 0)) == 20


def test_a_score_is_the_tasks_and_the_clean_image_lies_in_every_ball():
    given = target(images=6)
    right = given.predict_images(given.images)[0].argmax(1) == given.labels
    assert torch.equal(given.scores(given.images), right)
    labels = given.predict_images(given.images)[0].argmax(1)
    attacked = given._replace(labels=labels).attacked(Pgd(steps=5), 0.3)
    broken = given._replace(labels=labels).scores(attacked)
    assert torch.equal(given._replace(labels=labels).worse_scores(attacked), broken)
    assert not given._replace(labels=(labels + 1) % 4).worse_scores(attacked).any()


def test_an_attack_says_itself_what_it_does_not_apply_to():
    dense, sparse = vit(None), vit({"kind": "noisy_top_k", "k": 1})
    moved = Pgd(objective="routing_change")
    assert "no MoE layer whose routing" in moved.does_not_apply(dense, CLASSES)
    assert moved.does_not_apply(sparse, CLASSES) is None
    assert Pgd().does_not_apply(dense, YEARS) is None
    real = "needs classes, and these labels are real numbers"
    assert Apgd(objective="dlr").refuses(YEARS) == f"apgd with objective dlr {real}"
    several = "needs one label per image, and these images have several labels each"
    assert Apgd(objective="dlr").refuses(SETS) == f"apgd with objective dlr {several}"
    assert Apgd(objective="cross_entropy").refuses(SETS) is None


def test_images_that_share_a_capacity_meet_in_whole_groups_whatever_the_batch():
    pixels, labels = case(13)
    pixels = pixels.repeat_interleave(2, -1).repeat_interleave(2, -2)  # 8 × 8
    router = {"kind": "noisy_top_k", "k": 1, "eval_capacity_factor": 0.5, "group_size": 4}
    model = vit(router)
    assert coupled_image_count(model) == 4
    assert [round_batch_to_groups(model, batch) for batch in (1, 4, 7, 9)] == [4, 4, 4, 8]
    said = [predict_in_batches(model, pixels, batch, routing=False)[0] for batch in (1, 7, 100)]
    alone = predict_in_batches(model, pixels[3:4], 1, routing=False)[0]
    assert all(torch.allclose(said[0], other, atol=1e-6) for other in said[1:])
    assert not torch.allclose(said[0][3:4], alone)  # images of a group matter to each other
    attack = Pgd(steps=2)
    found = Target(model, CLASSES, pixels, labels, 5).attacked(attack, 0.1)
    some = Target(model, CLASSES, pixels, labels, 9, only=labels < 0).attacked(attack, 0.1)
    assert torch.allclose(found, some, atol=1e-6)  # so all of them are attacked


def run(attack, model, volumes, labels, epsilon):
    return attacked(attack, model, volumes, labels, epsilon, task=YEARS)


class Regressor(nn.Module):
    """ŷ = w·x + bias over all voxels, whatever the axes."""

    def __init__(self, weight: torch.Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias

    def forward(self, images: torch.Tensor) -> ModelOutput:
        return ModelOutput((images.flatten(1) @ self.weight + self.bias)[:, None])


WEIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, 1.0, -4.0])
VOLUMES = torch.full((2, 1, 2, 2, 2), 0.5)
LABELS = torch.tensor([-10.0, 10.0])  # ŷ is −0.625: too high for the first, too low for the second
STEPS = 0.1 * torch.tensor([1.0, -1.0])[:, None] * WEIGHT.sign()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "attack", [Fgsm(), Pgd(steps=5), Pgd(steps=5, form="strong"), Apgd(steps=10), BALANCE]
)
def test_an_attack_on_volumes_reaches_the_optimum(attack, inside):
    """The first's error grows with w, the second's against it; ``inside`` leaves the background."""
    volumes = VOLUMES.clone()
    if inside:
        volumes[0, 0, 0], volumes[1, 0, :, 1] = 0, 0
        attack = attack.model_copy(update={"inside": True})
    found = run(attack, Regressor(WEIGHT), volumes, LABELS, 0.1)
    assert (found[volumes == 0] == 0).all()
    expected = volumes.flatten(1) + STEPS * (volumes != 0).flatten(1)
    assert torch.allclose(found.flatten(1), expected, atol=1e-6)


def test_the_gradient_is_the_error_s():
    found = image_gradient(Regressor(WEIGHT), YEARS, VOLUMES, LABELS).flatten(1)
    assert torch.allclose(found, torch.stack([WEIGHT, -WEIGHT]))


def test_the_model_never_sees_a_changed_background():
    volumes, seen = VOLUMES.clone(), []
    volumes[:, :, 0] = 0
    model = Regressor(WEIGHT)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    run(Pgd(steps=3, form="strong", inside=True), model, volumes, LABELS, 0.2)
    assert len(seen) == 3
    for images in seen:
        assert (images[:, :, 0] == 0).all() and not torch.equal(images, volumes)


def test_without_inside_the_background_is_attacked():
    volumes = torch.zeros(1, 1, 2, 2, 2)
    found = run(Fgsm(), Regressor(WEIGHT), volumes, torch.tensor([-10.0]), 0.1).flatten()
    assert torch.allclose(found, 0.1 * (WEIGHT > 0).float())
