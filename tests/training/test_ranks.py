"""Ranks train what one process trains: every method, all meshes; killed and resumed."""

# ``python -m tests.training.test_ranks FILE`` builds the cases, forks four ranks, and writes how
# far two and four ranks are from one process: each first trains its share of the cases alone, on
# whole batches; then two pairs train half of the cases each, and all four train some together.

import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing import start_processes
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecore.backbones import SwinV2, Vit
from moecore.core import safetensors_files, source_layout, streams
from moecore.core.files import UserError
from moecore.core.ranks import MEETING_ENV, RankAndSize, join_ranks, leave_ranks
from moecore.study.yaml_document import load_yaml_document
from moecore.teachers import Adversarial, Mix, Training, ViewSettings
from moecore.training import distributed_training, loop, monitor, runtime
from moecore.training.job import TrainingJob
from moecore.training.loop import iterate_training
from moecore.training.method import Method
from tests import forked
from tests.data.making import balls
from tests.methods import REPRESENTATIVE
from tests.nn.backbones import test_two_towers
from tests.project import PARAMS, SHIPPED, Project
from tests.training import test_tissue_isolation
from tests.training.small import COMPETITION, CPU, IMAGE, made
from tests.training.small import SETTINGS as SMALL_SETTINGS

SHIPPED_ENTRIES = load_yaml_document(str(SHIPPED)).data["methods"]
MLPS = {"kind": "mlp", "number": 4}


def noisy(**settings) -> dict:
    return {"router": {"kind": "noisy_top_k"} | settings, "experts": MLPS}


def balanced(kind: str, **settings) -> dict:
    return {"balance": {"kind": kind} | settings}


LOSS_FREE = partial(balanced, "loss_free", rate=0.1)
ENTRIES = {
    **{name: SHIPPED_ENTRIES[name] for name in (*REPRESENTATIVE, "dense", "vmoe", "prc", "moge")},
    "capacity": noisy(k=2, capacity_factor=1.0, group_size=4)
    | {"regularizers": [{"kind": "load"}]},
    "bias": {
        "router": {
            "kind": "noisy_top_k",
            "score": "sigmoid",
            "start": "orthonormal",
            "input_jitter": 0.1,
            "groups": {"number": 2, "kept": 1},
            **LOSS_FREE(rule="proportional"),
        },
        "experts": MLPS | {"shared": 1},
        "regularizers": [
            {"kind": "simbal", "weight": 0.1},
            {"kind": "switch_balance", "level": "group", "group_size": 4},
        ],
    },
    "quantile": noisy(score="sigmoid", **balanced("quantile")),
    "plan": noisy(**balanced("sinkhorn", group_size=4)),
    "relu": {
        "router": {"kind": "relu", "k": 1, "l1_start": 0.1},
        "experts": MLPS | {"shared": 1},
        "regularizers": [{"kind": "adaptive_l1"}],
    },
    "dynamic": {
        "router": {"kind": "dynamic"},
        "experts": MLPS,
        "regularizers": [{"kind": "diversity_simplicity", "weight": 0.1}],
    },
    "competition": {"router": COMPETITION, "experts": MLPS},
    "merged": {"router": {"kind": "merged"}, "experts": MLPS},
    "zero_computation": {
        "router": {"kind": "noisy_top_k", "k": 1, "residual": True},
        "experts": {"kind": "mlp", "number": 2, "fine": 2, "zero_computation": {}},
        "regularizers": [{"kind": "zero_computation_balance", "weight": 0.1}],
    },
    "depth": {
        "router": {"kind": "depth", "share": 0.5, "sampling": "predictor"}
        | {"router": noisy(**LOSS_FREE())["router"]},
        "experts": MLPS,
    },
    "cosine": {
        "router": {"kind": "cosine", "noise_std": 1.0},
        "experts": MLPS,
        "regularizers": [{"kind": "switch_balance", "weight": 0.1, "level": "sequence"}],
    },
    "top_p": {
        "router": {"kind": "top_p", **LOSS_FREE(rule="recentred")},
        "experts": MLPS,
        "regularizers": [{"kind": "entropy", "weight": 0.1}],
    },
    "folded": {
        "router": {"kind": "folded", "router": {"kind": "noisy_top_k"}, "experts": 4},
        "experts": {"kind": "mlp", "number": 2, "shared": 1},
    },
    "whole_batch": noisy() | {"regularizers": [{"kind": "switch_balance", "weight": 0.1}]},
}
# means over words, of which ranks have unequally many, and a penalty per word
WORDS = {
    "router": {"kind": "depth", "share": 0.5, "sampling": "bce", "sampling_weight": 1.0},
    "experts": MLPS,
    "regularizers": [{"kind": kind} for kind in ("z_loss", "entropy", "group_sparsity")],
}
METHODS = {name: Method.model_validate(entry) for name, entry in ENTRIES.items()}
MOVED = ViewSettings(shift=1)
SETTINGS = Training(epochs=1, batch=16, learning_rate=1e-3, log_every=1, clip=None, views=MOVED)
MORE = {  # settings that draw, or compute, over the whole batch; all with V-MoE
    "mix": {"mix": Mix(mixup=0.4, cutmix=1.0)},
    "clip": {"clip": 0.05},
    "adversarial": {"adversarial": Adversarial(steps=2, form="strong"), "views": ViewSettings()},
    "sgd": {"optimizer": {"kind": "sgd"}, "weight_decay": 0.0},
}


