"""Any image classification set kept as class folders."""

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
from moecore.data.splits import split_train, stratified_limit, stratified_split
from moecore.data.writer import DatasetInfo, write_prepared
from moecore.tasks.classification import Classification


class ImageFolder(ImageStoreSettings):
    """``root/{train,validation|val,test}/<class>/*.png``, or ``root/<class>/*.png`` split by the
    seed.

    A split without a folder of its own is split off ``train``. Every image is decoded whole; its
    short side becomes ``size`` and the centre is kept.
    """

    kind: Literal["image_folder"] = "image_folder"
    root: str = Field(
        description="Folder with the class folders, or with train/, validation/ (or val/) and test/"
    )
    size: int = Field(32, ge=4, le=1024, description="Height and width in pixels")
    channels: Literal[1, 3] = Field(3, description="1 grey, 3 colour; images are converted")
    test: float = Field(
        0.2, gt=0, lt=1, description="Share of each class for the test split, without a test folder"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="An unreadable image: stop, naming all of them, or leave it out"
    )
    name: str | None = Field(
        None, min_length=1, description="Of the data set, on card and page; null: the folder's"
    )
    licence: str = Field("not stated", description="Licence of the images, for the card")

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on wrong folders or files."""
        root = self._root()
        classes, splits = self._splits(root)
        scratch = Path(folder) / ".decoded"
        kept = DecodeCache(scratch, self.size, self.channels)
        packing = self.packing(self.size, self.channels)
        parts = decode_splits(kept, splits, self.on_error, packing)
        facts = DatasetInfo(
            self._name(root),
            Classification(classes=classes),
            self.channels,
            self.size,
            self.licence,
            self.root,
            self,
        )
        card = write_prepared(folder, facts, parts)
        shutil.rmtree(scratch)
        return card

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; files are counted."""
        roots = tuple(candidate_folders(self.root))
        known = Preview(self._name(roots[0]), self.channels, self.size, None, seen=roots)
        return known.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        root = self._root()
        classes, splits = self._splits(root)
        known = {"task": Classification(classes=classes), "short_side": self.short_side}
        return known | preview_folders(self._name(root), root, classes, splits)

    def _name(self, root: Path) -> str:
        return self.name or root.resolve().name

    def _root(self) -> Path:
        roots = candidate_folders(self.root)
        if folder := next((root for root in roots if root.is_dir()), None):
            return folder
        raise UserError(
            f"{' and '.join(map(str, roots))}: no such folder; set `root` to the folder with the "
            "class folders"
        )

    def _splits(self, root: Path) -> tuple[tuple[str, ...], dict[str, SplitFiles]]:
        if (root / "train").is_dir():
            train = root / "train"
        else:
            train = root
        classes = class_names(train)
        rest = list_images(root, train, classes)
        fixed = {}
        if train != root:
            # ImageNet's archives say `val`
            named = "validation" if (root / "validation").is_dir() else "val"
            for split, name in (("validation", named), ("test", "test")):
                if (root / name).is_dir():
                    fixed[split] = list_images(root, root / name, classes)
        if "test" not in fixed:
            kept, carved = stratified_split(rest.labels, self.test, self.seed, purpose=2)
            fixed["test"] = select_files(rest, carved)
            rest = select_files(rest, kept)
        chosen = stratified_limit(fixed["test"].labels, self.test_limit, self.seed)
        fixed["test"] = select_files(fixed["test"], chosen)
        if "validation" in fixed:
            return classes, fixed | {
                "train": select_files(
                    rest, stratified_limit(rest.labels, self.train_limit, self.seed)
                )
            }
        kept, carved = split_train(rest.labels, self)
        return classes, fixed | {
            "train": select_files(rest, kept),
            "validation": select_files(rest, carved),
        }
