"""The experts of language models: ReLU, dropout of hidden numbers, and their first weights."""

import pytest
import torch
from torch.nn.functional import relu

from moecore.core.files import UserError
from moecore.nn.dispatch import SparsePlan
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoE
from moecore.nn.routers.soft_slots import SoftSlots


def made(**settings):
    torch.manual_seed(0)
    return Mlp(number=3, hidden_ratio=2, activation="relu", init="flat", **settings).build(8)


def plan():
    chosen = torch.tensor([[[0, 2], [2, 1], [0, 1]]])
    return SparsePlan.build(chosen, torch.ones(1, 3, 2), None, 3)


def by_hand(experts, tokens, kept=None):
    outputs = []
    for token, chosen in enumerate([[0, 2], [2, 1], [0, 1]]):
        total = torch.zeros(8)
        for choice, expert in enumerate(chosen):
            hidden = relu(tokens[0, token] @ experts.up[expert] + experts.up_bias[expert])
            if kept is not None:
                hidden = hidden * kept[0, token, choice] / 0.5
            total = total + hidden @ experts.down[expert] + experts.down_bias[expert]
        outputs.append(total)
    return torch.stack(outputs)[None]


def test_relu_by_hand():
    experts = made().eval()
    tokens = torch.randn(1, 3, 8)
    found = plan().combine(experts(plan().dispatch(tokens)))
    torch.testing.assert_close(found, by_hand(experts, tokens))


def test_dropout_is_drawn_for_pairs_in_their_order():
    experts = made(dropout=0.5)
    tokens = torch.randn(1, 3, 8)
    torch.manual_seed(5)
    found = plan().combine(experts(plan().dispatch(tokens)))
    torch.manual_seed(5)
    kept = torch.empty(1, 3, 2, 16).bernoulli_(0.5)
    torch.testing.assert_close(found, by_hand(experts, tokens, kept))
    torch.testing.assert_close(
        plan().combine(experts.eval()(plan().dispatch(tokens))), by_hand(experts, tokens)
    )


def test_flat_weights_lie_within_their_bound():
    experts = made()
    bound = (8 * 16) ** -0.5
    assert experts.up.shape == (3, 8, 16) and experts.down.shape == (3, 16, 8)
    for weight in (experts.up, experts.down):
        assert 0.9 * bound < weight.abs().max() <= bound
        assert abs(float(weight.std()) - bound / 3**0.5) < 0.1 * bound
    assert not experts.up_bias.any() and not experts.down_bias.any()


def test_dropout_needs_single_choices():
    with pytest.raises(UserError, match="experts.dropout: found 0.5, but the router soft_slots"):
        MoE(router=SoftSlots(), experts=Mlp(number=3, dropout=0.5), blocks="all").build(8)
