import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from moecore.core.files import UserError
from moecore.core.routing_records import Guidance, RoutingContext
from moecore.core.source_layout import ROOT
from moecore.nn.backbones import language_model, single_layer, two_towers
from moecore.nn.backbones.language_model import LanguageBlock, LanguageModel, MomentumBlock
from moecore.nn.experts.mlp import Mlp
from moecore.parts import Classification, EncodeOptions, ImageSpec, MoESettings
from moecore.routers import NoisyTopK, TeacherRouted, TopKSoftmax
from moecore.study.yaml_document import load_yaml_document
from moecore.tasks.next_token import NextToken
from moecore.training.method import Method
from tests.nn.backbones.test_two_towers import TASK

WORDS = 11
MOE = MoESettings(router=TopKSoftmax(k=2), experts=Mlp(number=4, hidden_ratio=1.0), blocks="all")
THREE = Classification(classes=tuple("abc"))
IMAGE = ImageSpec(channels=2, size=4, task=THREE, mean=(0.5, 0.25), std=(0.5, 0.125))
REFUSED = {"teacher_routed", "hash_moe", "expert_choice", "soft_moe"}
SHIPPED = load_yaml_document(str(ROOT / "params.yaml")).data["methods"]
METHODS = {name: Method.model_validate(entry) for name, entry in SHIPPED.items() if entry}
EXPERTS = {"kind": "mlp", "number": 4, "hidden_ratio": 1.0}
LIMITED = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 0.5, "group_size": 1}
BLOCK = 12


def text(block=4, context=3):
    zeros, ones = (0.0,) * (context + 1), (1.0,) * (context + 1)
    task = NextToken(words=WORDS)
    return ImageSpec(channels=context + 1, size=(block,), mean=zeros, std=ones, task=task)


def model(moe=MOE, block=4, context=3, **settings):
    torch.manual_seed(0)
    given = {"width": 8, "depth": 3, "heads": 2, "span": 4, "dropout": 0.0} | settings
    return LanguageModel(**given).build(text(block, context), moe).eval()


def stream(length, seed=0):
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(seed))


def read_on(made, tokens, block):
    """Final tokens (n, d) of one stream, block after block, with its cache."""
    states = made.initial_states(1, tokens.device)
    found = []
    for start in range(0, len(tokens), block):
        (final, _, _), states = made.read(tokens[None, start : start + block], states)
        found.append(final[0])
    return torch.cat(found)


def test_the_slant_is_undone():
    values = torch.randn(2, 3, 5, 7)
    shifted = language_model.relative_shift(values)
    assert torch.equal(language_model.undo_relative_shift(shifted), values)
    row = language_model.relative_shift(values)[0, 0, 2]
    assert torch.equal(row[2:9], values[0, 0, 2]) and not row[:2].any() and not row[9:].any()


def test_attention_is_that_of_the_loop():
    torch.manual_seed(0)
    attention = language_model.SlidingWindowAttention(8, 2)
    tokens, before, positions = torch.randn(2, 5, 8), torch.randn(2, 3, 8), torch.randn(4, 3)
    found, weights = attention(tokens, before, positions, weights=True)
    every = torch.cat([before, tokens], dim=1)
    query, key, value = attention.query(tokens), attention.key(every), attention.value(every)
    for stream in range(2):
        for token in range(5):
            heads = []
            for head in range(2):
                part = slice(4 * head, 4 * head + 4)
                q = query[stream, token, part]
                logits = [q @ (key[stream, token + j, part] + positions[:, j]) for j in range(3)]
                share = (torch.stack(logits) / 2).softmax(0)
                heads.append(share @ value[stream, token : token + 3, part])
            torch.testing.assert_close(found[stream, token], attention.proj(torch.cat(heads)))
    assert weights.shape == (2, 5, 5)
    torch.testing.assert_close(weights[:, 3:].sum(-1), torch.ones(2, 2), msg="all in the block")
    assert not weights.triu().any(), "neither itself nor what follows"


@pytest.mark.parametrize("layers", ["smoe", "momentum", "adam"])
def test_a_token_sees_itself_only_by_its_own_word_and_nothing_later(layers):
    made = model(layers=layers)
    tokens = stream(16)
    plain = read_on(made, tokens, 4)
    for place in (1, 6, 11):
        other = tokens.clone()
        other[place] = (other[place] + 1) % WORDS
        changed = (read_on(made, other, 4) != plain).any(dim=1)
        assert not changed[:place].any() and changed[place]
        reach = min(16, place + 3 * 4 + 1)
        assert not changed[reach:].any(), "depth · span tokens on nothing is left of it"


