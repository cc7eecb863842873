"""Class folders of image files: splits, damage, resuming after a kill."""

import shutil

import numpy as np
import pytest
from PIL import Image

from moecore.core.files import UserError
from moecore.data.files import decode_cache
from moecore.data.files.decode import decode_image
from moecore.data.prepared import Prepared
from moecore.data.sources.image_folder import ImageFolder
from moecore.data.sources.imagenet import Imagenet
from tests.data.making import image_classes


@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_without_splits(tmp_path, channels):
    image_classes(tmp_path / "raw", {"cat": 20, "dog": 30})
    settings = ImageFolder(root=str(tmp_path / "raw"), size=8, channels=channels, licence="ours")
    card = settings.prepare(tmp_path / "out")
    assert card["counts"] == {
        "train": {"cat": 14, "dog": 22},
        "validation": {"cat": 2, "dog": 2},
        "test": {"cat": 4, "dog": 6},
    }
    assert card["task"]["classes"] == ["cat", "dog"] and card["licence"] == "ours"
    assert Prepared.open(tmp_path / "out").train.images.shape == (36, channels, 8, 8)
    assert settings.prepare(tmp_path / "again") == card
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*card["files"], "card.json"]
    )


@pytest.mark.parametrize("name", ["validation", "val"])
def test_image_folder_with_splits(tmp_path, name):
    for part, number in (("train", 9), (name, 4), ("test", 3)):
        image_classes(tmp_path / part, {"a": number, "b": number}, suffix=".jpg")
    card = ImageFolder(root=str(tmp_path), size=8, test_limit=4, train_limit=10).prepare(
        tmp_path / "out"
    )
    assert [list(card["counts"][split].values()) for split in ("train", "validation", "test")] == [
        [5, 5],
        [4, 4],
        [2, 2],
    ]


def test_every_bad_image_is_listed_or_skipped(tmp_path):
    image_classes(tmp_path / "raw", {"a": 20, "b": 20})
    whole = (tmp_path / "raw/a/001.png").read_bytes()
    (tmp_path / "raw/a/001.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "raw/b/002.png").write_bytes(b"not an image")
    Image.new("F", (9, 9)).save(tmp_path / "raw/b/003.tif")
    (tmp_path / "raw/b/003.png").unlink()
    with pytest.raises(UserError) as error:
        ImageFolder(root=str(tmp_path / "raw"), size=8).prepare(tmp_path / "out")
    for word in (
        "3 image files cannot be read",
        "a/001.png: ",
        "b/002.png: cannot identify",
        "b/003.tif: has mode F; allowed: 8 or 16 bits",
    ):
        assert word in str(error.value)
    card = ImageFolder(root=str(tmp_path / "raw"), size=8, validation=0.3, on_error="skip").prepare(
        tmp_path / "out"
    )
    assert sum(sum(counts.values()) for counts in card["counts"].values()) == 37


def test_wrong_folders_are_named(tmp_path):
    image_classes(tmp_path / "raw/train", {"a": 9, "b": 9})
    image_classes(tmp_path / "raw/test", {"a": 3, "c": 3})
    with pytest.raises(UserError, match="test: class folders differ; lacking: b; unknown: c"):
        ImageFolder(root=str(tmp_path / "raw")).prepare(tmp_path / "out")
    (tmp_path / "empty/a").mkdir(parents=True)
    (tmp_path / "empty/b").mkdir()
    with pytest.raises(UserError, match="no image in class a, b"):
        ImageFolder(root=str(tmp_path / "empty")).prepare(tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        ImageFolder(root=str(tmp_path / "nowhere")).prepare(tmp_path / "out")


def test_short_side_and_centre_crop(tmp_path):
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = (200, 100, 50)  # the centre square has one colour
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    decoded = decode_image(tmp_path / "wide.png", 10, 3)
    assert (decoded == np.array([200, 100, 50]).reshape(3, 1, 1)).all()


def test_a_rotated_photo_is_turned(tmp_path):
    pixels = np.zeros((8, 8), np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    assert (decode_image(tmp_path / "photo.png", 8, 1)[0, -1] == 255).all()


def imagenet_folder(root):
    image_classes(root / "train", {"n01440764": 12, "n01443537": 12}, suffix=".JPEG")
    image_classes(root / "val", {"n01440764": 4, "n01443537": 4}, suffix=".JPEG")


def test_imagenet_goes_on_after_a_kill(tmp_path, monkeypatch):
    imagenet_folder(tmp_path / "raw")
    settings = Imagenet(
        root=str(tmp_path / "raw"), cache=str(tmp_path / "cache"), size=8, validation=4
    )
    card = settings.prepare(tmp_path / "whole")
    assert [sum(card["counts"][split].values()) for split in ("train", "validation", "test")] == [
        20,
        4,
        8,
    ] and not (tmp_path / "cache").exists()

    decoded = []
    real = decode_image
    monkeypatch.setattr(decode_cache, "CHUNK", 5)

    def until_killed(path, *rest):
        if len(decoded) >= 12:
            raise KeyboardInterrupt
        decoded.append(path)
        return real(path, *rest)

    monkeypatch.setattr(decode_cache, "decode_image", until_killed)
    with pytest.raises(KeyboardInterrupt):
        settings.prepare(tmp_path / "killed")
    monkeypatch.setattr(
        decode_cache,
        "decode_image",
        lambda path, *rest: (decoded.append(path), real(path, *rest))[1],
    )
    assert settings.prepare(tmp_path / "resumed") == card
    assert 32 <= len(decoded) <= 32 + 5  # at most one chunk was decoded twice


def test_imagenet_starts_afresh_where_the_files_changed(tmp_path):
    imagenet_folder(tmp_path / "raw")
    cache = decode_cache.DecodeCache(tmp_path / "cache", 8, 3)
    paths = sorted((tmp_path / "raw/val").rglob("*.JPEG"))
    before = np.load(cache.decode("test", paths)[0]).copy()
    Image.new("RGB", (50, 50), "red").save(paths[3])
    after = np.load(cache.decode("test", paths)[0])
    assert (after[3, 0] > 250).all() and np.array_equal(before[:3], after[:3])


def test_imagenet_folders_are_checked(tmp_path):
    settings = Imagenet(root=str(tmp_path))
    with pytest.raises(UserError, match="found no folders train/ and val/"):
        settings.prepare(tmp_path / "out")
    imagenet_folder(tmp_path)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="val: holds no class folders"):
        settings.prepare(tmp_path / "out")
    (tmp_path / "val/goldfish").mkdir()
    with pytest.raises(UserError, match="folder goldfish is not a wnid"):
        settings.prepare(tmp_path / "out")


def test_folders_are_sought_from_the_repository(tmp_path, monkeypatch):
    image_classes(tmp_path / "home/raw", {"a": 10, "b": 10})
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path / "study")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "home"))
    ImageFolder(root="raw", size=8).prepare(tmp_path / "out")
