"""What the explorer keeps of single images, against the records and slow counts."""

import numpy as np
import pytest
import torch

from moecore.attacks.target import Target
from moecore.core.files import UserError
from moecore.core.tensors import unpacked
from moecore.data.corruptions.draws import directions, with_noise
from moecore.measure import explorer
from moecore.measure.base import at_once
from moecore.measure.explorer import Explorer
from moecore.measure.routing_metrics.augmentations import Augmentation, two_views
from moecore.measure.routing_metrics.watched import explored_places
from moecore.nn.predict import predictions
from tests.measure.subjects import (
    FEW,
    MOVED,
    OF_VOLUMES,
    images,
    measured_twice,
    moe,
    subject,
    volumes,
)


@pytest.fixture(scope="module")
def model():
    return subject(images(), moe())


@pytest.fixture(scope="module")
def found(model):
    return measured_twice(explorer.measure, model, FEW)


def arrays(text: str, images: int, tokens: int, experts: int) -> tuple[np.ndarray, ...]:
    """The three arrays of a layer, read one number at a time."""
    data = unpacked(text)
    size = 1 if experts <= 255 else 2
    kept = min(experts, 8)
    all = images * tokens
    numbers = [int.from_bytes(data[i : i + size], "little") for i in range(0, all * size, size)]
    rest = data[all * size : all * size * (kept + 1)]
    ranked = [int.from_bytes(rest[i : i + size], "little") for i in range(0, len(rest), size)]
    marks = list(data[all * size * (kept + 1) :])
    shape = (images, tokens, kept)
    return (
        np.array(numbers).reshape(images, tokens),
        np.array(ranked).reshape(shape),
        np.array(marks).reshape(shape),
    )


def test_the_clean_images_are_those_of_the_records(model, found):
    where = explored_places(model.data, 5)
    assert found.images == tuple(where) == (0, 25, 12, 37, 6)
    assert found.labels == tuple((float(model.data.test.labels[place]),) for place in where)
    assert (found.special, found.grid) == (1, (3, 3))
    clean = found.shown[0]
    pixels = np.frombuffer(unpacked(clean.picture.pixels), np.uint8)
    assert np.array_equal(pixels.reshape(clean.picture.shape), model.data.test.images[where])
    prediction, records = predictions(model.model, model.data.test.images[where], 5)
    probs = prediction.softmax(-1)
    for image in range(5):
        assert clean.trace.answers[image][0] == int(probs[image].argmax())
        assert sum(clean.trace.values[image]) == pytest.approx(1, abs=2e-4), "all three classes"
    for text, record in zip(clean.trace.layers, records, strict=True):
        check_layer(text, record)


def check_layer(text, record):
    """Token by token, against the record."""
    number, tokens, experts = record.probs.shape
    best, ranked, marks = arrays(text, number, tokens, experts)
    for image in range(number):
        for token in range(tokens):
            weights = record.combine[image, token]
            assert best[image, token] == int(weights.argmax())
            assert ranked[image, token, 0] == best[image, token]
            assert sorted(ranked[image, token]) == list(range(experts))
            for expert, mark in zip(ranked[image, token], marks[image, token], strict=True):
                share = float(record.probs[image, token, expert])
                assert mark % 128 == pytest.approx(127 * share, abs=0.5001)
                assert (mark >= 128) == bool(record.chosen[image, token, expert])


def test_noise_and_attacks_are_those_of_the_other_measurements(model, found):
    where = explored_places(model.data, 5)
    clean = model.data.test.images[where]
    labels = torch.from_numpy(model.data.test.labels[where])
    by_label = {one.label: one for one in found.shown}
    drawn = directions(np.array(where), (1, 12, 12), 0)
    noisy = with_noise(clean, drawn, 0.5)
    target = Target(model.model, model.data.task, clean, labels, 3)
    attacked = target.attacked(FEW.attack, 0.1)
    for label, pixels in (("σ = 0.5", noisy), ("ε = 25.5/255", attacked)):
        _, records = predictions(model.model, pixels, 5)
        for text, record in zip(by_label[label].trace.layers, records, strict=True):
            check_layer(text, record)
    kinds = [one.kind for one in found.shown]
    assert kinds == ["clean", *["noise"] * 2, *["attack"] * 2, *["augmentation"] * 3]
    picture = by_label["ε = 25.5/255"].picture
    shown = np.frombuffer(unpacked(picture.pixels), np.uint8).reshape(picture.shape)
    moved = np.abs(shown.astype(int) - clean)
    assert 0 < moved.max() <= 26


