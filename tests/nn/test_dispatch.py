"""SparsePlan: rows sorted by expert, and back. Other numbers for the same experts change no
measurement but IMED, for which it matters who is whose neighbour.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.measure.routing_metrics import two_view_agreement
from moecore.measure.routing_metrics.k_and_threshold_sweeps import (
    SweepImages,
    SweepSettings,
    run_sweeps,
)
from moecore.measure.routing_metrics.layer_metrics import load_shares, measure_layer_use
from moecore.nn.dispatch import SparsePlan, round_row_counts
from moecore.nn.predict import predict_in_batches
from moecore.tasks.classification import Classification
from tests.routed import KINDS, METHODS, relabelled, tiny


def plan_of(batch=2, tokens=5, k=2, number=4, seed=0, dtype=torch.float32, kept=None):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, tokens, number, generator=generator, dtype=dtype)
    weights, experts = scores.topk(k, dim=-1)
    return SparsePlan.build(experts, weights, kept, number), experts, weights


def test_rows_by_hand():
    # Tokens 0..3 choose (2, 0), (0, 2), (2, 1), (0, 1) of 4 experts. Expert 0 sees tokens 0, 1, 3;
    # 1 sees 2, 3; 2 sees 0, 1, 2; 3 none.
    experts = torch.tensor([[[2, 0], [0, 2]], [[2, 1], [0, 1]]])
    plan = SparsePlan.build(experts, torch.ones(2, 2, 2), None, 4)
    rows = plan.dispatch(torch.arange(4.0).view(2, 2, 1))
    assert rows.values.flatten().tolist() == [0, 1, 3, 2, 3, 0, 1, 2]
    assert rows.offsets.tolist() == [3, 5, 8, 8]
    assert rows.offsets.dtype == torch.int32


def test_rounded_by_hand():
    # Four numbers to an octave: exact up to 8, then every 2nd, 4th, 8th ... 64th, 128th.
    sizes = [0, 1, 7, 8, 9, 15, 17, 33, 64, 65, 129, 1000, 1025, 4095, 4096, 4097, 99999]
    found = [0, 1, 7, 8, 10, 16, 20, 40, 64, 80, 160, 1024, 1088, 4096, 4096, 4224, 100096]
    assert round_row_counts(torch.tensor(sizes)).tolist() == found


def test_padded_rows_are_never_read_and_get_no_gradient():
    plan, experts, weights = plan_of(batch=4, tokens=80, k=2, number=4)
    sizes = torch.bincount(experts.flatten(), minlength=4)
    assert plan.offsets.tolist() == round_row_counts(sizes).cumsum(0).tolist()
    assert len(plan.order) == plan.offsets[-1] > 640
    values = torch.randn(len(plan.order), 3, requires_grad=True)
    read = torch.zeros(len(plan.order), dtype=torch.bool).index_fill_(0, plan.rows, True)
    assert read.sum() == 640
    spoiled = torch.where(read.unsqueeze(-1), values, torch.inf)
    assert torch.equal(plan.combine(values), plan.combine(spoiled))
    (gradient,) = torch.autograd.grad(plan.combine(values).square().sum(), values)
    assert (gradient[~read] == 0).all() and (gradient[read] != 0).all()
    numbers = torch.searchsorted(plan.offsets, plan.rows.int(), right=True).view(4, 80, 2)
    assert torch.equal(numbers, experts), "every pair lies among its expert's rows"


def test_weighted_sum_by_hand_in_which_a_pair_without_seat_counts_nothing():
    # One token, experts 1 and 0 with weights 0.75 and 0.25; expert 0 answers 8, expert 1 answers 4:
    # 0.75·4 + 0.25·8 = 5.
    weights = torch.tensor([[[0.75, 0.25]]], requires_grad=True)
    rows = torch.tensor([[8.0], [4.0]], requires_grad=True)
    chosen = torch.tensor([[[1, 0]]])
    assert SparsePlan.build(chosen, weights, None, 2).combine(rows).tolist() == [[[5.0]]]
    tokens = SparsePlan.build(chosen, weights, torch.tensor([[[True, False]]]), 2).combine(rows)
    tokens.sum().backward()
    assert tokens.item() == 3.0  # 0.75·4, not scaled up
    assert rows.grad.flatten().tolist() == [0, 0.75]
    assert weights.grad.flatten().tolist() == [4.0, 0]


@given(st.integers(1, 3), st.integers(1, 6), st.integers(2, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_there_and_back(batch, tokens, number, data):
    k = data.draw(st.integers(1, number))
    plan, experts, weights = plan_of(batch, tokens, k, number, seed=data.draw(st.integers(0, 99)))
    values = torch.randn(batch, tokens, 3)
    rows = plan.dispatch(values)
    # Each expert's segment holds its tokens, in their order, and then padding.
    start = 0
    flat = values.flatten(0, 1)
    for expert, end in enumerate(rows.offsets.tolist()):
        mine = (experts.flatten(0, 1) == expert).any(dim=-1)
        number = int(mine.sum())
        assert torch.equal(rows.values[start : start + number], flat[mine])
        assert end == start + round_row_counts(torch.tensor(number))
        start = end
    assert start == len(rows.values)
    # Experts that return their input give each token the sum of its weights times itself.
    torch.testing.assert_close(plan.combine(rows.values), values * weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_of_both_directions_in_double_precision(k):
    plan, experts, weights = plan_of(k=k, dtype=torch.float64)
    values = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(plan.order), 3, dtype=torch.float64, requires_grad=True)
    weights.requires_grad_()
    read = lambda v: plan.dispatch(v).values[plan.rows]  # padding gives no gradient
    assert torch.autograd.gradcheck(read, values)
    assert torch.autograd.gradgradcheck(read, values)
    combine = lambda r, w: SparsePlan.build(experts, w, None, 4).combine(r)
    assert torch.autograd.gradcheck(combine, (rows, weights))
    assert torch.autograd.gradgradcheck(combine, (rows, weights))


def test_gradients_are_the_same_every_time():
    def gradients():
        plan, _, weights = plan_of(4, 50, 3, 8)
        values = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weights = weights.requires_grad_()
        rows = plan._replace(weights=weights).combine(plan.dispatch(values).values.sin())
        return torch.autograd.grad(rows.square().sum(), (values, weights))

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


def test_bf16_rows_are_summed_in_fp32_and_rounded_once():
    plan, _, weights = plan_of(8, 50, 3, 8)
    rows = torch.randn(len(plan.order), 16).bfloat16()
    exact = plan.combine(rows.double()).float()  # sums in fp64
    assert plan.combine(rows).dtype == torch.bfloat16
    assert torch.equal(plan.combine(rows), plan.combine(rows.float()).bfloat16())
    torch.testing.assert_close(plan.combine(rows.float()), exact)
    weights.requires_grad_()
    products = plan._replace(weights=weights).combine(rows)
    towards = torch.randn(8, 50, 16).bfloat16()
    (exact_gradient,) = torch.autograd.grad(
        plan._replace(weights=weights).combine(rows.float()), weights, towards.float()
    )
    torch.testing.assert_close(torch.autograd.grad(products, weights, towards)[0], exact_gradient)


ORDER = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
# a hash has no labels that could be changed
LEARNED = [name for name in KINDS if METHODS[name].router.kind != "hash"]
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8)
LABELS = torch.arange(10) % 2


def leaves(values, path="") -> dict:
    """All leaves of nested dicts and lists, by path."""
    if not isinstance(values, (dict, list, tuple)):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    parts = [leaves(value, f"{path}/{key}") for key, value in items]
    return {place: leaf for part in parts for place, leaf in part.items()}


def everything(model) -> dict:
    router = model.moe.router
    _, records = predict_in_batches(model, IMAGES, 10)
    threshold, k = getattr(router, "threshold", None), getattr(router, "k", None)
    sample = SweepImages(IMAGES, LABELS, Classification(classes=("a", "b")))
    # Where experts lie on the map is what relabelling changes.
    uses = [measure_layer_use(record, threshold, k) for record in records]
    on_map = ("border", "corner", "inner")
    layers = [
        {name: value for name, value in use.items() if not name.startswith(on_map)} for use in uses
    ]
    counts = [record.chosen.flatten(0, 1).sum(dim=0) for record in records]
    loads = [sorted(load_shares(count).tolist()) for count in counts]
    drawn = two_view_agreement.draw_two_views(IMAGES, two_view_agreement.PRESETS["affine"], 0)
    row = two_view_agreement.augmented_row(model, drawn, 20)
    views = {name: list(interval) for name, (_, interval) in row.items()}
    swept = run_sweeps(model, sample, SweepSettings(k=(1, 3), threshold=(0.2, 0.6)), 10)
    return {"layers": layers, "loads": loads, "views": views} | swept


@pytest.mark.parametrize("name", LEARNED)
def test_no_metric_changes(name):
    ours = tiny(name)
    theirs = relabelled(name, ORDER)
    logits, first = predict_in_batches(ours, IMAGES, 10)
    others, second = predict_in_batches(theirs, IMAGES, 10)
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=1e-4)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.chosen[..., ORDER], b.chosen) and (
            METHODS[name].router.kind == "soft_slots" or not torch.equal(a.chosen, b.chosen)
        )
    before = leaves(everything(ours))
    assert leaves(everything(theirs)) == pytest.approx(before, abs=2e-4) and len(before) > 40
