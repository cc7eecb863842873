"""The twelve transforms of table 1: their limits, their centre, and that every model sees the same
pictures.
"""

import math

import pytest
import torch

from moecore.data.views.transforms import TRANSFORMS, drawn_affines, transformed

SIZE = (28, 28)


def test_there_are_the_papers_twelve():
    assert len(TRANSFORMS) == 12
    settings = list(TRANSFORMS.values())
    assert (
        [each.degrees for each in settings[:3]]
        == [each.shear for each in settings[9:]]
        == [5, 10, 15]
    )
    assert [TRANSFORMS[name].scale for name in ("scaling 0.5", "scaling 0.8", "scaling 1.1")] == [
        0.5,
        0.8,
        1.1,
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_draws_are_a_function_of_the_arguments(name):
    first = drawn_affines(name, 20, SIZE, 3)
    torch.manual_seed(99)
    assert (
        first.shape == (20, 3, 3)
        and first.dtype == torch.float64
        and torch.equal(first, drawn_affines(name, 20, SIZE, 3))
    )
    if not name.startswith("scaling"):  # a scaling is not random
        assert not torch.equal(first, drawn_affines(name, 20, SIZE, 4))


def test_transforms_draw_independently():
    angles = [
        drawn_affines(name, 50, SIZE, 0)[:, 1, 0].asin().rad2deg() / limit
        for name, limit in (("rotation 5", 5), ("rotation 10", 10))
    ]
    assert abs(float(torch.corrcoef(torch.stack(angles))[0, 1])) < 0.5


@pytest.mark.parametrize(
    ("name", "limit"), [("rotation 5", 5), ("rotation 10", 10), ("rotation 15", 15)]
)
def test_rotations_fill_their_range_about_the_centre(name, limit):
    affines = drawn_affines(name, 500, SIZE, 0)
    angles = torch.atan2(affines[:, 1, 0], affines[:, 0, 0]).rad2deg()
    assert (
        limit * 0.97 < float(angles.max()) <= limit
        and -limit <= float(angles.min()) < -limit * 0.97
    )
    _fixed(affines, 14, 14)
    torch.testing.assert_close(torch.linalg.det(affines), torch.ones(500, dtype=torch.float64))


@pytest.mark.parametrize(("name", "limit"), [("shear 5", 5), ("shear 10", 10), ("shear 15", 15)])
def test_shears_move_columns_by_the_row(name, limit):
    affines = drawn_affines(name, 500, SIZE, 0)
    slopes = affines[:, 1, 0]
    assert (
        math.tan(math.radians(limit * 0.97))
        < float(slopes.abs().max())
        <= math.tan(math.radians(limit))
    )
    assert (affines[:, 0] == torch.tensor([1.0, 0, 0])).all(), "no row moves"
    _fixed(affines, 14, 14)


@pytest.mark.parametrize(
    ("name", "factor"), [("scaling 0.5", 0.5), ("scaling 0.8", 0.8), ("scaling 1.1", 1.1)]
)
def test_scalings_are_exact(name, factor):
    affines = drawn_affines(name, 5, SIZE, 0)
    torch.testing.assert_close(
        affines[:, :2, :2], factor * torch.eye(2, dtype=torch.float64).expand(5, 2, 2)
    )
    _fixed(affines, 14, 14)


@pytest.mark.parametrize(
    ("name", "across", "down"),
    [
        ("translation (0, 0.1)", 0, 1),
        ("translation (0.1, 0)", 1, 0),
        ("translation (0.1, 0.1)", 1, 1),
    ],
)
def test_translations_are_whole_pixels_of_at_most_a_tenth(name, across, down):
    affines = drawn_affines(name, 500, (30, 40), 0)  # a tenth: 3 rows, 4 columns
    assert torch.equal(affines[:, :2, :2], torch.eye(2, dtype=torch.float64).expand(500, 2, 2))
    assert sorted(set(affines[:, 0, 2].tolist())) == list(range(-3 * down, 3 * down + 1))
    assert sorted(set(affines[:, 1, 2].tolist())) == list(range(-4 * across, 4 * across + 1))


def test_the_identity_changes_no_pixel():
    images = torch.randint(
        0, 256, (4, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(
        transformed(images, torch.eye(3, dtype=torch.float64).expand(4, 3, 3)), images
    )


def test_a_translation_moves_pixels_and_leaves_black():
    images = torch.randint(
        1, 256, (1, 1, 10, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    affine = torch.eye(3, dtype=torch.float64)[None].clone()
    affine[0, :2, 2] = torch.tensor([2.0, -1.0])  # two down, one to the left
    moved = transformed(images, affine)
    assert (
        torch.equal(moved[..., 2:, :9], images[..., :8, 1:])
        and not moved[..., :2, :].any()
        and not moved[..., 9].any()
    )


def _fixed(affines: torch.Tensor, row: float, column: float) -> None:
    point = torch.tensor([row, column, 1.0], dtype=torch.float64)
    torch.testing.assert_close(affines @ point, point.expand(len(affines), 3))
