"""The real pipeline on a small configuration, by running DVC: what reruns, what is restored, what stays."""

import json
import sys

import pytest
import torch

from moecore.artifacts import load_model
from tests.project import Project

MEASURING = ("calibrate", "robustness", "routing", "invariance", "corruptions", "stability", "lipschitz", "cost")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("pipeline")).with_dvc()
    project.ran = project.repro()
    return project


@pytest.fixture
def unchanged(project):
    """Whatever a test edits is put back, and the pipeline with it (from DVC's run cache)."""
    files = {path: path.read_text() for path in (project.folder / "params.yaml", project.folder / "dvc.lock")}
    yield project
    for path, text in files.items():
        path.write_text(text)
    project.run(["dvc", "checkout", "-q", "--force"])


def heavy(stages: list[str]) -> set[str]:
    """Without the stages that hash code, which take a tenth of a second and whose unchanged result stops there."""
    return {stage for stage in stages if not stage.startswith("code")}


def test_everything_ran_once_and_then_nothing_runs(project):
    assert {stage.split("@")[0] for stage in project.ran} == {
        "code", "code_of_section", "code_of_stage", "prepare", "teacher", "teacher_router", "pretrain", "finetune", *MEASURING, "compare",
    }  # fmt: skip
    assert len(project.ran) == len(set(project.ran)) == 9 + 14 + 2 + 1 + 3 + 3 + 3 + 3 * len(MEASURING) + 1
    assert project.repro() == []


def test_a_methods_param_reruns_that_methods_stages_and_compare(unchanged):
    unchanged.edit("{kind: router_kl, weight: 5.0}", "{kind: router_kl, weight: 4.0}")
    ran = unchanged.repro()
    tgr = {"teacher_router@tgr", "pretrain@tgr-0", "finetune@tgr-0", *(f"{stage}@finetune-tgr-0" for stage in MEASURING)}
    assert heavy(ran) == tgr | {"compare"}
    assert {stage for stage in ran if stage.startswith("code")} == {"code@tgr"}


def test_epsilons_rerun_robustness_and_compare(unchanged):
    unchanged.edit("epsilons: [0.05]", "epsilons: [0.04]")
    assert set(unchanged.repro()) == {f"robustness@finetune-{method}-0" for method in ("dense", "vmoe", "tgr")} | {"compare"}
    unchanged.edit("epsilons: [0.04]", "epsilons: [0.05]")
    assert unchanged.repro() == [], "put back, all of it comes from the run cache"


def test_the_plan_says_what_would_run_and_why(unchanged):
    assert "Nothing would run" in unchanged.run([sys.executable, "-m", "moecore.plan"]).stdout
    unchanged.edit("epsilons: [0.05]", "epsilons: [0.03]")
    said = unchanged.run([sys.executable, "-m", "moecore.plan"]).stdout
    assert "4 stages" in said and "robustness modified" in said and "compare" in said and "pretrain@" not in said


def test_an_added_method_trains_only_itself(unchanged):
    unchanged.edit("methods: [dense, vmoe, tgr]", "methods: [dense, vmoe, tgr, other]")
    ran = unchanged.repro()
    other = {"teacher_router@other", "pretrain@other-0", "finetune@other-0", *(f"{stage}@finetune-other-0" for stage in MEASURING)}
    assert heavy(ran) == other | {"compare"}
    assert "other" in json.loads((unchanged.folder / "reports/compare.json").read_text())


def test_a_new_teacher_reruns_only_the_guided_method(unchanged):
    unchanged.edit("training: {epochs: 2,", "training: {epochs: 1,")
    ran = heavy(unchanged.repro())
    assert {stage for stage in ran if stage.startswith("pretrain")} == {"pretrain@tgr-0"}
    assert not {stage for stage in ran if "-vmoe-" in stage or "-dense-" in stage}


def test_an_added_regularizer_leaves_finished_runs_up_to_date(unchanged):
    family = unchanged.folder / "moecore/regularizers"
    union = (family / "__init__.py").read_text()
    (family / "sharpness.py").write_text((family / "z_loss.py").read_text().replace("z_loss", "sharpness").replace("ZLoss", "Sharpness"))
    (family / "__init__.py").write_text(union.replace("from moecore.regularizers.z_loss", "from moecore.regularizers.sharpness import Sharpness\nfrom moecore.regularizers.z_loss").replace(" | ZLoss", " | ZLoss | Sharpness"))
    try:
        assert heavy(unchanged.repro()) == set()
    finally:
        (family / "sharpness.py").unlink()
        (family / "__init__.py").write_text(union)


def test_an_edited_part_reruns_exactly_the_methods_that_use_it(unchanged):
    part = unchanged.folder / "moecore/regularizers/router_kl.py"
    text = part.read_text()
    part.write_text(text + "\n# edited\n")
    try:
        planned = unchanged.run([sys.executable, "-m", "moecore.plan"]).stdout
        assert "12 stages" in planned and "that hash code" in planned and "pretrain@tgr-0" in planned and "pretrain@vmoe-0" not in planned
        trained = {stage for stage in heavy(unchanged.repro()) if stage.startswith(("pretrain", "teacher_router"))}
        assert trained == {"teacher_router@tgr", "pretrain@tgr-0"}
    finally:
        part.write_text(text)


def test_metrics_diff_plots_and_experiments_work(unchanged):
    unchanged.run(["git", "add", "-A"])
    unchanged.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "first"])
    experiment = ["dvc", "exp", "run", "-S", "robustness.epsilons=[0.1]"]
    unchanged.run(experiment, env={"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@example.org", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@example.org"})
    changed = json.loads(unchanged.run(["dvc", "metrics", "diff", "--json"]).stdout)
    assert any("routing_change" in name for name in changed["reports/compare.json"])
    assert "Loading" not in unchanged.run(["dvc", "plots", "show"]).stderr
    page = (unchanged.folder / "dvc_plots/index.html").read_text()
    assert "validation_accuracy" in page
    unchanged.run(["git", "checkout", "-q", "--", "."])


def test_the_trained_model_loads_from_its_folder(project):
    model = load_model(project.folder / "artifacts/finetune/tgr/0")
    prediction, routing, _ = model(torch.rand(2, 1, 24, 24))
    assert prediction.shape == (2, 10) and len(routing) == 2 and routing[0].probs.shape == (2, 10, 4)


def test_the_report_is_one_file_with_every_method(project):
    page = (project.folder / "reports/index.html").read_text()
    assert all(f">{method}<" in page for method in ("dense", "vmoe", "tgr"))
    assert "src=\"http" not in page and "href=\"http" not in page


