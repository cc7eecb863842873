"""Rendered characters: matplotlib's DejaVu fonts, and Debian's Noto fonts where installed."""

import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from moecore.core.files import UserError
from moecore.data.card import SPLITS
from moecore.data.files.fonts import fingerprint_drawings, read_fonts, warp_glyph
from moecore.data.prepared import Prepared
from moecore.data.raw_data_changes import describe_change, scan_raw_folders
from moecore.data.sources.scripts import Scripts
from moecore.data.volumes.cohorts import read_subject_rows
from moecore.testing import check_source

DEJAVU = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
STYLES = ("Sans Book", "Sans Bold", "Serif Book", "Sans Mono Book")
NOTO = [Path("data/raw/fonts").absolute(), Path("/usr/share/fonts/truetype/noto")]
CYRILLIC = {"scripts": ("Cyrillic", "Armenian"), "characters": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fonts")
    shipped = Path(matplotlib.get_data_path(), "fonts/ttf")
    for name in DEJAVU:
        shutil.copy(shipped / name, folder)
    return folder


def read_table(data: Prepared, split: str) -> list[dict[str, str]]:
    return read_subject_rows(data.folder / f"{split}_renderings.csv")


def test_labels_truth_and_table_agree(folder, tmp_path):
    data = check_source(Scripts(root=str(folder), train=5, **CYRILLIC), tmp_path)
    assert data.card["truth"] == 2 and data.card["scripts"] == ["Armenian", "Cyrillic"]
    fonts = data.card["fonts"]
    assert fonts["folder"] == str(folder) and len(fonts["sha256"]) == 64 and fonts["pillow"]
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


def test_a_rendering_depends_on_seed_character_and_number_alone(folder, tmp_path):
    def images_of(name: str, **changes) -> dict[tuple[str, int], bytes]:
        Scripts(root=str(folder), **{**CYRILLIC, **changes}).write(tmp_path / name)
        data = Prepared.open(tmp_path / name)
        labels = np.asarray(data.train.labels)
        numbers = np.arange(len(labels)) - np.searchsorted(labels, labels)
        keys = zip((data.task.classes[label] for label in labels), numbers.tolist(), strict=True)
        return dict(zip(keys, map(bytes, data.train.images[:, 0]), strict=True))

    first = images_of("first", train=4)
    more = images_of("more", train=6, characters=60)
    assert len(set(first.values())) == len(first) == 160 and first.items() <= more.items()
    other = images_of("other", seed=1, train=4, characters=60)
    assert not set(other.values()) & set(more.values())


def test_fonts_of_the_test_are_new(folder, tmp_path):
    data = check_source(Scripts(root=str(folder), split="fonts", **CYRILLIC), tmp_path)
    train, validation, test = ({row["font"] for row in read_table(data, name)} for name in SPLITS)
    assert len(test) == 1 and validation <= train and not test & train


def test_of_letters_that_look_alike_only_one_is_a_class(folder):
    settings = Scripts(root=str(folder), scripts=("Latin", "Greek", "Cyrillic"))
    classes = settings.describe().classes
    assert len({"U+0041", "U+0391", "U+0410"} & set(classes)) == 1, "A, Alpha and A"
    font = read_fonts(folder)[1][0]
    assert fingerprint_drawings([font], ord(" "), 28) is None
    assert ord("1") not in font.letters and ord("a") in font.letters


def test_scripts_by_rank_share_none(folder):
    def scripts_of(**settings) -> set[str]:
        card = Scripts(root=str(folder), per_script=5, **settings).describe()
        assert max(card.images.values()) == 12 * len(card.classes) and not card.problem
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
def test_what_fonts_lack_is_named(folder, settings, said):
    card = Scripts(**{"root": str(folder), **settings}).describe()
    with pytest.raises(UserError, match=said) as error:
        card.without_problem()
    assert "\n" not in str(error.value)


def test_folders_that_are_refused(folder, tmp_path):
    settings = Scripts(root=str(tmp_path), split="fonts")
    with pytest.raises(UserError, match=f"{tmp_path}: found no font; allowed: one or more files"):
        settings.write(tmp_path / "out")
    shutil.copy(folder / DEJAVU[0], tmp_path)
    with pytest.raises(UserError, match="found 2, but .* has 0 characters in two font families"):
        settings.write(tmp_path / "out")
    (tmp_path / "b.ttf").write_text("no font", encoding="utf-8")
    with pytest.raises(UserError, match=r"b.ttf: found no font \(.*\); allowed: a TrueType or"):
        settings.write(tmp_path / "out")
    with pytest.raises(ValueError, match="greater than or equal to 12"):
        Scripts(size=11)


def test_a_changed_folder_is_noticed(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "fonts")
    settings = Scripts(root=str(copied), **CYRILLIC)
    before = settings.describe().more["fonts"]["sha256"]
    (fingerprint,) = scan_raw_folders(settings)
    assert describe_change(fingerprint._asdict()) is None
    (copied / DEJAVU[1]).unlink()
    assert "found 3 files" in str(describe_change(fingerprint._asdict()))
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
