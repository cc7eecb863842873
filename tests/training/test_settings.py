"""Settings of a method and of the optimizer, and what the machine adds to them."""

import json
from pathlib import Path

import pytest
import torch

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.study.document import parse_yaml_document
from moecore.study.settings import extract_declared_settings
from moecore.training.checkpoint import Checkpoint
from moecore.training.loop import iterate_training
from moecore.training.method import Method
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Finetuning, Training, build_optimizer, learning_rate
from tests.training.small import CPU, VMOE, assert_same_weights, stop_training, task
from tests.training.small import SETTINGS as SMALL

TGR = VMOE.model_copy(
    update={
        "regularizers": Method(
            regularizers=[{"kind": "router_kl"}, {"kind": "z_loss"}]
        ).regularizers
    }
)


def test_what_it_provides_and_whether_it_is_guided():
    assert VMOE.provided == {"load", "routing"} and not VMOE.guided and TGR.guided


def test_fine_tuning_drops_the_teachers_losses_and_changes_k():
    tuned = TGR.for_finetuning(k=1, guided=False)
    assert [loss.kind for loss in tuned.regularizers] == ["z_loss"] and tuned.router.k == 1
    assert TGR.for_finetuning(k=None, guided=True) == TGR
    balanced = TGR.model_copy(update={"unguided_regularizers": VMOE.regularizers})
    tuned = balanced.for_finetuning(k=None, guided=False)
    assert tuned.losses == (*TGR.regularizers[1:], *VMOE.regularizers)
    assert balanced.for_finetuning(k=None, guided=True) == balanced
    assert Method().for_finetuning(k=1, guided=False) == Method()


def test_a_method_says_itself_whether_its_fine_tuning_is_guided():
    """So that with and without the teacher stand side by side in one study (TGR, table 3)."""
    for own in (True, False):
        method = TGR.model_copy(update={"guided_finetuning": own})
        for phase in (True, False):
            tuned = method.for_finetuning(k=None, guided=phase)
            assert tuned.guided == own
            assert tuned.regularizers == TGR.for_finetuning(k=None, guided=own).regularizers


def test_what_is_chosen_is_reported_and_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        runtime = tune_runtime()
        assert runtime.device == "cpu" and runtime.matmul_error < 1e-5 and runtime.bf16_speedup > 0
        assert (
            runtime.matmul_precision == torch.get_float32_matmul_precision()
            and runtime.threads == torch.get_num_threads()
        )
        assert (
            runtime.dtype("float32") == torch.float32
            and runtime.dtype("bfloat16") == torch.bfloat16
        )
        assert runtime.dtype() == (torch.bfloat16 if runtime.bf16_speedup >= 1.3 else torch.float32)
        remembered = Path(".state/runtime.json")
        (machine,) = json.loads(remembered.read_text())
        remembered.write_text(json.dumps({machine: 9.0}))
        assert tune_runtime().bf16_speedup == 9.0
        for damaged in ([], None, 3, {machine: "fast"}):
            remembered.write_text(json.dumps(damaged))
            assert 0 < tune_runtime().bf16_speedup != 9.0, "measured anew"
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def test_a_resumed_stage_keeps_its_threads_and_says_where_there_are_fewer_cores(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        for asked, cores, threads in (("3", {0, 1, 2, 3}, 3), ("1", {0, 1, 2}, 3), ("1", {0}, 3)):
            monkeypatch.setenv("MOECORE_THREADS", asked)
            monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
            assert tune_runtime(work=tmp_path).threads == threads == torch.get_num_threads()
            said = capfd.readouterr().err
            assert ("3 threads" in said and "on 1:" in said) == (len(cores) < threads), said
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [("MOECORE_THREADS", "x"), ("MOECORE_THREADS", "-1"), ("MOECORE_DEVICE", "x")],
)
def test_an_odd_machine_setting_is_one_line(monkeypatch, name, value):
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{name}: found '{value}'; allowed: .+$"):
        tune_runtime()


