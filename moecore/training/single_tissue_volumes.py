"""Training on volumes that keep one tissue: the warm start of region experts (ERMoE-ba, algorithm
2, line 1), and afterwards as an augmentation.

B volumes, C channels, D × H × W voxels, R tissues of the data, T tokens per volume, E experts.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.core.files import UserError
from moecore.core.ranks import has_process_group
from moecore.core.routing_records import Batch, TokenLayout
from moecore.core.streams import BatchDraws
from moecore.data.prepared import Prepared
from moecore.data.views.warping import to_device_async
from moecore.training.method import Method

# The region of a volume of which nothing is taken away, and of a token that belongs to no expert.
WHOLE = -1


class TissueIsolationSchedule(NamedTuple):
    """Which volumes of a step keep one tissue, and where their tokens belong."""

    masks: np.ndarray  # uint8 (N, R, D, H, W), tissue share × 255, memory-mapped
    channels: tuple[int, ...]  # of ``masks``, for each region expert
    alone: range  # epochs, from 0, in which every volume keeps one tissue; before them none does
    share: float  # afterwards, of the volumes

    def isolated(
        self,
        volumes: Tensor,
        indices: Tensor,
        step: int,
        epoch: int,
        source: Generator | BatchDraws,
    ) -> tuple[Tensor, Tensor]:
        """The volumes (B, C, D, H, W) of ``indices`` (B,), some times the share of one tissue, and
        which region each keeps: (B,) int64, or WHOLE.

        Regions take turns, so every expert learns at every step. Outside ``alone`` one volume at
        least stays whole. source: a generator on the CPU, or the draws of these volumes.
        """
        draws = BatchDraws.of(source, len(indices))
        region = (torch.arange(draws.whole) + step) % len(self.channels)
        if epoch not in self.alone:
            share = self.share if epoch >= self.alone.stop else 0.0
            left = torch.rand(draws.whole, generator=draws.generator)
            region = region.where((left < share) & (left < left.max()), WHOLE)
        region = draws.select_rows(region)
        kept = (region != WHOLE).nonzero()[:, 0]
        if not len(kept):
            return volumes, region
        chosen = np.array(self.channels)[region[kept].numpy()]
        masks = torch.from_numpy(np.array(self.masks[indices[kept].numpy(), chosen]))
        changed = volumes.clone()
        where = to_device_async(kept, volumes.device)
        changed[where] = keep_only_tissue(volumes[where], to_device_async(masks, volumes.device))
        return changed, region

    def marked(self, batch: Batch, region: Tensor, epoch: int, layout: TokenLayout) -> Batch:
        """The batch with what its isolated views teach; region: (B,) as ``isolated`` gave it.

        In the epochs ``alone`` age is learned from them too. Later they teach the routers only:
        where they taught age as well some trainings stayed at the median age.
        """
        # Of ranks one may have none where another has some, and all must compute the same terms.
        if not has_process_group() and bool((region == WHOLE).all()):
            return batch
        batch = batch._replace(belongs=self.belongs(batch.images, region, layout))
        if epoch in self.alone:
            return batch
        whole = (region == WHOLE).nonzero()[:, 0]
        return batch._replace(learned=to_device_async(whole, batch.images.device))

    def belongs(self, views: Tensor, region: Tensor, layout: TokenLayout) -> Tensor:
        """The expert of each token of views (B, C, D, H, W) in [0, 1], as in Batch: int64 (B, T).

        region: (B,) as ``isolated`` gave it.  Cubes with any of a region: its expert. Other cubes,
        special tokens and whole volumes: -1, none.
        """
        held = adaptive_max_pool3d(views.amax(dim=1, keepdim=True), layout.grid).flatten(1) > 0
        held = torch.cat([held.new_zeros(len(held), layout.special), held], dim=1)
        return torch.where(held, to_device_async(region, views.device)[:, None], WHOLE)


def build_tissue_isolation(
    method: Method, data: Prepared, subset: np.ndarray | None = None
) -> TissueIsolationSchedule | None:
    """Return what ``method`` isolates of the training split (of its volumes ``subset``, if given);
    None where it learns from whole volumes only.

    Raises UserError where the data has no maps of its tissues.
    """
    regions = method.regions
    if regions is None or not method.isolates:
        return None
    channels = region_channels(regions.experts, data.card)
    masks = data.regions("train")
    if subset is not None:
        masks = masks[subset]
    alone = range(regions.after, regions.after + regions.warm_start_epochs)
    return TissueIsolationSchedule(masks, channels, alone, regions.isolated)


def region_channels(names: tuple[str, ...], card: dict) -> tuple[int, ...]:
    """The place of each tissue among the data's maps. Raises UserError, naming what there is."""
    there = tuple(card.get("regions", ()))
    if lacking := [name for name in names if name not in there]:
        maps = f"maps of {', '.join(there)}" if there else "no tissue maps"
        problem = f"found {', '.join(lacking)}, but these data have {maps}"
        raise UserError(f"regions.experts: {problem}; choose other data, or leave out regions")
    return tuple(there.index(name) for name in names)


def keep_only_tissue(volumes: Tensor, share: Tensor) -> Tensor:
    """Volumes (B, C, D, H, W) times the share (B, D, H, W) of a tissue, uint8 0 … 255."""
    return volumes * (share.unsqueeze(1).to(volumes.dtype) / 255)
