"""A user's package: a router with a helper, a regularizer, a measurement with its page."""

from pathlib import Path

COSINE = '''\
"""A router by the cosine of a token and each expert's direction."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.routing_records import RoutingContext
from moecore.nn.routers.base import Router
from moecore.nn.routers.token_choice import plan_and_record, top_k
from my_lab.directions import cosines


class Cosine(Router):
    """The k experts whose directions are nearest."""

    kind: Literal["my_lab.cosine"] = "my_lab.cosine"
    k: int = Field(2, ge=1, description="experts per token")
    temperature: float = Field(0.1, gt=0, description="what the cosines are divided by")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "CosineRouter":
        self.check_k(experts)
        return CosineRouter(self, width, experts)


class CosineRouter(nn.Module):
    def __init__(self, config: Cosine, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.directions = nn.Parameter(torch.randn(experts, width))

    def forward(self, tokens: Tensor, context: RoutingContext = RoutingContext()):
        logits = cosines(tokens.float(), self.directions.float()) / self.config.temperature
        probs = logits.softmax(dim=-1)
        chosen = top_k(probs, self.config.k)
        return plan_and_record(
            logits=logits, probs=probs, chosen=chosen, weights=probs.gather(-1, chosen)
        )
'''
DIRECTIONS = """\
from torch import Tensor
from torch.nn.functional import normalize


def cosines(tokens: Tensor, directions: Tensor) -> Tensor:
    return normalize(tokens, dim=-1) @ normalize(directions, dim=-1).T
"""
CALM = '''\
"""The mean square of the routers' logits."""

from typing import Literal

from torch import Tensor

from moecore.core.routing_records import ObjectiveInputs
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.layer_terms import sum_over_layers


class Calm(Regularizer):
    kind: Literal["my_lab.calm"] = "my_lab.calm"
    weight: float = 0.001

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: record.logits.square().mean())
'''
BRIGHTNESS = '''\
"""How bright the test images are."""

from pydantic import Field

from moecore.core.config import Config
from moecore.measure.base import MeasuredModel, Measurement, PartStore


class Brightness(Measurement):
    """Which images."""

    images: int = Field(10, ge=1, description="Test images, the first ones.")

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        images = subject.data.test.images[: self.images]
        return Result(mean=parts("mean", lambda: float(images.mean())))


class Result(Config):
    mean: float
'''
BRIGHTNESS_PAGE = """\
from moecore.report.column import Column
from moecore.report.measures.result_display import Shown
from my_lab.brightness import Result

COLUMNS = (Column("brightness", "Brightness", lambda result: result.mean),)
SHOWN = Shown("my_lab.brightness", "brightness", Result, COLUMNS)
"""
FILES = {
    "__init__": "",
    "cosine": COSINE,
    "directions": DIRECTIONS,
    "calm": CALM,
    "brightness": BRIGHTNESS,
    "pages/brightness": BRIGHTNESS_PAGE,
}
# of a params.yaml
SECTIONS = """\
packages: [my_lab]
my_lab: {brightness: {images: 8}}
"""


def write_my_lab(folder: Path, **files: str) -> Path:
    """Write the package into ``folder``, with other or more modules; return its folder."""
    package = folder / "my_lab"
    for name, text in (FILES | files).items():
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    return package
