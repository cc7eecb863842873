"""Run a model over images in batches and keep what it says; model and process stay as they were.

N images, C channels, H × W pixels, K classes, T tokens, E experts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.backbones.base_model import EncodeOptions, Model
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.tasks.next_token import NextToken


class ImageSequence(Protocol):
    """Images (N, C, *pixels), uint8 or in [0, 1]: an array, a tensor, or JPEG files."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, places: Any, /) -> Any: ...


BATCH = 256  # images of a forward pass, where nothing else is said
TOKENS = 2**13  # of blocks that are read together, those before them counted
LOGITS = 2**19  # of few words at a time on a CPU, 2 MiB: they stay in its cache
ON_GPU = 2**26  # and on a GPU
LEAST = 64  # words at a time: the head's weights are read once for all of them
STREAMS = 32  # read together where one text is
VOXELS = 2**24  # of a batch of volumes: 64 of 64³, 64 MiB in fp32


def predict_in_batches(
    model: nn.Module,
    images: ImageSequence,
    batch: int = BATCH,
    routing: bool = True,
    prediction: bool = True,
) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
    """Logits and routing records of a model over all images, in evaluation mode, in fp32.

    images: (N, C, H, W) or (N, C, D, H, W), uint8 (array, memory map or tensor) or floating point
    in [0, 1].  batch: images a forward pass.
    prediction: false where nobody looks at it; it is then empty, as those of a text are gigabytes.
    Returns logits (N, K), or (N, 1) in the target's unit, and one record of fields (N, T, E) per
    MoE layer, on the CPU; no records with ``routing=False``. The result does not depend on
    ``batch``, which is rounded to whole groups where the model couples images. The mode of every
    module and the global random state are left as they were.
    Raises UserError where there are no images.
    """
    if len(images) == 0:
        raise UserError("prediction: there are no images; the split or the subset is empty")
    logits = []
    records = []
    batch = round_batch_to_groups(model, batch)
    with eval_mode(model), torch.no_grad(), torch.autocast(model_device(model).type, enabled=False):
        for pixels in image_batches(images, batch, model_device(model)):
            if prediction:
                output = model(pixels)
                logits.append(output.prediction.float().cpu())
                kept = output.routing
            else:
                assert isinstance(model, Model)
                kept = model.routing_of(pixels)
            kept = kept if routing else ()
            records.append(tuple(record.map_tensors(Tensor.cpu) for record in kept))
    return torch.cat(logits) if prediction else torch.empty(0), concat_records(records)


def text_block_scores(model: Model, images: ImageSequence, labels: Tensor) -> Tensor:
    """Mean nats per word of each block of a text, (N,) fp64, in evaluation mode, in fp32; of
    predictions that are not kept. images: (N, C, M), labels (N, M), of a split.
    """
    return torch.cat([scores for scores, _ in _iterate_blocks(model, images, labels)])


def block_scores_with_routing(
    model: Model, images: ImageSequence, labels: Tensor
) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
    """Return ``text_block_scores``, and a record (N, T, E) per MoE layer, on the CPU."""
    read = list(_iterate_blocks(model, images, labels))
    records = [tuple(layer.map_tensors(Tensor.cpu) for layer in own) for _, own in read]
    return torch.cat([scores for scores, _ in read]), concat_records(records)