def test_patches_of_moved_images_know_where_they_were(model, found):
    by_label = {one.label: one for one in found.shown}
    assert by_label["brightness"].origins is None
    assert by_label["σ = 0.5"].origins is None
    moved = np.frombuffer(unpacked(by_label["moved"].origins), "<u2").reshape(5, 9)
    clean = model.data.test.images[list(found.images)]
    views = two_views(clean, Augmentation.model_validate(MOVED), 0, *b"moved")
    outside = 0
    for image in range(5):
        back = np.linalg.inv(views.affines[image].numpy())
        for patch in range(9):
            row, column = divmod(patch, 3)
            y, x, _ = back @ [4 * row + 2, 4 * column + 2, 1]
            inside = 0 <= y < 12 and 0 <= x < 12
            expected = 3 * int(y // 4) + int(x // 4) if inside else 65535
            assert moved[image, patch] == expected
            outside += not inside
    assert 0 < outside < 30


def test_load_classes_and_favourites_by_slow_counts(model, found):
    test = model.data.test
    where = np.unique(np.linspace(0, 49, 40).astype(int))
    _, records = predictions(model.model, test.images[where], 50)
    for layer, record in zip(found.layers, records, strict=True):
        choices = record.chosen.sum(dim=(0, 1))
        for expert, use in enumerate(layer.experts):
            assert use.load == pytest.approx(float(choices[expert] / choices.sum()), abs=1e-5)
            shares = dict(use.classes)
            for name in range(3):
                rows = np.flatnonzero(test.labels[where] == name)
                own = int(record.chosen[rows][..., expert].sum())
                assert shares.get(name, 0) == pytest.approx(own / int(choices[expert]), abs=1e-4)
            check_favourites(use, expert, record, where)
        number = sum(len(use.favourites) for use in layer.experts)
        assert layer.crops.shape == (number, 1, 8, 8)


def check_favourites(use, expert, record, where):
    every = []
    for row, place in enumerate(where):
        patches = [
            (float(record.probs[row, 1 + patch, expert]), patch)
            for patch in range(9)
            if record.chosen[row, 1 + patch, expert]
        ]
        if patches:
            share, patch = max(patches, key=lambda one: one[0])
            every.append((-share, row, int(place), patch))
    expected = [(place, patch, -share) for share, _, place, patch in sorted(every)[:3]]
    assert [(one.image, one.patch) for one in use.favourites] == [one[:2] for one in expected]
    for one, (_, _, share) in zip(use.favourites, expected, strict=True):
        assert one.probability == pytest.approx(share, abs=1e-4)


def test_a_crop_shows_the_patch_in_its_middle(model, found):
    layer = found.layers[0]
    crops = np.frombuffer(unpacked(layer.crops.pixels), np.uint8).reshape(layer.crops.shape)
    first = layer.experts[0].favourites[0]
    row, column = divmod(first.patch, 3)
    image = model.data.test.images[first.image, 0]
    own = image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
    assert np.array_equal(crops[0, 0, 2:6, 2:6], own)


def test_a_dense_model_has_nothing_to_see():
    dense = subject(images(), None)
    assert explorer.applies(dense) == "a dense model has no experts, so there is nothing to see"
    assert explorer.applies(subject(images(), moe())) is None


def test_one_layer():
    found = explorer.measure(subject(images(), moe(blocks=(1,))), FEW, at_once)
    assert len(found.layers) == len(found.shown[0].trace.layers) == 1


def test_four_hundred_experts_keep_the_first_eight():
    model = subject(images(), moe(400))
    found = explorer.measure(model, FEW, at_once)
    _, records = predictions(model.model, model.data.test.images[list(found.images)], 5)
    for text, record in zip(found.shown[0].trace.layers, records, strict=True):
        best, ranked, marks = arrays(text, 5, 10, 400)
        assert np.array_equal(best, record.combine.argmax(-1).numpy())
        assert np.array_equal(ranked[..., 0], best)
        assert (np.array(marks) >= 128).sum() == 5 * 10 * 2, "both chosen ones are among them"
    layer = found.layers[0]
    assert len(layer.experts) == 400
    assert max(len(use.favourites) for use in layer.experts) <= 2, "800 crops a layer at most"
    idle = [use for use in layer.experts if not use.load]
    assert idle and all(use.favourites == () and use.classes == () for use in idle)


def test_a_thousand_classes_keep_the_largest():
    found = explorer.measure(subject(images(1000), moe()), FEW, at_once)
    assert all(len(row) == 3 for row in found.shown[0].trace.answers)
    assert all(len(use.classes) <= 5 for layer in found.layers for use in layer.experts)


def test_large_images_are_shown_smaller():
    data = images(size=200, channels=3, number=6)
    found = explorer.measure(subject(data, moe(), patch=50), FEW, at_once)
    assert found.shown[0].picture.shape == (5, 3, 96, 96)
    assert found.layers[0].crops.shape[1:] == (3, 24, 24)
    pixels = np.frombuffer(unpacked(found.shown[0].picture.pixels), np.uint8)
    assert pixels.mean() == pytest.approx(data.test.images[:].mean(), abs=2)


def test_volumes(tmp_path):
    model = volumes(tmp_path)
    asked = OF_VOLUMES.model_copy(update={"images": 24})
    found = measured_twice(explorer.measure, model, asked)
    assert len(found.images) == 6 and found.grid == (4, 4, 4)
    assert found.shown[0].picture.shape == (6, 1, 16, 16, 16)
    assert [one.picture for one in found.shown[1:]] == [None] * 6
    ages = model.data.test.labels[list(found.images)]
    assert found.labels == tuple((float(age),) for age in ages)
    prediction, _ = predictions(model.model, model.data.test.images[list(found.images)], 6)
    assert found.shown[0].trace.values == tuple(
        (pytest.approx(float(value), abs=1e-3),) for value in prediction
    )
    assert all(use.classes == () for layer in found.layers for use in layer.experts)
    assert found.layers[0].crops.shape[1:] == (1, 8, 8)


def test_volumes_refuse_what_is_for_flat_images(tmp_path):
    with pytest.raises(UserError, match="explorer.augmentations: found brightness"):
        explorer.measure(volumes(tmp_path), FEW, at_once)


def test_settings_are_checked():
    for wrong in ({"images": 33}, {"images": 0}, {"sigmas": [0]}, {"attack": {"kind": "bgd"}}):
        with pytest.raises(ValueError):
            Explorer.model_validate(wrong)
