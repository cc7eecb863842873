"""What an addition costs: all are made in one copy of the project, counted, and run together."""

import re
import sys
from pathlib import Path

from moecore.core.files import read_json
from tests.project import ROOT, Project

PARTS = (  # family; kind and class of the part that is copied; those of the new one
    ("nn/routers", "relu Relu", "lottery Lottery"),  # a router with a loss that it needs
    ("training/regularizers", "adaptive_l1 AdaptiveL1", "quiet Quiet"),
    ("attacks", "fgsm Fgsm", "nudge Nudge"),
    ("tasks", "classification Classification", "graded Graded"),
    ("data/sources", "digits Digits", "numerals Numerals"),
    ("nn/backbones", "vit Vit", "plain Plain"),
)
PARAMS = """\
run:
  {methods: [mine], seeds: [0], phases: [pretrain, halve], measurements: [brightness, invariance],
  thorough: [pretrain]}
data:
  pretrain: &data {kind: numerals, size: 16}
  halve: *data
model: {kind: plain, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
methods:
  mine:
    router: {kind: lottery, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
    regularizers: [{kind: quiet, weight: 0.005}]
teacher_router: {steps: 2, batch: 64, learning_rate: 0.01}
pretrain: {epochs: 1, batch: 64, learning_rate: 0.001}
halve: {left: 0.5}
robustness: {images: 16, epsilons: [0.05], attacks: [{kind: nudge}], audit: {images: 8, steps: 1}}
brightness: {images: 8}
invariance: {images: 8}
"""
# All in one process: each of its own would import torch
RUN = """
from pathlib import Path
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.run.stage_entry import run_stage
from moecore.stages.fork_server import STAGES
from moecore.study.check import check_study
from moecore.testing import check_regularizer
from moecore.training.regularizers.quiet import Quiet
check_regularizer(Quiet)
names = "prepare teacher_router pretrain halve robustness measure compare".split()
Path("dvc.yaml").write_text(study_dvc_yaml_texts(build_stage_entries(names), {})["dvc.yaml"])
check_study()
write_all_hashes("params.yaml")
for phase in "pretrain", "halve":
    run_stage(STAGES["prepare"], [phase])
for name in "teacher_router", "pretrain", "halve":
    run_stage(STAGES[name], ["mine", "0"])
for phase in "pretrain", "halve":
    run_stage(STAGES["robustness"], [phase, "mine", "0"])
for what in "brightness", "invariance":
    run_stage(STAGES["measure"], [what, "pretrain", "mine", "0"])
run_stage(STAGES["compare"], [])
"""
MEASUREMENT = '''\
"""How bright the test images are when they get darker."""

from pydantic import Field

from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import Chart, Metric, OnPage, Values


class Brightness(Measurement):
    """Which images."""

    metrics = {"brightness": Metric("Brightness, {} %", over="percent", mean="Brightness")}
    page = OnPage("brightness", charts=(Chart("brightness", "percent", "Dark", "%", "Mean"),))
    images: int = Field(10, ge=1, description="Test images, the first ones.")

    def places(self):
        return {"percent": (50, 100)}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        pixels = subject.data.test.images[: self.images].reshape(self.images, -1)
        for percent in (50, 100):
            out.put("brightness", percent / 100 * pixels.mean(axis=1), percent=percent)
'''


def add_part(folder: Path, family: str, like: str, new: str) -> None:
    (old_kind, old_name), (kind, name) = like.split(), new.split()
    home = folder / "moecore" / family
    text = (home / f"{old_kind}.py").read_text(encoding="utf-8")
    text = re.sub(rf"\b{old_name}\b", name, text.replace(f'"{old_kind}"', f'"{kind}"'))
    text = text.replace('"adaptive_l1"', '"quiet"').replace('"sparsity"', '"luck"')
    (home / f"{kind}.py").write_text(text, encoding="utf-8")


def list_changed_files(folder: Path) -> list[str]:
    files = [*(ROOT / "moecore").rglob("*.py"), *(ROOT / "stages").glob("*.py")]
    paths = [file.relative_to(ROOT) for file in files]
    return [
        str(path) for path in paths if (folder / path).read_bytes() != (ROOT / path).read_bytes()
    ]


ROW = """\
    Stage(
        "halve",
        "A pretrained model with half of its experts",
        each="model",
        after=("data/halve", PRETRAINED),
        settings="moecore.training.surgery.halve.Halve",
        title="Halved",
        usual=False,
    ),
"""


def add_phase(folder: Path) -> None:
    table = folder / "moecore/study/stages.py"
    text = table.read_text(encoding="utf-8")
    before = '    Stage(\n        "out_of_fold",'
    table.write_text(text.replace(before, ROW + before), encoding="utf-8")
    for source, new in (
        ("stages/prune_experts.py", "stages/halve.py"),
        ("moecore/training/surgery/prune.py", "moecore/training/surgery/halve.py"),
    ):
        text = (folder / source).read_text(encoding="utf-8")
        text = text.replace("prune_experts", "halve").replace("Prune", "Halve")
        text = text.replace("surgery.prune", "surgery.halve").replace('"prune"', '"halve"')
        text = text.replace("prune: Halve", "halve: Halve").replace("params.prune", "params.halve")
        (folder / new).write_text(text, encoding="utf-8")


def test_a_part_is_a_file_a_phase_is_a_row_too_and_all_of_them_run(tmp_path):
    """Of a router, regularizer, attack, task, source, backbone, measurement and phase."""
    project = Project(tmp_path, PARAMS)
    project.forked = False  # the copy's own code
    for family, like, new in PARTS:
        add_part(tmp_path, family, like, new)
    source = tmp_path / "moecore/data/sources/numerals.py"
    text = source.read_text(encoding="utf-8").replace("tasks.classification", "tasks.graded")
    source.write_text(re.sub(r"\bClassification\b", "Graded", text), encoding="utf-8")
    # a measurement with a chart, too, is one file
    (tmp_path / "moecore/measure/brightness.py").write_text(MEASUREMENT, encoding="utf-8")
    assert list_changed_files(tmp_path) == []
    add_phase(tmp_path)
    assert list_changed_files(tmp_path) == ["moecore/study/stages.py"]
    project.run([sys.executable, "-c", RUN])
    (tmp_path / "params.yaml").write_text(PARAMS.replace("lottery", "top_k_softmax"))
    check = "from moecore.study.check import check_study; check_study()"
    said = project.attempt([sys.executable, "-c", check]).stderr
    assert "methods.mine.regularizers[0]: found quiet, which needs luck, but top_k_" in said
    card = read_json(tmp_path / "artifacts/data/pretrain/card.json")
    assert card["task"]["kind"] == "graded"
    history = tmp_path / "artifacts/history/pretrain/mine/0/history.jsonl"
    assert '"quiet"' in history.read_text(encoding="utf-8")
    attacks = read_json(tmp_path / "artifacts/measured/robustness/pretrain/mine/0.json")
    assert "nudge" in str(attacks) and "'worst'" in str(attacks)
    compared = read_json(tmp_path / "artifacts/compare.json")["mine"]["pretrain"]
    assert compared["brightness_50"]["mean"] == compared["brightness_100"]["mean"] / 2 > 0
    trained, halved = (
        read_json(tmp_path / f"artifacts/measured/{phase}/mine/0.json")
        for phase in ("pretrain", "halve")
    )
    assert halved["parameters"] < trained["parameters"]
    page = (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    assert "pretrain: Dark" in page and "Halved" in page
