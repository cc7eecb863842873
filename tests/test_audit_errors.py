"""Every line of the audit of a real target: it holds where nothing is wrong, and does not where that very thing is."""

import pytest
import torch

from moecore import audit_errors as module
from moecore.attacked import Target
from moecore.attacks.apgd import Apgd
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.audit import Audit
from moecore.audit_errors import apgd_beats_pgd, audit_errors, larger_epsilon, median_error, more_steps, no_better_than_a_constant, pgd_beats_fgsm, surrogate, transfer, worst_error
from tests.attacks.models import Blind, vit
from tests.attacks.test_real_targets import Regressor

WEIGHT = torch.linspace(-3, 4, 8)


def target(model: torch.nn.Module, images: int = 30) -> Target:
    """Volumes of 2³ voxels whose labels are what the plain model says, give or take a tenth, so that it is nearly right on all."""
    pixels = torch.rand(images, 1, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    labels = Regressor(WEIGHT)(pixels).prediction[:, 0].detach() + 0.1 * (-1) ** torch.arange(images)
    return Target(model, pixels, labels, batch=8)


def curve(*errors: float) -> list[dict]:
    return [{"epsilon": 0.1 * (place + 1), "mae": error, "loss": error} for place, error in enumerate(errors)]


def test_the_worst_error_is_of_the_clean_or_the_attacked_image():
    given = target(Regressor(WEIGHT), 2)  # ŷ − y is −0.1, then 0.1; a voxel of weight −3 that falls by 0.02 adds 0.06 to ŷ
    moved = given.images.clone()
    moved[:, 0, 0, 0, 0] -= 0.02
    assert worst_error(given, moved).tolist() == pytest.approx([0.1, 0.16], abs=1e-5)


def test_pgd_must_reach_fgsms_error():
    both = [Fgsm(), Pgd()]
    assert pgd_beats_fgsm({"fgsm": curve(2, 3), "pgd": curve(1, 3)}, both).holds is True
    line = pgd_beats_fgsm({"fgsm": curve(2, 3), "pgd": curve(2, 2.9)}, both)
    assert line.holds is False and "mean error 2.9 under pgd, 3 under fgsm, at ε = 0.2" in line.text
    assert pgd_beats_fgsm({"fgsm": curve(2)}, [Fgsm()]).holds is None
    assert pgd_beats_fgsm({"fgsm": curve(2), "pgd-routing_change": curve(1)}, [Fgsm(), Pgd(objective="routing_change")]).holds is None


def test_apgd_must_reach_pgds_error():
    both = [Pgd(inside=True), Apgd()]
    assert apgd_beats_pgd({"pgd-inside": curve(2), "apgd": curve(2)}, both).holds is True
    assert apgd_beats_pgd({"pgd-inside": curve(2), "apgd": curve(1.9)}, both).holds is False
    assert apgd_beats_pgd({"apgd": curve(2)}, [Apgd()]).holds is None


def test_a_larger_ball_never_helps():
    assert larger_epsilon({"pgd": curve(1, 1, 2), "fgsm": curve(3, 2)}, [Pgd(), Fgsm()]).holds is True, "fgsm may overshoot"
    line = larger_epsilon({"pgd": curve(1, 2), "apgd": curve(1, 2, 1.9)}, [Pgd(), Apgd()])
    assert line.holds is False and line.text.endswith("under apgd")
    assert larger_epsilon({"fgsm": curve(1)}, [Fgsm()]).holds is None


def test_the_median_of_the_labels():
    assert median_error(torch.tensor([20.0, 30.0, 70.0])) == pytest.approx(50 / 3)  # 10, 0 and 40
    assert median_error(torch.tensor([20.0, 40.0])) == 10


def test_a_hidden_gradient_keeps_the_error_below_a_constants():
    assert no_better_than_a_constant(target(Regressor(WEIGHT)), Pgd(steps=5), 0.5).holds is True
    line = no_better_than_a_constant(target(Blind(Regressor(WEIGHT))), Pgd(steps=5), 0.5)
    assert line.holds is False and line.name == "chance" and "mean error 0.1" in line.text


def test_too_few_steps_show():
    wrong = torch.tensor([1.0, 2.0, 3.0] * 10)
    assert more_steps(wrong, wrong, 5, 0.1).holds is True and more_steps(wrong, wrong + 0.1, 5, 0.1).holds is True
    line = more_steps(wrong, wrong + 2, 5, 0.1)
    assert line.holds is False and "under pgd of 5 steps, 4 of 10" in line.text


def test_a_transferred_attack_shows_a_hidden_gradient():
    plain, blind, attack = target(Regressor(WEIGHT)), target(Blind(Regressor(WEIGHT))), Pgd(steps=5)
    direct = [worst_error(given, given.attacked(attack, 0.1)) for given in (plain, blind)]
    assert transfer(plain, attack, 0.1, direct[0], Blind(Regressor(WEIGHT))).holds is True
    assert transfer(blind, attack, 0.1, direct[1], Regressor(WEIGHT)).holds is False
    assert transfer(plain, attack, 0.1, direct[0], None).holds is None
    assert surrogate(plain, attack, 0.1, direct[0]).holds is None, "no MoE layer"


def test_the_surrogate_is_judged_where_there_are_experts(monkeypatch):
    given = target(Blind(Regressor(WEIGHT)))
    given.model.moe = vit({"kind": "noisy_top_k", "k": 1}).moe
    monkeypatch.setattr(module, "softened", lambda model: model.model)
    direct = worst_error(given, given.attacked(Pgd(steps=5), 0.1))
    assert surrogate(given, Pgd(steps=5), 0.1, direct).holds is False and surrogate(given, Pgd(steps=5), 0.1, direct + 99).holds is True


def test_a_difference_by_chance_is_no_sign(monkeypatch):
    plain, direct = target(Regressor(WEIGHT)), torch.full((30,), 5.0, dtype=torch.float64)
    uneven = 5 + torch.tensor([1.0, -0.9], dtype=torch.float64).repeat(15)  # 0.05 more on average, ± 0.17: the interval of the difference holds 0
    for theirs, holds in ((uneven, True), (direct + 0.05, False), (direct - 0.05, True)):
        monkeypatch.setattr(module, "worst_error", lambda *_, found=theirs: found)
        assert transfer(plain, Pgd(steps=1), 0.1, direct, Regressor(WEIGHT)).holds is holds


def test_all_lines_are_there():
    given = target(Regressor(WEIGHT))
    attacks = [Fgsm(), Pgd(steps=5), Apgd(steps=5)]
    curves = {"fgsm": curve(1, 2), "pgd-5": curve(1, 2), "apgd-5": curve(1, 2)}
    lines = audit_errors(given, Audit(images=12, steps=3), 0.1, curves, attacks, Regressor(-WEIGHT))
    held = {line.name: line.holds for line in lines}
    assert held == {
        "deterministic": True, "zero_gradients": True, "pgd_beats_fgsm": True, "apgd_beats_pgd": True, "larger_epsilon": True,
        "chance": True, "more_steps": True, "surrogate": None, "transfer": True,
    }  # fmt: skip
