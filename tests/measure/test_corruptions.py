from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore import RoutingRecord, Target, UserError, predict_in_batches
from moecore.attacks import Fgsm, Pgd
from moecore.backbones import SingleLayer, Vit
from moecore.data.corruptions import CORRUPTIONS, corrupt_images
from moecore.data.prepared import Prepared, Split, evenly_spaced_indices
from moecore.measure import corruptions
from moecore.measure import transfer_attacks as transfer
from moecore.measure.base import read_result
from moecore.measure.corruptions import Corruptions, mean_corruption_error
from moecore.measure.routing_metrics.layer_metrics import compute_choice_iou_drop
from moecore.measure.stability import count_jumps, label_probability
from moecore.measure.values import Found, Values
from moecore.stages import transfer as stage
from moecore.statistics.comparisons import compute_newcombe_interval, count_paired_hits
from moecore.statistics.intervals import Interval, bootstrap_mean
from moecore.tasks.classification import Classification
from tests.attacks.models import CLASSES, SETS, YEARS, Blind, Smooth, vit
from tests.measure.subjects import built, compute_without_cache, in_run, top_k_mlps

SETTINGS = Corruptions(images=40, severities=(5, 1), names=("gaussian_noise", "contrast", "fog"))
VIT = Vit(patch=6, width=16, depth=2, heads=2)
MODELS = {"vit": (VIT, top_k_mlps(k=2, blocks=(1,))), "dense": (SingleLayer(), None)}
DENSE = {"snow": {1: 0.2, 5: 0.6}, "fog": {1: 0.1, 5: 0.1}}
OURS = {"snow": {1: 0.1, 5: 0.3}, "fog": {1: 0.3, 5: 0.1}}
PGD = Pgd(steps=5)
TRANSFER = transfer.Transfer(attack=PGD, epsilon=0.1, images=40)
RESULT = "artifacts/measured/transfer/pretrain/0.json"


@pytest.fixture(scope="module")
def models(data):
    """Untrained, but their classes differ from image to image."""
    return {name: built(*parts, data, 3) for name, parts in MODELS.items()}


@pytest.mark.parametrize("name", list(MODELS))
def test_errors_are_those_of_the_images_at_their_places_in_the_split(data, models, results, name):
    """Their means are over severities, then over corruptions."""
    test, where = data.test, evenly_spaced_indices(60, 40)
    found = results[name]
    expected = [(corruption, severity) for corruption in SETTINGS.names for severity in (1, 5)]
    for corruption, severity in expected:
        whole = corrupt_images(test.images, corruption, severity, 0, range(60))
        predicted = predict_in_batches(models[name], whole[where], 40)[0].argmax(1).numpy()
        error = found.find("error", corruption=corruption, severity=severity).value
        assert error == (predicted != test.labels[where]).sum() / 40
    means = found.curve("error", "corruption")
    errors = {name: np.mean([*row.values()]) for name, row in corruptions.errors_of(found).items()}
    assert len(means) == 3 and means == pytest.approx(errors)
    mean = found.find("corruption_error")
    assert mean.value == np.mean([*errors.values()]) and mean.low < mean.value < mean.high


def test_images_of_one_picture_belong_together():
    """Of 20 pictures one is always wrong, in 30 rows: limits of 20 images, not of 600."""
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    out = Values(corruptions.METRICS, Classification(classes=("a", "b")), compute_without_cache)
    settings = Corruptions(severities=(1, 2))
    right = lambda pixels: torch.arange(len(pixels)) != 3
    wrong = corruptions.put_corruption_errors(right, images, np.arange(20), settings, out)
    assert len(out.values) == 30 and wrong.tolist() == [float(i == 3) for i in range(20)]
    assert list(corruptions.errors_of(out.found())) == list(CORRUPTIONS)
    mean = bootstrap_mean(wrong)
    assert mean.value == pytest.approx(0.05) and mean.high - mean.low >= 0.1


def two_classes(*first: float) -> torch.Tensor:
    """One ramp (1, S + 1, 2) from the first class's probability."""
    p = torch.tensor(first, dtype=torch.float64)
    return torch.stack([p, 1 - p], dim=-1)[None]