CASES = [*(name for name in METHODS if name not in ("dense", "prc", "moge")), *MORE]
CASES += ["bases", "text", "drop_path", "regions", "isolated", "swin_v2", "towers", "sigmoid"]
LEARNED = ("balance.bias", "l1_weight")  # buffers that steps teach
FOUR = {"2": ["capacity", "clip", "bias"], "2e": ["ermoe"]}
TOGETHER = ("regions", "isolated", "text")  # five experts, and dropout in experts
# of two ranks
WITHOUT_SHARDS = ("mix", "adversarial", "sgd", "drop_path", "prc_moge", "sigmoid", "whole_batch")
WITHOUT_SHARDS += ("cosine", "top_p", "folded", "merged")  # the last needs all experts there
WITHOUT_SHARDS += ("quantile", "plan", "dynamic", "vmoe")  # with the layers of bias, relu and clip


def meshed_cases(size: int, mesh: str) -> list[str]:
    """The cases of so many ranks that train on a mesh: experts apart shard all else, too."""
    if size == 4:
        return FOUR[mesh]
    if mesh == "2":
        return [*FOUR[mesh], "relu", "bases", *TOGETHER]
    return [name for name in CASES if mesh == "1" or name not in (*TOGETHER, *WITHOUT_SHARDS)]


