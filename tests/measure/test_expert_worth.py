from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.experts import Eigen, Mlp, ZeroComputation
from moecore.measure import router_regret
from moecore.measure.expert_worth import ExpertWorth, draw_experts, expert_counts_to_remove
from moecore.measure.router_regret import DrawnTokens, RouterRegret, regret_metrics_by_image
from moecore.measure.routing_metrics import interventions as module
from moecore.measure.values import Found
from moecore.nn.backbones.vit import Vit
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.routers import Eigenbasis, GroupLimitedChoice, NoisyTopK, Relu, Told, TopP
from moecore.tasks.regression import Regression
from moecore.testing import check_measurement
from moecore.testing.check_helpers import small_data, small_vit
from moecore.training.surgery.expert_reduction import outputs_of_all_experts
from tests.measure.subjects import compute_without_cache
from tests.measure.test_truth import IMAGE, subject, text_subject

WAYS = ("as_is", "renormalised", "reroute")
ROUTERS = [
    *(NoisyTopK(k=2), NoisyTopK(k=2, score="sigmoid", balance=LossFree())),
    NoisyTopK(k=2, groups=GroupLimitedChoice(number=2, kept=1)),
    *(Relu(k=1), TopP(threshold=0.9), Eigenbasis(k=2)),
]


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_barred_experts_are_not_chosen(router):
    """Elsewhere all is as before; what a top-k router chooses is the best of the others."""
    model = small_vit(moe=MoESettings(router=router, experts=Mlp(number=4), blocks="all"))
    images = torch.from_numpy(small_data().test.images).float() / 255
    with torch.no_grad():
        before = model(images)
        with module.bar_experts(model, [torch.tensor([False, True, False, False]), None]):
            first, _ = model(images).routing
        after = model(images)
    assert not first.chosen[..., 1].any() and before.routing[0].chosen[..., 1].any()
    assert not first.combine[..., 1].any() and torch.equal(before.prediction, after.prediction)
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
    with torch.no_grad(), module.bar_experts(model, [torch.tensor([True, False]), None]):
        output, (record,) = layer(tokens)
    assert record.chosen[..., 1].all() and torch.equal(record.combine[..., 1], record.probs[..., 1])
    assert output.shape == tokens.shape and not output.isnan().any()


def test_a_dropped_choice_by_hand():
    """Fixture E7: without expert 0 of (0.5, 0, 0.2, 0.3) the others are as they are, or doubled."""
    combine = torch.tensor([[[0.5, 0, 0.2, 0.3]]])
    outputs = torch.tensor([[1.0, 0], [9, 9], [0, 1], [2, 2]])
    record = RoutingRecord(combine, combine, combine, combine > 0, combine)
    first, third = (module.find_ranked_choice(record, rank) for rank in (1, 3))
    assert first.tolist() == [[[True, False, False, False]]] and third[0, 0, 2]
    assert not module.find_ranked_choice(record, 4).any()
    for is_renormalised, expected in ((False, [0.6, 0.8]), (True, [1.2, 1.6])):
        left = module.drop_weights(combine, first, is_renormalised)
        assert (left @ outputs).flatten().tolist() == pytest.approx(expected)
    assert not module.drop_weights(combine * first, first, True).any()


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
        with module.drop_ranked_choice(model, 1, way):
            model(images)
        again = model(images)
        (tokens, *_), (_, _, output, (record,)), _ = seen
        said = list(outputs_of_all_experts(layer, tokens.flatten(0, 1)))
    assert torch.equal(whole.prediction, again.prediction)
    outputs = torch.stack(said).view(4, *output.shape)
    torch.testing.assert_close(output, torch.einsum("nte,entd->ntd", record.combine, outputs))
    before = whole.routing[0]
    is_first = module.find_ranked_choice(before, 1)
    assert not record.chosen[is_first].any()
    assert (record.chosen.sum(dim=-1) == (2 if way == "reroute" else 1)).all()
    others = before.chosen & ~is_first
    assert record.chosen[others].all()
    if way == "renormalised":
        torch.testing.assert_close(record.combine.sum(dim=-1), before.combine.sum(dim=-1))
    if way == "as_is":
        assert torch.equal(record.combine[others], before.combine[others])


def worth_by_expert(result: Found) -> dict[tuple, float]:
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
    for router in module.list_routers(measured.model):
        router.balance.bias[2] = -1e3
    result = ExpertWorth(draws=1).collect_result(measured, compute_without_cache)
    worths = worth_by_expert(result)
    assert worths[1, 2] == worths[2, 2] == 0
    assert result.find("lost_without_least_used", removed=1).value == 0
    assert all(load[2] == 0 for load in result.facts["load"])


