import hashlib
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moecore.core.files import UserError, file_checksum
from moecore.data import prepared
from moecore.data.files import decode, image_files_source
from moecore.data.files.decode import UnreadableImage, decode_image
from moecore.data.layouts.images import JpegImages
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.raw_data_changes import fingerprint_raw_folders
from moecore.data.sources import cifar, fashion_mnist
from moecore.data.sources.cifar import ARCHIVES, Cifar
from moecore.sources import Digits, FashionMnist, ImageFolder, Imagenet
from tests.data.making import cifar_content, fashion_folder, image_classes, photo_classes


def test_digits(tmp_path):
    Digits(size=16, seed=1).write(tmp_path)
    opened = Prepared.open(tmp_path)
    assert sum(len(split.labels) for split in opened[1:4]) == 1797
    assert opened.train.images.shape[1:] == (1, 16, 16) and opened.train.images.max() > 240
    # the set itself has hardly any doubles
    assert len(set(map(bytes, opened.train.images)) & set(map(bytes, opened.test.images))) <= 2


def test_digits_at_their_own_size_are_scaled_to_bytes(tmp_path):
    from sklearn.datasets import load_digits

    Digits().write(tmp_path)
    scaled = (load_digits().images * (255 / 16)).round().astype(np.uint8)
    assert set(map(bytes, Prepared.open(tmp_path).test.images)) <= set(map(bytes, scaled))


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(tmp_path / "raw", packed=packed))
    roots = (str(tmp_path / "absent"), str(tmp_path / "raw"))
    settings = FashionMnist(root=roots, train_limit=50, test_limit=20)
    card = settings.write(tmp_path / "out")
    opened = Prepared.open(tmp_path / "out", verify=True)
    assert [len(split.labels) for split in opened[1:4]] == [50, 20, 20]
    assert set(card["counts"]["train"].values()) == {5} and card["settings"]["train_limit"] == 50
    assert np.array_equal(np.unique(opened.test.labels), np.arange(10))


def test_some_classes_and_test_images_that_training_leaves_over(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(tmp_path / "raw"))
    kept = ("bag", "dress", "coat", "sandal", "shirt")
    root = str(tmp_path / "raw")
    settings = FashionMnist(root=root, train_limit=50, only_classes=kept, test_unused=True)
    assert settings.write(tmp_path / "out")["name"] == "Fashion-MNIST, 5 of 10 classes"
    splits = Prepared.open(tmp_path / "out")[1:4]
    # Of all 200 training images 20 validate and 50 train: 130 join the 60 test images. Then half of
    # the classes go.
    assert [len(split.labels) for split in splits] == [25, 10, 95]
    (train, labels), (test, test_labels) = settings.read_sets(tmp_path / "raw")
    known = dict(zip(map(bytes, [*train, *test]), [*labels, *test_labels], strict=True))
    pairs = [pair for split in splits for pair in zip(split.images, split.labels, strict=True)]
    seen = [(bytes(image), label) for image, label in pairs]
    names = settings.facts().classes
    assert all(names[known[image]] == settings.kept_classes[label] for image, label in seen)
    assert len(dict(seen)) == 130, "no image is in two splits"
    settings.model_copy(update={"only_classes": ()}).write(tmp_path / "whole")
    trained = {bytes(image) for image in Prepared.open(tmp_path / "whole").train.images}
    tested = {image for image, _ in seen[-95:]}
    assert not trained & tested, "who trains on all classes has seen no test image"
    assert settings.describe().image_counts == {"train": 25, "validation": 3000, "test": 31975}


def test_fashion_mnist_refuses_other_classes_and_other_content(tmp_path):
    for named in (["bag", "hat"], ["bag", "bag"], ["bag"]):
        with pytest.raises(ValueError, match="allowed: two or more of t-shirt, trouser"):
            FashionMnist(only_classes=named)
    fashion_folder(tmp_path)
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: has sha256"):
        FashionMnist(root=str(tmp_path)).write(tmp_path / "out")


