"""What an edit makes stale, asked of DVC and of the hashes of the code on a finished project.

A stage needs nothing that dvc.yaml does not name: each runs where only its dependencies are.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.run.history_file import locked
from tests import forked
from tests.project import Project

METHODS = ("dense", "vmoe", "tgr")


@pytest.fixture(scope="module")
def project(finished, tmp_path_factory) -> Project:
    return finished.copy(tmp_path_factory.mktemp("reruns") / "project")


@pytest.fixture
def edited(project) -> Iterator[Project]:
    """The project, whose code and params are put back after the test."""
    yield project
    for name in ("moecore", "stages"):
        shutil.rmtree(project.folder / name)
    project.copy_code()
    project.write()


def edit(project: Project, file: str, more: str = "\n# edited\n") -> None:
    path = project.folder / file
    path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")


def of_method(stage: str, *methods: str) -> bool:
    return any(method in stage.partition("@")[2].split("-") for method in methods)


def test_nothing_is_stale_at_first(project):
    assert project.stale() == {}


@pytest.mark.parametrize(
    "file",
    [
        "moecore/run/progress.py",
        "moecore/run/history.py",
        "moecore/run/resume.py",
        "moecore/study/checks.py",
        "moecore/study/params.py",
        "moecore/tracking/sync.py",
        "moecore/pipeline/plan.py",
    ],
)
def test_what_decides_no_result_reruns_nothing(edited, file):
    edit(edited, file)
    assert edited.run(["dvc", "status"]).stdout.strip() == "Data and pipelines are up to date."


def test_a_figure_or_a_column_reruns_compare_alone(edited):
    for file in sorted((edited.folder / "moecore/report").rglob("*.py")):
        edit(edited, str(file.relative_to(edited.folder)))
    assert set(edited.stale()) == {"compare", "numbers"}


def test_a_measurement_reruns_that_measurement_and_compare(edited):
    edit(edited, "moecore/measure/invariance.py")
    stale = edited.stale()
    assert set(stale) == {
        *(f"measure@invariance-finetune-{method}-0" for method in METHODS),
        "compare",
        "numbers",
    }
    assert "moecore/measure/invariance.py edited" in stale["measure@invariance-finetune-dense-0"]


def test_a_router_reruns_the_methods_that_use_it(edited):
    edit(edited, "moecore/nn/routers/noisy_top_k.py")
    stale = set(edited.stale())
    assert {"pretrain@vmoe-0", "pretrain@tgr-0", "measure@cost-finetune-tgr-0"} <= stale
    assert not [stage for stage in stale if of_method(stage, "dense")]


def test_a_regularizer_reruns_the_methods_that_use_it(edited):
    edit(edited, "moecore/training/regularizers/router_kl.py")
    stale = set(edited.stale())
    assert {"teacher_router@tgr-0", "pretrain@tgr-0", "finetune@tgr-0", "compare"} <= stale
    assert not [stage for stage in stale if of_method(stage, "dense", "vmoe")]


@pytest.mark.parametrize(
    ("family", "part", "new"),
    [
        ("moecore/nn/routers", "hash", "Hash"),
        ("moecore/training/regularizers", "z_loss", "ZLoss"),
        ("moecore/data/sources", "digits", "Digits"),
        ("moecore/attacks", "fgsm", "Fgsm"),
    ],
)
def test_a_new_file_reruns_nothing(edited, family, part, new):
    folder = edited.folder / family
    text = (folder / f"{part}.py").read_text(encoding="utf-8")
    (folder / "another.py").write_text(text.replace(part, "another").replace(new, "Another"))
    union = folder / "__init__.py"
    line = f"from {family.replace('/', '.')}.another import Another\n"
    union.write_text(line + union.read_text(encoding="utf-8"), encoding="utf-8")
    assert edited.stale() == {}


def test_a_method_that_is_trained_again_is_attacked_again_by_all_others(edited):
    edited.edit("{kind: router_kl, weight: 5.0}", "{kind: router_kl, weight: 4.0}")
    stale = set(edited.stale())
    assert {"pretrain@tgr-0", "finetune@tgr-0", "transfer@finetune-0", "compare"} <= stale
    assert not [stage for stage in stale if of_method(stage, "dense", "vmoe")]


def test_a_new_method_trains_only_itself(edited):
    edited.edit("methods: [dense, vmoe, tgr]", "methods: [dense, vmoe, tgr, other]")
    stale = set(edited.stale())
    assert {"teacher_router@other-0", "pretrain@other-0", "transfer@finetune-0", "compare"} <= stale
    assert not [stage for stage in stale if of_method(stage, *METHODS)]


def test_a_new_seed_trains_only_itself(edited):
    edited.edit("seeds: [0]", "seeds: [0, 1]")
    stale = set(edited.stale())
    assert {f"pretrain@{method}-1" for method in METHODS} <= stale
    again = {stage for stage in stale if stage.endswith("-0")}
    assert again <= {"transfer@finetune-0"}, "it lists the folder of all seeds"


def test_the_hashes_of_all_that_decides_a_result_are_there(finished):
    folder = finished.folder / "artifacts/code"
    kinds = {path.parent.name for path in folder.rglob("*.json")}
    assert kinds == {"stages", "measure", "methods", "sections"}
    methods = {path.stem for path in Path(folder / "methods").iterdir()}
    assert methods == set(METHODS)


STAGES = (
    "prepare@finetune",
    "teacher@0",
    "teacher_router@tgr-0",
    "pretrain@tgr-0",
    "finetune@tgr-0",
    "calibrate@finetune-tgr-0",
    "robustness@finetune-tgr-0",
    "routing@finetune-tgr-0",
    "measure@invariance-finetune-tgr-0",
    "transfer@finetune-0",
    "compare",
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_needs_only_what_it_depends_on(finished, tmp_path, stage):
    entry = locked(finished.folder)[stage]
    for path in {"params.yaml", "dvc.yaml", *(entry["path"] for entry in entry["deps"])}:
        source, target = finished.folder / path, tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    alone = Project.at(tmp_path)
    words = entry["cmd"].removeprefix("python -m stages.").split()
    ran = forked.run(tmp_path, tuple(words), alone.environment)
    assert ran.returncode == 0, ran.stderr
    missing = [out["path"] for out in entry["outs"] if not (tmp_path / out["path"]).exists()]
    assert not missing
