# The images are ramps: at pixel (i, j) the value is its row (or column) centre, i + 0.5, times a
# known factor. Bilinear sampling of a ramp is exact, so a view's value at (i, j) tells which
# original point lies there; the affine must say the same. PIL cuts each result to a whole level,
# ours keep the fraction, so results differ by less than one level (and contrast's grey mean may
# round the other way); posterize, solarize, invert and equalize must be equal.

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from moecore.core.streams import BatchDraws, generator_for
from moecore.data.views import augmentations, warping
from moecore.data.views.augmentations import COLOUR_OPERATIONS, DrawnOperations, RandAugment
from moecore.data.views.random_views import (
    AffineRanges,
    CropRanges,
    ViewSettings,
    make_random_views,
    prepare_evaluation_images,
)
from moecore.data.views.warping import warp_images
from moecore.training.teachers.timm import define_missing_operators

SEEDS, SIDES = st.integers(0, 10_000), st.integers(8, 40)
STEP = 4  # grey levels per pixel of the ramps
JITTER = augmentations.ColourJitter(brightness=0.4, contrast=0.4, saturation=0.4)


def ramps(count, height, width):
    """uint8 (count, 2, height, width): channel 0 is STEP · row, channel 1 STEP · column."""
    rows = STEP * torch.arange(height).view(-1, 1).expand(height, width)
    columns = STEP * torch.arange(width).expand(height, width)
    return torch.stack([rows, columns]).to(torch.uint8).expand(count, -1, -1, -1).contiguous()


def distances(views, height, width):
    """How far original points read from the pixels lie from those that the affines give, inside."""
    seen = views.images * 255 / STEP + 0.5
    h, w = seen.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    points = torch.stack([rows, columns, torch.ones(h, w)]).view(3, -1)
    said = (torch.linalg.inv(views.affines.double()) @ points.double())[:, :2].view(seen.shape)
    limits = torch.tensor([height, width]).view(1, 2, 1, 1) - 0.5
    inside = ((said >= 0.5) & (said <= limits)).all(1, keepdim=True).expand_as(said)
    return (seen.double() - said)[inside].abs()


MOVED = AffineRanges(degrees=15, translate=0.1, scale=(0.8, 1.2), shear=10)
FOUR = ("rotate", "translate_x", "shear_y", "identity")
MIXED = RandAugment(operations=2, magnitude=5, names=FOUR)
GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
CASES = {
    "shift": ViewSettings(shift=3),
    "flip": ViewSettings(flip=True),
    "shift_flip": ViewSettings(shift=5, flip=True),
    "crop": ViewSettings(crop=CropRanges(scale=(0.2, 1.0))),
    "crop_flip_shift": ViewSettings(crop=CropRanges(scale=(0.2, 1.0)), flip=True, shift=2),
    "rotate": ViewSettings(affine=AffineRanges(degrees=45)),
    "translate": ViewSettings(affine=AffineRanges(translate=0.3)),
    "scale": ViewSettings(affine=AffineRanges(scale=(0.5, 2.0))),
    "shear": ViewSettings(affine=AffineRanges(shear=20)),
    **{op: ViewSettings(randaugment=RandAugment(operations=1, names=(op,))) for op in GEOMETRIC},
    "randaugment": ViewSettings(randaugment=RandAugment(operations=3, names=GEOMETRIC)),
    "everything": ViewSettings(
        shift=2, flip=True, crop=CropRanges(scale=(0.4, 1.0)), affine=MOVED, randaugment=MIXED
    ),
}


@pytest.mark.parametrize("shape", [(32, 32), (24, 40)])
@pytest.mark.parametrize("name", CASES)
def test_pixels_lie_where_the_affine_says(name, shape):
    views = make_random_views(ramps(32, *shape), CASES[name], generator_for(0, 0))
    assert distances(views, *shape).max() < 1e-3  # pixels


