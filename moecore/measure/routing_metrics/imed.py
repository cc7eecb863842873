"""Maps of experts: how far two lie apart when neighbours count (IMED), and a class's mean map.

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
    """G (E, E) in fp64 with G_ij = exp(−|P_i − P_j|² / 2σ²) / (2πσ²), P the grid positions.

    Wang et al. (2005), eq. 8. Positive definite.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([row.flatten(), column.flatten()], dim=1).double()
    squared = (places[:, None] - places[None]).square().sum(dim=-1)
    return torch.exp(-squared / (2 * sigma**2)) / (2 * math.pi * sigma**2)


def squared_imed(before: Tensor, after: Tensor, sigma: float = SIGMA) -> Tensor:
    """d² = (u − v)ᵀ G (u − v) of each pair of maps; (…, E) twice to (…) fp64 ≥ 0.

    The distance itself is its root.
    Two distant one-hot maps have d² = 1/π = 0.318, two adjacent ones (1 − exp(−1/2))/π = 0.125.
    Raises ValueError where shapes differ.
    """
    if before.shape != after.shape:
        shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
        raise ValueError(f"IMED of maps of shapes {shapes}; they must be equal")
    change = before.double() - after.double()
    weights = imed_matrix(*map_shape(change.shape[-1]), sigma).to(change.device)
    return ((change @ weights) * change).sum(dim=-1).clamp_min(0)  # rounding may fall below 0


def imed_by_image(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor:
    """Each image's d, averaged over its tokens and over layers, (N,) fp64.

    before, after: one (N, T, E) of probs per MoE layer. The mean is taken over the tokens' own
    distances: it is not the root of the mean of d².
    """
    layers = [squared_imed(u, v) for u, v in zip(before, after, strict=True)]
    return torch.stack([d2.sqrt().mean(dim=1) for d2 in layers]).mean(dim=0)


def partner_images(images: int, seed: int) -> Tensor:
    """For each of N images another one, (N,) int64: the next on a circle drawn from ``seed``.

    No image is its own partner and each is one once, so all methods compare the same N pairs.
    Raises ValueError for fewer than two images.
    """
    if images < 2:
        raise ValueError(f"pairs of different images among {images}; two are needed")
    circle = np.random.default_rng(seed).permutation(images)
    partner = torch.empty(images, dtype=torch.int64)
    partner[torch.from_numpy(circle)] = torch.from_numpy(np.roll(circle, -1))
    return partner


def imed_between(probs: tuple[Tensor, ...], seed: int) -> Tensor:
    """Each image's distance from its partner of ``partner_images``, both unmoved; (N,) fp64.

    probs: one (N, T, E) per MoE layer. Averaged over tokens and layers as ``imed_by_image``, token
    by token at the same place. IMED under a transform is held against its mean: a router that tells
    no images apart has small distances of both kinds.
    """
    others = partner_images(len(probs[0]), seed)
    return imed_by_image(probs, tuple(layer[others] for layer in probs))


def class_expert_probs(records: Sequence[RoutingRecord], labels: Tensor, classes: int) -> Tensor:
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
        problem = f"found labels {int(labels.min())} to {int(labels.max())}"
        raise UserError(f"class maps: {problem}; allowed: 0 to {classes - 1}")
    members = torch.nn.functional.one_hot(labels.long(), classes).double()  # (N, K)
    counts = members.sum(dim=0)[:, None]
    return torch.stack(
        [members.T @ record.probs.double().mean(dim=1) / counts for record in records], dim=1
    )
