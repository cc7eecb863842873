"""Top-k first, then a softmax over the chosen."""

import math

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from tests.nn.routers import reference


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def test_evaluation_by_hand():
    # Token (ln 4, ln 2, 0, 0) by the identity, plus bias (0, 0, ln 8, 0): logits (ln 4, ln 2, ln 8,
    # 0), probs (4, 2, 8, 1)/15. k = 2 takes experts 2 and 0; over these alone 8/12 and 4/12. τ = ln
    # 4, σ = 1/4:
    # load = Φ(4·ln(4/4)), Φ(4·ln(2/4)), Φ(4·ln(8/4)), Φ(4·ln(1/4)).
    router = TopKSoftmax().build(4, 4).eval()
    router.weight.data = torch.eye(4)
    router.bias.data = torch.tensor([0, 0, math.log(8), 0])
    plan, record = router(torch.tensor([4.0, 2, 1, 1]).log().view(1, 1, 4))
    torch.testing.assert_close(record.logits.flatten(), torch.tensor([4.0, 2, 8, 1]).log())
    torch.testing.assert_close(record.probs.flatten(), torch.tensor([4.0, 2, 8, 1]) / 15)
    torch.testing.assert_close(plan.weights.flatten(), torch.tensor([2 / 3, 1 / 3]))
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([1 / 3, 0, 2 / 3, 0]))
    assert record.chosen.flatten().tolist() == [True, False, True, False]
    torch.testing.assert_close(
        record.load.flatten(),
        torch.tensor([0.5, phi(-4 * math.log(2)), phi(4 * math.log(2)), phi(-8 * math.log(2))]),
    )


def test_training_noise_decides_and_losses_see_clean_probs():
    layer = reference.layer_of(TopKSoftmax(noise_std=3.0)).train()
    tokens = torch.randn(3, 5, 8)
    torch.manual_seed(7)
    _, record = layer.router(tokens)
    torch.manual_seed(7)
    logits = tokens @ layer.router.weight.t() + layer.router.bias
    noisy = logits + torch.randn_like(logits) * 3 / 4  # σ = noise_std / E
    best, order = noisy.sort(dim=-1, descending=True)
    torch.testing.assert_close(record.logits, logits)
    torch.testing.assert_close(record.probs, logits.softmax(-1))
    torch.testing.assert_close(
        record.combine,
        torch.zeros_like(logits).scatter(-1, order[..., :2], best[..., :2].softmax(-1)),
    )
    torch.testing.assert_close(
        record.load, torch.distributions.Normal(0, 0.75).cdf(logits - best[..., 1:2])
    )


@pytest.mark.parametrize("training, noise_std", [(True, 0.0), (False, 3.0)])
def test_without_noise_nothing_is_drawn(training, noise_std):
    layer = reference.layer_of(TopKSoftmax(noise_std=noise_std)).train(training)
    tokens = torch.randn(3, 5, 8)
    before = torch.random.get_rng_state()
    _, record = layer.router(tokens)
    assert torch.equal(torch.random.get_rng_state(), before)
    reference.assert_well_formed(record, tokens, 4)
    torch.testing.assert_close(record.combine.sum(-1), torch.ones(3, 5))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("width", [8, 6])
def test_outputs_and_all_gradients_agree_with_every_expert_on_every_token(k, width):
    layer = reference.layer_of(TopKSoftmax(k=k, noise_std=1.0), width).train()
    tokens = torch.randn(3, 7, width, requires_grad=True)

    def slow(values):
        logits = values @ layer.router.weight.t() + layer.router.bias
        noisy = logits + torch.randn_like(logits) / 4
        kept = torch.where(
            noisy >= noisy.sort(dim=-1, descending=True).values[..., k - 1 : k], noisy, -torch.inf
        )
        return reference.weighted_sum(layer, values, kept.softmax(-1))

    reference.assert_like(layer, tokens, slow)


def test_one_expert_per_token_has_weight_1_and_gives_the_router_no_task_gradient():
    layer = reference.layer_of(TopKSoftmax(k=1)).train()
    outputs, (record,) = layer(torch.randn(3, 7, 8))
    assert torch.equal(record.combine, record.chosen.float())
    for gradient in torch.autograd.grad(
        outputs.square().sum(), list(layer.router.parameters()), retain_graph=True
    ):
        assert not gradient.any()
    # what regularizers look at still teaches it
    for loss in (record.probs.square().sum(), record.load.square().sum()):
        assert all(
            gradient.any()
            for gradient in torch.autograd.grad(
                loss, list(layer.router.parameters()), retain_graph=True
            )
        )


def test_two_experts_per_token_give_it_one():
    layer = reference.layer_of(TopKSoftmax(k=2)).train()
    for gradient in torch.autograd.grad(
        layer(torch.randn(3, 7, 8))[0].square().sum(), list(layer.router.parameters())
    ):
        assert gradient.norm() > 1e-3


def test_padding_takes_no_part():
    layer = reference.layer_of(TopKSoftmax(k=2)).train()
    reference.assert_padding_takes_no_part(layer, torch.randn(3, 61, 8, requires_grad=True))


def test_invariances():
    layer = reference.layer_of(TopKSoftmax())
    tokens = torch.randn(3, 9, 8)
    reference.assert_relabelling_changes_nothing(layer, tokens, {"weight": 0, "bias": 0})
    reference.assert_permuted_tokens_give_permuted_outputs(layer, tokens)
    reference.assert_one_image_alone_is_predicted_alike(layer, tokens)
    reference.assert_autocast_keeps_the_record(layer, tokens)


def test_ties_go_to_the_lowest_index():
    router = TopKSoftmax(k=2).build(4, 4).eval()
    assert router(torch.zeros(1, 1, 4))[1].chosen.flatten().tolist() == [True, True, False, False]


def test_settings():
    assert TopKSoftmax().provides == {"load"} and TopKSoftmax().active(8) == 2
    router = TopKSoftmax().build(6, 4)
    assert router.weight.shape == (4, 6) and not router.bias.any()
    with pytest.raises(UserError, match="k is 5, but there are 4 experts"):
        TopKSoftmax(k=5).build(6, 4)
    with pytest.raises(ValidationError):
        TopKSoftmax(noise_std=-1)
