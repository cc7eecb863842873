"""Experts of the last MoE layer on volumes with a single tissue, and on a random control.

ERMoE-ba, supplement §3. N volumes, R tissues, D × H × W voxels, T tokens, E experts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.core.files import UserError
from moecore.core.streams import derived_seed
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.training.outcome import TissueRoutingRow
from moecore.training.single_tissue_volumes import keep_only_tissue

BEST = 2  # experts named per tissue, as in figure S1


def region_rows(
    model: Model,
    volumes: np.ndarray,
    regions: np.ndarray,
    tissues: Sequence[str],
    experts: Sequence[str],
    seed: int = 0,
) -> list[TissueRoutingRow]:
    """Return the routing of volumes with one tissue each, then of controls ``random_<tissue>``.

    A row has the two experts with the highest mean score (the router's logits before noise; cosines
    for an eigenbasis router), and the share of tokens that chose each expert. Means are over tokens
    whose cube has any remaining voxel. Shares sum to the experts per token, without pruned ones.
    volumes: (N, 1, D, H, W) floating point in [0, 1]; regions: uint8 (N, R, D, H, W), tissue share
    × 255; experts: names of the E experts.
    """
    if len(volumes) != len(regions) or regions.shape[1] != len(tissues):
        raise UserError(
            f"region routing: {len(volumes)} volumes, and maps of shape {regions.shape} for "
            f"{len(tissues)} tissues; they must fit"
        )
    images = torch.from_numpy(np.array(volumes))
    rows = []
    controls = []
    for channel, tissue in enumerate(tissues):
        share = torch.from_numpy(np.array(regions[:, channel]))
        random = shuffle_tissue_in_brain(share, images[:, 0] > 0, seed + channel)
        rows.append(_region_row(tissue, model, keep_only_tissue(images, share), experts))
        controls.append(
            _region_row(f"random_{tissue}", model, keep_only_tissue(images, random), experts)
        )
    return [*rows, *controls]


def shuffle_tissue_in_brain(share: Tensor, brain: Tensor, seed: int) -> Tensor:
    """Permute each volume's tissue shares (N, D, H, W) among the voxels of ``brain``, a bool mask.

    The permutation of the i-th volume depends on the seed and on i alone.
    """
    shuffled = torch.zeros_like(share)
    shuffle_seed = derived_seed("mixed_regions", seed)
    for index, (values, is_brain) in enumerate(zip(share, brain, strict=True)):
        inside = values[is_brain].numpy()
        mixed = np.random.default_rng([shuffle_seed, index]).permutation(inside)
        shuffled[index][is_brain] = torch.from_numpy(mixed)
    return shuffled


def _region_row(
    name: str, model: Model, volumes: Tensor, experts: Sequence[str]
) -> TissueRoutingRow:
    _, records = predict_in_batches(model, volumes, batch=32)
    if not records:
        raise UserError("region routing: the model has no MoE layers")
    layout = model.layout
    record = records[-1]
    has_voxels = adaptive_max_pool3d(volumes.float(), layout.grid).flatten(1) > 0  # (N, P)
    if not has_voxels.any() or record.logits.shape[-1] != len(experts):
        raise UserError.at(
            "region routing",
            found=f"{int(has_voxels.sum())} tokens with a voxel, and names of {len(experts)} of "
            f"{record.logits.shape[-1]} experts",
            allowed="at least one token, and a name for each expert",
        )
    scores = record.logits[:, layout.special :][has_voxels].double().mean(dim=0)
    share = record.chosen[:, layout.special :][has_voxels].double().mean(dim=0)
    best = scores.argsort(descending=True, stable=True)[:BEST].tolist()
    return TissueRoutingRow(
        region=name,
        experts=[(experts[index], float(scores[index])) for index in best],
        share=dict(zip(experts, share.tolist(), strict=True)),
    )
