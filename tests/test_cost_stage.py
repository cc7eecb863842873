"""The stage ``cost`` end to end on the digits, for a model with experts and a dense one."""

import json

import pytest
import torch

from moecore.artifacts import save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.vit import Vit
from moecore.data.digits import Digits
from moecore.layers.moe import MoE
from moecore.report.results import MEASURED
from stages import cost as stage

PARAMS = "cost: {batch: 8, rounds: 3, images: 5}\n"
MOE = MoE(router={"kind": "noisy_top_k", "k": 2}, experts={"kind": "mlp", "number": 4, "hidden_ratio": 1}, blocks=[0, 1])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for both models, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cost")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=50, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        for name, moe in {"vmoe": MOE, "dense": None}.items():
            target = folder / "artifacts/pretrain" / name / "0"
            target.mkdir(parents=True)
            torch.manual_seed(1)
            save_model(target, Vit(patch=6, width=16, depth=2, heads=2).build(image, moe))
            stage.cost("pretrain", name, 0)
        yield {name: json.loads((folder / f"artifacts/measured/cost/pretrain/{name}/0.json").read_text()) for name in ("vmoe", "dense")}


def test_everything_that_the_report_reads_is_there(results):
    for found in results.values():
        assert set(MEASURED["cost"]) <= set(found) and found["batch"] == 8 and found["rounds"] == 3
        for timing in (found["latency_ms"], found["batch_ms"]):
            assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        assert found["images_per_second"] == pytest.approx(8000 / found["batch_ms"]["median"])
        assert found["memory_counted_as"] in ("live tensors", "CUDA allocator") and found["peak_memory_bytes"] > 4 * found["parameters"]


def test_a_dense_model_has_no_routing(results):
    dense = results["dense"]
    assert [dense[name] for name in ("routing_ms", "routing_share", "routing_batch_share", "routing_flops_per_image")] == [0, 0, 0, 0]
    assert dense["parameters"] == dense["active_parameters"]


def test_counts_of_the_routed_model(results):
    vmoe, dense = results["vmoe"], results["dense"]
    # 5 tokens of width 16: a dense feed-forward is 16 → 64 → 16, two experts are 16 → 16 → 16 each; the router has 4 logits; two blocks
    router, experts, replaced = 2 * 5 * 16 * 4, 5 * 2 * 2 * (2 * 16 * 16), 5 * 2 * (2 * 16 * 64)
    assert vmoe["routing_flops_per_image"] == 2 * router
    assert vmoe["flops_per_image"] == dense["flops_per_image"] + 2 * (router + experts - replaced)
    assert 0 < vmoe["routing_share"] < 1 and 0 < vmoe["routing_batch_share"] < 1 and 0 < vmoe["routing_ms"]
    # of 4 experts with 2 · (16 · 16 + 16) parameters each, in 2 blocks, half are idle
    assert vmoe["parameters"] - vmoe["active_parameters"] == 2 * 2 * 2 * (16 * 16 + 16)


def test_the_passes_go_through_the_images_in_turn():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).numpy() * 51
    source = stage.in_turn(images, 3, "cpu")
    assert [(source(number).flatten() * 5).round().int().tolist() for number in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert source(0).dtype == torch.float32 and source(0).shape == (3, 1, 1, 1)
