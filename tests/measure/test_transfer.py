"""The transfer of attacks: a matrix of methods, what it says of hidden gradients, and its stage."""

import numpy as np
import pytest
import torch

from moecore.attacks.fgsm import Fgsm
from moecore.attacks.pgd import Pgd
from moecore.attacks.target import Target
from moecore.core.files import UserError
from moecore.data.prepared import Prepared, Split
from moecore.measure import transfer as module
from moecore.measure.base import at_once, read_result
from moecore.measure.transfer import Result, Transfer, beyond_chance, cells_of, measure, reading
from moecore.statistics.intervals import Estimate
from moecore.statistics.paired import paired_difference, pairs
from stages import transfer as stage
from tests.attacks.models import CLASSES, SETS, YEARS, Blind, Smooth, vit
from tests.measure.subjects import in_run, write_digits, write_models

PGD = Pgd(steps=5)
SETTINGS = Transfer(attack=PGD, epsilon=0.1, images=40, batch=16)
RESULT = "artifacts/measured/transfer/pretrain/0.json"


def data_of(model: torch.nn.Module, task=CLASSES) -> Prepared:
    """40 images with the classes that ``model`` gives them, so that it is right on all."""
    images = np.random.default_rng(2).integers(0, 256, (40, 1, 4, 4)).astype(np.uint8)
    with torch.no_grad():
        labels = model(torch.from_numpy(images) / 255).prediction.argmax(dim=1).numpy()
    split = Split(images, labels)
    return Prepared({"task": task.model_dump(mode="json")}, split, split, split)


def hits(*right: int) -> torch.Tensor:
    return torch.tensor(right).bool()


def test_every_cell_by_hand():
    plain = Smooth()
    models = {"plain": plain, "other": Smooth(seed=1)}
    data = data_of(plain)
    found = measure(models, data, SETTINGS, at_once)
    assert [(cell.made_on, cell.scored_by) for cell in found.cells] == [
        ("plain", "plain"),
        ("plain", "other"),
        ("other", "plain"),
        ("other", "other"),
    ]
    labels = torch.from_numpy(data.test.labels)
    targets = {
        name: Target(model, CLASSES, data.test.images, labels, 16) for name, model in models.items()
    }
    for cell in found.cells:
        attacked = targets[cell.made_on].attacked(PGD, 0.1)
        left = targets[cell.scored_by].worst(attacked)
        direct = targets[cell.scored_by].worst(targets[cell.scored_by].attacked(PGD, 0.1))
        assert cell.score == Estimate.of(CLASSES.interval(left))
        assert cell.difference.value == pytest.approx(
            float(left.double().mean() - direct.double().mean())
        )
    assert (found.methods, found.attack, found.images) == (("plain", "other"), "pgd-5", 40)


def test_a_hidden_gradient_shows():
    models = {"plain": Smooth(), "blind": Blind(Smooth())}
    found = measure(models, data_of(Smooth()), SETTINGS, at_once)
    assert found.reading.holds is False
    assert found.reading.text == (
        "1 of 2 transferred attacks do more harm than the direct one: from plain on blind"
    )
    honest = measure(models | {"blind": Smooth(seed=1)}, data_of(Smooth()), SETTINGS, at_once)
    assert honest.reading.holds is True and honest.reading.text.startswith("0 of 2")


def test_one_model_alone_says_nothing():
    found = measure({"plain": Smooth()}, data_of(Smooth()), SETTINGS, at_once)
    assert len(found.cells) == 1 and found.cells[0].difference.value == 0
    assert found.reading.holds is None and "no second model" in found.reading.text


def test_more_pairs_need_wider_intervals():
    # Of four images the transferred attack breaks three that the direct one leaves.
    one, none = hits(0, 0, 0, 1), hits(1, 1, 1, 1)
    two = cells_of(CLASSES, {("a", "a"): none, ("b", "b"): none, ("a", "b"): one, ("b", "a"): one})
    level = 1 - 0.05 / 2
    expected = paired_difference(pairs(one.numpy(), none.numpy()), level)
    assert two[2].difference == Estimate.of(expected) and two[2].difference.value == -0.75
    alone = cells_of(CLASSES, {("b", "b"): none, ("a", "b"): one})
    assert alone[1].difference.high < two[2].difference.high


