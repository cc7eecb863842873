"""The section ``run`` of params.yaml: what is trained and measured."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.study.stages import PHASES

if TYPE_CHECKING:
    Phase = str
else:
    Phase = Literal[PHASES]  # the names in this tuple


class Selection(Config):
    """Every method with every seed; measurements are of the models of these phases."""

    methods: tuple[str, ...] = Field(
        description="entries under methods; [] where nothing is trained"
    )
    seeds: tuple[int, ...] = Field(description="one training of each method per seed")
    phases: tuple[Phase, ...] = Field(
        ("pretrain", "finetune"), description="whose models are calibrated and attacked"
    )
    measurements: tuple[str, ...] = Field(
        (), description="what else is measured, of the models of the phases in thorough"
    )
    thorough: tuple[Phase, ...] | None = Field(
        None, description="whose models are measured; left out: of all phases"
    )

    @model_validator(mode="after")
    def _all_or_nothing(self) -> Self:
        named = {"methods": self.methods, "seeds": self.seeds, "phases": self.phases}
        empty = [name for name, values in named.items() if not values]
        if empty and len(empty) < len(named):
            allowed = "at least one each, or none of methods, seeds and phases"
            raise ValueError(f"found none of {' and '.join(empty)}; allowed: {allowed}")
        return self

    @model_validator(mode="after")
    def _thorough_among_phases(self) -> Self:
        if other := [phase for phase in self.thorough or () if phase not in self.phases]:
            allowed = ", ".join(self.phases)
            raise ValueError(f"thorough names {', '.join(other)}; allowed: {allowed}, as in phases")
        return self

    def covers(self, what: str, phase: Phase) -> bool:
        """Return whether ``what`` (a stage or a measurement) looks at the models of this phase."""
        return self.thorough is None or what not in self.measurements or phase in self.thorough
