"""A user's package: a router with a helper, a regularizer, a measurement with its page."""

import sys
from pathlib import Path

from moecore.core.source_layout import ROOT, allow_packages

TEMPLATE = ROOT / "moecore/pipeline/project_template/src/my_study/cosine.py"
OWN = "from moecore.parts"
COSINE = (  # that of `moecore new`, which a helper of the package serves here
    TEMPLATE.read_text(encoding="utf-8")
    .replace("my_study", "my_lab")
    .replace("normalize(self.directions, dim=-1)", "unit_rows(self.directions)")
    .replace(OWN, f"from my_lab.directions import unit_rows\n{OWN}")
)
DIRECTIONS = """\
from torch import Tensor
from torch.nn.functional import normalize


def unit_rows(directions: Tensor) -> Tensor:
    return normalize(directions, dim=-1)
"""
CALM = '''\
"""The mean square of the routers' logits."""

from typing import Literal

from torch import Tensor

from moecore.parts import ObjectiveInputs, Regularizer, sum_over_layers


class Calm(Regularizer):
    kind: Literal["my_lab.calm"] = "my_lab.calm"
    weight: float = 0.001

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: record.logits.square().mean())
'''
BRIGHTNESS = '''\
"""How bright the test images are."""

from pydantic import Field

from moecore.parts import MeasuredModel, Measurement, Metric, Values


class Brightness(Measurement):
    metrics = {"brightness": Metric("Brightness")}

    images: int = Field(10, ge=1, description="Test images, the first ones.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        images = subject.data.test.images[: self.images]
        out.piece("mean", lambda part: part.put("brightness", float(images.mean())))
'''
BRIGHTNESS_PAGE = """\
from moecore.report.results_and_displays import Pictures

PICTURES = Pictures("my_lab.brightness")
"""
FILES = {"__init__": "", "cosine": COSINE, "directions": DIRECTIONS, "calm": CALM}
FILES |= {"brightness": BRIGHTNESS, "pages/brightness": BRIGHTNESS_PAGE}
# of a params.yaml
SECTIONS = """\
packages: [my_lab]
my_lab: {brightness: {images: 8}}
"""


def write_my_lab(folder: Path, package: str = "my_lab", **files: str) -> Path:
    """Write the package into ``folder``, with other or more modules; return its folder."""
    home = folder / package
    for name, text in (FILES | files).items():
        (home / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (home / f"{name}.py").write_text(text.replace("my_lab", package), encoding="utf-8")
    return home


def forget_package(package: str = "my_lab") -> None:
    """Allow no package any more, and let Python import this one anew, from wherever it lies."""
    allow_packages((), ())
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
