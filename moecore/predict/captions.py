"""Pictures and texts of a user, compared by a model with two towers.

T texts, M tokens of one, d numbers of an embedding.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError, whole_text
from moecore.core.plain import spreadsheet_cell
from moecore.data.text.tokenizers import EncodedCaption, Tokenizer, load_tokenizer
from moecore.measure.exploring.words import experts_by_word
from moecore.nn.backbones.two_towers import TwoTowerModel
from moecore.predict.page import Spoken
from moecore.predict.pictures import Predicted, Reading, Row
from moecore.tasks.recall import cosine_matrix, similarity_matrix

MOST = 10_000  # texts: each is a column of the table
LONGEST = 80  # letters of a text below a picture
NEAREST = 5  # matches that are named, both ways


class Texts(NamedTuple):
    """The texts of a file, as the model reads them."""

    texts: list[str]
    tokenizer: Tokenizer
    encoded: list[EncodedCaption]
    sides: Tensor  # (T, d + 3)


def read_texts(path: Path, model: TwoTowerModel, folder: Path) -> Texts:
    """The lines of a file, blank ones left out, each once. Raises UserError for a file that cannot
    be read or has none, and for a model folder without its vocabulary.
    """
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
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
    return Texts(texts, tokenizer, encoded, model.targets(tokens)[:, 0])


def compare_captions(texts: Texts, pairs: str) -> Reading:
    """A cosine per text; the answer is the nearest one, with its share of all texts (or, of a model
    of pairs, the probability that it fits).
    """

    def row(name: str, side: Tensor) -> Row:
        near = cosine_matrix(side[None], texts.sides)[0]
        logits = similarity_matrix(side[None].double(), texts.sides.double())[0]
        shares = logits.sigmoid() if pairs == "sigmoid" else logits.softmax(dim=0)
        best = int(near.argmax())
        return Row(name, texts.texts[best], float(shares[best]), tuple(near.tolist()))

    def more(row: Row) -> tuple[str, ...]:
        order = torch.tensor(row.numbers).argsort(descending=True, stable=True)
        return tuple(
            f"{row.numbers[place]:.3f} {shorten(texts.texts[place], LONGEST)}"
            for place in order.tolist()[:NEAREST]
        )

    share = "that the pair fits" if pairs == "sigmoid" else "its share among the texts"
    remark = f"numbers of texts are cosines; the probability of an answer: {share}, not calibrated"
    lost = sum(one.cut for one in texts.encoded)
    if lost:
        remark += f"; {lost} of {len(texts.texts)} texts are longer than the context and were cut"
    return Reading(tuple(texts.texts), row, remark, more)


def nearest_pictures(predicted: Predicted) -> list[list[tuple[str, float]]]:
    """For each text the pictures with the largest cosines, best first."""
    rows = [row for row in predicted.rows if not row.error]
    if not rows:
        return [[] for _ in predicted.columns]
    near = torch.tensor([row.numbers for row in rows], dtype=torch.float64)
    first = near.sort(dim=0, descending=True, stable=True)
    return [
        [
            (rows[int(first.indices[place, text])].file, float(first.values[place, text]))
            for place in range(min(NEAREST, len(rows)))
        ]
        for text in range(near.shape[1])
    ]


def write_matches(
    path: Path, texts: Sequence[str], best_pictures: list[list[tuple[str, float]]]
) -> None:
    """The best pictures of each text: text, place from 1 on, file, cosine."""
    with whole_text(path) as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(("text", "place", "file", "cosine"))
        for text, matches in zip(texts, best_pictures, strict=True):
            for place, (file, cosine) in enumerate(matches, 1):
                cells = (text, place, file, f"{cosine:.6g}")
                writer.writerow(map(spreadsheet_cell, cells))


def texts_with_experts(
    model: TwoTowerModel, texts: Texts, matches: list[list[tuple[str, float]]]
) -> list[Spoken]:
    """Each text with the experts of its words, and its best pictures."""
    tokens = torch.tensor([one.tokens for one in texts.encoded], dtype=torch.int32)
    read = experts_by_word(model, tokens, texts.tokenizer)
    return [
        Spoken(
            text, layers, [f"{cosine:.3f} {file}" for file, cosine in best], describe_unread(one)
        )
        for text, layers, best, one in zip(texts.texts, read, matches, texts.encoded, strict=True)
    ]


def describe_unread(encoded: EncodedCaption) -> str:
    """What of a text the model does not read, in words."""
    words = []
    if encoded.unknown:
        words.append(f"{encoded.unknown} words that the vocabulary does not have")
    if encoded.cut:
        words.append("longer than the context: cut")
    return "; ".join(words)
