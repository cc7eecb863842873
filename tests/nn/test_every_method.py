import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore import MoELayer, UserError, predict_in_batches
from moecore.backbones import Backbone, Vit, Vit3d
from moecore.core.config import replace_and_validate
from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.backbones.swin import Swin, SwinSettings
from moecore.nn.experts.mlp import Mlp
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routing_collection import build_record, routing_collector
from moecore.teachers import AffineRanges, Training, ViewSettings
from moecore.testing.check_helpers import small_vit
from moecore.training import artifacts, loop
from moecore.training.job import Objective, TrainingJob
from moecore.training.method import Method, attach_required_guide, initialise_guide
from moecore.training.teachers.timm import define_missing_operators
from tests.data.making import VOLUMES, ball
from tests.methods import METHODS, REPRESENTATIVE
from tests.training.small import CPU, IMAGE, SETTINGS, images

SHIFTED = SETTINGS.model_copy(update={"epochs": 1, "views": type(SETTINGS.views)(shift=1)})
TURNED = ViewSettings(flip=True, affine=AffineRanges(degrees=10, translate=0.05, scale=(0.9, 1.1)))
ON_VOLUMES = Training(epochs=1, batch=8, learning_rate=1e-3, log_every=1, views=TURNED)
IMAGES = np.random.default_rng(0).integers(0, 256, (11, 1, 4, 4), dtype=np.uint8)


def balls(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


def swin(kind: str, **changes) -> SwinSettings:
    small = Swin(patch=1, width=16, depths=(2, 2), heads=(2, 4), window=4)
    return replace_and_validate("model", small, {"kind": kind, **changes}, Backbone)


SWINS = ("swin", "swin_moe", "swin_v2")
BACKBONES = {kind: (swin(kind), swin(kind, depths=(1, 2), width=8)) for kind in SWINS} | {
    "vit": (Vit(patch=4, width=16, depth=4, heads=2), Vit(patch=4, width=32, depth=2, heads=2)),
    "vit3d": (Vit3d(patch=4, width=32, depth=4, heads=2, mlp_ratio=2, stem="pooled", pool=2),) * 2,
}
CASES = [("vit", name) for name in ("dense", "hash_moe", *REPRESENTATIVE)]
CASES += [("vit3d", name) for name in REPRESENTATIVE]
CASES += list(zip(SWINS * 2, REPRESENTATIVE, strict=True))


def trained(kind: str, method: Method):
    config, teacher = BACKBONES[kind]
    image, settings, splits = IMAGE, SHIFTED, (images(50), images(20, 1))
    if kind == "vit3d":
        image, settings, splits = VOLUMES, ON_VOLUMES, (balls(16, 0), balls(6, 100))
    torch.manual_seed(0)
    guide = initialise_guide(teacher.build(image), method, config.stages) if method.guided else None
    model = config.build(image, method.moe)
    loaded = (load_split_where_it_fits(split, "cpu") for split in splits)
    objective = Objective(method.losses, distillation=method.distillation)
    job = TrainingJob(model, *loaded, objective, guide, method.views)
    values = [metrics.values for metrics in loop.iterate_training(job, settings, 0, CPU)]
    return attach_required_guide(model, guide), values


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_method_trains_is_saved_and_predicts_the_same_in_any_batch(tmp_path, kind, name):
    model, values = trained(kind, METHODS[name])
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in values)
    if kind == "vit3d":
        assert {"train_mae", "validation_mae", "validation_loss", "task"} <= set(values[-1])
        assert "train_accuracy" not in values[-1] and 0 < values[-1]["validation_mae"] < 60
    artifacts.save_model(tmp_path, model)
    pixels = torch.rand((7, 1, *model.image.shape), generator=torch.Generator().manual_seed(1))
    expected, records = predict_in_batches(model, pixels, batch=7)
    layouts = model.layouts
    shapes = [(7, layout.special + math.prod(layout.grid), 8) for layout in layouts]
    assert [record.probs.shape for record in records] == shapes
    assert len(records) == (2 if METHODS[name].moe else 0)
    if kind in SWINS:
        assert layouts == (TokenLayout(0, (8, 8), (8, 8)), TokenLayout(0, (4, 4), (8, 8)))
    for batch in (1, 3, 7):
        logits, again = predict_in_batches(artifacts.load_model(tmp_path), pixels, batch=batch)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(again, records, strict=True):
            assert torch.equal(ours.chosen, theirs.chosen)
    # Attacks need the gradient: no part may cut the graph between pixels and loss.
    pixels = pixels[:3].requires_grad_()
    model.eval()(pixels).prediction.logsumexp(-1).sum().backward()
    assert pixels.grad.abs().sum() > 0


