"""Adversarial training: what the attack does to a step, and that nothing else changes."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from moecore.attacks.pgd import Pgd
from moecore.core.routing_records import Batch
from moecore.core.streams import generator_for
from moecore.data.loader import load_split_for_device
from moecore.data.prepared import Split
from moecore.nn.backbones.vit import Vit
from moecore.nn.predict import eval_mode
from moecore.tasks.multi_label import MultiLabel
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import build_guide
from moecore.training.job import training_batch
from moecore.training.loop import iterate_training
from moecore.training.method import Method
from moecore.training.settings import Adversarial, Training
from tests.attacks.models import Linear
from tests.training.small import (
    CPU,
    IMAGE,
    SETTINGS,
    assert_same_weights,
    images,
    logged_points,
    step_batch,
    stop_training,
    task,
)

PRC = Method(
    router={"kind": "noisy_top_k"},
    experts={"kind": "mlp", "number": 4},
    regularizers=[{"kind": "pairwise_consistency"}],
)


def under(adversarial: Adversarial | None, **changed) -> Training:
    return SETTINGS.model_copy(update={"adversarial": adversarial, **changed})


def test_on_a_linear_model_it_is_the_optimum_by_hand():
    # logits (0, w·x) with w = (2, -1, 0): the loss of label 0 grows with w·x, that of label 1
    # falls. Ten steps of ε/10 along the sign are ε in all: x + ε (1, -1, 0) for label 0, x − ε (1,
    # -1, 0) for label 1, cut to [0, 1].
    model = Linear(torch.tensor([2.0, -1.0, 0.0]))
    x = torch.tensor([[0.5, 0.5, 0.5], [0.95, 0.05, 0.2]]).repeat(2, 1).view(4, 1, 1, 3)
    batch = Batch(x, torch.tensor([0, 0, 1, 1]), torch.zeros(4, 3, 3), views=2)
    found = Adversarial(epsilon=0.1).attacked(model, IMAGE.task, batch, generator_for(0))
    expected = torch.tensor(
        [[0.6, 0.4, 0.5], [1.0, 0.0, 0.2], [0.4, 0.6, 0.5], [0.85, 0.15, 0.2]]
    ).view(4, 1, 1, 3)
    torch.testing.assert_close(found.images, expected)
    assert (
        torch.equal(found.labels, batch.labels)
        and found.affines is batch.affines
        and found.views == 2
    )
    assert model.weight.grad is None and model.weight.requires_grad


def test_a_step_sees_what_a_loop_by_hand_makes():
    made, settings = task(), under(Adversarial(steps=3, epsilon=0.06))
    made.model.train()
    clean, found = training_batch(made, settings, 5, 7), step_batch(made, settings, 5, 7)
    twin = task()
    twin.model.eval()
    now = clean.images.clone()
    for _ in range(3):
        now.requires_grad_(True)
        (slope,) = torch.autograd.grad(
            cross_entropy(twin.model(now).prediction, clean.labels, reduction="sum"), now
        )
        now = (now + 0.02 * slope.sign()).detach()
        now = torch.max(torch.min(now, clean.images + 0.06), clean.images - 0.06).clamp(0, 1)
    torch.testing.assert_close(found.images, now)
    assert (found.images - clean.images).abs().max() > 0.03 and torch.equal(
        found.labels, clean.labels
    )


def test_modes_and_gradients_stay():
    made = task()
    made.model.train()
    made.model.blocks[2].eval()
    made.model.head.weight.grad = torch.full_like(made.model.head.weight, 3.0)
    modes = [module.training for module in made.model.modules()]
    step_batch(made, under(Adversarial(steps=2)), 0, 0)
    assert [module.training for module in made.model.modules()] == modes
    assert all(parameter.requires_grad for parameter in made.model.parameters())
    assert (made.model.head.weight.grad == 3).all() and made.model.cls_token.grad is None


def test_the_model_is_attacked_without_noise_and_without_autocast():
    seen = []
    made = task()
    forward = made.model.forward

    def watched(pixels, *rest):
        seen.append(
            (
                made.model.training,
                made.model.blocks[1].mlp.router.training,
                torch.is_autocast_enabled("cpu"),
                pixels.dtype,
            )
        )
        return forward(pixels, *rest)

    made.model.forward = watched
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step_batch(made, under(Adversarial(steps=4)), 0, 0)
    assert seen == [(False, False, False, torch.float32)] * 4


@pytest.mark.parametrize("form", ["paper", "strong"])
def test_epsilon_0_is_plain_training_bit_for_bit(form):
    plain, attacked = task(), task()
    expected = logged_points(iterate_training(plain, SETTINGS, 0, CPU))
    settings = under(Adversarial(epsilon=0, form=form))
    assert logged_points(iterate_training(attacked, settings, 0, CPU)) == expected
    assert_same_weights(plain, attacked)
    assert logged_points(iterate_training(task(), under(Adversarial(steps=2)), 0, CPU)) != expected


def test_stopped_and_resumed_it_ends_bit_equal(tmp_path):
    settings, whole = under(Adversarial(steps=2, form="strong")), task()
    expected = logged_points(iterate_training(whole, settings, 0, CPU))
    stop_training(task(), settings, tmp_path, 3)
    resumed = task(seed=99)
    torch.rand(17)  # another process has another random state
    again = logged_points(iterate_training(resumed, settings, 0, CPU, Checkpoint(tmp_path)))
    assert again == expected[-len(again) :] and len(again) < len(expected)
    assert_same_weights(resumed, whole)


def test_the_random_start_is_a_function_of_seed_and_step():
    settings, drawn = under(Adversarial(steps=1, form="strong")), Pgd(steps=1, form="strong")
    first, clean = step_batch(task(), settings, 2, 5), training_batch(task(), settings, 2, 5)
    with eval_mode(made := task().model):
        generator = generator_for(2, 5, 3)
        found = drawn(made, IMAGE.task, clean.images, clean.labels, 8 / 255, generator)
    torch.testing.assert_close(first.images, found)


def test_both_views_are_attacked_and_training_goes_on():
    made, settings = task(PRC), under(Adversarial(steps=2), views=type(SETTINGS.views)(shift=1))
    clean, found = training_batch(made, settings, 0, 0), step_batch(made, settings, 0, 0)
    moved = (found.images - clean.images).abs().flatten(1).amax(dim=1)
    assert len(moved) == 16 and (moved > 0.02).all() and torch.equal(found.affines, clean.affines)
    assert list(iterate_training(made, settings, 0, CPU))[-1].step == 12


def test_sets_of_classes_are_attacked_through_their_sigmoids():
    sets = IMAGE.model_copy(update={"task": MultiLabel(classes=("dark", "light"))})
    made = task(image=sets)._replace(
        train=load_split_for_device(
            Split(images(50).images, np.tile(np.array([[1, 1], [0, 1]], np.uint8), (25, 1))), "cpu"
        )
    )
    settings = under(Adversarial(steps=1, epsilon=0.05))
    clean, found = training_batch(made, settings, 0, 0), step_batch(made, settings, 0, 0)
    leaf = clean.images.clone().requires_grad_(True)
    probs = made.model.eval()(leaf).prediction.sigmoid()
    (slope,) = torch.autograd.grad(
        -torch.where(clean.labels == 1, probs, 1 - probs).log().sum(), leaf
    )
    torch.testing.assert_close(found.images, (clean.images + 0.05 * slope.sign()).clamp(0, 1))


def test_a_model_that_asks_its_teacher_is_attacked_together_with_it():
    method = Method(
        router={"kind": "teacher_routed"},
        experts={"kind": "mlp", "number": 4},
        regularizers=[{"kind": "router_kl"}],
    )
    torch.manual_seed(0)
    guide = build_guide(Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE), method, (4,))
    made, settings = task(method, guide=guide), under(Adversarial(steps=2))
    found, clean = step_batch(made, settings, 0, 0), training_batch(made, settings, 0, 0)
    assert not torch.equal(found.images, clean.images) and not guide.teacher.training
    assert list(iterate_training(made, settings, 0, CPU))[-1].step == 12
