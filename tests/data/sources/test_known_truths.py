import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from moecore.core.files import UserError
from moecore.data.layouts.text import END, UNKNOWN, TokenizedText, write_text
from moecore.data.loader import TextStreams
from moecore.data.prepared import SPLITS, Prepared, Split
from moecore.data.sources import base, ciphers, docstrings
from moecore.data.sources.ciphers import Ciphers, draw_word_ciphers
from moecore.data.sources.dialects import CHANGES, Dialects, draw_change
from moecore.sources import Clusters, Digits, Subspaces
from moecore.testing import check_source

SMALL = {"train": 900, "validation": 300, "test": 400}
VOCABULARY = (END, UNKNOWN, "a", "b", "c", "d")
LINES = [[2, 3, 1, 0], [4, 0], [5, 5, 2, 0]]  # three paragraphs
SMALL_TEXT = {"block": 4, "context": 1}
FEW = {"train": 3000, "validation": 300, "test": 1000}


def dialects(**settings) -> Dialects:
    return Dialects.model_validate({"source": Digits(), "dialects": 4, **SMALL, **settings})


def prepared(folder, **settings) -> tuple[Dialects, Prepared]:
    source = dialects(**settings)
    source.write(folder)
    return source, Prepared.open(folder)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("digits")
    Digits().write(folder)
    return Prepared.open(folder)


def spoken(source: Dialects):
    """Return what the dialects do, and what each calls each class."""
    return source._dialects(1, 8, 10)


def are_in_dialects(drawn, images, which, plain):
    """Return whether each image is each plain one in the image's dialect, (n, plain)."""
    pairs = zip(images, which, strict=True)
    said = {kind: drawn.apply(plain, np.full(len(plain), kind)) for kind in np.unique(which)}
    return np.stack([(said[kind] == image).all(axis=(1, 2, 3)) for image, kind in pairs])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("number", "families"), [(1, None), (8, None), (8, 2)])
def test_no_change_makes_images_equal(change, number, families):
    """Levels differ by 8, as a texture rounds."""
    images = np.repeat(np.arange(0, 256, 8, dtype=np.uint8), 36).reshape(-1, 1, 6, 6)
    drawn = draw_change(change, number, 6, 0, 1, families)
    for dialect in range(number):
        changed = drawn.apply(images, np.full(len(images), dialect))
        assert changed.dtype == np.uint8 and len(np.unique(changed, axis=0)) == len(images)


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


def test_shifted_hues_lie_between_the_others_and_a_family_shares_its_names():
    # Three hues: red, green and blue with half a shade of each other; yellow, cyan, magenta.
    hues = [draw_change(change, 3, 6, 0, 1).hues for change in ("colour", "shifted_colour")]
    assert hues[0] == pytest.approx(np.where(np.eye(3), 1, 0.25))
    assert hues[1] == pytest.approx(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]]))
    _, words = spoken(dialects(families=2))
    assert (words[0] == words[1]).all() and (words[2] == words[3]).all()
    assert (words[0] != words[2]).any()


@pytest.mark.parametrize("change", CHANGES)
def test_undone_each_image_is_of_its_split_and_has_its_dialects_name(change, tmp_path, digits):
    source, data = prepared(tmp_path, change=change, zipf=0.5)
    drawn, words = spoken(source)
    for name in SPLITS:
        split, own = getattr(data, name), getattr(digits, name)
        truth = split.images[:, -1]
        assert (truth == truth[:, :1, :1]).all() and truth.min() == 1 and truth.max() == 4
        which = truth[:, 0, 0].astype(int) - 1
        same = are_in_dialects(drawn, split.images[:, :-1], which, own.images)
        assert same.any(axis=1).all(), "every image is one of the source's same split"
        assert ((words[which][:, own.labels] == split.labels[:, None]) & same).any(axis=1).all()
    assert data.card["truth"] == 4 and data.card["channels"] == (3 if "colour" in change else 1)
    counted = np.bincount(which)
    assert list(counted) == sorted(counted, reverse=True), "a later dialect is rarer"