def test_with_enough_blocks_before_it_a_window_is_read_as_in_the_stream():
    made = model()
    tokens = stream(40)
    whole = read_on(made, tokens, 4)
    for block in (8, 40):  # blocks of any length give the same
        torch.testing.assert_close(read_on(made, tokens, block), whole)
    windows = torch.stack([tokens[start : start + 16].view(4, 4) for start in range(0, 24, 4)])
    final, records, _ = made.encode(windows)
    torch.testing.assert_close(final.flatten(0, 1), whole[12:36])
    assert records[0].probs.shape == (6, 4, 4)
    fewer, _, _ = model(context=1).encode(windows[:, 2:])
    assert not torch.allclose(fewer.flatten(0, 1), whole[12:36])


@pytest.mark.parametrize(
    ("layers", "span", "context"),
    [("smoe", 2, 1), ("adam", 4, 2), ("smoe", 6, 4), ("adam", 9, 7), ("smoe", 9, 1)],
)
@torch.no_grad()
def test_what_no_layer_looks_at_is_not_computed(layers, span, context):
    made = model(context=context, span=span, layers=layers)
    windows = stream(3 * 4 * (context + 1)).view(3, context + 1, 4)
    states = made.initial_states(3, windows.device)
    for before in windows[:, :-1].unbind(1):
        _, states = made.read(before, states)
    (wanted, _, _), _ = made.read(windows[:, -1], states)
    ran = []
    handles = [block.register_forward_hook(lambda *_: ran.append(1)) for block in made.blocks]
    tokens, records, _ = made.encode(windows)
    torch.testing.assert_close(tokens, wanted)
    apart = math.ceil(span / 4)
    needed = [max(0, 3 - math.ceil(before / apart)) for before in range(context, -1, -1)]
    assert len(ran) == sum(needed)
    assert torch.equal(made.routing_of(windows)[2].probs, records[2].probs)
    for handle in handles:
        handle.remove()


def test_before_a_text_begins_there_is_nothing():
    made = model()
    tokens = stream(8)
    window = torch.cat([torch.full((8,), -1), tokens]).view(1, 4, 4)
    torch.testing.assert_close(made.encode(window)[0][0], read_on(made, tokens, 4)[4:])


def test_in_training_the_cache_goes_on():
    made = model().train()
    made.remember(2)
    tokens = stream(32).view(2, 16)
    steps = [made(tokens[:, None, start : start + 4]).prediction for start in range(0, 16, 4)]
    for row in range(2):
        wanted = made.predict(read_on(made.eval(), tokens[row], 4))
        torch.testing.assert_close(torch.cat([step[row] for step in steps]), wanted)
    assert not made.memory.states.requires_grad
    made.memory.clear()
    torch.testing.assert_close(made.train()(tokens[:, None, :4]).prediction, steps[0])
    made.remember(0)
    assert not any("memory" in name for name in made.state_dict())


@pytest.mark.parametrize("kind", [LanguageBlock, MomentumBlock, language_model.AdamBlock])
def test_the_residuals_are_those_of_the_definition(kind):
    torch.manual_seed(0)
    made = model(moe=None)
    block = kind(8, 2, made.blocks[0].mlp, 0.0)
    h, before, m = torch.randn(1, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    positions = torch.randn(4, 4)
    given = None if kind is LanguageBlock else m
    out, entry, _ = block(
        language_model.TokensAndMomentum(h, given), before, positions, RoutingContext()
    )
    h = layer_norm(h + block.attn(h, before, positions)[0], (8,))
    assert torch.allclose(entry, h)
    f = block.mlp(h)[0]
    momentum = None if kind is LanguageBlock else 0.7 * m + f
    inner = {
        LanguageBlock: h + f,
        MomentumBlock: h - (0.7 * m + f),
        language_model.AdamBlock: h - (0.1 * f / (0.001 * f**2 + 1e-8).sqrt() + h),
    }[kind]
    torch.testing.assert_close(out.tokens, layer_norm(h + layer_norm(inner, (8,)), (8,)))
    torch.testing.assert_close(out.momentum, momentum)


def test_momentum_is_carried_through_the_blocks_of_a_model():
    made = model(layers="momentum")
    states = made.initial_states(1, torch.device("cpu"))
    seen = []
    for block in made.blocks:
        block.register_forward_hook(lambda _, given, out: seen.append((given[0], out[0])))
    made.read(stream(4)[None], states)
    assert seen[0][0].momentum is None and torch.equal(seen[1][0].momentum, seen[0][1].momentum)
    kinds = [type(block) for block in model(layers="adam").blocks]
    assert kinds == [language_model.AdamBlock, MomentumBlock, MomentumBlock]


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="model.heads: found 3; allowed: a divisor of model.width"):
        model(heads=3)
    with pytest.raises(UserError, match="router.kind: found teacher_routed, which reads teacher"):
        model(MOE.model_copy(update={"router": TeacherRouted(k=1)}))
    with pytest.raises(UserError, match="model.kind: found language_model, but .* 2 axes"):
        LanguageModel().build(IMAGE)
    made = model(span=8)
    made.remember(2, 8)
    said = "model.span: found 8, but each of 4 streams has 7 words; allowed: 1 to 7, or a smaller"
    with pytest.raises(UserError, match=said):
        made.remember(4, 7)


