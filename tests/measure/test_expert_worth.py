"""What experts are worth: they are barred by the router's own rule, and losses are paired."""

from itertools import product

import numpy as np
import pytest
import torch

from moecore.core.routing_records import RoutingRecord
from moecore.measure.expert_worth import ExpertWorth, draw_experts, expert_counts_to_remove
from moecore.measure.routing_metrics.alternative_choices import (
    bar_experts,
    drop_choices,
    drop_weights,
    find_ranked_choice,
    list_routers,
)
from moecore.measure.values import Found
from moecore.nn.backbones.vit import Vit
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.experts.base import ZeroComputation
from moecore.nn.experts.eigen import Eigen
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.noisy_top_k import GroupLimitedChoice, NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.nn.routers.told import Told
from moecore.nn.routers.top_p import TopP
from moecore.testing import check_measurement
from moecore.testing.check_helpers import small_data, small_vit
from moecore.training.surgery.expert_reduction import compute_all_outputs
from tests.measure.subjects import compute_without_cache
from tests.measure.test_truth import IMAGE, subject, text_subject

WAYS = ("as_is", "renormalised", "reroute")
ROUTERS = [
    NoisyTopK(k=2),
    NoisyTopK(k=2, score="sigmoid", balance=LossFree()),
    NoisyTopK(k=2, groups=GroupLimitedChoice(number=2, kept=1)),
    Relu(k=1),
    TopP(threshold=0.9),
    Eigenbasis(k=2),
]


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_barred_experts_are_not_chosen(router):
    """Elsewhere all is as before; what a top-k router chooses is the best of the others."""
    model = small_vit(moe=MoESettings(router=router, experts=Mlp(number=4), blocks="all"))
    images = torch.from_numpy(small_data().test.images).float() / 255
    with torch.no_grad():
        before = model(images)
        with bar_experts(model, [torch.tensor([False, True, False, False]), None]):
            first, _ = model(images).routing
        after = model(images)
    assert not first.chosen[..., 1].any() and before.routing[0].chosen[..., 1].any()
    assert not first.combine[..., 1].any()
    assert torch.equal(before.prediction, after.prediction)
    assert torch.equal(before.routing[0].probs, first.probs)
    if router in (ROUTERS[0], ROUTERS[5]):
        others = first.logits.index_fill(-1, torch.tensor([1]), -torch.inf).topk(2).indices
        assert first.chosen.gather(-1, others[..., :1]).all()
        assert torch.equal(first.chosen, torch.zeros_like(first.chosen).scatter(-1, others, True))


def test_the_one_that_is_left_gets_all_tokens():
    """Of two experts and k = 1 it is weighted by its own gate."""
    moe = MoESettings(router=NoisyTopK(k=1), experts=Mlp(number=2), blocks="all")
    model = small_vit(moe=moe)
    (layer, _) = [one for one in model.modules() if isinstance(one, MoEFeedForward)]
    tokens = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), bar_experts(model, [torch.tensor([True, False]), None]):
        output, (record,) = layer(tokens)
    assert record.chosen[..., 1].all()
    assert torch.equal(record.combine[..., 1], record.probs[..., 1])
    assert output.shape == tokens.shape and not output.isnan().any()


