"""What an addition costs: each is made in a copy of the project, counted, and run."""

import difflib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moecore.core.files import read_json
from moecore.pipeline.dvc_file import study_dvc
from tests.project import PARAMS, ROOT, Project

SMALL = re.sub(r"epochs: 2", "epochs: 1", PARAMS).replace("steps: 20", "steps: 2")


class Addition:
    """A copy of the project to which something is added."""

    def __init__(self, folder: Path, params: str = SMALL) -> None:
        self.project = Project(folder, params)
        self.project.forked = False

    def part(self, old: str, new: str, rename: Callable[[str], str]) -> None:
        """Add the file ``new``: the file ``old`` under other names."""
        text = (ROOT / old).read_text(encoding="utf-8")
        self.file(new, rename(text))

    def file(self, path: str, text: str) -> None:
        assert not (ROOT / path).exists()
        (self.project.folder / path).write_text(text, encoding="utf-8")

    def line(
        self, path: str, *, before: str = "", add: str, into: tuple[str, str] | None = None
    ) -> None:
        """Add a line to a file of the project before the first line that begins with ``before``."""
        file = self.project.folder / path
        text = file.read_text(encoding="utf-8")
        replaced = [(f"\n{before}", f"\n{add}\n{before}")] + ([into] if into else [])
        for old, new in replaced:
            assert old in text, f"{path} has no {old!r}"
            text = text.replace(old, new, 1)
        file.write_text(text, encoding="utf-8")

    def join(
        self,
        family: str,
        like: tuple[str, str],
        new: tuple[str, str],
        before: str,
        into: tuple[str, str],
        rename: Callable[[str], str] = str,
    ) -> None:
        """Add a part to a family: a copy of another under a new kind and class, and its two lines.

        like, new: (kind, class); before: the kind that follows it; into: text of the union, and
        the same with the new class.
        """
        (old_kind, old_class), (kind, name) = like, new

        def renamed(text: str) -> str:
            text = text.replace(f'"{old_kind}"', f'"{kind}"')
            return rename(re.sub(rf"\b{old_class}\b", name, text))

        self.part(f"{family}/{old_kind}.py", f"{family}/{kind}.py", renamed)
        dotted = family.replace("/", ".")
        self.line(
            f"{family}/__init__.py",
            before=f"from {dotted}.{before} ",
            add=f"from {dotted}.{kind} import {name}",
            into=into,
        )
        assert self.cost()[f"{family}/__init__.py"] == 2

    def cost(self) -> dict[str, int]:
        """Files of the code that changed, with the number of lines that were added or replaced."""
        found = {}
        for folder in ("moecore", "stages"):
            for file in sorted((ROOT / folder).rglob("*.py")):
                path = file.relative_to(ROOT)
                old = file.read_text(encoding="utf-8").splitlines()
                new = (self.project.folder / path).read_text(encoding="utf-8").splitlines()
                lines = [line for line in difflib.ndiff(old, new) if line.startswith("+ ")]
                if lines:
                    found[str(path)] = len(lines)
        return found

    def run(self, *stages: str) -> None:
        for stage in stages:
            self.project.stage(*stage.split())

    def measured(self, name: str) -> dict:
        return read_json(self.project.folder / f"artifacts/measured/{name}.json")


@pytest.fixture
def addition(tmp_path) -> Addition:
    return Addition(tmp_path)


TRAINED = ("prepare pretrain", "teacher_router vmoe 0", "pretrain vmoe 0")
LOOKED_AT = "measure invariance pretrain vmoe 0"


def test_a_router(addition):
    addition.join(
        "moecore/nn/routers",
        ("hash", "Hash"),
        ("lottery", "Lottery"),
        before="noisy_top_k",
        into=("\n    | NoisyTopK", "\n    | Lottery\n    | NoisyTopK"),
    )
    assert len(addition.cost()) == 1
    edit(addition, "vmoe", "router: {kind: noisy_top_k, k: 2}", "router: {kind: lottery, k: 2}")
    edit(addition, "vmoe", "      - {kind: load, weight: 0.005}\n", "")
    addition.run(*TRAINED, LOOKED_AT)
    assert addition.measured("pretrain/vmoe/0")["test_count"] > 0


def test_a_regularizer(addition):
    addition.join(
        "moecore/training/regularizers",
        ("z_loss", "ZLoss"),
        ("quiet", "Quiet"),
        before="router_kl",
        into=("    | RouterKl", "    | Quiet\n    | RouterKl"),
    )
    assert len(addition.cost()) == 1
    edit(addition, "vmoe", "{kind: load, weight: 0.005}", "{kind: quiet, weight: 0.005}")
    addition.run(*TRAINED)
    history = addition.project.folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    assert '"quiet"' in history.read_text(encoding="utf-8")


def test_a_data_source(addition):
    source(addition)
    assert len(addition.cost()) == 1
    addition.run("prepare pretrain", "teacher_router dense 0", "pretrain dense 0")
    assert addition.measured("pretrain/dense/0")["test_count"] > 0


def test_a_task(addition):
    addition.join(
        "moecore/tasks",
        ("classification", "Classification"),
        ("graded", "Graded"),
        before="multi_label",
        into=("    Classification | MultiLabel", "    Classification | Graded | MultiLabel"),
    )
    assert len(addition.cost()) == 1
    source(addition, graded)
    addition.run(*TRAINED, LOOKED_AT, "robustness pretrain vmoe 0")
    assert addition.measured("robustness/pretrain/vmoe/0")["worst_case"]


