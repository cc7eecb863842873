"""Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of clothes, 28×28, 10 classes."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.core.roots import candidate_folders
from moecore.data.files.download import download_file
from moecore.data.files.idx import read_idx
from moecore.data.files.published_sets import count_published_set, write_published_set
from moecore.data.preview import Preview
from moecore.data.splits import SplitSettings
from moecore.data.writer import DatasetInfo
from moecore.tasks.classification import Classification

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


class FashionMnist(SplitSettings):
    """The four IDX files (plain or .gz), checked by content; the test set is the authors' own."""

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    root: str | tuple[str, ...] = Field(
        ("data/raw/fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        description="Folder, or folders in order, that may hold the four files",
    )
    size: int = Field(
        28, ge=4, le=1024, description="Height and width in pixels; other than 28 is resized"
    )
    download: bool = Field(
        False, description="Fetch the files into the first root where they are on none"
    )

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on missing or damaged files."""
        root = self._find()
        info = DatasetInfo(
            "Fashion-MNIST",
            Classification(classes=CLASSES),
            1,
            self.size,
            "MIT",
            "https://github.com/zalandoresearch/fashion-mnist",
            self,
        )
        return write_published_set(
            folder, info, self, _read_part(root, "train"), _read_part(root, "t10k")
        )

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; no file is read."""
        task = Classification(classes=CLASSES)
        known = Preview(
            "Fashion-MNIST", 1, self.size, task, seen=tuple(candidate_folders(self.root))
        )
        return known.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        roots = candidate_folders(self.root)
        root = self._find_present(roots)
        if root is None and not self.download:
            raise UserError(_absent_words(roots))
        note = None if root else f"prepare will download it into {roots[0]}"
        counts = count_published_set("Fashion-MNIST", CLASSES, self, 60_000, 10_000)
        return {"counts": counts, "note": note}

    def _find_present(self, roots: list[Path]) -> Path | None:
        """The first folder with all four files."""
        return next(
            (root for root in roots if all(_find_file(root, name) for name in SHA256)), None
        )

    def _find(self) -> Path:
        roots = candidate_folders(self.root)
        if root := self._find_present(roots):
            return root
        if not self.download:
            raise UserError(_absent_words(roots))
        for name in SHA256:
            if not _find_file(roots[0], name):
                download_file(f"{URL}{name}.gz", roots[0] / f"{name}.gz", partial(_accept, name))
        return roots[0]


def _read_part(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = _read_content(root, f"{part}-images-idx3-ubyte")
    labels = _read_content(root, f"{part}-labels-idx1-ubyte")
    return images[:, None], labels.astype(np.int64)


def _check_file(path: Path, name: str) -> np.ndarray:
    return read_idx(path, 3 if "images" in name else 1, SHA256[name])


def _accept(name: str, path: Path) -> None:
    """Raise UserError where a downloaded file is not the published one."""
    _check_file(path, name)


def _read_content(root: Path, name: str) -> np.ndarray:
    path = _find_file(root, name)
    if path is None:
        raise UserError(_absent_words([root]))
    return _check_file(path, name)


def _find_file(root: Path, name: str) -> Path | None:
    return next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)


def _absent_words(roots: list[Path]) -> str:
    lists = {root: [name for name in SHA256 if not _find_file(root, name)] for root in roots}
    lacking = "; ".join(
        f"{root} lacks {'all four files' if len(names) == 4 else ', '.join(names)}"
        for root, names in lists.items()
    )
    return (
        f"Fashion-MNIST is not on this machine ({lacking}). "
        "Get it in one of three ways: (1) `make data` (Debian's package, without root); "
        "(2) `apt-get install dataset-fashion-mnist`; "
        "(3) `download: true` in its params (from the authors, checked), or put the four IDX "
        "files, plain or .gz, in a folder and name it as `root`"
    )
