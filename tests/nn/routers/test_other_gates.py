import math

import pytest
import torch
from pydantic import ValidationError

from moecore.backbones import LanguageModel, Vit
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones.two_towers import TextTowerSettings, TextTransformer
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings, build_moe_feed_forward
from moecore.nn.routers import hash as hash_router
from moecore.nn.routers.hash import PRIME, Hash, draw_expert_per_position, hash_directions
from moecore.routers import Cosine, Dynamic, Relu, TopP
from moecore.training.regularizers.adaptive_l1 import AdaptiveL1, gate_l1_penalty
from moecore.training.regularizers.diversity_simplicity import DiversitySimplicity, embedding_loss
from moecore.training.regularizers.entropy import entropy
from tests.measure.test_truth import IMAGE
from tests.nn.backbones.test_language_model import text
from tests.nn.backbones.test_two_towers import TASK
from tests.nn.routers import reference
from tests.training.small import step

LOGITS = [[[0.5, -1, 0.2, -0.1], [-0.3, -0.2, -0.1, -0.4], [1, 0.4, -0.5, -0.2]]]
EMBEDDINGS = [[1.0, 0], [0, 2], [1, 1]]
NEAR_AND_FAR = [[[3.0, 4], [-1, 0]]]
CPU = torch.device("cpu")


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
    assert torch.equal(record.chosen, expected > 0)
    assert torch.equal(record.load, record.chosen.float())
    assert entropy(probs=record.probs).item() == pytest.approx(1.294436, abs=1e-6)
    # a token that no share suffices for uses all, or as many as it may
    for k, number in ((None, 4), (2, 2)):
        router = TopP(threshold=0.99, k=k).build(4, 4)
        assert router(torch.zeros(1, 1, 4))[1].chosen.sum() == number
    with pytest.raises(UserError, match="^router.k is 5, with 4 experts"):
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


def test_relu_by_hand():
    # Used: 2, 0 and 2 experts; n = (2, 1, 1, 0), sums of gates (1.5, .4, .2, 0) of three tokens:
    # 4 (2 · 1.5 + .4 + .2) / 9 = 1.6. A third of 12 is used, more than 1 of 4: λ grows.
    router = Relu(k=1).build(4, 4).train()
    router.weight.data = torch.eye(4)
    _, record = router(torch.tensor(LOGITS))
    combine = [[[0.5, 0, 0.2, 0], [0, 0, 0, 0], [1, 0.4, 0, 0]]]
    torch.testing.assert_close(record.combine, torch.tensor(combine))
    probs = [[0.714286, 0, 0.285714, 0], [0.25] * 4, [0.714286, 0.285714, 0, 0]]
    torch.testing.assert_close(record.probs[0], torch.tensor(probs), atol=1e-6, rtol=0)
    term = gate_l1_penalty(record, 1)
    assert term.item() == pytest.approx(1.6)
    (gradient,) = torch.autograd.grad(term, router.weight)  # (E/k) n_e/N² x, where a gate is open
    tokens = torch.tensor(LOGITS)[0]
    expected = torch.stack([2 * (tokens[0] + tokens[2]), tokens[2], tokens[0], 0 * tokens[0]])
    torch.testing.assert_close(gradient, 4 / 9 * expected)
    router.after_step([record], 0, 0.0)
    assert router.l1_weight.item() == pytest.approx(1.2e-8)
    router.after_step([record._replace(chosen=record.chosen & False)], 0, 0.0)
    router.eval().after_step([record], 0, 0.0)
    assert router.l1_weight.item() == pytest.approx(1e-8)


def test_all_layers_decide_what_the_weight_of_relu_becomes():
    router = Relu(k=2).build(4, 4).train()
    _, record = router(torch.randn(2, 6, 4))
    full, half = (record._replace(chosen=record.chosen | True), record)
    empty = record._replace(chosen=record.chosen & False)
    for records, power in (([full, empty], 0), ([full, half, full], 1), ([empty, empty], -1)):
        before = router.l1_weight.item()
        router.after_step(records, 0, 0.0)
        assert math.log(router.l1_weight.item() / before, 1.2) == pytest.approx(power, abs=1e-4)
    with pytest.raises(UserError, match="^adaptive_l1: no router learns"):
        AdaptiveL1()(step(record)._replace(model=torch.nn.Linear(1, 1)))