def test_a_backbone(addition):
    addition.join(
        "moecore/nn/backbones",
        ("vit", "Vit"),
        ("plain", "Plain"),
        before="single_layer",
        into=("    SingleLayer |", "    Plain | SingleLayer |"),
    )
    assert len(addition.cost()) == 1
    addition.project.edit("\nmodel: {kind: vit", "\nmodel: {kind: plain")
    addition.run(*TRAINED, LOOKED_AT)
    assert addition.measured("pretrain/vmoe/0")["test_count"] > 0


MEASUREMENT = '''\
"""How bright the test images are."""

from pydantic import Field

from moecore.core.config import Config
from moecore.measure.base import Parts, Subject


class Brightness(Config):
    """Which images."""

    images: int = Field(10, ge=1, description="Test images, the first ones.")


class Result(Config):
    """In grey levels."""

    mean: float


def applies(subject: Subject) -> str | None:
    """To all."""
    return None


def measure(subject: Subject, settings: Brightness, parts: Parts) -> Result:
    """The mean over all pixels."""
    images = subject.data.test.images[: settings.images]
    return Result(mean=parts("mean", lambda: float(images.mean())))
'''
SHOWN = '''\
"""How bright the test images are."""

from moecore.measure.brightness import Result
from moecore.report.column import Column
from moecore.report.shown import Figures

COLUMNS = (Column("brightness", "Brightness", lambda result: result.mean),)


def figures(result: Result) -> Figures:
    """None."""
    yield from ()
'''
MEASURED = """\
run:
  {methods: [dense], seeds: [0], phases: [pretrain], measurements: [brightness],
  thorough: [pretrain]}
data: {pretrain: {kind: digits, size: 16}}
model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
methods: {dense: {}}
teacher_router: {steps: 2, batch: 64, learning_rate: 0.01}
pretrain: {epochs: 1, batch: 64, learning_rate: 0.001}
brightness: {images: 8}
"""


def test_a_measurement(tmp_path):
    addition = Addition(tmp_path, MEASURED)
    addition.file("moecore/measure/brightness.py", MEASUREMENT)
    addition.file("moecore/report/measures/brightness.py", SHOWN)
    addition.line(
        "moecore/measure/__init__.py",
        before="    cohort_checks,",
        add="    brightness,",
        into=(
            "MEASUREMENTS = {\n",
            "MEASUREMENTS = {\n"
            '    "brightness": Measurement.of(brightness, brightness.Brightness),\n',
        ),
    )
    shown = 'Shown("brightness", "b", brightness.Result, brightness.COLUMNS, brightness.figures)'
    addition.line(
        "moecore/report/measures/__init__.py",
        before="    calibration,\n    cohort",
        add="    brightness,",
        into=("SHOWN = (\n", f"SHOWN = (\n    {shown},\n"),
    )
    assert addition.cost() == {
        "moecore/measure/__init__.py": 2,
        "moecore/report/measures/__init__.py": 2,
    }
    text = study_dvc(["prepare", "teacher_router", "pretrain", "measure"])
    (tmp_path / "dvc.yaml").write_text(text, encoding="utf-8")
    addition.run("prepare pretrain", "teacher_router dense 0", "pretrain dense 0")
    addition.run("measure brightness pretrain dense 0", "compare")
    table = (tmp_path / "reports/compare.json").read_text(encoding="utf-8")
    assert '"brightness' in table
    page = (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    assert "Brightness" in page


OVERLAY = """\
stages: [prepare, teacher_router, pretrain, measure, compare]
run: {methods: [dense], phases: [pretrain], thorough: [pretrain], measurements: [cost]}
pretrain: {epochs: 1}
"""


def test_a_study(tmp_path):
    """A folder with an overlay and a README; it is a DVC project of its own."""
    project = Project(tmp_path).with_dvc()
    study = tmp_path / "pipelines/mine"
    study.mkdir(parents=True)
    shutil.copy(ROOT / "pipelines/stages.yaml", tmp_path / "pipelines")
    (study / "overlay.yaml").write_text(OVERLAY, encoding="utf-8")
    (study / "README.md").write_text("# mine\n", encoding="utf-8")
    written = project.moecore("study", "write")
    assert written.returncode == 0, written.stderr
    inside = Project.at(study)
    inside.root = tmp_path
    ran = inside.repro()
    assert sorted(ran) == [
        "code",
        "compare",
        "measure@cost-pretrain-dense-0",
        "numbers",
        "prepare@pretrain",
        "pretrain@dense-0",
        "teacher_router@dense-0",
    ]
    assert (study / "reports/compare.json").is_file()
    assert inside.repro() == ["code"], "its code lies outside, so it is hashed at every start"
    assert not (study / ".dvc/cache").exists() and (tmp_path / ".dvc/cache/files").is_dir()
    listed = project.run(["dvc", "stage", "list", "--all", "--name-only"]).stdout
    assert "mine" not in listed and "pretrain@vmoe-0" in listed


def graded(text: str) -> str:
    """A source of the new task."""
    return text.replace(
        "tasks.classification import Classification", "tasks.graded import Graded"
    ).replace("Classification(", "Graded(")


def source(addition: Addition, rename: Callable[[str], str] = str) -> None:
    """Add a data source, and use it."""
    addition.join(
        "moecore/data/sources",
        ("digits", "Digits"),
        ("numerals", "Numerals"),
        before="phantom",
        into=("    | Phantom\n", "    | Numerals\n    | Phantom\n"),
        rename=rename,
    )
    addition.project.edit("pretrain: {kind: digits", "pretrain: {kind: numerals")


def edit(addition: Addition, method: str, old: str, new: str) -> None:
    """Replace text in the settings of a method."""
    text = (addition.project.folder / "params.yaml").read_text(encoding="utf-8")
    begin = text.index(f"\n  {method}:\n")
    at = text.index(old, begin)
    addition.project.write(text[:at] + new + text[at + len(old) :])
