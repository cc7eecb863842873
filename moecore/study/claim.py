"""The section ``claims`` of params.yaml: what the papers say of two methods."""

from typing import Literal

from pydantic import Field

from moecore.core.config import Config
from moecore.study.selection import Phase


class Claim(Config):
    """One sentence of a paper, put so that it can be measured.

    It says that ``method`` has a better ``metric`` than ``against``.
    """

    paper: str = Field(min_length=1, description="Whose claim it is.")
    says: str = Field(min_length=1, description="The claim in plain words.")
    metric: str = Field(description="A metric of reports/compare.json.")
    method: str = Field(description="The method that the paper says is better; one of run.methods.")
    against: str = Field(description="The method that it is compared with; one of run.methods.")
    better: Literal["higher", "lower"] = Field(description="The direction that the paper claims.")
    phase: Phase = Field("pretrain", description="Which models are compared.")
