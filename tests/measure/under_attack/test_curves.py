"""What is left under attack, and the worst case over attacks, for each kind of score."""

import pytest
import torch

from moecore.measure.base import Skipped
from moecore.measure.under_attack.curves import Left, Row, run_of, unpacked, worst_case
from moecore.statistics.intervals import bootstrap_mean, wilson
from tests.attacks.models import CLASSES, YEARS

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
