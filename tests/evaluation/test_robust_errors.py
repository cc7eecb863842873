import pytest
import torch

from moecore.evaluation.robust_errors import error_score, worst_errors


def test_the_mean_error_and_its_interval():
    found = error_score(torch.tensor([1.0, 2.0, 6.0]))
    assert found["mae"] == 3 and 0 <= found["low"] < 3 < found["high"] <= 6
    assert error_score(torch.full((5,), 2.5)) == {"mae": 2.5, "low": 2.5, "high": 2.5}


def test_the_worst_case_is_of_each_image_by_itself():
    # At 0.1: max(1, 3) and max(5, 2): 4 on average, more than either attack's 3 or 2.5.
    curves = {
        "fgsm": [{"epsilon": 0.0, "errors": [1.0, 2.0]}, {"epsilon": 0.1, "errors": [1.0, 5.0]}],
        "pgd": [{"epsilon": 0.0, "errors": [1.0, 2.0]}, {"epsilon": 0.1, "errors": [3.0, 2.0]}],
        "idle": None,
    }
    clean, attacked = worst_errors(curves)
    assert clean["epsilon"] == 0 and clean["mae"] == 1.5 and clean["errors"] == [1, 2]
    assert attacked["epsilon"] == 0.1 and attacked["mae"] == 4 and attacked["errors"] == [3, 5]


def test_other_epsilons_are_refused():
    with pytest.raises(ValueError, match="different epsilons"):
        worst_errors({"a": [{"epsilon": 0.1, "errors": [1.0]}], "b": [{"epsilon": 0.2, "errors": [1.0]}]})
    assert worst_errors({"idle": None}) == []
