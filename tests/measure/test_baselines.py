"""Classifiers on pixels: what they reach by hand, and that test images choose nothing."""

import numpy as np
import pytest
import torch

from moecore.data.prepared import Prepared, Split
from moecore.measure import baselines
from moecore.measure.base import Skipped, read_result
from moecore.measure.values import Found
from moecore.stages import baselines as stage
from moecore.tasks.classification import Classification
from moecore.tasks.regression import Regression
from tests.measure.subjects import compute_without_cache, in_run

CLASSES = Classification(classes=("a", "b"))
AGES = Regression(target="age", unit="years", mean=60.0, deviation=10.0)
SETTINGS = baselines.Baselines(penalties=(0.01, 1e6))
TRAIN = {0: 0, 10: 0, 20: 0, 30: 0, 200: 1, 210: 1}  # pixel → class


def split(points: dict[int, int], axes: int = 4) -> Split:
    pixels = np.array([*points], np.uint8)
    return Split(pixels.reshape(-1, *[1] * (axes - 1)), np.array([*points.values()]))


def measure(validation, test, shots=None, axes=4, task=CLASSES, seed=0):
    splits = [split(points, axes) for points in (TRAIN, validation, test)]
    data = Prepared({"task": task.model_dump(mode="json"), "channels": 1}, *splits)
    return baselines.measure_baselines(data, SETTINGS, shots, seed, compute_without_cache)


def test_scores_by_hand_and_validation_alone_chooses():
    """Five of six neighbours are of class 0 three times or more; 10⁶ leaves the intercept alone."""
    found = measure({5: 0, 250: 1}, {1: 0, 254: 1})
    values = {value.at["classifier"]: value for value in found.all("baseline")}
    assert values[baselines.LOGISTIC].array.tolist() == [1, 1]
    assert values["5 nearest neighbours"].array.tolist() == [1, 0]
    assert found.facts == {"penalty": 0.01, "images": 6}
    assert measure({5: 0, 250: 1}, {1: 0, 254: 0}).facts["penalty"] == 0.01
    assert measure({5: 0, 250: 0}, {1: 0, 254: 1}).facts["penalty"] == 1e6
    assert measure({5: 0, 6: 0}, {1: 0, 254: 1}).facts["penalty"] == 1e6  # the larger of two equals
    assert measure({5: 0, 250: 1}, {1: 0, 254: 1}, shots=2).facts["images"] == 4


def test_the_seed_draws_the_images_of_each_class():
    """Images between one of class 0, from 0 to 30, and one of class 1, 200 or 210."""
    between = dict.fromkeys(range(98, 122), 0)
    drawn = [measure({5: 0, 250: 1}, between, shots=1, seed=seed) for seed in range(6)]
    hits = {found.all("baseline")[0].array.tobytes() for found in drawn}
    assert len(hits) > 1


def test_the_small_network_learns_and_its_seed_draws_it():
    """Rows or columns of 8 × 8 pixels, at random places; a linear map would need every place."""
    random = np.random.default_rng(0)
    images = np.zeros((1020, 1, 8, 8), np.uint8)
    labels = np.arange(1020) % 2
    for image, label in zip(images[:, 0], labels, strict=True):
        (image if label else image.T)[random.integers(8)] = random.integers(100, 256)
    train = baselines.read_pixel_values(Split(images, labels), np.arange(1000), 1, 64)
    test = images[1000:].reshape(20, 64).astype(np.float32) / 255
    before = torch.get_rng_state()
    first, again, other = (baselines.SmallCnn(train, 2, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.predict(test) == labels[1000:]).mean() > 0.8
    parameters = [network.network[0].weight for network in (first, again, other)]
    assert torch.equal(*parameters[:2]) and not torch.equal(*parameters[1:])


def test_large_images_are_averaged_without_the_channel_of_the_truth():
    images = np.stack([np.arange(16), np.full(16, 9)]).astype(np.uint8).reshape(1, 2, 4, 4)
    found = baselines.read_pixel_values(Split(images, np.array([1])), np.array([0]), 1, 4)
    assert (found.values * 255).tolist() == [pytest.approx([2.5, 4.5, 10.5, 12.5])]


def test_other_data_are_skipped_with_the_reason(run, monkeypatch):
    assert "flat images" in measure(TRAIN, TRAIN, axes=3).skipped  # as of a text
    assert "these labels are real numbers" in measure(TRAIN, TRAIN, task=AGES).skipped
    selected = {"methods": [], "seeds": [0], "phases": ["pretrain"]}
    in_run(monkeypatch, run[0], run=selected, pretrain={}, baselines={})
    stage.baselines("pretrain")
    found = read_result("artifacts/measured/baselines/pretrain.json", Found, "baselines")
    assert not isinstance(found, Skipped) and len(found.values) == 3
