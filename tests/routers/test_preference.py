"""Tokens that are sent to an expert: the eigenbasis router's choice, weights and gradients by hand."""

import math

import torch

from moecore.records import RoutingContext
from moecore.routers.eigenbasis import Eigenbasis

ROUTER = Eigenbasis(k=2, threshold=0.5, context="learned").build(6, 5)
# experts 0, 1, 2 are of regions, 3 and 4 free; the token is of region 1, whose score is the lowest
SCORES = torch.tensor([[[0.9, -0.3, 0.8, 0.2, 0.6]]])
SENT = torch.tensor([[[-1, 1, -1, 0, 0]]], dtype=torch.int8)


def test_first_the_named_expert_then_the_best_free_one():
    chosen, _, record = ROUTER.decide(SCORES, SENT)
    assert chosen.tolist() == [[[1, 4]]] and record.chosen.tolist() == [[[False, True, False, False, True]]]
    # softmax of −0.3 and 0.6: the first has 1 / (1 + e^0.9)
    first = 1 / (1 + math.exp(0.9))
    torch.testing.assert_close(record.combine, torch.tensor([[[0, first, 0, 0, 1 - first]]]))
    assert torch.equal(record.logits, SCORES)  # what is measured are the scores as they are


def test_tokens_without_a_wish_are_routed_as_ever():
    none = torch.zeros_like(SENT)
    for selection in ("prune", "literal"):
        router = Eigenbasis(k=2, selection=selection, context="learned").build(6, 5)
        for ours, theirs in zip(router.decide(SCORES, none)[2], router.decide(SCORES)[2], strict=True):
            assert torch.equal(ours, theirs)


def test_one_expert_per_token_is_the_named_one():
    chosen, _, record = Eigenbasis(k=1, context="learned").build(6, 5).decide(SCORES, SENT)
    assert chosen.tolist() == [[[1]]] and record.combine[0, 0].tolist() == [0, 1, 0, 0, 0]


def test_nothing_is_pruned_of_a_token_that_is_sent():
    scores = torch.tensor([[[0.0, 0.9, 0.0, 0.1, 0.2]]])  # the free experts are below the threshold of 0.5
    assert ROUTER.decide(scores, SENT)[2].chosen.sum() == 2
    assert ROUTER.decide(scores)[2].chosen.sum() == 1


def test_the_wish_comes_with_the_context_and_the_weights_reach_the_named_target():
    torch.manual_seed(0)
    tokens = torch.randn(1, 3, 6)
    wish = torch.cat([SENT, torch.zeros_like(SENT), SENT], dim=1)
    _, record = ROUTER(tokens, RoutingContext(preference=wish))
    assert record.chosen[0, [0, 2], 1].all() and not record.chosen[0, [0, 2]][:, [0, 2]].any()
    record.combine[0, 0, 1].backward()
    assert (ROUTER.target.grad[1] != 0).any() and (ROUTER.target.grad[0] == 0).all()
