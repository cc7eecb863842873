"""The two views of an image, kind by kind.

The images that trainings and the explorer look at, and what is kept of them after an epoch.
"""

from typing import get_args

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.streams import generator_for, seed_of
from moecore.data.views.views import ViewSettings, make_views
from moecore.measure.routing_metrics.augmentations import (
    PRESETS,
    Augmentation,
    Preset,
    resolved,
    two_views,
)
from moecore.measure.routing_metrics.watched import (
    explored_places,
    keep_trace,
    kept_traces,
    spread_places,
    watched_epochs,
)
from moecore.nn.predict import predictions
from moecore.nn.traces import trace
from tests.measure.subjects import images, moe, subject, volumes

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
    generator = generator_for(seed_of("measured_views", 0), 100, 1)
    by_hand = make_views(torch.from_numpy(images[100:]), PRESETS["crop"].views, generator)
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


def test_places_are_spread_and_stay():
    assert spread_places(16, 8) == [0, 8, 4, 12, 2, 10, 6, 14]
    for total in (1, 2, 7, 50, 10_000):
        every = spread_places(total, 32)
        assert len(every) == len(set(every)) == min(32, total)
        assert all(0 <= place < total for place in every)
        assert [spread_places(total, number) for number in (1, 5)] == [every[:1], every[:5]]
    assert sorted(spread_places(7, 99)) == list(range(7))


def test_there_are_fewer_volumes_than_images(tmp_path):
    assert len(explored_places(images(), 32)) == 32
    assert len(explored_places(volumes(tmp_path).data, 32)) == 6


def test_watched_epochs():
    assert watched_epochs(1) == (1,)
    assert watched_epochs(5) == (1, 2, 3, 4, 5)
    many = watched_epochs(300)
    assert len(many) == 12 and (many[0], many[-1]) == (1, 300)
    steps = {later - earlier for earlier, later in zip(many, many[1:], strict=False)}
    assert steps <= {27, 28}


def test_what_was_kept_is_what_the_model_did(tmp_path):
    models = {epoch: subject(images(), moe(), seed=epoch) for epoch in (1, 2)}
    data = models[1].data
    for epoch, model in models.items():
        keep_trace(tmp_path, epoch, model.model, data)
    found = kept_traces(tmp_path, data, 2)
    assert [one.epoch for one in found] == [1, 2]
    where = explored_places(data, 32)
    for one in found:
        assert one.images == tuple(where)
        seen = predictions(models[one.epoch].model, data.test.images[where], 32)
        assert one.trace == trace(*seen, data.task)
    assert found[0].trace != found[1].trace


def test_a_missing_epoch_is_named(tmp_path):
    model = subject(images(), moe())
    keep_trace(tmp_path, 1, model.model, model.data)
    with pytest.raises(UserError, match="traces/0002.json: no such file"):
        kept_traces(tmp_path, model.data, 2)
