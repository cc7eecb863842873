import json
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from moecore import Prepared, UserError
from moecore.data import loader, raw_data_changes, stratified_splits
from moecore.data.prepared import SPLITS
from moecore.data.sources import mosaic
from moecore.data.sources.mosaic import Mosaic, compose_mosaics, draw_mosaic_members
from moecore.data.sources.scripts import glyph_checksum_per_font, read_fonts_and_hash, warp_glyph
from moecore.data.text.tokenizers import load_tokenizer
from moecore.data.volumes.participants import read_prepared_csv_rows
from moecore.report.figures.overview import draw_dataset_samples
from moecore.sources import CocoCaptions, Digits, Flickr30k, Scripts
from moecore.tasks.multi_label import MultiLabel
from moecore.testing import check_source

SOURCE = {"kind": "digits", "size": 6, "seed": 3}
SETTINGS = Mosaic(source=SOURCE, train=300, validation=60, test=70, seed=1)
COLOURS = ("red", "green", "blue", "white", "black")
DEJAVU = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
STYLES = ("Sans Book", "Sans Bold", "Serif Book", "Sans Mono Book")
NOTO = [Path("data/raw/fonts").absolute(), Path("/usr/share/fonts/truetype/noto")]
CYRILLIC = {"scripts": ("Cyrillic", "Armenian"), "characters": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The mosaics, and their source prepared alone."""
    home = tmp_path_factory.mktemp("mosaic")
    SETTINGS.write(home / "mosaic")
    Digits.model_validate(SOURCE).write(home / "source")
    return home


def test_cells_lie_row_by_row_and_their_rows_and_columns_stay():
    # cells 1 2 3 4 of one pixel, two channels (the second + 10), in a grid of 2
    cells = np.array([[1, 11], [2, 12], [3, 13], [4, 14]], np.uint8)[None, :, :, None, None]
    assert compose_mosaics(cells, 2).tolist() == [[[[1, 2], [3, 4]], [[11, 12], [13, 14]]]]
    cells = np.arange(4 * 6, dtype=np.uint8).reshape(1, 4, 1, 2, 3)
    # cell 0: 0 1 2 / 3 4 5, cell 1: 6 7 8 / 9 10 11 to its right, cell 2 below cell 0
    rows = [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    rows += [[12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23]]
    assert compose_mosaics(cells, 2)[0, 0].tolist() == rows


def test_labels_are_the_classes_that_occur():
    hot = mosaic.multi_hot_labels(np.array([[0, 2, 2, 0], [1, 1, 1, 1]]), 4)
    assert hot.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
def test_draws_differ_within_a_mosaic_and_use_all_images_evenly(total, number, cells, seed):
    if total < cells:
        said = f"a mosaic has {cells} cells, but split of the source has {total} images"
        with pytest.raises(UserError, match=said):
            draw_mosaic_members(total, number, cells, [seed])
        return
    drawn = draw_mosaic_members(total, number, cells, [seed])
    assert drawn.shape == (number, cells) and all(len(set(row)) == cells for row in drawn.tolist())
    assert 0 <= drawn.min() and drawn.max() < total
    assert np.bincount(drawn.ravel()).max() <= -(-number // (total // cells))
    more = draw_mosaic_members(total, number + 7, cells, [seed])
    assert np.array_equal(more[:number], drawn), "more mosaics begin with the same ones"


def test_draws_depend_on_the_seed():
    one, other = (draw_mosaic_members(50, 10, 4, [seed, 4]) for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert len(np.unique(draw_mosaic_members(50, 12, 4, [0]))) == 48


def test_every_cell_is_an_image_of_its_split_and_the_labels_are_theirs(folder):
    made = Prepared.open(folder / "mosaic", verify=True)
    source = Prepared.open(folder / "source")
    known = {}
    for name in SPLITS:
        images, labels = getattr(source, name)[:2]
        known[name] = dict(zip(map(bytes, images), labels, strict=True))
    for name, number in (("train", 300), ("validation", 60), ("test", 70)):
        images, labels = getattr(made, name)[:2]
        assert images.shape == (number, 1, 12, 12) and labels.shape == (number, 10)
        assert labels.dtype == np.uint8
        for image, found in zip(images, labels, strict=True):
            expected = set()
            for top in (0, 6):
                for left in (0, 6):
                    cell = np.ascontiguousarray(image[:, top : top + 6, left : left + 6]).tobytes()
                    expected.add(int(known[name][cell]))  # KeyError: not of this split
                    assert not any(cell in known[other] for other in SPLITS if other != name)
            assert set(np.flatnonzero(found)) == expected


def test_splits_of_one_size_are_drawn_apart(tmp_path, monkeypatch):
    seen = {}
    spy = lambda *words: seen.setdefault(tuple(words[3]), draw_mosaic_members(*words))
    monkeypatch.setattr("moecore.data.sources.mosaic.draw_mosaic_members", spy)
    SETTINGS.write(tmp_path)
    assert len(seen) == 3


def test_grids_of_one_and_of_three_and_what_does_not_fit(tmp_path):
    one = Mosaic(source=SOURCE, grid=1, train=200, validation=100, test=100).write(tmp_path / "1")
    assert one["size"] == 6 and sum(one["counts"]["train"].values()) == 200
    three = Mosaic(source=SOURCE, grid=3, train=40, validation=40, test=40).write(tmp_path / "3")
    assert three["size"] == 18
    large = Mosaic(source=SOURCE | {"train_limit": 50}, grid=8, train=2, validation=2, test=2)
    with pytest.raises(UserError, match="a mosaic has 64 cells, but train of the source has 50"):
        large.write(tmp_path)
    for wrong in ({"grid": 0}, {"source": {"kind": "imagenet"}}, {"train": 0}, {"cell": 3}):
        with pytest.raises(ValidationError):
            Mosaic.model_validate({"source": SOURCE} | wrong)


def test_the_contact_sheet_shows_images_with_the_class(folder):
    made = Prepared.open(folder / "mosaic")
    sheet = draw_dataset_samples(made, shots=2)
    for digit in range(10):
        first = np.flatnonzero(made.train.labels[:, digit])[0]
        shown = sheet.axes[2 * digit].images[0].get_array()
        assert np.array_equal(shown, made.train.images[first, 0])


def test_helpers_that_need_one_label_refuse_sets(folder):
    split = Prepared.open(folder / "mosaic").train
    with pytest.raises(UserError, match="these images have several labels each; allowed: null"):
        loader.few_shot_indices(MultiLabel(classes=tuple("0123456789")), split.labels, 5, 0)
    with pytest.raises(UserError, match="several labels have no split by class"):
        stratified_splits.stratified_split(split.labels, 0.5, 0)
    images, labels = loader.load_split_where_it_fits(split, "cpu").take(torch.tensor([7, 3]))
    assert np.array_equal(labels.numpy(), split.labels[[7, 3]]) and images.shape == (2, 1, 12, 12)


def picture(path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((20, 30, 3), number * 9 % 256, np.uint8)).save(path)


def coco(root, number: int = 20, year: str = "train2014", first: int = 0):
    """An annotation file in COCO's form and its images; captions in another order than images."""
    ids = range(first, first + number)
    images = [{"id": one, "file_name": f"COCO_{one:012d}.png"} for one in ids]
    for image in images:
        picture(root / year / image["file_name"], image["id"])
    said = [
        {"id": 10 * one + place, "image_id": one, "caption": f"A {COLOURS[place]} thing {one}.\n"}
        for place in range(5)
        for one in reversed(ids)
    ]
    path = root / f"captions_{year}.json"
    path.write_text(json.dumps({"images": images, "annotations": said}), encoding="utf-8")
    return path


def split_file(root, name: str, folder: str):
    splits = ("train", "restval", "val", "test")
    images = []
    for number in range(16):
        file = f"{number:04d}.png"
        picture(root / folder / file, number)
        raw = [{"raw": f"picture {number} wording {place}"} for place in range(6)]
        image = {"filename": file, "split": splits[number % 4], "sentences": raw}
        images.append(image | ({"filepath": folder} if folder else {}))
    path = root / name
    path.write_text(json.dumps({"images": images, "dataset": "x"}), encoding="utf-8")
    return path


def spoken(data: Prepared, split: str, image: int, place: int) -> str:
    words = load_tokenizer(data.folder, data.task).vocabulary
    tokens = getattr(data, split).labels[image, place]
    return " ".join(words[token] for token in tokens if token > 2)


def test_coco_by_its_annotations(tmp_path):
    annotations = tuple(map(str, (coco(tmp_path), coco(tmp_path, 5, "val2014", first=100))))
    source = CocoCaptions(root=str(tmp_path), annotations=annotations, size=8, context=10, test=0.2)
    data = check_source(source, tmp_path / "out")
    assert data.card["images"] == {"train": 18, "validation": 2, "test": 5}
    for split in ("train", "test"):
        part = getattr(data, split)
        for image in range(len(part.labels)):
            words = [spoken(data, split, image, place).split() for place in range(5)]
            number = words[0][-2]  # "a red thing 7 ."
            assert [one[1] for one in words] == list(COLOURS)
            if split == "train":
                assert {one[-2] for one in words} == {number}
                assert part.images[image, 0, 4, 4] == int(number) * 9 % 256
    again = CocoCaptions.model_validate(source.model_dump() | {"seed": 1})
    assert not np.array_equal(check_source(again, tmp_path / "more").test.images, data.test.images)


@pytest.mark.parametrize("kind", ["coco", "flickr"])
def test_karpathys_split(tmp_path, kind):
    path = split_file(tmp_path, f"dataset_{kind}.json", "val2014" if kind == "coco" else "")
    source = CocoCaptions if kind == "coco" else Flickr30k
    settings = source(root=str(tmp_path), karpathy=str(path), size=8, context=8)
    data = check_source(settings, tmp_path / "out")
    # restval is training; of six sentences the first five count
    assert data.card["images"] == {"train": 8, "validation": 4, "test": 4}
    # 7, 11 and 15 are in no training caption; 3 numbers a wording there
    assert data.card["counts"]["test"] == {"captions": 20, "cut": 0, "unknown": 3 * 5}
    assert spoken(data, "train", 1, 4) == "picture 1 wording 4"
    assert data.train.images[1, 0, 0, 0] == 9


def token_file(root, lines=None):
    for number in range(10):
        picture(root / f"{number}.png", number)
    if lines is None:
        lines = [f"{n}.png#{k}\tA man {COLOURS[k]} ." for n in range(10) for k in range(5)]
    path = root / "results.token"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_flickrs_token_file(tmp_path):
    captions = str(token_file(tmp_path))
    settings = Flickr30k(root=str(tmp_path), captions_file=captions, size=8, context=5)
    data = check_source(settings, tmp_path / "out")
    assert data.card["images"] == {"train": 8, "validation": 1, "test": 1}
    # a man red . are four words; three have room
    assert data.card["counts"]["test"] == {"captions": 5, "cut": 5, "unknown": 0}
    assert spoken(data, "test", 0, 1) == "a man green"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c["annotations"].clear(), "COCO_000000000000.png': has no caption"),
        (lambda c: c["images"].pop(), "found a caption of image 19, which is not listed"),
        (lambda c: c.pop("images"), "no captions of COCO's: lacks or has an odd 'images'"),
        (lambda c: c["images"][0].update(file_name="../../etc/passwd"), "leads out of this folder"),
        (
            lambda c: c["annotations"][0].update(caption=None),
            "odd caption, None, which is not text",
        ),
    ],
)
def test_odd_annotations_are_refused(tmp_path, edit, says):
    path = coco(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    one = {"annotations": (str(path),), "folders": ("train2014",)}
    settings = CocoCaptions(root=str(tmp_path), size=8, **one)
    with pytest.raises(UserError, match=says):
        settings.write(tmp_path / "out")
    assert says.split()[-1] in str(settings.describe().problem)


def test_files_that_are_none_are_named(tmp_path):
    torn = tmp_path / "captions_train2014.json"
    torn.write_text("[1", encoding="utf-8")
    one = {"root": str(tmp_path), "folders": ("train2014",)}
    with pytest.raises(UserError, match=r"captions_train2014\.json: not valid JSON"):
        CocoCaptions(**one, annotations=(str(torn),)).read()
    with pytest.raises(UserError, match="give `annotations` or `karpathy`, one of them"):
        CocoCaptions(**one).read()
    with pytest.raises(UserError, match="found 1 annotations and 2 folders; allowed: equally many"):
        CocoCaptions(root=str(tmp_path), annotations=(str(torn),)).read()
    with pytest.raises(UserError, match=r"dataset\.json: no such file; fetch the annotations"):
        CocoCaptions(root=str(tmp_path), karpathy=str(tmp_path / "dataset.json")).read()


@pytest.fixture(scope="module")
def shipped_fonts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fonts")
    shipped = Path(matplotlib.get_data_path(), "fonts/ttf")
    for name in DEJAVU:
        shutil.copy(shipped / name, folder)
    return folder


def read_table(data: Prepared, split: str) -> list[dict[str, str]]:
    return read_prepared_csv_rows(data.folder / f"{split}_renderings.csv")


def test_labels_truth_and_table_agree(shipped_fonts, tmp_path):
    data = check_source(Scripts(root=str(shipped_fonts), train=5, **CYRILLIC), tmp_path)
    assert data.card["truth"] == 2 and data.card["scripts"] == ["Armenian", "Cyrillic"]
    fonts = data.card["fonts"]
    assert fonts["folder"] == str(shipped_fonts) and len(fonts["sha256"]) == 64 and fonts["pillow"]
    for split, number in zip(SPLITS, (5, 3, 3), strict=True):
        part, rows = getattr(data, split), read_table(data, split)
        assert np.array_equal(part.labels, np.arange(40).repeat(number))
        names = [data.task.classes[label] for label in part.labels]
        assert names == [f"U+{ord(row['character']):04X}" for row in rows]
        truth = [data.card["scripts"].index(row["script"]) + 1 for row in rows]
        assert (part.images[:, 1] == np.array(truth)[:, None, None]).all()
        assert (part.images[:, 0].max(axis=(1, 2)) > 100).all()
        assert (part.images[:, 0, [0, -1]] == 0).mean() > 0.8, "characters are white on black"
    fonts = {f"{row['font']} {row['style']}" for row in read_table(data, "train")}
    assert fonts == {f"DejaVu {name}" for name in STYLES}


def test_a_rendering_depends_on_seed_character_and_number_alone(shipped_fonts, tmp_path):
    def images_of(name: str, **changes) -> dict[tuple[str, int], bytes]:
        Scripts(root=str(shipped_fonts), **{**CYRILLIC, **changes}).write(tmp_path / name)
        data = Prepared.open(tmp_path / name)
        labels = np.asarray(data.train.labels)
        numbers = np.arange(len(labels)) - np.searchsorted(labels, labels)
        keys = zip((data.task.classes[label] for label in labels), numbers.tolist(), strict=True)
        return dict(zip(keys, map(bytes, data.train.images[:, 0]), strict=True))

    first = images_of("first", train=4)
    more = images_of("more", train=6, characters=60)
    assert len(set(first.values())) == len(first) == 160 and first.items() <= more.items()
    assert not set(images_of("other", seed=1, train=4, characters=60).values()) & set(more.values())


def test_fonts_of_the_test_are_new_and_of_letters_alike_one_is_a_class(shipped_fonts, tmp_path):
    data = check_source(Scripts(root=str(shipped_fonts), split="fonts", **CYRILLIC), tmp_path)
    train, validation, test = ({row["font"] for row in read_table(data, name)} for name in SPLITS)
    assert len(test) == 1 and validation <= train and not test & train
    settings = Scripts(root=str(shipped_fonts), scripts=("Latin", "Greek", "Cyrillic"))
    classes = settings.describe().classes
    assert len({"U+0041", "U+0391", "U+0410"} & set(classes)) == 1, "A, Alpha and A"
    font = read_fonts_and_hash(shipped_fonts)[1][0]
    assert glyph_checksum_per_font([font], ord(" "), 28) is None
    assert ord("1") not in font.letters and ord("a") in font.letters


def test_scripts_by_rank_share_none(shipped_fonts):
    def scripts_of(**settings) -> set[str]:
        card = Scripts(root=str(shipped_fonts), per_script=5, **settings).describe()
        assert max(card.image_counts.values()) == 12 * len(card.classes) and not card.problem
        assert len(card.classes) <= 5 * len(card.more["scripts"])
        return set(card.more["scripts"])

    first, second = scripts_of(ranks=(1, 2)), scripts_of(ranks=(3, 6))
    assert "Latin" in first and len(first) == 2 and len(second) == 4 and not first & second
    assert scripts_of(ranks=(1, 2), without=("Latin",)) == first - {"Latin"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scripts": ("Armenia",)}, "scripts: found Armenia; allowed: Arabic, Armenian, "),
        ({"without": ("Klingon",)}, "scripts: found Klingon; allowed: Arabic"),
        ({"ranks": (3, 99)}, "ranks: found 3 to 99; allowed: 1 to "),
        ({"scripts": ("Lao",), "characters": 999}, "found 999, but .*/fonts0 has 40 characters"),
        ({"sha256": "0"}, "/fonts[0-9]*: found fonts with sha256 [0-9a-f]{64}; allowed: 0, see"),
        ({"root": "absent"}, "absent: no such folder; set `root` to a folder of fonts, such as"),
    ],
)
def test_what_fonts_lack_is_named(shipped_fonts, settings, said):
    card = Scripts(**{"root": str(shipped_fonts), **settings}).describe()
    with pytest.raises(UserError, match=said) as error:
        card.check_has_no_problem()
    assert "\n" not in str(error.value)


