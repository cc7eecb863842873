"""Upcycled experts that are pieces of the dense MLP, or copies with units drawn anew."""

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings, build_moe_feed_forward
from moecore.nn.routers.cosine import Cosine
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from moecore.testing.check_helpers import IMAGE, draw_weights
from moecore.training.upcycle import fill_experts, upcycle_model
from moecore.training.upcycling_kinds import Drop, Granular, redraw_units, repeat_router_rows

DENSE = {
    "fc1.weight": torch.tensor([[1.0, 0], [0, -1], [1, 1], [-1, -1]]),
    "fc1.bias": torch.tensor([0, 0.5, 0, 0]),
    "fc2.weight": torch.tensor([[1, 0, 1, 0.5], [0, 1, 0, -1]]),
    "fc2.bias": torch.tensor([0.1, -0.1]),
}
PIECES = Granular(pieces=2)


# Fixtures D1.1 and D1.3. Of the token (1, −2) the dense hidden units are relu(1, 2.5, −1, 1), its
# output (1 + 0.5 + 0.1, 2.5 − 1 − 0.1) = (1.6, 1.4). Two copies of two pieces with the logits 0.3,
# 0.3, −0.2, −0.2: the first copy's are chosen. After the choice their softmax is ½ each, before it
# 1 / (2 + 2 exp(−0.5)) = 0.31123 each: 2 · 0.31123 · 4/2 = 1.24492 times the dense output.
@pytest.mark.parametrize(
    ("renormalise", "weight", "output"),
    [(True, 0.5, [1.6, 1.4]), (False, 0.31123, [1.99187, 1.742886])],
)
def test_pieces_of_a_copy_are_chosen_together_and_sum_to_it(renormalise, weight, output):
    router = NoisyTopK(k=2, noise_std=0, renormalise=renormalise)
    experts = Mlp(number=4, hidden_ratio=1, activation="relu")
    assert not list(PIECES.misfits(router, experts))
    layer = build_moe_feed_forward(router, experts, 2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[0.3, 0], [9, 9], [-0.2, 0], [9, 9]]))
        repeat_router_rows(layer.router, 2)
        fill_experts(layer.experts, dict(DENSE), "", PIECES.cut_mlp(router, 4))
    made, (record,) = layer(torch.tensor([[[1.0, -2.0]]]))
    torch.testing.assert_close(made[0, 0], torch.tensor(output), atol=1e-6, rtol=0)
    expected = torch.tensor([weight, weight, 0, 0])
    torch.testing.assert_close(record.combine[0, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("router", [TopKSoftmax(k=2), NoisyTopK(noise_std=0, renormalise=True)])
def test_a_model_of_pieces_begins_as_the_dense_one_and_learns(router):
    backbone = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=1.0)
    moe = MoESettings(router=router, experts=Mlp(number=6, hidden_ratio=0.5), blocks=(1,))
    dense = backbone.build(IMAGE).eval()
    draw_weights(dense)
    model = upcycle_model(backbone.build(IMAGE, moe), dense, PIECES)
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(model(images).prediction, dense(images).prediction)
    model(images).prediction.square().sum().backward()
    assert all(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize(
    ("router", "experts", "key", "allowed"),
    [
        (NoisyTopK(noise_std=0), Mlp(number=5), "experts.number", "allowed: multiples"),
        (NoisyTopK(k=1, noise_std=0), Mlp(), "router.k", "multiples of upcycle.pieces, 2"),
        (NoisyTopK(), Mlp(), "router.noise_std", "allowed with granular upcycling: 0"),
        (Cosine(), Mlp(), "router.kind", "noisy_top_k, top_k_softmax"),
        (
            NoisyTopK(noise_std=0, balance={"kind": "loss_free"}),
            Mlp(),
            "router.balance",
            "allowed with granular upcycling: null",
        ),
        (NoisyTopK(noise_std=0, score="sigmoid"), Mlp(), "router.score", "softmax"),
    ],
)
def test_what_would_part_the_pieces_is_refused(router, experts, key, allowed):
    moe = MoESettings(router=router, experts=experts, blocks=(1,))
    backbone = Vit(patch=4, width=16, depth=2, heads=2)
    with pytest.raises(UserError, match=f"^{key}: found .*{allowed}"):
        upcycle_model(backbone.build(IMAGE, moe), backbone.build(IMAGE), PIECES)


def test_units_are_redrawn_with_their_own_mean_and_deviation():
    # Fixture D2: rows 1 and 3 of W1 hold 3, 4, 7, 8: mean 5.5, deviation √(17/3) = 2.380476;
    # columns 1 and 3 of W2 hold 0, 1, 1, 4: mean 1.5, deviation √3.
    up = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    down = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 4]])
    units = torch.tensor([1, 3])
    redraw_units(up, units, torch.tensor([[1, -1], [0, 0.5]]))
    redraw_units(down.t(), units, torch.tensor([[0.0, 1], [-1, 2]]).t())
    expected = torch.tensor([[1, 2], [7.880476, 3.119524], [5, 6], [5.5, 6.690238]])
    torch.testing.assert_close(up, expected, atol=1e-6, rtol=0)
    expected = torch.tensor([[1, 1.5, 2, 3.232051], [0, -0.232051, 1, 4.964102]])
    torch.testing.assert_close(down, expected, atol=1e-6, rtol=0)


def test_each_expert_has_its_own_units_drawn_anew_and_each_seed_others():
    def redrawn(ratio: float, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        experts = Mlp(number=3, hidden_ratio=1.25, init="identical")
        layer = build_moe_feed_forward(NoisyTopK(), experts, 8)
        layer.experts.up_bias.data.uniform_()
        before = layer.experts.up.clone()
        Drop(ratio=ratio).redraw_experts(layer, seed)
        return [*(layer.experts.up != before).any(dim=1), *layer.experts.parameters()]

    first, second, third, *_ = redrawn(0.7, 0)
    assert first.sum() == second.sum() == 7  # ⌊0.7 · 10⌋
    assert not torch.equal(first, second) or not torch.equal(first, third)
    ours, again, other = redrawn(0.7, 0), redrawn(0.7, 0), redrawn(0.7, 1)
    assert all(map(torch.equal, ours, again)) and not torch.equal(ours[3], other[3])
    assert not any(changed.any() for changed in redrawn(0.0, 0)[:3])