@settings(max_examples=25, deadline=None)
@given(SEEDS, SIDES, SIDES, st.booleans(), st.integers(0, 4), st.floats(0, 60), st.floats(0.3, 1))
def test_any_composition_is_exact(seed, height, width, flip, shift, degrees, low):
    moved = AffineRanges(degrees=degrees)
    drawn = RandAugment(names=("shear_x", "translate_y"))
    crop = {"scale": (low, 1)}
    chosen = ViewSettings(flip=flip, shift=shift, crop=crop, affine=moved, randaugment=drawn)
    views = make_random_views(ramps(8, height, width), chosen, generator_for(seed))
    assert (distances(views, height, width) < 2e-3).all()


@pytest.mark.parametrize("fill", ["zeros", "border", "reflection"])
def test_the_gather_equals_the_sampling(fill):
    images = torch.randint(0, 256, (64, 3, 12, 17), generator=generator_for(1), dtype=torch.uint8)
    views = make_random_views(images, ViewSettings(shift=4, flip=True, fill=fill), generator_for(2))
    sampled = warp_images(images, views.affines.double(), (12, 17), fill) / 255
    assert torch.allclose(views.images, sampled, atol=1e-4)


def test_a_flip_by_hand():
    images = torch.zeros(16, 1, 3, 5, dtype=torch.uint8)
    images[:, 0, 1, 0] = 255
    views = make_random_views(images, ViewSettings(flip=True), generator_for(3))
    for image, affine in zip(views.images, views.affines, strict=True):
        row, column, _ = affine @ torch.tensor([1.5, 0.5, 1.0])
        assert image[0, int(row), int(column)] == 1 and image.sum() == 1
    # both kinds occurred: (r, c) → (r, c) and (r, 5 − c)
    assert {float(a[1, 2]) for a in views.affines} == {0.0, 5.0}


def test_a_bright_pixel_under_rotation_by_90_degrees():
    images = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    images[0, 0, 0, 1] = 255
    angle = torch.tensor([math.pi / 2], dtype=torch.float64)
    quarter = warping.recentre_affines(warping.rotation_affines(angle), 5, 5)
    view = warp_images(images, quarter, (5, 5), "zeros")[0, 0]
    # centre (2.5, 2.5); the point (0.5, 1.5) is (−2, −1) from it; (r, c) → (−c, r) gives (1, −2):
    # the point (3.5, 0.5)
    assert view[3, 0] == pytest.approx(255, abs=0.01) and view.sum() == pytest.approx(255, abs=0.01)


def test_randaugment_geometry_by_hand():
    names = ("shear_x", "translate_y", "rotate")
    levels = torch.tensor([[1.0], [-0.5], [1.0]], dtype=torch.float64)
    drawn = DrawnOperations(names, torch.tensor([[0], [1], [2]]), levels)
    affines = augmentations.operation_affines(drawn, 10, 20)
    middle_of_the_upper_edge = torch.tensor([0.0, 10.0, 1.0], dtype=torch.float64)
    expected = [
        [0.0, 8.5, 1.0],  # column += 0.3 · (0 − 5)
        [-2.25, 10.0, 1.0],  # −0.5 · 0.45 · 10 rows
        [5 - 5 * math.cos(math.pi / 6), 10 - 2.5, 1.0],
    ]
    moved = affines @ middle_of_the_upper_edge
    assert torch.allclose(moved, torch.tensor(expected, dtype=torch.float64))


def test_inverse_and_crop_windows():
    random = generator_for(4)
    identity = torch.eye(3, dtype=torch.float64)
    affines = identity + 0.3 * torch.rand(50, 3, 3, generator=random, dtype=torch.float64)
    affines[:, 2] = torch.tensor([0.0, 0.0, 1.0])
    assert torch.allclose(warping.invert_affines(affines) @ affines, identity.expand(50, 3, 3))
    draws = BatchDraws(random, 5000)
    top, left, height, width = warping.draw_crop_windows(draws, (20, 30), (0.3, 0.6), (0.9, 1.1))
    share = height * width / 600
    assert share.min() >= 0.3 and share.max() <= 0.6
    assert share.mean() == pytest.approx(0.45, abs=0.01) and (top >= 0).all() and (left >= 0).all()
    assert (top + height <= 20).all() and (left + width <= 30).all()
    assert (width / height).min() >= 0.9 and (width / height).max() <= 1.1