def test_the_true_class_is_each_images_own():
    probs = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]] * 2, dtype=torch.float64)
    assert label_probability(probs, torch.tensor([1, 2])).tolist() == [[0.2, 0.2], [0.1, 0.7]]
    assert count_jumps(probs, torch.tensor([1, 2]), 0.1).tolist() == [0, 1]
    # a jump is more than the threshold
    probs = two_classes(0.5, 0.625, 0.75, 1.0)  # exact in binary: steps 0.125, 0.125 and 0.25
    assert count_jumps(probs, torch.tensor([0]), 0.125).tolist() == [1]
    assert count_jumps(probs, torch.tensor([0]), 0.1).tolist() == [3]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.floats(0.01, 0.9))
def test_bounds(points, threshold):
    jumps = int(count_jumps(two_classes(*points), torch.tensor([0]), threshold))
    assert jumps == (np.abs(np.diff(points)) > threshold).sum()


def test_change_of_each_image():
    before = torch.tensor([[[1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]])
    after = torch.tensor([[[1, 0, 1], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]])
    # image 0: {0,1} and {0,2} share 1 of 3, the other token stays: 1 − (1/3 + 1)/2; image 1:
    # nothing shared, and two empty sets
    pair = [[RoutingRecord(*[one.float()] * 3, one.bool(), one.float())] for one in (before, after)]
    (found,) = compute_choice_iou_drop(*pair)
    assert found.tolist() == pytest.approx([1 / 3, 1 / 2])


def test_it_is_the_mean_of_ratios_of_sums():
    # snow 0.4 / 0.8 = 0.5, fog 0.4 / 0.2 = 2; a mean of ratios at each severity would be
    # (0.5 + 0.5 + 3 + 1) / 4
    assert mean_corruption_error(OURS, DENSE) == pytest.approx(1.25)
    assert mean_corruption_error(DENSE, OURS) == pytest.approx((2 + 0.5) / 2)
    with pytest.raises(UserError, match="no error under fog"):
        mean_corruption_error(OURS, {**DENSE, "fog": {1: 0.0, 5: 0.0}})
    some = {**DENSE, "fog": {1: 0.0, 5: 0.2}}  # one severity without error is no matter
    assert mean_corruption_error(OURS, some) == pytest.approx(1.25)


def data_of(model: torch.nn.Module, task=CLASSES) -> Prepared:
    """40 images with the classes that ``model`` gives them, so that it is right on all."""
    images = np.random.default_rng(2).integers(0, 256, (40, 1, 4, 4)).astype(np.uint8)
    with torch.no_grad():
        labels = model(torch.from_numpy(images) / 255).prediction.argmax(dim=1).numpy()
    split = Split(images, labels)
    return Prepared({"task": task.model_dump(mode="json")}, split, split, split)


def test_every_cell_by_hand():
    plain = Smooth()
    models = {"plain": plain, "other": Smooth(seed=1)}
    data = data_of(plain)
    found = transfer.measure(models, data, TRANSFER, compute_without_cache)
    cells = [tuple(cell.at.values()) for cell in found.all("transferred")]
    assert cells == list(product(models, models))
    labels = torch.from_numpy(data.test.labels)
    aim = (CLASSES, data.test.images, labels, 16)
    targets = {name: Target(model, *aim) for name, model in models.items()}
    for cell in found.all("transferred"):
        scorer = targets[cell.at["scored_by"]]
        left = scorer.worse_scores(targets[cell.at["made_on"]].attacked(PGD, 0.1))
        direct = scorer.worse_scores(scorer.attacked(PGD, 0.1))
        assert cell.interval == CLASSES.interval(left)
        gap = pytest.approx(float(left.double().mean() - direct.double().mean()))
        assert found.find("transferred_difference", **cell.at).value == gap
    assert found.facts | {"methods": ["plain", "other"], "attack": "pgd-5"} == found.facts


def test_a_hidden_gradient_shows():
    models = {"plain": Smooth(), "blind": Blind(Smooth())}
    said = transfer.measure(models, data_of(Smooth()), TRANSFER, compute_without_cache)
    assert said.facts["reading"]["holds"] is False
    told = "1 of 2 transferred attacks do more harm than the direct one: from plain on blind"
    assert said.facts["reading"]["text"] == told
    models["blind"] = Smooth(seed=1)
    honest = transfer.measure(models, data_of(Smooth()), TRANSFER, compute_without_cache)
    reading = honest.facts["reading"]
    assert reading["holds"] is True and reading["text"].startswith("0 of 2")
    said = transfer.measure({"plain": Smooth()}, data_of(Smooth()), TRANSFER, compute_without_cache)
    (difference,) = said.all("transferred_difference")
    assert difference.value == 0 and len(said.all("transferred")) == 1
    reading = said.facts["reading"]
    assert reading["holds"] is None and "no second model" in reading["text"]


def put_pairs(left: dict[tuple[str, str], torch.Tensor]) -> Found:
    out = Values(transfer.METRICS, CLASSES, compute_without_cache)
    transfer.put_transfer(out, left)
    return out.found()


def test_more_pairs_need_wider_intervals():
    # Of four images the transferred attack breaks three that the direct one leaves.
    one, none = torch.tensor([0, 0, 0, 1]).bool(), torch.ones(4).bool()
    two = put_pairs({("a", "a"): none, ("b", "b"): none, ("a", "b"): one, ("b", "a"): one})
    expected = compute_newcombe_interval(count_paired_hits(one.numpy(), none.numpy()), 1 - 0.05 / 2)
    pair = {"made_on": "a", "scored_by": "b"}
    difference = two.interval("transferred_difference", **pair)
    assert difference == expected and difference.value == -0.75
    alone = put_pairs({("b", "b"): none, ("a", "b"): one})
    assert alone.interval("transferred_difference", **pair).high < difference.high


def test_what_is_beyond_chance():
    assert transfer.is_worse_beyond_chance(CLASSES, Interval(-0.3, -0.5, -0.1))
    assert transfer.is_worse_beyond_chance(YEARS, Interval(2.0, 1.0, 3.0))
    for limits in ((-0.3, -0.7, 0.1), (0.3, 0.1, 0.5)):
        assert not transfer.is_worse_beyond_chance(CLASSES, Interval(*limits))
    for limits in ((-2.0, -3.0, -1.0), (0.0, 0.0, 0.0)):
        assert not transfer.is_worse_beyond_chance(YEARS, Interval(*limits))
    assert transfer.check_no_stronger_transfer(CLASSES, Found(values=())).holds is None


def test_a_model_without_routing_lends_no_attack_on_it():
    models = {"moe": vit({"kind": "noisy_top_k", "k": 1}), "dense": vit(None)}
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8)).astype(np.uint8)
    split = Split(images, np.arange(6) % 4)
    data = Prepared({"task": CLASSES.model_dump(mode="json")}, split, split, split)
    settings = TRANSFER.model_copy(update={"attack": Fgsm(objective="routing_change")})
    found = transfer.measure(models, data, settings, compute_without_cache)
    skipped = found.facts["skipped"]
    assert list(skipped) == ["dense"] and "no MoE layer" in skipped["dense"]
    assert [one.at["scored_by"] for one in found.all("transferred")] == ["moe", "dense"]
    (direct,) = found.all("transferred_difference")
    assert direct.value == 0 and direct.at["scored_by"] == "moe"
    assert found.facts["reading"]["holds"] is None


