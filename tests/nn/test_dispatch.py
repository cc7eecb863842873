import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore import UserError, predict_in_batches
from moecore.core.streams import generator_for
from moecore.data.views.augmentations import RandAugment
from moecore.data.views.random_views import (
    AffineRanges,
    CropRanges,
    ViewSettings,
    make_random_views,
)
from moecore.measure.routing_metrics import interventions, two_view_agreement
from moecore.measure.routing_metrics.layer_metrics import load_shares, measure_layer_use
from moecore.nn import correspondence
from moecore.nn.correspondence import add_distillation_token_probs, match_patches, pair_view_tokens
from moecore.nn.dispatch import SparsePlan, round_row_counts
from moecore.parts import Classification, TokenLayout
from tests.methods import KINDS, METHODS, relabelled, tiny

MOVES = RandAugment(names=("rotate", "shear_x", "shear_y", "translate_x"))
SQUARE = TokenLayout(special=1, grid=(2, 3), size=(8, 12))  # patches of 4 × 4: 0 1 2 / 3 4 5
ONTO_A_LINE = torch.tensor([[[0.1, 0.3, 0], [0.2, 0.6, 0], [0, 0, 1]]])
ORDER = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
# a hash has no labels that could be changed
LEARNED = [name for name in KINDS if METHODS[name].router.kind != "hash"]
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8)
LABELS = torch.arange(10) % 2


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
    assert rows.offsets.tolist() == [3, 5, 8, 8] and rows.offsets.dtype == torch.int32


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
    assert rows.grad.flatten().tolist() == [0, 0.75] and weights.grad.flatten().tolist() == [4.0, 0]


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
    assert torch.autograd.gradcheck(read, values) and torch.autograd.gradgradcheck(read, values)
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
    exact = plan._replace(weights=weights).combine(rows.float())
    (exact_gradient,) = torch.autograd.grad(exact, weights, towards.float())
    torch.testing.assert_close(torch.autograd.grad(products, weights, towards)[0], exact_gradient)


def leaves(values, path="") -> dict:
    if not isinstance(values, (dict, list, tuple)):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    parts = [leaves(value, f"{path}/{key}") for key, value in items]
    return {place: leaf for part in parts for place, leaf in part.items()}


def everything(model) -> dict:
    router = model.moe.router
    _, records = predict_in_batches(model, IMAGES, 10)
    threshold, k = getattr(router, "threshold", None), getattr(router, "k", None)
    sample = interventions.SweepImages(IMAGES, LABELS, Classification(classes=("a", "b")))
    # Where experts lie on the map is what relabelling changes.
    uses = [measure_layer_use(record, threshold, k) for record in records]
    on_map = ("border", "corner", "inner")
    layers = [
        {name: value for name, value in use.items() if not name.startswith(on_map)} for use in uses
    ]
    counts = [record.chosen.flatten(0, 1).sum(dim=0) for record in records]
    loads = [sorted(load_shares(count).tolist()) for count in counts]
    drawn = two_view_agreement.draw_two_views(IMAGES, two_view_agreement.PRESETS["affine"], 0)
    row = two_view_agreement.average_view_match_shares(model, drawn, 20)
    views = {name: list(interval) for name, (_, interval) in row.items()}
    sweeps = interventions
    swept = {"k": sweeps.sweep_k(model, sample, (1, 3), 10)}
    swept["threshold"] = sweeps.sweep_threshold(model, sample, (0.2, 0.6), 10)
    return {"layers": layers, "loads": loads, "views": views} | swept


@pytest.mark.parametrize("name", LEARNED)
def test_no_metric_changes(name):
    ours = tiny(name)
    theirs = relabelled(name, ORDER)
    logits, first = predict_in_batches(ours, IMAGES, 10)
    others, second = predict_in_batches(theirs, IMAGES, 10)
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=1e-4)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.chosen[..., ORDER], b.chosen)
        assert METHODS[name].router.kind == "soft_slots" or not torch.equal(a.chosen, b.chosen)
    before = leaves(everything(ours))
    assert leaves(everything(theirs)) == pytest.approx(before, abs=2e-4) and len(before) > 40


def affine(rows=1.0, columns=1.0, down=0.0, right=0.0):
    return torch.tensor([[[rows, 0, down], [0, columns, right], [0, 0, 1]]])


def partners_of(first, second, layout=SQUARE, image=0):
    """An image's partners as a list, −1 where there is none."""
    index, found, _ = match_patches(first, second, layout)
    return torch.where(found, index, -1)[image].tolist()