def single():
    torch.manual_seed(0)
    moe = MoESettings(router=NoisyTopK(k=1), experts=Mlp(number=4, hidden_ratio=0.25), blocks=[0])
    built = single_layer.SingleLayer(hidden=5).build(IMAGE, moe).eval()
    for parameter in built.parameters():  # biases start at 0, where a mistake would not show
        parameter.data += 0.3 * torch.randn_like(parameter)
    return built


def normalised(images: torch.Tensor) -> torch.Tensor:
    first, second = images.flatten(2).unbind(1)
    return torch.cat([(first - 0.5) / 0.5, (second - 0.25) / 0.125], dim=1)


def test_the_experts_output_times_its_gate_goes_straight_into_the_classifier():
    images = torch.rand(6, 2, 4, 4)
    built = single()
    experts = built.mlp.experts
    expected = []
    for pixels in normalised(images):
        gates = torch.softmax(built.mlp.router.weight @ pixels, dim=0)
        best = int(gates.argmax())
        hidden = gelu(pixels @ experts.up[best] + experts.up_bias[best])
        assert hidden.shape == (8,), "a quarter of the 32 pixels"
        # no residual, no norm
        output = gates[best] * (hidden @ experts.down[best] + experts.down_bias[best])
        expected.append(built.head.weight @ output + built.head.bias)
    found = built(images)
    torch.testing.assert_close(found.prediction, torch.stack(expected))
    assert len(found.heads) == 1 and torch.equal(found.heads[0], found.prediction)
    assert len(found.routing) == 1
    assert all(field.shape == (6, 1, 4) for field in found.routing[0][:5])
    dense = single_layer.SingleLayer(hidden=5).build(IMAGE)  # has one MLP, and no records
    output = dense(images)
    hidden = gelu(normalised(images) @ dense.mlp.fc1.weight.T + dense.mlp.fc1.bias)
    assert output.routing == () and hidden.shape == (6, 5) and dense.moe is None
    torch.testing.assert_close(output.prediction, dense.head(dense.mlp.fc2(hidden)))


def test_features_are_what_enters_and_leaves_the_layer():
    images = torch.rand(3, 2, 4, 4)
    built = single()
    tokens, records, (entering,) = built.encode(images, EncodeOptions("mlp_input", (0,)))
    torch.testing.assert_close(entering[:, 0], normalised(images))
    torch.testing.assert_close(built.mlp(entering)[0], tokens)
    for at in ("block_out", "final"):
        (left,) = built.encode(images, EncodeOptions(at, (0,))).features
        assert torch.equal(left, tokens)
    assert built.encode(images)[2] == () and len(records) == 1
    torch.testing.assert_close(built.predict(tokens), built(images).prediction)
    assert torch.equal(built.heads(tokens)[0], built.predict(tokens))
    with pytest.raises(UserError, match="the only block"):
        built.encode(images, EncodeOptions("final", (1,)))


@pytest.mark.parametrize("activation", ["gelu", "linear"])
def test_a_linear_layer_of_a_mean_is_the_mean_of_its_outputs(activation):
    built = single_layer.SingleLayer(hidden=5, activation=activation).build(IMAGE).double()
    first, second = torch.rand(2, 4, 2, 4, 4, dtype=torch.float64)
    of_mean = built((first + second) / 2).prediction
    mean = (built(first).prediction + built(second).prediction) / 2
    assert torch.allclose(of_mean, mean, rtol=0, atol=1e-12) == (activation == "linear")


class Asking(torch.nn.Module):
    def forward(self, tokens, context):
        self.context = context
        return tokens, ()