def cases():
    for name, method in METHODS.items():
        yield name, made(method), SETTINGS
    for name, changed in MORE.items():
        settings = Training.model_validate(SETTINGS.model_dump() | changed)
        yield name, made(METHODS["vmoe"]), settings
    entry = ENTRIES["ermoe"] | {"regularizers": [{"kind": "orthogonality", "weight": 0.1}]}
    job = made(Method.model_validate(entry))
    for name, parameter in job.model.named_parameters():
        if name.endswith("basis"):  # at an orthonormal one the penalty has no gradient
            parameter.data *= 1.2
    yield "bases", job, SETTINGS
    settings = test_tissue_isolation.TEXT_SETTINGS.model_copy(update={"epochs": 2, "updates": 3})
    yield "text", test_tissue_isolation.text(settings=settings), settings
    torch.manual_seed(0)
    dropping = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.4)
    model = dropping.build(IMAGE, METHODS["vmoe"].moe)
    yield "drop_path", made(METHODS["vmoe"])._replace(model=model), SETTINGS
    torch.manual_seed(0)  # layers of unlike grids and widths, windows that do not divide them
    swin = SwinV2(patch=1, width=16, depths=(2, 2), heads=(2, 4), window=3)
    model = swin.build(IMAGE, METHODS["prc"].moe)
    yield "swin_v2", made(METHODS["prc"])._replace(model=model), SETTINGS
    for name, text in (("towers", ENTRIES["vmoe"]), ("sigmoid", WORDS)):
        entry = ENTRIES["prc"] | {"text": text | {"blocks": [1]}}
        pairs = "sigmoid" if name == "sigmoid" else "softmax"  # of the whole batch, either way
        backbone = test_two_towers.SMALL.model_copy(update={"pairs": pairs})
        job = test_two_towers.captioned(Method.model_validate(entry), backbone)
        job.model.logit_scale.data.fill_(4.62)  # above its limit, to which the first step clips it
        yield name, job, SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        data = balls(Path(folder))
        settings = test_tissue_isolation.SETTINGS.model_copy(update={"log_every": 1})
        yield "regions", test_tissue_isolation.task(data), settings
        # Half of the volumes teach no age after the first epoch: unequally many of each rank's.
        changes = {"warm_start_epochs": 1, "isolated": 0.5}
        half = test_tissue_isolation.METHOD.regions.model_copy(update=changes)
        method = test_tissue_isolation.METHOD.model_copy(update={"regions": half})
        yield "isolated", test_tissue_isolation.task(data, method), settings


