"""The loss that draws an expert's scores to its tissue."""

import math
from types import SimpleNamespace

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import Batch, ModelOutput, RoutingRecord, Step
from moecore.training.regularizers.region_routing import RegionRouting, region_routing


def step_of(scores, belongs):
    record = RoutingRecord(*[scores] * 5)
    return Step(
        Batch(None, None, None, 1, belongs),
        ModelOutput(None, (record, record._replace(logits=3 * scores))),
        SimpleNamespace(),
    )


def test_by_hand():
    # token 0 belongs to expert 1: scores 0, 0.1 / 0.1 = 0, 1 → −log(e / (1 + e)); token 1 to none;
    # token 2 to expert 0: 0.2, 0 → 2, 0
    scores = torch.tensor([[[0.0, 0.1], [5.0, 0.0], [0.2, 0.0]]])
    belongs = torch.tensor([[1, -1, 0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert float(region_routing(scores=scores, belongs=belongs, temperature=0.1)) == pytest.approx(
        expected
    )
    # the second layer's scores are three times as large; the mean of both layers
    steep = (math.log(1 + math.exp(-3)) + math.log(1 + math.exp(-6))) / 2
    assert float(RegionRouting()(step_of(scores, belongs))) == pytest.approx((expected + steep) / 2)


def test_no_label_no_loss():
    scores = torch.rand(1, 3, 2, requires_grad=True)
    loss = region_routing(scores=scores, belongs=torch.full((1, 3), -1), temperature=0.1)
    loss.backward()
    assert loss == 0 and (scores.grad == 0).all()
    assert RegionRouting()(step_of(torch.rand(1, 3, 2), None)) == 0


def test_its_gradient_raises_the_expert_and_lowers_the_others():
    scores = torch.zeros(1, 1, 4, requires_grad=True)
    region_routing(scores=scores, belongs=torch.tensor([[1]]), temperature=0.5).backward()
    # softmax is 1/4 each; (1/4 − [e = 1]) / temperature
    torch.testing.assert_close(scores.grad[0, 0], torch.tensor([0.5, -1.5, 0.5, 0.5]))


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="no MoE layers"):
        RegionRouting()(Step(Batch(None, None, None), ModelOutput(None), None))
