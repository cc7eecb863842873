"""Theorems 1 and 2 of Puigcerver et al. (2022) tested with linear experts on random data."""

from itertools import product
from typing import Annotated, get_args

from pydantic import Field

from lipschitz_theory.theorems import (
    Targets,
    Theorem1Sides,
    Theorem2,
    draw_expert_data,
    theorem_1_sides,
    theorem_2,
)
from moecore.parts import Calculation, Metric, OnPage, Values
from moecore.statistics.intervals import mean_over_seeds

DIMENSION = 128  # D of a data point
RANK = 4  # r of the subspace of one expert's points; 32 experts span all dimensions
SAMPLES = 32  # points per expert
SIZES = {"dimension": DIMENSION, "rank": RANK, "samples": SAMPLES}
# Theorem 2 needs invertible matrices: D extra points of length ``floor`` per expert.
# noise: standard deviation of the residuals.
FLOOR_AND_NOISE = {"floor": 0.5, "noise": 0.005}
SEEDS = (0, 1, 2)  # one draw of the data each

METRICS = {
    "ratio": Metric(
        "Experts' Lipschitz constant over the dense model's",
        over=("targets", "experts", "angle"),
        detail=True,
    ),
    "draws": Metric("Draws of theorem 1", form="count"),
    "violations": Metric("Theorem 1 fails", form="count"),
    "literal_violations": Metric("Theorem 1 as printed fails", form="count"),
    "theorem_2_promises": Metric("Draws for which theorem 2 promises a bound", form="count"),
    "theorem_2_violations": Metric("Theorem 2 fails", form="count"),
}


class LinearExperts(Calculation):
    """Settings: data is drawn for each combination of targets, experts and angle, and each seed."""

    metrics = METRICS
    page = OnPage(
        "linear experts", heading="The experts' Lipschitz constant over the dense model's"
    )

    experts: tuple[Annotated[int, Field(ge=2, le=DIMENSION // RANK)], ...] = Field(
        (2, 4, 8, 16, 32), min_length=1, description="Numbers of experts E."
    )
    angles: tuple[Annotated[float, Field(ge=0, le=90)], ...] = Field(
        (0, 5, 15, 30, 45, 60, 75, 85, 89, 90),
        min_length=1,
        description="Degrees between any two subspaces: 0 all equal, 90 orthogonal.",
    )

    def calculate(self, out: Values) -> None:
        first = []
        second = []
        for targets, experts, angle in product(get_args(Targets), self.experts, self.angles):
            clean = theorem_1_over_seeds(experts, angle, targets)
            ratio = mean_over_seeds([sides.ratio for sides in clean])
            out.put("ratio", ratio, targets=targets, experts=experts, angle=angle)
            first += clean
            second += theorem_2_over_seeds(experts, angle, targets)
        totals = {
            "draws": len(first),
            "violations": sum(not sides.holds for sides in first),
            "literal_violations": sum(not sides.literal_holds for sides in first),
            "theorem_2_promises": sum(result.gamma is not None for result in second),
            "theorem_2_violations": sum(not result.holds for result in second),
        }
        for name, total in totals.items():
            out.put(name, total)


def theorem_1_over_seeds(experts: int, angle: float, targets: Targets) -> list[Theorem1Sides]:
    return [
        theorem_1_sides(draw_expert_data(experts, angle, targets, seed, **SIZES)[0])
        for seed in SEEDS
    ]


def theorem_2_over_seeds(experts: int, angle: float, targets: Targets) -> list[Theorem2]:
    """Return theorem 2 on one draw per seed, with extra points and noise (FLOOR_AND_NOISE)."""
    return [
        theorem_2(*draw_expert_data(experts, angle, targets, seed, **SIZES, **FLOOR_AND_NOISE))
        for seed in SEEDS
    ]
