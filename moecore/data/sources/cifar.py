"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), *binary* version: 50,000 + 10,000, 32×32 pixels."""

import tarfile
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.files.published_source import (
    LabelledImages,
    PublishedSetFacts,
    PublishedSource,
    check_digest,
    download_file,
)

URL = "https://www.cs.toronto.edu/~kriz/"
PIXEL_BYTES = 3 * 32 * 32  # bytes of a record, after its label bytes


class CifarArchiveSpec(NamedTuple):
    """CIFAR-10's or -100's archive; ``train`` and ``test``: file name → number of records."""

    archive: str
    md5: str
    folder: str
    train: dict[str, int]
    test: dict[str, int]
    label_bytes: int  # per record; the last one is the label
    names: tuple[str, ...]


def read_binary(place: Path, spec: CifarArchiveSpec, files: dict[str, int]) -> LabelledImages:
    """Read images uint8 (N, 3, 32, 32) and labels (N,) from a folder, or a verified archive."""
    contents = {}
    if place.is_file():
        check_digest(place, "md5", spec.md5, str(place))
        with tarfile.open(place, "r:gz") as archive:  # nothing is written to disk
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in files and (opened := archive.extractfile(member)):
                    contents[name] = opened.read()
    else:
        contents = {name: (place / name).read_bytes() for name in files}
    width = spec.label_bytes + PIXEL_BYTES
    for name, number in files.items():
        if (length := len(contents[name])) != number * width:
            needed = f"{number * width} bytes ({number} records of {width})"
            raise UserError(f"{place / name}: expected {needed}, found {length}; fetch it again")
    records = np.frombuffer(b"".join(contents[name] for name in files), np.uint8).reshape(-1, width)
    images = records[:, spec.label_bytes :].reshape(-1, 3, 32, 32)
    return images, records[:, spec.label_bytes - 1].astype(np.int64)


CIFAR_10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR_100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum
rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
ARCHIVES = {
    10: CifarArchiveSpec(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {f"data_batch_{i}.bin": 10000 for i in range(1, 6)},
        {"test_batch.bin": 10000},
        1,
        tuple(CIFAR_10_CLASSES.split()),
    ),
    100: CifarArchiveSpec(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 50000},
        {"test.bin": 10000},
        2,
        tuple(CIFAR_100_CLASSES.split()),
    ),
}
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# files of the python version, which is refused
PYTHON_FILES = (
    "cifar-{}-python.tar.gz",
    "cifar-10-batches-py/data_batch_1",
    "cifar-100-python/train",
    "data_batch_1",
    "train",
    "meta",
)


class Cifar(PublishedSource):
    """CIFAR-10 or -100 from the binary files or archive; the pickled version is refused."""

    kind: Literal["cifar"] = "cifar"
    classes: Literal[10, 100] = Field(10, description="10: CIFAR-10; 100: CIFAR-100, fine labels")
    root: str | tuple[str, ...] = Field(
        "data/raw/cifar", description="Folder, or folders in order, with the .bin files or archive"
    )
    size: int = Field(32, ge=4, le=1024, description="Height and width, pixels; bilinear if not 32")

    def facts(self) -> PublishedSetFacts:
        spec = ARCHIVES[self.classes]
        name = f"CIFAR-{self.classes}"
        train, test = (sum(files.values()) for files in (spec.train, spec.test))
        licence = "none stated by the authors"
        return PublishedSetFacts(name, spec.names, 3, licence, PAGE, train, test)

    def fetch_files(self, root: Path) -> Path:
        spec = ARCHIVES[self.classes]
        path = root / spec.archive
        url = URL + spec.archive
        download_file(url, path, lambda temporary: check_digest(temporary, "md5", spec.md5, url))
        return path

    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        spec = ARCHIVES[self.classes]
        return read_binary(place, spec, spec.train), read_binary(place, spec, spec.test)

    def find_files(self, roots: list[Path]) -> Path | None:
        spec = ARCHIVES[self.classes]
        for root in roots:
            for folder in (root, root / spec.folder):
                if all((folder / name).is_file() for name in spec.train | spec.test):
                    return folder
            if (root / spec.archive).is_file():
                return root / spec.archive
        return None

    def describe_absence(self, roots: list[Path]) -> str:
        spec = ARCHIVES[self.classes]
        needed = f"{spec.archive}, or its {', '.join(spec.train | spec.test)}"
        candidates = [root / name.format(self.classes) for root in roots for name in PYTHON_FILES]
        pickled = [path for path in candidates if path.is_file()]
        if pickled:
            return (
                f"{pickled[0]}: the python version of CIFAR is refused: it is pickle, which can "
                f"run any program when read. Allowed: {needed} (the binary version, {PAGE})"
            )
        return (
            f"CIFAR-{self.classes} is not in {' or '.join(map(str, roots))}; put {needed} there, "
            f"or set `download: true` (from {PAGE}, checked)"
        )
