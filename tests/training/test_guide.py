"""Frozen teachers, the loss of a step, numbers and several labels, sums of a training's routing."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from moecore.backbones import Vit, Vit3d
from moecore.core import routing_records
from moecore.core.files import UserError
from moecore.data.loader import few_shot_indices, load_split_where_it_fits
from moecore.data.prepared import Prepared, Split
from moecore.measure.base import SkipReason
from moecore.run import history_file, run_record
from moecore.run.training import TrainingRun
from moecore.stages import teacher as teacher_stage
from moecore.tasks.multi_label import MultiLabel
from moecore.training import artifacts, loop
from moecore.training import method as module
from moecore.training.job import Objective, training_batch
from moecore.training.meter import Meter, sum_layer_routing
from moecore.training.monitor import (
    LayerTotals,
    MonitorSettings,
    build_routing_point,
    format_routing_point,
)
from moecore.training.phase_trainings import build_pretraining, iterate_router_fit
from moecore.training.settings import TeacherRouterFit, Training
from tests.data.making import VOLUMES, ball
from tests.measure.subjects import digits
from tests.training import small
from tests.training.small import CPU, IMAGE, SETTINGS, VMOE, assert_resumes, logged_points, task

NOISY = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": {"kind": "mlp", "number": 4}}
TGR = module.Method(**NOISY, regularizers=[{"kind": "router_kl"}])
FITTED = module.TeacherRouterSettings(fit="joint", load=0.1, entropy=0.01)
JOINT = TGR.model_copy(update={"teacher_router": FITTED})
MLPS, KL = {"kind": "mlp", "number": 4}, [{"kind": "router_kl"}]
JOINTLY = module.Method(router={"kind": "teacher_routed", "k": 2}, experts=MLPS, regularizers=KL)
ORACLE = JOINTLY.model_copy(update={"teacher_router": module.TeacherRouterSettings(fit="joint")})


def guide(depth: int = 4, method: module.Method = TGR):
    torch.manual_seed(0)
    return module.initialise_guide(
        Vit(patch=4, width=32, depth=depth, heads=2).build(IMAGE), method, (4,)
    )


def test_blocks_are_aligned_by_relative_depth():
    # the paper's layers 8, 10, 12 of 12 are 7, 9, 11 from 0; of a teacher with 24 blocks they are
    # its 16th, 20th and 24th
    assert module.aligned_teacher_blocks((7, 9, 11), (12,), (12,)) == (7, 9, 11)
    assert module.aligned_teacher_blocks((7, 9, 11), (12,), (24,)) == (15, 19, 23)


def test_fitting_makes_it_confident_and_balanced_and_leaves_the_teacher_alone():
    made = guide()
    before = {name: value.clone() for name, value in made.teacher.state_dict().items()}
    settings = TeacherRouterFit(steps=60, batch=16, learning_rate=0.05)
    weights = module.TeacherRouterSettings(load=1.0, entropy=0.1)
    (_, first), *_, (last_step, last) = iterate_router_fit(made, task().train, weights, settings, 0)
    assert last_step == 60 and last["entropy"] < first["entropy"] and last["balance"] < 0.2
    assert all(torch.equal(one, before[name]) for name, one in made.teacher.state_dict().items())


def test_a_guided_student_comes_nearer_to_its_guide():
    made = task(TGR, guide=guide().requires_grad_(False))
    first, *_, last = loop.iterate_training(made, SETTINGS.model_copy(update={"epochs": 6}), 0, CPU)
    assert last.values["router_kl"] < first.values["router_kl"]


def test_saved_and_loaded_it_says_the_same_also_at_another_resolution(tmp_path):
    made, images = guide(depth=8), torch.rand(2, 1, 8, 8)
    artifacts.save_guide(tmp_path, made)
    loaded = artifacts.load_guide(tmp_path)
    assert made.blocks == (3, 7) == loaded.blocks
    for ours, theirs in zip(loaded(images).probs, made(images).probs, strict=True):
        assert torch.equal(ours, theirs)
    larger = artifacts.load_guide(tmp_path, IMAGE.model_copy(update={"size": 16}))
    assert larger(torch.rand(2, 1, 16, 16)).probs[0].shape == (2, 17, 4)
    # one more channel says the truth of the images of a later phase
    told = artifacts.load_guide(tmp_path, IMAGE.model_copy(update={"truth": 3}))
    with_truth = torch.cat([images, torch.ones(2, 1, 8, 8)], 1)
    assert torch.equal(told(with_truth).prediction, made(images).prediction)
    artifacts.record_no_guide_needed(tmp_path)
    assert artifacts.load_guide(tmp_path) is None


def test_fitted_routers_stay_and_joint_ones_learn_while_the_teacher_never_does():
    for method, learns in ((TGR, False), (JOINT, True)):
        made = task(method, guide=guide(method=method))
        before = {name: value.clone() for name, value in made.guide.state_dict().items()}
        first, *_ = loop.iterate_training(made, SETTINGS, 0, CPU)
        after = made.guide.state_dict()
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == ({"routers.0", "routers.1"} if learns else set())
        assert ("teacher_router" in first.values) == learns


def test_joint_training_stopped_and_resumed_ends_bit_equal_in_student_and_teacher_router(tmp_path):
    assert_resumes(lambda: task(JOINT, guide=guide(method=JOINT)), SETTINGS, tmp_path, 2)


def test_a_student_routed_by_its_teacher_carries_it_along(tmp_path):
    made = task(ORACLE, guide=guide(method=ORACLE))
    with pytest.raises(UserError, match="teacher"):
        made.model(torch.rand(2, 1, 8, 8))
    before = made.guide.routers[0].detach().clone()
    list(loop.iterate_training(made, SETTINGS, 0, CPU))
    # the task and the balance reach the teacher's router
    assert not torch.equal(made.guide.routers[0], before)
    alone, images = made.complete_model.eval(), torch.rand(3, 1, 8, 8)
    assert isinstance(alone, module.TeacherRoutedModel)
    artifacts.save_model(tmp_path, alone)
    loaded, expected = artifacts.load_model(tmp_path)(images), alone(images)
    assert torch.equal(loaded.prediction, expected.prediction)
    teacher = made.guide(images).probs
    for record, probs in zip(expected.routing, teacher, strict=True):
        chosen = record.chosen.gather(-1, probs.topk(2, dim=-1).indices)
        assert chosen.all() and record.chosen.sum() == chosen.numel()


SHIFTED = SETTINGS.model_copy(update={"views": type(SETTINGS.views)(shift=1)})
PRC = module.Method(**NOISY, regularizers=[{"kind": "pairwise_consistency"}])


def step(labels, heads, teacher=None, image=IMAGE):
    heads = tuple(torch.tensor(head, dtype=torch.float32) for head in heads)
    guidance = None if teacher is None else routing_records.Guidance(torch.tensor(teacher), ())
    blank = torch.zeros(())
    batch = routing_records.Batch(blank, torch.tensor(labels), blank)
    output = routing_records.ModelOutput(torch.stack(heads).mean(0), (), heads)

    def loss_of(output, *rest):
        return image.task.loss(output.prediction, *rest)

    model = SimpleNamespace(image=image, task_loss=loss_of)
    return routing_records.ObjectiveInputs(batch, output, model, guidance)


def test_hard_distillation_by_hand():
    # class head: logits (ln 3, 0), label 0: -ln(3/4) = ln(4/3). Distillation head: (0, ln 9),
    # teacher says class 1: -ln(9/10). half of each: (ln(4/3) + ln(10/9)) / 2. The teacher's own
    # logits count only through their order.
    made = step([0], [[[math.log(3), 0.0]], [[0.0, math.log(9)]]], teacher=[[0.1, 7.0]])
    ours, teachers = math.log(4 / 3), math.log(10 / 9)
    for share in (0.5, 0.25):
        objective = Objective(distillation=share)
        terms = objective.terms(made)
        found = {name: float(term) for name, term in terms.items()}
        assert found == pytest.approx({"task": ours, "distillation": teachers})
        assert float(objective.total(terms)) == pytest.approx((1 - share) * ours + share * teachers)


def test_one_head_learns_both_two_their_mean_and_an_unfitting_teacher_is_an_error():
    one = step([0], [[[math.log(3), 0.0]]], teacher=[[0.1, 7.0]])
    terms = Objective(distillation=0.5).terms(one)
    assert float(terms["distillation"]) == pytest.approx(math.log(4))
    two = Objective().terms(step([0], [[[math.log(3), 0.0]], [[math.log(3), 0.0]]]))
    assert float(two["task"]) == pytest.approx(math.log(4 / 3)) and "distillation" not in two
    with pytest.raises(UserError, match="no teacher in this step"):
        Objective(distillation=0.5).terms(step([0], [[[0.0, 1.0]]]))
    with pytest.raises(UserError, match="knows 3 classes, the student 2"):
        Objective(distillation=0.5).terms(step([0], [[[0.0, 1.0]]], teacher=[[0.0, 1.0, 2.0]]))


def test_two_views_are_the_same_images_moved_differently_and_both_are_classified():
    made = task(PRC)
    batch = training_batch(made, SHIFTED, 0, 3)
    first, second = batch.affines.chunk(2)
    assert batch.views == 2 and batch.images.shape == (16, 1, 8, 8) and batch.labels.shape == (16,)
    assert torch.equal(batch.labels[:8], batch.labels[8:]) and not torch.equal(first, second)
    alone = training_batch(task(VMOE), SHIFTED, 0, 3)
    # the first view is the one that a method with one view sees
    assert torch.equal(batch.images[:8], alone.images)
    # cross-entropy on both views: the mean over all 16
    output, labels = made.model(batch.images), torch.cat([alone.labels, alone.labels])
    expected = torch.nn.functional.cross_entropy(output.prediction, labels)
    terms = Objective().terms(routing_records.ObjectiveInputs(batch, output, made.model))
    torch.testing.assert_close(terms["task"], expected)


def test_two_views_are_never_mixed():
    settings = type(SETTINGS).model_validate(SHIFTED.model_dump() | {"mix": {"mixup": 0.8}})
    assert training_batch(task(PRC), settings, 0, 0).labels.ndim == 1
    assert training_batch(task(VMOE), settings, 0, 0).labels.ndim == 2


AGES = torch.tensor([40.0, 60.0])


def test_the_loss_of_ages_is_in_deviations_and_validation_in_years():
    torch.manual_seed(0)
    model = Vit3d(patch=8, width=24, depth=2, heads=2, mlp_ratio=2, stem="pooled").build(VOLUMES)
    # errors 4 and 10 years; the model's deviation is 20: (4 + 10) / 2 / 20
    answers = routing_records.ModelOutput(torch.tensor([[44.0], [50.0]]))
    terms = Objective().terms(
        routing_records.ObjectiveInputs(routing_records.Batch(None, AGES, None), answers, model)
    )
    assert float(terms["task"]) == pytest.approx(0.35)
    model.head.weight.data.zero_()  # answers 55 always: errors 5 and 15
    images = np.stack([ball(20.0, 0)[0], ball(90.0, 1)[0]])
    split = load_split_where_it_fits(Split(images, np.array([50.0, 70.0], np.float32)), "cpu")
    expected = {"validation_mae": 10.0, "validation_loss": 0.5}
    assert loop.validation_metrics(model, split) == pytest.approx(expected)


def sets(count: int, seed: int = 0) -> Split:
    """Left half bright: class 0; right half bright: class 1; both may be."""
    random = np.random.default_rng(seed)
    labels = np.array([[1, 0], [0, 1], [1, 1]], np.uint8)[np.arange(count) % 3]
    bright = 180 * labels.repeat(4, axis=1)[:, None, None, :]
    return Split((random.integers(0, 60, (count, 1, 8, 8)) + bright).astype(np.uint8), labels)


SETS = IMAGE.model_copy(update={"task": MultiLabel(classes=("left", "right"))})


def several():
    train, validation = (load_split_where_it_fits(sets(*of), "cpu") for of in ((50, 0), (20, 1)))
    return task(module.Method(), image=SETS)._replace(train=train, validation=validation)


def test_validation_is_precision_at_1_and_the_summed_loss():
    made = several()
    with torch.no_grad():
        made.model.head.weight.zero_()
        made.model.head.bias.copy_(torch.tensor([math.log(3), -math.log(3)]))  # always class 0
    found = loop.validation_metrics(made.model, made.validation)
    # 20 images: labels (1,0) 7 times, (0,1) 7 times, (1,1) 6 times. Class 0 is right 13 times.
    assert found["validation_accuracy"] == pytest.approx(13 / 20)
    near, far = math.log(4 / 3), math.log(4)
    expected = (7 * 2 * near + 7 * 2 * far + 6 * (near + far)) / 20
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_what_has_no_meaning_for_label_sets_is_refused():
    mixed = Training.model_validate(SETTINGS.model_dump() | {"mix": {"mixup": 1.0}})
    with pytest.raises(UserError, match="several labels each; allowed: mix: null"):
        list(loop.iterate_training(several(), mixed, 0, CPU))
    smooth = several()._replace(objective=Objective(label_smoothing=0.1))
    with pytest.raises(UserError, match="label_smoothing: found 0.1"):
        list(loop.iterate_training(smooth, SETTINGS, 0, CPU))
    with pytest.raises(UserError, match="distillation: these images have several labels each"):
        made = step([[1, 1]], [[[0.0, 1.0]]], teacher=[[0.0, 1.0]], image=SETS)
        Objective(distillation=0.5).terms(made)
    assert list(loop.iterate_training(task(), mixed, 0, CPU))[-1].step == 12


EVERY = MonitorSettings(every=1, dead_after=6)
SOFT = module.Method(
    router={"kind": "soft_slots", "slots": 2}, experts={"kind": "mlp", "number": 4}
)


def record(probs: list, chosen: list) -> routing_records.RoutingRecord:
    shares = torch.tensor([probs])
    flags = torch.tensor([chosen], dtype=torch.bool)
    return routing_records.RoutingRecord(shares.log(), shares, flags.float(), flags, shares * flags)


def test_the_sums_of_a_layer_by_hand():
    scores = [[0.5, 0.3, 0.15, 0.05], [0.4, 0.1, 0.35, 0.15], [0.25, 0.25, 0.25, 0.25]]
    one = record(scores, [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
    totals = LayerTotals.from_numbers(sum_layer_routing(one).tolist())
    # margins 0.3 − 0.15 and 0.35 − 0.15; a token that chose all experts has none
    assert totals.counts == (3, 2, 2, 1) and (totals.tokens, totals.with_margin) == (3, 2)
    assert totals.margins == pytest.approx(0.35)
    entropies = [-sum(p * torch.tensor(p).log().item() for p in row) for row in scores]
    assert totals.entropies == pytest.approx(sum(entropies), rel=1e-5)


def test_the_meter_adds_steps_and_layers_and_reads_them_with_its_terms():
    meter = Meter(torch.device("cpu"), monitor=MonitorSettings(every=2))
    narrow = record([[0.75, 0.25]], [[1, 0]])
    wide = record([[0.5, 0.3, 0.2], [0.5, 0.2, 0.3]], [[1, 0, 0], [1, 0, 0]])
    for step in range(4):  # two of which are counted
        output = routing_records.ModelOutput(torch.zeros(1), (narrow,), text_routing=(wide,))
        meter.add(step, 1, {"loss": torch.tensor(1.0)}, torch.tensor(1.0), output)
    values, totals = meter.average_over_ranks("")
    assert values["loss"] == 1.0
    counts = {name: layer.counts for name, layer in totals.items()}
    assert counts == {"MoE 1": (2, 0), "text MoE 1": (4, 0, 0)}


def totals(*counts: float) -> dict[str, LayerTotals]:
    """Of tokens that chose two experts each."""
    return {"MoE 1": LayerTotals(counts, sum(counts) / 2, 60.0, 6.0, 60.0)}


def test_load_death_and_collapse_by_hand():
    settings = MonitorSettings(dead_after=20)
    first = build_routing_point(10, totals(60, 30, 29, 1), None, settings)
    layer = first.layers["MoE 1"]
    assert layer.max_violation == pytest.approx(1) and layer.load[0] == 0.5  # 60 of 120 over 30
    assert (layer.token_entropy, layer.margin, layer.idle) == (1.0, 0.1, (0, 0, 0, 0))
    assert "MoE 1: MaxVio 1, entropy 1, margin 0.1; dead 0  █▄▄▁" == format_routing_point(first)
    once = build_routing_point(20, totals(60, 30, 30, 0), first, settings)
    assert once.layers["MoE 1"].idle == (0, 0, 0, 10) and not once.warnings
    twice = build_routing_point(30, totals(60, 30, 30, 0), once, settings)
    assert twice.warnings == ("step 30: MoE 1: expert 3 had no token for 20 steps",)
    assert twice.layers["MoE 1"].dead == 1 and format_routing_point(twice).endswith("█▄▄·")
    # two experts a token: the others have 7 of 120 choices, where 60 were even; then 5
    still = build_routing_point(40, totals(60, 53, 7, 0), twice, settings)
    assert not still.warnings  # told once
    fallen = build_routing_point(50, totals(60, 55, 5, 0), still, settings)
    line = "the load collapsed, all but the busiest experts have 8% of an even share"
    assert fallen.warnings == (f"step 50: MoE 1: {line}",)
    assert not build_routing_point(60, totals(60, 60, 0, 0), fallen, settings).warnings


def test_a_layer_that_nobody_chose_and_one_that_all_choose_have_no_number_of_what_is_not_there():
    none = build_routing_point(
        1, {"MoE 1": LayerTotals((0, 0), 5, 1, 0, 0)}, None, MonitorSettings()
    )
    assert (none.layers["MoE 1"].max_violation, none.layers["MoE 1"].margin) == (None, None)
    every = build_routing_point(
        1, {"MoE 1": LayerTotals((5, 5), 5, 1, 0, 0)}, None, MonitorSettings()
    )
    assert (every.layers["MoE 1"].max_violation, every.warnings) == (0, ())


@pytest.mark.parametrize("method", [VMOE, SOFT])
def test_a_training_is_bit_equal_with_and_without(method):
    without, watched = task(method), task(method)
    alone = logged_points(loop.iterate_training(without, SETTINGS, 0, CPU))
    points = list(loop.iterate_training(watched, SETTINGS, 0, CPU, monitor=EVERY))
    assert logged_points(points) == alone
    small.assert_same_weights(watched, without)
    # 3 steps of 8 images of 5 tokens in each of the last two blocks
    assert all(list(one.routing) == ["MoE 1", "MoE 2"] for one in points)
    assert {layer.tokens for one in points for layer in one.routing.values()} == {3 * 8 * 5}


def test_routing_may_be_counted_rarely():
    points = loop.iterate_training(task(), SETTINGS, 0, CPU, monitor=MonitorSettings(every=4))
    # steps 0, 4, 8 of points at 3, 6, 9, 12
    assert [len(one.routing) for one in points] == [2, 2, 2, 0]


def run_training(work, kill_at: int | None = None) -> list:
    """Train in ``work``, or until an epoch ends there; return what was told of the routing."""

    def each_epoch(epoch: int) -> float | None:
        if epoch == kill_at:
            raise KeyboardInterrupt
        return 0.5 if epoch > 1 else None

    job = task()
    with torch.no_grad():  # tokens are about (10, 0, 0, …), so nobody chooses the last expert
        last = job.model.blocks[-1]
        last.norm2.bias[0], last.mlp.router.weight[3, 0] = 10, -1
    with run_record.record_run("pretrain", None, method="vmoe", seed=0, work=work) as run:
        training = TrainingRun(run, work, "pretrain", EVERY)
        training.train(job, SETTINGS, 0, each_epoch)
        assert training.read_log().warnings
    return [point for _, point in history_file.routing_points(history_file.read_lines(run.folder))]


def test_a_killed_training_tells_what_one_that_was_not_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_training(tmp_path / "whole")
    assert [point.step for point in whole] == [3, 6, 9, 12]
    assert [point.agreement for point in whole] == [None, None, None, 0.5]
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path / "killed", kill_at=2)
    assert run_training(tmp_path / "killed") == whole
    lines = [line for point in whole for line in point.warnings]
    assert lines and f"pretrain: {lines[0]}" in capsys.readouterr().err


def test_a_pretraining_and_its_teacher_learn_from_images_that_the_seed_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "artifacts/data/pretrain")
    data = Prepared.open("artifacts/data/pretrain")
    artifacts.record_no_guide_needed(tmp_path / "none")
    training = {"epochs": 1, "batch": 10, "learning_rate": 1e-3, "shots": 2}
    teacher = {"kind": "dense", "model": {"kind": "vit", "patch": 4}, "training": training}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"teacher": teacher}), encoding="utf-8")
    seen = []
    ignored = SimpleNamespace(write_result=lambda result: None, log_model_folder=lambda path: 0)
    run = SimpleNamespace(work=tmp_path, runtime=CPU, record=ignored, read_log=lambda: None)
    run.train = lambda job, *rest: seen.append(job.train.images)
    monkeypatch.setattr(teacher_stage, "training_run", lambda *rest: nullcontext(run))
    monkeypatch.setattr(teacher_stage, "build_outcome", lambda *rest: SkipReason(skipped=""))
    settings = Training(**training)
    for seed in (0, 1):
        teacher_stage.teacher(seed)
        none = tmp_path / "none"
        job = build_pretraining(module.Method(), Vit(patch=4), settings, data, none, seed, "cpu")
        rows = few_shot_indices(data.task, data.train.labels, 2, seed)
        assert torch.equal(job.train.images, torch.from_numpy(data.train.images[rows.numpy()]))
        assert torch.equal(job.train.images, seen[-1])
    assert not torch.equal(*seen)
