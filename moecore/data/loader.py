"""Select and load the images or words of each training step, a function of (seed, step)."""

from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import FEW_SHOT, generator_for
from moecore.data.layouts.images import JpegImages
from moecore.data.prepared import Prepared, Split
from moecore.data.views.warping import MixedSizeImageList, to_device_async
from moecore.tasks.base import Task

# share of a GPU's free memory for the images of one split; the model and its step need the rest
GPU_MEMORY_SHARE = 0.4
CPU_MEMORY_BYTES = 8 << 30  # for the images of one split in main memory


@lru_cache(maxsize=2)
def _epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=generator_for(seed, epoch))


def batch_indices(n: int, batch: int, seed: int, step: int) -> Tensor:
    """Return a step's indices of ``n`` images, int64 (batch,); drop incomplete last batches."""
    epoch, position = divmod(step, steps_per_epoch(n, batch))
    return _epoch_order(n, seed, epoch)[position * batch : (position + 1) * batch].clone()


def steps_per_epoch(n: int, batch: int) -> int:
    if n < batch:
        raise UserError(f"batch is {batch}, with {n} training images; allowed: 1 to {n}")
    return n // batch


class LoadedSplit(NamedTuple):
    images: Tensor | np.ndarray | JpegImages  # (N, C, *pixels); a tensor is on the device
    labels: Tensor  # on the device

    def take(self, indices: Tensor) -> tuple[Tensor | MixedSizeImageList, Tensor]:
        """Return stored images and labels (B,) or (B, K) at CPU ``indices`` (B,)."""
        device = self.labels.device
        rows = to_device_async(indices, device)
        labels = self.labels.index_select(0, rows)
        if isinstance(self.images, Tensor):
            return self.images.index_select(0, rows), labels
        if isinstance(self.images, JpegImages):  # each batch is decoded in threads
            decoded = self.images.decode_uncropped(indices.numpy())
            return MixedSizeImageList(decoded, self.images.size, device), labels
        shape = (len(indices), *self.images.shape[1:])
        kind = torch.from_numpy(self.images[:0].copy()).dtype
        batch = torch.empty(shape, dtype=kind, pin_memory=device.type == "cuda")
        # "clip" writes into ``batch`` directly; other modes copy once more.
        np.take(self.images, indices.numpy(), axis=0, out=batch.numpy(), mode="clip")
        return to_device_async(batch, device), labels


def image_memory_budget(device: torch.device | str) -> int:
    """Return the byte limit of a split's images: fixed on CPU, a share of a GPU's free memory."""
    if torch.device(device).type != "cuda":
        return CPU_MEMORY_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(GPU_MEMORY_SHARE * free)


def load_split_where_it_fits(
    split: Split, device: torch.device | str, limit_bytes: int | None = None
) -> LoadedSplit:
    """Copy a split to ``device`` if its images fit; otherwise copy labels, leave images on disk."""
    labels = torch.from_numpy(np.array(split.labels)).to(device)
    limit_bytes = image_memory_budget(device) if limit_bytes is None else limit_bytes
    if isinstance(split.images, JpegImages) or split.images.nbytes > limit_bytes:
        return LoadedSplit(split.images, labels)
    return LoadedSplit(torch.from_numpy(np.array(split.images)).to(device), labels)


def few_shot_indices(
    task: Task, labels: np.ndarray | Tensor, shots_per_class: int, seed: int
) -> Tensor:
    """Draw ``shots_per_class`` images per class; return sorted indices, UserError if too few."""
    request = f"{shots_per_class} images per class asked for"
    if why := task.needs_classes("shots"):
        raise UserError(f"{request}, but {why}; allowed: null (all images)")
    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if (counts < shots_per_class).any():
        name = classes[counts.argmin()]
        number = counts.min()
        raise UserError(f"{request}, but class {name} has {number}; allowed: 1 to {number}")
    random = np.random.default_rng([seed, FEW_SHOT])
    chosen = [random.permutation(np.flatnonzero(labels == c))[:shots_per_class] for c in classes]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def draw_few_shot_train_indices(data: Prepared, shots: int | None, seed: int) -> np.ndarray | None:
    if shots is None:
        return None
    return few_shot_indices(data.task, data.train.labels, shots, seed).numpy()


# The first pass begins at token 0, each later one at a random token of the first block, so that
# block boundaries differ between passes.
class TextStreams(NamedTuple):
    """A text on a device that training reads as ``batch`` contiguous streams, block by block."""

    tokens: Tensor  # int32 (R, n): words and, if R is 2, their kinds (known groups)
    block: int  # M

    @property
    def labels(self) -> Tensor:
        """The next word of each token, (n − 1,)."""
        return self.tokens[0, 1:]

    def length(self, batch: int) -> int:
        """Return the number of tokens per stream; UserError for two blocks or less."""
        number = self.tokens.shape[1]
        length = number // batch
        if length <= 2 * self.block:
            max_streams = max(0, number // (2 * self.block + 1))
            raise UserError(
                f"batch is {batch}, and the text has {number:,} training tokens; "
                f"allowed: 1 to {max_streams} streams of two blocks of {self.block}"
            )
        return length

    def steps_per_pass(self, batch: int) -> int:
        return _pass_start_and_blocks(self.length(batch), self.block, 0, 0)[1]

    def take(
        self, batch: int, seed: int, step: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, bool]:
        """Return a step's tokens (b, R, M), next words (b, M), and True if streams begin a pass.

        R as in ``tokens``; a pass reads each stream once, and all streams begin it together.
        rows: (b,) indices of the streams to return; None for all, b = batch.
        """
        length = self.length(batch)
        for number in count():
            first, blocks = _pass_start_and_blocks(length, self.block, seed, number)
            if step < blocks:
                break
            step -= blocks
        place = first + step * self.block
        streams = self.tokens[:, : batch * length].view(-1, batch, length)
        if rows is not None:
            streams = streams[:, rows.to(streams.device)]
        part = streams[:, :, place : place + self.block + 1].long()
        return part[:, :, :-1].transpose(0, 1), part[0, :, 1:], step == 0


@lru_cache(maxsize=4096)
def _pass_start_and_blocks(length: int, block: int, seed: int, number: int) -> tuple[int, int]:
    """Return the first token and the number of blocks of pass ``number`` over a stream."""
    first = 0
    if number:
        first = int(torch.randint(block, (), generator=generator_for(seed, number)))
    return first, (length - 1 - first) // block
