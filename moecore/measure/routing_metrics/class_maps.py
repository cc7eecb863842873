"""Which experts a class prefers: the average map of MoGE's figure 2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord


def class_maps(records: Sequence[RoutingRecord], labels: Tensor, classes: int) -> Tensor:
    """Mean clean probability of each expert over the images and tokens of each class.

    (K, layers, E) fp64, NaN for a class without images; each other map sums to 1 over E.  records:
    one per MoE layer, fields (N, T, E); labels: (N,) int in [0, K).  Raises UserError where records
    and labels are not of the same images, a label is no class, or the model has no MoE layer.
    """
    if not records:
        raise UserError("class maps: the model has no MoE layers")
    if any(len(record.probs) != len(labels) for record in records):
        routed = f"{len(records[0].probs)} images were routed"
        raise UserError(f"class maps: {routed}, but there are {len(labels)} labels")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        found = f"found labels {int(labels.min())} to {int(labels.max())}"
        raise UserError(f"class maps: {found}; allowed: 0 to {classes - 1}")
    members = torch.nn.functional.one_hot(labels.long(), classes).double()  # (N, K)
    counts = members.sum(dim=0)[:, None]
    return torch.stack(
        [members.T @ record.probs.double().mean(dim=1) / counts for record in records], dim=1
    )
