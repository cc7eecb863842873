"""The colour operations against PIL on uint8 images.

Tolerance: PIL cuts each result to a whole level, ours keep the fraction, so results differ by less
than one level (and contrast's grey mean may round the other way). posterize, solarize, invert and
equalize must be equal.
"""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from moecore.core.streams import generator_for
from moecore.data.views import colour
from moecore.data.views.randaugment import OPERATIONS, Drawn, RandAugment, draw, recolour
from moecore.data.views.views import ViewSettings, identity_view, make_views

RANDOM = np.random.default_rng(0)
SMOOTH = (np.add.outer(np.arange(24), np.arange(18)) * 4 + 20)[:, :, None] + np.array([0, 20, 40])
IMAGES = {
    "noise": RANDOM.integers(0, 256, (24, 18, 3)).astype(np.uint8),
    "ramp": SMOOTH.clip(0, 255).astype(np.uint8),
    "narrow": RANDOM.integers(100, 140, (24, 18, 3)).astype(np.uint8),
    "flat": np.full((24, 18, 3), 77, np.uint8),
}
FACTORS = (0.0, 0.1, 0.55, 1.0, 1.45, 1.9)
ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}


def ours(name, pixels, value):
    tensor = (
        torch.from_numpy(pixels.copy()).float().view(*pixels.shape[:2], -1).permute(2, 0, 1)[None]
    )
    return (
        getattr(colour, name)(tensor, torch.full((1, 1, 1, 1), float(value)))[0]
        .permute(1, 2, 0)
        .numpy()
    )


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
        for factor in FACTORS:
            assert close(
                ours(name, image, factor),
                ENHANCE[name](Image.fromarray(image)).enhance(factor),
                1.0,
            ), (factor,)


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
            assert close(
                ours("solarize", image, threshold), ImageOps.solarize(picture, threshold), 0
            )


def test_each_image_gets_its_own_operation():
    names = ("identity", *OPERATIONS)
    pixels = torch.from_numpy(np.stack([IMAGES["noise"]] * len(names))).permute(0, 3, 1, 2).float()
    levels = torch.full((len(names), 1), -0.5, dtype=torch.float64)
    done = recolour(pixels.clone(), Drawn(names, torch.arange(len(names))[:, None], levels))
    assert torch.equal(done[0], pixels[0])
    for row, name in enumerate(names[1:], 1):
        value = OPERATIONS[name][1](levels[row]).float().view(1, 1, 1, 1)
        assert torch.equal(done[row : row + 1], OPERATIONS[name][0](pixels[row : row + 1], value))
        assert not torch.equal(done[row], pixels[row])


def test_order_is_the_order_drawn():
    names = ("invert", "posterize")
    pixels = torch.full((2, 1, 4, 4), 100.0)
    done = recolour(
        pixels, Drawn(names, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2, dtype=torch.float64))
    )
    # 255 − 100 = 155 → 144; 100 → 96 → 159
    assert done[0, 0, 0, 0] == 144 and done[1, 0, 0, 0] == 159


def test_values_at_magnitude_10_and_limits_beyond():
    one = torch.tensor([1.0, -1.0, 3.0, -3.0], dtype=torch.float64)
    assert OPERATIONS["brightness"][1](one).tolist() == pytest.approx([1.9, 0.1, 3.7, 0.0])
    assert OPERATIONS["posterize"][1](one).tolist() == [4, 4, 1, 1] and OPERATIONS["solarize"][1](
        one
    ).tolist() == [0, 0, 0, 0]


def test_all_names_are_drawn_and_both_signs():
    drawn = draw(RandAugment(operations=2, magnitude=5), 2000, generator_for(0))
    assert set(drawn.choices.unique().tolist()) == set(range(14)) and set(
        drawn.levels.unique().tolist()
    ) == {-0.5, 0.5}
    assert "invert" not in drawn.names


@pytest.mark.parametrize("name", OPERATIONS)
def test_views_stay_in_range(name):
    images = torch.randint(0, 256, (16, 3, 12, 12), generator=generator_for(1), dtype=torch.uint8)
    views = make_views(
        images,
        ViewSettings(randaugment=RandAugment(magnitude=30, names=(name, "rotate"))),
        generator_for(2),
    )
    assert (
        views.images.min() >= 0 and views.images.max() <= 1 and torch.isfinite(views.images).all()
    )


def test_colours_alone_move_nothing():
    images = torch.randint(0, 256, (16, 3, 12, 12), generator=generator_for(1), dtype=torch.uint8)
    views = make_views(
        images, ViewSettings(randaugment=RandAugment(names=("identity",))), generator_for(2)
    )
    assert torch.equal(views.images, identity_view(images)) and torch.equal(
        views.affines, torch.eye(3).expand(16, 3, 3)
    )
