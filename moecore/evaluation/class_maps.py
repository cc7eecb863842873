"""Which experts a class prefers: the average map of MoGE's figure 2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moecore.files import StageError
from moecore.records import RoutingRecord


def class_maps(records: Sequence[RoutingRecord], labels: Tensor, classes: int) -> Tensor:
    """Mean clean probability of each expert over the images and tokens of each class; (K, layers, E) fp64, NaN for a class without images.

    records: one per MoE layer, fields (N, T, E); labels: (N,) int in [0, K).  Each map of a class with images sums to 1 over E.
    Raises StageError where records and labels are not of the same images, a label is no class, or the model has no MoE layer.
    """
    if not records:
        raise StageError("class maps: the model has no MoE layers")
    if any(len(record.probs) != len(labels) for record in records):
        raise StageError(f"class maps: {len(records[0].probs)} images were routed, but there are {len(labels)} labels")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise StageError(f"class maps: found labels {int(labels.min())} to {int(labels.max())}; allowed: 0 to {classes - 1}")
    members = torch.nn.functional.one_hot(labels.long(), classes).double()  # (N, K)
    counts = members.sum(dim=0)[:, None]
    return torch.stack([members.T @ record.probs.double().mean(dim=1) / counts for record in records], dim=1)