def dynamic_router():
    router = Dynamic().build(2, 3)
    router.embeddings.data = torch.tensor(EMBEDDINGS)
    router.thresholds.data = torch.tensor([0.5, 0.5, 0.9])
    return router


@pytest.mark.parametrize("training", [True, False])
def test_thresholds_by_hand(training):
    # Cosines (.6, .8, .989949) and (−1, 0, −.707107); σ of the thresholds: .622459 twice, .710950.
    # The first token is near to all; the second to none, in evaluation nearest to the second.
    _, record = dynamic_router().train(training)(torch.tensor(NEAR_AND_FAR))
    scores = torch.tensor([[[0.645656, 0.689974, 0.729078], [0.268941, 0.5, 0.330238]]])
    torch.testing.assert_close(record.logits.sigmoid(), scores, atol=1e-6, rtol=0)
    torch.testing.assert_close(record.probs, scores / scores.sum(-1, keepdim=True))
    last = [0, 0, 0] if training else [0, 1, 0]
    assert record.combine.tolist() == [[pytest.approx([1 / 3] * 3), last]]
    assert record.chosen.sum(dim=-1).tolist() == [[3, 0 if training else 1]]


def test_chosen_experts_alone_move_their_thresholds():
    # The weight's gradient to σ(threshold) is −1 over the number of the chosen: of (1, 2, 4) times
    # weights of three experts −1/3, −2/3, −4/3, and nothing of the token that is near to none.
    router = dynamic_router().train()
    tokens = torch.tensor(NEAR_AND_FAR, requires_grad=True)
    _, record = router(tokens)
    loss = (record.combine * torch.tensor([1.0, 2, 4])).sum()
    inputs = (router.thresholds, tokens, router.embeddings)
    to_thresholds, to_tokens, to_embeddings = torch.autograd.grad(loss, inputs)
    slopes = torch.sigmoid(router.thresholds) * (1 - torch.sigmoid(router.thresholds))
    torch.testing.assert_close(to_thresholds, -torch.tensor([1.0, 2, 4]) / 3 * slopes)
    assert to_tokens[0, 0].any() and not to_tokens[0, 1].any() and to_embeddings.any()


def test_embeddings_apart_and_short_by_hand():
    # Cosines 0, .707107 and .707107, each twice: Frobenius √2; mean length (1 + 2 + √2) / 3. Of
    # the first two alone the cosines are 0, and their gradient too: mean length 3 / 2.
    for number, by_hand in ((3, math.sqrt(2) + 1.471405), (2, 1.5)):
        embeddings = torch.tensor(EMBEDDINGS[:number], requires_grad=True)
        loss = embedding_loss(embeddings=embeddings)
        assert loss.item() == pytest.approx(by_hand, abs=1e-6)
        (gradient,) = torch.autograd.grad(loss, embeddings)
        assert gradient.isfinite().all() and gradient.any()
    # an expert that no token of the step used exists all the same (DynMoE's mask)
    layer = build_moe_feed_forward(Dynamic(), Mlp(number=3), 2)
    layer.router = dynamic_router()
    _, record = layer.router(torch.tensor(NEAR_AND_FAR))
    unused = record._replace(chosen=record.chosen & torch.tensor([True, True, False]))
    term = DiversitySimplicity()(step(unused)._replace(model=layer))
    assert term.item() == pytest.approx(math.sqrt(2) + 1.471405, abs=1e-6)
    with pytest.raises(UserError, match="^diversity_simplicity: no embeddings; allowed"):
        DiversitySimplicity()(step(record)._replace(model=torch.nn.Linear(1, 1)))


def patches_of(batch=2, tokens=9, pixels=12, seed=1):
    return torch.rand(batch, tokens, pixels, generator=torch.Generator().manual_seed(seed))


