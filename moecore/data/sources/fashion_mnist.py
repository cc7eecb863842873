"""Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of clothes, 28×28, 10 classes."""

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from moecore.data.files.published_image_sets import (
    LabelledImages,
    PublishedSetFacts,
    PublishedSource,
    download_file,
)
from moecore.data.sources.fashion_mnist import read_idx

URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
SHA256 = {  # of the decompressed content
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class FashionMnist(PublishedSource):
    """The four IDX files (plain or .gz), checked by content; the test set is the authors' own."""

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    root: str | tuple[str, ...] = Field(
        ("data/raw/fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        description="Folder, or folders in order, that may hold the four files",
    )
    size: int = Field(
        28, ge=4, le=1024, description="Height and width in pixels; bilinear where not 28"
    )

    def facts(self) -> PublishedSetFacts:
        """Return what is known of the set."""
        source = "https://github.com/zalandoresearch/fashion-mnist"
        return PublishedSetFacts("Fashion-MNIST", CLASSES, 1, "MIT", source, 60_000, 10_000)

    def find_files(self, roots: list[Path]) -> Path | None:
        """The first folder with all four files."""
        return next((root for root in roots if not _lacking_files(root)), None)

    def fetch_files(self, root: Path) -> Path:
        """Download the files into ``root``, checked."""
        for name in _lacking_files(root):
            download_file(f"{URL}{name}.gz", root / f"{name}.gz", partial(_read_file, name))
        return root

    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        """The authors' training and test sets. Raises UserError where a file is damaged."""
        return _read_part(place, "train"), _read_part(place, "t10k")

    def describe_absence(self, roots: list[Path]) -> str:
        """Say which files are lacking, and how to get them."""
        lacking = []
        for root in roots:
            names = _lacking_files(root)
            words = "all four files" if len(names) == len(SHA256) else ", ".join(names)
            lacking.append(f"{root} lacks {words}")
        return (
            f"Fashion-MNIST is not on this machine ({'; '.join(lacking)}). "
            "Get it in one of three ways: (1) `make data` (Debian's package, without root); "
            "(2) `apt-get install dataset-fashion-mnist`; "
            "(3) `download: true` in its params (from the authors, checked), or put the four IDX "
            "files, plain or .gz, in a folder and name it as `root`"
        )


def _read_part(root: Path, part: str) -> LabelledImages:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    images, labels = (_read_file(name, _existing_files(root, name)[0]) for name in names)
    return images[:, None], labels.astype(np.int64)


def _read_file(name: str, path: Path) -> np.ndarray:
    """A file's array. Raises UserError where it is not the published one."""
    return read_idx(path, 3 if "images" in name else 1, SHA256[name])


def _existing_files(root: Path, name: str) -> list[Path]:
    return [path for path in (root / name, root / f"{name}.gz") if path.is_file()]


def _lacking_files(root: Path) -> list[str]:
    return [name for name in SHA256 if not _existing_files(root, name)]
