import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moecore.attacks import Attack
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.gradient import image_gradient
from moecore.attacks.pgd import Pgd
from moecore.files import StageError
from tests.attacks.models import Curved, Linear

ATTACKS = [Fgsm(), Pgd(steps=4), Pgd(steps=4, form="strong")]
IDS = ["fgsm", "pgd", "pgd-strong"]


def case(images: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(images, 1, 3, 3, generator=generator), torch.randint(0, 2, (images,), generator=generator)


def run(attack, model, images, labels, epsilon, seed=0):
    return attack(model, images, labels, epsilon, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attack", [*ATTACKS, Pgd()], ids=[*IDS, "pgd-40"])
def test_reaches_the_optimum_of_a_linear_model(attack):
    # The loss of class 1 falls in w·x, that of class 0 grows: the best image in the box is x ∓ ε·sign(w), clamped to [0, 1].
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, -0.5, 2.0, -4.0])
    images, labels = case(8)
    direction = torch.where(labels == 1, -1.0, 1.0)[:, None] * weight.sign()
    expected = (images + 0.1 * direction.reshape(images.shape)).clamp(0, 1)
    assert torch.allclose(run(attack, Linear(weight), images, labels, 0.1), expected, atol=1e-6)


@pytest.mark.parametrize("attack", ATTACKS, ids=IDS)
@settings(max_examples=20, deadline=None)
@given(epsilon=st.floats(0, 1), seed=st.integers(0, 1000))
def test_stays_in_the_ball_and_in_the_pixel_range(attack, epsilon, seed):
    images, labels = case(3, seed)
    images[0] = 0.0
    images[1] = 1.0
    found = run(attack, Curved(9), images, labels, epsilon, seed)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert (found - images).abs().max() <= epsilon + 1e-6
    assert found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize("attack", ATTACKS, ids=IDS)
def test_epsilon_zero_changes_no_bit(attack):
    images, labels = case()
    found = run(attack, Curved(9), images, labels, 0.0)
    assert torch.equal(found.view(torch.int32), images.view(torch.int32)) and found.data_ptr() != images.data_ptr()


def test_pgd_of_one_step_is_fgsm():
    images, labels = case()
    assert torch.equal(run(Pgd(steps=1), Curved(9), images, labels, 0.07), run(Fgsm(), Curved(9), images, labels, 0.07))


def test_pgd_takes_its_gradient_at_the_current_iterate():
    # With all gradients at the clean image, forty steps of ε/40 would add up to the single step of FGSM.
    images, labels = case(16)
    model = Curved(9)
    many, one = (run(attack, model, images, labels, 0.2) for attack in (Pgd(steps=10), Fgsm()))
    assert (many - one).abs().max() > 0.01


def test_pgd_in_its_paper_form_follows_the_formula():
    images, labels = case(2)
    model, current = Curved(9), images
    for _ in range(3):
        current = (current + 0.1 / 3 * image_gradient(model, current, labels).sign()).clamp(images - 0.1, images + 0.1).clamp(0, 1)
    assert torch.equal(run(Pgd(steps=3), model, images, labels, 0.1), current)


def test_strong_pgd_starts_anew_per_seed_and_alike_for_any_batch():
    images, labels = case(6)
    model, attack = Curved(9), Pgd(steps=1, form="strong")
    whole = run(attack, model, images, labels, 0.1)
    generator = torch.Generator().manual_seed(0)
    parts = [attack(model, x, y, 0.1, generator) for x, y in zip(images.split(4), labels.split(4), strict=True)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, run(attack, model, images, labels, 0.1, seed=1))
    with pytest.raises(ValueError, match="generator"):
        attack(model, images, labels, 0.1)


@pytest.mark.parametrize("attack", ATTACKS, ids=IDS)
def test_leaves_the_model_and_the_images_alone(attack):
    images, labels = case()
    kept, model = images.clone(), Curved(9).train()
    model.second.requires_grad_(False)
    state = torch.get_rng_state()
    with torch.no_grad():
        run(attack, model, images, labels, 0.1)
    assert model.training and model.dropout.training
    assert model.first.grad is None and model.first.requires_grad and not model.second.requires_grad
    assert torch.equal(images, kept) and torch.equal(state, torch.get_rng_state())


def test_the_gradient_of_an_image_does_not_depend_on_its_batch():
    images, labels = case(6)
    model = Curved(9)
    whole = image_gradient(model, images, labels)
    alone = torch.cat([image_gradient(model, x, y) for x, y in zip(images.split(1), labels.split(1), strict=True)])
    assert torch.allclose(whole, alone, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_fp32_under_autocast():
    images, labels = case()
    with torch.autocast("cpu", torch.bfloat16):
        found = image_gradient(Linear(torch.randn(9)), images, labels)
    assert found.dtype == torch.float32


def test_refuses_what_makes_no_sense():
    images, labels = case()
    with pytest.raises(StageError, match="not finite"):
        run(Fgsm(), Linear(torch.full((9,), float("nan"))), images, labels, 0.1)
    for bad, epsilon in ((images * 255, 0.1), (images.to(torch.uint8), 0.1), (images, -0.1), (images, float("nan"))):
        with pytest.raises(ValueError, match="attack"):
            run(Fgsm(), Linear(torch.ones(9)), bad, labels, epsilon)


def test_the_union_picks_by_kind_and_refuses_the_rest():
    union = TypeAdapter(Attack)
    assert union.validate_python({"kind": "pgd", "steps": 10, "form": "strong"}) == Pgd(steps=10, form="strong")
    for bad in ({"kind": "apgd_"}, {"kind": "fgsm", "steps": 3}, {"kind": "pgd", "steps": 0}):
        with pytest.raises(ValidationError):
            union.validate_python(bad)