def small_cifar(folder, monkeypatch, classes):
    """Binary files of 80 or 200 records each, in the authors' folder."""
    real = ARCHIVES[classes]
    train = dict.fromkeys(real.train, 80 if classes == 10 else 200)
    small = real._replace(train=train, test=dict.fromkeys(real.test, 200))
    monkeypatch.setitem(cifar.ARCHIVES, classes, small)
    (folder / real.folder).mkdir(parents=True)
    for seed, (name, number) in enumerate((small.train | small.test).items()):
        fine = np.arange(number) % classes
        if classes == 10:
            labels = fine[:, None]
        else:
            labels = np.stack([fine // 5, fine], 1)
        (folder / real.folder / name).write_bytes(cifar_content(labels, seed))
    return small


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_from_folder_and_archive(tmp_path, monkeypatch, classes):
    small = small_cifar(tmp_path / "raw", monkeypatch, classes)
    settings = Cifar(classes=classes, root=str(tmp_path / "raw"), validation=0.5)
    card = settings.write(tmp_path / "a")
    opened = Prepared.open(tmp_path / "a")
    record = (tmp_path / "raw" / small.folder / next(iter(small.test))).read_bytes()
    assert opened.test.images[0].tobytes() == record[small.label_bytes : small.label_bytes + 3072]
    assert opened.test.labels[1] == 1
    archive = tmp_path / "raw" / small.archive
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "raw" / small.folder, small.folder)
    monkeypatch.setitem(cifar.ARCHIVES, classes, small._replace(md5=file_checksum(archive, "md5")))
    shutil.rmtree(tmp_path / "raw" / small.folder)
    assert settings.write(tmp_path / "b") == card and len(card["task"]["classes"]) == classes


def test_cifar_damage_is_named(tmp_path, monkeypatch):
    small = small_cifar(tmp_path, monkeypatch, 10)
    path = tmp_path / small.folder / "data_batch_2.bin"
    content = path.read_bytes()
    settings = Cifar(root=str(tmp_path))
    foreign = b"\x0a" + content[1:]
    for damaged, said in ((content[:-5], f"{path}: expected {len(content)}"), (foreign, "0 to 10")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=said):
            settings.write(tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match="CIFAR-10 is not in"):
        settings.write(tmp_path / "out")
    archive = tmp_path / small.archive
    archive.write_bytes(b"no archive")
    with pytest.raises(UserError, match=f"{archive}: has md5 .*; published: {small.md5}"):
        settings.write(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1", "data_batch_1"]
)
def test_the_python_version_of_cifar_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match="python version of CIFAR is refused: it is pickle"):
        Cifar(root=str(tmp_path)).write(tmp_path / "out")


@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_without_splits(tmp_path, channels):
    image_classes(tmp_path / "raw", {"cat": 20, "dog": 30})
    settings = ImageFolder(root=str(tmp_path / "raw"), size=8, channels=channels, licence="ours")
    card = settings.write(tmp_path / "out")
    assert [tuple(card["counts"][split].values()) for split in SPLITS] == [(14, 22), (2, 2), (4, 6)]
    assert card["task"]["classes"] == ["cat", "dog"] and card["licence"] == "ours"
    assert Prepared.open(tmp_path / "out").train.images.shape == (36, channels, 8, 8)


@pytest.mark.parametrize("name", ["validation", "val"])
def test_image_folder_with_splits(tmp_path, name):
    for part, number in (("train", 9), (name, 4), ("test", 3)):
        image_classes(tmp_path / part, {"a": number, "b": number}, suffix=".jpg")
    source = ImageFolder(root=str(tmp_path), size=8, test_limit=4, train_limit=10)
    counts = source.write(tmp_path / "out")["counts"]
    assert [list(counts[split].values()) for split in SPLITS] == [[5, 5], [4, 4], [2, 2]]


