"""Our APGD against the authors' code, step by step."""

import logging

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack
from pyautoattack.square import SquareAttack

from moecore.attacks.apgd import Apgd, checkpoints, climb, random_start
from moecore.attacks.apgd_reference import ApgdReference
from moecore.attacks.base import generators
from moecore.attacks.gradient import SlopeOf
from moecore.attacks.objectives import goal_of
from moecore.attacks.pgd import Pgd
from moecore.attacks.square import Square, _Drawn
from tests.attacks.models import CLASSES, Curved, Smooth
from tests.attacks.test_attacks import case, run


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
    start = random_start(images, 0.1, generators(0, range(12)), "test")
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
    ours = climb(
        SlopeOf(
            model,
            goal_of({"ce": "cross_entropy"}.get(loss, loss), 0, model, CLASSES, images, labels),
        ),
        images,
        start,
        0.1,
        steps,
    )
    assert torch.allclose(ours.values, values, atol=1e-5) and torch.allclose(
        ours.images, best, atol=1e-5
    )


def test_the_part_is_the_reference():
    images, labels = case(12, seed=4)
    model = Smooth()
    for objective, loss in (("cross_entropy", "ce"), ("dlr", "dlr")):
        ours, theirs = Apgd(steps=30, objective=objective), ApgdReference(steps=30, loss=loss)
        assert torch.allclose(
            run(ours, model, images, labels, 0.1),
            run(theirs, model, images, labels, 0.1),
            atol=1e-5,
        )


def test_checkpoints_by_hand():
    # The paper's p: 0, 0.22, then each interval 0.03 shorter than the last but at least 0.06, of N
    # = 100 steps.
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    # N = 10: lengths max(int(2.2), 1) = 2, then 1, 1, …
    assert list(checkpoints(10)) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert list(checkpoints(1)) == [1]


def test_step_sizes_are_two_epsilon_halved_and_change_at_checkpoints_only():
    images, labels = case(16, seed=1)
    model, epsilon = Curved(16), 0.15
    found = climb(
        SlopeOf(model, lambda output: CLASSES.attack_loss(output.prediction, labels)),
        images,
        images,
        epsilon,
        100,
    )
    halvings = torch.log2(2 * epsilon / found.sizes)
    assert torch.equal(halvings, halvings.round()) and (found.sizes[0] == 2 * epsilon).all()
    changed = (found.sizes[1:] != found.sizes[:-1]).any(dim=1).nonzero()[
        :, 0
    ] + 1  # step i + 1 is the first with the new size
    assert set(changed.tolist()) <= set(checkpoints(100)) and len(changed) >= 3
    assert (halvings[1:] - halvings[:-1]).min() >= 0 and (halvings[1:] - halvings[:-1]).max() == 1


def test_a_halved_step_starts_from_the_best_image():
    # The objective is the sum of −|x − 0.53|, whose top is no multiple of a step away: steps of 2ε
    # jump over it, so they are halved.
    images, asked = torch.full((1, 1, 1, 1), 0.5), []

    def at(pixels):
        asked.append(float(pixels))
        return -(pixels - 0.53).abs().sum(dim=(1, 2, 3)), -(pixels - 0.53).sign()

    found = climb(at, images, images, 0.1, 20)  # checkpoints after 4, 8, 11, …; first 4
    first = next(checkpoints(20))
    best = max(asked[: first + 1], key=lambda x: -abs(x - 0.53))
    assert found.sizes[first, 0] == pytest.approx(0.1) and found.sizes[
        first - 1, 0
    ] == pytest.approx(0.2)
    direction = 1 if best < 0.53 else -1
    plain = min(max(best + direction * 0.1, 0.4), 0.6)
    expected = best + (plain - best) * 0.75 + (best - asked[first - 1]) * 0.25
    assert asked[first + 1] == pytest.approx(min(max(expected, 0.4), 0.6), abs=1e-6)
    assert float(found.values) == pytest.approx(max(-abs(x - 0.53) for x in asked), abs=1e-6)


def test_returns_the_best_image_of_all():
    images, labels = case(10, seed=2)
    model = Curved(16)
    at = SlopeOf(model, lambda output: CLASSES.attack_loss(output.prediction, labels))
    found = climb(at, images, images, 0.3, 15)
    assert torch.allclose(at(found.images)[0], found.values, atol=1e-5)
    assert torch.equal(found.values, torch.maximum(found.history.max(dim=0).values, at(images)[0]))


def test_reaches_a_higher_loss_than_pgd_on_average():
    images, labels = case(32, seed=5)
    model = Smooth()
    best, plain = (
        run(attack, model, images, labels, 0.2) for attack in (Apgd(steps=40), Pgd(steps=40))
    )
    assert (
        CLASSES.attack_loss(model(best).prediction, labels).mean()
        > CLASSES.attack_loss(model(plain).prediction, labels).mean()
    )


def test_the_start_lies_on_the_edge_of_the_ball():
    images = torch.full((5, 1, 4, 4), 0.5)
    start = random_start(images, 0.1, generators(0, range(5)), "test")
    assert torch.allclose(
        (start - images).abs().amax(dim=(1, 2, 3)), torch.full((5,), 0.1), atol=1e-6
    )


def test_the_reference_returns_the_best_loss_where_it_breaks_nothing():
    # A wide margin: no image is broken, and the package's own default would give the clean images
    # back.
    images, _ = case(6)
    model = Smooth()
    labels = model(images).prediction.argmax(dim=1)
    found = run(ApgdReference(steps=10), model, images, labels, 1e-4)
    assert torch.equal(model(found).prediction.argmax(dim=1), labels)
    assert (found != images).flatten(1).any(dim=1).all()
    assert (
        CLASSES.attack_loss(model(found).prediction, labels)
        > CLASSES.attack_loss(model(images).prediction, labels)
    ).all()
    assert (
        (run(Square(queries=20), model, images, labels, 1e-4) != images).flatten(1).any(dim=1).all()
    )


def test_square_is_the_package_with_other_random_numbers():
    # With the package's draws taken from one generator in its own order, both give the same bits
    # for a single image.
    images, _ = case(1, side=6)
    model = Curved(36)
    labels = model(images).prediction.argmax(dim=1)
    theirs = SquareAttack(
        lambda x: model(x).prediction,
        n_queries=30,
        eps=0.02,
        device=torch.device("cpu"),
        resc_schedule=False,
    )
    theirs.init_hyperparam(images)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, expected = theirs.attack_single_run(images, labels)
    one = torch.Generator().manual_seed(0)
    ours = _Drawn(
        lambda x: model(x).prediction,
        n_queries=30,
        eps=0.02,
        device=torch.device("cpu"),
        resc_schedule=False,
    )
    ours.starts, ours.squares = [one], one
    ours.init_hyperparam(images)
    _, found = ours.attack_single_run(images, labels)
    assert torch.equal(found, expected) and not torch.equal(found, images)
