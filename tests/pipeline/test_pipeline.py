"""The real pipeline on a small configuration, by running DVC: what runs, what is restored."""

import json
import re

from moecore.pipeline.parallel import spell_stage

METHODS = ("dense", "vmoe", "tgr")
MEASUREMENTS = ("invariance", "lipschitz", "cost")
GIT = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "t"), ("EMAIL", "t@example.org"))
}


def test_everything_ran_once_and_then_nothing_runs(finished, shared):
    printed = (shared / "finished.done").read_text(encoding="utf-8")
    ran = re.findall(r"^\[(.*)\] started$", printed, re.MULTILINE)
    expected = {
        "code",
        "prepare@pretrain",
        "prepare@finetune",
        "teacher@0",
        *(f"teacher_router@{method}-0" for method in METHODS),
        *(f"{phase}@{method}-0" for phase in ("pretrain", "finetune") for method in METHODS),
        *(
            f"{stage}@finetune-{method}-0"
            for stage in ("calibrate", "robustness", "routing")
            for method in METHODS
        ),
        *(f"measure@{what}-finetune-{method}-0" for what in MEASUREMENTS for method in METHODS),
        "baselines@finetune",
        "transfer@finetune-0",
        "compare",
        "numbers",
    }
    assert sorted(ran) == sorted(map(spell_stage, expected))
    assert finished.repro() == ["code"]


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
    tracked.add("pipelines")
    listed = finished.run(["git", "status", "--porcelain", "--untracked-files=normal"]).stdout
    seen = {line[3:].split("/")[0] for line in listed.splitlines()}
    assert seen - tracked == {"dvc.lock", "reports"}
    reports = finished.run(["git", "status", "--porcelain", "--untracked-files=all", "reports"])
    assert {line[3:] for line in reports.stdout.splitlines()} == {
        "reports/compare.json",
        "reports/items.safetensors",
    }