def paired(values, affines, layout, special):
    """Both sides of each pair (B, T', E), and whether it was found (B, T')."""
    pairs = pair_view_tokens(affines, layout, special)
    return *correspondence.values_of_pairs(values, pairs, layout), pairs.mask


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        # view 2 shows all one patch further right: the last column left it
        (affine(right=4), [1, 2, -1, 4, 5, -1]),
        (affine(down=-4), [-1, -1, -1, 0, 1, 2]),
        # centres 2, 6, 10 → 8 (patch 2), 12 (just outside), 16
        (affine(right=6), [2, -1, -1, 5, -1, -1]),
        # centres → 0 (just inside), 4, 8: midway between patches goes to the higher one
        (affine(right=-2), [0, 1, 2, 3, 4, 5]),
        (affine(right=-3), [-1, 0, 1, -1, 3, 4]),  # centres → −1 (outside), 3, 7
        (affine(columns=-1, right=12), [2, 1, 0, 5, 4, 3]),  # mirrored: c → 12 − c
        (affine(right=1000), [-1] * 6),
    ],
)
def test_moves_and_flips_by_hand(second, expected):
    assert partners_of(affine(), second) == expected


def test_the_view_of_higher_resolution_is_image_1():
    # The second view enlarges the top left quarter twice: its centres (2, 6 | 2, 6, 10) are
    # original (1, 3 | 1, 3, 5), which the first view has in row 0 of patches, columns 0, 0 and 1.
    zoomed = affine(rows=2, columns=2)
    first, second = (affine(), zoomed, affine()), (zoomed, affine(), affine())
    index, found, swapped = match_patches(torch.cat(first), torch.cat(second), SQUARE)
    assert swapped.tolist() == [True, False, False] and found.all()  # a tie keeps the order
    assert index.tolist() == [[0, 0, 1, 0, 0, 1]] * 2 + [[0, 1, 2, 3, 4, 5]]


def test_a_mirror_keeps_the_resolution_and_rounding_makes_ties():
    # det −2 against det 1: the absolute value counts. Centres 2, 6, 10 of the mirrored, twice wider
    # view → (24 − c)/2 = 11, 9, 7.
    index, found, swapped = match_patches(affine(), affine(columns=-2, right=24), SQUARE)
    assert swapped.item() and found.all() and index.tolist() == [[2, 2, 1, 5, 5, 4]]
    cos, sin = math.cos(1), math.sin(1)
    turned = torch.tensor([[[cos, -sin, 5], [sin, cos, -3], [0, 0, 1]]])
    larger = turned * torch.tensor([1 + 1e-6, 1 + 1e-6, 1])[:, None]
    assert not match_patches(affine(), larger, SQUARE).swapped.item()
    assert not match_patches(turned, affine(), SQUARE).swapped.item()


def by_brute_force(first, second, layout):
    """All centres of image 1 against all centres of image 2, one by one."""
    sides = [size / patches for size, patches in zip(layout.size, layout.grid, strict=True)]
    cells = torch.cartesian_prod(*(torch.arange(patches) for patches in layout.grid))
    centres = (cells.view(-1, len(sides)).double() + 0.5) * torch.tensor(sides).double()
    swapped = second[:-1, :-1].det().abs() > first[:-1, :-1].det().abs()
    if swapped:
        first, second = second, first
    found = []
    for centre in centres:
        point = torch.cat([centre, torch.ones(1).double()])
        place = (second @ torch.linalg.inv(first) @ point)[:-1]
        inside = ((place >= 0) & (place < torch.tensor(layout.size))).all()
        found.append(int((centres - place).square().sum(-1).argmin()) if inside else -1)
    return found, bool(swapped)


