"""Flickr30k (Young et al. 2014): a file of captions and a folder of images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.core.files import UserError, find_raw_file
from moecore.data.files import published_source


class Flickr30k(published_source.CaptionedSource):
    """Flickr30k: 31,783 images with five captions; splits are Karpathy's or drawn by the seed."""

    kind: Literal["flickr30k"] = "flickr30k"
    captions_file: str | None = Field(None, description="results_20130124.token; not with karpathy")
    karpathy: str | None = Field(None, description="dataset_flickr30k.json")

    @property
    def name_licence_origin(self) -> tuple[str, str, str]:
        source = "https://shannon.cs.illinois.edu/DenotationGraph"
        return "Flickr30k", "Flickr's terms, for research and education", source

    def read(self) -> dict[str, list[published_source.ImageCaptions]]:
        if (self.karpathy is None) == (self.captions_file is None):
            raise UserError("flickr30k: give `captions_file` or `karpathy`, one of them")
        if self.karpathy is not None:
            return published_source.read_karpathy_split(find_raw_file(self.karpathy))
        path = find_raw_file(str(self.captions_file))
        lines = list(read_flickr_caption_pairs(path))
        images = published_source.group_captions(path, {name: name for name, _ in lines}, lines)
        return published_source.split_by_seed(images, self)


def read_flickr_caption_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (image, caption) from lines ``name.jpg#0<TAB>caption``; UserError for other lines."""
    text = published_source.read_text_file(path, "captions")
    keys: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        key, tab, caption = line.partition("\t")
        name, mark, place = key.rpartition("#")
        if not (tab and mark and place.isdigit() and name and caption.strip()):
            raise UserError.at(
                f"{path}:{number}", found=repr(line[:60]), allowed="name.jpg#0, a tab, a caption"
            )
        if key in keys:
            raise UserError(f"{path}:{number}: {key} is listed twice; allowed: once")
        keys.add(key)
        yield name, caption.strip()
