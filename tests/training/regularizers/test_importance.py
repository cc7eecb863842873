import pytest
import torch

from moecore.core.files import UserError
from moecore.training.regularizers.importance import Importance, importance
from tests.training.regularizers.steps import record, step

UNEVEN = [[[0.75, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.75, 0.25]]]


def test_value_by_hand():
    # Importance: 0.75 + 0.5 + 1 + 0.75 = 3 and 1. Mean 2, population variance ((3−2)² + (1−2)²)/2 =
    # 1: 1/2² = 0.25. The sample variance would give 0.5; per-image or per-token statistics would
    # give other values again.
    assert importance(probs=torch.tensor(UNEVEN)).item() == pytest.approx(0.25)


def test_range():
    # Balanced: 0. All on one of E = 4: importances (n, 0, 0, 0), mean n/4, variance 3n²/16: 3 = E −
    # 1.
    assert importance(probs=torch.full((2, 3, 4), 0.25)).item() == 0
    assert importance(probs=torch.eye(4)[0].expand(2, 3, 4)).item() == pytest.approx(3)
    assert importance(probs=torch.eye(4)[None]).item() == 0  # each token sure, together even


def test_gradient_at_balance_is_zero_not_nan():
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    importance(probs=logits.softmax(-1)).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_layers_are_summed_and_the_weight_is_left_to_the_objective():
    assert Importance(weight=7.0)(
        step(record(probs=UNEVEN), record(probs=UNEVEN))
    ).item() == pytest.approx(0.5)


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="no MoE layer"):
        Importance()(step())
    assert Importance.needs == {"routing"} and Importance().weight == 0.005
