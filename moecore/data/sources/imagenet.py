"""ImageNet-1k (ILSVRC 2012), or any subset of its classes, as class folders of JPEG files."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.core.files import UserError, candidate_raw_folders
from moecore.data.files import image_files_source
from moecore.data.stratified_splits import split_train, stratified_limit

WNID_PATTERN = re.compile(r"n\d{8}")


class Imagenet(image_files_source.ImageFilesSource):
    """Images in ``root/train/<wnid>/``, and in ``root/val/<wnid>/``, which are the test set here.

    Images are decoded in parallel to ``size`` once. Unfinished work stays in ``cache``, so a killed
    run resumes.
    """

    kind: Literal["imagenet"] = "imagenet"
    root: str = Field("data/raw/imagenet", description="Has train/ and val/ with a folder per wnid")
    cache: str = Field(".state/imagenet", description="Unfinished work, on the artifacts' disk")
    size: int = Field(64, ge=4, le=1024, description="Height and width in pixels")
    validation: float = Field(10000, gt=0, description="Share (< 1) or number of training images")

    @property
    def name_licence_origin(self) -> tuple[str, str, str]:
        licence = "non-commercial research and education only (terms at image-net.org)"
        return "ImageNet", licence, "https://image-net.org"

    def scratch_folder(self, folder: Path) -> Path:
        caches = candidate_raw_folders(self.cache)
        return next((path for path in caches if path.is_dir()), Path(self.cache))

    def list_splits(self) -> tuple[tuple[str, ...], dict[str, image_files_source.LabelledFiles]]:
        root = self.root_folder()
        classes = image_files_source.list_class_folders(root / "train")
        train = image_files_source.list_labelled_images(root, root / "train", classes)
        test = image_files_source.list_labelled_images(root, root / "val", classes)
        train_rows, validation_rows = split_train(train.labels, self)
        return classes, {
            "train": train.take(train_rows),
            "validation": train.take(validation_rows),
            "test": test.take(stratified_limit(test.labels, self.test_limit, self.seed)),
        }

    def root_folder(self) -> Path:
        roots = candidate_raw_folders(self.root)
        halves = ("train", "val")
        root = next((path for path in roots if all((path / h).is_dir() for h in halves)), None)
        if root is None:
            raise UserError(
                f"{' and '.join(map(str, roots))}: found no folders train/ and val/; ImageNet must "
                "be fetched from image-net.org (terms of access)"
            )
        for half in halves:
            names = sorted(path.name for path in (root / half).iterdir() if path.is_dir())
            if not names:
                raise UserError(f"{root / half}: no class folders; sort by wnid (n01440764, …)")
            if wrong := [name for name in names if not WNID_PATTERN.fullmatch(name)]:
                raise UserError(f"{root / half}: {wrong[0]} is no wnid; allowed: n and 8 digits")
        return root
