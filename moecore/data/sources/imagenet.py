"""ImageNet-1k (ILSVRC 2012), or any subset of its classes, as class folders of JPEG files."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.core.files import UserError, candidate_folders
from moecore.data.files import image_files
from moecore.data.stratified_splits import split_train, stratified_limit

WNID = re.compile(r"n\d{8}")


class Imagenet(image_files.ImageFilesSource):
    """``root/train/<wnid>/`` and ``root/val/<wnid>/``, the authors' validation, here the test.

    Images are decoded in parallel to ``size`` once. The work is kept in ``cache`` until it is
    finished, so a killed run goes on.
    """

    kind: Literal["imagenet"] = "imagenet"
    root: str = Field(
        "data/raw/imagenet", description="Folder with train/ and val/, a folder a wnid in each"
    )
    cache: str = Field(".state/imagenet", description="For unfinished work, on the artifacts' disk")
    size: int = Field(64, ge=4, le=1024, description="Height and width in pixels")
    validation: float = Field(
        10000, gt=0, description="Of train: below 1 a share, from 1 on a number of images"
    )

    @property
    def about(self) -> tuple[str, str, str]:
        """Name, licence and source."""
        licence = "non-commercial research and education only (terms at image-net.org)"
        return "ImageNet", licence, "https://image-net.org"

    def scratch_folder(self, folder: Path) -> Path:
        """The cache, which outlives a stage that was killed."""
        caches = candidate_folders(self.cache)
        return next((path for path in caches if path.is_dir()), Path(self.cache))

    def list_splits(self) -> tuple[tuple[str, ...], dict[str, image_files.LabelledFiles]]:
        """The classes and the files of each split. Raises UserError on wrong folders."""
        root = self.root_folder()
        classes = image_files.class_names(root / "train")
        train = image_files.list_labelled_images(root, root / "train", classes)
        test = image_files.list_labelled_images(root, root / "val", classes)
        kept, carved = split_train(train.labels, self)
        test = image_files.take_files_at_rows(
            test, stratified_limit(test.labels, self.test_limit, self.seed)
        )
        return classes, {
            "train": image_files.take_files_at_rows(train, kept),
            "validation": image_files.take_files_at_rows(train, carved),
            "test": test,
        }

    def root_folder(self) -> Path:
        """The folder with train/ and val/. Raises UserError where it is not in order."""
        roots = candidate_folders(self.root)
        halves = ("train", "val")
        root = next((path for path in roots if all((path / h).is_dir() for h in halves)), None)
        if root is None:
            looked = " and ".join(map(str, roots))
            fetch = "ImageNet must be fetched from image-net.org (terms of access)"
            raise UserError(f"{looked}: found no folders train/ and val/; {fetch}")
        for half in halves:
            names = sorted(path.name for path in (root / half).iterdir() if path.is_dir())
            if not names:
                sort = "sort the images into folders named by wnid (n01440764, …) first"
                raise UserError(f"{root / half}: holds no class folders; {sort}")
            if wrong := [name for name in names if not WNID.fullmatch(name)]:
                allowed = "n and eight digits, as n01440764"
                raise UserError(
                    f"{root / half}: folder {wrong[0]} is not a wnid; allowed: {allowed}"
                )
        return root
