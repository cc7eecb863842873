"""A view's affine is exact: the pixels lie where it says, for every operation and every
composition.

The images are ramps: at pixel (i, j) of a ramp the value is its row (or column) centre, i + 0.5,
times a known factor. Bilinear sampling of a ramp is exact, so a view's value at (i, j) tells which
original point lies there; the affine must say the same.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.core.streams import Draws, generator_for
from moecore.data.sampling import warp
from moecore.data.views import geometry, randaugment
from moecore.data.views.randaugment import Drawn, RandAugment
from moecore.data.views.views import Affine, Crop, ViewSettings, make_views

STEP = 4  # grey levels per pixel of the ramps


def ramps(count, height, width):
    """uint8 (count, 2, height, width): channel 0 is STEP · row, channel 1 STEP · column."""
    rows = STEP * torch.arange(height).view(-1, 1).expand(height, width)
    columns = STEP * torch.arange(width).expand(height, width)
    return torch.stack([rows, columns]).to(torch.uint8).expand(count, -1, -1, -1).contiguous()


def seen_and_said(views, height, width):
    """Original points (B, 2, h, w) read from the pixels, and those that the affines give, and where
    both lie inside.
    """
    seen = views.images * 255 / STEP + 0.5
    h, w = seen.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    points = torch.stack([rows, columns, torch.ones(h, w)]).view(3, -1)
    said = (torch.linalg.inv(views.affines.double()) @ points.double())[:, :2].view(
        len(seen), 2, h, w
    )
    limits = torch.tensor([height, width]).view(1, 2, 1, 1) - 0.5
    inside = ((said >= 0.5) & (said <= limits)).all(1, keepdim=True).expand_as(said)
    return seen.double(), said, inside


def worst(views, height, width):
    seen, said, inside = seen_and_said(views, height, width)
    assert inside.any()
    return (seen - said)[inside].abs().max().item()


GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
CASES = {
    "shift": ViewSettings(shift=3),
    "flip": ViewSettings(flip=True),
    "shift_flip": ViewSettings(shift=5, flip=True),
    "crop": ViewSettings(crop=Crop(scale=(0.2, 1.0))),
    "crop_flip_shift": ViewSettings(crop=Crop(scale=(0.2, 1.0)), flip=True, shift=2),
    "smaller": ViewSettings(size=16),
    "larger_crop": ViewSettings(size=48, crop=Crop()),
    "rotate": ViewSettings(affine=Affine(degrees=45)),
    "translate": ViewSettings(affine=Affine(translate=0.3)),
    "scale": ViewSettings(affine=Affine(scale=(0.5, 2.0))),
    "shear": ViewSettings(affine=Affine(shear=20)),
    **{
        name: ViewSettings(randaugment=RandAugment(operations=1, names=(name,)))
        for name in GEOMETRIC
    },
    "randaugment": ViewSettings(randaugment=RandAugment(operations=3, names=GEOMETRIC)),
    "everything": ViewSettings(
        shift=2,
        flip=True,
        crop=Crop(scale=(0.4, 1.0)),
        affine=Affine(degrees=15, translate=0.1, scale=(0.8, 1.2), shear=10),
        randaugment=RandAugment(
            operations=2, magnitude=5, names=("rotate", "translate_x", "shear_y", "identity")
        ),
        size=24,
    ),
}


@pytest.mark.parametrize("shape", [(32, 32), (24, 40)])
@pytest.mark.parametrize("name", CASES)
def test_pixels_lie_where_the_affine_says(name, shape):
    views = make_views(ramps(32, *shape), CASES[name], generator_for(0, 0))
    assert worst(views, *shape) < 1e-3  # pixels


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(8, 40),
    st.integers(8, 40),
    st.booleans(),
    st.integers(0, 4),
    st.floats(0, 60),
    st.floats(0.3, 1),
)
def test_any_composition_is_exact(seed, height, width, flip, shift, degrees, low):
    moves = RandAugment(names=("shear_x", "translate_y"))
    chosen = ViewSettings(
        flip=flip,
        shift=shift,
        crop=Crop(scale=(low, 1)),
        affine=Affine(degrees=degrees),
        randaugment=moves,
    )
    views = make_views(ramps(8, height, width), chosen, generator_for(seed))
    seen, said, inside = seen_and_said(views, height, width)
    assert (seen - said)[inside].abs().max().item() < 2e-3 if inside.any() else True


@pytest.mark.parametrize("fill", ["zeros", "border", "reflection"])
def test_the_gather_equals_the_sampling(fill):
    images = torch.randint(0, 256, (64, 3, 12, 17), generator=generator_for(1), dtype=torch.uint8)
    views = make_views(images, ViewSettings(shift=4, flip=True, fill=fill), generator_for(2))
    sampled = warp(images, views.affines.double(), (12, 17), fill) / 255
    assert torch.allclose(views.images, sampled, atol=1e-4)


def test_a_flip_by_hand():
    images = torch.zeros(16, 1, 3, 5, dtype=torch.uint8)
    images[:, 0, 1, 0] = 255
    views = make_views(images, ViewSettings(flip=True), generator_for(3))
    for image, affine in zip(views.images, views.affines, strict=True):
        row, column, _ = affine @ torch.tensor([1.5, 0.5, 1.0])
        assert image[0, int(row), int(column)] == 1 and image.sum() == 1
    # both kinds occurred: (r, c) → (r, c) and (r, 5 − c)
    assert {float(a[1, 2]) for a in views.affines} == {0.0, 5.0}


def test_a_bright_pixel_under_rotation_by_90_degrees():
    images = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    images[0, 0, 0, 1] = 255
    quarter = geometry.about_centre(
        geometry.rotation(torch.tensor([math.pi / 2], dtype=torch.float64)), 5, 5
    )
    view = warp(images, quarter, (5, 5), "zeros")[0, 0]
    # centre (2.5, 2.5); the point (0.5, 1.5) is (−2, −1) from it; (r, c) → (−c, r) gives (1, −2):
    # the point (3.5, 0.5)
    assert view[3, 0] == pytest.approx(255, abs=0.01) and view.sum() == pytest.approx(255, abs=0.01)


def test_randaugment_geometry_by_hand():
    names = ("shear_x", "translate_y", "rotate")
    drawn = Drawn(
        names,
        torch.tensor([[0], [1], [2]]),
        torch.tensor([[1.0], [-0.5], [1.0]], dtype=torch.float64),
    )
    shear, move, turn = randaugment.affines(drawn, 10, 20)
    point = torch.tensor([0.0, 10.0, 1.0], dtype=torch.float64)  # the middle of the upper edge
    # column += 0.3 · (0 − 5)
    assert torch.allclose(shear @ point, torch.tensor([0.0, 8.5, 1.0], dtype=torch.float64))
    # −0.5 · 0.45 · 10 rows
    assert torch.allclose(move @ point, torch.tensor([-2.25, 10.0, 1.0], dtype=torch.float64))
    assert torch.allclose(
        turn @ point,
        torch.tensor([5 - 5 * math.cos(math.pi / 6), 10 - 2.5, 1.0], dtype=torch.float64),
    )


def test_inverse_and_crop_windows():
    random = generator_for(4)
    affines = torch.eye(3, dtype=torch.float64) + 0.3 * torch.rand(
        50, 3, 3, generator=random, dtype=torch.float64
    )
    affines[:, 2] = torch.tensor([0.0, 0.0, 1.0])
    assert torch.allclose(
        geometry.inverse(affines) @ affines, torch.eye(3, dtype=torch.float64).expand(50, 3, 3)
    )
    top, left, height, width = geometry.crop_window(
        Draws(random, 5000), (20, 30), (0.3, 0.6), (0.9, 1.1)
    )
    share = height * width / 600
    assert (
        share.min() >= 0.3 and share.max() <= 0.6 and share.mean() == pytest.approx(0.45, abs=0.01)
    )
    assert (
        (top >= 0).all()
        and (left >= 0).all()
        and (top + height <= 20).all()
        and (left + width <= 30).all()
    )
    assert (width / height).min() >= 0.9 and (width / height).max() <= 1.1
