"""The section ``run:`` of params.yaml: what is computed."""

from typing import Literal

from pydantic import Field

from moecore.config import Config

Phase = Literal["pretrain", "finetune", "adversarial"]


class Selection(Config):
    """Every method with every seed; evaluations measure the models of these phases."""

    methods: tuple[str, ...] = Field(min_length=1, description="entries under methods: that are trained and compared")
    seeds: tuple[int, ...] = Field(min_length=1, description="one training of each method per seed")
    phases: tuple[Phase, ...] = Field(default=("pretrain", "finetune"), min_length=1, description="which models are measured")
