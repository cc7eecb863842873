"""Run a model over images in batches and keep what it says; nothing else about the model or the
process changes.

N images, C channels, H × W pixels, K classes, T tokens, E experts.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord
from moecore.nn.backbones.model import Model

NUMBERS = 2**26  # of a batch's predictions, where they are many
VOXELS = 2**24  # of a batch of volumes: 64 of 64³, 64 MiB in fp32


def predictions(
    model: nn.Module, images, batch: int, routing: bool = True, prediction: bool = True
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
    batch = whole_groups(model, batch)
    with evaluating(model), torch.no_grad(), torch.autocast(device_of(model).type, enabled=False):
        for pixels in batches(images, batch, device_of(model)):
            output = model(pixels)
            if prediction:
                logits.append(output.prediction.float().cpu())
            kept = output.routing if routing else ()
            records.append(tuple(RoutingRecord(*(f.cpu() for f in record)) for record in kept))
    return torch.cat(logits) if prediction else torch.empty(0), joined(records)


def scores_of_blocks(model: Model, images, labels: Tensor) -> Tensor:
    """The task's score of each item, (N,) fp64, of predictions that are not kept; in evaluation
    mode, in fp32. images, labels: (N, …), of a split.
    """
    return torch.cat([scores for scores, _ in _block_by_block(model, images, labels)])


def blocks_read(model: Model, images, labels: Tensor) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
    """The same, and one record of fields (N, T, E) per MoE layer, on the CPU."""
    read = list(_block_by_block(model, images, labels))
    records = [tuple(RoutingRecord(*(f.cpu() for f in layer)) for layer in own) for _, own in read]
    return torch.cat([scores for scores, _ in read]), joined(records)


def _block_by_block(
    model: Model, images, labels: Tensor
) -> Iterator[tuple[Tensor, tuple[RoutingRecord, ...]]]:
    task = model.image.task
    size = max(1, NUMBERS // (task.outputs * math.prod(images.shape[1:])))
    with evaluating(model), torch.no_grad(), torch.autocast(device_of(model).type, enabled=False):
        for words, right in zip(
            batches(images, size, device_of(model)), labels.split(size), strict=True
        ):
            said = model(words)
            yield task.scores(said.prediction.float(), right.to(words.device)).cpu(), said.routing


def batches(images, size: int, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Images in order, at most ``size`` at a time, as fp32 in [0, 1] on ``device``; uint8 is
    divided by 255.

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


def whole_groups(model: nn.Module, batch: int) -> int:
    """The batch, cut to whole groups of images that share an expert's capacity; one at least.

    So that the same images meet, whatever the batch.
    """
    group = coupled(model)
    return max(1, batch // group) * group


def coupled(model: nn.Module) -> int:
    """Images whose predictions depend on each other in evaluation mode; 1 where none do."""
    return math.lcm(*(getattr(module, "coupled", 1) for module in model.modules()))


def joined(records: list[tuple[RoutingRecord, ...]]) -> tuple[RoutingRecord, ...]:
    """Records of consecutive batches as the records of all images, layer by layer."""
    return tuple(
        RoutingRecord(*(torch.cat(field) for field in zip(*layer, strict=True)))
        for layer in zip(*records, strict=True)
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters lie (the CPU where it has none)."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module's own mode and the global random state are as
    before.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