def test_every_bad_image_is_listed_or_skipped(tmp_path):
    image_classes(tmp_path / "raw", {"a": 20, "b": 20})
    whole = (tmp_path / "raw/a/001.png").read_bytes()
    (tmp_path / "raw/a/001.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "raw/b/002.png").write_bytes(b"not an image")
    Image.new("F", (9, 9)).save(tmp_path / "raw/b/003.tif")
    (tmp_path / "raw/b/003.png").unlink()
    with pytest.raises(UserError) as error:
        ImageFolder(root=str(tmp_path / "raw"), size=8).write(tmp_path / "out")
    said = str(error.value)
    assert "3 image files cannot be read" in said and "a/001.png: " in said
    assert "b/002.png: cannot identify" in said and "b/003.tif: has mode F; allowed: 8 or" in said
    source = ImageFolder(root=str(tmp_path / "raw"), size=8, validation=0.3, on_error="skip")
    assert sum(source.write(tmp_path / "out")["images"].values()) == 37


def test_wrong_folders_are_named(tmp_path):
    image_classes(tmp_path / "raw/train", {"a": 9, "b": 9})
    image_classes(tmp_path / "raw/test", {"a": 3, "c": 3})
    with pytest.raises(UserError, match="test: class folders differ; lacking: b; unknown: c"):
        ImageFolder(root=str(tmp_path / "raw")).write(tmp_path / "out")
    (tmp_path / "empty/a").mkdir(parents=True)
    (tmp_path / "empty/b").mkdir()
    with pytest.raises(UserError, match="no image in class a, b"):
        ImageFolder(root=str(tmp_path / "empty")).write(tmp_path / "out")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for name in ("nowhere", "itself"):
        source = ImageFolder(root=str(tmp_path / name))
        assert source.name_licence_origin[0] == name and not fingerprint_raw_folders(source)
        with pytest.raises(UserError, match="no such folder"):
            source.write(tmp_path / "out")


def test_the_centre_is_cropped_and_a_rotated_photo_is_turned(tmp_path):
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = (200, 100, 50)  # the centre square has one colour
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    decoded = decode_image(tmp_path / "wide.png", 10, 3)
    assert (decoded == np.array([200, 100, 50]).reshape(3, 1, 1)).all()
    pixels = np.zeros((8, 8), np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    assert (decode_image(tmp_path / "photo.png", 8, 1)[0, -1] == 255).all()


def imagenet_folder(root):
    image_classes(root / "train", {"n01440764": 12, "n01443537": 12}, suffix=".JPEG")
    image_classes(root / "val", {"n01440764": 4, "n01443537": 4}, suffix=".JPEG")


def kill_after_12(monkeypatch, function: str, settings, folder) -> list:
    """Kill a ``write`` after 12 calls of decode.<function>; return the files of all its calls."""
    real, seen = getattr(decode, function), []

    def until_killed(path, *rest):
        if len(seen) >= 12:
            raise KeyboardInterrupt
        seen.append(path)
        return real(path, *rest)

    monkeypatch.setattr(decode, function, until_killed)
    with pytest.raises(KeyboardInterrupt):
        settings.write(folder)
    monkeypatch.setattr(decode, function, lambda *given: (seen.append(given[0]), real(*given))[1])
    return seen


def test_imagenet_goes_on_after_a_kill(tmp_path, monkeypatch):
    imagenet_folder(tmp_path / "raw")
    raw, cache = str(tmp_path / "raw"), str(tmp_path / "cache")
    settings = Imagenet(root=raw, cache=cache, size=8, validation=4)
    card = settings.write(tmp_path / "whole")
    assert card["images"] == {"train": 20, "validation": 4, "test": 8}
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(image_files_source, "CHUNK", 5)
    decoded = kill_after_12(monkeypatch, "decode_image", settings, tmp_path / "killed")
    assert settings.write(tmp_path / "resumed") == card
    # at most the chunk that was being written and the next one were decoded twice
    assert 32 <= len(decoded) <= 32 + 10


def test_changed_files_and_damaged_unfinished_work_are_decoded_again(tmp_path):
    imagenet_folder(tmp_path / "raw")
    cache = image_files_source.DecodeCache(tmp_path / "cache", 8, 3)
    paths = sorted((tmp_path / "raw/val").rglob("*.JPEG"))
    for make in (
        lambda: cache.decode("a", paths)[0],
        lambda: cache.pack_jpegs("b", paths, 32)[0].path,
    ):
        file = make()
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        assert make() == file and file.read_bytes() == whole
    before = np.load(cache.decode("test", paths)[0]).copy()
    Image.new("RGB", (50, 50), "red").save(paths[3])
    after = np.load(cache.decode("test", paths)[0])
    assert (after[3, 0] > 250).all() and np.array_equal(before[:3], after[:3])


def test_imagenet_folders_are_checked(tmp_path):
    settings = Imagenet(root=str(tmp_path))
    with pytest.raises(UserError, match="found no folders train/ and val/"):
        settings.write(tmp_path / "out")
    imagenet_folder(tmp_path)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="val: no class folders"):
        settings.write(tmp_path / "out")
    (tmp_path / "val/goldfish").mkdir()
    with pytest.raises(UserError, match="goldfish is no wnid"):
        settings.write(tmp_path / "out")


def test_folders_are_sought_from_the_repository(tmp_path, monkeypatch):
    image_classes(tmp_path / "home/raw", {"a": 10, "b": 10})
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path / "study")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "home"))
    ImageFolder(root="raw", size=8).write(tmp_path / "out")


