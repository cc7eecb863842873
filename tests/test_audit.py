"""Every line of the audit: it holds where nothing is wrong, and does not where that very thing is."""

import pytest
import torch

from moecore import audit as module
from moecore.attacked import Target
from moecore.attacks.apgd import Apgd
from moecore.attacks.apgd_reference import ApgdReference
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.attacks.square import Square
from moecore.audit import (
    Audit,
    Line,
    apgd_beats_pgd,
    audit,
    chance,
    deterministic,
    more_steps,
    pgd_beats_fgsm,
    robust,
    square_only,
    surrogate,
    transfer,
    zero_gradients,
)
from moecore.evaluation.robust import packed
from tests.attacks.models import Blind, Smooth, vit

PGD = Pgd(steps=5)


def target(model: torch.nn.Module, images: int = 40, side: int = 4) -> Target:
    """Images with the classes that the model gives them, so that it is right on all."""
    pixels = torch.rand(images, 1, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = model(pixels).prediction.argmax(dim=1)
    return Target(model, pixels, labels, batch=16)


def curves(**rows) -> dict:
    """One row per attack, from accuracy, loss, and hits where given."""
    return {name.replace("_dlr", "-dlr"): [{"epsilon": 0.1, **row}] for name, row in rows.items()}


class Noisy(Smooth):
    """A model that draws in evaluation mode too."""

    def forward(self, images):
        output = super().forward(images)
        return output._replace(prediction=output.prediction + 1e-6 * torch.randn_like(output.prediction))


def test_a_model_that_draws_is_not_deterministic():
    assert deterministic(target(Smooth())).holds is True
    line = deterministic(target(Smooth())._replace(model=Noisy()))
    assert line.holds is False and "differ by up to" in line.text


def test_images_without_a_gradient_are_counted():
    line = zero_gradients(target(Smooth()))
    assert line.holds is True and line.text == "0 of 40 images have no gradient at all; 0.00% of all pixels' gradients are 0"
    line = zero_gradients(target(Blind(Smooth())))
    assert line.holds is False and line.text.startswith("40 of 40") and "100.00%" in line.text


def test_one_black_pixel_of_sixteen_is_a_share_and_no_blind_image():
    model = Smooth()
    model.first.data[0], model.router.data[:] = 0, 0
    line = zero_gradients(target(model))
    assert line.holds is True and "6.25%" in line.text


def test_pgd_must_break_no_fewer_than_fgsm():
    both = [Fgsm(), PGD.model_copy(update={"steps": 40})]
    assert pgd_beats_fgsm(curves(fgsm={"accuracy": 0.3}, pgd={"accuracy": 0.3}), both).holds is True
    line = pgd_beats_fgsm(curves(fgsm={"accuracy": 0.3}, pgd={"accuracy": 0.31}), both)
    assert line.holds is False and "31.0% under pgd, 30.0% under fgsm" in line.text
    assert pgd_beats_fgsm(curves(fgsm={"accuracy": 0.3}), [Fgsm()]).holds is None
    assert pgd_beats_fgsm({"fgsm": [{"accuracy": 0.3}], "pgd-dlr": [{"accuracy": 0.9}]}, [Fgsm(), Pgd(objective="dlr")]).holds is None


@pytest.mark.parametrize("best", [Apgd(), ApgdReference()])
def test_apgd_must_reach_pgds_loss(best):
    both = [Pgd(), best]
    assert apgd_beats_pgd(curves(pgd={"loss": 2.0}, **{best.kind: {"loss": 2.0}}), both).holds is True
    assert apgd_beats_pgd(curves(pgd={"loss": 2.0}, **{best.kind: {"loss": 1.9}}), both).holds is False
    assert apgd_beats_pgd(curves(pgd={"loss": 2.0}), [Pgd()]).holds is None
    assert apgd_beats_pgd({"pgd": [{"loss": 2}], "apgd_reference-dlr": [{"loss": 1}]}, [Pgd(), ApgdReference(loss="dlr")]).holds is None


def test_a_hidden_gradient_keeps_accuracy_above_chance():
    assert chance(target(Smooth()), PGD, 0.5).holds is True
    line = chance(target(Blind(Smooth())), PGD, 0.5)
    assert line.holds is False and "accuracy 100.0%" in line.text and "chance is 25.0%" in line.text


def test_an_interval_around_chance_is_chance():
    given = target(Blind(Smooth()), images=4)  # 1 of 4 right would be chance; 2 of 4 (15 % to 85 %) is not above it
    half = given._replace(labels=torch.where(torch.arange(4) < 2, given.labels, (given.labels + 1) % 4))
    assert chance(half, PGD, 0.5).holds is True
    assert chance(given, PGD, 0.5).holds is False, "4 of 4 (51 % to 100 %) is"


def test_too_few_steps_show():
    full, half = torch.ones(40).bool(), torch.arange(40) < 20
    assert more_steps(half, half, 20, 0.1).holds is True and more_steps(half, torch.arange(40) < 19, 20, 0.1).holds is True
    line = more_steps(full, half, 20, 0.1)
    assert line.holds is False and "under pgd of 20 steps, 50.0% of 40" in line.text


def test_a_hard_choice_that_hides_gradients_shows(monkeypatch):
    given = target(vit({"kind": "noisy_top_k", "k": 1}), side=8)
    direct = robust(given, given.attacked(PGD, 0.02))
    assert surrogate(given, PGD, 0.02, direct).holds is True
    assert surrogate(given, PGD, 0.02, torch.ones(40).bool()).holds is False, "a direct attack that broke nothing"
    assert surrogate(target(vit(None), side=8), PGD, 0.02, direct).holds is None
    model = vit({"kind": "noisy_top_k", "k": 1})
    hidden = Blind(model)
    hidden.moe = model.moe  # the true model has no gradient, its surrogate has
    monkeypatch.setattr(module, "softened", lambda found: found.model)
    blind = given._replace(model=hidden)
    line = surrogate(blind, PGD, 0.1, robust(blind, blind.attacked(PGD, 0.1)))
    assert line.holds is False and "40 the direct one" in line.text


def test_a_transferred_attack_shows_a_hidden_gradient():
    given, blind = target(Smooth()), target(Blind(Smooth()))
    assert transfer(given, PGD, 0.1, robust(given, given.attacked(PGD, 0.1)), Smooth(seed=1)).holds is True
    assert transfer(blind, PGD, 0.1, robust(blind, blind.attacked(PGD, 0.1)), Smooth()).holds is False
    line = transfer(given, PGD, 0.1, torch.ones(40).bool(), None)
    assert line.holds is None and "no second model" in line.text


def test_images_that_square_alone_breaks_show():
    def hits(*right):
        return {"hits": packed(torch.tensor(right).bool())}

    attacks = [Fgsm(), Pgd(), Square()]
    assert square_only(curves(fgsm=hits(1, 0, 1), pgd=hits(1, 1, 0), square=hits(1, 0, 0)), attacks, 3).holds is True
    line = square_only(curves(fgsm=hits(1, 0, 1), pgd=hits(1, 1, 0), square=hits(0, 1, 1)), attacks, 3)
    assert line.holds is False and "1 of 3 images (33.3%)" in line.text
    assert square_only(curves(fgsm=hits(1, 1, 1)), [Fgsm()], 3).holds is None
    assert square_only(curves(square=hits(1, 1, 1)), [Square()], 3).holds is None


def test_an_image_wrong_when_clean_is_broken():
    given = target(Smooth())
    wrong = given._replace(labels=(given.labels + 1) % 4)
    assert robust(given, given.clean()).all() and not robust(wrong, wrong.clean()).any()


def test_all_lines_are_there_and_only_the_first_images_are_used(monkeypatch):
    seen = []

    def note(part):
        seen.append((len(part.images), len(part.labels), part.only))
        return Line("deterministic", True, "")

    monkeypatch.setattr(module, "deterministic", note)
    given = target(Smooth())._replace(only=torch.zeros(40, dtype=torch.bool))
    empty = {"pgd": [{"epsilon": 0.1, "accuracy": 0.5, "loss": 1.0, "hits": packed(torch.ones(40).bool())}]}
    lines = audit(given, Audit(images=8, steps=2), 0.1, empty, [Pgd()], None)
    names = ["deterministic", "zero_gradients", "pgd_beats_fgsm", "apgd_beats_pgd", "chance", "more_steps", "surrogate", "transfer", "square_only"]
    assert [line.name for line in lines] == names and seen == [(8, 8, None)]


def test_the_lines_are_printed(capsys):
    module.show([Line("chance", False, "accuracy 90 %"), Line("transfer", None, "not judged")], "Audit of dense")
    said = capsys.readouterr().err
    assert "Audit of dense" in said and "NO" in said and "accuracy 90 %" in said and "not judged" in said
