"""Costs on the digits, of a model with experts and of a dense one."""

import pytest
import torch

from moecore.measure import cost
from moecore.measure.base import Subject, at_once
from moecore.measure.cost import Cost
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from tests.measure.subjects import built, digits

MOE = MoE(
    router={"kind": "noisy_top_k", "k": 2},
    experts={"kind": "mlp", "number": 4, "hidden_ratio": 1},
    blocks=[0, 1],
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    data = digits(tmp_path_factory.mktemp("cost"))
    settings = Cost(batch=8, rounds=3, images=5, k=(1, 2, 6))
    found = {}
    for name, moe in {"vmoe": MOE, "dense": None}.items():
        model = built(Vit(patch=6, width=16, depth=2, heads=2), moe, data, 1)
        found[name] = cost.measure(Subject(model, data), settings, at_once)
    return found


def test_timings_and_memory(results):
    for found in results.values():
        assert found.batch == 8 and found.rounds == 3
        for timing in (found.latency_ms, found.batch_ms):
            assert 0 < timing.low <= timing.median <= timing.high
        assert found.images_per_second == pytest.approx(8000 / found.batch_ms.median)
        assert (
            found.memory_counted_as in ("live tensors", "CUDA allocator")
            and found.peak_memory_bytes > 4 * found.parameters
        )


def test_a_batch_is_timed_with_each_k_that_the_model_can_have(results):
    rows = results["vmoe"].by_k
    assert [row.k for row in rows] == [1, 2], "6 of 4 experts cannot be"
    assert all(0 < row.batch_ms.low <= row.batch_ms.median for row in rows)
    assert results["dense"].by_k == ()


def test_a_dense_model_has_no_routing(results):
    dense = results["dense"]
    assert [
        getattr(dense, name)
        for name in (
            "routing_ms",
            "routing_share",
            "routing_batch_share",
            "routing_flops_per_image",
        )
    ] == [0, 0, 0, 0]
    assert dense.parameters == dense.active_parameters


def test_counts_of_the_routed_model(results):
    vmoe, dense = results["vmoe"], results["dense"]
    # 5 tokens of width 16: a dense feed-forward is 16 → 64 → 16, two experts are 16 → 16 → 16 each;
    # the router has 4 logits; two blocks.
    router, experts, replaced = 2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16), 5 * 2 * (2 * 16 * 64)
    assert vmoe.routing_flops_per_image == 2 * router
    assert vmoe.flops_per_image == dense.flops_per_image + 2 * (router + experts - replaced)
    assert 0 < vmoe.routing_share < 1 and 0 < vmoe.routing_batch_share < 1 and 0 < vmoe.routing_ms
    # of 4 experts with 2 · (16 · 16 + 16) parameters each, in 2 blocks, half are idle
    assert vmoe.parameters - vmoe.active_parameters == 2 * 2 * 2 * (16 * 16 + 16)


def test_the_passes_go_through_the_images_in_turn():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).numpy() * 51
    source = cost.in_turn(images, 3, "cpu")
    assert [(source(number).flatten() * 5).round().int().tolist() for number in range(3)] == [
        [0, 1, 2],
        [3, 4, 0],
        [1, 2, 3],
    ]
    assert source(0).dtype == torch.float32 and source(0).shape == (3, 1, 1, 1)
