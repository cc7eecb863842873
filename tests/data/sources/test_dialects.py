"""The source `dialects`: its changes can be undone, labels and truth are what they say."""

import numpy as np
import pytest
from scipy.linalg import hadamard

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared, Split
from moecore.data.sources.dialects import CHANGES, Dialects, draw_change
from moecore.data.sources.digits import Digits

SMALL = {"train": 900, "validation": 300, "test": 400}


def dialects(**settings) -> Dialects:
    return Dialects.model_validate(
        {"source": {"kind": "digits"}, "dialects": 4, **SMALL, **settings}
    )


def prepared(folder, **settings) -> tuple[Dialects, Prepared]:
    source = dialects(**settings)
    source.prepare(folder)
    return source, Prepared.open(folder)


def spoken(source: Dialects):
    """Return what the dialects do, and what each calls each class."""
    return source._vocabulary(1, 8, 10)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("number", "families"), [(1, None), (8, None), (8, 2)])
def test_every_change_can_be_undone(change, number, families):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (50, 1, 6, 6), dtype=np.uint8)
    which = random.integers(number, size=50)
    drawn = draw_change(change, number, 6, 0, 1, families)
    back = drawn.undo(drawn.apply(images, which), which)
    assert back.dtype == np.uint8
    rounding = 1 if change == "texture" else 0  # grey levels, of 255
    assert np.abs(back.astype(int) - images).max() <= rounding


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("families", [None, 2])
def test_no_two_dialects_are_alike_and_families_share_half_of_the_places(change, families):
    images = np.random.default_rng(0).integers(1, 256, (1, 1, 6, 6), dtype=np.uint8)
    drawn = draw_change(change, 8, 6, 0, 1, families)
    said = drawn.apply(np.repeat(images, 8, axis=0), np.arange(8))
    assert len(np.unique(said.reshape(8, -1), axis=0)) == 8
    if families:  # dialects 0 to 3, and 4 to 7
        two = said.reshape(2, 4, -1, 3, 2, 3, 2)  # rows and columns, even and odd
        stay = np.stack([two[..., 0, :, 0], two[..., 1, :, 1]])
        moved = np.stack([two[..., 0, :, 1], two[..., 1, :, 0]])
        assert (stay == stay[:, :, :1]).all() and (stay[:, 0] != stay[:, 1]).any()
        assert (moved != moved[:, :, :1]).any(axis=(0, 3, 4, 5))[:, 1:].all()


def test_a_frequency_exchanges_the_bands_of_the_walsh_transform():
    images = np.random.default_rng(0).integers(0, 256, (1, 1, 8, 8), dtype=np.uint8)
    drawn = draw_change("frequency", 5, 8, 0, 1)
    said = drawn.apply(np.repeat(images, 5, axis=0), np.arange(5))[:, 0]
    walsh = hadamard(8)  # row k: sequence k
    bands = np.abs(walsh @ (2 * images[0, 0].astype(int) - 255) @ walsh)
    index = np.arange(8)
    for one, negative in zip(said, drawn.negative, strict=True):
        row, column = np.argwhere(walsh @ (1 - 2 * negative) @ walsh)[0]  # the only one
        changed = np.abs(walsh @ (2 * one.astype(int) - 255) @ walsh)
        assert (changed == bands[np.ix_(index ^ row, index ^ column)]).all()


def test_shifted_hues_lie_between_the_others():
    # Three hues: red, green and blue with half a shade of each other; yellow, cyan, magenta.
    hues = [draw_change(change, 3, 6, 0, 1).hues for change in ("colour", "shifted_colour")]
    assert hues[0] == pytest.approx(np.where(np.eye(3), 1, 0.25))
    assert hues[1] == pytest.approx(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]]))


def test_a_family_shares_its_names():
    _, words = spoken(dialects(families=2))
    assert (words[0] == words[1]).all() and (words[2] == words[3]).all()
    assert (words[0] != words[2]).any()


@pytest.mark.parametrize("change", CHANGES)
def test_undone_each_image_is_of_its_split_and_has_its_dialects_name(change, tmp_path):
    source, data = prepared(tmp_path / "dialects", change=change, zipf=0.5)
    Digits().prepare(tmp_path / "digits")
    digits = Prepared.open(tmp_path / "digits")
    drawn, words = spoken(source)
    for name in SPLITS:
        split, own = getattr(data, name), getattr(digits, name)
        truth = split.images[:, -1]
        assert (truth == truth[:, :1, :1]).all() and truth.min() == 1 and truth.max() == 4
        which = truth[:, 0, 0].astype(int) - 1
        plain = drawn.undo(np.asarray(split.images[:, :-1]), which)
        distance = np.abs(plain[:, None].astype(int) - own.images[None]).max(axis=(2, 3, 4))
        same = distance <= (1 if change == "texture" else 0)
        assert same.any(axis=1).all(), "every image is one of the source's same split"
        named = words[which][:, own.labels]
        assert ((named == split.labels[:, None]) & same).any(axis=1).all()
    assert data.card["truth"] == 4 and data.card["channels"] == (3 if "colour" in change else 1)
    counted = np.bincount(which)
    assert list(counted) == sorted(counted, reverse=True), "a later dialect is rarer"