def test_four_images_by_hand():
    """Dialect 2 turns images left and exchanges classes, 1 does neither; each is drawn twice."""
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


@pytest.mark.parametrize("form", ["mosaic", "cells"])
def test_a_label_is_the_marked_cells_or_every_cell_has_one_by_its_dialect(tmp_path, digits, form):
    source, data = prepared(tmp_path, form=form)
    planes = 3 if form == "mosaic" else 2
    assert (data.card["channels"], data.card["size"]) == (planes - 1, 16)
    images = np.asarray(data.test.images).reshape(-1, planes, 2, 8, 2, 8)
    cells = images.transpose(0, 2, 4, 1, 3, 5).reshape(-1, planes, 8, 8)
    assert (cells[:, 1:] == cells[:, 1:, :1, :1]).all()
    if form == "mosaic":
        mark = cells[:, 1, 0, 0] == 255
        assert (mark.reshape(-1, 4).sum(axis=1) == 1).all()
        cells = cells[mark]
    drawn, words = spoken(source)
    which = cells[:, -1, 0, 0].astype(int) - 1
    same = are_in_dialects(drawn, cells[:, :1], which, digits.test.images)
    named = words[which][:, digits.test.labels] == data.test.labels.reshape(-1, 1)
    assert (named & same).any(axis=1).all()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (dialects(zipf=3.0), "zipf: found 3.0, which leaves about 12 of the last dialect"),
        (dialects(change="rotation", dialects=9), "dialects: found 9; allowed: at most 8 of rot"),
        (
            dialects(change="rotation", dialects=10, families=10),
            "families: found 10; allowed: at most 8 of rotation",
        ),
        (Clusters(clusters=5, patch=3), "clusters: found 5; allowed: at most 4"),
        (Subspaces(rank=5, size=2), "rank: found 5; allowed: at most 4"),
    ],
)
def test_what_cannot_be_is_said_before_and_by_prepare(source, said, tmp_path):
    assert source.describe().problem.startswith(said)
    with pytest.raises(UserError, match=said):
        source.write(tmp_path)


def test_two_seeds_are_other_dialects(tmp_path):
    first, other = (prepared(tmp_path / str(seed), seed=seed)[1].test.images for seed in (0, 1))
    assert not np.array_equal(first, other)


def numbered(lines: list[list[int]] = LINES, times: int = 60) -> TokenizedText:
    words = np.array([word for line in lines for word in line] * times, dtype=np.int32)
    return TokenizedText(dict.fromkeys(SPLITS, words), VOCABULARY, {})


def test_a_cipher_exchanges_all_words_but_the_special_ones():
    drawn = draw_word_ciphers(3, 100, [0, 7], 0)
    assert drawn.dtype == np.int32 and (drawn[:, [0, 7]] == [0, 7]).all()
    assert (np.sort(drawn, axis=1) == np.arange(100)).all() and len(np.unique(drawn, axis=0)) == 3
    assert np.array_equal(drawn, draw_word_ciphers(3, 100, [0, 7], 0))
    assert not np.array_equal(drawn, draw_word_ciphers(3, 100, [0, 7], 1))


def test_words_and_truth_by_hand(monkeypatch):
    """Cipher 1 makes a b c d to b a d c, cipher 2 to d c b a; paragraphs are in 2, 1, 2, 2, …"""
    table = np.array([[0, 1, 3, 2, 5, 4], [0, 1, 5, 4, 3, 2]], dtype=np.int32)
    monkeypatch.setattr(ciphers, "draw_word_ciphers", lambda *_: table)
    written = Ciphers(dialects=2, **SMALL_TEXT).encrypt(numbered())
    said = []
    for split in SPLITS:
        words, kinds = written.tokens[split], written.truth[split]
        assert words.dtype == np.int32 and kinds.dtype == np.uint8
        assert not kinds[words == 0].any(), "no cipher follows <eos> yet"
        own = [kinds[start] for start in np.flatnonzero(np.append(True, words[:-1] == 0))]
        expected = [
            [[word if word < 2 else int(table[kind - 1, word]) for word in line], kind]
            for line, kind in zip(LINES * 60, own, strict=True)
        ]
        assert words.tolist() == [word for line, _ in expected for word in line]
        assert kinds.tolist() == [kind if word else 0 for line, kind in expected for word in line]
        said.append(own)
    assert 60 < sum(kind == 2 for kind in said[0]) < 120 and said[0] != said[1]