def told(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's values, but for the bias of keys."""
    # That adds the same to all scores of a query: Adam makes a step of its gradient's rounding.
    values = parameter.detach().double().flatten()
    if name.endswith("qkv.bias"):
        query, _, value = values.chunk(3)
        return torch.cat([query, value])
    return values


def computed(job: TrainingJob, settings: Training, epochs: int) -> dict:
    """The first gradient, all loss terms of the first step, and the weights after every epoch."""
    gradients = []

    def keep(optimizer, *_):
        if not gradients:
            every = [one for group in optimizer.param_groups for one in group["params"]]
            found = [one.grad for one in every if one.grad is not None]
            found = [distributed_training.to_full_tensor(one).flatten().double() for one in found]
            gradients.append(torch.cat(found))

    hook = register_optimizer_step_pre_hook(keep)
    points = []
    weights = []
    for metrics in iterate_training(
        job, settings, 0, CPU, monitor=monitor.MonitorSettings(every=1)
    ):
        layers = metrics.routing.items()
        counts = [(name, *pair) for name, layer in layers for pair in enumerate(layer.counts)]
        chosen = {f"{name}, expert {expert}": count for name, expert, count in counts}
        points.append(metrics.values | chosen)
        if metrics.epoch == len(weights) + 1:
            values = [told(*one) for one in job.learners.named_parameters()]
            biases = [one for one in job.learners.named_buffers() if one[0].endswith(LEARNED)]
            weights.append(torch.cat([*values, *(told(*one) for one in biases)]))
        if len(weights) == epochs:
            break
    hook.remove()
    other = ("images_per_second", "learning_rate", "memory_mb")
    values = {name: value for name, value in points[0].items() if name not in other}
    terms = {name: value for name, value in values.items() if not name.startswith("validation")}
    return {"gradient": gradients[0], "terms": terms, "weights": weights}


def main(target: str) -> None:
    start_processes(compare_rank, (list(cases()), target), nprocs=4, start_method="fork")


def compare_rank(rank: int, built: list, target: str) -> None:
    """What each of four ranks does. Each compares its share of the cases with one process."""
    # One mesh for all cases of a size: its groups of processes are slow to make.
    distributed_training.init_device_mesh = cache(distributed_training.init_device_mesh)
    pair = [case for case in built if case[0] in CASES][rank // 2 :: 2]
    alone = {
        name: computed(copy.deepcopy(job), settings, settings.epochs)
        for name, job, settings in pair[rank % 2 :: 2]
    }
    found: dict[str, dict] = {}

    def compare(size: int, mesh: str, trained: list) -> None:
        shard = int(mesh.removesuffix("e"))
        apart = shard if mesh.endswith("e") else 1
        for name, job, settings in trained:
            if name not in meshed_cases(size, mesh):
                continue
            settings = settings.model_copy(update={"shard": shard, "expert_parallel": apart})
            both = computed(copy.deepcopy(job), settings, settings.epochs if shard == 1 else 1)
            if name in alone:
                found[f"{name} {size // shard}×{mesh}"] = differences(both, alone[name])

    join(rank % 2, 2, f"{target}.pair{rank // 2}")
    for mesh in ("1", "2", "2e"):
        compare(2, mesh, pair)
    refused = refusals() if rank < 2 else {}
    compiled = {} if rank < 2 else compiled_apart()
    leave_ranks()
    join(rank, 4, f"{target}.four")
    for mesh in FOUR:
        compare(4, mesh, built)
    leave_ranks()
    parts = {"found": found, "refused": refused, "compiled": compiled}
    Path(f"{target}.{rank}").write_text(json.dumps(parts), encoding="utf-8")


def join(rank: int, size: int, meeting: str) -> None:
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= sizes | {"RANK": str(rank), MEETING_ENV: meeting}
    join_ranks()


def compiled_apart() -> dict[str, float]:
    """How far two ranks that compile their blocks are from two that do not, by method."""
    apart = {}
    loop.CompiledBlocks = partial(runtime.CompiledBlocks, backend="aot_eager")
    for name, shard in {"vmoe": 1, "ermoe": 2}.items():
        settings = SMALL_SETTINGS.model_copy(update={"shard": shard, "epochs": 1})
        weights = []
        for compile in ("off", "required"):
            job = made(METHODS[name])
            list(iterate_training(job, settings, 0, CPU._replace(compile=compile)))
            weights.append(torch.cat([each.flatten() for each in job.learners.parameters()]))
        apart[name] = float((weights[1] - weights[0]).abs().max())
    return apart


def differences(both: dict, one: dict) -> dict:
    last = len(both["weights"]) - 1
    return {
        "gradient": float((both["gradient"] - one["gradient"]).norm() / one["gradient"].norm()),
        "terms": {
            term: abs(both["terms"][term] - value) / max(1.0, abs(value))
            for term, value in one["terms"].items()
        },
        "weights": float((both["weights"][last] - one["weights"][last]).abs().max()),
    }


def refusals() -> dict[str, str]:
    found = {}
    wrong = {"batch": {"batch": 15}, "shard": {"shard": 3}, "group": {"batch": 10}}
    wrong |= {"apart": {"expert_parallel": 2}, "experts": {"shard": 3, "expert_parallel": 3}}
    for name, changes in wrong.items():
        settings = SETTINGS.model_copy(update=changes)
        try:
            next(iterate_training(made(METHODS["capacity"]), settings, 0, CPU))
        except UserError as error:
            found[name] = str(error)
    return found


BATCH = "  {epochs: 2, batch: 64,"  # of the section pretrain
STAGE = ["pretrain", "vmoe", "0"]
MODEL = "artifacts/pretrain/vmoe/0/model.safetensors"
HISTORY = "artifacts/history/pretrain/vmoe/0/history.jsonl"


def launched(words: list[str], folder: Path):
    command = [sys.executable, "-m", "moecore.run.local_ranks", "2", "-m", *words]
    environment = os.environ | {"PYTHONPATH": str(source_layout.ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[str, dict]:
    target = tmp_path_factory.mktemp("ranks") / "found"
    environment = os.environ | {"PYTHONPATH": str(source_layout.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.test_ranks", str(target)]
    subprocess.run(command, cwd=source_layout.ROOT, env=environment, check=True)
    together: dict[str, dict] = {"found": {}, "refused": {}, "compiled": {}}
    for rank in range(4):
        for key, part in json.loads(Path(f"{target}.{rank}").read_text(encoding="utf-8")).items():
            together[key] |= part
    return together


def close(found: dict) -> None:
    assert found["gradient"] < 1e-6
    assert all(away < 1e-6 for away in found["terms"].values()), found["terms"]
    assert found["weights"] < 1e-4, "after all steps"


MESHED = [(2, mesh, case) for mesh in ("1", "2", "2e") for case in meshed_cases(2, mesh)]
MESHED += [(4, mesh, case) for mesh in FOUR for case in FOUR[mesh]]


@pytest.mark.parametrize(("size", "mesh", "case"), MESHED)
def test_several_ranks_compute_what_one_computes(compared, size, mesh, case):
    close(compared["found"][f"{case} {size // int(mesh[0])}×{mesh}"])


def test_ranks_compile_learn_the_same_and_refuse_what_they_cannot_share(compared):
    assert len(compared["compiled"]) == 2 and max(compared["compiled"].values()) < 1e-4
    keys = {"batch": "batch is 15", "shard": "shard is 3", "group": "group_size is 4"}
    keys |= {"apart": "expert_parallel is 2", "experts": "expert_parallel is 3"}
    assert compared["refused"].keys() == keys.keys()
    for name, said in compared["refused"].items():
        assert said.startswith(keys[name]) and "allowed: " in said


def test_ranks_merge_no_experts_share_equal_rows_and_draw_as_the_whole_batch():
    apart = SETTINGS.model_copy(update={"shard": 2, "expert_parallel": 2})
    with pytest.raises(UserError, match="^expert_parallel is 2, and the router merges .*; allowed"):
        distributed_training.check_expert_parallel(made(METHODS["merged"]).model, apart)
    assert RankAndSize(0, 1).rows(5) is None
    assert [RankAndSize(rank, 3).rows(6).tolist() for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match="batch is 7, and 3 ranks share it"):
        RankAndSize(0, 3).rows(7)
    whole = streams.BatchDraws(streams.generator_for(1), 6)
    part = streams.BatchDraws(streams.generator_for(1), 6, torch.tensor([4, 1]))
    for one, other in (
        (whole.rand(3), part.rand(3)),
        (whole.integers(-2, 5), part.integers(-2, 5)),
        (whole.rand(dtype=torch.float64), part.rand(dtype=torch.float64)),
    ):
        assert torch.equal(one[[4, 1]], other)
    assert (whole.image_count, part.image_count) == (6, 2)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory) -> Project:
    """A project before the pretraining that two ranks share."""
    more = f"  {{precision: float32, shard: 1, expert_parallel: 1,{BATCH[3:]}"
    exact = PARAMS.replace(BATCH, more)
    found = Project(tmp_path_factory.mktemp("replicated"), exact)
    for stage in ("prepare pretrain", "teacher 0", "teacher_router vmoe 0"):
        found.stage(*stage.split())
    return found


def begun(*projects: Project) -> list[forked.Stage]:
    """Two ranks of the stage, each in its project's folder; of one project, both in its folder."""
    meeting = {"MOECORE_MEETING": f"{tempfile.mkdtemp()}/meeting", "WORLD_SIZE": "2"}
    stages = []
    for rank, project in enumerate(projects if len(projects) == 2 else projects * 2):
        project.hash_code()
        environment = project.environment | meeting | {"RANK": str(rank)}
        stages.append(forked.Stage(project.folder, STAGE, environment))
    return stages


def ended(stages: list[forked.Stage]) -> tuple[list[int], str]:
    codes, _, said = zip(*(stage.wait() for stage in stages), strict=True)
    assert "Traceback" not in "".join(said), said
    return list(codes), "".join(said)


def trained(project: Project) -> dict[str, torch.Tensor]:
    codes, said = ended(begun(project))
    assert codes == [0, 0], said
    return safetensors_files.read_tensors(project.folder / MODEL)[0]


def wait_for_checkpoint(project: Project, runs: Callable[[], bool]) -> None:
    folder = project.folder / ".state/pretrain/vmoe/0"
    kept = ("*/checkpoint.safetensors", "*/sharded.json")
    while not any(list(folder.glob(name)) for name in kept) and runs():
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.3))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_killed_rank_ends_all_and_resumed_they_end_with_the_same_bits(replicated, tmp_path):
    whole = trained(replicated)
    history = (replicated.folder / HISTORY).read_text(encoding="utf-8")
    assert history.count('"status": "FINISHED"') == 1
    process = launched([f"moecore.stages.{STAGE[0]}", *STAGE[1:]], replicated.folder)
    wait_for_checkpoint(replicated, lambda: process.poll() is None)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        for line in psutil.Process(int(child)).net_connections():
            assert line.status != "LISTEN" or line.laddr.ip == "127.0.0.1", line
    os.kill(int(random.choice(children)), signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode not in (0, 1, None) and "Traceback" not in said, said
    assert not any(Path(f"/proc/{child}").exists() for child in children), "all have ended"
    shutil.copytree(replicated.folder, tmp_path / "alone", symlinks=True)
    alone = Project.at(tmp_path / "alone")
    alone.stage(*STAGE)
    for name, value in safetensors_files.read_tensors(alone.folder / MODEL)[0].items():
        np.testing.assert_allclose(whole[name], value, atol=1e-4, err_msg=name)
    assert_same(trained(replicated), whole)


def test_sharded_ranks_end_with_the_same_bits_killed_and_on_a_full_disk(replicated, tmp_path):
    shutil.copytree(replicated.folder, tmp_path / "sharded", symlinks=True)
    for path in ("artifacts/pretrain", "artifacts/history/pretrain", ".state/pretrain"):
        shutil.rmtree(tmp_path / "sharded" / path, ignore_errors=True)
    sharded = Project.at(tmp_path / "sharded")
    sharded.edit("shard: 1, expert_parallel: 1,", "shard: 2, expert_parallel: 2,")
    whole = trained(sharded)
    ranks = begun(sharded)
    wait_for_checkpoint(sharded, ranks[0].runs)
    for rank in ranks:
        rank.kill()
    assert_a_full_disk_leaves_the_last_checkpoint(sharded)
    alone = sharded.attempt_stage(*STAGE)
    said = "pretrain vmoe 0: shard is 2, and there is one rank; allowed: 1, or more ranks"
    assert alone.returncode == 1 and alone.stderr.strip() == said
    assert_same(trained(sharded), whole)


def assert_a_full_disk_leaves_the_last_checkpoint(project: Project) -> None:
    """A limit on a file's size stands in for the full disk."""
    pointer = next(project.folder.glob(".state/pretrain/vmoe/0/*/sharded.json"))
    before = pointer.read_text(encoding="utf-8")
    ranks = begun(project)
    for rank in ranks:
        psutil.Process(rank.pid).rlimit(psutil.RLIMIT_FSIZE, (20_000, 20_000))
    codes, printed = ended(ranks)
    assert codes == [1, 1], printed
    (said,) = [line for line in printed.splitlines() if "could not be written" in line]
    assert "(rank 0: [Errno 27] File too large; rank 1: [Errno 27] File too large)" in said
    assert "what was there before is untouched. Free some space and start again" in said
    assert re.search(r"it takes \d+,\d+ bytes per rank; [\d,]+ are free; what was there", said)
    assert pointer.read_text(encoding="utf-8") == before
    kept = [json.loads(before)["folder"]]
    assert [path.name for path in pointer.parent.glob("sharded-*")] == kept, "no part of a new one"


def test_ranks_with_other_params_end_with_one_line(replicated, tmp_path):
    shutil.copytree(replicated.folder, tmp_path / "copy", symlinks=True)
    other = Project.at(tmp_path / "copy")
    text = (other.folder / "params.yaml").read_text(encoding="utf-8")
    other.write(text.replace("learning_rate: 0.001", "learning_rate: 0.003"))
    codes, said = ended(begun(replicated, other))
    assert codes == [1, 1]
    (line,) = said.strip().splitlines()
    assert line.startswith("pretrain vmoe 0: ranks: found params that differ between ranks; ")


if __name__ == "__main__":
    main(*sys.argv[1:])
