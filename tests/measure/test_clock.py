"""Quartiles of timings, live memory and FLOPs by hand; costs of a sparse and a dense model."""

import gc

import pytest
import torch
from torch import nn

from moecore.measure import cost
from moecore.measure.base import MeasuredModel
from moecore.measure.cost import Cost
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.dispatch import SparsePlan
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.tasks.classification import Classification
from moecore.training.meter import LiveBytes
from tests.measure.subjects import built, compute_without_cache, top_k_mlps

TOP2 = {"kind": "noisy_top_k", "k": 2}
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
IMAGE = ImageSpec(
    channels=1, size=8, task=Classification(classes=tuple("abcde")), mean=(0.5,), std=(0.2,)
)


def layer(router: dict = TOP2, experts: dict = MLP) -> MoEFeedForward:
    torch.manual_seed(0)
    return MoESettings(router=router, experts=experts, blocks=[0]).build(16)


def test_median_and_quartiles():
    assert cost.timing_quartiles([5, 1, 4, 2, 3]) == (3, 2, 4)
    assert cost.timing_quartiles([1, 3]) == (2, 1.5, 2.5)
    assert cost.timing_quartiles([7]) == (7, 7, 7)
    with pytest.raises(ValueError, match="no values"):
        cost.timing_quartiles([])


def test_live_bytes_by_hand():
    x = torch.zeros(1000)  # 4000 bytes
    with LiveBytes([x]) as live:
        assert (live.now, live.peak) == (4000, 4000)
        y = x + 1
        y.view(10, 100)[2:].t()  # views hold nothing of their own
        assert live.now == 8000
        z = y * 2
        assert live.now == 12000
        del y
        gc.collect()
        assert live.now == 8000
        z.add_(1)
        w = z[:500] + 1
        assert (live.now, live.peak) == (10000, 12000)
        del w, z
        gc.collect()
        assert (live.now, live.peak) == (4000, 12000)


def test_peak_of_a_chain_of_linears():
    # weights 3 · (100 · 100 + 100) · 4 = 121,200 bytes, images 10 · 100 · 4 = 4000; input and
    # output of a layer live together, and the one before is gone
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))
    found, counted = cost.peak_memory_and_counting_method(model, torch.zeros(10, 100))
    assert (found, counted) == (121_200 + 4000 + 2 * 4000, "live tensors")


def by_hand(tokens: int, width: int, hidden: int, depth: int, sparse: int = 0) -> int:
    """FLOPs of a ViT's image, 4 × 4 patches, 2 heads, 5 classes, but ``sparse`` feed-forwards."""
    patches, head = 2 * (tokens - 1) * 16 * width, 2 * width * 5
    attention = 2 * tokens * width * (3 * width + 2 * tokens + width)
    feed_forward = 2 * (2 * tokens * width * hidden)
    return patches + depth * attention + (depth - sparse) * feed_forward + head


@pytest.mark.parametrize("batch", [1, 3])
def test_flops_of_a_vit_by_hand(batch):
    images = torch.rand(batch, 1, 8, 8)
    vit = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=2)
    whole, routing = cost.whole_and_routing_flops(vit.build(IMAGE), images)
    assert (whole, routing) == (by_hand(5, 16, 32, 2), 0)
    moe = MoESettings(router=TOP2, experts=MLP, blocks=[1])
    whole, routing = cost.whole_and_routing_flops(vit.build(IMAGE, moe), images)
    # 5 tokens: 4 logits each; 2 experts each, two maps 16 → 16
    router, experts = (2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16))
    assert (whole, routing) == (by_hand(5, 16, 32, 2, sparse=1) + router + experts, router)


def test_padding_is_taken_off(monkeypatch):
    # 257 tokens · 2 = 514 pairs of 4 experts are padded to multiples of 8
    tokens, moe = torch.randn(1, 257, 16), layer()
    plan, _ = moe.eval().router(tokens)
    assert isinstance(plan, SparsePlan) and len(plan.order) > 514
    assert cost.padding_share(plan) == 1 - 514 / len(plan.order)
    whole, routing = cost.whole_and_routing_flops(moe, tokens)
    assert routing == 2 * 257 * 16 * 4
    assert whole == pytest.approx(routing + 257 * 2 * 2 * (2 * 16 * 16), abs=1e-6)
    monkeypatch.setattr("moecore.nn.kernels.grouped._LOOPED_ROWS", 0)
    assert cost.whole_and_routing_flops(moe, tokens) == (whole, routing), "grouped as looped"


