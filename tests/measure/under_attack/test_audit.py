"""Every line of the audit: it holds where nothing is wrong, and not where that very thing is."""

import pytest
import torch

from moecore.attacks.apgd import Apgd
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.measure.under_attack import audit as module
from moecore.measure.under_attack.audit import (
    Audit,
    audit,
    chance,
    deterministic,
    more_steps,
    surrogate,
    zero_gradients,
)
from moecore.measure.under_attack.curves import Line
from tests.attacks.models import CLASSES, YEARS, Blind, Smooth, vit
from tests.attacks.test_target import Regressor
from tests.measure.under_attack.cases import WEIGHT, curve, of_classes, of_years

PGD = Pgd(steps=5)
LINES = [
    "deterministic",
    "zero_gradients",
    "pgd_beats_fgsm",
    "apgd_beats_pgd",
    "chance",
    "more_steps",
    "surrogate",
]


class Noisy(Smooth):
    """A model that draws in evaluation mode too."""

    def forward(self, images):
        output = super().forward(images)
        noise = 1e-6 * torch.randn_like(output.prediction)
        return output._replace(prediction=output.prediction + noise)


def test_a_model_that_draws_is_not_deterministic():
    assert deterministic(of_classes(Smooth())).holds is True
    line = deterministic(of_classes(Smooth())._replace(model=Noisy()))
    assert line.holds is False and "differ by up to" in line.text


def test_images_without_a_gradient_are_counted():
    line = zero_gradients(of_classes(Smooth()))
    counted = "0 of 40 images have no gradient at all; 0.00% of all pixels' gradients are 0"
    assert line.holds is True and line.text == counted
    line = zero_gradients(of_classes(Blind(Smooth())))
    assert line.holds is False and line.text.startswith("40 of 40") and "100.00%" in line.text


def test_one_black_pixel_of_sixteen_is_a_share_and_no_blind_image():
    model = Smooth()
    model.first.data[0] = 0
    model.router.data[:] = 0
    line = zero_gradients(of_classes(model))
    assert line.holds is True and "6.25%" in line.text


def test_a_hidden_gradient_keeps_accuracy_above_chance():
    assert chance(of_classes(Smooth()), PGD, 0.5).holds is True
    line = chance(of_classes(Blind(Smooth())), PGD, 0.5)
    assert line.holds is False
    assert "accuracy 100.0%" in line.text and "a guess has 25.0%" in line.text


def test_a_hidden_gradient_keeps_the_error_below_a_constants():
    assert chance(of_years(Regressor(WEIGHT)), PGD, 0.5).holds is True
    line = chance(of_years(Blind(Regressor(WEIGHT))), PGD, 0.5)
    assert line.holds is False and "mean absolute error 0.1" in line.text


def test_an_interval_around_chance_is_chance():
    # 1 of 4 right would be chance; 2 of 4 (15 % to 85 %) is not above it.
    given = of_classes(Blind(Smooth()), images=4)
    wrong = (given.labels + 1) % 4
    half = given._replace(labels=torch.where(torch.arange(4) < 2, given.labels, wrong))
    assert chance(half, PGD, 0.5).holds is True
    assert chance(given, PGD, 0.5).holds is False, "4 of 4 (51 % to 100 %) is"


def test_too_few_steps_show_in_hits():
    full = torch.ones(40).bool()
    half = torch.arange(40) < 20
    assert more_steps(CLASSES, half, half, 20, 0.1).holds is True
    assert more_steps(CLASSES, half, torch.arange(40) < 19, 20, 0.1).holds is True
    line = more_steps(CLASSES, full, half, 20, 0.1)
    assert line.holds is False and "under pgd of 20 steps, 50.0% of 40" in line.text


def test_too_few_steps_show_in_errors():
    wrong = torch.tensor([1.0, 2.0, 3.0] * 10)
    assert more_steps(YEARS, wrong, wrong, 5, 0.1).holds is True
    assert more_steps(YEARS, wrong, wrong + 0.1, 5, 0.1).holds is True
    line = more_steps(YEARS, wrong, wrong + 2, 5, 0.1)
    assert line.holds is False and "under pgd of 5 steps, 4 of 10" in line.text


