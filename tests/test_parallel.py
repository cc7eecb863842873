"""Several stages at a time: what a free process takes, and the real thing through DVC."""

import json
import sys

import pytest

from moecore.parallel import Job, next_job, run
from tests.project import Project

ABOVE = {
    "code@vmoe": set(), "code@prc": set(), "prepare@pretrain": set(), "teacher": {"prepare@pretrain"},
    "pretrain@vmoe-0": {"code@vmoe", "teacher"}, "pretrain@prc-0": {"code@prc", "teacher"},
    "finetune@vmoe-0": {"pretrain@vmoe-0"},
    "calibrate@pretrain-vmoe-0": {"pretrain@vmoe-0"}, "routing@pretrain-vmoe-0": {"pretrain@vmoe-0"},
    "routing@finetune-vmoe-0": {"finetune@vmoe-0"}, "routing@pretrain-prc-0": {"pretrain@prc-0"},
    "compare": {"routing@finetune-vmoe-0", "routing@pretrain-vmoe-0", "calibrate@pretrain-vmoe-0", "routing@pretrain-prc-0"},
}  # fmt: skip


def test_the_quick_ones_go_together_and_what_waits_waits():
    assert next_job(ABOVE, set(), set()) == Job(("code@vmoe", "code@prc"))
    taken = {"code@vmoe", "code@prc"}
    assert next_job(ABOVE, set(), taken) is None, "the data get all cores, once the others are done"
    assert next_job(ABOVE, taken, taken) == Job(("prepare@pretrain",))
    assert next_job(ABOVE, taken, taken | {"prepare@pretrain"}) is None


def test_trainings_come_first_and_a_models_measurements_go_together():
    done = {"code@vmoe", "code@prc", "prepare@pretrain", "teacher"}
    first = next_job(ABOVE, done, done)
    assert first == Job(("pretrain@vmoe-0", "finetune@vmoe-0"))
    second = next_job(ABOVE, done, done | set(first.stages))
    assert second == Job(("pretrain@prc-0",))
    assert next_job(ABOVE, done, done | {*first.stages, *second.stages}) is None
    done |= set(first.stages)
    third = next_job(ABOVE, done, done | set(second.stages))
    assert third == Job(("calibrate@pretrain-vmoe-0", "routing@pretrain-vmoe-0"))
    fourth = next_job(ABOVE, done, done | {*second.stages, *third.stages})
    assert fourth == Job(("routing@finetune-vmoe-0",))
    everything = done | {"routing@pretrain-prc-0", *second.stages, *third.stages, *fourth.stages}
    assert next_job(ABOVE, everything, everything) == Job(("compare",))


def test_seeds_of_a_method_are_apart():
    above = {f"{stage}@vmoe-{seed}": ({f"pretrain@vmoe-{seed}"} if stage == "finetune" else set()) for stage in ("pretrain", "finetune") for seed in (0, 1)}
    assert next_job(above, set(), set()) == Job(("pretrain@vmoe-0", "finetune@vmoe-0"))


def test_all_cores_are_for_what_runs_alone(monkeypatch):
    given = {}

    def fake(job, environment, started):
        given.update(dict.fromkeys(job.stages, environment))
        return 0

    monkeypatch.setattr("moecore.parallel.run_job", fake)
    assert run(ABOVE | {"cost@finetune-vmoe-0": {"finetune@vmoe-0"}}, [{"MOECORE_THREADS": "1"}, {"MOECORE_THREADS": "1"}]) == []
    assert {stage for stage, environment in given.items() if not environment} == {"prepare@pretrain", "teacher", "cost@finetune-vmoe-0"}
    assert given.keys() == {*ABOVE, "cost@finetune-vmoe-0"}


def test_what_is_timed_runs_alone_and_last():
    above = {"pretrain@a-0": set(), "cost@pretrain-a-0": {"pretrain@a-0"}, "pretrain@b-0": set(), "cost@pretrain-b-0": {"pretrain@b-0"}, "routing@pretrain-b-0": {"pretrain@b-0"}}
    assert next_job(above, set(), set()) == Job(("pretrain@a-0",))
    done = {"pretrain@a-0"}
    assert next_job(above, done, done) == Job(("pretrain@b-0",))
    both = {"pretrain@a-0", "pretrain@b-0"}
    assert next_job(above, both, both) == Job(("routing@pretrain-b-0",))
    taken = both | {"routing@pretrain-b-0"}
    assert next_job(above, both, taken) is None, "something else runs"
    assert next_job(above, taken, taken) == Job(("cost@pretrain-a-0", "cost@pretrain-b-0"))


def test_nothing_starts_after_a_failure(monkeypatch):
    ran = []

    def fake(job, environment, started):
        ran.append((job.stages, dict(environment)))
        return int(job.stages[0] == "teacher")

    monkeypatch.setattr("moecore.parallel.run_job", fake)
    left = run(ABOVE, [{"PLACE": "only"}])
    assert [stages for stages, _ in ran] == [("code@vmoe", "code@prc"), ("prepare@pretrain",), ("teacher",)]
    assert left == [stage for stage in ABOVE if stage not in ("code@vmoe", "code@prc", "prepare@pretrain")]
    assert [environment for _, environment in ran] == [{"PLACE": "only"}, {}, {}], "the data and the teacher get all cores"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("parallel")).with_dvc()


def test_two_at_a_time_finish_the_pipeline_as_dvc_repro_would(project):
    done = project.run([sys.executable, "-m", "moecore.parallel", "--jobs", "2"])
    assert project.run(["dvc", "status"]).stdout.strip() == "Data and pipelines are up to date."
    assert project.repro() == []
    assert done.stdout.count("Running stage 'pretrain@") == 3 and (project.folder / "reports/index.html").stat().st_size > 10000
    again = project.run([sys.executable, "-m", "moecore.parallel", "--jobs", "2"])
    assert "everything is up to date" in again.stdout and "Running" not in again.stdout


def test_a_failure_is_shown_and_the_rest_goes_on_later(project):
    project.edit("shots: 20", "shots: 5000")
    failed = project.attempt([sys.executable, "-m", "moecore.parallel", "--jobs", "2"])
    assert failed.returncode == 1 and "stages are not done: finetune@dense-0" in failed.stderr and "Traceback" not in failed.stderr
    assert "5000 images per class asked for" in failed.stdout
    project.edit("shots: 5000", "shots: 21")
    project.run([sys.executable, "-m", "moecore.parallel", "--jobs", "2"])
    assert project.run(["dvc", "status"]).stdout.strip() == "Data and pipelines are up to date."
    assert json.loads((project.folder / "results/finetune/tgr/0.json").read_text())["test_count"] > 0
