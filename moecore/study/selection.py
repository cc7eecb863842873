"""The sections ``run``, ``claims`` and ``questions`` of params.yaml: what is run and judged."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from moecore.core.config import Config

Phase = Literal["pretrain", "finetune", "adversarial"]
Direction = Literal["higher", "lower", "equivalent"]


class Selection(Config):
    """Every method with every seed; measurements are of the models of these phases."""

    methods: tuple[str, ...] = Field(
        description="entries under methods: that are trained and compared; [] where nothing is "
        "trained, as seeds and phases then"
    )
    seeds: tuple[int, ...] = Field(description="one training of each method per seed")
    phases: tuple[Phase, ...] = Field(
        default=("pretrain", "finetune"),
        description="whose models are calibrated, attacked and asked for their routing",
    )
    measurements: tuple[str, ...] = Field(
        default=(), description="what else is measured, of the models of the phases in thorough"
    )
    thorough: tuple[Phase, ...] | None = Field(
        default=None,
        description="whose models the measurements are of; left out: those of all phases",
    )

    @model_validator(mode="after")
    def _all_or_nothing(self) -> Self:
        named = {"methods": self.methods, "seeds": self.seeds, "phases": self.phases}
        empty = [name for name, values in named.items() if not values]
        if empty and len(empty) < len(named):
            some = f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty"
            allowed = "at least one each, or none of methods, seeds and phases"
            raise ValueError(f"{some}; allowed: {allowed}")
        return self

    @model_validator(mode="after")
    def _thorough_among_phases(self) -> Self:
        if other := [phase for phase in self.thorough or () if phase not in self.phases]:
            allowed = ", ".join(self.phases)
            named = ", ".join(other)
            raise ValueError(f"thorough names {named}; allowed: {allowed}, as in phases")
        return self

    def covers(self, what: str, phase: Phase) -> bool:
        """Whether ``what`` (a stage or a measurement) looks at the models of this phase."""
        return self.thorough is None or what not in self.measurements or phase in self.thorough


class Comparison(Config):
    """Two methods and one metric: which of them is said to have more of it, or that neither has.

    Or one method and two metrics of the same images and unit, such as accuracies under two attacks.
    """

    metric: str = Field(description="A metric of reports/compare.json.")
    method: str = Field(description="The method that it is said of; one of run.methods.")
    against: str = Field(
        description="The method that it is compared with; one of run.methods, and another one "
        "unless against_metric is given."
    )
    against_metric: str = Field(
        "", description="What is read of `against`, where that is not `metric`."
    )
    better: Direction = Field(
        description="What is said of the metric of `method`: higher or lower than that of "
        "`against`, or equivalent, which is no further apart than `margin`."
    )
    margin: float | None = Field(
        None,
        gt=0,
        description="With `equivalent`: the largest difference that counts as none, in the "
        "metric's unit (0.03 of an accuracy: 3 percentage points).",
    )
    why: str = Field("", description="Why this margin.")
    phase: Phase = Field("pretrain", description="Which models are compared.")

    @model_validator(mode="after")
    def _margin_where_equivalent(self) -> Self:
        if self.better == "equivalent" and self.margin is None:
            raise ValueError(
                "better is equivalent and margin is missing; allowed: margin, a number > 0 in the "
                "unit of the metric"
            )
        if self.against_metric == self.metric:
            raise ValueError(
                f"found against_metric {self.against_metric}, the metric itself; allowed: another "
                "one, or none"
            )
        if self.better != "equivalent" and self.margin is not None:
            raise ValueError(
                f"found margin {self.margin:g} with better: {self.better}; allowed: a margin with "
                "better: equivalent only"
            )
        return self

    @property
    def words(self) -> str:
        """match_top1 of prc higher than of vmoe."""
        ours = f"{self.metric} of {self.method}"
        if self.against_metric:
            theirs = f"{self.against_metric} of {self.against}"
            if self.better == "equivalent":
                return f"{ours} within {self.margin:g} of {theirs}"
            return f"{ours} {self.better} than {theirs}"
        if self.better == "equivalent":
            return f"{ours} within {self.margin:g} of that of {self.against}"
        return f"{ours} {self.better} than of {self.against}"


class Claim(Comparison):
    """One sentence of a paper, put so that it can be measured."""

    paper: str = Field(min_length=1, description="Whose claim it is.")
    source: str = Field(
        min_length=1, description="Where it stands: table 4; figure 3, left; §5.1; the text."
    )
    says: str = Field(min_length=1, description="The claim in plain words.")


class Question(Comparison):
    """What no paper claims and these runs are asked: answered with yes, no or open."""

    asks: str = Field(min_length=1, description="The question in plain words.")
    paper: str = Field("", description="Whose method it is about; left out: nobody's.")


def settings_of(study: Mapping[str, Any], asked: Comparison) -> str:
    """A digest of the settings that an answer stands on, of a whole params.yaml as plain data: of
    methods those of the two alone; which runs, claims and questions there are does not matter.
    """
    left_out = ("run", "claims", "questions", "methods")
    kept = {name: section for name, section in study.items() if name not in left_out}
    methods = study.get("methods") or {}
    kept["methods"] = {name: methods.get(name) for name in (asked.method, asked.against)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
