"""The real pipeline by DVC: what runs, what is restored; killed at any moment, the same bits."""

import hashlib
import json
import random
import re
import shutil

import pytest

from moecore.core.files import read_json
from moecore.pipeline.parallel import spell_stage
from tests.data.making import photo_classes
from tests.project import PARAMS, Project

METHODS = ("dense", "vmoe", "tgr")
MEASUREMENTS = ("invariance", "lipschitz", "cost")
WHO = {"NAME": "t", "EMAIL": "t@example.org"}
GIT = {f"GIT_{who}_{what}": WHO[what] for who in ("AUTHOR", "COMMITTER") for what in WHO}


def test_everything_ran_once_and_then_nothing_runs(finished, shared):
    printed = (shared / "finished.done").read_text(encoding="utf-8")
    ran = re.findall(r"^\[(.*)\] started$", printed, re.MULTILINE)
    phases, after = ("pretrain", "finetune"), ("calibrate", "robustness", "routing")
    expected = {*"code prepare@pretrain prepare@finetune teacher@0".split()}
    expected |= {*"baselines@finetune transfer@finetune-0 compare numbers".split()}
    for method in METHODS:
        expected |= {f"{stage}@{method}-0" for stage in ("teacher_router", *phases)}
        expected |= {f"{stage}@finetune-{method}-0" for stage in after}
        expected |= {f"measure@{what}-finetune-{method}-0" for what in MEASUREMENTS}
    assert sorted(ran) == sorted(map(spell_stage, expected)) and finished.repro() == ["code"]


def test_a_new_teacher_trains_only_the_guided_method_again(copied):
    copied.edit("training: {epochs: 2,", "training: {epochs: 1,")
    ran = copied.repro(*(f"pretrain@{method}-0" for method in METHODS))
    assert {stage for stage in ran if stage.startswith("pretrain")} == {"pretrain@tgr-0"}
    stale = json.loads(copied.run(["dvc", "status", "--json"]).stdout)
    assert not {stage for stage in stale if "-vmoe-" in stage or "-dense-" in stage}


def test_edited_code_runs_what_the_plan_said(copied):
    file = copied.folder / "moecore/measure/lipschitz.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nEDITED = True\n", encoding="utf-8")
    copied.forked = False  # a server of the copy's own code is started
    planned = copied.stale()
    measured = {f"measure@lipschitz-finetune-{method}-0" for method in METHODS}
    last = {"compare", "numbers"}
    assert set(planned) == measured | last
    assert all("moecore/measure/lipschitz.py edited" in planned[stage] for stage in measured)
    done = copied.moecore("run", "--jobs", "2", "--verbose")
    ran = set(re.findall(r"Running stage '(.*)'", done.stdout))
    assert ran - {"code"} - last == measured, "compare found the same results"
    assert copied.stale() == {}


def test_an_experiment_reruns_what_it_changes_and_comes_back_from_the_cache(copied):
    copied.run(["git", "add", "-A"])
    copied.run(["git", "commit", "-qm", "first"], env=GIT)
    copied.edit("epsilons: [0.05]", "epsilons: [0.04]")
    planned = copied.moecore("plan").stdout
    assert "5 stages" in planned and "robustness modified" in planned
    stale = copied.stale()
    attacked = {f"robustness@finetune-{method}-0" for method in METHODS}
    assert set(stale) == attacked | {"compare", "numbers"}
    copied.run(["git", "checkout", "-q", "params.yaml"])
    done = copied.run(["dvc", "exp", "run", "-S", "robustness.epsilons=[0.1]"], env=GIT)
    assert set(re.findall(r"Running stage '(.*)'", done.stdout)) == set(stale) | {"code"}
    changed = json.loads(copied.run(["dvc", "metrics", "diff", "--json"]).stdout)
    runs = [f"reports/metrics/finetune/{method}-0.json" for method in METHODS]
    assert set(changed) <= set(runs) and runs[-1] in changed
    assert any("routing_change" in name for name in changed[runs[-1]])
    shown = json.loads(copied.run(["dvc", "metrics", "show", "--json"]).stdout)[""]["data"]
    assert sorted(shown) == sorted(runs), "one row a run"
    assert all(3 < len(row["data"]) <= 12 for row in shown.values())
    assert len({name for row in shown.values() for name in row["data"]}) <= 12
    drawn = copied.run(["dvc", "plots", "show"])
    page = (copied.folder / "dvc_plots/index.html").read_text(encoding="utf-8")
    assert not drawn.stderr and "finetune_training.svg" in page
    assert "http" not in page, "it opens without a network"
    assert "epsilons" in copied.run(["dvc", "params", "diff"]).stdout
    table = copied.run(["dvc", "exp", "show", "--csv"]).stdout
    assert "robustness.epsilons" in table and "test_accuracy" in table
    copied.run(["git", "checkout", "-q", "params.yaml"])
    assert copied.repro() == ["code", "numbers"], "put back, all else comes from the run cache"


