import logging
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack
from torch import nn

from moecore.attacks import Fgsm, Pgd, Surrogate
from moecore.attacks import gradient as module
from moecore.attacks.apgd import Apgd, apgd_ascent, random_start, yield_step_size_checks
from moecore.attacks.attack_target import BFloat16Model, Target, draw_image_indices
from moecore.attacks.base import Ball, seed_generator_per_image, uniform_noise_like
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.nn.predict import coupled_image_count, predict_in_batches, round_batch_to_groups
from tests.attacks.models import CLASSES, SETS, YEARS, Curved, Linear, Smooth, vit

GRADIENT = [Fgsm(), Pgd(steps=4), Pgd(steps=4, form="strong"), Apgd(steps=8)]
BALANCE = Pgd(steps=2, objective="balance", weight=5, group=4)
SOFT = Surrogate(steps=3, direct=True)
ATTACKS = [Fgsm(), Pgd(steps=3, form="strong"), BALANCE, Apgd(steps=5), SOFT]
WEIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, 1.0, -4.0])
VOLUMES = torch.full((2, 1, 2, 2, 2), 0.5)
LABELS = torch.tensor([-10.0, 10.0])  # ŷ is −0.625: too high for the first, too low for the second
STEPS = 0.1 * torch.tensor([1.0, -1.0])[:, None] * WEIGHT.sign()


def named(attack) -> str:
    return attack.name


def case(images: int = 5, seed: int = 0, side: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(images, 1, side, side, generator=generator)
    return pixels, torch.randint(0, 2, (images,), generator=generator)


def run(attack, model, images, labels, epsilon, seed=0, task=CLASSES):
    return attack(
        model, task, images, labels, epsilon, seed_generator_per_image(seed, range(len(images)))
    )


@pytest.mark.parametrize("attack", [*GRADIENT, Pgd(), Apgd()], ids=named)
def test_reaches_the_optimum_of_a_linear_model(attack):
    # The loss of class 1 falls in w·x, that of class 0 grows: x ∓ ε·sign(w), clamped to [0, 1].
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, -0.5, 2.0, -4.0])
    images, labels = case(8, side=3)
    direction = torch.where(labels == 1, -1.0, 1.0)[:, None] * weight.sign()
    expected = (images + 0.1 * direction.reshape(images.shape)).clamp(0, 1)
    assert torch.allclose(run(attack, Linear(weight), images, labels, 0.1), expected, atol=1e-6)


@pytest.mark.parametrize("objective", ["cross_entropy", "dlr", "balance", "routing_change"])
def test_pgd_of_one_step_is_fgsm(objective):
    images, labels = case()
    both = Pgd(steps=1, objective=objective), Fgsm(objective=objective)
    pgd, fgsm = (run(attack, Smooth(), images, labels, 0.07) for attack in both)
    assert torch.equal(pgd, fgsm)


