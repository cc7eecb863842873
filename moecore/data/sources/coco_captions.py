"""COCO's captions (Chen et al. 2015): annotations as JSON, images in folders."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from moecore.core.files import UserError, find_raw_file
from moecore.data.files import published_source


class CocoCaptions(published_source.CaptionedSource):
    """Images of COCO with captions; splits are Karpathy's (from his file) or drawn by the seed."""

    kind: Literal["coco_captions"] = "coco_captions"
    annotations: tuple[str, ...] = Field(
        (), description="captions_train2014.json and captions_val2014.json; not with `karpathy`"
    )
    karpathy: str | None = Field(None, description="dataset_coco.json: split 113,287/5,000/5,000")
    folders: tuple[str, ...] = Field(("train2014", "val2014"), description="per annotation file")

    @property
    def name_licence_origin(self) -> tuple[str, str, str]:
        return "COCO captions", "CC BY 4.0; images: Flickr's terms", "https://cocodataset.org"

    def read(self) -> dict[str, list[published_source.ImageCaptions]]:
        if (self.karpathy is None) == (not self.annotations):
            raise UserError("coco_captions: give `annotations` or `karpathy`, one of them")
        if self.karpathy is not None:
            return published_source.read_karpathy_split(find_raw_file(self.karpathy))
        if len(self.folders) != len(self.annotations):
            raise UserError.at(
                "coco_captions",
                found=f"{len(self.annotations)} annotations and {len(self.folders)} folders",
                allowed="equally many",
            )
        images: list[published_source.ImageCaptions] = []
        for name, folder in zip(self.annotations, self.folders, strict=True):
            images += read_coco_annotation_file(find_raw_file(name), folder)
        return published_source.split_by_seed(images, self)


def read_coco_annotation_file(path: Path, folder: str) -> list[published_source.ImageCaptions]:
    """Read a COCO annotation JSON; return its images, which lie in ``folder``, with captions."""
    content = published_source.read_annotation_json(path)
    try:
        images, entries = content["images"], content["annotations"]
        numbers = [image["id"] for image in images]
        files = {image["id"]: f"{folder}/{_text_at(image, 'file_name')}" for image in images}
        captions = [(entry["image_id"], _text_at(entry, "caption").strip()) for entry in entries]
        hash(tuple(image for image, _ in captions))  # a TypeError where an id is a list
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: no captions of COCO's: lacks or has an odd {error}") from None
    if len(files) != len(numbers):
        duplicate = Counter(numbers).most_common(1)[0][0]
        raise UserError(f"{path}: the image id {duplicate} is listed twice; allowed: once")
    return published_source.group_captions(path, files, captions)


def _text_at(entry: Any, key: str) -> str:
    if not isinstance(entry[key], str):
        raise TypeError(f"{key}, {entry[key]!r:.40}, which is not text")
    return entry[key]