SETTINGS = Training(epochs=1, batch=1, learning_rate=1.0, final_learning_rate=0.2, weight_decay=0.3)


def test_rates_by_hand():
    # 3 warm-up steps: 1/4, 2/4, 3/4; then cosine over 4 steps: full, and half way (1 + 0.2) / 2
    rates = [learning_rate(step, 7, 3, SETTINGS) for step in range(7)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[5] == pytest.approx(0.6)
    assert rates[6] == pytest.approx(0.2 + 0.8 * (1 - 2**-0.5) / 2)


def test_only_matrices_decay():
    model = task().model
    optimizer = build_optimizer(model, SETTINGS)
    decayed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    names = {name: id(parameter) in decayed for name, parameter in model.named_parameters()}
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert [optimizer.param_groups[index]["weight_decay"] for index in (0, 1)] == [0.3, 0.0]
    assert (
        names["blocks.0.attn.qkv.weight"]
        and names["blocks.1.mlp.experts.up"]
        and names["blocks.1.mlp.router.weight"]
    )
    for free in (
        "cls_token",
        "pos_embed",
        "head.bias",
        "norm.weight",
        "blocks.1.mlp.experts.up_bias",
        "blocks.0.norm1.bias",
    ):
        assert not names[free], free


def test_no_decay_on_an_experts_basis():
    eigen = Method(
        router={"kind": "eigenbasis", "context": "learned"}, experts={"kind": "eigen", "number": 4}
    )
    made = task(eigen)
    free = {
        id(parameter)
        for parameter in build_optimizer(made.model, SETTINGS).param_groups[1]["params"]
    }
    held = {
        name.rpartition(".")[2]
        for name, parameter in made.model.named_parameters()
        if id(parameter) in free
    }
    assert {"basis", "scale", "target", "up_bias", "pos_embed"} <= held and "up" not in held


def optimized(**optimizer) -> Training:
    return Training.model_validate(
        SMALL.model_dump(exclude={"weight_decay"}) | {"optimizer": optimizer}
    )


@pytest.mark.parametrize("optimizer", [{"kind": "adam"}, {"kind": "sgd"}])
def test_each_learns_and_ends_bit_equal_after_a_kill(tmp_path, optimizer):
    settings = optimized(**optimizer)
    whole = task()
    list(iterate_training(whole, settings, 0, CPU))
    stop_training(task(), settings, tmp_path, 3)
    resumed = task(seed=99)
    list(iterate_training(resumed, settings, 0, CPU, Checkpoint(tmp_path)))
    assert_same_weights(resumed, whole)


class Section(Config):
    finetune: Finetuning


LINES = """finetune:
  epochs: 1
  batch: 2
  learning_rate: 0.1
"""


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "  weight_decay: 0.1\n  optimizer: {kind: sgd}\n",
            "params.yaml:5:3: finetune.weight_decay: found 0.1",
        ),
        (
            "  optimizer: {kind: adam, momentum: 0.5}\n",
            "params.yaml:5:27: finetune.optimizer.momentum: unknown key",
        ),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(lines, said):
    with pytest.raises(UserError) as error:
        extract_declared_settings(Section, parse_yaml_document(LINES + lines))
    assert said in str(error.value)


def test_without_decay_written_each_optimizer_has_its_own():
    written = extract_declared_settings(
        Section, parse_yaml_document(LINES + "  optimizer: {kind: sgd}\n")
    ).finetune
    assert written.weight_decay == 0
    assert Finetuning.model_validate(written.model_dump()) == written
    assert extract_declared_settings(
        Section, parse_yaml_document(LINES + "  weight_decay: 0\n  optimizer: {kind: adam}\n")
    )
    assert (
        extract_declared_settings(Section, parse_yaml_document(LINES)).finetune.weight_decay == 0.05
    )
