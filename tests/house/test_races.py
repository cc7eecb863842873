"""The contestants of benchmarks/routers.py train, and cost as many FLOPs as is said there."""

import pytest
import torch

from benchmarks.routers import ALL_SLOTS, CONTESTANTS, UPDATED, step_flops
from benchmarks.training_step import Size, bench
from moecore.nn.backbones.vit import Vit

# 8 images of 4 patches and a class token; 8 experts of 24 × 24 in each of two blocks
SIZE = Size(Vit(patch=7, width=24, depth=4, heads=2), 1, 14, 3, 8, 1.0)
# FLOPs of both layers
SIX_MORE = 2 * (8 * 5) * 6 * (4 * 24 * 24)  # 40 tokens, 6 experts more, two products
MERGING = 2 * 8 * 8 * (2 * 2 * 24 * 48)  # 8 images, 8 experts, numbers of two maps
ROUNDS = 2 * 100 * 2 * (2 * 40 * 8)  # Sinkhorn's on the meta device: all 100, two products


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_trains_at_the_flops_that_are_said(name):
    method = CONTESTANTS[name].method(SIZE)
    made = bench(SIZE, method, torch.float32)
    made.step()
    assert all(one.isfinite().all() for one in made.model.parameters())
    own, vmoe = step_flops(SIZE, method), step_flops(SIZE, SIZE.vmoe)
    if CONTESTANTS[name].note.startswith(ALL_SLOTS) or name == "competition, competing":
        own -= SIX_MORE
    if name == "merged":
        own -= MERGING
    if name == "sinkhorn":
        own -= ROUNDS
    assert own == pytest.approx(vmoe, rel=0.05)  # depth: 2 of 5 tokens are less than half


@pytest.mark.parametrize("name", UPDATED)
def test_routers_are_updated_at_the_end_of_a_step_alone(name):
    made = bench(SIZE, CONTESTANTS[name].method(SIZE), torch.float32, updates_routers=False)
    biases = [one for key, one in made.model.named_buffers() if key.endswith("balance.bias")]
    made.step()
    assert len(biases) == 2 and not any(one.any() for one in biases)
    made._replace(updates_routers=True).step()
    assert all(one.any() for one in biases)
