"""Group sparsity: a token's probs concentrate in one neighbourhood of a map (MoGE, §2.3)."""

import math
from functools import partial
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.core.config import Misfits, Surroundings, list_idle_misfits
from moecore.nn.experts.base import expert_grid_shape
from moecore.training.regularizers.base import Regularizer, sum_over_layers

Reduction = Literal["mean", "authors"]
Padding = Literal["valid", "circular"]
# Added under the square root, whose gradient at 0 is infinite; 1e-8 as in the authors' code.
EPSILON = {"mean": 1e-12, "authors": 1e-8}


class GroupSparsity(Regularizer):
    """MoGE's loss, which concentrates a token's probs in one neighbourhood of a map of the experts.

    It is summed over MoE layers. The Gaussian that weights a neighbourhood narrows during training;
    equal sigmas keep it constant.
    """

    kind: Literal["group_sparsity"] = "group_sparsity"
    weight: float = Field(4e-3, ge=0, description="factor in the objective")
    filter: Literal["gaussian", "average"] = Field(
        "gaussian", description="weights within a neighbourhood; average takes no sigma"
    )
    size: int = Field(3, ge=1, description="side of a neighbourhood, in experts; at most the map's")
    sigma_start: float = Field(10.0, ge=0.1, allow_inf_nan=False, description="first σ, in experts")
    sigma_end: float = Field(1.5, ge=0.1, allow_inf_nan=False, description="last σ; ≤ sigma_start")
    exponent: float = Field(0.3, ge=0, allow_inf_nan=False, description="γ; below 1: narrows early")

    reduction: Reduction = Field(
        "mean",
        description="mean: sum over positions, mean over tokens, so that the weight does not "
        "depend on the batch; authors: as in MoGE's published code, mean over positions, sum over "
        "the batch's tokens, divided by the neighbourhood's number of experts",
    )
    padding: Padding = Field(
        "valid",
        description="valid: neighbourhoods lie inside the map, so a corner is in one and an inner "
        "expert in many; circular: the map's opposite sides are neighbours",
    )

    @model_validator(mode="after")
    def _check_sigmas(self) -> Self:
        if self.sigma_end > self.sigma_start:
            raise ValueError(
                f"sigma_end is {self.sigma_end:g} and sigma_start {self.sigma_start:g}; allowed: "
                "sigma_end ≤ sigma_start"
            )
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if self.filter == "average":
            names = ("sigma_start", "sigma_end", "exponent")
            yield from list_idle_misfits(self, names, "the filter is average", "filter: gaussian")
        elif self.sigma_start == self.sigma_end:
            yield from list_idle_misfits(self, ["exponent"], "σ is constant", "another sigma_end")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        sigma = self.sigma(step.progress) if self.filter == "gaussian" else math.inf
        shape = {"size": self.size, "sigma": sigma, "padding": self.padding}
        loss = partial(group_sparsity, **shape, reduction=self.reduction)
        return sum_over_layers(step, lambda record: loss(probs=record.probs))

    def sigma(self, progress: float) -> float:
        """Return σ_t = σ_0 − (σ_0 − σ_min)(t/T)^γ (eq. 8); progress = t/T in [0, 1]."""
        return self.sigma_start - (self.sigma_start - self.sigma_end) * progress**self.exponent


def group_sparsity(
    *,
    probs: Tensor,
    size: int,
    sigma: float,
    reduction: Reduction = "mean",
    padding: Padding = "valid",
) -> Tensor:
    """Return Σ sqrt(F ∗ Z²), mean over tokens; Z: probs as a map, F: filter (MoGE, algorithm 1)."""
    # ``reduction`` "authors": as in their repository MoGE, commit c54f89c; the paper's text defines
    # neither. probs: (B, T, E), clean, each token sums to 1; Z is a token's probs as the map of
    # ``expert_grid_shape``, row by row. F sums to 1 and is size × size experts, cut to a shorter
    # side of the map (our choice); sigma is in experts, infinite for the average. A scalar > 0.
    # A Gaussian is a product of its rows and columns, so the convolution is two sums of shifted
    # slices: 0.5 ms on one core at 6304 tokens × 8 experts; conv2d takes 1.4 ms.
    rows, columns = expert_grid_shape(probs.shape[-1])
    tall, wide = min(size, rows), min(size, columns)
    with torch.autocast(probs.device.type, enabled=False):
        energy = probs.square().reshape(-1, rows, columns)
        energy = _convolve_axis(energy, 1, filter_weights(tall, sigma), padding)
        energy = _convolve_axis(energy, 2, filter_weights(wide, sigma), padding)
        norms = (energy + EPSILON[reduction]).sqrt()
        if reduction == "authors":
            return ranks.total_over_ranks(norms.mean(dim=(1, 2)).sum()) / (tall * wide)
        return ranks.mean_over_ranks(norms.sum(dim=(1, 2)))


def filter_weights(size: int, sigma: float) -> list[float]:
    """Return the filter's weights along an axis, with sum 1; equal ones for an infinite sigma."""
    weights = [math.exp(-(((index - (size - 1) / 2) / sigma) ** 2) / 2) for index in range(size)]
    return [weight / sum(weights) for weight in weights]


def _convolve_axis(values: Tensor, axis: int, weights: list[float], padding: Padding) -> Tensor:
    """Convolve along one axis with symmetric weights; circular padding keeps the axis's length."""
    if padding == "circular" and len(weights) > 1:
        values = torch.cat([values, values.narrow(axis, 0, len(weights) - 1)], axis)
    length = values.shape[axis] - len(weights) + 1
    shifted = (weight * values.narrow(axis, start, length) for start, weight in enumerate(weights))
    return cast(Tensor, sum(shifted))
