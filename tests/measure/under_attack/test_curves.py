"""What is left under attack, and the worst case over attacks, for each kind of score.

The lines that compare attacks: the stronger must not do less harm.
"""

import pytest
import torch

from moecore.attacks.apgd import Apgd
from moecore.attacks.apgd_reference import ApgdReference
from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.attacks.square import Square
from moecore.measure.base import Skipped
from moecore.measure.under_attack.compared_curves import (
    apgd_beats_pgd,
    larger_epsilon,
    pgd_beats_fgsm,
    square_only,
)
from moecore.measure.under_attack.curves import Left, Row, run_of, unpacked, worst_case
from moecore.statistics.intervals import bootstrap_mean, wilson
from tests.attacks.models import CLASSES, YEARS
from tests.measure.under_attack.cases import curve

IDLE = Skipped(skipped="nothing to attack")
CHANGES = {
    "loss": 1.0,
    "unchanged_images": 0.0,
    "routing_change": (0.5,),
    "processing_change": (0.25,),
}


def hits(*right: int) -> torch.Tensor:
    return torch.tensor(right).bool()


def errors(*years: float) -> torch.Tensor:
    return torch.tensor(years, dtype=torch.float64)


def row(epsilon: float, task, scores: torch.Tensor) -> Row:
    return Row.of(epsilon, task, scores, **CHANGES)


def test_a_share_with_wilsons_interval():
    _, low, high = wilson(3, 4)
    found = Left.of(0.1, CLASSES, hits(1, 0, 1, 1))
    assert (found.score, found.low, found.high) == (0.75, low, high)
    assert unpacked(CLASSES, found, 4).tolist() == [True, False, True, True]


def test_a_mean_error_with_its_bootstrap_interval():
    found = Left.of(0.1, YEARS, errors(1, 2, 6))
    assert (found.score, found.low, found.high) == bootstrap_mean(errors(1, 2, 6).numpy())
    assert found.score == 3 and 0 <= found.low < 3 < found.high <= 6 and found.scores == (1, 2, 6)
    even = Left.of(0.1, YEARS, torch.full((5,), 2.5))
    assert (even.score, even.low, even.high) == (2.5, 2.5, 2.5)


@pytest.mark.parametrize("task", [CLASSES, YEARS])
def test_a_row_is_read_back_as_it_was(task):
    scores = hits(1, 0, 1) if task is CLASSES else errors(1, 0.1, 3)
    found = row(0.1, task, scores)
    assert Row.model_validate_json(found.model_dump_json()) == found
    assert torch.equal(unpacked(task, found, 3), scores)


def test_the_worst_case_of_hits_is_what_stands_all_attacks():
    curves = {
        "a": (row(0, CLASSES, hits(1, 1, 1)), row(0.1, CLASSES, hits(1, 0, 1))),
        "b": (row(0, CLASSES, hits(1, 1, 1)), row(0.1, CLASSES, hits(1, 1, 0))),
        "idle": IDLE,
    }
    clean, attacked = worst_case(curves, CLASSES, 3)
    assert (clean.epsilon, clean.score) == (0, 1)
    assert (attacked.epsilon, attacked.score) == (0.1, pytest.approx(1 / 3))
    assert unpacked(CLASSES, attacked, 3).tolist() == [True, False, False]
    assert list(run_of(curves)) == ["a", "b"]


def test_the_worst_case_of_errors_is_of_each_image_by_itself():
    # At 0.1: max(1, 3) and max(5, 2): 4 on average, more than either attack's 3 or 2.5.
    curves = {
        "fgsm": (row(0, YEARS, errors(1, 2)), row(0.1, YEARS, errors(1, 5))),
        "pgd": (row(0, YEARS, errors(1, 2)), row(0.1, YEARS, errors(3, 2))),
        "idle": IDLE,
    }
    clean, attacked = worst_case(curves, YEARS, 2)
    assert clean.epsilon == 0 and clean.score == 1.5 and clean.scores == (1, 2)
    assert attacked.epsilon == 0.1 and attacked.score == 4 and attacked.scores == (3, 5)


def test_other_epsilons_are_refused():
    curves = {"a": (row(0.1, CLASSES, hits(1)),), "b": (row(0.2, CLASSES, hits(1)),)}
    with pytest.raises(ValueError, match="different epsilons"):
        worst_case(curves, CLASSES, 1)
    assert worst_case({"idle": IDLE}, CLASSES, 3) == ()


UNROUTED = Skipped(skipped="no MoE layer")