def test_a_router_gets_what_it_asks_for(monkeypatch):
    images = torch.rand(3, 2, 4, 4)
    teacher = torch.rand(3, 1, 4).softmax(-1)
    built = single()
    built.mlp = Asking()
    built(images, Guidance(torch.rand(3, 3), (teacher,)), 0.25)
    assert built.mlp.context == RoutingContext(), "it wants nothing"
    monkeypatch.setattr(type(built.moe.router), "wants", frozenset({"patches", "teacher"}))
    built(images, Guidance(torch.rand(3, 3), (teacher,)))
    assert torch.equal(built.mlp.context.patches, images.flatten(1)[:, None])
    assert torch.equal(built.mlp.context.teacher, teacher)
    assert built.mlp.context.progress == 1.0 and built.mlp.context.attention is None


def moe_of(router: dict, experts: dict = EXPERTS) -> MoESettings:
    return MoESettings.model_validate({"router": router, "experts": experts, "blocks": "all"})


def read_logits(model: language_model.LanguageTransformer, words: Tensor) -> Tensor:
    torch.manual_seed(0)
    return model(words).prediction


def assert_causal(moe: MoESettings, truth: int = 0, modes: tuple = (True, False)) -> None:
    """A word is changed and, where there is a truth, its kind; modes: training, evaluation."""
    torch.manual_seed(0)
    words = torch.randint(WORDS, (2, 1 + bool(truth), BLOCK))
    spec = text(BLOCK, 0).model_copy(update={"truth": truth})
    model = LanguageModel(width=8, depth=2, heads=2, span=4).build(spec, moe).double()
    for training in modes:
        model.train(training)
        logits = read_logits(model, words)
        for stream, place in product(range(2), range(1, BLOCK)):
            changed = words.clone()
            changed[stream, :, place] = (words[stream, :, place] + 1) % WORDS
            moved = (read_logits(model, changed) - logits).abs() > 1e-9
            assert not moved[:, :place].any(), (training, stream, place)
            assert moved[stream, place].any() and not moved[1 - stream].any()


@pytest.mark.parametrize("name", ["vmoe", "ermoe", "stable_moe", *sorted(REFUSED)])
def test_a_later_word_never_moves_an_earlier_logit(name):
    moe = MoESettings(router=METHODS[name].router, experts=METHODS[name].experts, blocks="all")
    if name in REFUSED:
        with pytest.raises(UserError, match=f"^router.kind: found {moe.router.kind}"):
            LanguageModel(width=8, heads=2).build(text(), moe)
    else:
        assert_causal(moe)


@pytest.mark.parametrize("sampling", ["bce", "predictor"])
def test_nor_does_depth_in_evaluation(sampling):
    moe = moe_of({"kind": "depth", "share": 0.5, "sampling": sampling})
    assert_causal(moe, modes=(False,))
    with pytest.raises(AssertionError):
        assert_causal(moe, modes=(True,))


def test_nor_does_a_hash_of_words_or_the_truth_of_later_ones():
    assert_causal(moe_of({"kind": "hash", "by": "word"}))
    moe = moe_of({"kind": "told"})
    assert_causal(moe, truth=WORDS)
    with pytest.raises(UserError, match=r"^router.kind: found told, which reads truth"):
        LanguageModel(width=8, heads=2).build(text(), moe)


LOOKAHEADS = [
    ("kind", {"kind": "expert_choice", "k": 1}),
    ("kind", {"kind": "soft_slots"}),
    ("kind", {"kind": "merged"}),
    ("k", LIMITED | {"k": 2}),
    ("batch_priority", LIMITED | {"batch_priority": True}),
    ("group_size", LIMITED | {"group_size": 2}),
    ("k", {"kind": "noisy_top_k", "k": 2, "eval_capacity_factor": 0.5, "group_size": 1}),
    ("router.k", {"kind": "frozen_copy", "router": LIMITED | {"k": 2}}),
    ("sampling", {"kind": "depth", "share": 0.5}),
]


@pytest.mark.parametrize(("key", "router"), LOOKAHEADS)
def test_what_looks_ahead_is_refused_and_would_move_earlier_logits(key, router, monkeypatch):
    moe = moe_of(router)
    with pytest.raises(UserError, match=f"^router.{key}: found .*; allowed"):
        LanguageModel(width=8, heads=2).build(text(), moe)
    monkeypatch.setattr(MoESettings, "check_for_text", lambda self, truth: None)
    with pytest.raises(AssertionError):
        assert_causal(moe)


@pytest.mark.parametrize(("key", "router"), LOOKAHEADS)
def test_a_causal_text_tower_refuses_them_and_one_with_full_attention_does_not(key, router):
    tower = two_towers.TextTowerSettings(width=16, depth=1, heads=2, moe=moe_of(router))
    with pytest.raises(UserError, match=f"^text.router.{key}: found .*; allowed"):
        two_towers.TextTransformer(tower, TASK)
    two_towers.TextTransformer(tower.model_copy(update={"mask": "full"}), TASK)
