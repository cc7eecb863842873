"""Theorems 1 and 2 of Puigcerver et al. (2022) as an experiment: linear experts on drawn data.

Over the angle between the experts' subspaces and their number; no trained model is needed.
"""

from itertools import product
from typing import Annotated, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.measure.base import Estimate
from moecore.measure.theory.linear_experts import (
    Theorem1Sides,
    Theorem2,
    theorem_1_sides,
    theorem_2,
)
from moecore.measure.theory.subspace_data import Targets, draw_expert_data
from moecore.statistics.intervals import mean_over_seeds


class LinearExperts(Config):
    """The data that is drawn: every combination of targets, experts and angle, with every seed."""

    dimension: int = Field(
        128, ge=2, description="Dimensions D of a point; at least experts · rank."
    )
    rank: int = Field(4, ge=1, description="Dimensions r of the subspace of one expert's points.")
    samples: int = Field(32, ge=1, description="Points of one expert; at least the rank.")
    experts: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (2, 4, 8, 16, 32), min_length=1, description="Numbers of experts E."
    )
    angles: tuple[Annotated[float, Field(ge=0, le=90)], ...] = Field(
        (0, 5, 15, 30, 45, 60, 75, 85, 89, 90),
        min_length=1,
        description="Degrees between any two subspaces: 0 all equal, 90 orthogonal.",
    )
    targets: tuple[Targets, ...] = Field(
        ("shared", "opposed", "drawn"), min_length=1, description="Signs of the experts' targets."
    )
    floor: float = Field(
        0.5, gt=0, description="Theorem 2: D more points of this length for each expert."
    )
    noise: float = Field(
        0.005, ge=0, description="Theorem 2 only: standard deviation of the residuals."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2), min_length=1, description="One draw of the data each."
    )

    @model_validator(mode="after")
    def _room(self) -> Self:
        if max(self.experts) * self.rank > self.dimension:
            subspaces = f"{max(self.experts)} subspaces of rank {self.rank}"
            room = f"{subspaces} do not fit into {self.dimension} dimensions"
            raise ValueError(f"{room}; experts · rank ≤ dimension is allowed")
        if self.samples < self.rank:
            short = f"{self.samples} samples do not span a subspace of rank {self.rank}"
            raise ValueError(f"{short}; samples ≥ rank is allowed")
        return self


class Theorem1OverSeeds(Config):
    """Theorem 1 over seeds, on data of one kind."""

    targets: Targets
    experts: int
    angle: float  # degrees
    ratio: Estimate  # the experts' Lipschitz constant over the dense model's


class Result(Config):
    """One row for each kind of targets, number of experts and angle, and sums over all draws."""

    draws: int  # of theorem 1
    violations: int
    literal_violations: int  # of theorem 1 as printed
    theorem_2_promises: int  # draws in which it promises something
    theorem_2_violations: int
    theorem_1: tuple[Theorem1OverSeeds, ...]


def measure(settings: LinearExperts) -> Result:
    """Both theorems on every draw."""
    rows = []
    first = []
    second = []
    for targets, experts, angle in product(settings.targets, settings.experts, settings.angles):
        clean = theorem_1_over_seeds(settings, experts, angle, targets)
        ratio = Estimate.of(mean_over_seeds([one.ratio for one in clean]))
        rows.append(Theorem1OverSeeds(targets=targets, experts=experts, angle=angle, ratio=ratio))
        first += clean
        second += evaluate_theorem_2(settings, experts, angle, targets)
    return Result(
        draws=len(first),
        violations=sum(not one.holds for one in first),
        literal_violations=sum(not one.literal_holds for one in first),
        theorem_2_promises=sum(one.gamma is not None for one in second),
        theorem_2_violations=sum(not one.holds for one in second),
        theorem_1=rows,
    )


def theorem_1_over_seeds(
    settings: LinearExperts, experts: int, angle: float, targets: Targets
) -> list[Theorem1Sides]:
    """Evaluate theorem 1 on one draw per seed."""
    sizes = {"dimension": settings.dimension, "rank": settings.rank, "samples": settings.samples}
    return [
        theorem_1_sides(draw_expert_data(experts, angle, targets, seed, **sizes)[0])
        for seed in settings.seeds
    ]


def evaluate_theorem_2(
    settings: LinearExperts, experts: int, angle: float, targets: Targets
) -> list[Theorem2]:
    """Evaluate theorem 2 on one draw per seed of the same subspaces, with a floor and noise."""
    sizes = {"dimension": settings.dimension, "rank": settings.rank, "samples": settings.samples}
    unclean = {"floor": settings.floor, "noise": settings.noise}
    return [
        theorem_2(*draw_expert_data(experts, angle, targets, seed, **sizes, **unclean))
        for seed in settings.seeds
    ]
