"""Encode predictions for a few images, and each token's routing, as short texts for JSON."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from moecore.core import arrays_as_text, config
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.tasks.base import Task

MAX_EXPERTS = 8  # per token
MAX_CLASSES = 3  # per image
MAX_BYTE_EXPERTS = 255  # with ids in a byte; one value means that no expert processed the token
CHOSEN_BIT = 128  # the highest bit of a mark
PROBABILITY_ONE = 127  # a probability of 1, in the other bits of a mark


class EncodedPredictionsAndRouting(config.Config):
    """Best answers and, on the finest grid of tokens, routing of N images, encoded for JSON."""

    # Indices into task.answers, best first per image; for a mosaic the best per cell
    answers: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]  # their probabilities; for a real target the prediction
    layers: tuple[str, ...]  # per MoE layer the text of ``encode_top_experts``


def encode_predictions_and_records(
    prediction: Tensor,
    records: tuple[RoutingRecord, ...],
    task: Task,
    layouts: Sequence[TokenLayout] = (),
) -> EncodedPredictionsAndRouting:
    """Encode predictions (N, K) and CPU records (N, T, E), which may have different layouts."""
    answers, values = select_top_answers(prediction, task)
    if layouts:
        records = put_records_on_finest_grid(records, layouts)
    return EncodedPredictionsAndRouting(
        answers=answers.tolist(),
        values=[[round(value, 4) for value in row] for row in values.tolist()],
        layers=[encode_top_experts(record) for record in records],
    )


def put_records_on_finest_grid(
    records: tuple[RoutingRecord, ...], layouts: Sequence[TokenLayout]
) -> tuple[RoutingRecord, ...]:
    """Return the records of all layers on the finest of ``layouts``; coarse tokens are repeated."""
    fine = finest_layout(layouts)
    pairs = zip(records, layouts, strict=True)
    return tuple(regrid_record(record, layout, fine) for record, layout in pairs)


def finest_layout(layouts: Sequence[TokenLayout]) -> TokenLayout:
    return max(layouts, key=lambda layout: prod(layout.grid))


def regrid_record(record: RoutingRecord, layout: TokenLayout, fine: TokenLayout) -> RoutingRecord:
    """Convert a record to grid ``fine``: each patch gets the token that covers its centre."""
    if layout == fine:
        return record
    special = torch.arange(layout.special)
    places = torch.cat([special, layout.special + coarse_patch_indices(layout, fine)])
    return record.map_tensors(lambda field: field[:, places])


def coarse_patch_indices(layout: TokenLayout, fine: TokenLayout) -> Tensor:
    """Return the patch of ``layout`` that contains the centre of each patch of ``fine``, (P,)."""
    index = torch.zeros(1, dtype=torch.int64)
    for axis, (length, coarse) in enumerate(zip(fine.grid, layout.grid, strict=True)):
        centres = (torch.arange(length) + 0.5) * (fine.size[axis] / length)
        along = (centres / (layout.size[axis] / coarse)).floor().clamp(0, coarse - 1).long()
        index = (index[:, None] * coarse + along).flatten()
    return index


def select_top_answers(prediction: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return each image's A best answers, indices of ``task.answers``, and their values, (N, A)."""
    # Values are probabilities by softmax, or by the sigmoid if an image can have several classes;
    # for a real target the prediction in its unit; for a mosaic the best answer per cell.
    if task.cells > 1:
        values, answers = prediction.unflatten(1, (task.cells, -1)).softmax(dim=-1).max(dim=-1)
        return answers, values
    if task.needs_classes("share"):
        values = prediction if prediction.shape[1] == 1 else prediction[:, :0]  # no embeddings
        return torch.zeros_like(values, dtype=torch.int64), values
    if task.needs_classes("one_class"):
        probs = prediction.sigmoid()
    else:
        probs = prediction.softmax(dim=-1)
    values, answers = probs.topk(min(MAX_CLASSES, probs.shape[-1]), dim=-1)
    return answers, values


def encode_top_experts(record: RoutingRecord) -> str:
    """Encode each token's best experts, at most MAX_EXPERTS, and probabilities as a text."""
    # Three arrays: (N, T) the expert with the largest combine weight, or the highest number of the
    # dtype if no expert processed the token; (N, T, n) experts by combine weight, then chosen but
    # unprocessed ones, then by probability; (N, T, n) uint8 marks, probability · PROBABILITY_ONE,
    # plus CHOSEN_BIT if chosen. Experts: uint16 above MAX_BYTE_EXPERTS.
    combine = record.combine.numpy()
    probs = record.probs.numpy()
    chosen = record.chosen.numpy()
    dtype = np.uint8 if probs.shape[-1] <= MAX_BYTE_EXPERTS else np.uint16
    order = np.lexsort((-probs, ~chosen, -combine), axis=-1)[..., :MAX_EXPERTS]
    best = np.where(combine.max(axis=-1) > 0, combine.argmax(axis=-1), np.iinfo(dtype).max)
    shares = np.rint(np.take_along_axis(probs, order, axis=-1).clip(0, 1) * PROBABILITY_ONE)
    marks = (shares + CHOSEN_BIT * np.take_along_axis(chosen, order, axis=-1)).astype(np.uint8)
    return arrays_as_text.encode_concatenated_arrays(best.astype(dtype), order.astype(dtype), marks)
