"""Mosaics: the right pixels and labels, a function of the seed, and no source image in two
splits.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moecore.core.files import UserError, read_json, write_json
from moecore.data.contact import contact_sheet
from moecore.data.loader import few_shot, to_device
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.digits import Digits
from moecore.data.sources.mosaic import Mosaic, composed, drawn_cells, multi_hot_labels
from moecore.data.splits import SplitSettings, carve
from moecore.data.writer import Facts, Part, write_prepared
from moecore.tasks.classification import Classification
from moecore.tasks.multi_label import MultiLabel

SOURCE = {"kind": "digits", "size": 6, "seed": 3}
SETTINGS = Mosaic(source=SOURCE, train=300, validation=60, test=70, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The mosaics, and their source prepared alone."""
    home = tmp_path_factory.mktemp("mosaic")
    SETTINGS.prepare(home / "mosaic")
    Digits.model_validate(SOURCE).prepare(home / "source")
    return home


def test_cells_lie_row_by_row():
    # cells 1 2 3 4 of one pixel, two channels (the second + 10), in a grid of 2
    cells = (
        np.array([1, 2, 3, 4], np.uint8)[None, :, None, None, None]
        + np.array([0, 10], np.uint8)[None, None, :, None, None]
    )
    assert composed(cells, 2).tolist() == [[[[1, 2], [3, 4]], [[11, 12], [13, 14]]]]


def test_rows_and_columns_of_a_cell_stay():
    cells = np.arange(4 * 6, dtype=np.uint8).reshape(1, 4, 1, 2, 3)
    # cell 0: 0 1 2 / 3 4 5, cell 1: 6 7 8 / 9 10 11 to its right, cell 2 below cell 0
    assert composed(cells, 2)[0, 0].tolist() == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
        [12, 13, 14, 18, 19, 20],
        [15, 16, 17, 21, 22, 23],
    ]


def test_labels_are_the_classes_that_occur():
    assert multi_hot_labels(np.array([[0, 2, 2, 0], [1, 1, 1, 1]]), 4).tolist() == [
        [1, 0, 1, 0],
        [0, 1, 0, 0],
    ]


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
def test_draws_differ_within_a_mosaic_and_use_all_images_evenly(total, number, cells, seed):
    if total < cells:
        with pytest.raises(
            UserError,
            match=f"a mosaic has {cells} cells, but split of the source has {total} images",
        ):
            drawn_cells(total, number, cells, [seed])
        return
    drawn = drawn_cells(total, number, cells, [seed])
    assert (
        drawn.shape == (number, cells)
        and all(len(set(row)) == cells for row in drawn.tolist())
        and 0 <= drawn.min()
        and drawn.max() < total
    )
    uses = np.bincount(drawn.ravel(), minlength=total)
    orders = -(-number // (total // cells))
    assert uses.max() <= orders
    assert np.array_equal(drawn_cells(total, number + 7, cells, [seed])[:number], drawn), (
        "more mosaics begin with the same ones"
    )


def test_draws_depend_on_the_seed():
    assert (
        not np.array_equal(drawn_cells(50, 10, 4, [0, 4]), drawn_cells(50, 10, 4, [1, 4]))
        and len(np.unique(drawn_cells(50, 12, 4, [0]))) == 48
    )


def test_every_cell_is_an_image_of_its_split_and_the_labels_are_theirs(folder):
    made = Prepared.open(folder / "mosaic", verify=True)
    source = Prepared.open(folder / "source")
    known = {
        name: {
            image.tobytes(): label for image, label in zip(*getattr(source, name)[:2], strict=True)
        }
        for name in SPLITS
    }
    for name, number in (("train", 300), ("validation", 60), ("test", 70)):
        images, labels = getattr(made, name)[:2]
        assert (
            images.shape == (number, 1, 12, 12)
            and labels.shape == (number, 10)
            and labels.dtype == np.uint8
        )
        for image, found in zip(images, labels, strict=True):
            expected = set()
            for top in (0, 6):
                for left in (0, 6):
                    cell = np.ascontiguousarray(image[:, top : top + 6, left : left + 6]).tobytes()
                    expected.add(int(known[name][cell]))  # KeyError: not of this split
                    assert not any(cell in known[other] for other in SPLITS if other != name)
            assert set(np.flatnonzero(found)) == expected


def test_the_card_tells_what_it_is(folder):
    card = read_json(folder / "mosaic/card.json")
    labels = np.load(folder / "mosaic/test_labels.npy")
    assert (
        card["task"] == {"kind": "multi_label", "classes": list("0123456789")}
        and card["images"] == {"train": 300, "validation": 60, "test": 70}
        and card["size"] == 12
    )
    assert (
        card["counts"]["test"] == {str(digit): int(labels[:, digit].sum()) for digit in range(10)}
        and sum(card["counts"]["test"].values()) > 70
    )
    assert (
        card["kind"] == "mosaic"
        and card["settings"]["source"]["kind"] == "digits"
        and card["seed"] == 1
    )
    classes = tuple("0123456789")
    assert Prepared.open(folder / "mosaic").task == MultiLabel(classes=classes)
    assert Prepared.open(folder / "source").task == Classification(classes=classes)
    assert sorted(path.name for path in (folder / "mosaic").iterdir()) == sorted(
        [*card["files"], "card.json"]
    ), "the source does not stay"


def test_it_is_a_function_of_its_settings(folder, tmp_path):
    assert SETTINGS.prepare(tmp_path / "again") == read_json(folder / "mosaic/card.json")
    other = SETTINGS.model_copy(update={"seed": 2}).prepare(tmp_path / "other")
    assert (
        other["files"]["train_images.npy"]
        != read_json(folder / "mosaic/card.json")["files"]["train_images.npy"]
    )


def test_splits_of_one_size_are_drawn_apart(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "moecore.data.sources.mosaic.drawn_cells",
        lambda *words: seen.setdefault(tuple(words[3]), drawn_cells(*words)),
    )
    SETTINGS.prepare(tmp_path)
    assert len(seen) == 3


def test_a_grid_of_one_and_of_three(tmp_path):
    one = Mosaic(source=SOURCE, grid=1, train=200, validation=100, test=100).prepare(tmp_path / "1")
    assert one["size"] == 6 and sum(one["counts"]["train"].values()) == 200
    assert (
        Mosaic(source=SOURCE, grid=3, train=40, validation=40, test=40).prepare(tmp_path / "3")[
            "size"
        ]
        == 18
    )


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="a mosaic has 64 cells, but train of the source has 50 images"
    ):
        Mosaic(source=SOURCE | {"train_limit": 50}, grid=8, train=2, validation=2, test=2).prepare(
            tmp_path
        )
    for wrong in (
        {"grid": 0},
        {"source": {"kind": "imagenet"}},
        {"source": SOURCE, "train": 0},
        {"source": SOURCE, "cell": 3},
    ):
        with pytest.raises(ValidationError):
            Mosaic.model_validate({"source": SOURCE} | wrong)


