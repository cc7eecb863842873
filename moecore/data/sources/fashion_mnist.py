"""Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of clothes, 28×28, 10 classes."""

import gzip
import hashlib
import zlib
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.files.published_source import (
    LabelledImages,
    PublishedSetFacts,
    PublishedSource,
    download_file,
)

URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
CLASSES = "t-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(",")
SHA256 = {  # of the decompressed content
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 2**26  # decompressed; the largest published file has 47 million


class FashionMnist(PublishedSource):
    """Fashion-MNIST from four IDX files, plain or .gz, checked by hash; authors' test set."""

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    root: str | tuple[str, ...] = Field(
        ("data/raw/fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        description="Folder, or folders in order, that may hold the four files",
    )
    size: int = Field(28, ge=4, le=1024, description="Height and width, pixels; bilinear if not 28")

    def facts(self) -> PublishedSetFacts:
        source = "https://github.com/zalandoresearch/fashion-mnist"
        return PublishedSetFacts("Fashion-MNIST", tuple(CLASSES), 1, "MIT", source, 60_000, 10_000)

    def find_files(self, roots: list[Path]) -> Path | None:
        return next((root for root in roots if not _missing_files(root)), None)

    def fetch_files(self, root: Path) -> Path:
        for name in _missing_files(root):
            download_file(f"{URL}{name}.gz", root / f"{name}.gz", partial(_read_file, name))
        return root

    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        return _read_images_and_labels(place, "train"), _read_images_and_labels(place, "t10k")

    def describe_absence(self, roots: list[Path]) -> str:
        gaps = []
        for root in roots:
            names = _missing_files(root)
            listed = "all four files" if len(names) == len(SHA256) else ", ".join(names)
            gaps.append(f"{root} lacks {listed}")
        return (
            f"Fashion-MNIST is not on this machine ({'; '.join(gaps)}). "
            "Get it in one of three ways: (1) `make data` (Debian's package, without root); "
            "(2) `apt-get install dataset-fashion-mnist`; "
            "(3) `download: true` in its params (from the authors, checked), or put the four IDX "
            "files, plain or .gz, in a folder and name it as `root`"
        )


def _read_images_and_labels(root: Path, part: str) -> LabelledImages:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    images, labels = (_read_file(name, _find_plain_or_gzip(root, name)[0]) for name in names)
    return images[:, None], labels.astype(np.int64)


def _read_file(name: str, path: Path) -> np.ndarray:
    return read_idx(path, 3 if "images" in name else 1, SHA256[name])


def _find_plain_or_gzip(root: Path, name: str) -> list[Path]:
    return [path for path in (root / name, root / f"{name}.gz") if path.is_file()]


def _missing_files(root: Path) -> list[str]:
    return [name for name in SHA256 if not _find_plain_or_gzip(root, name)]


def read_idx(path: Path, dimensions: int, sha256: str) -> np.ndarray:
    """Read the uint8 array of an IDX file, plain or gzip, and verify its content's sha256."""
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if is_packed else file).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: found more than {MAX_BYTES:,} bytes; fetch the file again")
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(f"{path}: has sha256 {digest}; published: {sha256}. Fetch the file again")
    # IDX: magic (0, 0, type, dimensions), big-endian sizes, values
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