def test_four_images_by_hand():
    """Dialect 1 leaves an image and its class, dialect 2 turns it to the left and exchanges both
    classes; each image is drawn twice.
    """
    plain = np.arange(16, dtype=np.uint8).reshape(4, 1, 2, 2)
    source = dialects(change="rotation", dialects=2, test=8)
    names = np.array([[0, 1], [1, 0]])
    change = draw_change("rotation", 2, 2, 0, 1)
    drawn = source._part(Split(plain, np.array([0, 1, 0, 1])), "test", change, names)
    images = np.concatenate(list(drawn.images))
    assert set(images[:, 1].ravel().tolist()) == {1, 2}
    seen = []
    for (pixels, kind), label in zip(images, drawn.labels, strict=True):
        number = pixels.min() // 4  # of the image
        first = 4 * number
        by_hand = {1: [[0, 1], [2, 3]], 2: [[1, 3], [0, 2]]}[kind[0, 0]]
        assert (pixels - first).tolist() == by_hand and (kind == kind[0, 0]).all()
        assert label == (number % 2 if kind[0, 0] == 1 else 1 - number % 2)
        seen.append(int(number))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mosaics_cells_have_their_dialects_and_its_label_is_the_marked_cells(tmp_path):
    source, data = prepared(tmp_path, form="mosaic")
    assert (data.card["channels"], data.card["size"]) == (2, 16)
    images = np.asarray(data.test.images)
    cells = images.reshape(-1, 3, 2, 8, 2, 8).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 4, 3, 8, 8)
    mark, truth = cells[:, :, 1], cells[:, :, 2]
    for plane in (mark, truth):
        assert (plane == plane[..., :1, :1]).all()
    assert ((mark[..., 0, 0] == 255).sum(axis=1) == 1).all()
    Digits().prepare(tmp_path / "digits")
    digits = Prepared.open(tmp_path / "digits").test
    drawn, words = spoken(source)
    marked = mark[:, :, 0, 0].argmax(axis=1)
    rows = np.arange(len(cells))
    which = truth[rows, marked, 0, 0].astype(int) - 1
    plain = drawn.undo(cells[rows, marked, :1], which)
    same = (plain[:, None] == digits.images[None]).all(axis=(2, 3, 4))
    assert ((words[which][:, digits.labels] == data.test.labels[:, None]) & same).any(axis=1).all()


def test_every_cell_has_the_label_that_its_dialect_gives_it(tmp_path):
    source, data = prepared(tmp_path, form="cells")
    assert (data.card["channels"], data.card["size"], data.task.kind) == (1, 16, "cells")
    images = np.asarray(data.test.images)
    cells = images.reshape(-1, 2, 2, 8, 2, 8).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 2, 8, 8)
    Digits().prepare(tmp_path / "digits")
    digits = Prepared.open(tmp_path / "digits").test
    drawn, words = spoken(source)
    which = cells[:, 1, 0, 0].astype(int) - 1
    same = (drawn.undo(cells[:, :1], which)[:, None] == digits.images[None]).all(axis=(2, 3, 4))
    named = words[which][:, digits.labels] == data.test.labels.reshape(-1, 1)
    assert (named & same).any(axis=1).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zipf": 3.0}, "zipf: found 3.0, which leaves about 12 of the last dialect"),
        (
            {"change": "rotation", "dialects": 9},
            "dialects: found 9; allowed: at most 8 of rotation",
        ),
        (
            {"change": "rotation", "dialects": 10, "families": 10},
            "families: found 10; allowed: at most 8 of rotation",
        ),
    ],
)
def test_what_cannot_be_is_said_before_and_by_prepare(settings, said, tmp_path):
    source = dialects(**settings)
    assert source.preview().problem.startswith(said)
    with pytest.raises(UserError, match=said):
        source.prepare(tmp_path)


def test_two_seeds_are_other_dialects(tmp_path):
    first, other = (prepared(tmp_path / str(seed), seed=seed)[1].test.images for seed in (0, 1))
    assert not np.array_equal(first, other)
