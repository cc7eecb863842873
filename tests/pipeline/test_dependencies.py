"""A stage needs nothing that dvc.yaml does not name: each runs where only its dependencies are."""

import shutil

import pytest

from moecore.run.lock_file import locked
from tests import forked
from tests.project import Project

STAGES = (
    "prepare@finetune",
    "teacher",
    "teacher_router@tgr",
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
