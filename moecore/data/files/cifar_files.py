"""CIFAR's binary files: records of label bytes and 3×32×32 pixel bytes."""

import tarfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.data.files.published_image_sets import check_digest, download_file

URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


class CifarArchiveSpec(NamedTuple):
    """One of the two sets; ``train`` and ``test`` give the number of records of each file."""

    archive: str
    md5: str
    folder: str
    train: dict[str, int]
    test: dict[str, int]
    label_bytes: int  # of a record; the last one is used
    names: tuple[str, ...]


def read_binary(
    place: Path, chosen: CifarArchiveSpec, files: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (N, 3, 32, 32) and labels int64 (N,) of ``files``, from a folder or, without
    unpacking, from the authors' archive.

    Raises UserError naming the file on a wrong length, and on another archive than the published.
    """
    if place.is_file():
        check_digest(place, "md5", chosen.md5, str(place))
        contents = _read_archive(place, files)
    else:
        contents = {name: (place / name).read_bytes() for name in files}
    width = chosen.label_bytes + PIXELS
    for name, number in files.items():
        if (length := len(contents[name])) != number * width:
            needed = f"{number * width} bytes ({number} records of {width})"
            raise UserError(f"{place / name}: expected {needed}, found {length}; fetch it again")
    records = np.frombuffer(b"".join(contents[name] for name in files), np.uint8)
    records = records.reshape(-1, width)
    images = records[:, chosen.label_bytes :].reshape(-1, 3, 32, 32)
    return images, records[:, chosen.label_bytes - 1].astype(np.int64)


def fetch_archive(chosen: CifarArchiveSpec, root: Path) -> Path:
    """Download the authors' archive into ``root``, checked by its published md5."""
    path = root / chosen.archive
    url = URL + chosen.archive
    download_file(url, path, lambda temporary: check_digest(temporary, "md5", chosen.md5, url))
    return path


def _read_archive(archive: Path, files: dict[str, int]) -> dict[str, bytes]:
    """Return the contents of the wanted files by base name; nothing is written to disk."""
    contents = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in files and (opened := tar.extractfile(member)):
                contents[name] = opened.read()
    return contents


TEN = "airplane automobile bird cat deer dog frog horse ship truck"
HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum
rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
SETS = {
    10: CifarArchiveSpec(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {f"data_batch_{i}.bin": 10000 for i in range(1, 6)},
        {"test_batch.bin": 10000},
        1,
        tuple(TEN.split()),
    ),
    100: CifarArchiveSpec(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 50000},
        {"test.bin": 10000},
        2,
        tuple(HUNDRED.split()),
    ),
}
