"""Routers of other logits, and of another number of experts a token, by hand."""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.nn.routers.cosine import Cosine
from moecore.nn.routers.top_p import TopP
from moecore.training.regularizers.entropy import entropy
from tests.nn.routers import reference


def test_cosines_by_hand():
    # (3, 4, 1) is projected to (3, 4): its cosine with (1, 0) is .6, with (.6, .8) 1, with (−1, 1)
    # 1 / (5 √2) = .141421; over .3, and the softmax's largest weighs.
    router = Cosine(k=1, embedding=2).build(3, 3)
    router.projection.data = torch.eye(2, 3)
    router.weight.data = torch.tensor([[1, 0], [0.6, 0.8], [-1, 1]])
    _, record = router(torch.tensor([[[3.0, 4, 1]]]))
    torch.testing.assert_close(record.logits[0, 0], torch.tensor([2, 10 / 3, 0.471405]))
    probs = torch.tensor([0.199581, 0.757142, 0.043277])
    torch.testing.assert_close(record.probs[0, 0], probs, atol=1e-6, rtol=0)
    torch.testing.assert_close(record.combine[0, 0], torch.tensor([0, 0.757142, 0]))
    twice = router(torch.tensor([[[6.0, 8, 5]]]))[1]  # a longer token of the same direction
    torch.testing.assert_close(twice.logits, record.logits)


def test_a_token_of_zeros_is_undecided_and_the_temperature_has_a_floor():
    router = Cosine(k=1).build(4, 6)
    tokens = torch.zeros(1, 1, 4, requires_grad=True)
    logits = router(tokens)[1].logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), tokens)
    assert not logits.any() and gradient.isfinite().all()
    router.log_factor.data.fill_(9.0)
    logits = router(torch.randn(2, 5, 4))[1].logits
    assert logits.abs().max() <= 100.001
    (gradient,) = torch.autograd.grad(logits.sum(), router.log_factor)
    assert gradient == 0
    with pytest.raises(ValidationError, match="start: found orthonormal.*; allowed: normal"):
        Cosine(start="orthonormal")


def test_top_p_by_hand():
    # .45 > .4 at once; .3 + .3 > .4 takes two, the lower number first.
    probs = torch.tensor([[[0.45, 0.3, 0.15, 0.1], [0.3, 0.3, 0.25, 0.15]]])
    router = TopP(threshold=0.4).build(4, 4)
    router.weight.data = torch.eye(4)
    _, record = router(probs.log())
    expected = torch.tensor([[[0.45, 0, 0, 0], [0.3, 0.3, 0, 0]]])
    torch.testing.assert_close(record.combine, expected)
    assert torch.equal(record.chosen, expected > 0) and torch.equal(
        record.load, (expected > 0) * 1.0
    )
    assert entropy(probs=record.probs).item() == pytest.approx(1.294436, abs=1e-6)


def test_a_token_that_no_share_suffices_for_uses_all_or_as_many_as_it_may():
    even = torch.zeros(1, 1, 4)
    for k, number in ((None, 4), (2, 2)):
        router = TopP(threshold=0.99, k=k).build(4, 4)
        assert router(even)[1].chosen.sum() == number
    with pytest.raises(UserError, match="^router.k is 5, but there are 4 experts"):
        TopP(k=5).build(4, 4)


def test_tokens_of_unlike_numbers_get_their_weighted_sums():
    layer = reference.layer_of(TopP(threshold=0.6))
    tokens = torch.randn(3, 7, 8, requires_grad=True)
    number = layer(tokens)[1][0].chosen.sum(dim=-1)
    assert number.min() == 1 and number.max() > 2

    def slow(values):
        probs = (values @ layer.router.weight.T).softmax(dim=-1)
        ordered = probs.sort(dim=-1, descending=True)
        kept = (ordered.values.cumsum(dim=-1) - ordered.values) <= 0.6
        weights = torch.zeros_like(probs).scatter(-1, ordered.indices, ordered.values * kept)
        return reference.weighted_sum(layer, values, weights)

    reference.assert_like(layer, tokens, slow)