def test_the_contact_sheet_shows_images_with_the_class(folder):
    made = Prepared.open(folder / "mosaic")
    sheet = contact_sheet(made, shots=2)
    for digit in range(10):
        first = np.flatnonzero(made.train.labels[:, digit])[0]
        assert np.array_equal(
            sheet.axes[2 * digit].images[0].get_array(), made.train.images[first, 0]
        )


def test_helpers_that_need_one_label_refuse_sets(folder):
    split = Prepared.open(folder / "mosaic").train
    with pytest.raises(
        UserError,
        match=(
            "5 images per class asked for, but these images have several labels each; allowed: null"
        ),
    ):
        few_shot(MultiLabel(classes=tuple("0123456789")), split.labels, 5, 0)
    with pytest.raises(UserError, match="several labels each cannot be split by class"):
        carve(split.labels, 0.5, 0)
    images, labels = to_device(split, "cpu").take(torch.tensor([7, 3]))
    assert np.array_equal(labels.numpy(), split.labels[[7, 3]]) and images.shape == (2, 1, 12, 12)


class Made(SplitSettings):
    kind: str = "made"


FACTS = Facts("Made", MultiLabel(classes=("a", "b")), 1, 4, "none", "here", Made())
IMAGES = np.zeros((4, 1, 4, 4), np.uint8)
SETS = np.array([[1, 0], [0, 1], [1, 1], [1, 1]], np.uint8)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            np.array([0, 1, 0, 1]),
            "labels of test have the shape (4,); allowed: (images, 2) in every split",
        ),
        (SETS[:, :1], "labels of test have the shape (4, 1)"),
        (
            SETS * 2,
            "labels of test are not sets of classes; allowed: 0 and 1, with a 1 for each image",
        ),
        (SETS * [[0], [1], [1], [1]], "not sets of classes"),
        (SETS * [1, 0] + [[0, 0], [1, 0], [0, 0], [0, 0]], "no image in test of class b"),
    ],
)
def test_wrong_sets_are_refused(tmp_path, labels, said):
    whole = Part(SETS, [IMAGES])
    with pytest.raises(UserError) as error:
        write_prepared(
            tmp_path, FACTS, {"train": whole, "validation": whole, "test": Part(labels, [IMAGES])}
        )
    assert said in str(error.value)


def test_a_damaged_set_is_refused(tmp_path):
    whole = Part(SETS, [IMAGES])
    write_prepared(tmp_path, FACTS, dict.fromkeys(SPLITS, whole))
    Prepared.open(tmp_path)
    np.save(tmp_path / "test_labels.npy", SETS[:, ::-1].copy())
    Prepared.open(tmp_path)  # 3 and 3 of each class: only the hash tells
    with pytest.raises(UserError, match="test_labels.npy: has sha256"):
        Prepared.open(tmp_path, verify=True)
    np.save(tmp_path / "test_labels.npy", SETS & [[1, 0]])
    with pytest.raises(UserError, match=r"holds int64 \(4, 2\); card.json says uint8 \(4, 2\)"):
        Prepared.open(tmp_path)
    np.save(tmp_path / "test_labels.npy", (SETS & [[1, 0]]).astype(np.uint8))
    with pytest.raises(UserError, match="class counts are not those of card.json"):
        Prepared.open(tmp_path)
    write_json(
        tmp_path / "card.json",
        {key: value for key, value in read_json(tmp_path / "card.json").items() if key != "images"},
    )
    with pytest.raises(UserError, match="card.json: lacks images"):
        Prepared.open(tmp_path)
