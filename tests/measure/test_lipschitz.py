import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.streams import derived_seed
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure import lipschitz
from moecore.nn.backbones import base_model, single_layer, vit
from moecore.nn.layers.lipschitz_lemma import LemmaTerms, lemma_1_terms, row_jacobians
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import image_batches
from moecore.parts import Classification, Values
from tests.measure.subjects import built, compute_without_cache

TERMS = ("bound", "jacobian", "router")
SETTINGS = lipschitz.Lipschitz(images=6, lemma_tokens=5)
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 0.5}
EIGEN = {"kind": "eigen", "number": 4, "hidden_ratio": 0.5}
VIT = vit.Vit(patch=6, width=16, depth=2, heads=2, stem="conv")
LINEAR = {"kind": "noisy_top_k", "k": 1}
IMAGE = base_model.ImageSpec(
    channels=1, size=12, task=Classification(classes=("a", "b", "c")), mean=(0.5,), std=(0.5,)
)


def sparse(router: dict, experts: dict = MLP, blocks: tuple[int, ...] = (1,)) -> MoESettings:
    return MoESettings(router=router, experts=experts, blocks=blocks)


MODELS = {
    "dense": (VIT, None),
    "vmoe": (VIT, sparse(LINEAR, blocks=(0, 1))),
    "frozen": (VIT, sparse({"kind": "frozen_copy", "router": LINEAR, "until": 0.5})),
    "smoe": (VIT, sparse({"kind": "top_k_softmax", "k": 2})),
    "eigen": (VIT, sparse(LINEAR, EIGEN)),
    "ermoe": (VIT, sparse({"kind": "eigenbasis", "k": 2, "threshold": 0.5}, EIGEN)),
    "hash": (VIT, sparse({"kind": "hash", "k": 1, "by": "patch"})),
    "soft": (VIT, sparse({"kind": "soft_slots", "slots": 2})),
    "choice": (VIT, sparse({"kind": "expert_choice", "k": 2})),
    "single": (single_layer.SingleLayer(), sparse(LINEAR, blocks=(0,))),
}
OTHERS = {"ermoe": "eigenbasis", "soft": "soft_slots", "choice": "expert_choice"}
# models without Lemma 1 → a word of the reason
REASONS = {"dense": "dense", "hash": "hash", **OTHERS}


@pytest.fixture(scope="module")
def models(data):
    return {name: built(*parts, data, 4) for name, parts in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_slopes(results, name):
    found = results[name]
    for part in ("local", "margin", "lower_bound"):
        mean = found.find(f"lipschitz_{part}_mean")
        assert 0 <= mean.low <= mean.value <= mean.high
    assert mean.value < found.find("lipschitz_lower_bound").value
    boundary = found.find("at_boundary").value
    assert 0 <= boundary <= 1 and (boundary == 0 or name not in ("dense", "soft"))
    assert (found.find("jump_max").value > 0) == (boundary > 0)


@pytest.mark.parametrize("name", MODELS)
def test_the_lemma_where_it_is_defined(results, name):
    """Elsewhere there is a reason instead."""
    found = results[name]
    if name in REASONS:
        assert "lemma_terms" not in found.facts and REASONS[name] in found.facts["lemma_reason"]
        assert not found.all("lemma1_violations") and not found.all("lemma1_router_share")
        return
    assert found.find("lemma1_violations").value == 0
    assert len(found.facts["lemma_terms"]) == (2 if name == "vmoe" else 1)
    shares = []
    for points in found.facts["lemma_terms"]:
        bound, jacobian, router = (np.array(points[name]) for name in TERMS)
        assert len(bound) == len(jacobian) == len(router) == 5
        assert (jacobian <= bound).all() and (bound > 0).all()
        shares.append(np.mean(router / bound))
    share = found.find("lemma1_router_share").value
    assert 0 < share < 1 and share == pytest.approx(np.mean(shares))


@pytest.fixture(scope="module")
def images(data):
    return data.test.images[evenly_spaced_indices(60, 6)]


def test_the_result_does_not_depend_on_the_batch(data, models, images, results):
    model = models["vmoe"]
    labels = torch.from_numpy(data.test.labels[evenly_spaced_indices(60, 6)])
    found = results["vmoe"]
    for batch in (1, 6):
        again = Values(lipschitz.Lipschitz.metrics, data.task, compute_without_cache)
        lipschitz.put_lipschitz_slopes(
            lipschitz.find_slopes(model, images, labels, batch, 0.5, 10, 10), again
        )
        for value in again.values[:3]:
            assert value.value == pytest.approx(found.find(value.metric).value, rel=1e-6)
        terms = lipschitz.lemma_terms_by_layer(model, images, 5, batch, 0, "cpu")
        for each, points in zip(terms, found.facts["lemma_terms"], strict=True):
            assert each.router.tolist() == pytest.approx(points["router"], rel=1e-4)


def test_the_tokens_are_what_the_layers_get(models, images):
    model = models["vmoe"]
    found = lipschitz.sample_layer_inputs(model, images, 7, 4, 2, "cpu")
    seen = []
    hooks = [
        block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(next(image_batches(images, 6)))
    for hook in hooks:
        hook.remove()
    random = np.random.default_rng(derived_seed("measured_tokens", 2))
    chosen = np.sort(random.permutation(len(seen[0]))[:7])
    for tokens, whole in zip(found, seen, strict=True):
        assert tokens.shape == (7, 16)
        torch.testing.assert_close(tokens, whole[chosen], rtol=1e-4, atol=1e-5)
    other = lipschitz.sample_layer_inputs(model, images, 7, 4, 3, "cpu")
    assert not torch.equal(found[0], other[0])


class Linear(nn.Module):
    def __init__(self, weight) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))

    def forward(self, images) -> ModelOutput:
        return ModelOutput(images.flatten(1) @ self.weight.T)


