"""Fewer experts out of a trained model: what experts do, pruning, merging, and what is refused."""

from functools import partial

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.eigen import Eigen
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.cosine import Cosine
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.dynamic import Dynamic
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.folded import Folded
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.nn.routers.teacher_routed import TeacherRouted
from moecore.nn.routers.top_p import TopP
from moecore.testing.check_helpers import IMAGE, small_data, small_vit
from moecore.training.artifacts import load_model, save_model
from moecore.training.surgery.expert_reduction import ExpertUseSums, measure_expert_use
from moecore.training.surgery.merge import Merge, cluster_outputs, cluster_shares, merge_parameter
from moecore.training.surgery.prune import Prune

IMAGES = torch.rand(6, 1, 8, 8)
BIAS = NoisyTopK(score="sigmoid", balance={"kind": "loss_free"})
RESIDUAL = NoisyTopK(residual=True)


def settings(router=None, experts=None) -> MoESettings:
    experts = experts or Mlp(number=4)
    return MoESettings(router=router or NoisyTopK(), experts=experts, blocks="all")


def test_reap_is_the_mean_over_the_tokens_that_chose_an_expert():
    # Fixture D3: lengths of the outputs, token by token: 5 1 2 | 1 10 √2 | 1 2 √5. Expert 0 is used
    # by tokens 0 and 2: (0.7 · 5 + 0.9 · 1) / 2 = 2.2; expert 1 by all: (0.3 + 2 + 0.2) / 3; expert
    # 2 by token 1: 0.8 · √2.
    outputs = torch.tensor(
        [[[3.0, 4], [1, 0], [0, 2]], [[0, 1], [6, 8], [1, 1]], [[1, 0], [0, 2], [2, 1]]]
    )
    combine = torch.tensor([[0.7, 0.3, 0], [0, 0.2, 0.8], [0.9, 0.1, 0]], dtype=torch.float64)
    sums = ExpertUseSums(3)
    sums.tokens = 3
    for expert in range(3):
        weights = combine[:, expert]
        sums.add_outputs(expert, outputs[:, expert], weights, weights > 0)
    use = sums.average()
    assert use.counts.tolist() == [2, 3, 1]
    assert use.reap.tolist() == pytest.approx([2.2, 0.833333, 1.131371], abs=1e-6)
    torch.testing.assert_close(use.means[1], torch.tensor([7 / 3, 10 / 3], dtype=torch.float64))


def test_the_nearest_clusters_are_joined_and_averaged_by_their_tokens():
    # Fixture D4: 0 and 1 lie 1 apart; 2 lies 3 and √10 from these, 3.081139 on average; 3 is 4 from
    # 2. (3 · 1 + 1 · 5 + 2 · 2) / 6 = 2. Of a cluster that no token chose: the plain mean.
    means = torch.tensor([[0.0, 0], [1, 0], [0, 3], [4, 3]])
    labels, heights = cluster_outputs(means, 2, "average")
    assert labels.tolist() == [0, 0, 0, 1]
    assert heights == pytest.approx((1, 3.081139), abs=1e-6)
    merged = partial(merge_parameter, torch.tensor([[1.0], [5], [2], [4]]))
    counts = torch.tensor([3, 1, 2, 2])
    assert merged(cluster_shares(labels, counts, 2)).flatten().tolist() == [2, 4]
    none = merged(cluster_shares(labels, torch.tensor([0, 0, 0, 2]), 2)).flatten()
    assert none.tolist() == pytest.approx([8 / 3, 4])
    assert cluster_outputs(means, 2, "single")[1] == (1, 3)
    assert cluster_outputs(means, 2, "complete")[1] == pytest.approx((1, 10**0.5))


def test_weights_and_probs_are_summed_within_clusters():
    # Fixture D4: probs 0.4, 0.3, 0.2, 0.1 with clusters 0, 0, 0, 1; both chosen are in the first.
    router = Folded(router=NoisyTopK(k=2, renormalise=True), experts=4).build(1, 2).eval()
    router.clusters.copy_(torch.tensor([0, 0, 0, 1]))
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    router.router.weight.data.copy_(probs.log().unsqueeze(1))
    plan, record = router(torch.ones(1, 1, 1))
    torch.testing.assert_close(record.probs[0, 0], torch.tensor([0.9, 0.1]))
    torch.testing.assert_close(record.combine[0, 0], torch.tensor([1.0, 0]))
    assert record.chosen.tolist() == [[[True, False]]]
    torch.testing.assert_close(plan.combine(plan.dispatch(torch.ones(1, 1, 1)).values).item(), 1.0)