class Small(nn.Module):
    """Two routed layers over four tokens; dropout and noise in training mode only."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 3)
        self.gates = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.noisy = noisy

    def forward(self, images: Tensor) -> ModelOutput:
        assert images.dtype == torch.float32 and images.max() <= 1
        tokens = self.dropout(images.flatten(1)).reshape(len(images), 4, 4)
        if self.noisy:
            torch.rand(3)
        records = tuple(self._record(gate(tokens)) for gate in self.gates)
        return ModelOutput(self.head(tokens.flatten(1)), records)

    def _record(self, logits: Tensor) -> RoutingRecord:
        probs = logits.softmax(-1)
        chosen = probs == probs.amax(-1, keepdim=True)
        return RoutingRecord(logits, probs, chosen.float(), chosen, probs * chosen)


def test_leaves_modes_and_random_state_as_they_were():
    model = Small(noisy=True).train()
    model.frozen.eval()
    state = torch.get_rng_state()
    logits, _ = predict_in_batches(model, IMAGES, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.dropout.training and not model.frozen.training
    assert not logits.requires_grad and torch.equal(logits, predict_in_batches(model, IMAGES, 4)[0])


def test_is_fp32_under_autocast_of_bytes_and_pixels_and_keeps_no_records_when_told():
    pixels = torch.from_numpy(IMAGES).float() / 255
    with torch.autocast("cpu", torch.bfloat16):
        logits, records = predict_in_batches(Small(), pixels, 4, routing=False)
    assert logits.dtype == torch.float32 and records == ()
    assert torch.equal(logits, predict_in_batches(Small(), IMAGES, 4)[0])


TWOS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
SMALL = dict.fromkeys(TWOS, 2) | {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 8}
SMALL |= {"moe_intermediate_size": 8, "eos_token_id": None}
WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT = dict.fromkeys(WIDTHS, 8) | {"n_routed_experts": 4, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
MODELS = {"Mixtral": {"num_local_experts": 4}, "Olmoe": {"num_experts": 4}}
MODELS |= {"Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 8}}
MODELS |= {"Qwen3Moe": {"num_experts": 4, "head_dim": 8, "norm_topk_prob": True}}
MODELS |= {"DeepseekV2": LATENT | {"topk_method": "group_limited_greedy"}, "DeepseekV3": LATENT}
SWITCH = dict.fromkeys(("num_layers", "num_decoder_layers", "num_heads", "expert_capacity"), 2) | (
    {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_sparse_encoder_layers": 1}
    | {"num_sparse_decoder_layers": 1, "num_experts": 4}
)


def foreign_model(name: str, settings: dict[str, object]) -> nn.Module:
    """A small model of transformers with random weights, its routers sure of themselves."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    define_missing_operators()
    torch.manual_seed(0)
    family, _, task = name.partition("For")
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}For{task}")(config).eval()
    for key, parameter in model.named_parameters():
        if "gate.weight" in key or "router" in key:
            parameter.data = torch.randn(parameter.shape)
        if "shared_expert" in key:  # what is not routed adds nothing
            parameter.data.zero_()
    return model


