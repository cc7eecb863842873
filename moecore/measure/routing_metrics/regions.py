"""Which experts the last MoE layer chooses on volumes that keep one tissue, and on a control.

Source: ERMoE-ba, supplement §3.

N volumes, R tissues, D × H × W voxels, T tokens, E experts.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.core.files import UserError, read_json, write_json
from moecore.core.streams import derived_seed
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.training.outcome import EpochTissueRouting, TissueRoutingRow
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
    """One row per tissue, then one per control ``random_<tissue>``.

    A row names the two experts of the highest mean score, and says what share of tokens chose each.
    volumes: (N, 1, D, H, W) floating point in [0, 1]; regions: uint8 (N, R, D, H, W), tissue share
    × 255, R as ``tissues``; experts: the names of the E experts.  Means are over the tokens of all
    volumes whose cube keeps any voxel; scores are the router's logits before noise (cosines, for an
    eigenbasis router).  Shares sum to the number of experts a token has, less what was pruned.
    Raises UserError for a model without MoE layers, for numbers that do not fit, and where no token
    keeps any voxel.
    """
    if len(volumes) != len(regions) or regions.shape[1] != len(tissues):
        given = f"{len(volumes)} volumes, and maps of shape {regions.shape}"
        raise UserError(f"region routing: {given} for {len(tissues)} tissues; they must fit")
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
    """Return the same shares (N, D, H, W) at random places of the same volume's ``brain``, a bool
    mask.

    Of each volume as many voxels are kept, with as large shares, as of the tissue inside the brain;
    outside of it nothing is. seed: the i-th volume's places depend on it and on i alone.
    """
    mixed_shares = torch.zeros_like(share)
    drawn = derived_seed("mixed_regions", seed)
    for index, (values, place) in enumerate(zip(share, brain, strict=True)):
        inside = values[place].numpy()
        mixed = np.random.default_rng([drawn, index]).permutation(inside)
        mixed_shares[index][place] = torch.from_numpy(mixed)
    return mixed_shares


def _region_row(
    name: str, model: Model, volumes: Tensor, experts: Sequence[str]
) -> TissueRoutingRow:
    _, records = predict_in_batches(model, volumes, batch=32)
    if not records:
        raise UserError("region routing: the model has no MoE layers")
    layout = model.layout
    record = records[-1]
    held = adaptive_max_pool3d(volumes.float(), layout.grid).flatten(1) > 0  # (N, P)
    if not held.any() or record.logits.shape[-1] != len(experts):
        named = f"{len(experts)} experts are named of {record.logits.shape[-1]}"
        problem = f"{int(held.sum())} tokens keep a voxel, and {named}"
        needed = "one token at least, and a name for each expert"
        raise UserError(f"region routing: {problem}; needed: {needed}")
    scores = record.logits[:, layout.special :][held].double().mean(dim=0)
    share = record.chosen[:, layout.special :][held].double().mean(dim=0)
    best = scores.argsort(descending=True, stable=True)[:BEST].tolist()
    return TissueRoutingRow(
        region=name,
        experts=[(experts[index], float(scores[index])) for index in best],
        share=dict(zip(experts, share.tolist(), strict=True)),
    )


VOLUMES = 24  # of the validation split, evenly spread over it


def probed_epochs(epochs: int) -> tuple[int, ...]:
    """The first, the middle and the last of ``epochs``, from 1; fewer if they are the same."""
    return tuple(sorted({1, (epochs + 1) // 2, epochs}))


def write_epoch_tissue_routing(
    folder: Path, epoch: int, model: Model, data: Prepared, experts: tuple[str, ...], seed: int
) -> None:
    """Write into ``folder`` what the experts do on single tissues after ``epoch``.

    Nothing for data without tissue maps. model: as it is used, on its device. seed: of the random
    control, the same at all epochs.
    """
    regions = data.card.get("regions")
    if not regions:
        return
    chosen = evenly_spaced_indices(len(data.validation.labels), VOLUMES)
    volumes = np.array(data.validation.images[chosen])
    maps = np.array(data.regions("validation")[chosen])
    rows = region_rows(model, volumes, maps, regions, experts, seed)
    probed = EpochTissueRouting(epoch=epoch, rows=rows)
    write_json(_regions_path(folder, epoch), probed.model_dump(mode="json"))


def read_epoch_tissue_routing(
    folder: Path, data: Prepared, epochs: int
) -> tuple[EpochTissueRouting, ...]:
    """Return what was kept in ``folder``; () for data without tissue maps.

    Raises UserError, naming the file, where an epoch is missing.
    """
    if not data.card.get("regions"):
        return ()
    kept = [read_json(_regions_path(folder, epoch)) for epoch in probed_epochs(epochs)]
    return tuple(EpochTissueRouting.model_validate(probed) for probed in kept)


def _regions_path(folder: Path, epoch: int) -> Path:
    return folder / "regions" / f"{epoch:04d}.json"
