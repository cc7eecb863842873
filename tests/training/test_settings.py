"""Settings of methods, optimizer and machine; adversarial training changes the step alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from moecore.attacks.pgd import Pgd
from moecore.core import config, files, routing_records, streams
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.backbones.vit import Vit
from moecore.nn.predict import eval_mode
from moecore.study.params_reader import extract_settings
from moecore.study.yaml_document import parse_yaml_document
from moecore.tasks.multi_label import MultiLabel
from moecore.training.job import training_batch
from moecore.training.loop import iterate_training
from moecore.training.method import Method, initialise_guide
from moecore.training.runtime import tune_runtime
from moecore.training.settings import (
    Adversarial,
    Finetuning,
    Training,
    build_optimizer,
    learning_rate,
)
from tests.attacks.models import Linear
from tests.training import small
from tests.training.small import CPU, IMAGE, SETTINGS, VMOE, images, logged_points, step_batch, task

GUIDED = Method(regularizers=[{"kind": "router_kl"}, {"kind": "z_loss"}]).regularizers
TGR = VMOE.model_copy(update={"regularizers": GUIDED})
STEEP = Training(epochs=1, batch=1, learning_rate=1.0, final_learning_rate=0.2, weight_decay=0.3)
LINES = """finetune:
  epochs: 1
  batch: 2
  learning_rate: 0.1