def count_hooks(model: nn.Module) -> int:
    """Hooks of the model, which transformers itself leaves some of."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_records_are_what_the_model_returns_and_does(name):
    model = foreign_model(f"{name}ForCausalLM", SMALL | MODELS[name])
    words = torch.randint(50, (3, 7))
    output = model(input_ids=words, output_router_logits=True)
    hooks = count_hooks(model)
    with routing_collector(model) as records:
        traced = model(input_ids=words)
    assert torch.equal(traced.logits, output.logits) and count_hooks(model) == hooks
    assert len(records) == len(output.router_logits)
    blocks = [module for module in model.modules() if hasattr(module, "gate")]
    for record, logits, block in zip(records, output.router_logits, blocks, strict=True):
        assert record.probs.shape == (3, 7, 4) and (record.chosen.sum(-1) == 2).all()
        assert torch.equal(record.logits.flatten(0, 1), logits.float())
        torch.testing.assert_close(record.probs.sum(-1), torch.ones(3, 7))
        assert torch.equal(record.combine > 0, record.chosen)
        tokens = torch.randn(3, 7, 16)
        with routing_collector(block) as alone:
            expected = block(tokens)
        every = torch.arange(4).expand(21, 4)  # all experts, with the weights of the record
        given = block.experts(tokens.flatten(0, 1), every, alone[0].combine.flatten(0, 1))
        torch.testing.assert_close(given.view(3, 7, 16), expected)


@torch.no_grad()
def test_switch_drops_what_is_beyond_an_experts_capacity():
    model = foreign_model("SwitchTransformersForConditionalGeneration", SWITCH)
    words = torch.randint(50, (3, 7))
    with routing_collector(model) as records:
        model(input_ids=words, decoder_input_ids=words[:, :5])
    assert [record.probs.shape for record in records] == [(3, 7, 4), (3, 5, 4)]
    record, dropped = records[0], 0
    for text in range(3):
        full = [0] * 4
        for place in range(7):
            probs = record.logits[text, place].softmax(0)
            best = int(probs.argmax())
            assert record.chosen[text, place].nonzero().tolist() == [[best]]
            weights = torch.zeros(4)
            if full[best] < 2:
                weights[best] = probs[best]
            dropped += full[best] >= 2
            full[best] += 1
            torch.testing.assert_close(record.combine[text, place], weights)
    assert dropped


def records_and_gradients(model: nn.Module, is_within: bool, reads_records: bool):
    """Return the records of a step, whose backward pass is within the trace or after it."""
    words = torch.randint(50, (2, 4), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with routing_collector(model) as records:
        loss = model(input_ids=words).logits.square().mean()
        if reads_records:
            assert all(record.probs.requires_grad for record in records)
            loss = loss + sum(record.probs.square().sum() for record in records)
        if is_within:
            loss.backward()
    if not is_within:
        loss.backward()
    return records, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("is_within", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_again_are_recorded_once(use_reentrant, is_within):
    model = foreign_model("OlmoeForCausalLM", SMALL | MODELS["Olmoe"]).train()
    reads_records = not use_reentrant  # whose forward pass has no gradients
    _, expected = records_and_gradients(model, is_within, reads_records)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    records, gradients = records_and_gradients(model, is_within, reads_records)
    assert len(records) == 2
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_our_layers_that_are_computed_again_are_recorded_once(use_reentrant):
    layers = nn.Sequential(MoELayer(8, NoisyTopK(), Mlp(number=4)), nn.GELU())
    model = small_vit()
    calls = (
        (layers, layers, torch.randn(2, 3, 8, requires_grad=True), 1),
        (model, lambda x: model(x).prediction, torch.rand(2, 1, 8, 8, requires_grad=True), 2),
    )
    for traced, call, inputs, number in calls:
        with routing_collector(traced) as records:
            checkpoint(call, inputs, use_reentrant=use_reentrant).square().sum().backward()
        assert len(records) == number


class AnyGate(nn.Module):
    """A router of an unknown class: returns its parts in an order, through ``change``."""

    def __init__(self, order=(0, 1, 2), k=2, score=torch.softmax, change=lambda *parts: parts):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.order, self.k, self.score, self.change = order, k, score, change

    def forward(self, tokens):
        logits = self.linear(tokens)
        weights, experts = self.score(logits, -1).topk(self.k)
        parts = self.change(logits, weights, experts)
        return tuple(parts[number] for number in self.order)


def sigmoid(logits, dim):
    return logits.sigmoid()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("score", [torch.softmax, sigmoid])
def test_a_router_is_known_by_what_it_returns(order, k, score):
    """Of all orders, scores and k, also k = E; normalised and scaled; in wrappers."""
    changes = (
        lambda logits, weights, experts: (logits, 2.5 * weights / weights.sum(-1, True), experts),
        lambda logits, weights, experts: (logits, weights * 3, experts.int()),
    )
    for change in changes[k == 1 and score is sigmoid :]:  # 1 of a sigmoid is 1 of a softmax
        gate = AnyGate(order, k, score, change)
        model = nn.Sequential(nn.Sequential(gate))
        tokens = torch.randn(2, 3, 8) * 3
        with routing_collector(model) as records:
            output = model(tokens)
        (record,) = records
        logits, weights, experts = (output[order.index(number)] for number in range(3))
        scores = score(gate.linear(tokens), -1)
        torch.testing.assert_close(record.probs, scores / scores.sum(-1, keepdim=True))
        assert torch.equal(record.combine.gather(-1, experts.long()), weights)
        assert (record.chosen.sum(-1) == k).all() and torch.equal(record.logits, logits)


def test_a_wrapped_router_is_recorded_once_and_a_biased_choice_is_read():
    class Wrapper(AnyGate):
        def forward(self, tokens):
            return self.inner(tokens)

    def choose_lowest(logits, weights, experts):  # as a bias or groups may
        weights, experts = logits.softmax(-1).topk(2, largest=False)
        return logits, weights, experts

    wrapper = Wrapper()
    wrapper.inner = AnyGate(change=choose_lowest)
    with routing_collector(wrapper) as records:
        _, _, experts = wrapper(torch.randn(5, 8))
    (record,) = records
    assert record.chosen.shape == (1, 5, 4) and record.chosen[0].gather(-1, experts).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda logits, weights, experts: (logits, weights.flip(-1), experts), "does not weigh"),
        (lambda logits, weights, experts: (logits, weights, experts + 3), "does not weigh"),
        (lambda logits, weights, experts: (logits * torch.nan, weights, experts), "not weigh"),
        (lambda logits, weights, experts: (logits, weights * torch.nan, experts), "not weigh"),
        (
            lambda logits, weights, experts: (logits, torch.ones(5, 1), logits.argmin(-1)[:, None]),
            "does not weigh experts by a score of its logits; allowed: softmax, sigmoid",
        ),
        (lambda logits, weights, experts: (logits, weights, experts[:, :1]), "no known router"),
        (lambda logits, weights, experts: (logits, weights, weights), "no known router"),
        (lambda logits, weights, experts: (logits, weights > 0, experts), "no known router"),
    ],
)
def test_what_is_no_routing_is_refused(change, problem):
    gate = AnyGate(change=change)
    with pytest.raises(UserError, match=f"^trace: AnyGate.*{problem}") as error:
        with routing_collector(gate):
            gate(torch.randn(5, 8))
    assert "\n" not in str(error.value)


class OwnGate(nn.Module):
    """Somebody's router: returns the experts chosen and their weights, and keeps its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, tokens):
        self.logits = self.linear(tokens)
        return self.logits.sigmoid().topk(2)


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = OwnGate()

    def forward(self, *, tokens):
        weights, _ = self.gate(tokens.flatten(0, 1))
        return tokens * weights.sum(-1).view(*tokens.shape[:2], 1)