def kept(root, **settings) -> Imagenet:
    """A small ImageNet of photos whose training images are kept as JPEG files."""
    if not (root / "raw").exists():
        photo_classes(root / "raw/train", {"n01440764": 14, "n01443537": 14})
        photo_classes(root / "raw/val", {"n01440764": 4, "n01443537": 4})
    cache = str(root / "cache")
    return Imagenet(root=str(root / "raw"), cache=cache, size=32, validation=4, **settings)


def test_whole_images_are_kept_as_jpeg(tmp_path):
    settings = kept(tmp_path, short_side=36)
    card = settings.write(tmp_path / "out")
    data = Prepared.open(tmp_path / "out", verify=True)
    images = data.train.images
    assert isinstance(images, JpegImages) and images.shape == (24, 3, 32, 32)
    content = tmp_path / "out/train_images.bin"
    assert card["jpeg"] == {"side": 36}
    assert card["files"]["train_images.bin"] == file_checksum(content)
    assert data.test.images.shape == (8, 3, 32, 32), "centre squares, as ever"
    paths = settings.list_splits()[1]["train"].paths
    assert len({pixels.shape for pixels in images.decode_uncropped(range(24))}) > 5
    for path, pixels in zip(paths, images.decode_uncropped(range(24)), strict=True):
        with Image.open(path) as original:
            width, height = original.size
            assert min(pixels.shape[:2]) == 36
            assert pixels.shape[0] / pixels.shape[1] == pytest.approx(height / width, abs=0.03)
            small = np.asarray(original.resize(pixels.shape[1::-1], Image.Resampling.BILINEAR))
        assert np.abs(small.astype(float) - pixels).mean() < 6, "compressed, and the same picture"
    # the array that they look like: centre squares of any subset, in any order
    some = images[[5, 2]]
    assert isinstance(some, JpegImages) and np.array_equal(np.asarray(some)[1], images[2])
    assert np.abs(images[2].astype(float) - decode_image(paths[2], 32, 3)).mean() < 6
    pixels = (
        np.concatenate([one.reshape(-1, 3) for one in images.decode_uncropped(range(24))]) / 255
    )
    assert np.allclose(card["mean"], pixels.mean(0), atol=0.01)
    assert np.allclose(card["std"], pixels.std(0), atol=0.01)


