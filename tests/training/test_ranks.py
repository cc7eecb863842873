"""Two ranks train what one process trains: every method, both meshes; killed and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.core.ranks import Ranks
from moecore.core.sources import ROOT
from moecore.core.streams import Draws, generator_for
from moecore.core.tensors import read_tensors
from tests.project import PARAMS, Project
from tests.training.ranks_worker import METHODS, MORE

CASES = [*METHODS, *MORE, "drop_path", "regions"]
MODEL = "artifacts/pretrain/vmoe/0/model.safetensors"
HISTORY = "artifacts/history/pretrain/vmoe/0/history.jsonl"


def launched(words: list[str], folder: Path, env: dict[str, str] | None = None):
    """``local_ranks`` with two ranks, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "moecore.run.local_ranks", "2", "-m", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    target = tmp_path_factory.mktemp("ranks") / "found.json"
    process = launched(["tests.training.ranks_worker", str(target), "1,2"], ROOT)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return json.loads(target.read_text())


@pytest.mark.parametrize("mesh", ["2×1", "1×2"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_computes(compared, case, mesh):
    found = compared["found"][f"{case} {mesh}"]
    assert found["gradient"] < 1e-6
    assert all(away < 1e-6 for away in found["terms"].values()), found["terms"]
    assert found["weights"] < 1e-4, "after all steps"


def test_what_ranks_cannot_share_is_refused(compared):
    assert compared["refused"] == {
        "batch": "batch is 15, and 2 ranks share it; allowed: a multiple of 2, so that all ranks "
        "have as many images",
        "shard": "shard is 3, and there are 2 ranks; allowed: 1, 2",
        "group": "group_size is 4, and each of 2 ranks has 5 images; allowed: a divisor of "
        "these, or a batch that 4 divides",
    }


def test_rows_are_equal_parts():
    assert Ranks(0, 1).rows(5) is None
    assert [Ranks(rank, 3).rows(6).tolist() for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match="batch is 7, and 3 ranks share it"):
        Ranks(0, 3).rows(7)


def test_the_draws_of_some_images_are_those_of_the_whole_batch():
    whole = Draws(generator_for(1), 6)
    part = Draws(generator_for(1), 6, torch.tensor([4, 1]))
    for one, other in (
        (whole.rand(3), part.rand(3)),
        (whole.integers(-2, 5), part.integers(-2, 5)),
        (whole.rand(dtype=torch.float64), part.rand(dtype=torch.float64)),
    ):
        assert torch.equal(one[[4, 1]], other)
    assert (whole.images, part.images) == (6, 2)


@pytest.fixture(scope="module", params=[1, 2], ids=["replicated", "sharded"])
def project(request, tmp_path_factory):
    exact = PARAMS.replace(
        "  {epochs: 2, batch: 64,",
        f"  {{precision: float32, shard: {request.param}, epochs: 2, batch: 64,",
    )
    found = Project(tmp_path_factory.mktemp("project"), exact)
    found.stage("prepare", "pretrain")
    found.stage("teacher", "0")
    found.stage("teacher_router", "vmoe", "0")
    return found


def trained(project: Project, *more: str) -> dict[str, torch.Tensor]:
    """The weights after the stage has run to its end on two ranks."""
    process = launched(["stages.pretrain", "vmoe", "0", *more], project.folder)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return read_tensors(project.folder / MODEL)[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def killed(project: Project, everyone: bool, wait: float) -> None:
    """Start two ranks, let them make a checkpoint and go on for a while, and SIGKILL one or all."""
    process = launched(["stages.pretrain", "vmoe", "0"], project.folder)
    begun = project.folder / ".state/pretrain/vmoe/0"
    kept = ("*/checkpoint.safetensors", "*/sharded.json")
    while not any(list(begun.glob(name)) for name in kept) and process.poll() is None:
        time.sleep(0.002)
    time.sleep(wait)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children if everyone else children[-1:]:
        os.kill(int(child), signal.SIGKILL)
    process.communicate()
    assert process.returncode not in (0, None)
    assert not any(Path(f"/proc/{child}").exists() for child in children), "all have ended"


def test_killed_and_resumed_it_ends_with_the_same_bits(project):
    whole = trained(project)
    history = (project.folder / HISTORY).read_text()
    assert history.count('"status": "FINISHED"') == 1
    random.seed(0)
    for everyone in (False, True):
        killed(project, everyone, random.uniform(0, 0.3))
        assert same(trained(project), whole)
    killed(project, True, 0.1)
    if "shard: 2" in (project.folder / "params.yaml").read_text():
        done = project.attempt_stage("pretrain", "vmoe", "0")
        assert done.returncode == 1
        assert done.stderr.strip() == (
            "pretrain vmoe 0: shard is 2, and there is one rank; allowed: 1, or more ranks"
        )
        return
    project.stage("pretrain", "vmoe", "0")
    found = read_tensors(project.folder / MODEL)[0]
    for name, value in whole.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)


def test_ranks_with_other_params_end_with_one_line(project):
    words = [sys.executable, "-m", "stages.pretrain", "vmoe", "0"]
    other = project.folder / "other.yaml"
    text = (project.folder / "params.yaml").read_text(encoding="utf-8")
    other.write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.003"), encoding="utf-8")
    shared = {"WORLD_SIZE": "2", "MOECORE_MEETING": str(project.folder / "meeting")}
    ranks = [
        subprocess.Popen(
            words,
            cwd=project.folder,
            env=os.environ
            | shared
            | {"RANK": str(rank), "PYTHONPATH": str(ROOT), "MOECORE_PARAMS": params},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, params in enumerate(("params.yaml", "other.yaml"))
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    lines = "".join(said).strip().splitlines()
    assert lines == [
        "pretrain vmoe 0: ranks: found params that differ between ranks; start all of them in one "
        "folder, or in copies of the same state"
    ]


def test_a_stage_that_does_not_train_is_one_process(project):
    process = launched(["stages.prepare", "pretrain"], project.folder)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert said.strip() == (
        "prepare pretrain: found 2 ranks; allowed of this stage: 1 (teacher, pretrain, finetune "
        "and adversarial, which train, may be shared)"
    )