def test_pgd_must_break_no_fewer_than_fgsm():
    both = [Fgsm(), Pgd()]
    assert pgd_beats_fgsm(CLASSES, {"fgsm": curve(0.3), "pgd": curve(0.3)}, both).holds is True
    line = pgd_beats_fgsm(CLASSES, {"fgsm": curve(0.3), "pgd": curve(0.31)}, both)
    assert line.holds is False
    assert line.text == "accuracy 31.0% under pgd, 30.0% under fgsm, at ε = 0.1"
    assert pgd_beats_fgsm(CLASSES, {"fgsm": curve(0.3)}, [Fgsm()]).holds is None
    other = [Fgsm(), Pgd(objective="dlr")]
    assert pgd_beats_fgsm(CLASSES, {"fgsm": curve(0.3), "pgd-dlr": curve(0.9)}, other).holds is None


def test_pgd_must_reach_fgsms_error():
    both = [Fgsm(), Pgd()]
    assert pgd_beats_fgsm(YEARS, {"fgsm": curve(2, 3), "pgd": curve(1, 3)}, both).holds is True
    line = pgd_beats_fgsm(YEARS, {"fgsm": curve(2, 3), "pgd": curve(2, 2.9)}, both)
    assert line.holds is False
    assert line.text == "mean absolute error 2.9 under pgd, 3 under fgsm, at ε = 0.2"
    other = [Fgsm(), Pgd(objective="routing_change")]
    curves = {"fgsm": curve(2), "pgd-routing_change": curve(1)}
    assert pgd_beats_fgsm(YEARS, curves, other).holds is None


@pytest.mark.parametrize("best", [Apgd(), ApgdReference()])
def test_apgd_must_reach_pgds_loss(best):
    both = [Pgd(), best]
    plain = {"pgd": curve(0.5, loss=2.0)}
    strong = plain | {best.kind: curve(0.9, loss=2.0)}
    assert apgd_beats_pgd(CLASSES, strong, both).holds is True
    weak = plain | {best.kind: curve(0.1, loss=1.9)}
    assert apgd_beats_pgd(CLASSES, weak, both).holds is False
    assert apgd_beats_pgd(CLASSES, plain, [Pgd()]).holds is None
    other = plain | {"apgd_reference-dlr": curve(0.1, loss=1.0)}
    assert apgd_beats_pgd(CLASSES, other, [Pgd(), ApgdReference(loss="dlr")]).holds is None


def test_apgd_must_reach_pgds_error():
    both = [Pgd(inside=True), Apgd()]
    curves = {"pgd-inside": curve(2), "apgd": curve(2)}
    assert apgd_beats_pgd(YEARS, curves, both).holds is True
    assert apgd_beats_pgd(YEARS, curves | {"apgd": curve(1.9)}, both).holds is False
    assert apgd_beats_pgd(YEARS, {"apgd": curve(2)}, [Apgd()]).holds is None


def test_a_larger_ball_never_helps():
    curves = {"pgd": curve(1, 1, 2), "fgsm": curve(3, 2)}
    line = larger_epsilon(YEARS, curves, [Pgd(), Fgsm()])
    assert line.holds is True, "fgsm may overshoot"
    line = larger_epsilon(YEARS, {"pgd": curve(1, 2), "apgd": curve(1, 2, 1.9)}, [Pgd(), Apgd()])
    assert line.holds is False and line.text.endswith("under apgd")
    assert larger_epsilon(YEARS, {"fgsm": curve(1)}, [Fgsm()]).holds is None


def test_images_that_square_alone_breaks_show():
    attacks = [Fgsm(), Pgd(), Square()]
    curves = {"fgsm": curve(1, hits=(1, 0, 1)), "pgd": curve(1, hits=(1, 1, 0))}
    found = square_only(CLASSES, curves | {"square": curve(1, hits=(1, 0, 0))}, attacks, 3)
    assert found.holds is True
    line = square_only(CLASSES, curves | {"square": curve(1, hits=(0, 1, 1))}, attacks, 3)
    assert line.holds is False and "1 of 3 images (33.3%)" in line.text
    assert square_only(CLASSES, curves, attacks[:2], 3).holds is None
    assert square_only(CLASSES, {"square": curve(1)}, [Square()], 3).holds is None


def test_a_skipped_attack_is_not_compared():
    curves = {"fgsm": UNROUTED, "pgd": curve(0.5), "square": UNROUTED}
    assert pgd_beats_fgsm(CLASSES, curves, [Fgsm(), Pgd()]).holds is None
    assert square_only(CLASSES, curves, [Fgsm(), Pgd(), Square()], 1).holds is None
    assert larger_epsilon(YEARS, {"pgd": UNROUTED}, [Pgd()]).holds is None