def test_an_attack_that_makes_no_sense_is_refused():
    settings = transfer.Transfer(attack={"kind": "pgd", "objective": "dlr"})
    with pytest.raises(UserError, match=r"transfer.attack: .* needs one label .*; allowed: fgsm"):
        data = data_of(Smooth(), SETS)
        transfer.measure({"plain": Smooth()}, data, settings, compute_without_cache)


def run_stage(folder, patch) -> Found:
    settings = {"images": 20, "epsilon": 0.05, "attack": {"kind": "pgd", "steps": 2}}
    in_run(patch, folder, run={"methods": ["vit", "dense"], "seeds": [0]}, transfer=settings)
    stage.transfer("pretrain", 0)
    return read_result(folder / RESULT, Found, "transfer")


def test_a_killed_stage_makes_only_what_is_left(run, monkeypatch, capsys):
    folder, _ = run
    whole = run_stage(folder, monkeypatch)
    assert whole.facts["methods"] == ["vit", "dense"] and len(whole.all("transferred")) == 4
    assert "transferred attacks do more harm" in capsys.readouterr().err
    made = []
    attacked, worst = Target.attacked, Target.worse_scores

    def counted(*given):
        made.append(given)
        return attacked(*given)

    def stopped(target, images):
        if len(made) == 2:
            raise KeyboardInterrupt
        return worst(target, images)

    monkeypatch.setattr(Target, "attacked", counted)
    monkeypatch.setattr(Target, "worse_scores", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_stage(folder, monkeypatch)
    monkeypatch.setattr(Target, "worse_scores", worst)
    assert run_stage(folder, monkeypatch) == whole
    assert len(made) == 3, "the first model's pairs were kept"
