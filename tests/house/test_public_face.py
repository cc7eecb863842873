"""What a dependent package sees: types, refusals in one line, imports, parts by public names."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

import moecore
from moecore import UserError, parts, testing
from moecore.core.source_layout import PUBLIC_FAMILIES, ROOT
from moecore.training.artifacts import save_model
from tools.stubs import render_stub

RIGHT = """\
from typing import Literal
import numpy as np
import torch
import moecore
from moecore import attacks, balances, calibrators, measure, parts, sources, tasks, teachers
from moecore.backbones import Vit
from moecore.experts import Mlp
from moecore.regularizers import Importance
from moecore.measure import AuditSettings
from moecore.routers import GroupLimitedChoice, NoisyTopK
class Calm(parts.Regularizer):
    kind: Literal["my_lab.calm"] = "my_lab.calm"
    def __call__(self, step: parts.ObjectiveInputs) -> torch.Tensor:
        return parts.sum_over_layers(step, lambda record: record.probs.square().sum())
router = NoisyTopK(k=2, balance=balances.LossFree(rate=0.01))
layer = moecore.MoELayer(8, router, experts=Mlp(number=4))
task = tasks.Classification(classes=("a", "b"))
image = parts.ImageSpec(channels=1, size=8, mean=(0.5,), std=(0.5,), task=task)
moe = parts.MoESettings(router=router, experts=Mlp(), blocks="all")
model = Vit(patch=4, width=16, depth=2, heads=2).build(image, moe)
settings = (Importance(), Calm(weight=0.1), calibrators.Temperature(), teachers.NoTeacher())
others = (attacks.Pgd(steps=2), measure.Invariance(images=8), sources.Digits(seed=1))
audit = measure.Robustness(epsilons=(0.1,), attacks=(others[0],), audit=AuditSettings(steps=9))
grouped = NoisyTopK(groups=GroupLimitedChoice(number=4, kept=2))
with moecore.trace(layer) as records:
    moved: torch.Tensor = layer(torch.rand(2, 3, 8)).sum() + records[0].chosen.sum()
moecore.update_routers(layer, records)
def read(folder: str, images: torch.Tensor) -> torch.Tensor:
    return moecore.load_model(folder)(images).routing[0].probs