@torch.no_grad()
def text_perplexity(
    model: LanguageTransformer, tokens: Tensor, streams: int, whole: bool = True
) -> float:
    """exp of the mean nats of the next tokens of a text, in evaluation mode, in fp32.

    tokens: (R, n), the words and, where they are known, their kinds.

    The text is cut into so many streams of one length, which are read block after block from an
    empty cache; with ``whole`` a last incomplete block is left out, as papers do. Few streams are
    read in parts, side by side: what a word's prediction depends on is read before each part.
    """
    block = model.image.shape[0]
    number_of_words = tokens.shape[1]
    length = number_of_words // streams
    least = 1
    if whole:
        least = block
    if length <= least:
        most = number_of_words // (block + 1)
        problem = f"the text has {number_of_words:,} words, and {streams} streams read it"
        raise UserError(
            f"perplexity: {problem}; allowed: 1 to {most} streams of a block of {block}"
        )
    known = length - 1 if not whole else (length - 1) // block * block  # words with one after them
    number = math.ceil(known / block)
    text = tokens[:, : streams * length].view(-1, streams, length).long().to(model_device(model))
    rows, (right, *_) = (
        pad(text[:, :, start : start + known], (0, number * block - known), value=-1).view(
            -1, streams, number, block
        )
        for start in (0, 1)
    )
    parts = max(1, min(number, STREAMS // streams)) if coupled_image_count(model) == 1 else 1
    size, lead = math.ceil(number / parts), model.reach if parts > 1 else 0
    states = model.initial_states(streams * parts, text.device)
    total, count = 0.0, 0
    with eval_mode(model):
        for place in range(-lead, size):
            at = torch.arange(parts, device=text.device) * size + place
            there = ((at >= 0) & (at < number))[:, None]
            own, *kinds = rows[:, :, at.clamp(0, number - 1)].where(there, -1).flatten(1, 2)
            (final, _, _), states = model.read(own, states, EncodeOptions(), max(0, -place), *kinds)
            labels = right[:, at.clamp(0, number - 1)].where(there, -1).flatten(0, 1)
            if place >= 0:
                nats = _word_nats(model, final[labels >= 0], labels[labels >= 0])
                total, count = total + float(nats.sum()), count + len(nats)
    return math.exp(total / count)


def _word_nats(model: LanguageTransformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the nats of each word that follows the final tokens (n, d): (n,) fp64.

    Few logits are there at a time, so that they stay in the cache: five times as fast.
    """
    task = model.image.task
    assert isinstance(task, NextToken)
    rows = words_at_once(task.outputs, tokens.device)
    parts = zip(tokens.split(rows), labels.split(rows), strict=True)
    return torch.cat([task.token_loss(model.predict(few), right) for few, right in parts])


def words_at_once(outputs: int, device: torch.device) -> int:
    """Return for how many words to compute logits over ``outputs`` words at once."""
    logits = ON_GPU
    if device.type == "cpu":
        logits = LOGITS
    return max(LEAST, logits // outputs)


def _iterate_blocks(
    model: Model, images: ImageSequence, labels: Tensor
) -> Iterator[tuple[Tensor, tuple[RoutingRecord, ...]]]:
    assert isinstance(model, LanguageTransformer)
    size = max(1, TOKENS // math.prod(images.shape[1:]))
    with eval_mode(model), torch.no_grad(), torch.autocast(model_device(model).type, enabled=False):
        for words, right in zip(
            image_batches(images, size, model_device(model)), labels.split(size), strict=True
        ):
            tokens, records, _ = model.encode(words)
            own = right.long().to(words.device)
            nats = _word_nats(model, tokens.flatten(0, 1), own.flatten())
            yield nats.view(own.shape).mean(dim=1).cpu(), records


def read_block(
    model: LanguageTransformer, images: Tensor, labels: Tensor
) -> Callable[[int], Tensor]:
    """Return what reads a block so many times at once: mean nats per word, (reads,) fp64.

    images: (1, C, M), of a split; the blocks before the last are read now, and once.  labels:
    (1, M). In evaluation mode; without gradient.
    """
    words, kinds = model.split_kinds(images)
    states = model.read_earlier(words, kinds)

    @torch.no_grad()
    def read(times: int) -> Tensor:
        own, known = (one[:, -1].expand(times, -1) for one in (words, kinds))
        (tokens, _, _), _ = model.read(own, states.expand(-1, times, -1, -1), kinds=known)
        right = labels.long().expand(times, -1)
        return _word_nats(model, tokens.flatten(0, 1), right.flatten()).view(times, -1).mean(dim=1)

    return read


def image_batches(
    images: ImageSequence, size: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Images in order, at most ``size`` at a time, as fp32 in [0, 1] on ``device``.

    Volumes come so many at a time as have VOXELS voxels at most (one at least): a batch that is
    small for images is gigabytes of volumes.
    """
    if len(images.shape) == 5:
        size = min(size, max(1, VOXELS // math.prod(images.shape[1:])))
    for start in range(0, len(images), size):
        part = images[start : start + size]
        if not isinstance(part, Tensor):
            part = torch.from_numpy(np.array(part))
        if part.dtype in (torch.int32, torch.int64):
            yield part.to(device)  # words
            continue
        pixels = part.to(device).float()
        # divided where the model is: a byte a pixel is what crosses to the device
        yield pixels / 255 if part.dtype == torch.uint8 else pixels


def round_batch_to_groups(model: nn.Module, batch: int) -> int:
    """The batch, cut to whole groups of images that share an expert's capacity; one at least.

    So that the same images meet, whatever the batch.
    """
    group = coupled_image_count(model)
    return max(1, batch // group) * group


def coupled_image_count(model: nn.Module) -> int:
    """Images whose predictions depend on each other in evaluation mode; 1 where none do."""
    return math.lcm(*(getattr(module, "coupled", 1) for module in model.modules()))


def concat_records(records: list[tuple[RoutingRecord, ...]]) -> tuple[RoutingRecord, ...]:
    """Records of consecutive batches as the records of all images, layer by layer."""
    return tuple(
        RoutingRecord(
            *(torch.cat(field) for field in zip(*layer, strict=True) if field[0] is not None)
        )
        for layer in zip(*records, strict=True)
    )


def model_device(model: nn.Module) -> torch.device:
    """Return where the model's parameters lie (the CPU where it has none)."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes and the random state are as before."""
    modes = [(module, module.training) for module in model.modules()]
    device = model_device(model)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