def test_undone_each_split_is_the_docstrings_own(tmp_path):
    source = Ciphers(packages=("networkx",), dialects=3, zipf=0.5, **SMALL_TEXT)
    source.write(tmp_path)
    data, plain = Prepared.open(tmp_path, verify=True), docstrings.DocstringSourceBase.read(source)
    back = draw_word_ciphers(3, data.task.outputs, [0, 1], 0).argsort(axis=1)
    lines = {}
    for split in SPLITS:
        words, kinds = data.tokens_with_kinds(split)
        assert np.array_equal(back[kinds.clip(1) - 1, words], plain.tokens[split])
        ends = np.flatnonzero(plain.tokens[split] == 0) + 1
        paragraphs = np.split(plain.tokens[split], ends)[:-1]
        lines[split] = {tuple(line) for line in paragraphs if 1 not in line}
        assert (np.diff(np.bincount(kinds)[1:]) < 0).all(), "a later cipher is rarer"
    assert not lines["train"] & lines["test"], "no test paragraph in training, in any cipher"
    foreseen = source.describe()
    assert foreseen.problem is None and foreseen.size == tuple(data.card["size"])
    for key in ("name", "truth", "channels"):
        assert getattr(foreseen, key) == data.card[key]


def test_windows_and_streams_say_the_kinds_after_the_words(tmp_path):
    written = Ciphers(dialects=2, **SMALL_TEXT).encrypt(numbered())
    source = Ciphers(dialects=2, **SMALL_TEXT)
    write_text(tmp_path, source, source.describe(), written)
    data = Prepared.open(tmp_path)
    words, kinds = written.tokens["test"], written.truth["test"]
    assert data.test.images.shape == (149, 4, 4)
    assert data.test.images[0].tolist()[::2] == [[-1] * 4] * 2
    told = [part[start : start + 4].tolist() for part in (words, kinds) for start in (16, 20)]
    assert data.test.images[5].tolist() == told
    assert np.array_equal(data.test.labels[5], words[21:25])
    read, following, _ = TextStreams(torch.from_numpy(data.tokens_with_kinds("train")), 4).take(
        2, 0, 1
    )
    train = [written.tokens["train"], written.truth["train"]]
    assert read[1].tolist() == [part[304:308].tolist() for part in train]
    assert following[1].tolist() == train[0][305:309].tolist()


def test_rare_words_are_unknown_and_too_few_paragraphs_are_refused():
    written = Ciphers(dialects=2, words=4, **SMALL_TEXT).encrypt(numbered())
    words = written.tokens["test"]
    assert written.vocabulary == VOCABULARY[:4] and words.max() == 3
    hidden = [line.count(4) + line.count(5) + line.count(1) for line in LINES]
    assert (words == 1).sum() == 60 * sum(hidden)
    assert written.truth["test"][words == 1].all(), "an unknown word is of its paragraph's cipher"
    with pytest.raises(UserError, match="zipf: found 3.0, which leaves about 2 of the last dial"):
        Ciphers(dialects=4, zipf=3.0, **SMALL_TEXT).encrypt(numbered())


def prepared_vectors(source: base.DrawnSource, folder) -> Prepared:
    source.write(folder)
    return Prepared.open(folder)