def read_own_gate(gate, inputs, output):
    weights, experts = output
    return build_record(gate.logits, experts, weights, score="sigmoid")


def test_an_adapter_reads_anybodys_router():
    block, tokens = OwnBlock(), torch.randn(2, 3, 8)
    with routing_collector(block, {"OwnGate": read_own_gate}) as records:
        block(tokens=tokens)
    (record,) = records
    scores = block.gate.linear(tokens).sigmoid()
    torch.testing.assert_close(record.probs, scores / scores.sum(-1, keepdim=True))
    weights, experts = scores.topk(2)
    combine = torch.zeros_like(scores).scatter(-1, experts, weights)
    assert torch.equal(record.combine, combine) and torch.equal(record.chosen, combine > 0)
    assert torch.equal(record.load, record.chosen.float())


def test_a_compiled_model_is_traced_as_it_was():
    compiled = torch.compile(OwnBlock(), backend="eager")
    compiled(tokens=torch.randn(2, 3, 8))
    with routing_collector(compiled, {"OwnGate": read_own_gate}) as records:
        compiled(tokens=torch.randn(2, 3, 8))
    assert len(records) == 1


def test_other_routers_adapters_and_records_are_refused():
    with pytest.raises(UserError, match="^trace: OwnBlock has no known router; allowed: "):
        with routing_collector(OwnBlock()):
            pass
    block = OwnBlock()
    with pytest.raises(UserError, match="^adapters.OwnGate: found Tensor; allowed: a Routing"):
        with routing_collector(block, {"OwnGate": lambda gate, inputs, output: output[0]}):
            block(tokens=torch.randn(2, 3, 8))
    said = "^adapters.Gate: found no such class in OwnBlock; allowed: "
    with pytest.raises(UserError, match=said):
        with routing_collector(block, {"Gate": read_own_gate}):
            block(tokens=torch.randn(2, 3, 8))
    for experts, score, problem in (
        ([[0, 1], [2, 2]], "softmax", "experts: found 2 twice in one token's choice"),
        ([[3, 1], [2, 0]], "sigmod", "score: found 'sigmod'; allowed: softmax, sigmoid, sqrt_s"),
    ):
        with pytest.raises(UserError, match=f"^build_record: {problem}"):
            build_record(torch.randn(2, 4), torch.tensor(experts), torch.full((2, 2), 0.5), score)
