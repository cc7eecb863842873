"""What experts are for: fixtures by hand, experts that are told their roles, and chance."""

from itertools import permutations

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.measure.expert_roles import ExpertRoles
from moecore.measure.routing_metrics import expert_similarity as expert_similarity_file
from moecore.measure.routing_metrics.coactivation import (
    coactivation_lift,
    conditional_coactivation,
    count_coactivation,
    pair_lift_by_image,
)
from moecore.measure.routing_metrics.expert_information import (
    expert_information,
    permute_images,
)
from moecore.measure.routing_metrics.expert_similarity import expert_similarity, keep_layer_tokens
from moecore.measure.routing_metrics.layer_metrics import dead_expert_share, max_load_violation
from moecore.measure.routing_metrics.load_concentration import (
    chance_violation,
    choice_margin,
    cumulative_load_shares,
    mean_batch_violation,
)
from moecore.measure.routing_metrics.local_consistency import (
    consistency_by_image,
    consistency_by_threshold,
    window_use_histogram,
)
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import predict_in_batches
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.told import Told
from moecore.testing import check_measurement
from tests.measure.test_truth import subject, text_subject


def sets_of(*tokens: tuple[int, ...], experts: int) -> torch.Tensor:
    """Return one image whose tokens chose these experts: (1, T, E) bool."""
    rows = [[expert in token for expert in range(experts)] for token in tokens]
    return torch.tensor([rows])


def experts_by_count(*counts: tuple[int, ...]) -> torch.Tensor:
    """Return images of one choice a token, so many of each expert: (B, T, E) bool."""
    rows = [np.repeat(range(len(one)), one) for one in counts]
    return torch.nn.functional.one_hot(torch.tensor(np.array(rows)), len(counts[0])).bool()


def test_coactivation():
    """Experts 0 and 1 are with each other always, 2 is with both, 3 was once with both."""
    chosen = sets_of((0, 1, 2), (0, 2, 1), (3, 0, 1), experts=4)
    counts = count_coactivation(chosen)[0]
    third = 1 / 3
    expected = [[0, 1, 2 * third, third], [1, 0, 2 * third, third], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert conditional_coactivation(counts).tolist() == pytest.approx(np.array(expected))
    assert conditional_coactivation(counts).sum(dim=1).tolist() == pytest.approx([2] * 4)
    # 2 was chosen by two of three tokens: of those of 0 as many, of those of 3 none
    assert coactivation_lift(counts, 3)[0, 2] == pytest.approx(1)
    assert coactivation_lift(counts, 3)[3, 2] == 0


def test_pair_lift_is_the_mean_over_the_pairs():
    random = np.random.default_rng(0)
    scores = torch.from_numpy(random.random((9, 5, 6)))
    scores[..., 4] = -1  # nobody's expert
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)
    lift = coactivation_lift(count_coactivation(chosen).sum(dim=0), 45)
    pairs = [lift[tuple(token.nonzero()[:, 0])] for token in chosen.flatten(0, 1)]
    values = pair_lift_by_image(chosen)
    assert len(values) == 9 and float(values.mean()) == pytest.approx(float(np.mean(pairs)))
    with pytest.raises(UserError, match="k ≥ 2"):
        pair_lift_by_image(sets_of((0,), (1,), experts=2))


def test_information_of_classes():
    """Four images, two of each class; over all 24 orders of the classes the share is exact."""
    chosen = experts_by_count((4, 0), (2, 2), (1, 3), (0, 4)).numpy()
    labels = np.array([0, 0, 1, 1])[:, None].repeat(4, 1)
    _, *others = [labels[list(order)] for order in permutations(range(4))]
    told = expert_information(chosen, labels, others)
    assert told.information == pytest.approx(0.215762, abs=1e-6)
    assert (23 * told.chance + told.information) / 24 == pytest.approx(0.099029, abs=1e-6)
    assert told.p == pytest.approx(1 / 3)
    assert told.label_entropy == pytest.approx(np.log(2))
    assert told.excess_by_image.mean() == pytest.approx(told.information - told.chance)
    partly = np.concatenate([labels, [[-1] * 4]])
    unknown = expert_information(np.concatenate([chosen, chosen[:1]]), partly, [partly])
    assert unknown.information == pytest.approx(told.information)
    with pytest.raises(UserError, match="fewer than two labels"):
        expert_information(chosen, labels * 0, others)
    with pytest.raises(UserError, match="found 3 images .*; allowed: 4 and more"):
        expert_information(chosen[:3], labels[:3], permute_images(labels[:3], 200, 0))


def test_margin_and_load():
    scores = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.4, 0.1, 0.35, 0.15]]])
    margins = choice_margin(scores, sets_of((0, 1), (0, 2), experts=4))
    assert margins.mean().item() == pytest.approx(0.175) and margins.min() == pytest.approx(0.15)
    assert choice_margin(scores, sets_of((), (0, 1, 2, 3), experts=4)).isnan().all()
    batches = experts_by_count((30, 20, 10, 0), (30, 10, 19, 1))
    counts = batches.flatten(0, 1).sum(dim=0)
    assert max_load_violation(counts) == 1 and mean_batch_violation(batches, 1) == 1
    assert dead_expert_share(counts, 0.1) == 0.25
    assert cumulative_load_shares(counts)[1] == 0.75 and cumulative_load_shares(counts)[-1] == 1
    assert chance_violation(10**6, 4) < 0.01 < chance_violation(100, 4) < 0.5


