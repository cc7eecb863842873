from contextlib import nullcontext

import pytest
import torch

from moecore.attacks.apgd import Apgd
from moecore.attacks.base import image_generators, uniform_noise_like
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.gradient import frozen_parameters, image_gradient
from moecore.attacks.pgd import Pgd
from tests.attacks.models import CLASSES, Curved, Linear, Smooth, vit

GRADIENT = [Fgsm(), Pgd(steps=4), Pgd(steps=4, form="strong"), Apgd(steps=8)]


def named(attack) -> str:
    return (
        "-".join(str(value) for value in attack.model_dump(exclude_defaults=True).values())
        or attack.kind
    )


def case(images: int = 5, seed: int = 0, side: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(images, 1, side, side, generator=generator), torch.randint(
        0, 2, (images,), generator=generator
    )


def run(attack, model, images, labels, epsilon, seed=0, task=CLASSES):
    return attack(model, task, images, labels, epsilon, image_generators(seed, range(len(images))))


@pytest.mark.parametrize(
    "attack",
    [*GRADIENT, Pgd(), Apgd()],
    ids=lambda attack: f"{attack.kind}{named(attack)}",
)
def test_reaches_the_optimum_of_a_linear_model(attack):
    # The loss of class 1 falls in w·x, that of class 0 grows: the best image in the box is x ∓
    # ε·sign(w), clamped to [0, 1].
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, -0.5, 2.0, -4.0])
    images, labels = case(8, side=3)
    direction = torch.where(labels == 1, -1.0, 1.0)[:, None] * weight.sign()
    expected = (images + 0.1 * direction.reshape(images.shape)).clamp(0, 1)
    assert torch.allclose(run(attack, Linear(weight), images, labels, 0.1), expected, atol=1e-6)


@pytest.mark.parametrize("objective", ["cross_entropy", "dlr", "balance", "routing_change"])
def test_pgd_of_one_step_is_fgsm(objective):
    images, labels = case()
    one, fgsm = Pgd(steps=1, objective=objective), Fgsm(objective=objective)
    assert torch.equal(
        run(one, Smooth(), images, labels, 0.07), run(fgsm, Smooth(), images, labels, 0.07)
    )


@pytest.mark.parametrize(("form", "length"), [("paper", 1.0), ("strong", 2.5)])
def test_pgd_follows_the_formula(form, length):
    images, labels = case(2)
    model, start = Curved(16), 0.0
    if form == "strong":
        start = 0.1 * uniform_noise_like(images, image_generators(0, range(2)), "pgd")
    current = (images + start).clamp(0, 1)
    for _ in range(3):
        step = length * 0.1 / 3 * image_gradient(model, CLASSES, current, labels).sign()
        current = (current + step).clamp(images - 0.1, images + 0.1).clamp(0, 1)
    found = run(Pgd(steps=3, form=form), model, images, labels, 0.1)
    torch.testing.assert_close(found, current, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "attack",
    [Pgd(steps=1, form="strong"), Apgd(steps=2)],
    ids=named,
)
def test_a_random_start_is_drawn_by_the_generator(attack):
    images, labels = case(6)
    model = Curved(16)
    whole = run(attack, model, images, labels, 0.1)
    assert torch.equal(whole, run(attack, model, images, labels, 0.1)) and not torch.equal(
        whole, run(attack, model, images, labels, 0.1, seed=1)
    )
    one = torch.Generator().manual_seed(0)
    in_turn = torch.cat(
        [
            attack(model, CLASSES, x, y, 0.1, one)
            for x, y in zip(images.split(4), labels.split(4), strict=True)
        ]
    )
    assert torch.allclose(
        in_turn,
        attack(model, CLASSES, images, labels, 0.1, torch.Generator().manual_seed(0)),
        atol=1e-6,
    )
    with pytest.raises(ValueError, match="generator"):
        attack(model, CLASSES, images, labels, 0.1)
    with pytest.raises(ValueError, match="2 generators for 6 images"):
        attack(model, CLASSES, images, labels, 0.1, image_generators(0, range(2)))


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
    assert (
        seen and not any(seen) and all(parameter.requires_grad for parameter in model.parameters())
    )
    with frozen_parameters(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("attack", [*GRADIENT, Pgd(steps=4, objective="balance")], ids=named)
def test_a_vit_with_experts_is_attacked_as_its_weights_were_never_frozen(attack, monkeypatch):
    images, labels = case(4, side=8)
    model = vit({"kind": "noisy_top_k"})
    found = run(attack, model, images, labels, 0.05)
    assert (found != images).any()
    if attack.kind == "pgd":
        monkeypatch.setattr(
            "moecore.attacks.gradient.frozen_parameters", lambda model: nullcontext()
        )
        assert torch.equal(found, run(attack, model, images, labels, 0.05))