def test_routing_is_all_but_the_experts():
    # soft slots, T = 12, E = 4, p = 3: scores, mixing and back are three products of 2·T·E·p·d; the
    # experts see 4 · 3 rows
    slots = layer({"kind": "soft_slots", "slots": 3})
    whole, routing = cost.whole_and_routing_flops(slots, torch.randn(2, 12, 16))
    assert routing == 3 * (2 * 12 * 4 * 3 * 16) and whole == routing + 12 * 2 * (2 * 16 * 16)
    # an eigenbasis router projects every token onto all four bases of rank 8; its experts start
    # from there: 8 → 16 → 16
    eigen = {"kind": "eigen", "number": 4, "hidden_ratio": 1, "rank": 8}
    moe = layer({"kind": "noisy_top_k", "k": 1}, eigen)
    whole, routing = cost.whole_and_routing_flops(moe, torch.randn(1, 12, 16))
    assert routing == 2 * 12 * 16 * 4
    assert whole == routing + 12 * (2 * 16 * 8 + 2 * 8 * 16 + 2 * 16 * 16)


def test_times_have_their_parts_and_leave_the_model_alone():
    moe, tokens = layer().train(), torch.randn(2, 40, 16)
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    state = torch.get_rng_state()
    seen = []

    def images(number: int) -> torch.Tensor:
        seen.append(number)
        return tokens

    found = cost.pass_and_routing_times(moe, images, rounds=4)
    assert len(found) == 4 and all(0 < part.routing < part.total for part in found)
    times = cost.unwatched_times(moe, images, rounds=2)
    assert len(times) == 2 and min(times) >= 0
    assert seen == [*range(cost.WARM_UP + 4), *range(cost.WARM_UP + 2)]
    assert moe.training and moe.router.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in moe.state_dict().items())
    assert all(parameter.grad is None for parameter in moe.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in moe.modules())


def test_spans_are_read_at_both_ends():
    ticks = iter(range(100))
    moe = layer().eval()
    with cost.record_spans(moe, lambda: next(ticks)) as spans:
        moe(torch.randn(1, 5, 16))
    assert [span[:3] for span in spans] == [("experts", 1, 2), ("layer", 0, 3)]


@pytest.fixture(scope="module")
def results(data):
    settings = Cost(batch=8, rounds=3, images=5)
    found = {}
    for name, moe in {"vmoe": top_k_mlps(k=2), "dense": None}.items():
        model = built(Vit(patch=6, width=16, depth=2, heads=2), moe, data, 1)
        found[name] = settings.collect_result(MeasuredModel(model, data), compute_without_cache)
    return found


def test_timings_and_memory(results):
    for found in results.values():
        latency, batch = found.find("latency_ms"), found.find("batch_ms")
        for timing in (latency, batch):
            assert 0 < timing.low <= timing.value <= timing.high
        speed = found.find("inference_images_per_second")
        assert speed.value == pytest.approx(8000 / batch.value)
        assert found.facts["memory_counted_as"] in ("live tensors", "CUDA allocator")
        assert found.find("peak_memory").value > 4 * found.facts["parameters"]


def test_a_batch_is_timed_with_each_k_that_the_model_can_have(results):
    values = [value for value in results["vmoe"].all("batch_ms") if value.at]
    assert [value.at["k"] for value in values] == [1, 2, 3, 4], "6 of 4 experts cannot be"
    assert all(0 < value.low <= value.value for value in values)
    assert not results["dense"].curve("batch_ms", "k")


def test_counts_of_the_routed_model(results):
    vmoe, dense = results["vmoe"], results["dense"]
    # 5 tokens of width 16: a dense feed-forward is 16 → 64 → 16, two experts are 16 → 16 → 16 each;
    # the router has 4 logits; two blocks.
    router, experts, replaced = 2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16), 5 * 2 * (2 * 16 * 64)
    assert vmoe.find("routing_gflops").value == pytest.approx(2e-9 * router)
    more = vmoe.find("gflops").value - dense.find("gflops").value
    assert more == pytest.approx(2e-9 * (router + experts - replaced))
    for name in ("routing_share", "routing_batch_share"):
        assert 0 < vmoe.find(name).value < 1
    assert vmoe.find("routing_ms").value > 0
    # of 4 experts with 2 · (16 · 16 + 16) parameters each, in 2 blocks, half are idle
    idle = vmoe.facts["parameters"] - vmoe.facts["active_parameters"]
    assert idle == 2 * 2 * 2 * (16 * 16 + 16)


def test_the_passes_go_through_the_images_in_turn():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).numpy() * 51
    source = cost.cyclic_batch_function(images, 3, "cpu")
    passes = [(source(number).flatten() * 5).round().int().tolist() for number in range(3)]
    assert passes == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert source(0).dtype == torch.float32 and source(0).shape == (3, 1, 1, 1)