def test_a_hard_choice_that_hides_gradients_shows(monkeypatch):
    given = of_classes(vit({"kind": "noisy_top_k", "k": 1}), side=8)
    direct = given.worst(given.attacked(PGD, 0.02))
    assert surrogate(given, PGD, 0.02, direct).holds is True
    broken_none = surrogate(given, PGD, 0.02, torch.ones(40).bool())
    assert broken_none.holds is False, "a direct attack that broke nothing"
    assert surrogate(of_classes(vit(None), side=8), PGD, 0.02, direct).holds is None
    model = vit({"kind": "noisy_top_k", "k": 1})
    hidden = Blind(model)
    hidden.moe = model.moe  # the true model has no gradient, its surrogate has
    monkeypatch.setattr(module, "softened", lambda found: found.model)
    blind = given._replace(model=hidden)
    line = surrogate(blind, PGD, 0.1, blind.worst(blind.attacked(PGD, 0.1)))
    assert line.holds is False and "40 the direct one" in line.text


def test_the_surrogate_of_a_real_target(monkeypatch):
    given = of_years(Blind(Regressor(WEIGHT)))
    direct = given.worst(given.attacked(PGD, 0.1))
    assert surrogate(given, PGD, 0.1, direct).holds is None, "no MoE layer"
    given.model.moe = vit({"kind": "noisy_top_k", "k": 1}).moe
    monkeypatch.setattr(module, "softened", lambda model: model.model)
    assert surrogate(given, PGD, 0.1, direct).holds is False
    assert surrogate(given, PGD, 0.1, direct + 99).holds is True


def test_an_error_that_is_larger_by_chance_is_no_sign(monkeypatch):
    given = of_years(Regressor(WEIGHT))
    given.model.moe = vit({"kind": "noisy_top_k", "k": 1}).moe
    monkeypatch.setattr(module, "softened", lambda model: model)
    direct = torch.full((30,), 5.0, dtype=torch.float64)
    # 0.05 more on average, ± 0.17: the interval of the difference holds 0.
    uneven = 5 + torch.tensor([1.0, -0.9], dtype=torch.float64).repeat(15)
    for theirs, holds in ((uneven, True), (direct + 0.05, False), (direct - 0.05, True)):
        monkeypatch.setattr(type(given), "worst", lambda *_, found=theirs: found)
        assert surrogate(given, Pgd(steps=1), 0.1, direct).holds is holds


def test_all_lines_of_classes_are_there_and_only_the_first_images_are_used(monkeypatch):
    seen = []

    def note(part):
        seen.append((len(part.images), len(part.labels), part.only))
        return Line(name="deterministic", holds=True, text="")

    monkeypatch.setattr(module, "deterministic", note)
    given = of_classes(Smooth())._replace(only=torch.zeros(40, dtype=torch.bool))
    curves = {"pgd": curve(0.5, hits=(1,) * 40)}
    lines = audit(given, Audit(images=8, steps=2), 0.1, curves, [Pgd()])
    assert [line.name for line in lines] == [*LINES, "square_only"] and seen == [(8, 8, None)]


def test_all_lines_of_a_real_target_are_there():
    attacks = [Fgsm(), Pgd(steps=5), Apgd(steps=5)]
    curves = {"fgsm": curve(1, 2), "pgd-5": curve(1, 2), "apgd-5": curve(1, 2)}
    settings = Audit(images=12, steps=3)
    lines = audit(of_years(Regressor(WEIGHT)), settings, 0.1, curves, attacks)
    assert [line.name for line in lines] == [*LINES, "larger_epsilon"]
    assert [line.name for line in lines if line.holds is not True] == ["surrogate"]


@pytest.mark.parametrize("given", [of_classes(Smooth()), of_years(Regressor(WEIGHT))])
def test_a_line_is_read_back_as_it_was(given):
    line = deterministic(given)
    assert Line.model_validate_json(line.model_dump_json()) == line
