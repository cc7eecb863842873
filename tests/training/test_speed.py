"""Blocks that are compiled learn the same; a trace of a training names the parts of its steps."""

import copy
import gzip
import json
import sys
from contextlib import nullcontext

import pytest
import torch

from moecore import UserError, predict_in_batches
from moecore.nn.kernels import grouped
from moecore.nn.kernels.grouped import ChosenKernels
from moecore.nn.layers.block import Block
from moecore.nn.layers.moe import MoEFeedForward, print_once
from moecore.training import method, runtime, settings
from moecore.training.job import TrainingJob
from moecore.training.loop import iterate_training, train_step
from moecore.training.runtime import COMPILE_ENV, MIN_COMPILED_STEPS, TRACE_ENV, CompiledBlocks
from tests.methods import METHODS, REPRESENTATIVE, tiny
from tests.training.small import CPU, SETTINGS, VMOE, made, step_batch, task

TOP_K = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 0.7}
ROUTERS = {"capacity by gates": {**TOP_K, "batch_priority": True, "group_size": 3}}
ROUTERS |= {"groups": {"kind": "expert_choice", "capacity_factor": 1.1, "group_size": 3}}
ROUTERS |= {"softmax over the chosen": {"kind": "top_k_softmax"}}
ROUTERS |= {"positions": {"kind": "hash", "k": 2, "by": "position"}, "merged": {"kind": "merged"}}
WHOLE = [name for name in REPRESENTATIVE if name != "expert_choice"]  # "groups" is it, and more
CASES = {name: METHODS[name] for name in WHOLE} | {  # each has dense blocks too
    name: method.Method(router=router, experts={"kind": "mlp", "number": 4})
    for name, router in ROUTERS.items()
}


def compiled(job: TrainingJob, how="required", steps=MIN_COMPILED_STEPS, backend="eager"):
    """The job's blocks after a first step, which is not compiled."""
    torch.compiler.reset()
    blocks = CompiledBlocks([job.model, job.guide], how, steps, backend)
    learned(job, blocks, 0)
    return blocks


def counted(backend: str):
    from torch._dynamo.testing import CompileCounterWithBackend  # its import takes a second

    return CompileCounterWithBackend(backend)


def learned(job: TrainingJob, blocks: CompiledBlocks | None, step: int, dtype=torch.float32):
    """The loss terms and all gradients of a step, whose rate is 0."""
    optimizer = settings.build_optimizer(job.model, SETTINGS, job.learned_teacher_routers)
    batch = step_batch(job, SETTINGS, 0, step)
    torch.manual_seed(step)
    with blocks.using_compiled_blocks() if blocks else nullcontext():
        terms, *_ = train_step(job, SETTINGS, optimizer, batch, 0.0, dtype, step / 4)
    named = job.learners.named_parameters()
    gradients = {name: one.grad for name, one in named if one.grad is not None}
    return terms | gradients


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_block_is_one_graph_and_learns_the_same(name):
    job = made(CASES[name])
    graphs = counted("aot_eager")
    blocks = compiled(job, backend=graphs)
    assert graphs.frame_count == 0
    counts = []
    for step in range(4):
        plain = learned(job, None, step)
        ours = learned(job, blocks, step)
        assert set(ours) == set(plain)
        for key, expected in plain.items():
            assert (ours[key] - expected).norm() <= 1e-6 * max(1, expected.norm()), key
        counts.append(graphs.frame_count)
    # The dense block, the one with experts and the teacher's; stable_moe's once more when frozen.
    kinds = 1 + (job.model.moe is not None) + (job.guide is not None)
    later = kinds + (name == "stable_moe")
    assert counts == [kinds, kinds, later, later]


def test_a_graph_in_bf16_has_grouped_products(monkeypatch):
    monkeypatch.setattr(grouped, "_MAX_LOOPED_ROWS", -1)  # without a graph too
    job = made(VMOE)
    plain = learned(job, None, 0, torch.bfloat16)
    ours = learned(job, compiled(job, backend="aot_eager"), 0, torch.bfloat16)
    for key, expected in plain.items():
        assert (ours[key] - expected).norm() <= 0.02 * max(0.1, expected.norm()), key


def test_only_a_step_is_compiled_and_names_stay():
    job = made(VMOE)
    graphs = counted("eager")
    names = list(job.model.state_dict())
    blocks = compiled(job, backend=graphs)
    with blocks.using_compiled_blocks():
        assert list(job.model.state_dict()) == names
        assert all("forward" in vars(block) for block in blocks.blocks)
    predict_in_batches(copy.deepcopy(job.model), job.validation.images, batch=8)
    predict_in_batches(job.model, job.validation.images, batch=8)
    assert graphs.frame_count == 0 and list(job.model.state_dict()) == names
    assert not any("forward" in vars(block) for block in blocks.blocks)