"""

FOUR, PAIRS = {"kind": "mlp", "number": 4}, [{"kind": "pairwise_consistency"}]
PRC = Method(router={"kind": "noisy_top_k"}, experts=FOUR, regularizers=PAIRS)


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


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder without a probe; what a test sets of the process is set back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def test_what_is_chosen_is_reported_and_remembered(machine):
    runtime = tune_runtime()
    assert runtime.device == "cpu" and runtime.matmul_error < 1e-5 and runtime.bf16_speedup >= 0
    assert runtime.matmul_precision == torch.get_float32_matmul_precision()
    assert runtime.threads == torch.get_num_threads()
    for precision in ("float32", "bfloat16"):
        assert runtime.dtype(precision) == getattr(torch, precision)
    assert runtime.dtype() == (torch.bfloat16 if runtime.bf16_speedup >= 1.3 else torch.float32)
    remembered = Path(".state/runtime.json")
    (name,) = json.loads(remembered.read_text())
    remembered.write_text(json.dumps({name: 9.0}))
    assert tune_runtime().bf16_speedup == 9.0
    for damaged in ([], None, 3, {name: "fast"}):
        remembered.write_text(json.dumps(damaged))
        assert 0 <= tune_runtime().bf16_speedup != 9.0, "measured anew"


def test_a_resumed_stage_keeps_its_threads_and_says_where_there_are_fewer_cores(
    machine, tmp_path, monkeypatch, capfd
):
    for asked, cores, threads in (("3", {0, 1, 2, 3}, 3), ("1", {0, 1, 2}, 3), ("1", {0}, 3)):
        monkeypatch.setenv("MOECORE_THREADS", asked)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        assert tune_runtime(work=tmp_path).threads == threads == torch.get_num_threads()
        said = capfd.readouterr().err
        assert ("3 threads" in said and "cores: 1;" in said) == (len(cores) < threads), said


@pytest.mark.parametrize(
    ("name", "value"),
    [("MOECORE_THREADS", "x"), ("MOECORE_THREADS", "-1"), ("MOECORE_DEVICE", "x")],
)
def test_an_odd_machine_setting_is_one_line(monkeypatch, name, value):
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(files.UserError, match=f"^{name}: found '{value}'; allowed: .+$"):
        tune_runtime()


def test_rates_by_hand():
    # 3 warm-up steps: 1/4, 2/4, 3/4; then cosine over 4 steps: full, and half way (1 + 0.2) / 2
    rates = [learning_rate(step, 7, 3, STEEP) for step in range(7)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and rates[5] == pytest.approx(0.6)
    assert rates[6] == pytest.approx(0.2 + 0.8 * (1 - 2**-0.5) / 2)


def test_only_matrices_decay():
    model = task().model
    optimizer = build_optimizer(model, STEEP)
    decayed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    names = {name: id(parameter) in decayed for name, parameter in model.named_parameters()}
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert [optimizer.param_groups[index]["weight_decay"] for index in (0, 1)] == [0.3, 0.0]
    experts, router = "blocks.1.mlp.experts", "blocks.1.mlp.router"
    assert names["blocks.0.attn.qkv.weight"] and names[f"{experts}.up"]
    assert names[f"{router}.weight"]
    free = ("cls_token", "pos_embed", "head.bias", "norm.weight", "blocks.0.norm1.bias")
    assert not any(names[name] for name in (*free, f"{experts}.up_bias"))


def test_no_decay_on_an_experts_basis():
    router = {"kind": "eigenbasis", "context": "learned"}
    model = task(Method(router=router, experts={"kind": "eigen", "number": 4})).model
    free = {id(value) for value in build_optimizer(model, STEEP).param_groups[1]["params"]}
    held = {name.split(".")[-1] for name, value in model.named_parameters() if id(value) in free}
    assert {"basis", "scale", "target", "up_bias", "pos_embed"} <= held and "up" not in held


class Section(config.Config):
    finetune: Finetuning


def written(*lines: str) -> Finetuning:
    text = LINES + "".join(f"  {line}\n" for line in lines)
    return extract_settings(Section, parse_yaml_document(text)).finetune


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["weight_decay: 0.1", "optimizer: {kind: sgd}"], "5:3: finetune.weight_decay: found 0.1"),
        (["optimizer: {kind: adam, momentum: 0.5}"], "5:27: finetune.optimizer.momentum: unknown"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(lines, said):
    with pytest.raises(files.UserError, match=f"params.yaml:{said}"):
        written(*lines)


def test_without_decay_written_each_optimizer_has_its_own():
    sgd = written("optimizer: {kind: sgd}")
    assert sgd.weight_decay == 0 and Finetuning.model_validate(sgd.model_dump()) == sgd
    assert written("weight_decay: 0", "optimizer: {kind: adam}") and written().weight_decay == 0.05


def under(adversarial: Adversarial | None, **changed) -> Training:
    return SETTINGS.model_copy(update={"adversarial": adversarial, **changed})


def test_on_a_linear_model_it_is_the_optimum_by_hand():
    # logits (0, w·x) with w = (2, -1, 0): the loss of label 0 grows with w·x, that of label 1
    # falls. Ten steps of ε/10 along the sign are ε in all: x + ε (1, -1, 0) for label 0, x − ε (1,
    # -1, 0) for label 1, cut to [0, 1].
    model = Linear(torch.tensor([2.0, -1.0, 0.0]))
    x = torch.tensor([[0.5, 0.5, 0.5], [0.95, 0.05, 0.2]]).repeat(2, 1).view(4, 1, 1, 3)
    batch = routing_records.Batch(x, torch.tensor([0, 0, 1, 1]), torch.zeros(4, 3, 3), views=2)
    found = Adversarial(epsilon=0.1).attacked(model, IMAGE.task, batch, streams.generator_for(0))
    expected = [[0.6, 0.4, 0.5], [1.0, 0.0, 0.2], [0.4, 0.6, 0.5], [0.85, 0.15, 0.2]]
    torch.testing.assert_close(found.images, torch.tensor(expected).view(4, 1, 1, 3))
    assert found._replace(images=batch.images) == batch
    assert model.weight.grad is None and model.weight.requires_grad


def test_a_step_sees_what_a_loop_by_hand_makes():
    made, settings = task(), under(Adversarial(steps=3, epsilon=0.06))
    made.model.train()
    clean, found = training_batch(made, settings, 5, 7), step_batch(made, settings, 5, 7)
    twin = task()
    twin.model.eval()
    now = clean.images.clone()
    for _ in range(3):
        now.requires_grad_(True)
        loss = cross_entropy(twin.model(now).prediction, clean.labels, reduction="sum")
        (slope,) = torch.autograd.grad(loss, now)
        now = (now + 0.02 * slope.sign()).detach()
        now = torch.max(torch.min(now, clean.images + 0.06), clean.images - 0.06).clamp(0, 1)
    torch.testing.assert_close(found.images, now)
    assert (found.images - clean.images).abs().max() > 0.03
    assert torch.equal(found.labels, clean.labels)


def test_modes_and_gradients_stay():
    made = task()
    made.model.train()
    made.model.blocks[2].eval()
    made.model.head.weight.grad = torch.full_like(made.model.head.weight, 3.0)
    modes = [module.training for module in made.model.modules()]
    step_batch(made, under(Adversarial(steps=2)), 0, 0)
    assert [module.training for module in made.model.modules()] == modes
    assert all(parameter.requires_grad for parameter in made.model.parameters())
    assert (made.model.head.weight.grad == 3).all() and made.model.cls_token.grad is None


def test_the_model_is_attacked_without_noise_and_without_autocast():
    seen = []
    made = task()
    forward = made.model.forward

    def watched(pixels, *rest):
        modes = made.model.training, made.model.blocks[1].mlp.router.training
        seen.append((*modes, torch.is_autocast_enabled("cpu"), pixels.dtype))
        return forward(pixels, *rest)

    made.model.forward = watched
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step_batch(made, under(Adversarial(steps=4)), 0, 0)
    assert seen == [(False, False, False, torch.float32)] * 4


@pytest.mark.parametrize("form", ["paper", "strong"])
def test_epsilon_0_is_plain_training_bit_for_bit(form):
    plain, attacked = task(), task()
    expected = logged_points(iterate_training(plain, SETTINGS, 0, CPU))
    settings = under(Adversarial(epsilon=0, form=form))
    assert logged_points(iterate_training(attacked, settings, 0, CPU)) == expected
    small.assert_same_weights(plain, attacked)
    assert logged_points(iterate_training(task(), under(Adversarial(steps=2)), 0, CPU)) != expected


def test_the_random_start_is_of_seed_and_step_and_both_views_are_attacked():
    settings, drawn = under(Adversarial(steps=1, form="strong")), Pgd(steps=1, form="strong")
    first, clean = step_batch(task(), settings, 2, 5), training_batch(task(), settings, 2, 5)
    with eval_mode(made := task().model):
        generator = streams.generator_for(2, 5, 3)
        found = drawn(made, IMAGE.task, clean.images, clean.labels, 8 / 255, generator)
    torch.testing.assert_close(first.images, found)
    made, settings = task(PRC), under(Adversarial(steps=2), views=type(SETTINGS.views)(shift=1))
    clean, found = training_batch(made, settings, 0, 0), step_batch(made, settings, 0, 0)
    moved = (found.images - clean.images).abs().flatten(1).amax(dim=1)
    assert len(moved) == 16 and (moved > 0.02).all() and torch.equal(found.affines, clean.affines)
    assert list(iterate_training(made, settings, 0, CPU))[-1].step == 12


def test_sets_of_classes_are_attacked_through_their_sigmoids():
    sets = IMAGE.model_copy(update={"task": MultiLabel(classes=("dark", "light"))})
    labels = np.tile(np.array([[1, 1], [0, 1]], np.uint8), (25, 1))
    split = load_split_where_it_fits(Split(images(50).images, labels), "cpu")
    made = task(image=sets)._replace(train=split)
    settings = under(Adversarial(steps=1, epsilon=0.05))
    clean, found = training_batch(made, settings, 0, 0), step_batch(made, settings, 0, 0)
    leaf = clean.images.clone().requires_grad_(True)
    probs = made.model.eval()(leaf).prediction.sigmoid()
    loss = -torch.where(clean.labels == 1, probs, 1 - probs).log().sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found.images, (clean.images + 0.05 * slope.sign()).clamp(0, 1))


def test_a_model_that_asks_its_teacher_is_attacked_together_with_it():
    kl = [{"kind": "router_kl"}]
    method = Method(router={"kind": "teacher_routed"}, experts=FOUR, regularizers=kl)
    torch.manual_seed(0)
    guide = initialise_guide(Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE), method, (4,))
    made, settings = task(method, guide=guide), under(Adversarial(steps=2))
    found, clean = step_batch(made, settings, 0, 0), training_batch(made, settings, 0, 0)
    assert not torch.equal(found.images, clean.images) and not guide.teacher.training
    assert list(iterate_training(made, settings, 0, CPU))[-1].step == 12