RANDOM = np.random.default_rng(0)
SMOOTH = (np.add.outer(np.arange(24), np.arange(18)) * 4 + 20)[:, :, None] + np.array([0, 20, 40])
IMAGES = {
    "noise": RANDOM.integers(0, 256, (24, 18, 3)).astype(np.uint8),
    "ramp": SMOOTH.clip(0, 255).astype(np.uint8),
    "narrow": RANDOM.integers(100, 140, (24, 18, 3)).astype(np.uint8),
    "flat": np.full((24, 18, 3), 77, np.uint8),
}
ENHANCE = {"adjust_brightness": ImageEnhance.Brightness, "adjust_contrast": ImageEnhance.Contrast}
ENHANCE |= {"adjust_saturation": ImageEnhance.Color, "adjust_sharpness": ImageEnhance.Sharpness}


def ours(name, pixels, value):
    channels_last = torch.from_numpy(pixels.copy()).float().view(*pixels.shape[:2], -1)
    strength = torch.full((1, 1, 1, 1), float(value))
    changed = getattr(augmentations, name)(channels_last.permute(2, 0, 1)[None], strength)
    return changed[0].permute(1, 2, 0).numpy()


def images(grey):
    return {
        name: np.asarray(Image.fromarray(image).convert("L")) if grey else image
        for name, image in IMAGES.items()
    }


def close(mine, theirs, tolerance):
    return np.abs(mine - np.asarray(theirs, np.float64).reshape(mine.shape)).max() <= tolerance


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("name", ENHANCE)
def test_enhancements(name, grey):
    for image in images(grey).values():
        for factor in (0.0, 0.1, 0.55, 1.0, 1.45, 1.9):
            theirs = ENHANCE[name](Image.fromarray(image)).enhance(factor)
            assert close(ours(name, image, factor), theirs, 1.0), (factor,)


@pytest.mark.parametrize("grey", [False, True])
def test_operations_on_levels(grey):
    for image in images(grey).values():
        picture = Image.fromarray(image)
        assert close(ours("autocontrast", image, 1), ImageOps.autocontrast(picture), 1.0)
        assert close(ours("equalize", image, 1), ImageOps.equalize(picture), 0)
        assert close(ours("invert", image, 1), ImageOps.invert(picture), 0)
        for bits in range(1, 9):
            assert close(ours("posterize", image, bits), ImageOps.posterize(picture, bits), 0)
        for threshold in (0, 26, 128, 256):
            theirs = ImageOps.solarize(picture, threshold)
            assert close(ours("solarize", image, threshold), theirs, 0)


def test_each_image_gets_its_own_operation():
    names = ("identity", *COLOUR_OPERATIONS)
    pixels = torch.from_numpy(np.stack([IMAGES["noise"]] * len(names))).permute(0, 3, 1, 2).float()
    levels = torch.full((len(names), 1), -0.5, dtype=torch.float64)
    drawn = DrawnOperations(names, torch.arange(len(names))[:, None], levels)
    done = augmentations.apply_colour_operations_in_place(pixels.clone(), drawn)
    assert torch.equal(done[0], pixels[0])
    for row, name in enumerate(names[1:], 1):
        value = COLOUR_OPERATIONS[name][1](levels[row]).float().view(1, 1, 1, 1)
        assert torch.equal(
            done[row : row + 1], COLOUR_OPERATIONS[name][0](pixels[row : row + 1], value)
        )
        assert not torch.equal(done[row], pixels[row])