def choices(router, tokens, patches=None):
    return router(tokens, RoutingContext(patches=patches))[1].chosen


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_record_by_hand(k):
    plan, record = Hash(k=k).build(8, 4)(torch.randn(2, 9, 8), RoutingContext(patches=patches_of()))
    assert (record.chosen.sum(-1) == k).all()
    expected = torch.where(record.chosen, 1 / k, 0.0)
    assert torch.equal(record.probs, expected) and torch.equal(record.combine, expected)
    assert torch.equal(record.load, record.chosen.float())
    torch.testing.assert_close(record.logits[record.chosen].unique(), torch.tensor([-math.log(k)]))
    torch.testing.assert_close(record.logits.softmax(-1), record.probs)
    total = torch.logsumexp(record.logits, dim=-1)
    torch.testing.assert_close(total, torch.zeros(2, 9), atol=1e-6, rtol=0)  # so z-loss is 0
    assert torch.equal(plan.weights, torch.full((2, 9, k), 1 / k))


def test_a_patch_goes_to_the_direction_it_points_along():
    # Patches that are direction e itself, brighter and scaled: the score with e is its length, with
    # any other less (unit vectors).
    lines = hash_directions(5, 12, 4, CPU)
    torch.testing.assert_close(lines.norm(dim=0), torch.ones(4))
    torch.testing.assert_close(lines.sum(dim=0), torch.zeros(4), atol=1e-6, rtol=0)
    patches = 0.5 + 0.3 * lines.t()[None, [2, 0, 3, 1]]
    chosen = choices(Hash(seed=5).build(8, 4), torch.randn(1, 4, 8), patches)
    assert chosen[0].int().argmax(-1).tolist() == [2, 0, 3, 1]
    # second choices are the next directions
    patches = patches_of()
    scores = (patches - patches.mean(-1, keepdim=True)) @ hash_directions(0, 12, 4, CPU)
    chosen = choices(Hash(k=2).build(8, 4), torch.randn(2, 9, 8), patches)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(-1, scores.topk(2).indices, True))


def test_neither_brightness_nor_contrast_nor_the_tokens_nor_the_position_matter_to_a_patch():
    router = Hash(k=2).build(8, 4)
    patches = patches_of()
    order = torch.randperm(9)
    expected = choices(router, torch.randn(2, 9, 8), patches)
    assert torch.equal(choices(router, torch.zeros(2, 9, 8), 0.4 * patches + 0.3), expected)
    assert torch.equal(choices(router, torch.zeros(2, 9, 8), patches[:, order]), expected[:, order])
    assert len(expected.flatten(0, 1).unique(dim=0)) > 1


def test_blank_patches_and_special_tokens_go_by_position():
    patches = patches_of()
    patches[:, 0] = 0  # CLS
    patches[:, 4] = 0.3
    patches[:, 5] = 0.3 + torch.rand(12) * 1e-4  # rounding, less than half a grey level
    patches[:, 6] = 0.3
    patches[:, 6, 0] = 0.3 + 1 / 255  # one pixel is one grey level brighter
    tokens = torch.zeros(2, 9, 8)
    by_patch = choices(Hash(seed=3).build(8, 4), tokens, patches)
    by_position = choices(Hash(seed=3, by="position").build(8, 4), tokens)
    assert torch.equal(by_patch[:, [0, 4, 5]], by_position[:, [0, 4, 5]])
    assert by_patch[0, 6].int().argmax() == hash_directions(3, 12, 4, CPU)[0].argmax()


@pytest.mark.parametrize("k", [1, 3])
def test_positions_are_balanced(k):
    chosen = choices(Hash(k=k, by="position").build(8, 4), torch.randn(3, 12, 8))
    assert (chosen.sum(-1) == k).all()
    assert chosen[0].sum(0).tolist() == [3 * k] * 4  # 12 positions, k experts each, over 4 experts
    assert torch.equal(chosen[0], chosen[2])
    counts = choices(Hash(by="position").build(8, 4), torch.randn(1, 10, 8))[0].sum(0)
    assert sorted(counts.tolist()) == [2, 2, 3, 3]
    # a longer sequence begins as a shorter one
    assert torch.equal(
        draw_expert_per_position(0, 23, 4, CPU)[:9], draw_expert_per_position(0, 9, 4, CPU)
    )
    assert torch.equal(
        draw_expert_per_position(0, 3, 8, CPU), draw_expert_per_position(0, 8, 8, CPU)[:3]
    )