def test_local_consistency():
    """Windows (0, 0), (0, 1), (1, 2): of the six uses at θ = 1 all are served by five sets."""
    uses = window_use_histogram(sets_of((0,), (0,), (1,), (2,), experts=3), 2)
    assert consistency_by_threshold(uses[0].numpy()).tolist() == pytest.approx([0.5, 0.75, 0.5])
    assert consistency_by_image(uses.numpy()).tolist() == pytest.approx([0.75])
    with pytest.raises(UserError, match="a window of 5"):
        window_use_histogram(sets_of((0,), (1,), experts=2), 5)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_experts_that_are_told_the_truth_tell_it(made):
    result = check_measurement(ExpertRoles(windows=(2, 9)), made(Told()))
    assert result.values["information_truth"].value == pytest.approx(1, abs=0.05)
    assert result.values["information_layer_before"].value == pytest.approx(1, abs=0.05)
    for layer in result.layers:
        assert layer.labels["truth"].p == pytest.approx(1 / 201)
        assert layer.labels["position"].p > 0.01 and "pair_lift" not in layer.values
        assert "consistency_9" not in layer.values
        assert layer.values["consistency_2"] == pytest.approx(
            layer.chances["consistency_2"], abs=0.06
        )
    assert ("class" in result.layers[0].labels) == (made is subject)
    assert ("word" in result.layers[0].labels) == (made is text_subject)


def test_experts_by_position_tell_the_position():
    """Four patches' experts of three are 2, 1, 1 or 2, 2, 0: H = 1.04 or ln 2, over ln 4."""
    measured = subject(Hash(by="position"))
    result = ExpertRoles().measure(measured, lambda name, compute: compute())
    assert result.values["information_position"].value >= 0.49
    assert result.values["information_truth"].value == pytest.approx(0, abs=0.01)
    assert result.layers[0].kept.shape == (40, 5, 3)


def test_where_it_does_not_apply():
    assert ExpertRoles.applies(subject(NoisyTopK())) is None
    assert "expert_choice" in ExpertRoles.applies(subject(ExpertChoice()))


def slow_similarity(outputs: torch.Tensor) -> float:
    """Return CKA of two experts (2, n, d) as HSIC(K, L) / √(HSIC(K, K) HSIC(L, L))."""
    n = outputs.shape[1]
    centre = np.eye(n) - 1 / n
    kernels = [centre @ one.numpy() @ one.numpy().T @ centre for one in outputs]
    hsic = [[np.trace(one @ other) for other in kernels] for one in kernels]
    return hsic[0][1] / np.sqrt(hsic[0][0] * hsic[1][1])


def test_expert_similarity(monkeypatch):
    """The fixture is of 4 tokens; without 10 for each number nothing is said."""
    first = torch.tensor([[1.0, 0], [0, 1], [2, 1], [-1, 1]]).double()
    second = torch.tensor([[2.0, 1], [1, 1], [3, 0], [0, 2]]).double()
    constant = torch.full((4, 2), 0.1).double()
    pair = [one.view(2, 2, 2) for one in (first, second, constant)]
    assert expert_similarity(pair) is None
    monkeypatch.setattr(expert_similarity_file, "LEAST", 1)
    alike = expert_similarity(pair)
    expected = [[1, 0.978596, np.nan], [0.978596, 1, np.nan], [np.nan] * 3]
    assert alike.cka.numpy() == pytest.approx(np.array(expected), abs=1e-6, nan_ok=True)
    assert alike.cosine[0, 1] == pytest.approx(0.800767, abs=1e-6)
    assert alike.by_image["expert_cka"].mean() == pytest.approx(0.978596, abs=1e-6)
    assert expert_similarity(pair[1:]) is None


def test_similarity_of_images_by_the_slow_formula():
    """What an image does to CKA is its derivative by the image's weight; turned outputs are 1."""
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 20, 4, 5, generator=random, dtype=torch.float64)
    outputs[2] = 3 * outputs[0] @ torch.linalg.qr(outputs[1, :2].view(-1, 5)[:5]).Q + 7
    alike = expert_similarity(outputs.unbind())
    assert alike.cka[0, 1] == pytest.approx(slow_similarity(outputs[:2].flatten(1, 2)))
    assert alike.cka[0, 2] == pytest.approx(1) and alike.chances["expert_cka"] < 0.1
    first, second = outputs[:2]
    again = [torch.cat([one[:1], *[one] * 499]) for one in (first, second)]
    step = expert_similarity(again).cka[0, 1] - alike.cka[0, 1]
    values = expert_similarity([first, second]).by_image["expert_cka"]
    assert step * len(again[0]) == pytest.approx(values[0] - values.mean(), rel=0.01)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_kept_tokens_are_those_of_the_images_own_pass(made):
    """An expert's outputs, weighted, are the layer's, where one expert is chosen with weight 1."""
    measured = made(NoisyTopK(k=1, renormalise=True))
    images = measured.data.test.images
    (layer, *_) = [one for one in measured.model.modules() if isinstance(one, MoEFeedForward)]
    outputs = []
    layer.register_forward_hook(lambda *given: outputs.append(given[2]))
    with keep_layer_tokens(measured.model, len(images)) as kept:
        predict_in_batches(measured.model, images, prediction=False)
    tokens, (record,) = outputs[-1]
    said = torch.stack(next(iter(kept.values())).outputs(len(images)), dim=2)
    rows, number = torch.arange(len(images)).unsqueeze(-1), said.shape[1]
    where = (rows + torch.arange(number) * (tokens.shape[1] // number)) % tokens.shape[1]
    own = said[record.chosen[rows, where]].view(len(images), number, -1)
    torch.testing.assert_close(own.float(), tokens[rows, where])


@pytest.mark.filterwarnings("error")
def test_labels_of_tokens_without_experts_tell_nothing():
    """Of 20 images, the tokens that Mixture-of-Depths processes last are of one class's."""
    result = ExpertRoles(images=20).measure(subject(Depth()), lambda name, compute: compute())
    assert "class" in result.layers[0].labels and "class" not in result.layers[1].labels
