"""How far two maps of expert probabilities lie apart when neighbours on the grid are similar: IMED.

E experts on a grid of r rows and c columns, row by row.
"""

import math

import numpy as np
import torch
from torch import Tensor

from moecore.nn.expert_map import map_shape

SIGMA = 1.0  # of Wang, Zhang & Feng (2005), which MoGE's table 1 uses


def metric(rows: int, columns: int, sigma: float = SIGMA) -> Tensor:
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
    weights = metric(*map_shape(change.shape[-1]), sigma).to(change.device)
    return ((change @ weights) * change).sum(dim=-1).clamp_min(0)  # rounding may fall below 0


def mean_imed(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], sigma: float = SIGMA
) -> tuple[Tensor, Tensor]:
    """Each image's d and d², averaged over its tokens and over layers.

    One (N, T, E) of probs per MoE layer twice, to (N,) fp64 twice. The mean of d is taken over the
    tokens' own distances: it is not the root of the mean of d².  Raises ValueError where there is
    no layer.
    """
    if not before:
        raise ValueError("IMED of a model without MoE layers")
    layers = [squared_imed(u, v, sigma) for u, v in zip(before, after, strict=True)]
    return (
        torch.stack([d2.sqrt().mean(dim=1) for d2 in layers]).mean(dim=0),
        torch.stack([d2.mean(dim=1) for d2 in layers]).mean(dim=0),
    )


def partners(images: int, seed: int) -> Tensor:
    """For each of N images another one, (N,) int64: the next on a circle drawn from ``seed``.

    No image is its own partner and each is one once, so all methods compare the same N pairs.
    Raises ValueError for fewer than two images.
    """
    if images < 2:
        raise ValueError(f"pairs of different images among {images}; two are needed")
    circle = np.random.default_rng(seed).permutation(images)
    found = torch.empty(images, dtype=torch.int64)
    found[torch.from_numpy(circle)] = torch.from_numpy(np.roll(circle, -1))
    return found


def imed_between(probs: tuple[Tensor, ...], seed: int) -> Tensor:
    """Each image's distance from its partner of ``partners``, both unmoved; (N,) fp64.

    probs: one (N, T, E) per MoE layer. Averaged over tokens and layers as ``mean_imed``, token by
    token at the same place. Its mean is what IMED under a transform is held against: a router that
    tells no images apart has small distances of both kinds.
    """
    others = partners(len(probs[0]), seed)
    d, _ = mean_imed(probs, tuple(layer[others] for layer in probs))
    return d
