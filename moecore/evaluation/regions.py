"""Which experts the last MoE layer chooses on volumes that keep one tissue (ERMoE-ba, supplement §3), and on a random control.

N volumes, R tissues, D × H × W voxels, T tokens, E experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool3d

from moecore.evaluation.predict import predictions
from moecore.files import StageError

BEST = 2  # experts named per tissue, as in figure S1


def region_routing(
    model: nn.Module, volumes: np.ndarray, regions: np.ndarray, tissues: Sequence[str], experts: Sequence[str], seed: int = 0, batch: int = 32
) -> list[dict[str, Any]]:
    """One row per tissue and one per control ``random_<tissue>``: the two experts of the highest mean score, and what share of tokens chose each.

    volumes: (N, 1, D, H, W) floating point in [0, 1]; regions: uint8 (N, R, D, H, W), tissue share × 255, R as ``tissues``;
    experts: the names of the E experts.  Means are over the tokens of all volumes whose cube keeps any voxel; scores are the router's
    logits before noise (cosines, for an eigenbasis router).  Shares sum to the number of experts a token has, less what was pruned.
    Raises StageError for a model without MoE layers, for numbers that do not fit, and where no token keeps any voxel.
    """
    if len(volumes) != len(regions) or regions.shape[1] != len(tissues):
        raise StageError(f"region routing: {len(volumes)} volumes, and maps of shape {regions.shape} for {len(tissues)} tissues; they must fit")
    volumes, rows = torch.from_numpy(np.array(volumes)), []
    for channel, tissue in enumerate(tissues):
        share = torch.from_numpy(np.array(regions[:, channel]))
        kept = {tissue: share, f"random_{tissue}": shuffled(share, volumes[:, 0] > 0, seed + channel)}
        rows += [{"region": name} | _row(model, isolate(volumes, mask), experts, batch) for name, mask in kept.items()]
    return sorted(rows, key=lambda row: row["region"].startswith("random_"))


def isolate(volumes: Tensor, share: Tensor) -> Tensor:
    """Volumes (B, C, D, H, W) in [0, 1] times the share (B, D, H, W) of a tissue, uint8 0 … 255 for 0 … 1, in the volumes' dtype."""
    return volumes * (share.unsqueeze(1).to(volumes.dtype) / 255)


def shuffled(share: Tensor, brain: Tensor, seed: int) -> Tensor:
    """The same shares (N, D, H, W) at random places of the same volume's ``brain`` (N, D, H, W) bool, outside of which nothing is kept.

    Of each volume as many voxels are kept, with as large shares, as of the tissue inside the brain. seed: the i-th volume's places depend
    on it and on i alone.
    """
    found = torch.zeros_like(share)
    for index, (values, place) in enumerate(zip(share, brain, strict=True)):
        inside = values[place].numpy()
        found[index][place] = torch.from_numpy(np.random.default_rng([seed, index]).permutation(inside))
    return found


def _row(model: nn.Module, volumes: Tensor, experts: Sequence[str], batch: int) -> dict[str, Any]:
    _, records = predictions(model, volumes, batch)
    if not records:
        raise StageError("region routing: the model has no MoE layers")
    layout, record = model.layout, records[-1]
    held = adaptive_max_pool3d(volumes.float(), layout.grid).flatten(1) > 0  # (N, P)
    if not held.any() or record.logits.shape[-1] != len(experts):
        found = f"{int(held.sum())} tokens keep a voxel, and {len(experts)} experts are named of {record.logits.shape[-1]}"
        raise StageError(f"region routing: {found}; needed: one token at least, and a name for each expert")
    scores = record.logits[:, layout.special :][held].double().mean(dim=0)
    share = record.chosen[:, layout.special :][held].double().mean(dim=0)
    best = scores.argsort(descending=True, stable=True)[:BEST].tolist()
    return {"experts": [[experts[index], float(scores[index])] for index in best], "share": dict(zip(experts, share.tolist(), strict=True))}