def unpacked(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return values in −1 to 1, (n, S, S), and kinds from 0, (n,)."""
    truth = split.images[:, 1]
    assert (truth == truth[:, :1, :1]).all()
    return (split.images[:, 0] - 128.0) / 127, truth[:, 0, 0].astype(int) - 1


def test_a_cluster_is_its_centre_and_the_label_its_features_sign(tmp_path):
    source = Clusters(**FEW, clusters=3, grid=3)
    directions = np.concatenate(source._seeded_rule())
    assert np.allclose(directions @ directions.T, np.eye(6))
    split = prepared_vectors(source, tmp_path).test
    values, kinds = unpacked(split)
    patches = values.reshape(-1, 3, 7, 3, 7).swapaxes(2, 3).reshape(-1, 9, 49)
    parts = patches * 2 * np.abs(directions).max() @ directions.T  # (n, 9, 6)
    rows = np.arange(len(kinds))
    # patches that are one direction alone: what is left of them is rounding
    alone = np.abs(patches * 2 * np.abs(directions).max() - parts @ directions).max(axis=-1) < 0.01
    assert (alone.sum(axis=1) == 3).all(), "the feature, the centre, the other's feature"
    strengths = np.where(alone[..., None], parts, 0).sum(axis=1)  # (n, 6)
    there = np.abs(strengths) > 0.3
    assert (there[:, :3].sum(axis=1) == 2).all() and (there[:, 3:].sum(axis=1) == 1).all()
    assert (there[:, 3:].argmax(axis=1) == kinds).all()
    assert ((strengths[rows, kinds] > 0) == split.labels).all()
    assert np.abs(strengths[there]).min() > 0.48 and np.abs(strengths).max() < 2.02
    places = alone[:, :, None] & (np.abs(parts[..., 3:]) > 0.3)
    assert (places.any(axis=2).sum(axis=0) > 60).all(), "a centre lies anywhere"


def test_a_linear_map_is_bound_by_the_theorem_and_those_of_each_cluster_are_not(tmp_path):
    data = prepared_vectors(Clusters(**FEW), tmp_path)
    (train, train_kinds), (test, kinds) = unpacked(data.train), unpacked(data.test)
    train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    from sklearn.linear_model import LogisticRegression  # its import takes a second

    one = LogisticRegression(max_iter=200).fit(train, data.train.labels)
    assert one.score(test, data.test.labels) <= 0.875
    for kind in range(4):
        own, there = train_kinds == kind, kinds == kind
        each = LogisticRegression(max_iter=200).fit(train[own], data.train.labels[own])
        assert each.score(test[there], data.test.labels[there]) > 0.97


def test_a_point_lies_in_its_subspace_and_its_label_is_the_largest_coordinate(tmp_path):
    source = Subspaces(**FEW, subspaces=5, rank=3, noise=0)
    bases = source._seeded_rule()
    split = prepared_vectors(source, tmp_path).test
    values, kinds = unpacked(split)
    points = values.reshape(-1, 36)
    inside = np.einsum("kdr,nd->nkr", bases, points)  # of every subspace
    left = np.linalg.norm(points[:, None] - np.einsum("kdr,nkr->nkd", bases, inside), axis=2)
    whole = (np.abs(points) < 0.999).all(axis=1)  # nothing clipped
    assert whole.mean() > 0.9 and (left.argmin(axis=1) == kinds)[whole].mean() > 0.99
    own = inside[np.arange(len(kinds)), kinds]
    clear = np.diff(np.sort(own, axis=1)[:, 1:])[:, 0] > 0.02  # more than rounding
    assert (own.argmax(axis=1) == split.labels)[clear & whole].all() and clear.mean() > 0.9


@pytest.mark.parametrize("source", [Clusters(**FEW), Subspaces(**FEW)])
def test_splits_are_apart_and_as_foreseen(source, tmp_path):
    data = check_source(source, tmp_path)
    together = np.concatenate([getattr(data, name).images for name in SPLITS])
    assert len(np.unique(together.reshape(len(together), -1), axis=0)) == sum(FEW.values())
    assert data.card["truth"] == len(np.unique(data.test.images[:, 1]))
    other = prepared_vectors(source.model_copy(update={"seed": 1}), tmp_path / "other").test
    assert not np.array_equal(other.images, data.test.images)