def test_folders_that_are_refused(shipped_fonts, tmp_path):
    settings = Scripts(root=str(tmp_path), split="fonts")
    with pytest.raises(UserError, match=f"{tmp_path}: found no font; allowed: one or more files"):
        settings.write(tmp_path / "out")
    shutil.copy(shipped_fonts / DEJAVU[0], tmp_path)
    with pytest.raises(UserError, match="found 2, but .* has 0 characters in two font families"):
        settings.write(tmp_path / "out")
    (tmp_path / "b.ttf").write_text("no font", encoding="utf-8")
    with pytest.raises(UserError, match=r"b.ttf: found no font \(.*\); allowed: a TrueType or"):
        settings.write(tmp_path / "out")
    with pytest.raises(ValueError, match="greater than or equal to 12"):
        Scripts(size=11)


def test_a_changed_folder_is_noticed(shipped_fonts, tmp_path):
    copied = shutil.copytree(shipped_fonts, tmp_path / "fonts")
    settings = Scripts(root=str(copied), **CYRILLIC)
    before = settings.describe().more["fonts"]["sha256"]
    (fingerprint,) = raw_data_changes.fingerprint_raw_folders(settings)
    assert raw_data_changes.describe_folder_change(fingerprint._asdict()) is None
    (copied / DEJAVU[1]).unlink()
    assert "found 3 files" in str(raw_data_changes.describe_folder_change(fingerprint._asdict()))
    assert settings.describe().more["fonts"]["sha256"] != before


@pytest.mark.skipif(
    not any(root.is_dir() for root in NOTO),
    reason="Debian's package fonts-noto-core is not here; `make data` fetches it",
)
def test_noto_has_the_scripts_of_the_world(tmp_path):
    settings = Scripts(root=tuple(map(str, NOTO)), per_script=1, train=1, validation=1, test=1)
    data = check_source(settings, tmp_path)
    assert data.card["truth"] == len(data.card["scripts"]) > 110


def test_letters_shrink_by_up_to_a_third():
    block = Image.new("L", (30, 30), 255)

    def ink(distortion: float) -> float:
        draws = [np.random.default_rng(seed) for seed in range(50)]
        return np.mean([warp_glyph(block, 28, distortion, draw).sum() for draw in draws])

    # E (1 − 0.3 u)² = 1 − 0.3 + 0.09 / 3 for u from 0 to 1; the shear leaves the area as it is
    assert ink(1.0) / ink(0.0) == pytest.approx(0.73, abs=0.04)