def test_a_dropped_choice_by_hand():
    """Fixture E7: without expert 0 of (0.5, 0, 0.2, 0.3) the others are as they are, or doubled."""
    combine = torch.tensor([[[0.5, 0, 0.2, 0.3]]])
    outputs = torch.tensor([[1.0, 0], [9, 9], [0, 1], [2, 2]])
    record = RoutingRecord(combine, combine, combine, combine > 0, combine)
    first, third = (find_ranked_choice(record, rank) for rank in (1, 3))
    assert first.tolist() == [[[True, False, False, False]]] and third[0, 0, 2]
    assert not find_ranked_choice(record, 4).any()
    for is_renormalised, expected in ((False, [0.6, 0.8]), (True, [1.2, 1.6])):
        left = drop_weights(combine, first, is_renormalised)
        assert (left @ outputs).flatten().tolist() == pytest.approx(expected)
    alone = combine * first
    assert not drop_weights(alone, first, True).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("router", "experts"),
    [(NoisyTopK(k=2), Mlp(number=4)), (Eigenbasis(threshold=-1), Eigen(number=4))],
    ids=["noisy_top_k", "eigenbasis"],
)
def test_a_dropped_choice_of_a_model(router, experts, way):
    """The layer's output is that of its record, which a dense evaluation says."""
    model = small_vit(moe=MoESettings(router=router, experts=experts, blocks="all")).eval()
    (layer, _) = [one for one in model.modules() if isinstance(one, MoEFeedForward)]
    seen = []
    layer.register_forward_hook(lambda _, given, said: seen.append((*given, *said)))
    images = torch.from_numpy(small_data().test.images).float() / 255
    with torch.no_grad():
        whole = model(images)
        with drop_choices(model, 1, way):
            model(images)
        again = model(images)
        (tokens, *_), (_, _, output, (record,)), _ = seen
        said = list(compute_all_outputs(layer, tokens.flatten(0, 1)))
    assert torch.equal(whole.prediction, again.prediction)
    outputs = torch.stack(said).view(4, *output.shape)
    torch.testing.assert_close(output, torch.einsum("nte,entd->ntd", record.combine, outputs))
    before = whole.routing[0]
    is_first = find_ranked_choice(before, 1)
    assert not record.chosen[is_first].any()
    assert (record.chosen.sum(dim=-1) == (2 if way == "reroute" else 1)).all()
    others = before.chosen & ~is_first
    assert record.chosen[others].all()
    if way == "renormalised":
        torch.testing.assert_close(record.combine.sum(dim=-1), before.combine.sum(dim=-1))
    if way == "as_is":
        assert torch.equal(record.combine[others], before.combine[others])


def worth_by_expert(result: Found) -> dict[tuple, float]:
    """Return (layer, expert) → its worth."""
    values = [value for value in result.all("expert_worth") if value.at]
    return {(value.at["layer"], value.at["expert"]): value.value for value in values}


@pytest.mark.parametrize("made", [subject, text_subject])
def test_worth(made):
    result = check_measurement(ExpertWorth(draws=2), made(NoisyTopK(k=1)))
    worths = worth_by_expert(result)
    assert list(worths) == list(product((1, 2), range(3)))
    assert result.find("expert_worth").value == pytest.approx(np.mean([*worths.values()]))
    assert list(result.curve("lost_without_random", "removed")) == [1, 2]
    # without the only choice nothing is left to scale
    first, scaled = (result.find(f"lost_without_choice_1_{way}") for way in WAYS[:2])
    assert first.interval == scaled.interval
    assert np.sum(result.facts["load"], axis=1) == pytest.approx([1, 1])
    for lost in result.all("lost_without_most_used"):
        assert lost.low <= lost.value + 1e-9 and lost.value <= lost.high + 1e-9


@pytest.mark.parametrize(
    ("experts", "removed"),
    [
        (Mlp(number=3, fine=2), [1, 2, 3, 4]),
        (Mlp(number=3, zero_computation=ZeroComputation()), [1, 2, 3, 4, 5]),
    ],
    ids=["fine", "zero_computation"],
)
def test_all_that_a_router_chooses_among_have_a_worth(experts, removed):
    """Pieces, of which a token uses two, and experts without a network."""
    measured = subject(NoisyTopK(k=1), experts=experts)
    result = ExpertWorth(draws=1, images=10).collect_result(measured, compute_without_cache)
    assert len(worth_by_expert(result)) == 2 * 6
    assert list(result.curve("lost_without_random", "removed")) == removed


def test_an_expert_that_nobody_uses_is_worth_nothing():
    measured = subject(NoisyTopK(k=1, balance=LossFree()))
    for router in list_routers(measured.model):
        router.balance.bias[2] = -1e3
    result = ExpertWorth(draws=1).collect_result(measured, compute_without_cache)
    worths = worth_by_expert(result)
    assert worths[1, 2] == worths[2, 2] == 0
    assert result.find("lost_without_least_used", removed=1).value == 0
    assert all(load[2] == 0 for load in result.facts["load"])


def test_what_is_removed():
    assert expert_counts_to_remove(3) == [1, 2, 3] and expert_counts_to_remove(62)[-1] == 62
    assert len(expert_counts_to_remove(62)) == 8
    few, more = draw_experts(2, 8, 2, 1), draw_experts(2, 8, 5, 1)
    assert few == [layer[:2] for layer in more] and few[0] != few[1]


def test_where_it_does_not_apply():
    assert ExpertWorth.applies(subject(NoisyTopK(k=2))) is None
    assert "may choose all" in ExpertWorth.applies(subject(NoisyTopK(k=3)))
    assert "told does not choose by scores" in ExpertWorth.applies(subject(Told()))
    dense = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE)
    assert "no experts" in ExpertWorth.applies(subject(Told())._replace(model=dense))