class Function(nn.Module):
    """Logits as a function of the pixels (B, P); the first expert where ``choice`` is true."""

    def __init__(self, function, choice=None) -> None:
        super().__init__()
        self.function, self.choice, self.scale = function, choice, nn.Parameter(torch.ones(()))

    def forward(self, images) -> ModelOutput:
        pixels = images.flatten(1)
        if self.choice is None:
            return ModelOutput(self.scale * self.function(pixels))
        first = self.choice(pixels)
        chosen = torch.stack([first, ~first], dim=-1).unsqueeze(1)
        weights = chosen.double()
        record = RoutingRecord(weights, weights, weights, chosen, weights)
        return ModelOutput(self.scale * self.function(pixels), (record,))


def estimates(model, images, labels=None, batch=7, radius=0.2, steps=4, halvings=8):
    labels = torch.zeros(len(images), dtype=torch.long) if labels is None else labels
    return lipschitz.find_slopes(model, images, labels, batch, radius, steps, halvings)


def test_a_linear_model_has_its_spectral_norm_everywhere():
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    found = estimates(Linear(weight), torch.full((2, 1, 2, 2), 0.5), radius=0.3)
    expected = np.linalg.svd(weight.astype(float))[1][0]
    for name in ("local", "lower_bound"):
        assert getattr(found, name).tolist() == pytest.approx([expected] * 2, rel=1e-9), name
    assert not found.crossed.any() and not found.jump.any() and found.local.dtype == torch.float64


def test_the_margin_and_the_strongest_direction_by_hand():
    # ‖differences of the rows‖₁: 0–1 |1| + |−3| = 4, 0–2 |−3| + |−7| = 10, 1–2 |−4| + |−4| = 8
    linear, images = Linear([[1, -2], [0, 1], [4, 5]]), torch.full((3, 1, 1, 2), 0.5)
    found = estimates(linear, images, torch.tensor([0, 1, 2]))
    assert found.margin.tolist() == pytest.approx([10, 8, 10])
    # [[3, 0], [0, 4]]: the second pixel, by 4; zeros have no vector
    gain, vector = lipschitz.top_singular_pair(torch.tensor([[[3.0, 0], [0, 4]], [[0, 0], [0, 0]]]))
    assert gain.tolist() == [4, 0] and vector.abs().tolist() == [[0, 1], [0, 0]]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9))
def test_the_strongest_direction_is_the_svds(seed, classes, pixels):
    generator = torch.Generator().manual_seed(seed)
    jacobian = torch.randn(2, classes, pixels, generator=generator, dtype=torch.float64)
    value, direction = lipschitz.top_singular_pair(jacobian)
    torch.testing.assert_close(value, torch.linalg.svdvals(jacobian)[:, 0], rtol=1e-7, atol=1e-10)
    lengths = (jacobian @ direction.unsqueeze(-1)).squeeze(-1).norm(dim=1)
    torch.testing.assert_close(lengths, value, rtol=1e-6, atol=1e-9)


def test_the_ball_by_hand():
    centre = torch.tensor([0.5, 0.5], dtype=torch.float64).view(1, 1, 1, 2)
    points = torch.tensor([[3.5, 4.5], [0.6, 0.5], [0.5, 1.4]]).double().view(3, 1, 1, 2)
    # (3, 4) is drawn to length 1: (0.6, 0.8) away, then cut at 1; (0.1, 0) stays; (0, 0.9) is
    # inside the ball but above 1
    found = lipschitz.project_to_l2_ball(points, centre, 1.0).view(3, 2)
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0], [0.6, 0.5], [0.5, 1.0]]).double())
    near = lipschitz.project_to_l2_ball(points[:1], centre, 0.25)
    assert near.view(2).tolist() == pytest.approx([0.65, 0.7])