"""
PLANTED = """
NoisyTopK(kk=2)
Mlp(number=None)
Importance(weight=[1])
Calm(wieght=0.1)
moecore.routers.TopQ()
moecore.MoELayer(16, NoisyTopK, Mlp())
layer([1.0])
moecore.load_model("folder")(moved).predictions
records[0].weights
moecore.trace(layer)[0]
"""


@pytest.fixture(scope="module")
def script() -> dict:
    names = {"__name__": "script"}
    exec(RIGHT, names)
    return names


def list_error_lines(text: str, folder: Path) -> set[int]:
    (folder / "script.py").write_text(text, encoding="utf-8")
    paths = ["--search-path", ROOT, "--python-interpreter-path", sys.executable]
    command = ["pyrefly", "check", "script.py", "--preset", "default", "--output-format", "json"]
    done = subprocess.run([*command, *paths], cwd=folder, capture_output=True, text=True)
    return {error["line"] for error in json.loads(done.stdout)["errors"]}


def test_renamed_imports_are_exported():
    text = Path(moecore.__file__).read_text(encoding="utf-8")
    for _, alias in re.findall(r" import (?!(\w+) as \1\n)\w+ as (\w+)\n", text):
        assert f'"{alias}"' in text, alias


def test_a_type_checker_finds_ten_planted_errors_and_no_other(tmp_path):
    assert all(re.search(f"{family}[. ]", RIGHT) for family in PUBLIC_FAMILIES)
    assert list_error_lines(RIGHT, tmp_path) == set()
    first = RIGHT.count("\n") + 2
    assert list_error_lines(RIGHT + PLANTED, tmp_path) == set(range(first, first + 10))


@pytest.mark.parametrize("name", PUBLIC_FAMILIES)
def test_types_of_a_family_are_what_the_code_says(name):
    stub = ROOT / "moecore" / name / "__init__.pyi"
    is_fresh = stub.read_text(encoding="utf-8") == render_stub(getattr(moecore, name))
    assert is_fresh, "run `python -m tools.stubs`"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("moecore.MoELayer(8, NoisyTopK, Mlp())", "router: found the class NoisyTopK"),
        ("moecore.MoELayer(8, 'noisy_top_k', Mlp())", "router: found 'noisy_top_k'"),
        ("moecore.MoELayer(8, router, Mlp)", "experts: found the class Mlp"),
        ("parts.MoESettings(router=NoisyTopK, experts=Mlp())", "router: found the class NoisyTopK"),
        ("moecore.MoELayer('8', router, Mlp())", "width: found '8'"),
        ("layer(np.zeros((2, 8)))", "tokens: found ndarray"),
        ("layer(torch.zeros(2, 9))", "tokens: found torch.float32 of shape (2, 9)"),
        ("model(np.zeros((1, 1, 8, 8)))", "images: found ndarray"),
        ("model(torch.zeros(1, 1, 12, 8))", "images: found shape (1, 1, 12, 8)"),
    ],
)
def test_wrong_use_is_refused_in_one_line(script, wrong, line):
    with pytest.raises(UserError) as refused:
        eval(wrong, script)
    assert str(refused.value).startswith(f"{line}; allowed: ") and "\n" not in str(refused.value)


def test_a_layer_says_what_it_is(script):
    fine = eval("moecore.MoELayer(8, NoisyTopK(k=3), Mlp(number=4, fine=2, shared=1))", script)
    # 3 · 2 pieces per token, one of which is shared, of 4 · 2 - 1
    assert fine.extra_repr() == "width=8, router=noisy_top_k, k=5, experts=7"


BLOCKED = (
    "matplotlib scipy PIL mlflow dvc timm rich nibabel onnx transformers tokenizers pandas "
    "sklearn psutil typer ruamel jinja2 filelock threadpoolctl"
).split()
USE = """\
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import moecore
assert "torch" not in sys.modules
from moecore.routers import NoisyTopK
assert "moecore.nn.routers.hash" not in sys.modules  # nothing but the named part
import torch
layer = moecore.MoELayer(8, NoisyTopK(k=1), moecore.experts.Mlp(number=2))
with moecore.trace(layer) as records:
    layer(torch.rand(2, 3, 8)).sum().backward()
