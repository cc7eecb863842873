"""grouped_linear against one product per row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, linear
from torch.utils.flop_counter import FlopCounterMode

from moecore.nn.kernels import cpu_expert_loop, grouped
from moecore.nn.kernels.cpu_expert_loop import ExpertGroup, ExpertGroups
from moecore.nn.kernels.grouped import can_group, grouped_linear, grouped_mlp


@pytest.fixture(params=["loop", "groups", "grouped_mm", "tiles"])
def way(request, monkeypatch):
    # The ways of a CPU: one expert at a time where they have few rows, a group where they are many
    # too, grouped_mm for many rows. And tiles: of CUDA and compiled graphs without grouped_mm.
    looped = request.param in ("loop", "groups")
    monkeypatch.setattr(grouped, "_MAX_LOOPED_ROWS", 10**9 if looped else -1)
    monkeypatch.setattr(
        cpu_expert_loop, "MIN_EXPERTS_TO_GROUP", 1 if request.param == "groups" else 10**9
    )
    if request.param == "tiles":
        monkeypatch.setattr(grouped, "can_loop", lambda rows: False)
        monkeypatch.setattr(grouped, "can_group", lambda rows, weight: False)
    return request.param


def inputs(sizes, width=8, outputs=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(sizes), width), (len(sizes), width, outputs), (len(sizes), outputs)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = (values.to(dtype).requires_grad_() for values in drawn)
    return *leaves, torch.tensor(sizes).cumsum(0).int()


def slow(rows, weight, bias, offsets):
    """One row at a time, by the definition."""
    outputs = []
    for place, row in enumerate(rows):
        expert = sum(place >= end for end in offsets.tolist())
        outputs.append(row @ weight[expert] + (0 if bias is None else bias[expert]))
    return torch.stack(outputs)


# 8 numbers are aligned to 16 bytes, so grouped_mm takes them; 6 are not, so the loop does.
@pytest.mark.parametrize(
    ("width", "sizes", "biased"),
    [
        *((8, (3, 0, 5, 1), True), (8, (0, 0, 7), False), (8, (1,), True), (6, (4, 2, 0), True)),
        (6, (3, 0, 5, 1), False),
    ],
)
def test_values_and_all_gradients_agree_with_one_product_per_row(way, width, sizes, biased):
    outputs = width // 2
    rows, weight, bias, offsets = inputs(sizes, width, outputs)
    assert can_group(rows, weight) == (width == 8)
    leaves = [rows, weight, bias] if biased else [rows, weight]
    bias = bias if biased else None
    towards = torch.randn(sum(sizes), outputs)
    actual = grouped_linear(rows, weight, bias, offsets)
    expected = slow(rows, weight, bias, offsets)
    torch.testing.assert_close(actual, expected)
    sides = [torch.autograd.grad(side, leaves, towards) for side in (actual, expected)]
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_many_rows_cross_the_chunks_in_which_biases_are_added(way):
    rows, weight, bias, offsets = inputs((1500, 0, 900, 700))
    experts = torch.tensor([0] * 1500 + [2] * 900 + [3] * 700)
    expected = torch.einsum("ri,rio->ro", rows, weight[experts]) + bias[experts]
    torch.testing.assert_close(grouped_linear(rows, weight, bias, offsets), expected)


@pytest.mark.parametrize("width, outputs, biased", [(8, 4, True), (8, 4, False), (6, 3, False)])
def test_an_expert_without_rows_gets_a_gradient_of_zeros(way, width, outputs, biased):
    rows, weight, bias, offsets = inputs((3, 0, 2), width, outputs)
    # sum() sends an expanded gradient
    grouped_linear(rows, weight, bias if biased else None, offsets).sum().backward()
    assert torch.equal(weight.grad[1], torch.zeros(width, outputs))
    assert weight.grad[0].abs().sum() > 0
    if biased:  # d sum / d bias = the expert's number of rows
        assert torch.equal(bias.grad, torch.tensor([3.0, 0, 2])[:, None].expand(-1, outputs))


def test_each_of_rows_weight_and_bias_gets_its_gradient_when_the_others_are_frozen(way):
    *leaves, offsets = inputs((3, 0, 1, 2), 8, 8)
    loss = lambda leaves: grouped_linear(*leaves, offsets).float().square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together = torch.autograd.grad(loss(leaves), leaves)
        for leaf, expected in zip(leaves, together, strict=True):
            alone = [each if each is leaf else each.detach() for each in leaves]
            assert torch.equal(torch.autograd.grad(loss(alone), leaf)[0], expected)


def test_second_derivatives_of_the_loop_and_of_tiles(way, monkeypatch):
    monkeypatch.setattr(grouped, "_MAX_LOOPED_ROWS", 10**9)
    rows, weight, bias, offsets = inputs((2, 0, 3), 4, 4)
    found = []
    for function in (grouped_linear, slow):
        loss = function(rows, weight, bias, offsets).square().sum()
        (first,) = torch.autograd.grad(loss, rows, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (weight, bias)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def test_what_grouped_mm_can_take():
    rows, weight, _, _ = inputs((2, 3))
    assert can_group(rows, weight) and not can_group(rows.double(), weight.double())
    assert not can_group(rows.bfloat16(), weight.bfloat16())  # 4 outputs are 8 bytes
    assert not can_group(rows, weight.bfloat16()) and not can_group(rows[:0], weight)
    assert not can_group(torch.randn(5 * 8 + 1)[1:].view(5, 8), weight)  # starts at byte 4


def test_rows_that_start_off_alignment_or_are_transposed_still_work(way):
    rows, *others = inputs((2, 3))
    shifted = torch.cat([torch.zeros(1), rows.detach().flatten()])[1:].view(5, 8)
    transposed = rows.detach().t().contiguous().t()
    for view in (shifted, transposed):
        torch.testing.assert_close(grouped_linear(view, *others), slow(rows, *others))


@pytest.mark.parametrize("width, outputs", [(16, 8), (6, 3)])
def test_autocast_computes_in_bf16_and_stays_close(way, width, outputs):
    rows, weight, bias, offsets = inputs((40, 0, 24), width, outputs)
    expected = slow(rows, weight, bias, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = grouped_linear(rows, weight, bias, offsets)
        dense = linear(rows[:40], weight[0].t(), bias[0])
    assert actual.dtype == dense.dtype == torch.bfloat16
    assert (actual - expected).norm() < 0.01 * expected.norm()
    towards = torch.randn(64, outputs)
    leaves = (rows, weight, bias)
    low = torch.autograd.grad(actual, leaves, towards.bfloat16())
    for ours, theirs in zip(low, torch.autograd.grad(expected, leaves, towards), strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() < 0.01 * theirs.norm()


def test_bias_gradient_in_bf16_does_not_stall_over_many_rows(way):
    # 4096 gradients of 1: a running sum in bf16 stops at 256.
    rows, weight, bias, offsets = inputs((4096, 64), 8, 8, torch.bfloat16)
    grouped_linear(rows, weight, bias, offsets).sum().backward()
    assert torch.equal(bias.grad[:, 0], torch.tensor([4096, 64], dtype=torch.bfloat16))


def mlp_inputs(sizes, dtype=torch.float32):
    """Leaves (rows, up, up_bias, down, down_bias) of width 8 with hidden width 4, and offsets."""
    rows, up, up_bias, offsets = inputs(sizes, 8, 4, dtype)
    _, down, down_bias, _ = inputs(sizes, 4, 8, dtype, seed=1)
    return rows, up, up_bias, down, down_bias, offsets


@pytest.mark.parametrize(
    ("sizes", "low"), [((3, 0, 5, 1), False), ((0, 0, 7), True), ((40, 36, 0), True), ((1,), False)]
)
def test_an_mlp_at_once_is_two_maps_with_gelu_between(way, sizes, low):
    *leaves, offsets = mlp_inputs(sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        actual = grouped_mlp(*leaves, offsets)
    rows, up, up_bias, down, down_bias = leaves
    expected = slow(gelu(slow(rows, up, up_bias, offsets)), down, down_bias, offsets)
    towards = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(actual, leaves, towards.to(actual.dtype), retain_graph=True)
    wanted = torch.autograd.grad(expected, leaves, towards)
    for ours, theirs in zip((actual, *found), (expected, *wanted), strict=True):
        assert (ours - theirs).norm() <= (0.02 if low else 1e-6) * theirs.norm()
    for leaf, whole in zip(leaves, found, strict=True):  # the others are frozen
        alone = [each if each is leaf else each.detach() for each in leaves]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            outputs = grouped_mlp(*alone, offsets)
        (gradient,) = torch.autograd.grad(outputs, leaf, towards.to(outputs.dtype))
        assert torch.equal(gradient, whole)


def test_second_derivatives_of_an_mlp(way):
    *leaves, offsets = mlp_inputs((2, 0, 3), torch.float64)
    assert torch.autograd.gradgradcheck(lambda *each: grouped_mlp(*each, offsets), leaves)


def test_groups_by_hand(monkeypatch):
    # Groups of two of eight inputs. Of the first both have rows: they share 2 slots each. The third
    # and fourth have 33 and none: too many for slots that cost nothing. The last have none.
    monkeypatch.setattr(cpu_expert_loop, "MIN_EXPERTS_TO_GROUP", 1)
    monkeypatch.setattr(cpu_expert_loop, "MAX_GROUP_WEIGHT_ENTRIES", 16)
    plan = ExpertGroups(torch.tensor([2, 3, 36, 36, 36, 36]), torch.zeros(6, 8, 1))
    first = ExpertGroup(slice(0, 2), slice(0, 3), 2)
    assert plan.groups == [first, ExpertGroup(2, slice(3, 36), 33)] and plan.idle == [3, 4, 5]
    rows = torch.arange(1.0, 37).unsqueeze(1)
    padded = plan.pad_rows(rows, first, rows.dtype)
    assert padded.flatten().tolist() == [1, 2, 3, 0]
    plan.fill_rows(lambda part, *_: 10 * part, padded, first, rows)
    assert rows[:4].flatten().tolist() == [10, 20, 30, 4]


def test_flops_are_counted_once_the_formula_is_registered(way):
    if way == "tiles":
        pytest.skip("empty places are multiplied too")
    grouped.register_flop_formulas()
    grouped.register_flop_formulas()
    rows, weight, _, offsets = inputs((3, 0, 2))
    with FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, None, offsets).square().sum().backward()
    # forward, rows' gradient, weights' gradient: 2·R·i·o each; a group has free slots, 3·3 in all
    assert counter.get_total_flops() == 3 * 2 * (9 if way == "groups" else 5) * 8 * 4


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([1, 4, 8, 32]))
@settings(max_examples=80, deadline=None)
def test_every_row_has_one_place_in_a_tile_of_its_expert(sizes, height):
    rows = sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).int()
    tiles = grouped.Tiles.of(offsets, rows, height)
    experts = torch.tensor([expert for expert, size in enumerate(sizes) for _ in range(size)])
    assert grouped.experts_of_rows(offsets, rows).tolist() == experts.tolist()
    assert len(tiles.experts) == grouped.max_tile_count(rows, len(sizes), height)
    assert len(tiles.rows) == height * len(tiles.experts)
    assert torch.equal(tiles.rows[tiles.places], torch.arange(rows))
    assert tiles.is_filled[tiles.places].all() and int(tiles.is_filled.sum()) == rows
    assert torch.equal(tiles.experts[tiles.places // height], experts.long())
    values = torch.randn(rows, 3)
    assert torch.equal(tiles.read_rows(tiles.fill_tiles(values)), values)
    summed = tiles.sum_by_expert(tiles.fill_tiles(values).sum(dim=1), len(sizes))
    for expert, part in enumerate(values.split(sizes)):
        torch.testing.assert_close(summed[expert], part.sum(dim=0), atol=1e-5, rtol=1e-5)


def test_a_tile_is_a_power_of_two_near_the_least_waste():
    for rows, experts, height in ((131_072, 8, 1024), (200, 400, 8), (0, 3, 8)):
        assert grouped.tile_height(rows, experts) == height
    for rows, experts in ((131_072, 64), (65_536, 128), (4096, 16)):
        each = rows / experts
        wasted = {2**power: 2**power / (2 * each) + 67 / 2**power for power in range(3, 11)}
        best = min(wasted, key=wasted.__getitem__)
        assert abs(math.log2(grouped.tile_height(rows, experts) / best)) <= 1


def test_fp32_is_as_exact_in_tiles_as_products_in_fp32_are(way):
    rows, weight, bias, offsets = inputs((700, 0, 90, 1300), 256, 128, torch.float64)
    towards = torch.randn(2090, 128, dtype=torch.float64)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (rows, weight, bias)]
        outputs = grouped_linear(*leaves, offsets)
        found.append((outputs, *torch.autograd.grad(outputs, leaves, towards.to(dtype))))
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()
        assert (ours.double() - exact).abs().max() <= 2e-6 * exact.abs().max()
