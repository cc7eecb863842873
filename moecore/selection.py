"""The section ``run:`` of params.yaml: what is computed."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moecore.config import Config

Phase = Literal["pretrain", "finetune", "adversarial"]
THOROUGH = ("invariance", "corruptions", "stability", "lipschitz", "cost")


class Selection(Config):
    """Every method with every seed; evaluations measure the models of these phases."""

    methods: tuple[str, ...] = Field(min_length=1, description="entries under methods: that are trained and compared")
    seeds: tuple[int, ...] = Field(min_length=1, description="one training of each method per seed")
    phases: tuple[Phase, ...] = Field(default=("pretrain", "finetune"), min_length=1, description="which models are measured")
    thorough: tuple[Phase, ...] | None = Field(
        default=None, description="which of them also go through invariance, corruptions, stability, lipschitz and cost; left out: all"
    )

    @model_validator(mode="after")
    def _thorough_among_phases(self) -> Self:
        if other := [phase for phase in self.thorough or () if phase not in self.phases]:
            raise ValueError(f"thorough names {', '.join(other)}; allowed: {', '.join(self.phases)}, as in phases")
        return self

    def covers(self, stage: str, phase: Phase) -> bool:
        """Whether the measuring stage ``stage`` runs on the models of this phase."""
        return self.thorough is None or stage not in THOROUGH or phase in self.thorough