def test_packing_goes_on_after_a_kill_with_the_same_bytes(tmp_path, monkeypatch):
    settings = kept(tmp_path, short_side=40)
    card = settings.write(tmp_path / "whole")
    monkeypatch.setattr(image_files_source, "CHUNK", 5)
    packed = kill_after_12(monkeypatch, "resize_and_encode_jpeg", settings, tmp_path / "killed")
    (file,) = (tmp_path / "cache/train").glob("*/images.bin")
    with open(file, "ab") as torn:
        torn.write(b"half a file")  # written, but never said to be there
    assert settings.write(tmp_path / "resumed") == card and 24 <= len(packed) <= 24 + 10
    before = len(packed)
    kept(tmp_path, short_side=44).write(tmp_path / "other")
    assert len(packed) == before + 24


def test_a_damaged_jpeg_store_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "VERIFIED_BYTES", 0)
    kept(tmp_path, short_side=40).write(tmp_path / "out")
    images = Prepared.open(tmp_path / "out").train.images
    assert isinstance(images, JpegImages)
    start, stop = images.offsets[3:5]
    path = tmp_path / "out/train_images.bin"
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(stop - start) + content[stop:])
    images = Prepared.open(tmp_path / "out").train.images
    assert len(np.asarray(images[[0, 1, 2, 4]])) == 4
    with pytest.raises(UserError, match=r"train_images.bin: image 3 \(bytes \d+ to \d+\) cannot"):
        np.asarray(images[[2, 3]])
    path.write_bytes(content[:-7])
    with pytest.raises(UserError, match=f"train_images.bin: expected {len(content)} bytes, found"):
        Prepared.open(tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match="train_images.bin: expected .* found 0"):
        Prepared.open(tmp_path / "out")


def test_the_defaults_write_the_bytes_that_they_always_wrote(tmp_path):
    image_classes(tmp_path / "raw", {"cat": 20, "dog": 30})
    card = ImageFolder(root=str(tmp_path / "raw"), size=8).write(tmp_path / "out")
    said = "".join(card["files"][f"{split}_images.npy"] for split in ("train", "test"))
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "bf0a7dc432ff0397"
    assert "jpeg" not in card


def link(path: Path, target: Path) -> None:
    path.symlink_to(target, target_is_directory=target.is_dir())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda root: link(root / "c", root.parent / "outside/c"), "found 'c', which leads out"),
        (
            lambda root: link(root / "a/x.png", root.parent / "outside/c/000.png"),
            "found 'a/x.png', which leads out of this folder; allowed: files below it",
        ),
        (
            lambda root: link(root / "a/x.png", root / "nothing"),
            r"(?s)1 image files cannot be read.*a/x\.png: .*No such file",
        ),
    ],
)
def test_class_folders_keep_to_their_root(tmp_path, edit, said):
    image_classes(tmp_path / "outside", {"c": 20})
    image_classes(tmp_path / "raw", {"a": 20, "b": 20})
    source = ImageFolder(root=str(tmp_path / "raw"), size=8)
    (tmp_path / "raw/b/again.png").symlink_to(tmp_path / "raw/b/000.png")  # stays inside
    assert sum(source.write(tmp_path / "fine")["images"].values()) == 41
    edit(tmp_path / "raw")
    with pytest.raises(UserError, match=said):
        source.write(tmp_path / "out")


def test_only_pictures_are_decoded_and_large_ones_in_little_memory(tmp_path, monkeypatch):
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (tmp_path / "script.png").write_bytes(script)
    ran = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **_: ran.append(given))
    with pytest.raises(UnreadableImage, match="not a picture, or damaged; allowed: PNG, JPEG"):
        decode_image(tmp_path / "script.png", 8, 3)
    assert not ran
    Image.new("RGB", (5000, 5000)).save(tmp_path / "large.png")
    copies = []
    whole = Image.Image.copy
    monkeypatch.setattr(Image.Image, "copy", lambda one: copies.append(one.size) or whole(one))
    assert decode_image(tmp_path / "large.png", 8, 3).shape == (3, 8, 8)
    assert (5000, 5000) not in copies