def test_git_sees_the_lock_and_the_numbers_and_nothing_else_that_a_run_wrote(finished):
    tracked = {"dvc.yaml", ".dvcignore", ".gitignore", "params.yaml", ".dvc", "moecore", "stages"}
    tracked |= {"pipelines", "conformance"}
    listed = finished.run(["git", "status", "--porcelain", "--untracked-files=normal"]).stdout
    seen = {line[3:].split("/")[0] for line in listed.splitlines()}
    assert seen - tracked == {"dvc.lock", "reports"}
    reports = finished.run(["git", "status", "--porcelain", "--untracked-files=all", "reports"])
    written = {line[3:] for line in reports.stdout.splitlines()}
    assert written == {"reports/compare.json", "reports/items.safetensors"}


STAGES = {
    "teacher": (("teacher", "0"), "artifacts/teacher/0"),
    "pretrain": (("pretrain", "tgr", "0"), "artifacts/pretrain/tgr/0"),
    "finetune": (("finetune", "finetune", "tgr", "0"), "artifacts/finetune/tgr/0"),
}
TIMED = ("images_per_second", "seconds", "training_step_ms")


@pytest.fixture(scope="module")
def project(finished, tmp_path_factory):
    """All three training stages once, undisturbed, on the finished project's data."""
    project = finished.copy(tmp_path_factory.mktemp("kill") / "project")
    project.write(PARAMS.replace("epochs: 2,", "epochs: 5,"))  # long enough to be killed
    for words in ("teacher 0", "teacher_router tgr 0", "pretrain tgr 0", "finetune finetune tgr 0"):
        project.stage(*words.split())
    return project


def item_of(stage: str) -> str:
    """What names the stage's state, history and results."""
    return STAGES[stage][1].removeprefix("artifacts/")


def untimed(values: dict) -> dict:
    return {name: value for name, value in values.items() if name not in TIMED}


def outcome(project: Project, stage: str) -> tuple[str, dict, list]:
    """What must not depend on a kill: weights, results and logged points, all without times."""
    item = item_of(stage)
    results = read_json(project.folder / f"artifacts/measured/{item}.json")
    results["curve"] = [untimed(point) for point in results["curve"]]
    weights, points = weights_and_points(project, item)
    return weights, untimed(results), points


def weights_and_points(project: Project, item: str) -> tuple[str, list]:
    weights = (project.folder / "artifacts" / item / "model.safetensors").read_bytes()
    history = (project.folder / "artifacts/history" / item / "history.jsonl").read_text()
    lines = [line for line in map(json.loads, history.splitlines()) if "values" in line]
    points = [(line["step"], untimed(line["values"])) for line in lines]
    return hashlib.sha256(weights).hexdigest(), points


def logged(project: Project, stage: str) -> int:
    return last_step(project, item_of(stage))


def last_step(project: Project, item: str) -> int:
    """The same of a run that is named."""
    files = list((project.folder / ".state" / item).glob("*/history/history.jsonl"))
    steps = re.findall(r'"step": (\d+)', files[0].read_text()) if files else []
    return int(steps[-1]) if steps else 0


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_moments_it_ends_bit_equal(project, stage):
    undisturbed, words = outcome(project, stage), STAGES[stage][0]
    moments = sorted(random.Random(stage).sample(range(1, undisturbed[2][-1][0] - 10), 3))
    killed = [
        project.killed(*words, when=lambda moment=moment: logged(project, stage) >= moment)
        for moment in moments
    ]
    assert any(killed)
    project.stage(*words)
    assert outcome(project, stage) == undisturbed


