import pytest
import torch

from moecore.attacks import Apgd, Fgsm, Pgd
from moecore.attacks.attack_target import Target
from moecore.measure import attack_audit as module
from moecore.statistics.intervals import bootstrap_mean, wilson
from tests.attacks.models import CLASSES, YEARS, Blind, Smooth, vit
from tests.attacks.test_attacks import Regressor

WEIGHT = torch.linspace(-3, 4, 8)
CHANGES = {"unchanged_images": 0.0, "routing_change": (0.5,), "processing_change": (0.25,)}
PGD = Pgd(steps=5)
LINES = "deterministic zero_gradients pgd_beats_fgsm apgd_beats_pgd chance more_steps surrogate"
LINES += " loss_landscape step_size black_box"


def hits(*right: int) -> torch.Tensor:
    return torch.tensor(right).bool()


def errors(*years: float) -> torch.Tensor:
    return torch.tensor(years, dtype=torch.float64)


def row(epsilon: float, task, scores: torch.Tensor) -> module.EpsilonRow:
    return module.EpsilonRow.of(epsilon, task, scores, loss=1.0, **CHANGES)


def of_classes(model: torch.nn.Module, images: int = 40, side: int = 4) -> Target:
    """Images with the classes that the model gives them, so that it is right on all."""
    pixels = torch.rand(images, 1, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = model(pixels).prediction.argmax(dim=1)
    return Target(model, CLASSES, pixels, labels, batch=16)


def of_years(model: torch.nn.Module, images: int = 30) -> Target:
    """Volumes of 2³ voxels; the plain model is a tenth off, in turn too old and too young."""
    pixels = torch.rand(images, 1, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    sign = (-1) ** torch.arange(images)
    labels = Regressor(WEIGHT)(pixels).prediction[:, 0].detach() + 0.1 * sign
    return Target(model, YEARS, pixels, labels, batch=8)


def curve(*scores: float, loss: float = 1.0, hits: tuple[int, ...] = (1,)) -> module.Curve:
    """Rows at 0.1, 0.2, … with these mean scores; ``hits`` are those of every row."""
    encoded = CLASSES.encode_scores(torch.tensor(hits).bool())
    fields = {"low": None, "high": None, "scores": encoded, "loss": loss, **CHANGES}
    return tuple(
        module.EpsilonRow(epsilon=0.1 * place, score=score, **fields)
        for place, score in enumerate(scores, start=1)
    )


def test_scores_have_wilsons_or_a_bootstrap_interval():
    _, low, high = wilson(3, 4)
    found = module.ScoresAtEpsilon.of(0.1, CLASSES, hits(1, 0, 1, 1))
    assert (found.score, found.low, found.high) == (0.75, low, high)
    assert CLASSES.decode_scores(found.scores, 4).tolist() == [True, False, True, True]
    found = module.ScoresAtEpsilon.of(0.1, YEARS, errors(1, 2, 6))
    assert (found.score, found.low, found.high) == bootstrap_mean(errors(1, 2, 6).numpy())
    assert found.score == 3 and 0 <= found.low < 3 < found.high <= 6 and found.scores == (1, 2, 6)
    even = module.ScoresAtEpsilon.of(0.1, YEARS, torch.full((5,), 2.5))
    assert (even.score, even.low, even.high) == (2.5, 2.5, 2.5)


@pytest.mark.parametrize(
    ("task", "clean", "attacked", "score", "worst", "scores"),
    [
        (CLASSES, hits(1, 1, 1), (hits(1, 0, 1), hits(1, 1, 0)), 1, 1 / 3, [1, 0, 0]),
        # At 0.1: max(1, 3) and max(5, 2): 4 on average, more than either attack's 3 or 2.5.
        (YEARS, errors(1, 2), (errors(1, 5), errors(3, 2)), 1.5, 4, [3, 5]),
    ],
)
def test_the_worst_case_is_of_each_image_by_itself(task, clean, attacked, score, worst, scores):
    pairs = zip(("fgsm", "pgd"), attacked, strict=True)
    curves = {name: (row(0, task, clean), row(0.1, task, changed)) for name, changed in pairs}
    rows = module.compute_worst_curve_over_attacks(curves, task, len(clean))
    assert [(one.epsilon, pytest.approx(one.score)) for one in rows] == [(0, score), (0.1, worst)]
    stored = [task.decode_scores(one.scores, len(clean)).tolist() for one in rows]
    assert stored == [clean.tolist(), scores]


def test_pgd_must_break_no_fewer_than_fgsm():
    both, fgsm = [Fgsm(), Pgd()], {"fgsm": curve(0.3)}
    assert module.check_pgd_beats_fgsm(CLASSES, fgsm | {"pgd": curve(0.3)}, both).holds is True
    line = module.check_pgd_beats_fgsm(CLASSES, fgsm | {"pgd": curve(0.31)}, both)
    assert line.holds is False
    assert line.text == "accuracy 31.0% under pgd, 30.0% under fgsm, at ε = 0.1"
    for attacks in ([Fgsm()], both):  # not run, skipped
        assert module.check_pgd_beats_fgsm(CLASSES, fgsm, attacks).holds is None
    other = [Fgsm(), Pgd(objective="dlr")]
    assert module.check_pgd_beats_fgsm(CLASSES, fgsm | {"pgd-dlr": curve(0.9)}, other).holds is None
    assert module.check_pgd_beats_fgsm(CLASSES, {"pgd": curve(0.5)}, both).holds is None


def test_pgd_must_reach_fgsms_error():
    both, fgsm = [Fgsm(), Pgd()], {"fgsm": curve(2, 3)}
    assert module.check_pgd_beats_fgsm(YEARS, fgsm | {"pgd": curve(1, 3)}, both).holds is True
    line = module.check_pgd_beats_fgsm(YEARS, fgsm | {"pgd": curve(2, 2.9)}, both)
    assert line.holds is False
    assert line.text == "mean absolute error 2.9 under pgd, 3 under fgsm, at ε = 0.2"


def test_apgd_must_reach_pgds_loss_or_its_score():
    both = [Pgd(), Apgd()]
    plain = {"pgd": curve(0.5, loss=2.0)}
    strong = plain | {"apgd": curve(0.9, loss=2.0)}
    assert module.check_apgd_is_as_strong(CLASSES, strong, both).holds is True
    # PGD drives the images that it breaks farther, and breaks fewer: accuracy 0.5 against 0.1
    sound = plain | {"apgd": curve(0.1, loss=1.9)}
    assert module.check_apgd_is_as_strong(CLASSES, sound, both).holds is True
    weak = plain | {"apgd": curve(0.6, loss=1.9)}
    line = module.check_apgd_is_as_strong(CLASSES, weak, both)
    said = "mean loss 1.9 under apgd, 2 under pgd; accuracy 60.0% under apgd, 50.0% under pgd, at ε"
    assert line.holds is False and line.text == f"{said} = 0.1"
    years = {"pgd": curve(3, loss=20.0), "apgd": curve(2.9, loss=21.0)}
    assert module.check_apgd_is_as_strong(YEARS, years, both).holds is True
    assert module.check_apgd_is_as_strong(YEARS, years | {"apgd": curve(2.9)}, both).holds is False
    assert module.check_apgd_is_as_strong(CLASSES, plain, [Pgd()]).holds is None
    other = plain | {"apgd-dlr": curve(0.1, loss=1.0)}
    assert (
        module.check_apgd_is_as_strong(CLASSES, other, [Pgd(), Apgd(objective="dlr")]).holds is None
    )


def test_a_larger_ball_never_helps():
    curves = {"pgd": curve(1, 1, 2), "fgsm": curve(3, 2)}
    line = module.check_larger_epsilon(YEARS, curves, [Pgd(), Fgsm()])
    assert line.holds is True, "fgsm may overshoot"
    curves = {"pgd": curve(1, 2), "apgd": curve(1, 2, 1.9, 1.8)}
    line = module.check_larger_epsilon(YEARS, curves, [Pgd(), Apgd()])
    assert line.holds is False and line.text.endswith("under apgd")
    assert module.check_larger_epsilon(YEARS, {"fgsm": curve(1)}, [Fgsm()]).holds is None
    assert module.check_larger_epsilon(YEARS, {}, [Pgd()]).holds is None, "skipped"


class Noisy(Smooth):
    def forward(self, images):
        output = super().forward(images)
        noise = 1e-6 * torch.randn_like(output.prediction)
        return output._replace(prediction=output.prediction + noise)


def test_a_model_that_draws_is_not_deterministic():
    assert module.check_repeated_predictions(of_classes(Smooth())).holds is True
    line = module.check_repeated_predictions(of_classes(Smooth())._replace(model=Noisy()))
    assert line.holds is False and "differ by up to" in line.text


def test_images_without_a_gradient_are_counted():
    line = module.check_zero_gradients(of_classes(Smooth()))
    counted = "0 of 40 images have no gradient at all; 0.00% of all pixels' gradients are 0"
    assert line.holds is True and line.text == counted
    line = module.check_zero_gradients(of_classes(Blind(Smooth())))
    assert line.holds is False and line.text.startswith("40 of 40") and "100.00%" in line.text
    model = Smooth()  # one black pixel of sixteen is a share, and no blind image
    model.first.data[0] = 0
    model.router.data[:] = 0
    line = module.check_zero_gradients(of_classes(model))
    assert line.holds is True and "6.25%" in line.text


def test_a_hidden_gradient_keeps_a_score_above_chance():
    assert module.check_huge_radius(of_classes(Smooth()), PGD, 0.5).holds is True
    line = module.check_huge_radius(of_classes(Blind(Smooth())), PGD, 0.5)
    assert line.holds is False
    assert "accuracy 100.0%" in line.text and "a guess has 25.0%" in line.text
    assert module.check_huge_radius(of_years(Regressor(WEIGHT)), PGD, 0.5).holds is True
    line = module.check_huge_radius(of_years(Blind(Regressor(WEIGHT))), PGD, 0.5)
    assert line.holds is False and "mean absolute error 0.1" in line.text
    # 1 of 4 right would be chance; 2 of 4 (15 % to 85 %) is not above it.
    given = of_classes(Blind(Smooth()), images=4)
    wrong = (given.labels + 1) % 4
    half = given._replace(labels=torch.where(torch.arange(4) < 2, given.labels, wrong))
    assert module.check_huge_radius(half, PGD, 0.5).holds is True
    assert module.check_huge_radius(given, PGD, 0.5).holds is False, "4 of 4 (51 % to 100 %) is"


def test_too_few_steps_show_in_hits_and_in_errors():
    full = torch.ones(40).bool()
    half = torch.arange(40) < 20
    given = of_classes(Smooth())
    assert module.check_pgd_variants("more_steps", given, half, {"more": half}).holds is True
    others = {"half": full, "twice": torch.arange(40) < 19}
    assert module.check_pgd_variants("step_size", given, half, others).holds is True
    line = module.check_pgd_variants(
        "step_size", given, full, {"half": full, "twice the step": half}
    )
    assert line.holds is False and line.name == "step_size"
    assert line.text.endswith("under pgd, 100.0% with half, 50.0% with twice the step")
    given, wrong = of_years(Regressor(WEIGHT)), torch.tensor([1.0, 2.0, 3.0] * 10)
    for more, holds in ((0, True), (0.1, True), (2, False)):
        line = module.check_pgd_variants("more_steps", given, wrong, {"more": wrong + more})
        assert line.holds is holds


def test_a_loss_that_rises_more_at_random_than_by_its_gradient_is_seen():
    assert module.check_gradient_beats_random_direction(of_classes(Smooth()), 0.1).holds is True
    line = module.check_gradient_beats_random_direction(of_classes(Blind(Smooth())), 0.1)
    assert line.holds is False and "along random signs, at 0.25, 0.5, 1.0 of ε = 0.1" in line.text
    given = of_classes(Smooth())
    moved = module.move_to_random_corner(given, 0.1, 3) - given.images
    inside = (given.images > 0.1) & (given.images < 0.9)
    assert torch.allclose(moved[inside].abs(), torch.tensor(0.1), atol=1e-6)
    assert not torch.equal(moved, module.move_to_random_corner(given, 0.1, 4) - given.images)


def test_a_black_box_that_breaks_more_is_seen():
    given = of_classes(Smooth())
    direct = given.worse_scores(given.attacked(PGD, 0.1))
    assert module.check_black_box(given, 4, 0.1, direct, []).holds is True
    square = direct & (torch.arange(40) > 5)
    assert module.check_black_box(given, 4, 0.1, direct, [square]).holds is (not direct[:6].any())
    blind = of_classes(Blind(Smooth()))
    line = module.check_black_box(blind, 4, 0.2, torch.ones(40).bool(), [])
    assert line.holds is False and "100.0% under the direct one, worse for" in line.text


def test_a_hard_choice_that_hides_gradients_shows(monkeypatch):
    given = of_classes(vit({"kind": "noisy_top_k", "k": 1}), side=8)
    direct = given.worse_scores(given.attacked(PGD, 0.02))
    assert module.check_surrogate(given, PGD, 0.02, direct).holds is True
    broken_none = module.check_surrogate(given, PGD, 0.02, torch.ones(40).bool())
    assert broken_none.holds is False, "a direct attack that broke nothing"
    assert module.check_surrogate(of_classes(vit(None), side=8), PGD, 0.02, direct).holds is None
    model = vit({"kind": "noisy_top_k", "k": 1})
    hidden = Blind(model)
    hidden.moe = model.moe  # the true model has no gradient, its surrogate has
    monkeypatch.setattr(module, "soften_model", lambda found: found.model)
    blind = given._replace(model=hidden)
    line = module.check_surrogate(blind, PGD, 0.1, blind.worse_scores(blind.attacked(PGD, 0.1)))
    assert line.holds is False and "100.0% under the direct one" in line.text


def test_the_surrogate_of_a_real_target(monkeypatch):
    given = of_years(Blind(Regressor(WEIGHT)))
    direct = given.worse_scores(given.attacked(PGD, 0.1))
    assert module.check_surrogate(given, PGD, 0.1, direct).holds is None, "no MoE layer"
    given.model.moe = vit({"kind": "noisy_top_k", "k": 1}).moe
    monkeypatch.setattr(module, "soften_model", lambda model: model.model)
    assert module.check_surrogate(given, PGD, 0.1, direct).holds is False
    assert module.check_surrogate(given, PGD, 0.1, direct + 99).holds is True


def test_an_error_that_is_larger_by_chance_is_no_sign(monkeypatch):
    given = of_years(Regressor(WEIGHT))
    given.model.moe = vit({"kind": "noisy_top_k", "k": 1}).moe
    monkeypatch.setattr(module, "soften_model", lambda model: model)
    direct = torch.full((30,), 5.0, dtype=torch.float64)
    # 0.05 more on average, ± 0.17: the interval of the difference holds 0.
    uneven = 5 + torch.tensor([1.0, -0.9], dtype=torch.float64).repeat(15)
    for theirs, holds in ((uneven, True), (direct + 0.05, False), (direct - 0.05, True)):
        monkeypatch.setattr(type(given), "worse_scores", lambda *_, found=theirs: found)
        assert module.check_surrogate(given, Pgd(steps=1), 0.1, direct).holds is holds


def test_all_lines_of_classes_are_there_and_only_the_first_images_are_used(monkeypatch):
    seen = []

    def note(part):
        seen.append((len(part.images), len(part.labels), part.only))
        return module.AuditLine(name="deterministic", holds=True, text="")

    monkeypatch.setattr(module, "check_repeated_predictions", note)
    given = of_classes(Smooth())._replace(only=torch.zeros(40, dtype=torch.bool))
    curves = {"pgd": curve(0.5, hits=(1,) * 40)}
    lines = module.run_audit(given, module.AuditSettings(images=8, steps=2), 0.1, curves, [Pgd()])
    assert [line.name for line in lines] == LINES.split() and seen == [(8, 8, None)]


def test_all_lines_of_a_real_target_are_there():
    attacks = [Fgsm(), Pgd(steps=5), Apgd(steps=5)]
    rows = tuple(row(epsilon, YEARS, torch.full((30,), 20 * epsilon)) for epsilon in (0.05, 0.1))
    curves = dict.fromkeys(["fgsm", "pgd-5", "apgd-5"], rows)
    settings = module.AuditSettings(images=12, steps=3)
    lines = module.run_audit(of_years(Regressor(WEIGHT)), settings, 0.1, curves, attacks)
    assert [line.name for line in lines] == [*LINES.split(), "larger_epsilon"]
    assert [line.name for line in lines if line.holds is not True] == ["surrogate"]
