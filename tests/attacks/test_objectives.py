"""What an attack makes larger, by hand: margins, balance, changed routing. Our APGD against the
authors' code, step by step.
"""

import logging
import math

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack

from moecore.attacks.apgd import apgd_ascent, random_start, step_checkpoints
from moecore.attacks.base import image_generators
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.gradient import (
    Ball,
    ModelGradient,
    dlr_loss,
    make_objective,
    routing_change_surrogate,
    total_balance_loss,
)
from moecore.attacks.pgd import Pgd
from moecore.core.routing_records import ModelOutput, RoutingRecord
from tests.attacks.models import CLASSES, Curved, Smooth, vit
from tests.attacks.test_attacks import case, run


def record(probs: torch.Tensor, load: torch.Tensor | None = None) -> RoutingRecord:
    chosen = torch.zeros_like(probs, dtype=torch.bool)
    return RoutingRecord(probs.log(), probs, probs if load is None else load, chosen, probs)


def test_dlr_by_hand():
    # Right class on top: −(4 − 2) / (4 − 1). Wrong: −(2 − 4) / (4 − 1). The third largest of four
    # counts, not the last.
    logits = torch.tensor([[4.0, 2.0, 1.0, -9.0]] * 2)
    assert dlr_loss(logits, torch.tensor([0, 1])).tolist() == pytest.approx([-2 / 3, 2 / 3])


def test_balance_by_hand():
    # Importance: (2, 0)·… probs sum to (1.5, 0.5): mean 1, variance 1/4. Load sums to (2, 0): mean
    # 1, variance 1. Two layers add up.
    layer = record(
        torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    )
    assert float(total_balance_loss((layer,))) == pytest.approx(1.25)
    assert float(total_balance_loss((layer, layer))) == pytest.approx(2.5)
    assert total_balance_loss(()) == 0


@pytest.mark.parametrize("images", [3, 7])
def test_the_balance_losses_count_as_often_as_there_are_images(images):
    pixels, labels = case(images)
    model = Smooth()
    leaf = pixels.clone().requires_grad_()
    output = model(leaf)
    # a mean, as training has it
    paper = torch.nn.functional.cross_entropy(output.prediction, labels) + 0.3 * total_balance_loss(
        output.routing
    )
    (expected,) = torch.autograd.grad(paper, leaf)
    values, gradient = ModelGradient(
        model, make_objective("balance", 0.3, model, CLASSES, pixels, labels)
    )(pixels)
    assert torch.allclose(gradient, images * expected, rtol=1e-4, atol=1e-6)
    assert float(values.mean()) == pytest.approx(float(paper.detach()), rel=1e-5)
    (plain,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(model(leaf).prediction, labels), leaf
    )
    assert not torch.allclose(gradient, images * plain, rtol=1e-2)


def test_balance_attacks_groups_of_its_own_size():
    images, labels = case(7)
    model, attack = Smooth(), Fgsm(objective="balance", weight=50, group=3)
    whole = run(attack, model, images, labels, 0.1)
    parts = torch.cat(
        [
            run(attack, model, x, y, 0.1)
            for x, y in zip(images.split(3), labels.split(3), strict=True)
        ]
    )
    assert torch.equal(whole, parts) and attack.together == 3 and Fgsm(group=3).together is None
    assert not torch.equal(
        whole, run(attack.model_copy(update={"group": 7}), model, images, labels, 0.1)
    ), "images of a group are coupled"


def test_balance_of_a_dense_model_is_plain_cross_entropy():
    images, labels = case(5, side=8)
    model = vit(None)
    assert torch.equal(
        run(Pgd(steps=3, objective="balance"), model, images, labels, 0.1),
        run(Pgd(steps=3), model, images, labels, 0.1),
    )


def test_routing_change_by_hand():
    # Image 0: token 0 chose experts 0 and 1 with probs 1/2, 1/4: (ln 2 + ln 4)/2; token 1 chose
    # none: 0. Mean over tokens: half of it.
    probs = torch.tensor(
        [[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]], [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]
    )
    chosen = torch.tensor([[[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 1]]]).bool()
    output = ModelOutput(torch.zeros(2, 3), (record(probs),))
    expected = torch.tensor([(math.log(2) + math.log(4)) / 4, (math.log(2) + math.log(4)) / 2])
    assert torch.allclose(routing_change_surrogate(output, [chosen]), expected)
    assert torch.allclose(
        routing_change_surrogate(output._replace(routing=output.routing * 2), [chosen, chosen]),
        2 * expected,
    )
    assert routing_change_surrogate(output._replace(routing=()), []).tolist() == [0, 0]


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
    assert torch.equal(
        run(Pgd(steps=2, objective="routing_change"), vit(router), images, labels, 0.1), images
    )


class Convolution(Smooth):
    """A small CNN; padding and pooling as usual."""

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
    start = random_start(Ball(images, 0.1), image_generators(0, range(12)), "test")
    quiet = logging.getLogger("quiet")
    theirs = APGDAttack(
        lambda x: model(x).prediction,
        n_iter=steps,
        eps=0.1,
        loss=loss,
        device=torch.device("cpu"),
        logger=quiet,
    )
    theirs.init_hyperparam(images)
    best, _, values, _ = theirs.attack_single_run(images, labels, x_init=start)
    ours = apgd_ascent(
        ModelGradient(
            model,
            make_objective(
                {"ce": "cross_entropy"}.get(loss, loss), 0, model, CLASSES, images, labels
            ),
        ),
        Ball(images, 0.1),
        start,
        steps,
    )
    assert torch.allclose(ours.values, values, atol=1e-5) and torch.allclose(
        ours.images, best, atol=1e-5
    )


def test_checkpoints_by_hand():
    # The paper's p: 0, 0.22, then each interval 0.03 shorter than the last but at least 0.06, of N
    # = 100 steps.
    assert list(step_checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    # N = 10: lengths max(int(2.2), 1) = 2, then 1, 1, …
    assert list(step_checkpoints(10)) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert list(step_checkpoints(1)) == [1]


def test_a_halved_step_starts_from_the_best_image():
    # The objective is the sum of −|x − 0.53|, whose top is no multiple of a step away: steps of 2ε
    # jump over it, so they are halved.
    images, asked = torch.full((1, 1, 1, 1), 0.5), []

    def at(pixels):
        asked.append(float(pixels))
        return -(pixels - 0.53).abs().sum(dim=(1, 2, 3)), -(pixels - 0.53).sign()

    found = apgd_ascent(at, Ball(images, 0.1), images, 20)  # checkpoints after 4, 8, …
    first = next(step_checkpoints(20))
    best = max(asked[: first + 1], key=lambda x: -abs(x - 0.53))
    assert found.sizes[first, 0] == pytest.approx(0.1) and found.sizes[
        first - 1, 0
    ] == pytest.approx(0.2)
    direction = 1 if best < 0.53 else -1
    plain = min(max(best + direction * 0.1, 0.4), 0.6)
    expected = best + (plain - best) * 0.75 + (best - asked[first - 1]) * 0.25
    assert asked[first + 1] == pytest.approx(min(max(expected, 0.4), 0.6), abs=1e-6)
    assert float(found.values) == pytest.approx(max(-abs(x - 0.53) for x in asked), abs=1e-6)


def test_the_start_lies_on_the_edge_of_the_ball():
    images = torch.full((5, 1, 4, 4), 0.5)
    start = random_start(Ball(images, 0.1), image_generators(0, range(5)), "test")
    assert torch.allclose(
        (start - images).abs().amax(dim=(1, 2, 3)), torch.full((5,), 0.1), atol=1e-6
    )
