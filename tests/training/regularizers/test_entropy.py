import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.training.regularizers.entropy import Entropy, entropy
from tests.training.regularizers.steps import record, step

# Tokens (½, ¼, ¼): ½ ln 2 + 2·¼ ln 4 = 1.5 ln 2, and (1, 0, 0): 0. Their mean:
PROBS = [[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]
VALUE = 0.75 * math.log(2)


def test_value_by_hand():
    assert entropy(probs=torch.tensor(PROBS)).item() == pytest.approx(VALUE)


def test_range():
    assert entropy(probs=torch.eye(5)[None]).item() == 0
    assert entropy(probs=torch.full((2, 3, 5), 0.2)).item() == pytest.approx(math.log(5))  # nats


def test_gradient():
    probs = torch.rand(2, 3, 4, dtype=torch.float64).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: entropy(probs=p), probs)


def test_probabilities_of_zero_stay_finite():
    probs = torch.tensor(PROBS, requires_grad=True)
    entropy(probs=probs).backward()
    assert probs.grad.isfinite().all()
    logits = torch.tensor([[[0.0, -1000.0]]], requires_grad=True)
    entropy(probs=logits.softmax(-1)).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))  # sure already


def test_layers_are_summed_and_the_weight_is_left_to_the_objective():
    assert Entropy(weight=-0.5)(
        step(record(probs=PROBS), record(probs=PROBS))
    ).item() == pytest.approx(2 * VALUE)
    assert Entropy().weight == 0.01 and Entropy.needs == {"routing"}


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="no MoE layer"):
        Entropy()(step())
