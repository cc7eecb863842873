"""The first epochs of region experts: volumes that keep one tissue, and where their tokens are sent (ERMoE-ba, algorithm 2, line 1).

B volumes, C channels, D × H × W voxels, R tissues of the data, T tokens per volume, E experts.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.data.prepared import Prepared
from moecore.data.sampling import send
from moecore.evaluation.regions import isolate
from moecore.files import StageError
from moecore.records import Layout
from moecore.training.method import Method


class WarmStart(NamedTuple):
    """What the warm start of a method needs of the training data; a step is a function of (images, step) alone."""

    masks: np.ndarray  # uint8 (N, R, D, H, W), tissue share × 255, memory-mapped
    channels: tuple[int, ...]  # of ``masks``, for each region expert
    epochs: int
    experts: int

    def isolated(self, volumes: Tensor, indices: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The volumes (B, C, D, H, W) of ``indices`` (B,), each times the share of one tissue, and its expert (B,) int64.

        Tissues take turns within a batch and from step to step, so every expert learns at every step.
        """
        region = (torch.arange(len(indices)) + step) % len(self.channels)
        chosen = np.array(self.channels)[region.numpy()]
        share = send(torch.from_numpy(np.array(self.masks[indices.numpy(), chosen])), volumes.device)
        return isolate(volumes, share), region

    def preference(self, views: Tensor, region: Tensor, layout: Layout) -> Tensor:
        """Where the tokens of isolated views (B, C, D, H, W) in [0, 1] are sent: int8 (B, T, E), as in RoutingContext.

        region: (B,), the expert of each view's tissue.  Cubes with any of it: that expert, no other region expert. Others, and special tokens: free.
        """
        held = adaptive_max_pool3d(views.amax(dim=1, keepdim=True), layout.grid).flatten(1) > 0
        held = torch.cat([held.new_zeros(len(held), layout.special), held], dim=1)
        wish = torch.zeros(len(views), self.experts, dtype=torch.int8)
        wish[:, : len(self.channels)] = -1
        wish.scatter_(1, region[:, None], 1)
        return send(wish, views.device)[:, None, :] * held[:, :, None].to(torch.int8)


def warm_start(method: Method, data: Prepared) -> WarmStart | None:
    """The warm start of ``method`` on the training split; None for a method without one.

    Raises StageError where the data has no maps of its tissues.
    """
    if method.regions is None or not method.regions.warm_start_epochs:
        return None
    channels = region_channels(method.regions.experts, data.card)
    return WarmStart(data.regions("train"), channels, method.regions.warm_start_epochs, method.experts.number)


def region_channels(names: tuple[str, ...], card: dict) -> tuple[int, ...]:
    """The place of each tissue among the data's maps. Raises StageError, naming what there is."""
    there = tuple(card.get("regions", ()))
    if lacking := [name for name in names if name not in there]:
        found = f"these data have {'maps of ' + ', '.join(there) if there else 'no tissue maps'}"
        raise StageError(f"regions.experts: found {', '.join(lacking)}, but {found}; choose other data, or leave out regions")
    return tuple(there.index(name) for name in names)