def test_a_parabola_by_hand():
    # z = (x², 0) at 0.3: slope 0.6 there; the ball ends at 0.5, where it is 1; x to its end:
    # (0.25 − 0.09) / 0.2 = 0.8
    parabola = Function(lambda x: torch.cat([x**2, 0 * x], 1))
    image = torch.full((1, 1, 1, 1), 0.3)
    whole, found = (estimates(parabola, image, radius=0.2, steps=4, halvings=n) for n in (0, 10))
    slopes = (float(found.local), float(found.margin))
    assert slopes == pytest.approx((0.6, 0.6), rel=1e-6)
    assert 0.8 - 1e-6 <= float(whole.lower_bound) <= 1
    assert 1 - 0.4 / 2**10 - 1e-6 <= float(found.lower_bound) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("function", "expected"),
    [(lambda x: x + 9 * (x - 0.6).relu(), 5.5), (lambda x: x + 9 * (0.4 - x).relu(), 3.5)],
)
def test_both_directions_are_tried(function, expected):
    # slope 1 at 0.5. To 0.7 the first rises by 0.2 + 0.9 = 1.1; to 0.3 the second changes by
    # −0.2 + 0.9 = 0.7; the other ways it is 0.2
    model = Function(lambda x: torch.cat([function(x), 0 * x], 1))
    found = estimates(model, torch.full((1, 1, 1, 1), 0.5), radius=0.2, steps=0, halvings=0)
    assert float(found.lower_bound) == pytest.approx(expected)


@pytest.mark.parametrize("halvings", [0, 2, 10, 16])
def test_a_jump_is_found_and_its_ratio_grows_with_every_halving(halvings):
    # slope 1 at 0.5, a jump of 3 at 0.6; over a distance of h the ratio is (3 + h) / h
    jump = 3.0
    stairs = lambda x: torch.cat([x + jump * (x > 0.6), 0 * x], 1)
    model = Function(stairs, lambda x: x[:, 0] > 0.6)
    found = estimates(model, torch.full((1, 1, 1, 1), 0.5), radius=0.2, steps=0, halvings=halvings)
    distance = 0.2 / 2**halvings
    assert float(found.local) == pytest.approx(1)
    assert float(found.lower_bound) == pytest.approx((jump + distance) / distance, rel=1e-6)
    assert bool(found.crossed) and float(found.jump) == pytest.approx(jump + distance)


def test_the_jump_is_the_change_between_ends_that_choose_differently():
    # z = (x, −x) from 0.5 to 0.7: √2 · 0.2, wherever the experts change; without a change there is
    # no jump
    ends = [torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (0.5, 0.7)]
    for border, crosses in ((0.6, True), (0.8, False)):
        line = lambda x: torch.cat([x, -x], 1)
        model = Function(line, lambda x, border=border: x[:, 0] > border).double()
        flat = lipschitz.ImagePairSlope(*ends, torch.zeros(1, dtype=torch.float64))
        pair, crossed, jump = lipschitz.bisect_steepest(model, flat, 0)
        assert float(pair.ratio) == pytest.approx(math.sqrt(2)) and bool(crossed) == crosses
        assert float(jump) == pytest.approx(0.2 * math.sqrt(2) if crosses else 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**4))
def test_halving_never_lowers_the_ratio(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    model = Function(lambda x: torch.sin(9 * x @ weight))
    images = torch.rand(3, 1, 2, 2, generator=generator, dtype=torch.float64)
    direction = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    direction = nn.functional.normalize(direction).view_as(images)
    pair = lipschitz.find_steepest_pair(model.double(), images, direction, 0.3, 3)
    ratios = [lipschitz.bisect_steepest(model, pair, number)[0].ratio for number in (0, 1, 4, 9)]
    torch.testing.assert_close(ratios[0], pair.ratio)
    assert all((after >= before * (1 - 1e-12)).all() for before, after in pairwise(ratios))
    for end in (pair.first, pair.second):
        assert ((end - images).flatten(1).norm(dim=1) <= 0.3 + 1e-9).all()


def test_the_jacobian_is_autograds():
    torch.manual_seed(3)
    model = VIT.build(IMAGE, sparse(LINEAR, blocks=(0, 1))).double().eval()
    for parameter in model.parameters():
        parameter.data *= 4
    images = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(5)).double()
    found = row_jacobians(lambda pixels: model(pixels).prediction, images)
    whole = torch.autograd.functional.jacobian(lambda pixels: model(pixels).prediction, images)
    torch.testing.assert_close(found, torch.stack([whole[i, :, i].flatten(1) for i in range(3)]))


