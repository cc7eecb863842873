"""ImageNet-1k (ILSVRC 2012), or any subset of its classes, as class folders of JPEG files."""

import re
import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from moecore.core.files import UserError
from moecore.core.roots import candidate_folders
from moecore.data.files.class_folders import (
    ImageStoreSettings,
    class_names,
    list_images,
    preview_folders,
    select_files,
)
from moecore.data.files.decode_cache import DecodeCache, SplitFiles, decode_splits
from moecore.data.preview import Preview
from moecore.data.splits import split_train, stratified_limit
from moecore.data.writer import DatasetInfo, write_prepared
from moecore.tasks.classification import Classification

WNID = re.compile(r"n\d{8}")


class Imagenet(ImageStoreSettings):
    """``root/train/<wnid>/`` and ``root/val/<wnid>/``; the authors' validation set is the test
    split here.

    Images are decoded in parallel to ``size`` once. The work is kept in ``cache`` until it is
    finished, so a killed run goes on.
    """

    kind: Literal["imagenet"] = "imagenet"
    root: str = Field(
        "data/raw/imagenet", description="Folder with train/ and val/, a folder a wnid in each"
    )
    cache: str = Field(
        ".state/imagenet",
        description="For unfinished work, on the artifacts' disk; emptied at the end",
    )
    size: int = Field(64, ge=4, le=1024, description="Height and width in pixels")
    validation: float = Field(
        10000, gt=0, description="Of train: below 1 a share, from 1 on a number of images"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="An unreadable image: stop, naming all of them, or leave it out"
    )

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on wrong folders or files."""
        root = self._root()
        classes = class_names(root / "train")
        splits = self._splits(root, classes)
        cache = next(
            (path for path in candidate_folders(self.cache) if path.is_dir()), Path(self.cache)
        )
        kept = DecodeCache(cache, self.size, 3)
        packing = self.packing(self.size, 3)
        parts = decode_splits(kept, splits, self.on_error, packing)
        licence = "non-commercial research and education only (terms at image-net.org)"
        facts = DatasetInfo(
            "ImageNet",
            Classification(classes=classes),
            3,
            self.size,
            licence,
            "https://image-net.org",
            self,
        )
        card = write_prepared(folder, facts, parts)
        shutil.rmtree(cache)
        return card

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; files are counted."""
        known = Preview("ImageNet", 3, self.size, None, seen=tuple(candidate_folders(self.root)))
        return known.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        root = self._root()
        classes = class_names(root / "train")
        splits = self._splits(root, classes)
        known = {"task": Classification(classes=classes), "short_side": self.short_side}
        return known | preview_folders("ImageNet", root, classes, splits)

    def _splits(self, root: Path, classes: tuple[str, ...]) -> dict[str, SplitFiles]:
        train = list_images(root, root / "train", classes)
        test = list_images(root, root / "val", classes)
        kept, carved = split_train(train.labels, self)
        test = select_files(test, stratified_limit(test.labels, self.test_limit, self.seed))
        return {
            "train": select_files(train, kept),
            "validation": select_files(train, carved),
            "test": test,
        }

    def _root(self) -> Path:
        roots = candidate_folders(self.root)
        root = next(
            (path for path in roots if (path / "train").is_dir() and (path / "val").is_dir()), None
        )
        if root is None:
            looked = " and ".join(map(str, roots))
            raise UserError(
                f"{looked}: found no folders train/ and val/; ImageNet must be fetched from "
                "image-net.org (terms of access)"
            )
        for part in ("train", "val"):
            folders = [path.name for path in (root / part).iterdir() if path.is_dir()]
            if not folders:
                raise UserError(
                    f"{root / part}: holds no class folders; sort the images into folders named "
                    "by wnid (n01440764, …) first"
                )
            if wrong := sorted(name for name in folders if not WNID.fullmatch(name)):
                raise UserError(
                    f"{root / part}: folder {wrong[0]} is not a wnid; allowed: n and eight "
                    "digits, as n01440764"
                )
        return root
