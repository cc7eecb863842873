"""kill -9 at any moment of a training stage: started again, it ends with the same bits as an undisturbed run."""

import hashlib
import json
import random
import re
import sys
from pathlib import Path

import pytest

from tests.project import PARAMS, Project

STAGES = {
    "teacher": (("teacher",), "artifacts/teacher"),
    "pretrain": (("pretrain", "tgr", "0"), "artifacts/pretrain/tgr/0"),
    "finetune": (("finetune", "tgr", "0"), "artifacts/finetune/tgr/0"),
}
TIMED = ("images_per_second", "seconds")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """All three training stages once, undisturbed."""
    project = Project(tmp_path_factory.mktemp("kill"), PARAMS.replace("epochs: 2,", "epochs: 8,"))  # long enough to be killed
    for words in (["prepare", "pretrain"], ["prepare", "finetune"], ["teacher"], ["teacher_router", "tgr"], ["pretrain", "tgr", "0"], ["finetune", "tgr", "0"]):
        project.stage(*words)
    return project


def outcome(project: Project, stage: str) -> tuple[str, dict, list]:
    """What must not depend on a kill: the weights' hash, the results, and the logged points, all without times."""
    words, target = STAGES[stage]
    weights = hashlib.sha256((project.folder / target / "model.safetensors").read_bytes()).hexdigest()
    results = json.loads((project.folder / "results" / ("/".join(words) + ".json")).read_text())
    history = (project.folder / "artifacts/history" / "/".join(words) / "history.jsonl").read_text()
    points = [(line["step"], {name: value for name, value in line["values"].items() if name not in TIMED}) for line in map(json.loads, history.splitlines()) if "values" in line]
    return weights, {name: value for name, value in results.items() if name not in TIMED}, points


def logged(project: Project, stage: str) -> int:
    """The last step in the history of the run under way; 0 before the first."""
    files = list((project.folder / ".state" / "/".join(STAGES[stage][0])).glob("*/history/history.jsonl"))
    steps = re.findall(r'"step": (\d+)', files[0].read_text()) if files else []
    return int(steps[-1]) if steps else 0


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_moments_it_ends_bit_equal(project, stage):
    undisturbed, words = outcome(project, stage), STAGES[stage][0]
    last = undisturbed[2][-1][0]
    moments = sorted(random.Random(stage).sample(range(1, last - 10), 3))
    killed = [project.killed(*words, when=lambda moment=moment: logged(project, stage) >= moment) for moment in moments]
    assert any(killed)
    project.stage(*words)
    assert outcome(project, stage) == undisturbed


def test_killed_while_a_checkpoint_is_written_it_ends_bit_equal(project):
    undisturbed = outcome(project, "pretrain")
    script = (
        "import os, signal, sys\n"
        "import moecore.tensors as tensors_file\n"
        "whole, calls = tensors_file.save_file, []\n"
        "def torn(tensors, path, **rest):\n"
        "    calls.append(path)\n"
        "    whole(tensors, path, **rest)\n"
        "    if len(calls) == 2:\n"
        "        os.truncate(path, os.path.getsize(path) // 2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "tensors_file.save_file = torn\n"
        "from stages.pretrain import pretrain\n"
        "pretrain('tgr', 0)\n"
    )
    assert project.attempt([sys.executable, "-c", script]).returncode == -9
    assert list(Path(project.folder / ".state/pretrain/tgr/0").glob("*/checkpoint.safetensors")), "the first checkpoint is still there"
    project.stage("pretrain", "tgr", "0")
    assert outcome(project, "pretrain") == undisturbed


def test_nothing_of_the_run_stays_behind(project):
    for stage, (words, _) in STAGES.items():
        assert not [path for path in (project.folder / ".state" / "/".join(words)).iterdir() if path.is_dir() and not path.name.isdigit()], stage


def test_other_params_do_not_continue_a_killed_run(project):
    words = STAGES["pretrain"][0]
    assert project.killed(*words, when=lambda: logged(project, "pretrain") >= 10)
    project.edit("learning_rate: 0.001, log_every: 5, checkpoint_every: 5, views", "learning_rate: 0.002, log_every: 5, checkpoint_every: 5, views")
    project.stage(*words)
    with_other_rate = outcome(project, "pretrain")
    assert with_other_rate[2][0][1]["learning_rate"] > 0.0002
    project.stage(*words)
    assert outcome(project, "pretrain") == with_other_rate
