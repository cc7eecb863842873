"""The two views of an image, kind by kind."""

from typing import get_args

import numpy as np
import pytest
import torch

from moecore.data.loader import generator_for
from moecore.data.views.views import ViewSettings, make_views
from moecore.measure.routing_metrics.augmentations import (
    PRESETS,
    Augmentation,
    Preset,
    resolved,
    two_views,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)


@pytest.mark.parametrize("kind", get_args(Preset))
def test_views_are_functions_of_seed_and_place(kind):
    random = torch.get_rng_state()
    views = two_views(IMAGES, PRESETS[kind], 1, 7)
    assert torch.equal(torch.get_rng_state(), random) and PRESETS[kind].name == kind
    assert (
        views.images.shape == (24, 1, 8, 8)
        and views.affines.shape == (24, 3, 3)
        and 0 <= views.images.min() <= views.images.max() <= 1
    )
    again = two_views(IMAGES, PRESETS[kind], 1, 7)
    assert torch.equal(views.images, again.images) and torch.equal(views.affines, again.affines)
    others = [
        two_views(IMAGES, PRESETS[kind], 2, 7),
        two_views(IMAGES, PRESETS[kind], 1, 8),
        two_views(IMAGES, PRESETS[kind], 1),
    ]
    assert all(torch.equal(views.images, other.images) == (kind == "identity") for other in others)
    assert torch.equal(views.images[:12], views.images[12:]) == (kind == "identity")
    still = kind in ("identity", "noise", "brightness", "contrast", "erasing")
    assert torch.equal(views.affines, torch.eye(3).expand(24, 3, 3)) == still


def test_first_images_keep_their_views_when_there_are_more():
    images = np.random.default_rng(0).integers(0, 256, (130, 1, 8, 8), dtype=np.uint8)
    few, many = two_views(images[:100], PRESETS["crop"], 0), two_views(images, PRESETS["crop"], 0)
    assert torch.equal(many.images[:100], few.images[:100]) and torch.equal(
        many.affines[130:230], few.affines[100:]
    )
    by_hand = make_views(
        torch.from_numpy(images[100:]), PRESETS["crop"].views, generator_for(0, 100, 1)
    )
    assert torch.equal(many.images[230:], by_hand.images) and torch.equal(
        many.affines[230:], by_hand.affines
    )


def test_noise_has_its_size_and_moves_nothing():
    grey = np.full((40, 1, 8, 8), 128, np.uint8)
    views = two_views(grey, Augmentation(name="noise", noise=0.1), 0)
    noise = views.images - 128 / 255
    assert float(noise.std()) == pytest.approx(0.1, rel=0.04) and float(
        noise.mean()
    ) == pytest.approx(0, abs=0.006)
    correlation = float((noise[:40] * noise[40:]).mean()) / 0.01
    assert abs(correlation) < 0.08, "the two views have draws of their own"


def test_presets_have_their_names():
    assert set(PRESETS) == set(get_args(Preset))
    mine = Augmentation(name="mine", views=ViewSettings(shift=1))
    assert resolved("crop") is PRESETS["crop"] and resolved(mine) is mine
