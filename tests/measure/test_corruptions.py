"""Errors under corruptions on the digits, for a MoE and a dense model."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from moecore.data.corruptions.corruptions import CORRUPTIONS, corrupted
from moecore.data.prepared import evenly_spread
from moecore.measure import corruptions
from moecore.measure.base import Subject, at_once
from moecore.measure.corruptions import Corruptions, Name
from moecore.measure.noisy.noise import mean_corruption_error
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.nn.predict import predictions
from moecore.report.measures.corruptions import errors_of
from moecore.statistics.intervals import bootstrap_mean, wilson
from moecore.tasks.classification import Classification
from tests.measure.subjects import built, digits, measured_twice

SETTINGS = Corruptions(
    images=40,
    severities=(5, 1),
    names=("gaussian_noise", "contrast", "fog"),
    batch=16,
    seed=5,
)
MOE = {
    "router": {"kind": "noisy_top_k", "k": 2},
    "experts": {"kind": "mlp", "number": 4, "hidden_ratio": 1},
}
MODELS = {
    "vit": (Vit(patch=6, width=16, depth=2, heads=2), MoE(**MOE, blocks=[1])),
    "dense": (SingleLayer(), None),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits(tmp_path_factory.mktemp("corruptions"))


@pytest.fixture(scope="module")
def models(data):
    """Untrained, but their classes differ from image to image."""
    return {name: built(*parts, data, 3) for name, parts in MODELS.items()}


@pytest.fixture(scope="module")
def results(data, models):
    return {
        name: measured_twice(corruptions.measure, Subject(model, data), SETTINGS)
        for name, model in models.items()
    }


@pytest.mark.parametrize("name", list(MODELS))
def test_every_corruption_and_severity_has_a_row(results, name):
    found = results[name]
    names = ("gaussian_noise", "contrast", "fog")
    expected = [(corruption, severity) for corruption in names for severity in (1, 5)]
    assert found.images == 40
    assert [(row.name, row.severity) for row in found.corruptions] == expected
    for row in found.corruptions:
        assert (row.error, row.low, row.high) == wilson(40 - row.correct, 40)
        assert row.error == 1 - row.correct / 40


@pytest.mark.parametrize("name", list(MODELS))
def test_means_are_over_severities_then_over_corruptions(results, name):
    found = results[name]
    for corruption, mean in found.by_corruption.items():
        errors = [row.error for row in found.corruptions if row.name == corruption]
        assert mean == pytest.approx(sum(errors) / 2)
    assert found.mean_error == pytest.approx(sum(found.by_corruption.values()) / 3)
    assert found.mean_low < found.mean_error < found.mean_high
    assert found.clean_low <= found.clean_error <= found.clean_high


@pytest.mark.parametrize("name", list(MODELS))
def test_errors_are_those_of_the_images_at_their_places_in_the_split(data, models, results, name):
    test, where = data.test, evenly_spread(60, 40)
    found = results[name]
    for row in found.corruptions:
        whole = corrupted(test.images, row.name, row.severity, 5, range(60))
        predicted = predictions(models[name], whole[where], 40)[0].argmax(1).numpy()
        assert row.correct == (predicted == test.labels[where]).sum()
    clean = predictions(models[name], test.images[where], 40)[0].argmax(1).numpy()
    assert found.clean_error == pytest.approx((clean != test.labels[where]).mean())


def test_the_ratio_to_dense_can_be_made(results):
    vit, dense = (errors_of(results[name]) for name in MODELS)
    expected = np.mean([sum(vit[name].values()) / sum(dense[name].values()) for name in vit])
    assert mean_corruption_error(vit, dense) == pytest.approx(expected)


def test_images_of_one_picture_belong_together():
    """Of 20 pictures one is always wrong, in 30 rows: limits of 20 images, not of 600."""
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    rows, wrong = corruptions.under_corruptions(
        lambda pixels: torch.arange(len(pixels)) != 3,
        images,
        np.arange(20),
        Classification(classes=("a", "b")),
        Corruptions(severities=(1, 2)),
        at_once,
    )
    assert len(rows) == 30
    assert wrong.tolist() == [float(i == 3) for i in range(20)]
    assert list(corruptions.by_corruption(rows)) == list(CORRUPTIONS)
    mean = bootstrap_mean(wrong)
    assert mean.value == pytest.approx(0.05)
    assert mean.high - mean.low >= 0.1


def test_settings_know_all_names():
    assert set(Name.__args__) == set(CORRUPTIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"severities": [1, 6]}, "severities"),
        ({"names": ["rain"]}, "rain"),
        ({"names": ["fog", "fog"]}, "twice"),
        ({"severities": []}, "severities"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Corruptions.model_validate(settings)