moecore.update_routers(layer, records)
moecore.testing.check_router(NoisyTopK)
print(*moecore.load_model(sys.argv[1])(torch.rand(2, 1, 8, 8)).prediction.shape)
"""


def test_layers_and_models_need_torch_and_settings_alone(script, tmp_path):
    save_model(tmp_path, script["model"])
    command = [sys.executable, "-c", USE, tmp_path, *BLOCKED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("2 2\n", 0), done.stderr


SIDE = 8
STRIPED = parts.Classification(classes=("along", "across"))


class Stripes(parts.Source):
    """Eight images a split, striped along or across."""

    task: ClassVar[type[parts.Task]] = parts.Classification
    kind: Literal["my_lab.stripes"] = "my_lab.stripes"
    seed: int = 0

    def describe(self):
        counts = dict.fromkeys(("train", "validation", "test"), (4, 4))
        return parts.Card("Stripes", 1, SIDE, STRIPED, "CC0", "drawn", counts)

    def write(self, folder):
        labels = np.arange(8) % 2
        image = np.tile(np.arange(SIDE, dtype=np.uint8) * 30, (SIDE, 1))
        images = np.stack([image if label else image.T for label in labels])[:, None]
        split = parts.SplitToWrite(labels, [images])
        splits = dict.fromkeys(("train", "validation", "test"), split)
        return parts.write_images(folder, self, self.describe(), splits)


class Weight(parts.Task):
    """One number per image: its error is the score."""

    kind: Literal["my_lab.weight"] = "my_lab.weight"
    outputs: ClassVar[int] = 1
    answers: ClassVar[tuple[str, ...]] = ("weight",)
    score: ClassVar[parts.Score] = parts.Score("error", "absolute error", "kg", "number", "lower")

    def loss(self, prediction, labels, label_smoothing=0.0, reduction="mean"):
        errors = self.attack_loss(prediction, labels)
        return errors.mean() if reduction == "mean" else errors

    def attack_loss(self, prediction, labels):
        return (prediction[:, 0] - labels.to(prediction)).square()

    def test_loss(self, prediction, labels):
        return self.attack_loss(prediction.double(), labels)

    def scores(self, prediction, labels):
        return (prediction[:, 0].double() - labels.double()).abs()

    def running(self, prediction, labels, learned=None):
        return (prediction[:, 0] - labels).abs().sum()

    def baseline_score(self, labels):
        return float((labels - labels.median()).abs().mean())

    def storage_format(self, images):
        return (images,), np.float32

    def check(self, labels, what):
        if not np.isfinite(labels).all():
            raise moecore.UserError(f"{what} are not finite; allowed: kilograms")

    @classmethod
    def needs_classes(cls, what):
        return "a weight has no classes"


class Linear(parts.Experts):
    """One matrix per expert."""

    kind: Literal["my_lab.linear"] = "my_lab.linear"
    number: int = 4

    def build(self, width):
        return Matrices(self.number, width)


class Matrices(parts.ExpertsModule):
    def __init__(self, experts: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, width))

    def forward(self, rows: parts.Rows) -> torch.Tensor:
        pieces = rows.values.tensor_split(rows.offsets[:-1].tolist())
        return torch.cat([piece @ one for piece, one in zip(pieces, self.weight, strict=True)])


class Flat(parts.Backbone):
    """One feed-forward over the whole image as one token."""

    kind: Literal["my_lab.flat"] = "my_lab.flat"
    depth: ClassVar[int] = 1
    width: int = 16

    def grid(self, image: parts.ImageSpec):
        return (1, 1)

    def build(
        self, image: parts.ImageSpec, moe: parts.MoESettings | None = None
    ) -> parts.BackboneModel:
        return FlatModel(self, image, moe)


class FlatModel(parts.BackboneModel):
    depth: ClassVar[int] = 1

    def __init__(self, config, image, moe):
        super().__init__(config, image, moe)
        self.embed = nn.Linear(image.channels * image.size**2, config.width)
        self.mlp = nn.Linear(config.width, config.width) if moe is None else moe.build(config.width)
        self.head = nn.Linear(config.width, image.outputs)

    @property
    def layout(self):
        return parts.TokenLayout(0, (1, 1), self.image.shape)

    def encode(self, images, options=parts.EncodeOptions()):
        entering = self.embed(self.normalised(images).flatten(1))[:, None]
        tokens, records = self.mlp(entering), ()
        if self.moe is not None:
            context = self.routing_contexts(images, options).get(0, parts.RoutingContext())
            tokens, records = self.mlp(entering, context)
        feature = options.select_tokens(entering, tokens)
        return parts.Encoded(tokens, records, (feature,) * len(options.blocks))

    def heads(self, tokens):
        return (self.head(tokens[:, 0]),)


class Untrained(parts.Teacher):
    """A small ViT of one seed."""

    kind: Literal["my_lab.untrained"] = "my_lab.untrained"

    def build(self, image: parts.ImageSpec) -> parts.BackboneModel:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return moecore.backbones.Vit(patch=4, width=16, depth=1, heads=2).build(image)


def test_they_keep_what_families_promise_and_an_old_source_is_told_what_to_write(tmp_path):
    with pytest.raises(ImportError, match="Column; allowed: Metric, Values"):
        exec("from moecore.parts import Column")
    with pytest.raises(UserError, match="Old: found prepare; allowed: describe, write"):
        type("Old", (Stripes,), {"__module__": __name__, "prepare": Stripes.write})
    assert testing.check_source(Stripes, tmp_path).task == STRIPED
    kilograms = np.array([60.0, 80.0], np.float32)
    testing.check_task(Weight(), torch.tensor([[61.0], [77.0]]), kilograms, np.array([np.nan]))
    testing.check_experts(Linear)
    testing.check_backbone(Flat)
    testing.check_teacher(Untrained)
