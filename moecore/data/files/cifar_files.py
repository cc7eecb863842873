"""The files of CIFAR's binary version: records of label bytes and 3×32×32 pixel bytes, channel by
channel.
"""

import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.core.inside import inside
from moecore.data.files.download import check_digest, fetch

URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


class BinarySet(NamedTuple):
    """One of the two sets; ``train`` and ``test`` give the number of records of each file,
    ``label_limits`` one limit per label byte.
    """

    archive: str
    md5: str
    folder: str
    train: dict[str, int]
    test: dict[str, int]
    label_limits: tuple[int, ...]  # the last label byte is the one used
    names: tuple[str, ...]


def read_binary(
    place: Path, chosen: BinarySet, files: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (N, 3, 32, 32) and labels int64 (N,) of ``files``, from a folder or, without
    unpacking, from the archive.

    Raises UserError naming the file on a wrong length, a label out of range, or a damaged archive.
    """
    if place.is_file():
        contents = _from_archive(place, files)
    else:
        contents = {name: _from_folder(place, name, number) for name, number in files.items()}
    read = [
        _records(place / name, contents[name], number, chosen.label_limits)
        for name, number in files.items()
    ]
    images, labels = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    return images, labels


def check_lengths(folder: Path, chosen: BinarySet) -> list[Path]:
    """The .bin files in ``folder``, which are not read.

    Raises UserError naming the first whose length is not that of its records.
    """
    files = chosen.train | chosen.test
    for name, number in files.items():
        path = folder / name
        _check_length(path, path.stat().st_size, number, len(chosen.label_limits) + PIXELS)
    return [folder / name for name in files]


def fetch_archive(chosen: BinarySet, root: Path) -> Path:
    """Download the authors' archive into ``root``, checked by its published md5."""
    path = root / chosen.archive
    url = URL + chosen.archive
    fetch(url, path, lambda temporary: check_digest(temporary, "md5", chosen.md5, url))
    return path


def _records(
    path: Path, content: bytes, number: int, limits: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    width = len(limits) + PIXELS
    _check_length(path, len(content), number, width)
    records = np.frombuffer(content, np.uint8).reshape(number, width)
    for place, limit in enumerate(limits):
        if (worst := records[:, place].max()) >= limit:
            raise UserError(
                f"{path}: found label {worst}; allowed: 0 to {limit - 1}. It is damaged or of "
                "the other CIFAR set"
            )
    return records[:, len(limits) :].reshape(-1, 3, 32, 32), records[:, len(limits) - 1].astype(
        np.int64
    )


def _check_length(path: Path, length: int, number: int, width: int) -> None:
    if length != number * width:
        raise UserError(
            f"{path}: expected {number * width} bytes ({number} records of {width}), found "
            f"{length}; fetch it again"
        )


def _from_folder(folder: Path, name: str, number: int) -> bytes:
    """A file, or a little more of it than there should be, so that a longer one is noticed."""
    path = inside(folder, name)
    try:
        with open(path, "rb") as handle:
            return handle.read((number + 1) * (PIXELS + 2))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {why}; fetch it again") from None


def _from_archive(archive: Path, files: dict[str, int]) -> dict[str, bytes]:
    """Contents of the wanted members by base name; nothing is written to disk, links and other
    members are passed over.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name not in files or not member.isreg():
                    continue
                # a little more than there should be, so that a longer file is noticed
                if opened := tar.extractfile(member):
                    contents[name] = opened.read((files[name] + 1) * (PIXELS + 2))
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"{archive}: damaged or truncated archive of {archive.stat().st_size} bytes "
            f"({error}); fetch it again"
        ) from error
    if lacking := [name for name in files if name not in contents]:
        raise UserError(
            f"{archive}: holds no file {', '.join(lacking)}; allowed: the authors' binary archive"
        )
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
    10: BinarySet(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {f"data_batch_{i}.bin": 10000 for i in range(1, 6)},
        {"test_batch.bin": 10000},
        (10,),
        tuple(TEN.split()),
    ),
    100: BinarySet(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 50000},
        {"test.bin": 10000},
        (20, 100),
        tuple(HUNDRED.split()),
    ),
}
