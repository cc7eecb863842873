"""Pictures and texts of a user, compared by a model with two towers.

T texts, M tokens of one, d numbers of an embedding.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.data.text.tokenizers import EncodedCaption, Tokenizer, load_tokenizer
from moecore.measure.exploring.caption_word_experts import experts_by_word
from moecore.nn.backbones.two_towers import TwoTowerModel
from moecore.predict.pictures import OutputReader, RoutedText, Row, write_csv
from moecore.tasks.image_text import cosine_matrix, similarity_matrix

MOST = 10_000  # texts: each is a column of the table
LONGEST = 80  # letters of a text below a picture
NEAREST = 5  # matches that are named, both ways

Match = tuple[str, float]  # a picture's name, and its cosine with a text


class Texts(NamedTuple):
    """The texts of a file, as the model reads them."""

    texts: list[str]
    tokenizer: Tokenizer
    encoded: list[EncodedCaption]
    tokens: Tensor  # (T, M) int32
    sides: Tensor  # (T, d + 3)


def read_texts(path: Path, model: TwoTowerModel, folder: Path) -> Texts:
    """Return a file's lines, each once, none blank. Raises UserError where there are none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error}"
        raise UserError(f"{path}: {reason}; --texts is a file with one text per line") from None
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not 1 <= len(texts) <= MOST:
        allowed = f"1 to {MOST:,}, one per line"
        raise UserError(f"{path}: found {len(texts):,} texts; allowed: {allowed}")
    task = model.text.task
    tokenizer = load_tokenizer(folder, task)
    encoded = [tokenizer.encode(text, task.context) for text in texts]
    tokens = torch.tensor([one.tokens for one in encoded], dtype=torch.int32)
    return Texts(texts, tokenizer, encoded, tokens, model.targets(tokens)[:, 0])


def nearest_caption_reader(texts: Texts, pairs: str) -> OutputReader:
    """Return the reading of a picture's side: cosines, and the nearest text with its share."""

    def row(side: Tensor) -> Row:
        near = cosine_matrix(side[None], texts.sides)[0]
        logits = similarity_matrix(side[None].double(), texts.sides.double())[0]
        shares = logits.sigmoid() if pairs == "sigmoid" else logits.softmax(dim=0)
        order = near.argsort(descending=True, stable=True)[:NEAREST].tolist()
        more = [f"{near[place]:.3f} {shorten(texts.texts[place], LONGEST)}" for place in order]
        best = int(near.argmax())
        return Row("", texts.texts[best], float(shares[best]), tuple(near.tolist()), "", more)

    share = "that the pair fits" if pairs == "sigmoid" else "its share among the texts"
    remark = f"numbers of texts are cosines; the probability of an answer: {share}, not calibrated"
    lost = sum(one.cut for one in texts.encoded)
    if lost:
        remark += f"; {lost} of {len(texts.texts)} texts are longer than the context and were cut"
    return OutputReader(tuple(texts.texts), row, remark)


def match_texts_to_pictures(texts: Texts, rows: Sequence[Row]) -> list[list[Match]]:
    """Return for each text the pictures with the largest cosines, best first."""
    good = [row for row in rows if not row.error]
    return [
        [
            (row.file, row.numbers[text])
            for row in sorted(good, key=lambda row: -row.numbers[text])[:NEAREST]
        ]
        for text in range(len(texts.texts))
    ]


def write_best_pictures(path: Path, texts: Texts, matches: Sequence[Sequence[Match]]) -> None:
    """Write the best pictures of each text: text, place from 1 on, file, cosine."""
    lines = [
        (text, str(place), file, f"{cosine:.6g}")
        for text, best in zip(texts.texts, matches, strict=True)
        for place, (file, cosine) in enumerate(best, 1)
    ]
    write_csv(path, [("text", "place", "file", "cosine"), *lines])


def texts_with_experts(
    model: TwoTowerModel, texts: Texts, matches: Sequence[Sequence[Match]]
) -> list[RoutedText]:
    """Return each text with the experts of its words, and its best pictures."""
    read = experts_by_word(model, texts.tokens, texts.tokenizer)
    return [
        RoutedText(
            text, layers, [f"{cosine:.3f} {file}" for file, cosine in best], _unread_words(one)
        )
        for text, layers, best, one in zip(texts.texts, read, matches, texts.encoded, strict=True)
    ]


def _unread_words(encoded: EncodedCaption) -> str:
    words = []
    if encoded.unknown:
        words.append(f"{encoded.unknown} words that the vocabulary does not have")
    if encoded.cut:
        words.append("longer than the context: cut")
    return "; ".join(words)
