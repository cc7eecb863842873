"""The loop of a training: the same bits when resumed; model folders, and parts from outside."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moecore.core.files import SHA256_KEY, FileAccessError, UserError, read_json, write_json_sha256
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.core.source_layout import allow_packages, allowing_packages
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.parts import Classification, MoESettings
from moecore.pipeline.predict_cli import main
from moecore.teachers import Adversarial, Training, ViewSettings
from moecore.training import artifacts, meter, outcome
from moecore.training import job as module
from moecore.training.artifacts import Checkpoint, load_adapted_model, load_model, save_model
from moecore.training.loop import iterate_training, total_steps, validation_metrics
from moecore.training.method import Method
from tests.data.making import write_classes
from tests.measure.subjects import built, digits
from tests.my_lab import forget_package, write_my_lab
from tests.training import small
from tests.training.small import COMPETITION, CPU, IMAGE, SETTINGS, VMOE, stop_training, task


def test_it_learns_and_reports_every_third_step_and_every_epoch():
    found = list(iterate_training(task(), SETTINGS, 0, CPU))
    # 50 images make 6 batches of 8 (the last 2 images are dropped), so 12 steps; logged at 3, 6
    # (epoch), 9, 12 (epoch)
    assert [metrics.step for metrics in found] == [3, 6, 9, 12] and found[-1].steps == 12
    ends = [metrics.step for metrics in found if "validation_accuracy" in metrics.values]
    assert ends == [6, 12] and total_steps(task(), SETTINGS) == 12
    assert found[-1].values["validation_accuracy"] == 1.0
    values = found[0].values
    assert set(values) >= {"learning_rate", "train_accuracy", "images_per_second"}
    total = values["task"] + 0.005 * values["importance"] + 0.005 * values["load"]
    assert values["loss"] == pytest.approx(total, rel=1e-5)


def test_a_seed_gives_the_same_run_and_another_another():
    first, other = (small.logged_points(iterate_training(task(), SETTINGS, s, CPU)) for s in (0, 1))
    made = task()
    torch.rand(1000)  # global randomness before the run does not matter
    assert first == small.logged_points(iterate_training(made, SETTINGS, 0, CPU)) != other


MLPS = {"kind": "mlp", "number": 4}


def balanced(kind: str) -> Method:
    router = {"kind": "noisy_top_k", "score": "sigmoid", "balance": {"kind": kind}}
    return Method(router=router, experts=MLPS)


def biased(**router) -> Method:
    balance = {"kind": "loss_free", "rate": 0.01, "rule": "proportional"}
    return Method(router=router | {"balance": balance}, experts=MLPS)


RELU = Method(router={"kind": "relu"}, experts=MLPS, regularizers=[{"kind": "adaptive_l1"}])
COMPETING = Method(router=COMPETITION, experts=MLPS)
INNER = biased(kind="noisy_top_k").router
DEEP = Method(router={"kind": "depth", "share": 0.5, "router": INNER}, experts=MLPS)


STRONG = {"adversarial": {"steps": 2, "form": "strong"}}


@pytest.mark.parametrize(
    ("stopped_after", "changes", "method"),
    [
        *((2, {}, VMOE), (3, {"drop_path": 0.3}, VMOE), (3, {"optimizer": {"kind": "adam"}}, VMOE)),
        *((3, {"optimizer": {"kind": "sgd"}}, VMOE), (3, STRONG, VMOE)),
        *((2, {}, balanced("loss_free")), (3, {}, balanced("quantile")), (2, {}, RELU)),
        *((2, {}, COMPETING), (2, {}, biased(**COMPETITION))),
        *((2, {}, biased(kind="top_k_softmax", input_jitter=0.1, residual=True)), (2, {}, DEEP)),
    ],
)
def test_stopped_and_resumed_it_ends_bit_equal(tmp_path, stopped_after, changes, method):
    changes = dict(changes)
    vit = Vit(patch=4, width=16, depth=4, heads=2, drop_path=changes.pop("drop_path", 0.0))
    settings = Training.model_validate(SETTINGS.model_dump(exclude={"weight_decay"}) | changes)

    def make() -> module.TrainingJob:
        torch.manual_seed(0)
        return task(method)._replace(model=vit.build(IMAGE, method.moe))

    whole = small.assert_resumes(make, settings, tmp_path, stopped_after)
    start = make().model.state_dict()
    moved = {name for name, one in whole.model.named_buffers() if name in start}
    assert all(not torch.equal(start[name], whole.model.get_buffer(name)) for name in moved)
    assert bool(moved) == (method not in (VMOE, COMPETING))  # biases, or weights of a loss


def test_evaluation_and_attacks_teach_no_balance():
    job = task(balanced("loss_free"))
    settings = SETTINGS.model_copy(update={"adversarial": Adversarial(steps=2), "log_every": 1})
    for done, _ in enumerate(iterate_training(job, settings, 0, CPU), 1):
        bias = job.model.blocks[1].mlp.router.balance.bias
        # as many updates as steps, of a rate of 1e-3 or none
        assert bias.abs().max() < 1.0005e-3 * done
        if done == 2:
            before = bias.clone()
            validation_metrics(job.model, job.validation)
            assert torch.equal(bias, before) and bias.any()
            break


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [("loss", "loss is not finite since step 7 "), ("weights", "are not finite after step 9 ")],
)
def test_what_is_not_finite_stops_the_run_with_step_terms_and_checkpoint(tmp_path, spoiled, said):
    made = task()
    run = iterate_training(made, SETTINGS, 0, CPU, Checkpoint(tmp_path))
    for _ in range(2):
        next(run)
    forward = made.model.forward

    def wrong(images, guidance=None, progress=1.0):
        output = forward(images, guidance, progress)
        if spoiled == "loss":
            return output._replace(prediction=output.prediction * float("nan"))
        infinite = torch.nn.Parameter(torch.tensor(float("inf")))
        made.model.blocks[0].ls1.register_parameter("unused", infinite)
        return output

    made.model.forward = wrong
    last = r"last good checkpoint: step 6 in .*checkpoint\.safetensors"
    with pytest.raises(UserError, match=f"{said}.*importance.*{last}"):
        list(run)


def test_without_drop_path_nothing_is_drawn_and_with_it_the_model_is_evaluated_whole():
    images = torch.rand(6, 1, 8, 8)
    whole = Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE)
    dropping = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.5).build(IMAGE)
    dropping.load_state_dict(whole.state_dict())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    trained = whole.train()(images).prediction
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(whole.eval()(images).prediction, trained)
    assert torch.equal(dropping.eval()(images).prediction, trained)
    assert not torch.equal(dropping.train()(images).prediction, trained)


def test_the_memory_of_the_second_step_is_told_once_and_changes_no_bit(monkeypatch):
    weighed = task()
    found = [metrics.values for metrics in iterate_training(weighed, SETTINGS, 0, CPU)]
    assert [meter.MEMORY in values for values in found] == [True, False, False, False]
    monkeypatch.setattr("moecore.training.loop.MEMORY_STEP", -1)
    plain = task()
    assert not any(meter.MEMORY in one.values for one in iterate_training(plain, SETTINGS, 0, CPU))
    small.assert_same_weights(weighed, plain)


@pytest.mark.parametrize(("optimizer", "tensors"), [("adamw", 4), ("sgd", 3)])
def test_memory_of_a_small_batch_is_weights_gradients_and_states(optimizer, tensors):
    # at the update all stand side by side: weight, gradient and two means, or one
    torch.manual_seed(0)
    model = Vit(patch=4, width=128, depth=2, heads=2).build(IMAGE)
    settings = Training(epochs=1, batch=1, learning_rate=1e-3, optimizer={"kind": optimizer})
    (first, *_) = iterate_training(task(Method())._replace(model=model), settings, 0, CPU)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert first.values[meter.MEMORY] == pytest.approx(tensors * 4 * weights / 1e6, rel=0.03)


def test_an_outcome_tells_what_a_step_costs(tmp_path):
    data = digits(tmp_path)
    model = built(Vit(patch=6, width=16, depth=2, heads=2), None, data, 1)
    made = module.build_training_job(model, data, module.Objective(()), "cpu")
    points = [(row.step, row.values) for row in iterate_training(made, SETTINGS, 0, CPU)]
    found = outcome.build_outcome(model.eval(), data, SETTINGS, outcome.LoggedPoints(points, 3.0))
    assert found.training_step_ms == pytest.approx(8000 / found.images_per_second)
    assert found.training_memory_mb == points[0][1][meter.MEMORY]
    log = outcome.LoggedPoints(points[1:], 3.0)  # it was told before a kill
    assert outcome.build_outcome(model, data, SETTINGS, log).training_memory_mb is None


def test_batches_that_a_thread_makes_early_are_the_same():
    made, settings = task(), SETTINGS.model_copy(update={"views": ViewSettings(shift=2, flip=True)})
    asked = []

    def make(step):
        asked.append(step)
        return module.training_batch(made, settings, 3, step)

    ahead = module.BatchPrefetcher(make, range(4, 9))
    for step in range(4, 9):
        ours, theirs = ahead(step), module.training_batch(made, settings, 3, step)
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.labels, theirs.labels)
    assert asked == [4, 5, 6, 7, 8], "each once, in order, none after the last"
    failing = module.BatchPrefetcher(lambda step: (1 // (step - 1),), range(3), depth=1)
    assert failing(0) == (-1,)
    with pytest.raises(ZeroDivisionError):
        failing(1)
    assert failing(2) == (1,)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE, VMOE.moe).eval()


def test_saved_and_loaded_it_says_the_same_and_no_global_number_is_drawn(tmp_path, model):
    save_model(tmp_path, model)
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", "model.safetensors"}
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "readable as others"
    images = torch.rand(3, 1, 8, 8)
    expected = model(images)
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    loaded = load_model(tmp_path)
    assert torch.rand(3).equal(undisturbed)
    output = loaded(images)
    assert torch.equal(output.prediction, expected.prediction) and len(output.routing) == 2
    assert torch.equal(output.routing[0].combine, expected.routing[0].combine)


def test_at_another_resolution_with_other_classes(tmp_path, model):
    save_model(tmp_path, model)
    image = IMAGE.model_copy(update={"size": 16, "task": Classification(classes=("a", "b", "c"))})
    larger = load_adapted_model(tmp_path, image, VMOE.moe)
    assert larger(torch.rand(2, 1, 16, 16)).prediction.shape == (2, 3)
    assert larger.pos_embed.shape == (1, 17, 16)
    assert torch.equal(larger.pos_embed[:, 0], model.pos_embed[:, 0])
    assert torch.equal(larger.blocks[1].mlp.experts.up, model.blocks[1].mlp.experts.up)


def test_fine_tuning_keeps_the_drop_path_and_an_older_card_has_none(tmp_path, model):
    torch.manual_seed(0)
    dropping = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.3).build(IMAGE, VMOE.moe)
    save_model(tmp_path, dropping)
    tuned = load_adapted_model(tmp_path, IMAGE.model_copy(update={"size": 16}), VMOE.moe)
    assert tuned.config.drop_path == 0.3
    assert [block.drop_path1.rate for block in tuned.blocks[1:]] == pytest.approx([0.1, 0.2, 0.3])
    card = read_json(tmp_path / "model.json")
    del card["backbone"]["drop_path"]
    (tmp_path / "model.json").write_text(json.dumps(card))
    assert artifacts.load_model_card(tmp_path).backbone.drop_path == 0
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(load_model(tmp_path)(images).prediction, dropping.eval()(images).prediction)


def test_what_does_not_fit_or_is_absurdly_large_is_refused(tmp_path, model):
    save_model(tmp_path, model)
    colour = IMAGE.model_copy(update={"channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3})
    with pytest.raises(UserError, match="1 channels, the new images have 3"):
        load_adapted_model(tmp_path, colour, VMOE.moe)
    with pytest.raises(UserError, match="do not fit the model"):
        load_adapted_model(tmp_path, IMAGE, None)
    card = json.loads((tmp_path / "model.json").read_text())
    card["backbone"] |= {"width": 2**16, "mlp_ratio": 1000}  # 17 GB in each matrix of an MLP
    write_json_sha256(
        tmp_path / "model.json", {key: card[key] for key in card if key != SHA256_KEY}
    )
    with pytest.raises(UserError, match=r"model\.safetensors: not the weights of this model"):
        load_model(tmp_path)


def test_a_model_whose_outputs_are_no_numbers_does_not_pass():
    job = task()
    with torch.no_grad():
        job.model.head.bias[0] = 3e38
        job.model.head.weight[0] = 3e38
    assert all(weight.isfinite().all() for weight in job.model.parameters())
    with pytest.raises(UserError, match="validation split are not finite"):
        validation_metrics(job.model, job.validation)


def test_damaged_files_are_named(tmp_path, model):
    with pytest.raises(UserError, match="model.json"):
        artifacts.load_model_card(tmp_path)
    save_model(tmp_path, model)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(UserError, match="model.safetensors"):
        load_model(tmp_path)
    card = read_json(tmp_path / "model.json")
    (tmp_path / "model.json").write_text(json.dumps(card | {"unknown": 1}))
    with pytest.raises(UserError, match=r"(?s)model\.json.*unknown"):
        artifacts.load_model_card(tmp_path)


def flip(path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_in_a_checkpoint_stops_the_training(tmp_path):
    stop_training(task(), SETTINGS, tmp_path, 3)
    path = tmp_path / "checkpoint.safetensors"
    flip(path, 8 * (path.stat().st_size - 5))
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: damaged, its content is not w"):
        next(iterate_training(task(), SETTINGS, 0, CPU, Checkpoint(tmp_path)))


def test_another_models_checkpoint_is_refused_in_one_line(tmp_path):
    stop_training(task(), SETTINGS, tmp_path, 3)
    path = tmp_path / "checkpoint.safetensors"
    tensors, about = read_tensors(path)
    write_tensors(path, tensors | {"model.model.head.weight": torch.zeros(3, 5)}, about)
    said = r"not the weights of this model \(.*head\.weight.*; delete it and start the stage again$"
    with pytest.raises(UserError, match=f"^{path}: {said}"):
        next(iterate_training(task(), SETTINGS, 0, CPU, Checkpoint(tmp_path)))


@pytest.mark.parametrize("place", [0.0, 0.6])
def test_a_flipped_bit_in_a_model_is_seen(tmp_path, model, place):
    save_model(tmp_path, model)
    path = tmp_path / "model.safetensors"
    flip(path, int(place * 8 * path.stat().st_size))
    with pytest.raises(UserError, match=r"model\.safetensors: (damaged|no readable weights)"):
        load_model(tmp_path)


def test_a_checkpoint_on_a_full_disk_leaves_the_last_and_the_run_ends_bit_equal(tmp_path, limited):
    whole = task()
    list(iterate_training(whole, SETTINGS, 0, CPU))
    run = iterate_training(task(), SETTINGS, 0, CPU, Checkpoint(tmp_path))
    for _ in range(2):
        next(run)
    last = tmp_path / "checkpoint.safetensors"
    with limited(1000), pytest.raises(FileAccessError) as error:
        list(run)
    assert str(error.value).startswith(f"{last}: file too large")
    assert read_tensors(last)[1]["step"] == "3" and not list(tmp_path.glob(".*"))
    resumed = task(seed=99)
    list(iterate_training(resumed, SETTINGS, 0, CPU, Checkpoint(tmp_path)))
    small.assert_same_weights(resumed, whole)


ROUTER = {"kind": "my_lab.cosine", "k": 1}
WRITTEN = "written with my_lab, version: source tree"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    write_my_lab(tmp_path)
    with allowing_packages(["my_lab"]):
        moe = MoESettings.model_validate({"router": ROUTER, "experts": Mlp(number=4)})
        model = Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE, moe)
        save_model(tmp_path / "model", model)
    yield tmp_path / "model"
    allow_packages((), ())
    forget_package()


def test_a_foreign_model_loads_with_its_package_alone(folder):
    images = torch.rand(2, 1, 8, 8)
    first, second = (load_model(folder, packages=["my_lab"]) for _ in range(2))
    assert torch.equal(first(images).prediction, second(images).prediction)
    assert first.moe.router.model_dump(exclude_defaults=True) == {"k": 1}
    forget_package()
    with pytest.raises(UserError) as refused:
        load_model(folder)
    assert "my_lab" not in sys.modules
    said = f"has my_lab.cosine, of a package that is not listed ({WRITTEN})"
    calls = 'load_model(folder, packages=["my_lab"]), moecore predict --package my_lab'
    assert str(refused.value) == f"{folder}/model.json: {said}; to import it: {calls}"


def test_moecore_predict_is_given_the_package(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    forget_package()
    write_classes(folder.parent / "pictures", 2)
    with pytest.raises(SystemExit, match="has my_lab.cosine, of a package that is not listed"):
        main(["model", "pictures"])
    with pytest.raises(SystemExit, match="^0$"):
        main(["model", "pictures", "--package", "my_lab"])
    assert len(Path("predictions.csv").read_text(encoding="utf-8").splitlines()) > 2


def test_what_is_missing_is_said_with_the_version_that_wrote_it(folder):
    versions = read_json(folder / "model.json")["versions"]
    assert list(versions) == ["moecore", "torch", "my_lab"]
    assert versions["torch"] == torch.__version__
    forget_package()
    (folder.parent / "my_lab/cosine.py").unlink()
    with pytest.raises(UserError, match=f"no such module \\({WRITTEN}\\)$"):
        load_model(folder, packages=["my_lab"])
    forget_package()
    shutil.rmtree(folder.parent / "my_lab")
    with pytest.raises(UserError, match=f"my_lab, which is not installed; .* \\({WRITTEN}\\)$"):
        load_model(folder, packages=["my_lab"])
    with pytest.raises(UserError, match="^packages: found os; allowed: "):
        load_model(folder, packages=["os"])


def test_models_from_before_there_were_versions_load(folder):
    card = read_json(folder / "model.json")
    del card["versions"]
    write_json_sha256(folder / "model.json", card)
    assert load_model(folder, packages=["my_lab"]).moe.router.k == 1
    with pytest.raises(UserError, match="written with my_lab, version: unknown"):
        load_model(folder)
