"""Train on volumes reduced to one of R tissues (ERMoE-ba, algorithm 2, line 1)."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.core import files, ranks, streams
from moecore.core.routing_records import Batch, TokenLayout
from moecore.data.prepared import Prepared
from moecore.data.views.warping import to_device_async
from moecore.training.method import Method

NO_TISSUE = -1  # the region of an unchanged volume, and of a token that belongs to no expert


class TissueIsolationSchedule(NamedTuple):
    """Which volumes of a step are reduced to one tissue, and the expert of each tissue."""

    masks: np.ndarray  # uint8 (N, R, D, H, W), tissue share × 255, memory-mapped
    channels: tuple[int, ...]  # of ``masks``, per region expert
    warm_start: range  # epochs, from 0, in which all volumes are reduced; earlier, none
    share: float  # share of the volumes that are reduced in later epochs

    def isolate_volumes(
        self, volumes: Tensor, indices: Tensor, step: int, epoch: int, draws: streams.BatchDraws
    ) -> tuple[Tensor, Tensor]:
        """Reduce some volumes (B, C, D, H, W) to one tissue; return all, and tissues (B,) or −1."""
        # indices: (B,), of volumes in the split. The regions, (B,) int64, are tissues or NO_TISSUE.
        # Regions take turns, so that every expert learns at every step.
        region = (torch.arange(draws.batch_size) + step) % len(self.channels)
        if epoch not in self.warm_start:
            share = self.share if epoch >= self.warm_start.stop else 0.0
            chances = torch.rand(draws.batch_size, generator=draws.generator)
            # The volume with the largest draw is never reduced, so at least one stays unchanged.
            region = region.where((chances < share) & (chances < chances.max()), NO_TISSUE)
        region = draws.select_rows(region)
        rows = (region != NO_TISSUE).nonzero()[:, 0]
        if not len(rows):
            return volumes, region
        channels = np.array(self.channels)[region[rows].numpy()]
        masks = torch.from_numpy(np.array(self.masks[indices[rows].numpy(), channels]))
        changed = volumes.clone()
        rows = to_device_async(rows, volumes.device)
        changed[rows] = keep_only_tissue(volumes[rows], to_device_async(masks, volumes.device))
        return changed, region

    def mark_experts(self, batch: Batch, region: Tensor, epoch: int, layout: TokenLayout) -> Batch:
        """Add tokens' target experts, and the indices of volumes with an age loss, to ``batch``."""
        # All ranks must compute the same terms, also a rank without reduced volumes.
        if not ranks.has_process_group() and bool((region == NO_TISSUE).all()):
            return batch
        batch = batch._replace(belongs=self.find_token_experts(batch.images, region, layout))
        if epoch in self.warm_start:  # all volumes teach age
            return batch
        # Reduced volumes teach routers only: if they taught age, some models predicted the median.
        unchanged = (region == NO_TISSUE).nonzero()[:, 0]
        return batch._replace(learned=to_device_async(unchanged, batch.images.device))

    def find_token_experts(self, views: Tensor, region: Tensor, layout: TokenLayout) -> Tensor:
        """Return each token's expert in views (B, C, D, H, W), int64 (B, T); −1 for none."""
        # A patch belongs to the tissue's expert if ``isolate_volumes`` left some tissue in it.
        brightest = adaptive_max_pool3d(views.amax(dim=1, keepdim=True), layout.grid)
        has_tissue = brightest.flatten(1) > 0
        special = has_tissue.new_zeros(len(has_tissue), layout.special)
        has_tissue = torch.cat([special, has_tissue], dim=1)
        return torch.where(has_tissue, to_device_async(region, views.device)[:, None], NO_TISSUE)


def build_tissue_isolation(
    method: Method, data: Prepared, subset: np.ndarray | None = None
) -> TissueIsolationSchedule | None:
    """Build the schedule by which ``method`` reduces volumes to one tissue; None if it does not."""
    regions = method.regions
    if regions is None or not method.isolates_tissues:
        return None
    channels = find_mask_channels(regions.experts, data.card)
    masks = data.regions("train") if subset is None else data.regions("train")[subset]
    warm_start = range(regions.after, regions.after + regions.warm_start_epochs)
    return TissueIsolationSchedule(masks, channels, warm_start, regions.isolated)


def find_mask_channels(names: tuple[str, ...], card: dict) -> tuple[int, ...]:
    mapped = tuple(card.get("regions", ()))
    if lacking := [name for name in names if name not in mapped]:
        maps = f"maps of {', '.join(mapped)}" if mapped else "no tissue maps"
        raise files.UserError(
            f"regions.experts: found {', '.join(lacking)}, but these data have {maps}; choose "
            "other data, or leave out regions"
        )
    return tuple(mapped.index(name) for name in names)


def keep_only_tissue(volumes: Tensor, share: Tensor) -> Tensor:
    """Multiply volumes (B, C, D, H, W) by a tissue's ``share`` / 255, uint8 (B, D, H, W)."""
    return volumes * (share.unsqueeze(1).to(volumes.dtype) / 255)