@pytest.mark.parametrize(
    "layout", [(0, (5,), (20,)), (2, (4, 3), (8, 12)), (1, (2, 3, 2), (8, 6, 10))]
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_affine_in_any_dimension_agrees_with_brute_force(layout, seed):
    layout = TokenLayout(*layout)
    axes = len(layout.grid)
    generator = generator_for(seed)
    draw = lambda *size: torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
    both = torch.eye(axes + 1, dtype=torch.float64).repeat(2, 3, 1, 1)  # two views of three images
    both[:, :, :-1, :-1] += 0.3 * draw(axes, axes)
    both[:, :, :-1, -1] += 3 * draw(axes)
    index, found, swapped = match_patches(both[0], both[1], layout)
    for image in range(3):
        expected, turned = by_brute_force(both[0, image], both[1, image], layout)
        assert bool(swapped[image]) == turned
        assert partners_of(both[0], both[1], layout, image) == expected
    again = match_patches(both[1], both[0], layout)  # the views change places: the same pairs
    assert torch.equal(again.index, index) and torch.equal(again.mask, found)
    assert torch.equal(again.swapped, ~swapped)


@pytest.mark.parametrize(
    "settings",
    [
        ViewSettings(shift=8, flip=True),
        ViewSettings(crop=CropRanges(scale=(0.3, 1.0)), flip=True),
        ViewSettings(affine=AffineRanges(degrees=40, scale=(0.7, 1.4), shear=10)),
        ViewSettings(crop=CropRanges(scale=(0.4, 1.0)), flip=True, randaugment=MOVES),
    ],
    ids=["shift", "crop", "turn", "all"],
)
def test_partners_show_the_same_place(settings):
    """Pixels are painted with their place, so a patch's mean colour tells where it lies."""
    layout = TokenLayout(1, (8, 8), (32, 32))
    count = 16
    ramp = torch.arange(32, dtype=torch.uint8).mul(8)
    white = torch.full((32, 32), 255, dtype=torch.uint8)
    painted = torch.stack([ramp[:, None].expand(32, 32), ramp.expand(32, 32), white])
    views = make_random_views(painted.expand(2 * count, -1, -1, -1), settings, generator_for(3))
    colours = torch.nn.functional.avg_pool2d(views.images, 4).flatten(2).mT * 255  # (2B, P, 3)
    tokens = torch.cat([torch.full((2 * count, 1, 3), torch.nan), colours], dim=1)
    one, two, found = paired(tokens, views.affines, layout, special=False)
    # patches wholly inside the original image
    within = found & (one[..., 2] > 254.9) & (two[..., 2] > 254.9)
    apart = (one - two)[..., :2] / 8  # original pixels
    pairs = match_patches(views.affines[:count], views.affines[count:], layout)
    coarse = torch.where(pairs.swapped[:, None, None], views.affines[:count], views.affines[count:])
    assert within.float().mean() > 0.15
    # half a patch of image 2 along each axis
    assert ((apart @ coarse[:, :2, :2].float().mT)[within].abs() <= 2 + 0.15).all()


def test_both_sides_are_gathered_from_the_right_view_image_and_token():
    # Token values are 100 · view + 10 · image + token. Image 0: view 2 is the finer one. Image 1:
    # view 2 moved right by one patch.
    layout = TokenLayout(special=2, grid=(1, 3), size=(4, 12))
    values = torch.tensor([100.0, 110, 200, 210])[:, None, None] + torch.arange(5)[:, None]
    affines = torch.cat([affine(), affine(), affine(columns=2), affine(right=4)])
    # Image 0: centres 2, 6, 10 of view 2 → 1, 3, 5 in view 1: patches 0, 0, 1, tokens 2, 2, 3.
    first, second, found = paired(values, affines, layout, special=True)
    assert first[..., 0].tolist() == [[202, 203, 204, 200, 201], [112, 113, 114, 110, 111]]
    assert found.tolist() == [[True] * 5, [True, True, False, True, True]]
    of_second = [[102, 102, 103, 100, 101], [213, 214, -1, 210, 211]]
    assert torch.where(found, second[..., 0], -1).tolist() == of_second
    without = paired(values, affines, layout, special=False)
    for ours, whole in zip(without, (first, second, found), strict=True):
        assert torch.equal(ours, whole[:, :3])


def test_gradients_reach_both_sides():
    values = torch.zeros(2, 7, 4, requires_grad=True)
    affines = torch.cat([affine(), affine(rows=2, columns=2)])
    first, second, found = paired(values, affines, SQUARE, special=False)
    ((first + 10 * second) * found[..., None]).sum().backward()
    # View 2 is image 1, each patch once; view 1's patches 0 and 1 are the partners of 4 and of 2
    # patches.
    assert values.grad[:, :, 0].tolist() == [[0, 40, 20, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "broken", [affine(rows=0), affine(rows=torch.nan), affine(right=torch.inf), ONTO_A_LINE]
)
@pytest.mark.parametrize("view", [1, 2])
def test_an_affine_that_cannot_be_undone_is_refused(broken, view):
    whole = torch.cat([affine(), affine()])
    broken = torch.cat([affine(), broken])
    with pytest.raises(UserError, match=f"view {view} of image 1 is singular"):
        match_patches(*((broken, whole) if view == 1 else (whole, broken)), SQUARE)


def test_extreme_scales_are_not_singular_and_a_distillation_token_follows_the_class_token():
    for scale in (1e-4, 1e4):
        assert partners_of(affine(scale, scale), affine(scale, scale)) == [0, 1, 2, 3, 4, 5]
    teacher = torch.arange(6.0).view(1, 3, 2)  # CLS, two patches
    matched = add_distillation_token_probs(teacher, torch.Size((1, 4, 2)))
    assert matched.tolist() == [[[0, 1], [0, 1], [2, 3], [4, 5]]]
    assert add_distillation_token_probs(teacher, teacher.shape) is teacher
