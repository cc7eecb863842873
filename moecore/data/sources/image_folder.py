"""Images for classification in one folder per class."""

import os
from typing import Literal

from pydantic import Field

from moecore.core.files import candidate_raw_folders
from moecore.data.files import image_files_source
from moecore.data.stratified_splits import split_train, stratified_limit, stratified_split


class ImageFolder(image_files_source.ImageFilesSource):
    """Images in ``root/{train,validation|val,test}/<class>/``, or all in ``root/<class>/``.

    A missing ``validation`` or ``test`` is drawn from ``train``, or from ``root`` if that has no
    ``train``. Images are resized so that the short side is ``size``, then cropped to the centre.
    """

    kind: Literal["image_folder"] = "image_folder"
    root: str = Field(description="Has class folders, or train/, validation/ (or val/) and test/")
    test: float = Field(0.2, gt=0, lt=1, description="Share of each class for test, if no test/")
    name: str | None = Field(None, min_length=1, description="Card's name; null: the folder's name")
    licence: str = Field("not stated", description="Licence of the images, for the card")

    @property
    def name_licence_origin(self) -> tuple[str, str, str]:
        name = self.name or os.path.basename(os.path.realpath(candidate_raw_folders(self.root)[0]))
        return name, self.licence, self.root

    def list_splits(self) -> tuple[tuple[str, ...], dict[str, image_files_source.LabelledFiles]]:
        root = self.root_folder()
        train = root / "train"
        fixed = {}
        if train.is_dir():
            # ImageNet's archives say `val`.
            validation = "validation" if (root / "validation").is_dir() else "val"
            fixed = {"validation": root / validation, "test": root / "test"}
        else:
            train = root
        classes = image_files_source.list_class_folders(train)
        rest = image_files_source.list_labelled_images(root, train, classes)
        splits = {
            split: image_files_source.list_labelled_images(root, folder, classes)
            for split, folder in fixed.items()
            if folder.is_dir()
        }
        if "test" not in splits:
            remaining, drawn_rows = stratified_split(rest.labels, self.test, self.seed, purpose=2)
            splits["test"] = rest.take(drawn_rows)
            rest = rest.take(remaining)
        chosen = stratified_limit(splits["test"].labels, self.test_limit, self.seed)
        splits["test"] = splits["test"].take(chosen)
        if "validation" in splits:
            train_rows = stratified_limit(rest.labels, self.train_limit, self.seed)
        else:
            train_rows, validation_rows = split_train(rest.labels, self)
            splits["validation"] = rest.take(validation_rows)
        return classes, splits | {"train": rest.take(train_rows)}