def test_resumed_with_more_threads_it_goes_on_with_as_many_as_it_began_with(project):
    undisturbed, words = outcome(project, "pretrain"), STAGES["pretrain"][0]
    assert project.killed(*words, when=lambda: logged(project, "pretrain") >= 20)
    done = project.attempt_stage(*words, env={"MOECORE_THREADS": "3"})
    assert done.returncode == 0, done.stderr
    assert outcome(project, "pretrain") == undisturbed


def test_killed_while_a_checkpoint_is_written_it_ends_bit_equal(project):
    undisturbed = outcome(project, "pretrain")
    script = (
        "import os, signal, sys\n"
        "import moecore.core.safetensors_files as tensors_file\n"
        "whole, calls = tensors_file.save_file, []\n"
        "def torn(tensors, path, **rest):\n"
        "    calls.append(path)\n"
        "    whole(tensors, path, **rest)\n"
        "    if len(calls) == 2:\n"
        "        os.truncate(path, os.path.getsize(path) // 2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "tensors_file.save_file = torn\n"
        "from moecore.stages.pretrain import pretrain\n"
        "pretrain('tgr', 0)\n"
    )
    assert project.run_code(script).returncode == -9
    state = project.folder / ".state/pretrain/tgr/0"
    assert list(state.glob("*/checkpoint.safetensors")), "the first checkpoint is still there"
    project.stage("pretrain", "tgr", "0")
    assert outcome(project, "pretrain") == undisturbed


def test_nothing_of_the_run_stays_behind(project):
    for stage in STAGES:
        folders = (project.folder / ".state" / item_of(stage)).iterdir()
        assert not [one for one in folders if one.is_dir() and not one.name.isdigit()], stage


def test_a_training_on_jpeg_files_of_all_shapes_ends_bit_equal_too(tmp_path):
    photo_classes(tmp_path / "photos/train", {"n00000001": 60, "n00000002": 60})
    photo_classes(tmp_path / "photos/val", {"n00000001": 6, "n00000002": 6})
    kind = "kind: imagenet, root: photos, validation: 8, size: 32"
    params = PARAMS
    views = "views: {crop: {scale: [0.08, 1.0]}, flip: true}"
    for old, new in (
        ("{kind: digits, size: 16}", f"{{{kind}, short_side: 40}}"),
        ("{kind: digits, size: 24, seed: 1}", f"{{{kind}}}"),
        ("log_every: 5, checkpoint_every: 4}\nteacher_router", f"{views}}}\nteacher_router"),
        ("{epochs: 2, batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 4,\n", ""),
        (
            "  views: {shift: 1, flip: true}}",
            "  {epochs: 8, batch: 16, learning_rate: 0.001, log_every: 3, checkpoint_every: 3, "
            f"{views}}}",
        ),
    ):
        assert params.count(old) == 1
        params = params.replace(old, new)
    project = Project(tmp_path, params)
    trained = ("pretrain", "tgr", "0")
    for words in (("prepare", "pretrain"), ("teacher", "0"), ("teacher_router", "tgr", "0")):
        project.stage(*words)
    project.stage(*trained)
    item = "pretrain/tgr/0"
    undisturbed = weights_and_points(project, item)
    assert undisturbed[1][-1][0] == 8 * (112 // 16)
    shutil.rmtree(tmp_path / "artifacts/pretrain")
    for moment in (10, 31):
        assert project.killed(*trained, when=lambda m=moment: last_step(project, item) >= m)
    project.stage(*trained)
    assert weights_and_points(project, item) == undisturbed
    project.edit(f"checkpoint_every: 3, {views}", "checkpoint_every: 3, views: {flip: true}")
    done = project.moecore("check")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "params.yaml:" in done.stderr and "pretrain.views.crop: found null" in done.stderr


def test_other_params_do_not_continue_a_killed_run(project):
    words = STAGES["pretrain"][0]
    assert project.killed(*words, when=lambda: logged(project, "pretrain") >= 10)
    old = "pretrain:\n  {epochs: 5, batch: 64, learning_rate: 0.00"
    project.edit(f"{old}1", f"{old}2")
    project.stage(*words)
    with_other_rate = outcome(project, "pretrain")
    assert with_other_rate[2][0][1]["learning_rate"] > 0.0002
    project.stage(*words)
    assert outcome(project, "pretrain") == with_other_rate
