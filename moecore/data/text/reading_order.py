"""The order in which a language model is trained on a text: a function of (seed, step)."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import generator_for


class StreamPosition(NamedTuple):
    """M tokens of every stream from ``place`` on; ``anew`` where nothing is remembered."""

    place: int
    anew: bool


class TextStreams(NamedTuple):
    """A text on a device as ``batch`` contiguous streams, read block after block.

    The text is cut to a multiple of ``batch``. The first reading begins at token 0, each later one
    at a random token of the first block, so that blocks are cut elsewhere.
    """

    tokens: Tensor  # (R, n) int32: words and, where they are known, their kinds
    block: int  # M

    @property
    def labels(self) -> Tensor:
        """The token after each, (n − 1,)."""
        return self.tokens[0, 1:]

    def length(self, batch: int) -> int:
        """Tokens of each of ``batch`` streams. Raises UserError where that leaves no block."""
        number = self.tokens.shape[1]
        length = number // batch
        if length <= 2 * self.block:
            given = f"batch is {batch}, and the text has {number:,} training tokens"
            most = max(0, number // (2 * self.block + 1))
            raise UserError(f"{given}; allowed: 1 to {most} streams of two blocks of {self.block}")
        return length

    def steps(self, batch: int) -> int:
        """Updates in which all of the text is read once."""
        return count_blocks(self.length(batch), self.block, 0)

    def take(
        self, batch: int, seed: int, step: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, bool]:
        """Return what step ``step`` (from 0) learns from: rows (b, R, M), the next words (b, M),
        and whether streams begin anew. rows: which of the ``batch`` streams; None for all.
        """
        length = self.length(batch)
        reading = reading_at_step(length, self.block, seed, step)
        streams = self.tokens[:, : batch * length].view(-1, batch, length)
        if rows is not None:
            streams = streams[:, rows.to(streams.device)]
        part = streams[:, :, reading.place : reading.place + self.block + 1].long()
        return part[:, :, :-1].transpose(0, 1), part[0, :, 1:], reading.anew


def count_blocks(length: int, block: int, first: int) -> int:
    """Whole blocks with a next token of a stream that is read from ``first`` on."""
    return (length - 1 - first) // block


def reading_at_step(length: int, block: int, seed: int, step: int) -> StreamPosition:
    """Return what step ``step`` reads."""
    number = 0
    while True:
        first, count = _reading_pass(length, block, seed, number)
        if step < count:
            return StreamPosition(first + step * block, step == 0)
        step -= count
        number += 1


@lru_cache(maxsize=4096)
def _reading_pass(length: int, block: int, seed: int, number: int) -> tuple[int, int]:
    """First token and number of blocks of a reading of all streams."""
    first = 0
    if number:
        first = int(torch.randint(block, (), generator=generator_for(seed, number)))
    return first, count_blocks(length, block, first)
