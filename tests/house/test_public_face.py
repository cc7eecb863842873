"""What a dependent package sees: types, one line for wrong use, what an import loads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moecore
from moecore import UserError
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
    """The names of the script RIGHT, which was run."""
    names = {"__name__": "script"}
    exec(RIGHT, names)
    return names


def list_error_lines(text: str, folder: Path) -> set[int]:
    """Return the lines of a user's script in which the type checker finds errors."""
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
