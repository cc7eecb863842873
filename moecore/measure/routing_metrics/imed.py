"""Maps of experts: distance of two maps that accounts for neighbours (IMED), and class means.

E experts on a grid of r rows and c columns, row by row.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.experts.base import map_shape

SIGMA = 1.0  # of Wang, Zhang & Feng (2005), which MoGE's table 1 uses


def imed_matrix(rows: int, columns: int, sigma: float = SIGMA) -> Tensor:
    """Return G (E, E) fp64, G_ij = exp(−|P_i − P_j|² / 2σ²) / (2πσ²), P the grid positions.

    Wang et al. (2005), eq. 8. Positive definite.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([row.flatten(), column.flatten()], dim=1).double()
    squared = (places[:, None] - places[None]).square().sum(dim=-1)
    return torch.exp(-squared / (2 * sigma**2)) / (2 * math.pi * sigma**2)


def squared_imed(before: Tensor, after: Tensor, sigma: float = SIGMA) -> Tensor:
    """Return the squared distance d² = (u − v)ᵀ G (u − v) of maps (…, E), (…) fp64 ≥ 0.

    Two distant one-hot maps have d² = 1/π = 0.318, two adjacent ones (1 − exp(−1/2))/π = 0.125.
    """
    if before.shape != after.shape:
        shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
        raise ValueError(f"IMED of maps of shapes {shapes}; they must be equal")
    change = before.double() - after.double()
    weights = imed_matrix(*map_shape(change.shape[-1]), sigma).to(change.device)
    return ((change @ weights) * change).sum(dim=-1).clamp_min(0)  # rounding may fall below 0


def imed_by_image(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor:
    """Return each image's mean of d (not of d²) over tokens and layers, (N,) fp64.

    before, after: probs (N, T, E) per MoE layer.
    """
    layers = [squared_imed(u, v) for u, v in zip(before, after, strict=True)]
    return torch.stack([d2.sqrt().mean(dim=1) for d2 in layers]).mean(dim=0)


def partner_images(images: int, seed: int) -> Tensor:
    """Return another image for each of N images, (N,) int64: the next on a random circle.

    No image is its own partner and each is a partner once: all methods compare the same N pairs.
    """
    if images < 2:
        raise ValueError(f"pairs of different images among {images}; two are needed")
    circle = np.random.default_rng(seed).permutation(images)
    partner = torch.empty(images, dtype=torch.int64)
    partner[torch.from_numpy(circle)] = torch.from_numpy(np.roll(circle, -1))
    return partner


def imed_between(probs: tuple[Tensor, ...], seed: int) -> Tensor:
    """Return each image's ``imed_by_image`` to its partner, without a transform; (N,) fp64.

    The reference for IMED under a transform: a router that does not distinguish images has small
    distances of both kinds. probs: (N, T, E) per MoE layer.
    """
    partners = partner_images(len(probs[0]), seed)
    return imed_by_image(probs, tuple(layer[partners] for layer in probs))


def class_expert_probs(records: Sequence[RoutingRecord], labels: Tensor, classes: int) -> Tensor:
    """Return each expert's mean clean probability per class, (K, layers, E) fp64.

    NaN for classes without images; other maps sum to 1 over E. labels: (N,) int in [0, K).
    """
    if not records:
        raise UserError("class maps: the model has no MoE layers")
    if any(len(record.probs) != len(labels) for record in records):
        routed = f"{len(records[0].probs)} images were routed"
        raise UserError(f"class maps: {routed}, but there are {len(labels)} labels")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        extremes = f"labels {int(labels.min())} to {int(labels.max())}"
        raise UserError.at("class maps", found=extremes, allowed=f"0 to {classes - 1}")
    members = torch.nn.functional.one_hot(labels.long(), classes).double()  # (N, K)
    counts = members.sum(dim=0)[:, None]
    return torch.stack(
        [members.T @ record.probs.double().mean(dim=1) / counts for record in records], dim=1
    )