def layer_of(weight, outputs=None, number=2, kind="noisy_top_k") -> nn.Module:
    """An MoE layer with router weights (E, d); with ``outputs`` (E, d) experts are constants."""
    width = len(weight[0])
    torch.manual_seed(0)
    experts = {"kind": "mlp", "number": number, "hidden_ratio": 2}
    layer = sparse({"kind": kind, "k": 1}, experts, (0,)).build(width)
    layer.router.weight.data = torch.tensor(weight, dtype=torch.float32)
    for parameter in layer.experts.parameters():
        scale = 8 / width if outputs is None else 0
        parameter.data = scale * torch.randn_like(parameter)
    if outputs is not None:
        layer.experts.down_bias.data = torch.tensor(outputs, dtype=torch.float32)
    return layer


def test_two_constant_experts_at_one_half_by_hand():
    # s1 = (2, 0), s2 = (0, 1) at x = (1, 2): logits 2 and 2, so p = 1/2. f1 − f2 = (3, 4),
    # s1 − s2 = (2, −1): ‖¼ (f1 − f2)(s1 − s2)ᵀ‖ = 5 · √5 / 4; constants have no slope, so the bound
    # is reached
    found = lemma_1_terms(layer_of([[2, 0], [0, 1]], [[4, 5], [1, 1]]), torch.tensor([[1.0, 2.0]]))
    assert float(found.router) == pytest.approx(5 * math.sqrt(5) / 4) and float(found.experts) == 0
    assert float(found.jacobian) == pytest.approx(float(found.router))
    assert not found.violated.any() and float(found.bound) == float(found.router)


def _expert(experts, number, tokens):
    hidden = torch.nn.functional.gelu(tokens @ experts.up[number] + experts.up_bias[number])
    return hidden @ experts.down[number] + experts.down_bias[number]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**4), st.sampled_from(["noisy_top_k", "top_k_softmax"]))
def test_the_terms_are_those_of_a_slow_loop_and_the_bound_holds(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    layer = layer_of(torch.randn(3, 4, generator=generator).tolist(), number=3, kind=kind)
    if kind == "top_k_softmax":
        layer.router.bias.data = torch.randn(3, generator=generator)
    tokens = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    experts = copy.deepcopy(layer.experts).double()
    weight = layer.router.weight.detach().double()
    bias = getattr(layer.router, "bias", torch.zeros(3)).detach().double()
    found = lemma_1_terms(layer, tokens)
    for number, token in enumerate(tokens):
        p = torch.softmax(weight @ token + bias, 0)
        slopes = [
            torch.autograd.functional.jacobian(lambda x, e=e: _expert(experts, e, x), token)
            for e in range(3)
        ]
        mean = sum(p[e] * weight[e] for e in range(3))
        outputs = [_expert(experts, e, token).detach() for e in range(3)]
        pull = sum(p[e] * torch.outer(outputs[e], weight[e] - mean) for e in range(3))
        jacobian = sum(p[e] * slopes[e] for e in range(3)) + pull
        own = sum(p[e] * torch.linalg.svdvals(slopes[e])[0] for e in range(3))
        whole, pulled = (torch.linalg.svdvals(part.detach())[0] for part in (jacobian, pull))
        expected = [float(whole), float(own), float(pulled)]
        assert [float(term[number]) for term in found] == pytest.approx(expected, rel=1e-6)
    assert not found.violated.any() and (0 < found.jacobian).all()
    assert (found.jacobian <= found.bound * (1 + 1e-9)).all()


def test_tokens_are_taken_a_few_at_a_time_without_a_difference(monkeypatch):
    layer = layer_of([[2, 0, 1], [0, 1, 1]])
    tokens = torch.randn(9, 3, generator=torch.Generator().manual_seed(2))
    whole = lemma_1_terms(layer, tokens)
    # 2 tokens of 2·3² numbers
    monkeypatch.setattr("moecore.nn.layers.lipschitz_lemma._MAX_JACOBIAN_ENTRIES", 40)
    for one, other in zip(whole, lemma_1_terms(layer, tokens), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_violations_are_seen():
    one = torch.ones(3, dtype=torch.float64)
    terms = LemmaTerms(torch.tensor([1.0, 2.0, 2.00001], dtype=torch.float64), one, one)
    assert terms.violated.tolist() == [False, False, True]
