"""Each source on small real files: the prepared folder opens, and what is wrong is said."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from moecore.core.files import UserError
from moecore.data.files.cifar_files import SETS
from moecore.data.prepared import Prepared
from moecore.data.sources import Source, cifar, fashion_mnist
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.digits import Digits
from moecore.data.sources.fashion_mnist import FashionMnist
from tests.data.making import cifar_content, fashion_folder

REAL = next(
    (
        p
        for p in (Path("data/raw/fashion-mnist"), Path("/usr/share/datasets/fashion-mnist"))
        if p.is_dir()
    ),
    None,
)


def test_kinds_choose_the_source():
    read = TypeAdapter(Source).validate_python
    assert read({"kind": "digits", "size": 42}) == Digits(size=42)
    with pytest.raises(
        ValidationError, match="'fashion_mnist', 'digits', 'image_folder', 'cifar', 'imagenet'"
    ):
        read({"kind": "mnist"})


def test_digits(tmp_path):
    card = Digits(size=16, seed=1).prepare(tmp_path)
    opened = Prepared.open(tmp_path)
    assert (
        sum(map(len, (opened.train.labels, opened.validation.labels, opened.test.labels))) == 1797
    )
    assert opened.train.images.shape[1:] == (1, 16, 16) and opened.train.images.max() > 240
    seen = {image.tobytes() for image in opened.train.images}
    # the set itself has hardly any doubles
    assert len(seen & {image.tobytes() for image in opened.test.images}) <= 2
    assert (
        card == Digits(size=16, seed=1).prepare(tmp_path / "b")
        and card["files"] != Digits(size=16).prepare(tmp_path / "c")["files"]
    )


def test_digits_at_their_own_size_are_scaled_to_bytes(tmp_path):
    from sklearn.datasets import load_digits

    Digits().prepare(tmp_path)
    whole = {
        (image * (255 / 16)).round().astype(np.uint8).tobytes() for image in load_digits().images
    }
    assert {image.tobytes() for image in Prepared.open(tmp_path).test.images} <= whole


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(tmp_path / "raw", packed=packed))
    settings = FashionMnist(
        root=(str(tmp_path / "absent"), str(tmp_path / "raw")), train_limit=50, test_limit=20
    )
    card = settings.prepare(tmp_path / "out")
    opened = Prepared.open(tmp_path / "out", verify=True)
    assert [len(split.labels) for split in opened[1:4]] == [50, 20, 20]
    assert set(card["counts"]["train"].values()) == {5} and card["settings"]["train_limit"] == 50
    assert np.array_equal(np.unique(opened.test.labels), np.arange(10))


def test_fashion_mnist_is_checked_by_content(tmp_path):
    fashion_folder(tmp_path)
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: its content has sha256"):
        FashionMnist(root=str(tmp_path)).prepare(tmp_path / "out")


def test_absent_fashion_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(UserError) as error:
        FashionMnist(root=str(tmp_path)).prepare(tmp_path / "out")
    for word in (
        "make data",
        "apt-get install dataset-fashion-mnist",
        "download: true",
        str(tmp_path),
    ):
        assert word in str(error.value)


@pytest.mark.skipif(REAL is None, reason="Fashion-MNIST is not on this machine (make data)")
def test_real_fashion_mnist(tmp_path):
    card = FashionMnist(root=str(REAL)).prepare(tmp_path)
    assert set(card["counts"]["train"].values()) == {5400} and set(
        card["counts"]["test"].values()
    ) == {1000}
    assert card["mean"][0] == pytest.approx(0.286, abs=1e-3) and card["std"][0] == pytest.approx(
        0.353, abs=1e-3
    )


def small_cifar(folder, monkeypatch, classes):
    """Binary files of 80 or 200 records each, in the authors' folder."""
    real = SETS[classes]
    small = real._replace(
        train=dict.fromkeys(real.train, 80 if classes == 10 else 200),
        test=dict.fromkeys(real.test, 200),
    )
    monkeypatch.setitem(cifar.SETS, classes, small)
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
    card = settings.prepare(tmp_path / "a")
    opened = Prepared.open(tmp_path / "a")
    record = (tmp_path / "raw" / small.folder / next(iter(small.test))).read_bytes()
    assert (
        opened.test.images[0].tobytes()
        == record[len(small.label_limits) : len(small.label_limits) + 3072]
        and opened.test.labels[1] == 1
    )
    with tarfile.open(tmp_path / "raw" / small.archive, "w:gz") as tar:
        tar.add(tmp_path / "raw" / small.folder, small.folder)
        link = tarfile.TarInfo("../../" + next(iter(small.train)))
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
    shutil.rmtree(tmp_path / "raw" / small.folder)
    assert settings.prepare(tmp_path / "b") == card and len(card["task"]["classes"]) == classes


def test_cifar_damage_is_named(tmp_path, monkeypatch):
    small = small_cifar(tmp_path, monkeypatch, 10)
    path = tmp_path / small.folder / "data_batch_2.bin"
    content = path.read_bytes()
    settings = Cifar(root=str(tmp_path))
    short = content[:-5]
    foreign = b"\x0a" + content[1:]
    for damaged, said in (
        (short, f"expected {len(content)} bytes"),
        (foreign, "data_batch_2.bin: found label 10; allowed: 0 to 9"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=said):
            settings.prepare(tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match="CIFAR-10 is not in"):
        settings.prepare(tmp_path / "out")


def test_cifar_archives_that_are_damaged_or_foreign(tmp_path, monkeypatch):
    small = small_cifar(tmp_path / "made", monkeypatch, 10)
    archive = tmp_path / "raw" / small.archive
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / small.folder, small.folder)
    whole = archive.read_bytes()
    settings = Cifar(root=str(tmp_path / "raw"))
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w:gz").close()
    half = whole[: len(whole) // 2]
    none = empty.getvalue()
    for content, said in (
        (half, "damaged or truncated archive"),
        (b"no archive", "damaged"),
        (none, "holds no file data_batch_1.bin"),
    ):
        archive.write_bytes(content)
        with pytest.raises(UserError, match=said):
            settings.prepare(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1", "data_batch_1"]
)
def test_the_python_version_of_cifar_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match="python version of CIFAR is refused: it is pickle"):
        Cifar(root=str(tmp_path)).prepare(tmp_path / "out")
