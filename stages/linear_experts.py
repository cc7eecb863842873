"""Theorems 1 and 2 of Puigcerver et al. (2022) as an experiment: linear experts on data in subspaces, over their angle and their number.

    python -m stages.linear_experts
"""

import importlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from moecore.config import Config
from moecore.evaluation.intervals import over_seeds
from moecore.evaluation.linear_experts import Targets, Theorem1, Theorem2, drawn_parts, theorem_1, theorem_2
from moecore.history import record
from moecore.params import read
from moecore.stage import run_stage

Row = dict[str, Any]


class LinearExperts(Config):
    """The data that is drawn; every combination of targets, number of experts and angle, with every seed."""

    dimension: int = Field(128, ge=2, description="Dimensions D of a point; at least experts · rank.")
    rank: int = Field(4, ge=1, description="Dimensions r of the subspace of one expert's points.")
    samples: int = Field(32, ge=1, description="Points of one expert; at least the rank.")
    experts: tuple[Annotated[int, Field(ge=2)], ...] = Field((2, 4, 8, 16, 32), min_length=1, description="Numbers of experts E.")
    angles: tuple[Annotated[float, Field(ge=0, le=90)], ...] = Field(
        (0, 5, 15, 30, 45, 60, 75, 85, 89, 90), min_length=1, description="Degrees between any two subspaces: 0 all equal, 90 orthogonal."
    )
    targets: tuple[Targets, ...] = Field(
        ("shared", "opposed", "drawn"), min_length=1, description="Of the experts in their subspaces: the same, alternating signs, or independent."
    )
    floor: float = Field(0.5, gt=0, description="Theorem 2 only: D more points of this length an expert, so that its matrix is invertible.")
    noise: float = Field(0.005, ge=0, description="Theorem 2 only: standard deviation of the residuals.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), min_length=1, description="One draw of the data each.")

    @model_validator(mode="after")
    def _room(self) -> Self:
        if max(self.experts) * self.rank > self.dimension:
            room = f"{max(self.experts)} subspaces of rank {self.rank} do not fit into {self.dimension} dimensions"
            raise ValueError(f"{room}; experts · rank ≤ dimension is allowed")
        if self.samples < self.rank:
            raise ValueError(f"{self.samples} samples do not span a subspace of rank {self.rank}; samples ≥ rank is allowed")
        return self


class Params(Config):
    linear_experts: LinearExperts


def first(settings: LinearExperts, targets: Targets, experts: int, angle: float, seed: int) -> Theorem1:
    """Theorem 1 on one draw."""
    parts, _ = drawn_parts(experts, angle, targets, seed, dimension=settings.dimension, rank=settings.rank, samples=settings.samples)
    return theorem_1(parts)


def second(settings: LinearExperts, targets: Targets, experts: int, angle: float, seed: int) -> Theorem2:
    """Theorem 2 on one draw of the same subspaces, with a floor and noise."""
    sizes = {"dimension": settings.dimension, "rank": settings.rank, "samples": settings.samples}
    return theorem_2(*drawn_parts(experts, angle, targets, seed, floor=settings.floor, noise=settings.noise, **sizes))


def bounded(found: Sequence[Theorem1]) -> Row:
    """Theorem 1 over seeds: the ratio of Lipschitz constants, the bound's share of what it bounds, and how often it fails."""
    return {
        "ratio": over_seeds([one.ratio for one in found]), "tightness": over_seeds([one.right / one.dense**2 if one.dense else 0.0 for one in found]),
        "epsilon_1": max(one.epsilon_1 for one in found), "epsilon_2": max(one.epsilon_2 for one in found),
        "violations": sum(not one.holds for one in found), "literal_violations": sum(not one.literal_holds for one in found),
    }  # fmt: skip


def promised(found: Sequence[Theorem2]) -> Row:
    """Theorem 2 over seeds: in how many draws it promises something, the largest γ of these, what is so, and how often it fails."""
    kept, simple = ([value for value in values if value is not None] for values in ([one.gamma for one in found], [one.simple for one in found]))
    return {
        "promises": len(kept), "gamma": max(kept, default=None), "corollary_promises": len(simple), "corollary_gamma": max(simple, default=None),
        "ratio_squared": over_seeds([one.ratio_squared for one in found]), "violations": sum(not one.holds for one in found),
    }  # fmt: skip


def swept(settings: LinearExperts, measure: Callable[..., Any], gather: Callable[[Sequence[Any]], Row]) -> list[Row]:
    """One row for each kind of targets, number of experts and angle."""
    rows = []
    for targets, experts, angle in product(settings.targets, settings.experts, settings.angles):
        found = [measure(settings, targets, experts, angle, seed) for seed in settings.seeds]
        rows.append({"targets": targets, "experts": experts, "angle": angle, **gather(found)})
    return rows


def orthogonal(rows: Sequence[Row]) -> Row:
    """At 90°: the ratio for each E (shared targets before the others), and how far any is from 1/√E."""
    there, ratios = [row for row in rows if row["angle"] == 90], {}
    for row in there:
        ratios.setdefault(str(row["experts"]), row["ratio"].value)
    worst = max((abs(row["ratio"].value * row["experts"] ** 0.5 - 1) for row in there), default=None)
    return {"ratio_at_90": ratios, "error_at_90": worst}


def linear_experts() -> None:
    params = read(Params)
    settings = params.linear_experts
    with record("linear_experts", params) as run:
        theorem1, theorem2 = swept(settings, first, bounded), swept(settings, second, promised)
        figures = importlib.import_module("moecore.report.figures_lipschitz")  # by name: a drawing is no input of a result
        for targets in settings.targets:
            run.figure(f"ratio_{targets}", figures.ratio_over_angle([row for row in theorem1 if row["targets"] == targets], targets))
        run.table("theorem_1", theorem1)
        run.table("theorem_2", theorem2)
        run.summary({
            "draws": len(theorem1) * len(settings.seeds), **orthogonal(theorem1),
            "violations": sum(row["violations"] for row in theorem1), "literal_violations": sum(row["literal_violations"] for row in theorem1),
            "theorem_2_promises": sum(row["promises"] for row in theorem2), "theorem_2_violations": sum(row["violations"] for row in theorem2),
            "theorem_1": theorem1, "theorem_2": theorem2,
        })  # fmt: skip


if __name__ == "__main__":
    run_stage(linear_experts)
