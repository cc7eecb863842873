"""The prepared layout of images with captions.

Images are stored as those of classes are; ``…_labels.npy`` are int32 (N, C, M), the tokens of C
captions of each image, see moecore/tasks/image_text.py; ``vocabulary.txt`` has a word a line in the
order of their numbers, or ``tokenizer.json`` is the file that the user named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moecore.core.files import file_checksum, write_sealed
from moecore.data.text.tokenizers import EncodedCaption, Tokenizer
from moecore.data.writer import DatasetInfo, SplitToWrite, write_prepared
from moecore.tasks.image_text import NONE, ImageText


def caption_task(settings: Any, tokenizer: Tokenizer) -> ImageText:
    """The task of a source's data; settings: with context, captions and sided."""
    return ImageText(
        words=tokenizer.words,
        context=settings.context,
        captions=settings.captions,
        end=tokenizer.end,
        vocabulary=tokenizer.digest,
        sided=settings.sided,
    )


def write_captioned(
    folder: Path,
    facts: DatasetInfo,
    tokenizer: Tokenizer,
    parts: Mapping[str, SplitToWrite],
    counts: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Write the prepared layout to ``folder`` and return its card."""
    card = write_prepared(folder, facts, parts)
    name = tokenizer.write(folder)
    card["counts"] = dict(counts)
    card["files"][name] = file_checksum(folder / name)
    write_sealed(folder / "card.json", card)
    return card


def tokenize_captions(
    captions: Sequence[Sequence[str]], tokenizer: Tokenizer, task: ImageText
) -> tuple[np.ndarray, dict[str, int]]:
    """Tokens int32 (N, C, M) of the first C captions of each image, NONE where there are fewer,
    and how many captions there are, were cut, and how many of their words are unknown.
    """
    tokens = np.full((len(captions), task.captions, task.context), NONE, np.int32)
    counts = {"captions": 0, "cut": 0, "unknown": 0}
    known: dict[str, EncodedCaption] = {}
    for image, texts in enumerate(captions):
        for place, text in enumerate(texts[: task.captions]):
            if text not in known:
                known[text] = tokenizer.encode(text, task.context)
            encoded = known[text]
            tokens[image, place] = encoded.tokens
            counts["captions"] += 1
            counts["cut"] += encoded.cut
            counts["unknown"] += encoded.unknown
    return tokens, counts
