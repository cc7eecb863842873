"""The prepared layout of images with captions.

Images are stored as those of classes are; ``…_labels.npy`` are int32 (N, C, M), the tokens of C
captions of each image, see moecore/tasks/image_text.py; ``vocabulary.txt`` has a word a line in the
order of their numbers, or ``tokenizer.json`` is the file that the user named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import checksum, write_json
from moecore.data.text.tokenizers import Encoded, Tokenizer
from moecore.data.writer import Facts, Part, write_prepared
from moecore.tasks.image_text import NONE, ImageText


class Captioned(NamedTuple):
    """One split: its captions, image by image, and the images in the same order (see Part)."""

    captions: Sequence[Sequence[str]]
    images: Any


class Described(NamedTuple):
    """What a source knows of its data beside the captions."""

    name: str
    channels: int
    size: int
    licence: str
    source: str
    settings: Any  # the source's own, with context and captions
    sided: bool


def write_captioned(
    folder: Path, about: Described, tokenizer: Tokenizer, parts: Mapping[str, Captioned]
) -> dict[str, Any]:
    """Write the prepared layout to ``folder`` and return its card."""
    settings = about.settings
    task = ImageText(
        words=tokenizer.words,
        context=settings.context,
        captions=settings.captions,
        end=tokenizer.end,
        vocabulary=tokenizer.digest,
        sided=about.sided,
    )
    facts = Facts(
        about.name, task, about.channels, about.size, about.licence, about.source, settings
    )
    labels, counts = {}, {}
    for split, part in parts.items():
        labels[split], counts[split] = tokens_of(part.captions, tokenizer, task)
    written = {split: Part(labels[split], part.images) for split, part in parts.items()}
    card = write_prepared(folder, facts, written)
    name = tokenizer.write(folder)
    card["counts"] = counts
    card["files"][name] = checksum(folder / name)
    write_json(folder / "card.json", card)
    return card


def tokens_of(
    captions: Sequence[Sequence[str]], tokenizer: Tokenizer, task: ImageText
) -> tuple[np.ndarray, dict[str, int]]:
    """Tokens int32 (N, C, M) of the first C captions of each image, NONE where there are fewer,
    and how many captions there are, were cut, and how many of their words are unknown.
    """
    found = np.full((len(captions), task.captions, task.context), NONE, np.int32)
    counts = {"captions": 0, "cut": 0, "unknown": 0}
    known: dict[str, Encoded] = {}
    for image, texts in enumerate(captions):
        for place, text in enumerate(texts[: task.captions]):
            if text not in known:
                known[text] = tokenizer.encode(text, task.context)
            encoded = known[text]
            found[image, place] = encoded.tokens
            counts["captions"] += 1
            counts["cut"] += encoded.cut
            counts["unknown"] += encoded.unknown
    return found, counts
