"""IMED by hand, against slow sums, and as a distance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.measure.routing_metrics.imed import (
    imed_between,
    mean_imed,
    metric,
    partners,
    squared_imed,
)
from moecore.nn.experts.base import map_shape


def one_hot(experts: int, where: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(where), experts).float()


def by_definition(u: torch.Tensor, v: torch.Tensor, rows: int, columns: int, sigma: float) -> float:
    """The double sum over pairs of experts, with places counted row by row."""
    total = 0.0
    for i in range(rows * columns):
        for j in range(rows * columns):
            gap = (i // columns - j // columns) ** 2 + (i % columns - j % columns) ** 2
            total += (
                math.exp(-gap / (2 * sigma**2))
                / (2 * math.pi * sigma**2)
                * float((u[i] - v[i]) * (u[j] - v[j]))
            )
    return total


# one-hots: G_ii + G_jj − 2 G_ij = 2/(2π) · (1 − exp(−gap²/2)) = (1 − exp(−gap²/2)) / π; experts 0
# and 20 lie one below the other
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 399, 1 / math.pi),
        (0, 1, (1 - math.exp(-0.5)) / math.pi),
        (0, 20, (1 - math.exp(-0.5)) / math.pi),
        (0, 21, (1 - math.exp(-1)) / math.pi),
    ],
)
def test_one_hots_by_hand(first, second, expected):
    found = float(squared_imed(one_hot(400, first), one_hot(400, second)))
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_figures_of_the_definition():
    assert float(squared_imed(one_hot(400, 0), one_hot(400, 399))) == pytest.approx(0.318, abs=5e-4)
    assert float(squared_imed(one_hot(400, 0), one_hot(400, 1))) == pytest.approx(0.125, abs=5e-4)
    assert float(squared_imed(one_hot(400, 19), one_hot(400, 20))) == pytest.approx(
        0.318, abs=5e-4
    ), "a row's end is far from the next one's start"


@given(st.sampled_from([4, 6, 7, 8, 12]), st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 2.0]))
def test_equals_the_double_sum_and_is_a_distance(experts, seed, sigma):
    u, v, w = torch.rand(
        3, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).softmax(-1)
    d2 = float(squared_imed(u, v, sigma))
    assert d2 == pytest.approx(by_definition(u, v, *map_shape(experts), sigma), rel=1e-9, abs=1e-14)
    assert (
        d2 == float(squared_imed(v, u, sigma)) and d2 > 0 and float(squared_imed(u, u, sigma)) == 0
    )
    assert (
        math.sqrt(d2)
        <= float(squared_imed(u, w, sigma)) ** 0.5 + float(squared_imed(w, v, sigma)) ** 0.5 + 1e-12
    )


def test_the_metric_is_positive_definite():
    # a row of points has eigenvalues of at least 1 + 2 Σ_k (−1)^k exp(−k²/2) = 0.0362 (its symbol
    # at π); the grid is the product of two
    least = 1 + 2 * sum((-1) ** k * math.exp(-k * k / 2) for k in range(1, 30))
    values = torch.linalg.eigvalsh(metric(20, 20))
    assert float(values[0]) >= least**2 / (2 * math.pi) and float(values[0]) > 2e-4
    assert torch.equal(metric(3, 4), metric(3, 4).T)


def test_the_experts_places_matter():
    # neighbours 0 and 1 are torn apart
    u, v, swapped = (one_hot(16, 0), one_hot(16, 1), torch.tensor([0, 15, *range(2, 15), 1]))
    assert float(squared_imed(u[swapped], v[swapped]) - squared_imed(u, v)) > 0.19, (
        "0.318 instead of 0.125"
    )
    assert float(squared_imed(u.flip(0), v.flip(0))) == pytest.approx(float(squared_imed(u, v))), (
        "the grid turned by 180° is the same"
    )


def test_means_over_tokens_and_layers_by_hand():
    near, far, same = one_hot(16, 1), one_hot(16, 15), one_hot(16, 0)
    before = (same.expand(1, 2, 16), same.expand(1, 2, 16))  # one image, two tokens, two layers
    after = (torch.stack([near, same])[None], torch.stack([far, far])[None])
    # 15 lies 3 rows and 3 columns from 0
    adjacent, distant = ((1 - math.exp(-0.5)) / math.pi, (1 - math.exp(-9)) / math.pi)
    d, d2 = mean_imed(before, after)
    assert d.shape == d2.shape == (1,)
    assert float(d2) == pytest.approx((adjacent / 2 + distant) / 2)
    assert float(d) == pytest.approx((math.sqrt(adjacent) / 2 + math.sqrt(distant)) / 2)


def test_each_image_has_its_own_distance_and_the_same_routing_has_none():
    before = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    after = before.clone()
    after[1] = after[1].flip(-1)
    for distance in mean_imed((before,), (after,)):
        assert distance[0] == distance[2] == 0 and distance[1] > 0


def test_maps_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="shapes"):
        squared_imed(torch.rand(2, 8), torch.rand(1, 8))
    with pytest.raises(ValueError, match="without MoE layers"):
        mean_imed((), ())
    with pytest.raises(ValueError, match="shorter|longer"):
        mean_imed((torch.rand(1, 1, 4),), (torch.rand(1, 1, 4),) * 2)


@given(st.integers(2, 60), st.integers(0, 10**6))
def test_partners_are_other_images_each_once_and_on_one_circle(images, seed):
    found = partners(images, seed).tolist()
    assert sorted(found) == list(range(images))
    place, seen = 0, []
    for _ in range(images):
        place = found[place]
        seen.append(place)
    assert sorted(seen) == list(range(images)) and seen[-1] == 0
    assert found == partners(images, seed).tolist()


def test_two_images_are_compared_with_each_other():
    probs = torch.stack([one_hot(16, 0)[None], one_hot(16, 1)[None]])
    adjacent = math.sqrt((1 - math.exp(-0.5)) / math.pi)
    assert imed_between((probs,), 0).tolist() == pytest.approx([adjacent, adjacent])
    with pytest.raises(ValueError, match="two are needed"):
        partners(1, 0)