@pytest.mark.parametrize(
    "moe",
    [
        None,
        settings(Eigenbasis()),
        settings(BIAS, Mlp(number=4, shared=1)),
        *map(settings, (NoisyTopK(), Cosine(), TopP(), Relu(), RESIDUAL)),
    ],
)
@pytest.mark.parametrize("by", ["reap", "load"])
def test_a_pruned_model_is_the_whole_one_that_never_chooses_the_others(moe, by, tmp_path):
    model = small_vit(moe=moe)
    uses = measure_expert_use(model, small_data().train, 24)
    prune = Prune(left=0.75, by=by)
    save_model(tmp_path, prune.reduce_experts(model, uses))
    pruned = load_model(tmp_path)(IMAGES)
    dropped_before = None
    for name, use in uses.items():
        kept = prune.kept_experts(model.moe, use)
        dropped = ~torch.isin(torch.arange(4), kept)
        assert dropped[(use.reap if by == "reap" else use.counts).argmin()]
        layer = model.get_submodule(name)
        # of the map of the logits of the layer before, those of its dropped experts are gone
        if getattr(layer.router, "residual", None) is not None and dropped_before is not None:
            layer.router.residual.data[:, dropped_before] = 0
        _never_choose(layer, dropped)
        dropped_before = dropped
    whole = model(IMAGES)
    torch.testing.assert_close(pruned.prediction, whole.prediction, atol=1e-5, rtol=1e-4)
    assert torch.equal(pruned.routing[-1].chosen, whole.routing[-1].chosen[..., kept])


def _never_choose(layer, dropped):
    """Have a layer's router see logits of −10⁴ for these experts: cosines of −1 from a basis."""
    router = layer.router
    if hasattr(router, "logits"):
        logits = router.logits
        router.logits = lambda tokens: logits(tokens).masked_fill(dropped, -1e4)
    else:
        decide = router.decide
        router.decide = lambda scores: decide(scores.masked_fill(dropped, -1.0))


@pytest.mark.parametrize("fold", [True, False])
def test_equal_experts_merge_without_a_change(fold, tmp_path):
    torch.manual_seed(0)
    model = small_vit(moe=settings(NoisyTopK(renormalise=True)))
    for layer in (block.mlp for block in model.blocks):
        for values in layer.experts.parameters():
            values.data[2:] = values.data[:2]  # 0 and 2 are one, 1 and 3
    save_model(tmp_path, Merge(left=0.5, fold=fold).reduce_model(model, small_data().train))
    merged, before = load_model(tmp_path)(IMAGES), model(IMAGES)
    torch.testing.assert_close(merged.prediction, before.prediction, atol=1e-5, rtol=1e-4)
    shares = before.routing[0].probs
    if fold:
        assert merged.routing[0].probs.shape[-1] == 2
        shares = shares.unflatten(-1, (2, 2)).sum(dim=-2)
    torch.testing.assert_close(merged.routing[0].probs, shares)


@pytest.mark.parametrize(
    ("reduction", "moe", "message"),
    [
        (Prune(left=0.25), settings(), "prune.left: found 0.25, .* 1 of 4 .*leave 2 .*to 3"),
        (Merge(left=0.8), settings(), "merge.left: found 0.8, which leaves 4 of 4.*allowed: .*2"),
        (Prune(), settings(NoisyTopK(k=3)), "prune.left: .*leaves 2 of 4.*leave 3"),
        (Prune(), settings(Hash()), "router.kind: found hash.*allowed: routers that learn"),
        (Prune(), settings(ExpertChoice()), "router.kind: found expert_choice.*by which tokens"),
        (Merge(), settings(TeacherRouted()), "router.kind: found teacher_routed.*allowed"),
        (
            Prune(),
            settings(experts=Mlp(number=4, shared=3)),
            "experts.number: found 2 remaining experts: shared: found 3; allowed: 0 to 1",
        ),
        (Merge(), settings(BIAS), "router.balance: found loss_free.*or merge.fold: false"),
        (Merge(), settings(Dynamic()), "router.kind: found dynamic.*or merge.fold: false"),
        (Merge(), settings(RESIDUAL), "router.residual: found true.*or merge.fold: false"),
        (Merge(), settings(Depth()), "router.kind: found depth.*or merge.fold: false"),
        (Prune(), settings(Folded(router=Hash())), "router.kind: found folded.*allowed"),
        (Merge(), settings(experts=Eigen(number=4)), "experts.kind: found eigen.*allowed: mlp"),
    ],
)
def test_what_cannot_have_fewer_experts_is_refused_in_one_line(reduction, moe, message):
    model = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE, moe)
    with pytest.raises(UserError, match=f"^{message}") as error:
        reduction.reduce_model(model, small_data().train)
    assert "\n" not in str(error.value)


def test_groups_of_experts_stay_equal_or_are_refused():
    moe = settings(NoisyTopK(k=1, groups={"number": 2, "kept": 1}))
    uses = measure_expert_use(model := small_vit(moe=moe), small_data().train, 24)
    uneven = {name: use._replace(reap=torch.tensor([1.0, 2, 3, 4])) for name, use in uses.items()}
    with pytest.raises(UserError, match=r"^router.groups: found 2, .*\[0, 2\].*allowed: null"):
        Prune().reduce_experts(model, uneven)
    even = {name: use._replace(reap=torch.tensor([1.0, 2, 1, 2])) for name, use in uses.items()}
    assert Prune().reduce_experts(model, even)(IMAGES).prediction.isfinite().all()
