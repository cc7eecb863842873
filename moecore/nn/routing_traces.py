"""What a model says of a few images, and what its routers do with each of their tokens, as text.

N images, T tokens per image, E experts, K outputs.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.encoded_arrays import encode_arrays
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.tasks.base import Task

EXPERTS_PER_TOKEN = 8  # experts of a token: all of eight, the first eight of more
ANSWERS = 3  # classes of an image
BYTE = 255  # experts that a byte can number; one value means that none processed the token
CHOSEN = 128  # the highest bit of a mark
SURE = 127  # a probability of 1 in the other bits


class ImageTraces(Config):
    """N images in one model. Their tokens lie as the finest of its layers' layouts says."""

    # Places in task.answers, of each image the best first; of a mosaic each cell's best
    answers: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]  # their probabilities; of a real target the prediction
    layers: tuple[str, ...]  # of each MoE layer what ``encode_top_experts`` says


def build_image_traces(
    prediction: Tensor,
    records: tuple[RoutingRecord, ...],
    task: Task,
    layouts: Sequence[TokenLayout] = (),
) -> ImageTraces:
    """prediction: (N, K); records: fields (N, T, E), of the same images; all on the CPU.

    layouts: where the tokens of each layer lie, if they may differ; then as ``spread_to_one_grid``
    says.
    """
    answers, values = best_answers(prediction, task)
    if layouts:
        records = spread_to_one_grid(records, layouts)
    return ImageTraces(
        answers=answers.tolist(),
        values=[[round(value, 4) for value in row] for row in values.tolist()],
        layers=[encode_top_experts(record) for record in records],
    )


def spread_to_one_grid(
    records: tuple[RoutingRecord, ...], layouts: Sequence[TokenLayout]
) -> tuple[RoutingRecord, ...]:
    """The layers' records on the finest grid: a coarse token stands at each patch it covers."""
    fine = finest_layout(layouts)
    return tuple(
        record_on_finer_grid(record, layout, fine)
        for record, layout in zip(records, layouts, strict=True)
    )


def finest_layout(layouts: Sequence[TokenLayout]) -> TokenLayout:
    """Return the layout with the most patches."""
    return max(layouts, key=lambda layout: prod(layout.grid))


def record_on_finer_grid(
    record: RoutingRecord, layout: TokenLayout, fine: TokenLayout
) -> RoutingRecord:
    """The record with a token for each patch of the grid ``fine``: that which covers its middle."""
    if layout == fine:
        return record
    special = torch.arange(layout.special)
    places = torch.cat([special, layout.special + coarse_patch_indices(layout, fine)])
    return record.map_tensors(lambda field: field[:, places])


def coarse_patch_indices(layout: TokenLayout, fine: TokenLayout) -> Tensor:
    """The patch of ``layout`` in which the middle of each patch of ``fine`` lies, (P,) int64."""
    index = torch.zeros(1, dtype=torch.int64)
    for axis, (length, own) in enumerate(zip(fine.grid, layout.grid, strict=True)):
        middle = (torch.arange(length) + 0.5) * (fine.size[axis] / length)
        along = (middle / (layout.size[axis] / own)).floor().clamp(0, own - 1).long()
        index = (index[:, None] * own + along).flatten()
    return index


def best_answers(prediction: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Places in ``task.answers`` and their values, (N, A) each, the best of A first.

    Probabilities by softmax, or by the sigmoid where an image may have several classes; of a real
    target the prediction itself in its unit; of a mosaic the best answer of each of A cells.
    """
    if task.cells > 1:
        values, answers = prediction.unflatten(1, (task.cells, -1)).softmax(dim=-1).max(dim=-1)
        return answers, values
    if task.needs_classes("share"):
        shown = prediction if prediction.shape[1] == 1 else prediction[:, :0]  # no embeddings
        return torch.zeros_like(shown, dtype=torch.int64), shown
    if task.needs_classes("one_class"):
        probs = prediction.sigmoid()
    else:
        probs = prediction.softmax(dim=-1)
    values, answers = probs.topk(min(ANSWERS, probs.shape[-1]), dim=-1)
    return answers, values


def encode_top_experts(record: RoutingRecord) -> str:
    """Return the first EXPERTS_PER_TOKEN experts of every token as text (``encode_arrays``).

    Three arrays: (N, T) the expert with the largest combine weight, the highest number of its type
    where no expert processed the token; (N, T, n) experts by combine weight, then those chosen
    without being processed, then by probability; (N, T, n) uint8 marks, the probability of each as
    a share of SURE, plus CHOSEN where it was chosen. Experts are uint8, of more than BYTE uint16.
    """
    combine = record.combine.numpy()
    probs = record.probs.numpy()
    chosen = record.chosen.numpy()
    experts = probs.shape[-1]
    numbers = np.uint8 if experts <= BYTE else np.uint16
    order = np.lexsort((-probs, ~chosen, -combine), axis=-1)[..., :EXPERTS_PER_TOKEN]
    none = np.iinfo(numbers).max
    best = np.where(combine.max(axis=-1) > 0, combine.argmax(axis=-1), none)
    shares = np.rint(np.take_along_axis(probs, order, axis=-1).clip(0, 1) * SURE)
    marks = shares + CHOSEN * np.take_along_axis(chosen, order, axis=-1)
    return encode_arrays(best.astype(numbers), order.astype(numbers), marks.astype(np.uint8))