def test_the_hash_is_fixed_and_the_seed_decides_it_and_no_generator_of_the_training():
    tokens = torch.randn(2, 40, 8)
    patches = patches_of(tokens=40)
    for by in ("patch", "position"):
        first = choices(Hash(by=by).build(8, 4), tokens, patches)
        torch.manual_seed(123)
        before = torch.random.get_rng_state()
        assert torch.equal(choices(Hash(by=by).build(8, 4).eval(), tokens, patches), first)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert not torch.equal(choices(Hash(by=by, seed=1).build(8, 4), tokens, patches), first)


def test_a_hash_made_in_inference_mode_serves_in_training():
    layer = reference.layer_of(Hash())
    context = RoutingContext(patches=patches_of())
    with torch.inference_mode():
        expected = layer(torch.ones(2, 9, 8), context)[0].clone()
    outputs, _ = layer(torch.ones(2, 9, 8, requires_grad=True), context)
    outputs.sum().backward()
    torch.testing.assert_close(outputs.detach(), expected.detach())


def test_words_by_hand(monkeypatch):
    # Three times a word plus 5, modulo 4 experts; of word 2**30 that is above the prime, and
    # 3 * 2**30 + 5 - (2**31 - 1) = 1,073,741,830 leaves 2.
    monkeypatch.setattr(hash_router, "draw_hash_factor_and_shift", lambda seed: (3, 5))
    words = torch.tensor([[0, 1, 2, 3, 4, 2**30, -1]])
    for k, first in (1, [[1], [0], [3], [2], [1], [2], [2]]), (2, [[1, 2], [0, 1], [3, 0]]):
        router = Hash(k=k, by="word").build(8, 4)
        _, record = router(torch.randn(1, 7, 8), RoutingContext(words=words))
        chosen = [row.nonzero().flatten().tolist() for row in record.chosen[0]]
        assert chosen[: len(first)] == [sorted(experts) for experts in first]
        assert torch.equal(record.combine, record.chosen / k)


def test_words_are_spread_over_the_experts_by_the_seed():
    draw = hash_router.draw_hash_factor_and_shift
    factor, shift = draw(0)
    assert (factor, shift) == draw(0) != draw(1)
    experts = (torch.arange(4000) * factor + shift) % PRIME % 8
    assert torch.bincount(experts).tolist() == pytest.approx([500] * 8, rel=0.1)


@torch.no_grad()
def test_a_text_is_routed_by_its_words_and_an_image_has_none():
    moe = MoESettings(router=Hash(by="word"), experts=Mlp(number=3), blocks="all")
    model = LanguageModel(width=8, depth=2, heads=2, span=4).build(text(4, 1), moe).eval()
    words = torch.tensor([[[1, 2, 3, 4], [5, 1, 5, 2]]])
    factor, shift = hash_router.draw_hash_factor_and_shift(0)
    expected = (words[0, 1] * factor + shift) % PRIME % 3
    for record in model(words).routing:
        assert torch.equal(record.chosen[0].int().argmax(-1), expected)
    tower = TextTowerSettings(width=16, depth=1, heads=2, moe=moe, pooling="class")
    captions = torch.tensor([[1, 3, TASK.end] + [0] * (TASK.context - 3)])
    _, (record,) = TextTransformer(tower, TASK)(captions)
    expected = (captions[0, :3] * factor + shift) % PRIME % 3
    assert torch.equal(record.chosen[0].int().argmax(-1), expected)
    with pytest.raises(UserError, match=r"router.kind: found hash, which reads words; images "):
        Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE, moe)
