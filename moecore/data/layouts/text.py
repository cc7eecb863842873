"""Text: ``{train,validation,test}_tokens.npy``, int32 (n,), and ``vocabulary.txt``.

The vocabulary has one word per line, in the order of token numbers. A split's items are blocks of M
tokens, each read with the C − 1 blocks before it (see ``cut_labelled_blocks``). A token's
kind is a known group, such as its dialect; where stored, ``…_truth.npy`` is uint8 (n,).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, write_atomic
from moecore.data.card import SPLITS, Card, open_array, save_array, write_card
from moecore.tasks import base, next_token

END = "<eos>"
UNKNOWN = "<unk>"
BEFORE_TEXT = -1  # the token before a text's first


class TokenizedText(NamedTuple):
    tokens: Mapping[str, np.ndarray]  # split → int32 (n,)
    vocabulary: Sequence[str]
    more: Mapping[str, Any]  # additional entries of card.json, such as checksums of what was read
    truth: Mapping[str, np.ndarray] = {}  # split → uint8 (n,), each token's kind; 0: unknown


def write_text(folder: Path, settings: Config, card: Card, text: TokenizedText) -> dict[str, Any]:
    """Write a text and card.json, return the card; UserError for a split shorter than one block."""
    card = card.check_has_no_problem()
    tokens, vocabulary, more, truth = text
    (block,) = card.shape
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        if len(tokens[split]) <= block:
            raise UserError(
                f"{card.name}: the split {split} has {len(tokens[split])} tokens; "
                f"a block of {block} needs more"
            )
        save_array(folder / f"{split}_tokens.npy", tokens[split])
        if truth:
            save_array(folder / f"{split}_truth.npy", truth[split])
    write_atomic(folder / "vocabulary.txt", "".join(f"{word}\n" for word in vocabulary))
    files = [*(f"{split}_tokens.npy" for split in SPLITS), "vocabulary.txt"]
    files += [f"{split}_truth.npy" for split in truth]
    unknown = list(vocabulary).index(UNKNOWN)
    return write_card(
        folder,
        settings,
        card._replace(task=next_token.NextToken(words=len(vocabulary))),
        files,
        images={split: (len(tokens[split]) - 1) // block for split in SPLITS},
        tokens={split: len(tokens[split]) for split in SPLITS},
        counts={
            split: {"<unk>": int((tokens[split] == unknown).sum()), "tokens": len(tokens[split])}
            for split in SPLITS
        },
        mean=[0.0] * card.channels,
        std=[1.0] * card.channels,
        **more,
    )


def open_text(
    folder: Path, card: Mapping[str, Any], task: base.Task, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Open a split's blocks and next words (N, M), as ``cut_labelled_blocks`` cuts them.

    Blocks are (N, C, M), C = context + 1; (N, 2C, M) if C blocks of the tokens' kinds follow.
    """
    rows = open_tokens_with_kinds(folder, card, split)
    block = card["size"][0]
    context = card["channels"] - 1
    images, labels = cut_labelled_blocks(rows[0], block, context)
    task.check(labels, f"{folder / f'{split}_tokens.npy'}: tokens")
    if len(rows) > 1:
        images = np.concatenate([images, cut_labelled_blocks(rows[1], block, context)[0]], axis=1)
    return images, labels


def open_tokens_with_kinds(folder: Path, card: Mapping[str, Any], split: str) -> np.ndarray:
    """Open a split's tokens, int32 (1, n); (2, n) if their kinds (such as dialects) are stored."""
    shape = (card["tokens"][split],)
    tokens = open_array(folder / f"{split}_tokens.npy", shape, np.int32)
    if "truth" not in card:
        return tokens[None]
    kinds = open_array(folder / f"{split}_truth.npy", shape, np.uint8)
    return np.stack([tokens, kinds.astype(np.int32)])


def cut_labelled_blocks(
    tokens: np.ndarray, block: int, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return N blocks with ``context`` earlier ones, (N, context + 1, M), and next words (N, M)."""
    # C = context + 1, the block is last, −1 before the text's start; N = (n − 1) // M drops an
    # incomplete last block. The windows are views of one array.
    number = (len(tokens) - 1) // block
    before = np.full(context * block, BEFORE_TEXT, tokens.dtype)
    padded = np.concatenate([before, tokens]) if context else tokens
    step = padded.strides[0]
    shape, strides = (number, context + 1, block), (block * step, block * step, step)
    images = np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)
    return images, tokens[1 : number * block + 1].reshape(number, block)