def test_what_is_beyond_chance():
    assert beyond_chance(CLASSES, Estimate(value=-0.3, low=-0.5, high=-0.1))
    assert not beyond_chance(CLASSES, Estimate(value=-0.3, low=-0.7, high=0.1))
    assert not beyond_chance(CLASSES, Estimate(value=0.3, low=0.1, high=0.5))
    assert beyond_chance(YEARS, Estimate(value=2.0, low=1.0, high=3.0))
    assert not beyond_chance(YEARS, Estimate(value=-2.0, low=-3.0, high=-1.0))
    assert not beyond_chance(YEARS, Estimate(value=0.0, low=0.0, high=0.0))
    assert reading(CLASSES, ()).holds is None


def test_a_model_without_routing_lends_no_attack_on_it():
    models = {"moe": vit({"kind": "noisy_top_k", "k": 1}), "dense": vit(None)}
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8)).astype(np.uint8)
    split = Split(images, np.arange(6) % 4)
    data = Prepared({"task": CLASSES.model_dump(mode="json")}, split, split, split)
    settings = SETTINGS.model_copy(update={"attack": Fgsm(objective="routing_change")})
    found = measure(models, data, settings, at_once)
    assert list(found.skipped) == ["dense"] and "no MoE layer" in found.skipped["dense"]
    (direct, foreign) = found.cells
    assert direct.difference.value == 0 and foreign.scored_by == "dense"
    assert foreign.difference is None and found.reading.holds is None


def test_an_attack_that_makes_no_sense_is_refused():
    settings = Transfer(attack={"kind": "square"})
    with pytest.raises(
        UserError, match=r"transfer.attack: square needs one label .*; allowed: fgsm"
    ):
        measure({"plain": Smooth()}, data_of(Smooth(), SETS), settings, at_once)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transfer")
    write_models(folder, write_digits(folder))
    return folder


def run_stage(folder, patch, methods=("vit", "dense")) -> Result:
    settings = {"images": 20, "epsilon": 0.05, "attack": {"kind": "pgd", "steps": 2}}
    in_run(patch, folder, run={"methods": list(methods), "seeds": [0]}, transfer=settings)
    stage.transfer("pretrain", 0)
    return read_result(folder / RESULT, Result, "transfer")


def test_a_killed_stage_makes_only_what_is_left(run, monkeypatch, capsys):
    whole = run_stage(run, monkeypatch)
    assert whole.methods == ("vit", "dense") and len(whole.cells) == 4
    assert "transferred attacks do more harm" in capsys.readouterr().err
    made = []
    attacked = Target.attacked
    worst = Target.worst

    def counted(*given):
        made.append(given)
        return attacked(*given)

    def stopped(target, images):
        if len(made) == 2:
            raise KeyboardInterrupt
        return worst(target, images)

    monkeypatch.setattr(Target, "attacked", counted)
    monkeypatch.setattr(Target, "worst", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_stage(run, monkeypatch)
    monkeypatch.setattr(Target, "worst", worst)
    assert run_stage(run, monkeypatch) == whole
    assert len(made) == 3, "the first model's pairs were kept"


def test_a_missing_model_is_named(run, monkeypatch):
    with pytest.raises(UserError, match="artifacts/pretrain/absent/0: does not exist"):
        run_stage(run, monkeypatch, ("vit", "absent"))


def test_pairs_are_parts(monkeypatch):
    names = []

    def noted(name, compute):
        names.append(name)
        return compute()

    measure({"a": Smooth(), "b": Smooth(seed=1)}, data_of(Smooth()), SETTINGS, noted)
    assert names == ["a on a", "a on b", "b on a", "b on b"] and module.Transfer is Transfer
