"""HashMoE: fixed, without parameters, balanced by position; patches that look alike go together."""

import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.two_towers import TextTowerSettings, TextTransformer
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers import hash as hash_router
from moecore.nn.routers.hash import PRIME, Hash, experts_by_position, hash_directions
from tests.measure.test_truth import IMAGE
from tests.nn.backbones.test_language_model import text
from tests.nn.backbones.test_two_towers import TASK
from tests.nn.routers import reference

CPU = torch.device("cpu")


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
    assert torch.equal(experts_by_position(0, 23, 4, CPU)[:9], experts_by_position(0, 9, 4, CPU))
    assert torch.equal(experts_by_position(0, 3, 8, CPU), experts_by_position(0, 8, 8, CPU)[:3])


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
    """Three times a word plus 5, modulo 4 experts; of word 2**30 that is above the prime, and
    3 * 2**30 + 5 - (2**31 - 1) = 1,073,741,830 leaves 2.
    """
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