def test_what_is_removed_and_where_it_does_not_apply():
    assert expert_counts_to_remove(3) == [1, 2, 3] and expert_counts_to_remove(62)[-1] == 62
    assert len(expert_counts_to_remove(62)) == 8
    few, more = draw_experts(2, 8, 2, 1), draw_experts(2, 8, 5, 1)
    assert few == [layer[:2] for layer in more] and few[0] != few[1]
    assert ExpertWorth.applies(subject(NoisyTopK(k=2))) is None
    assert "may choose all" in ExpertWorth.applies(subject(NoisyTopK(k=3)))
    assert "told does not choose by scores" in ExpertWorth.applies(subject(Told()))
    dense = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE)
    assert "no experts" in ExpertWorth.applies(subject(Told())._replace(model=dense))


def test_one_token_by_hand():
    """Its layer's output is the class scores, the weights a softmax over the set."""
    logits = torch.tensor([0.2, 1, -0.5, 0.5], dtype=torch.float64)
    outputs = torch.tensor([[1, 0], [2, -1], [-1, 1], [0.5, 0.5]], dtype=torch.float64)
    sets = module.expert_subsets(4, 2)
    assert [tuple(one.nonzero()[0]) for one in sets] == list(combinations(range(4), 2))
    answers = [logits[one].softmax(0) @ outputs[one] for one in torch.from_numpy(sets)]
    losses = np.array([float(cross_entropy(answer, torch.tensor(0))) for answer in answers])
    expected = [0.088519, 0.690868, 0.502837, 0.11685, 0.143692, 0.997826]
    assert losses == pytest.approx(expected, abs=1e-6)
    found = regret_metrics_by_image(np.tile([*losses, losses[4]], (2, 1, 1)))
    assert found["router_regret"] == pytest.approx(0.055173, abs=1e-6) and losses.argmin() == 0
    assert found["better_sets"] == pytest.approx(1 / 3)
    assert found["router_regret_normalised"] == pytest.approx(0.164737, abs=1e-6)
    many = module.expert_subsets(40, 3)
    assert many.shape == (256, 40) and (many.sum(axis=1) == 3).all()
    assert np.array_equal(many, module.expert_subsets(40, 3))


def test_a_fixed_set_is_chosen_on_the_other_half():
    """The first half likes set 1, the second set 0: each has what the other likes."""
    losses = np.array([[3, 1], [3, 1], [0, 2], [0, 4]])
    is_first = np.array([True, True, False, False])
    assert module.fixed_subset_gain(losses, np.ones(4), is_first).tolist() == [-2, -2, -1, -3]


def test_losses_are_those_of_a_slow_reference():
    """With weights that are a softmax over the set, logits of the others at −∞ give the same."""
    measured = subject(NoisyTopK(k=2, renormalise=True))
    settings = RouterRegret(images=4, tokens=2, batch=5)
    drawn = settings.draw_tokens(measured.model, 0, evenly_spaced_indices(40, 4))
    sets = module.expert_subsets(3, 2)
    losses = np.array(router_regret.subset_losses(measured, 0, drawn, sets, settings.batch))
    assert losses.shape == (4, 2, 4)
    model, test = measured.model, measured.data.test
    random = np.random.default_rng([0, 0])
    for row, index in enumerate(evenly_spaced_indices(40, 4)):
        pixels = torch.from_numpy(test.images[index : index + 1]).float() / 255
        label = torch.from_numpy(test.labels[index : index + 1])
        with torch.no_grad():
            clean = model(pixels).routing
            for column, token in enumerate(random.permutation(5)[:2]):
                own = tuple(clean[0].chosen[0, token].nonzero()[:, 0].tolist())
                for place, allowed in enumerate([*combinations(range(3), 2), own]):
                    barred = torch.zeros(1, 5, 3, dtype=torch.bool)
                    barred[0, token] = True
                    barred[0, token, list(allowed)] = False
                    with limited_logits(model, [barred, ~clean[1].chosen]):
                        expected = cross_entropy(model(pixels).prediction, label)
                    assert losses[row, column, place] == pytest.approx(float(expected), abs=1e-5)


@contextmanager
def limited_logits(model, barred):
    """Give barred experts of each layer a logit that no softmax knows."""
    limit = lambda logits, mask, tokens: logits(tokens).masked_fill(mask, -1e9)
    routers = module.list_routers(model)
    for router, mask in zip(routers, barred, strict=True):
        router.logits = partial(limit, router.logits, mask)
    yield
    for router in routers:
        del router.logits


@pytest.mark.parametrize("router", [NoisyTopK(k=1), Eigenbasis(k=2)], ids=repr)
def test_regret(router):
    result = check_measurement(RouterRegret(images=6, tokens=3), subject(router))
    assert result.facts["is_exact"] and result.facts["subsets"] == 3
    regret, better = (result.find(name).value for name in ("router_regret", "better_sets"))
    assert regret >= 0 and 0 <= better < 1
    layers = result.curve("router_regret", "layer")
    assert list(layers) == [1, 2] and regret == pytest.approx(np.mean([*layers.values()]))