def test_operations_in_the_order_drawn_at_magnitudes_beyond_10_of_all_names_and_signs():
    orders, levels = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2, dtype=torch.float64)
    drawn = DrawnOperations(("invert", "posterize"), orders, levels)
    done = augmentations.apply_colour_operations_in_place(torch.full((2, 1, 4, 4), 100.0), drawn)
    # 255 − 100 = 155 → 144; 100 → 96 → 159
    assert done[0, 0, 0, 0] == 144 and done[1, 0, 0, 0] == 159
    one = torch.tensor([1.0, -1.0, 3.0, -3.0], dtype=torch.float64)
    assert COLOUR_OPERATIONS["brightness"][1](one).tolist() == pytest.approx([1.9, 0.1, 3.7, 0.0])
    assert COLOUR_OPERATIONS["posterize"][1](one).tolist() == [4, 4, 1, 1]
    assert COLOUR_OPERATIONS["solarize"][1](one).tolist() == [0, 0, 0, 0]
    settings = RandAugment(operations=2, magnitude=5)
    drawn = augmentations.draw_operations(settings, BatchDraws(generator_for(0), 2000))
    assert set(drawn.choices.unique().tolist()) == set(range(14))
    assert set(drawn.levels.unique().tolist()) == {-0.5, 0.5} and "invert" not in drawn.names


@pytest.mark.parametrize("name", COLOUR_OPERATIONS)
def test_views_stay_in_range(name):
    images = torch.randint(0, 256, (16, 3, 12, 12), generator=generator_for(1), dtype=torch.uint8)
    strong = ViewSettings(randaugment=RandAugment(magnitude=30, names=(name, "rotate")))
    views = make_random_views(images, strong, generator_for(2))
    assert views.images.min() >= 0 and views.images.max() <= 1


def jittered_by_torchvision(images, drawn):
    """Torchvision's own, on floats; its contrast and saturation do not round the grey image."""
    define_missing_operators()
    from torchvision.transforms.v2 import functional

    names = ("adjust_brightness", "adjust_contrast", "adjust_saturation")
    found = []
    for image, order, factors in zip(images, drawn.order, drawn.factors, strict=True):
        for index in order.tolist():
            image = getattr(functional, names[index])(image, factors[index].item())
        found.append(image)
    return torch.stack(found)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_equals_torchvisions_to_a_grey_level(channels):
    images = torch.randint(0, 256, (64, channels, 12, 9), generator=generator_for(0))
    drawn = augmentations.draw_jitter(JITTER, BatchDraws(generator_for(1), 64))
    ours = augmentations.jitter_colours_in_place(images.float(), drawn) / 255
    assert (ours - jittered_by_torchvision(images / 255, drawn)).abs().max() < 1 / 255
    assert (ours - images / 255).abs().mean() > 0.03


def test_jitter_draws_every_order_and_factors_within_their_ranges():
    settings = augmentations.ColourJitter(brightness=0.12, contrast=1.5)
    order, factors = augmentations.draw_jitter(settings, BatchDraws(generator_for(0), 6000))
    _, times = order.unique(dim=0, return_counts=True)
    assert len(times) == 6 and times.min() > 850  # 1000 each, standard error 29
    low, high = factors.aminmax(dim=0)
    assert torch.allclose(low, torch.tensor([0.88, 0.0, 1.0], dtype=low.dtype), atol=0.002)
    assert torch.allclose(high, torch.tensor([1.12, 2.5, 1.0], dtype=high.dtype), atol=0.002)


def test_jittered_views_are_uint8_images_jittered_before_they_are_erased():
    images = torch.randint(0, 256, (16, 3, 8, 8), generator=generator_for(2), dtype=torch.uint8)
    views = make_random_views(images, ViewSettings(jitter=JITTER), generator_for(3)).images
    assert views.dtype == torch.float32 and 0 <= views.min() and views.max() <= 1
    again = make_random_views(images, ViewSettings(jitter=JITTER), generator_for(3)).images
    assert torch.equal(views, again) and not torch.equal(
        views[0], prepare_evaluation_images(images)[0]
    )
    still = ViewSettings(jitter=augmentations.ColourJitter())
    unchanged = make_random_views(images, still, generator_for(3)).images
    assert torch.equal(unchanged, prepare_evaluation_images(images))
    erased = ViewSettings(jitter=JITTER, erasing=1.0)
    views = make_random_views(images, erased, generator_for(3)).images
    assert (views == 0).any(dim=(1, 2, 3)).all()
