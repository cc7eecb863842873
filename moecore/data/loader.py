"""Which images or words a step sees, and where the data lie.

The order is a function of (seed, step): nothing is saved or restored.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import FEW_SHOT, generator_for
from moecore.data.layouts.images import JpegImages
from moecore.data.prepared import Split
from moecore.data.views.warping import MixedSizeImageList, to_device_async
from moecore.tasks.base import Task

# Of a GPU's free memory, for the images of one split: the rest is for the model and its step.
GPU_MEMORY_SHARE = 0.4
CPU_MEMORY_BYTES = 8 << 30  # bytes of a split, beside the CPU


@lru_cache(maxsize=2)
def _epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=generator_for(seed, epoch))


def batch_indices(n: int, batch: int, seed: int, step: int) -> Tensor:
    """The images of a step counted from 0 over the whole training: int64 (batch,).

    The incomplete end of an epoch is dropped.

    Raises UserError where a batch is larger than the set.
    """
    epoch, place = divmod(step, steps_per_epoch(n, batch))
    return _epoch_order(n, seed, epoch)[place * batch : (place + 1) * batch].clone()


def steps_per_epoch(n: int, batch: int) -> int:
    """Whole batches in n images; UserError where there is none."""
    if n < batch:
        raise UserError(
            f"batch is {batch}, but there are only {n} training images; allowed: 1 to {n}"
        )
    return n // batch


class OnDevice(NamedTuple):
    """A split on the device: images uint8 (N, C, H, W), labels int64 (N,) or uint8 (N, K).

    Or volumes float16 (N, 1, D, H, W) and real labels float32 (N,).
    """

    images: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, *pixels), as they are stored, and labels (B,) or (B, K) of indices (B,)."""
        where = to_device_async(indices, self.labels.device)
        return self.images.index_select(0, where), self.labels.index_select(0, where)


class OnDisk(NamedTuple):
    """A split whose images stay memory-mapped; each batch is gathered and copied."""

    images: np.ndarray
    labels: Tensor

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, *pixels), as they are stored, and labels of indices (B,), on one device."""
        device = self.labels.device
        shape = (len(indices), *self.images.shape[1:])
        kind = torch.from_numpy(self.images[:0].copy()).dtype
        batch = torch.empty(shape, dtype=kind, pin_memory=device.type == "cuda")
        # "clip" writes into ``batch`` itself; another mode would copy once more.
        np.take(self.images, indices.numpy(), axis=0, out=batch.numpy(), mode="clip")
        return to_device_async(batch, device), self.labels.index_select(
            0, to_device_async(indices, device)
        )


class EncodedOnDisk(NamedTuple):
    """A split whose images stay whole, as JPEG files; each batch is decoded, in threads."""

    images: JpegImages
    labels: Tensor

    def take(self, indices: Tensor) -> tuple[MixedSizeImageList, Tensor]:
        """Images of different shapes and labels (B,) or (B, K) of CPU indices (B,)."""
        device = self.labels.device
        labels = self.labels.index_select(0, to_device_async(indices, device))
        whole = self.images.whole(indices.numpy())
        return MixedSizeImageList(whole, self.images.size, device), labels


Loaded = OnDevice | OnDisk | EncodedOnDisk


def image_memory_budget(device: torch.device | str) -> int:
    """Bytes that a split's images may take on a device: 8 GiB, or SHARE of a GPU's free."""
    if torch.device(device).type != "cuda":
        return CPU_MEMORY_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(GPU_MEMORY_SHARE * free)


def load_split_for_device(
    split: Split, device: torch.device | str, limit_bytes: int | None = None
) -> Loaded:
    """Put a split's images on the device where they take at most ``limit_bytes`` there, by default
    ``image_memory_budget``; else, and where they are JPEG files, leave them on disk.
    """
    labels = torch.from_numpy(np.array(split.labels)).to(device)
    if isinstance(split.images, JpegImages):
        return EncodedOnDisk(split.images, labels)
    if limit_bytes is None:
        limit_bytes = image_memory_budget(device)
    if split.images.nbytes > limit_bytes:
        return OnDisk(split.images, labels)
    return OnDevice(torch.from_numpy(np.array(split.images)).to(device), labels)


def few_shot_indices(
    task: Task, labels: np.ndarray | Tensor, shots_per_class: int, seed: int
) -> Tensor:
    """Sorted indices of ``shots_per_class`` images of every class that occurs in labels (N,).

    Raises UserError where a class has fewer, and for a task whose labels are not one class each.
    """
    wanted = f"{shots_per_class} images per class asked for"
    if why := task.needs_classes("shots"):
        raise UserError(f"{wanted}, but {why}; allowed: null (all images)")
    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if (counts < shots_per_class).any():
        worst = int(counts.argmin())
        least = counts[worst]
        raise UserError(f"{wanted}, but class {classes[worst]} has {least}; allowed: 1 to {least}")
    random = np.random.default_rng([seed, FEW_SHOT])
    chosen = [random.permutation(np.flatnonzero(labels == c))[:shots_per_class] for c in classes]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


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