@pytest.mark.parametrize(("form", "length"), [("paper", 1.0), ("strong", 2.5)])
def test_pgd_follows_the_formula(form, length):
    images, labels = case(2)
    model, start = Curved(16), 0.0
    if form == "strong":
        start = 0.1 * uniform_noise_like(images, seed_generator_per_image(0, range(2)), "pgd")
    current = (images + start).clamp(0, 1)
    for _ in range(3):
        step = (
            length * 0.1 / 3 * module.compute_loss_gradient(model, CLASSES, current, labels).sign()
        )
        current = (current + step).clamp(images - 0.1, images + 0.1).clamp(0, 1)
    found = run(Pgd(steps=3, form=form), model, images, labels, 0.1)
    torch.testing.assert_close(found, current, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attack", [Pgd(steps=1, form="strong"), Apgd(steps=2)], ids=named)
def test_a_random_start_is_drawn_by_the_generator(attack):
    images, labels = case(6)
    model = Curved(16)
    whole, again, other = (run(attack, model, images, labels, 0.1, seed) for seed in (0, 0, 1))
    assert torch.equal(whole, again) and not torch.equal(whole, other)
    drawn = attack(model, CLASSES, images, labels, 0.1, torch.Generator().manual_seed(0))
    one = torch.Generator().manual_seed(0)
    for part in (slice(4), slice(4, 6)):
        found = attack(model, CLASSES, images[part], labels[part], 0.1, one)
        assert torch.allclose(found, drawn[part], atol=1e-6)
    with pytest.raises(ValueError, match="generator"):
        attack(model, CLASSES, images, labels, 0.1)
    with pytest.raises(ValueError, match="2 generators for 6 images"):
        attack(model, CLASSES, images, labels, 0.1, seed_generator_per_image(0, range(2)))


def test_no_gradient_of_a_parameter_is_computed():
    model, seen = vit({"kind": "noisy_top_k"}), []

    class Spy(torch.nn.Module):
        def parameters(self, recurse=True):
            return model.parameters()

        def forward(self, images):
            seen.append(any(parameter.requires_grad for parameter in model.parameters()))
            return model(images)

    for attack in GRADIENT:
        run(attack, Spy(), *case(side=8), 0.1)
    assert seen and not any(seen)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with module.frozen_parameters(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("attack", [*GRADIENT, Pgd(steps=4, objective="balance")], ids=named)
def test_a_vit_with_experts_is_attacked_as_its_weights_were_never_frozen(attack, monkeypatch):
    images, labels = case(4, side=8)
    model = vit({"kind": "noisy_top_k"})
    found = run(attack, model, images, labels, 0.05)
    assert (found != images).any()
    if attack.kind == "pgd":
        monkeypatch.setattr("moecore.attacks.gradient.frozen_parameters", nullcontext)
        assert torch.equal(found, run(attack, model, images, labels, 0.05))


def record(probs: torch.Tensor, load: torch.Tensor | None = None) -> RoutingRecord:
    chosen = torch.zeros_like(probs, dtype=torch.bool)
    return RoutingRecord(probs.log(), probs, probs if load is None else load, chosen, probs)


def test_dlr_by_hand():
    # Right class on top: −(4 − 2) / (4 − 1). Wrong: −(2 − 4) / (4 − 1). The third largest of four
    # counts, not the last.
    logits = torch.tensor([[4.0, 2.0, 1.0, -9.0]] * 2)
    assert module.dlr_loss(logits, torch.tensor([0, 1])).tolist() == pytest.approx([-2 / 3, 2 / 3])


def test_balance_by_hand():
    # Importance: (2, 0)·… probs sum to (1.5, 0.5): mean 1, variance 1/4. Load sums to (2, 0): mean
    # 1, variance 1. Two layers add up.
    probs, load = torch.tensor([[[1.0, 0]], [[0.5, 0.5]]]), torch.tensor([[[1.0, 0]]] * 2)
    layer = record(probs, load)
    assert float(module.compute_batch_balance_loss((layer,))) == pytest.approx(1.25)
    assert float(module.compute_batch_balance_loss((layer, layer))) == pytest.approx(2.5)
    assert module.compute_batch_balance_loss(()) == 0


@pytest.mark.parametrize("images", [3, 7])
def test_the_balance_losses_count_as_often_as_there_are_images(images):
    pixels, labels = case(images)
    model = Smooth()
    leaf = pixels.clone().requires_grad_()
    output = model(leaf)
    # a mean, as training has it
    loss = torch.nn.functional.cross_entropy(output.prediction, labels)
    paper = loss + 0.3 * module.compute_batch_balance_loss(output.routing)
    (expected,) = torch.autograd.grad(paper, leaf, retain_graph=True)
    goal = module.make_objective("balance", 0.3, model, CLASSES, pixels, labels)
    values, gradient = module.ModelGradient(model, goal)(pixels)
    assert torch.allclose(gradient, images * expected, rtol=1e-4, atol=1e-6)
    assert float(values.mean()) == pytest.approx(float(paper.detach()), rel=1e-5)
    (plain,) = torch.autograd.grad(loss, leaf)
    assert not torch.allclose(gradient, images * plain, rtol=1e-2)


def test_balance_attacks_groups_of_its_own_size():
    images, labels = case(7)
    model, attack = Smooth(), Fgsm(objective="balance", weight=50, group=3)
    whole = run(attack, model, images, labels, 0.1)
    pairs = zip(images.split(3), labels.split(3), strict=True)
    parts = torch.cat([run(attack, model, *pair, 0.1) for pair in pairs])
    assert torch.equal(whole, parts) and attack.together == 3 and Fgsm(group=3).together is None
    coupled = run(attack.model_copy(update={"group": 7}), model, images, labels, 0.1)
    assert not torch.equal(whole, coupled), "images of a group are coupled"


def test_balance_of_a_dense_model_is_plain_cross_entropy():
    images, labels = case(5, side=8)
    both = Pgd(steps=3, objective="balance"), Pgd(steps=3)
    balance, plain = (run(attack, vit(None), images, labels, 0.1) for attack in both)
    assert torch.equal(balance, plain)


def test_routing_change_by_hand():
    # Image 0: token 0 chose experts 0 and 1 with probs 1/2, 1/4: (ln 2 + ln 4)/2; token 1 chose
    # none: 0. Mean over tokens: half of it.
    half = [0.5, 0.25, 0.25]
    probs = torch.tensor([[half, [0.2, 0.3, 0.5]], [half, half]])
    chosen = torch.tensor([[[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 1]]]).bool()
    expected = torch.tensor([math.log(8) / 4, math.log(8) / 2])
    for layers in (0, 1, 2):
        output = ModelOutput(torch.zeros(2, 3), (record(probs),) * layers)
        found = module.routing_change_surrogate(output, [chosen] * layers)
        assert torch.allclose(found, layers * expected)


def test_the_clean_routing_is_computed_once(monkeypatch):
    images, labels = case()
    model, seen = Smooth(), []
    hook = model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    run(Pgd(steps=3, objective="routing_change"), model, images, labels, 0.1)
    hook.remove()
    assert seen == [False, True, True, True]


@pytest.mark.parametrize("router", [{"kind": "hash", "k": 1}, None])
def test_routing_without_a_gradient_leaves_the_images(router):
    images, labels = case(3, side=8)
    attack = Pgd(steps=2, objective="routing_change")
    assert torch.equal(run(attack, vit(router), images, labels, 0.1), images)


class Convolution(Smooth):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.Tanh(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 16, 4),
        )
        for parameter in self.net.parameters():
            parameter.data *= 3

    def forward(self, images):
        output = super().forward(images)
        return output._replace(prediction=self.net(images))


@pytest.mark.parametrize(
    "model", [Smooth(), Convolution(), Curved(16, classes=4)], ids=["smooth", "cnn", "curved"]
)
@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize("steps", [7, 100])
def test_agrees_with_the_reference_from_the_same_start(model, loss, steps):
    images, labels = case(12, seed=4)
    start = random_start(Ball(images, 0.1), seed_generator_per_image(0, range(12)))
    options = {"device": torch.device("cpu"), "logger": logging.getLogger("quiet")}
    theirs = APGDAttack(lambda x: model(x).prediction, n_iter=steps, eps=0.1, loss=loss, **options)
    theirs.init_hyperparam(images)
    best, _, values, _ = theirs.attack_single_run(images, labels, x_init=start)
    objective = {"ce": "cross_entropy"}.get(loss, loss)
    goal = module.make_objective(objective, 0, model, CLASSES, images, labels)
    ours = apgd_ascent(module.ModelGradient(model, goal), Ball(images, 0.1), start, steps)
    assert torch.allclose(ours.values, values, atol=1e-5)
    assert torch.allclose(ours.images, best, atol=1e-5)


def test_checkpoints_by_hand():
    # The paper's p: 0, 0.22, then each interval 0.03 shorter than the last but at least 0.06, of N
    # = 100 steps.
    assert list(yield_step_size_checks(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    # N = 10: lengths max(int(2.2), 1) = 2, then 1, 1, …
    assert list(yield_step_size_checks(10)) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert list(yield_step_size_checks(1)) == [1]


def test_a_halved_step_starts_from_the_best_image():
    # The objective is the sum of −|x − 0.53|, whose top is no multiple of a step away: steps of 2ε
    # jump over it, so they are halved.
    images, asked = torch.full((1, 1, 1, 1), 0.5), []

    def at(pixels):
        asked.append(float(pixels))
        return -(pixels - 0.53).abs().sum(dim=(1, 2, 3)), -(pixels - 0.53).sign()

    found = apgd_ascent(at, Ball(images, 0.1), images, 20)  # checkpoints after 4, 8, …
    first = next(yield_step_size_checks(20))
    best = max(asked[: first + 1], key=lambda x: -abs(x - 0.53))
    assert found.sizes[first - 1 : first + 1, 0].tolist() == pytest.approx([0.2, 0.1])
    direction = 1 if best < 0.53 else -1
    plain = min(max(best + direction * 0.1, 0.4), 0.6)
    expected = best + (plain - best) * 0.75 + (best - asked[first - 1]) * 0.25
    assert asked[first + 1] == pytest.approx(min(max(expected, 0.4), 0.6), abs=1e-6)
    assert float(found.values) == pytest.approx(max(-abs(x - 0.53) for x in asked), abs=1e-6)


def test_the_start_lies_on_the_edge_of_the_ball():
    images = torch.full((5, 1, 4, 4), 0.5)
    start = random_start(Ball(images, 0.1), seed_generator_per_image(0, range(5)))
    assert (start - images).abs().amax(dim=(1, 2, 3)).tolist() == pytest.approx([0.1] * 5, abs=1e-6)


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


def attack_volumes(attack, model, volumes, labels, epsilon):
    return run(attack, model, volumes, labels, epsilon, task=YEARS)


class Regressor(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias

    def forward(self, images: torch.Tensor) -> ModelOutput:
        return ModelOutput((images.flatten(1) @ self.weight + self.bias)[:, None])


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
    found = attack_volumes(attack, Regressor(WEIGHT), volumes, LABELS, 0.1)
    assert (found[volumes == 0] == 0).all()
    expected = volumes.flatten(1) + STEPS * (volumes != 0).flatten(1)
    assert torch.allclose(found.flatten(1), expected, atol=1e-6)


def test_the_gradient_is_the_error_s():
    found = module.compute_loss_gradient(Regressor(WEIGHT), YEARS, VOLUMES, LABELS).flatten(1)
    assert torch.allclose(found, torch.stack([WEIGHT, -WEIGHT]))


def test_the_model_never_sees_a_changed_background():
    volumes, seen = VOLUMES.clone(), []
    volumes[:, :, 0] = 0
    model = Regressor(WEIGHT)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    attack_volumes(Pgd(steps=3, form="strong", inside=True), model, volumes, LABELS, 0.2)
    assert len(seen) == 3
    for images in seen:
        assert (images[:, :, 0] == 0).all() and not torch.equal(images, volumes)


def test_without_inside_the_background_is_attacked():
    volumes = torch.zeros(1, 1, 2, 2, 2)
    found = attack_volumes(Fgsm(), Regressor(WEIGHT), volumes, torch.tensor([-10.0]), 0.1).flatten()
    assert torch.allclose(found, 0.1 * (WEIGHT > 0).float())