def test_blocks_whose_experts_lie_on_several_ranks_stay_as_they_are():
    job = made(VMOE)
    sparse = [block for block in job.model.blocks if isinstance(block.mlp, MoEFeedForward)]
    sparse[0].mlp.sharded_experts = torch.nn.Identity()
    blocks = CompiledBlocks([job.model, None], "required", 9, "eager").blocks
    assert blocks == [block for block in job.model.blocks if block is not sparse[0]]


class Waits(Block):
    """A part of a user's own that asks for a number."""

    def forward(self, tokens, *rest):
        return super().forward(tokens * (1 if float(tokens.detach().sum()) > 0 else 1), *rest)


def test_what_cannot_be_compiled_ends_the_training_or_goes_on_without(capsys):
    job = made(VMOE)
    job.model.blocks[0].__class__ = Waits
    plain = learned(job, None, 1)
    with pytest.raises(
        UserError, match=f"^{COMPILE_ENV}: a block cannot be compiled: .*; allowed: f"
    ):
        learned(job, compiled(job), 1)
    assert "forward" not in vars(job.model.blocks[0])
    ours = learned(job, compiled(job, "tried"), 1)
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    assert capsys.readouterr().err.count("training goes on without") == 1
    assert not compiled(job, "tried", MIN_COMPILED_STEPS - 1).blocks  # too short to be won back
    assert not compiled(job, "off").blocks


def test_the_environment_decides(monkeypatch):
    monkeypatch.delenv(COMPILE_ENV, raising=False)
    assert (runtime.compile_policy("cuda"), runtime.compile_policy("cpu")) == ("tried", "off")
    monkeypatch.setenv(COMPILE_ENV, "true")
    assert runtime.compile_policy("cpu") == "required"
    monkeypatch.setenv(COMPILE_ENV, "1")
    with pytest.raises(UserError, match="found '1'; allowed: auto, true, false"):
        runtime.compile_policy("cpu")


def test_kernels_are_chosen_once_and_what_is_missing_is_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for policy in ("", "auto", "torch"):  # auto: until a card has shown what Triton gains
        monkeypatch.setenv(runtime.KERNELS_ENV, policy)
        assert runtime.choose_and_set_kernels("cuda") == "torch" and ChosenKernels.compute is None
    assert CPU.kernels == "torch"  # a field that each run records
    refusals = {"fast": "'fast'; allowed: auto, triton, torch", "triton": "'triton' on cpu; al"}
    for policy, refusal in refusals.items():
        monkeypatch.setenv(runtime.KERNELS_ENV, policy)
        with pytest.raises(UserError, match=f"^{runtime.KERNELS_ENV}: found {refusal}"):
            runtime.tune_runtime("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UserError, match="found 'triton' on T4; allowed: auto, torch, or"):
        runtime.choose_and_set_kernels("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "moecore.nn.kernels.triton_experts", raising=False)
    with pytest.raises(UserError, match="^MOECORE_KERNELS: found 'triton', but [^\n]*allowed: a"):
        runtime.choose_and_set_kernels("cuda")


LACKING = {
    "ermoe": "EigenExperts by BasisProjectionPlan",
    "soft_moe": "MlpExperts by SlotsPlan",
    "expert_choice": "MlpExperts by ExpertChoicePlan",
}


@pytest.mark.parametrize("name", LACKING)
def test_layers_that_triton_lacks_are_named_once_and_run_as_without(name, monkeypatch, capsys):
    model, images = tiny(name), torch.rand(2, 1, 8, 8)
    expected = model(images).prediction
    monkeypatch.setattr(ChosenKernels, "compute", pytest.fail)
    monkeypatch.setattr(ChosenKernels, "device", "cpu")
    print_once.cache_clear()
    assert torch.equal(model(images).prediction, expected)
    told = capsys.readouterr().err
    assert f"torch computes {LACKING[name]}" in told and told.count("\n") == 1


def test_a_training_is_traced_by_the_parts_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.setenv(TRACE_ENV, str(tmp_path / "traces"))
    file = runtime.trace_file("pretrain vmoe 0")
    plain = [metrics.values["loss"] for metrics in iterate_training(task(), SETTINGS, 0, CPU)]
    seen = [row.values["loss"] for row in iterate_training(task(), SETTINGS, 0, CPU, trace=file)]
    assert seen == plain and file == tmp_path / "traces/pretrain_vmoe_0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    for name in ("batch", "forward", "losses", "backward", "optimizer"):
        assert names.count(name) == 4, name
    assert [one for one in names if one.startswith("step ")] == [f"step {n}" for n in range(4, 8)]
    assert any(event.get("name") == "aten::mm" for event in events)
    monkeypatch.delenv(TRACE_ENV)
    assert runtime.trace_file("pretrain vmoe 0") is None


@pytest.mark.parametrize("steps", [range(0), range(7, 9), range(20)])
def test_all_steps_come_whatever_is_traced(tmp_path, steps):
    file = tmp_path / "trace.json.gz"
    assert list(runtime.iterate_traced_steps(steps, file, "cpu")) == list(steps)
    assert file.exists() == bool(steps)
    assert list(runtime.iterate_traced_steps(steps, None, "cpu")) == list(steps)