def test_sets_are_of_pieces_where_experts_are_split():
    """Of three experts in two pieces each a token of k = 1 has two of six: 15 sets."""
    measured = subject(NoisyTopK(k=1), experts=Mlp(number=3, fine=2))
    result = RouterRegret(images=4, tokens=1).collect_result(measured, compute_without_cache)
    assert result.facts["is_exact"] and result.facts["subsets"] == 15


def test_losses_of_a_text_are_those_of_a_slow_reference():
    """One word's experts are swapped for others; the block before is read as it is."""
    text = text_subject(NoisyTopK(k=2, renormalise=True))
    model, test = text.model, text.data.test
    drawn = DrawnTokens(np.array([3, 7]), np.array([[2], [0]]))
    losses = np.array(router_regret.subset_losses(text, 0, drawn, module.expert_subsets(3, 2), 3))
    assert losses.shape == (2, 1, 4)
    first, _ = module.list_routers(model)
    for place, index in enumerate(drawn.images):
        words = torch.from_numpy(test.images[[index]])
        right = torch.from_numpy(test.labels[[index]]).long()
        with torch.no_grad():
            own = model(words).routing[0].chosen[0, drawn.tokens[place, 0]]
            later = model(words).routing[1].chosen
        sets = [torch.from_numpy(one) for one in module.expert_subsets(3, 2)]
        for column, allowed in enumerate([*sets, own]):
            expected = text_loss(model, first, words, right, drawn.tokens[place, 0], allowed, later)
            assert losses[place, 0, column] == pytest.approx(expected, abs=1e-5)


def text_loss(model, router, words, right, token, allowed, later) -> float:
    """Return the mean nats of a block's words, one of which has these experts in its last pass."""
    calls = []

    def bar(*given) -> None:
        calls.append(len(calls))
        barred = torch.zeros(1, 4, 3, dtype=torch.bool)
        barred[0, token] = ~allowed
        router.barred = barred if len(calls) == 2 else None

    hook = router.register_forward_pre_hook(bar)
    _, second = module.list_routers(model)
    with torch.no_grad():
        second.barred = ~later
        loss = cross_entropy(model(words).prediction[0], right[0])
    hook.remove()
    router.barred = second.barred = None
    assert len(calls) == 2
    return float(loss)


def test_regret_of_ages_and_texts():
    """The loss is the task's own: of ages |error| / deviation, of a text nats per word."""
    ages = IMAGE.model_copy(update={"task": Regression(target="age", mean=40, deviation=10)})
    measured = subject(NoisyTopK(k=1), image=ages)
    result = RouterRegret(images=4, tokens=2).collect_result(measured, compute_without_cache)
    assert result.facts["unit"] == "deviations" and result.find("router_regret").value > 0
    result = check_measurement(RouterRegret(images=4, tokens=2), text_subject(NoisyTopK(k=1)))
    assert result.facts["unit"] == "nats per word" and result.find("router_regret").value > 0


def test_best_choices_of_the_explorers_images():
    """Of the first token set 1 is best, of the second its own; four patches share a coarse one."""
    layouts = [TokenLayout(1, (1, 1), (8, 8)), TokenLayout(1, (2, 2), (8, 8))]
    model = SimpleNamespace(layouts=layouts)
    drawn = DrawnTokens(np.array([5]), np.array([[1, 0]]))
    losses = [[[0.9, 0.25, 0.5], [0.9, 0.8, 0.8]]]
    sets = module.expert_subsets(2, 1)
    first, second = router_regret.find_best_choices(model, 0, drawn, losses, sets)
    assert (first.image, first.tokens, first.experts, first.saved) == (5, [1, 2, 3, 4], [1], 0.25)
    assert (second.tokens, second.experts, second.saved) == ([0], [], 0)


def test_regret_by_image():
    """Image 0: its two tokens lose 1 and 0 beside a best of 1; image 1 nothing, and has no room."""
    values = regret_metrics_by_image(np.array([[[1, 3, 2], [1, 3, 1]], [[2, 2, 2], [2, 2, 2]]]))
    assert values["router_regret"].tolist() == [0.5, 0]
    assert values["better_sets"].tolist() == [0.25, 0]
    assert values["router_regret_normalised"].mean() == pytest.approx(0.25 / 0.5)
    flat = regret_metrics_by_image(np.full((2, 2, 3), 2.0))  # of a layer whose experts are equal
    means = router_regret.means_over_layers([values, flat])
    assert means["router_regret"].tolist() == [0.25, 0] and "router_regret_normalised" not in means


def test_regret_needs_a_choice_by_scores():
    groups = NoisyTopK(k=1, groups=GroupLimitedChoice(number=3, kept=1))
    assert "groups" in RouterRegret.applies(subject(groups))
    assert "capacity" in RouterRegret.applies(subject(NoisyTopK(eval_capacity_factor=1)))
    assert "may choose all" in RouterRegret.applies(subject(NoisyTopK(k=3)))
