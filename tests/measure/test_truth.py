"""Experts against the truth: by hand, against scikit-learn, at chance and at the ceiling."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score, mutual_info_score

from moecore.core.files import UserError, to_jsonable
from moecore.data.corruptions import SIGMAS, add_noise, standard_normal_noise
from moecore.data.prepared import Prepared, Split
from moecore.measure import truth
from moecore.measure.base import MeasuredModel
from moecore.measure.routing_metrics.epochs import (
    EpochWatch,
    expert_purity,
    expert_truth_tables,
    purity_by_epoch,
    purity_by_image,
)
from moecore.measure.truth import Truth, truth_layer
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.told import Told
from moecore.tasks.classification import Classification
from moecore.training.outcome import RoutingOverTraining
from tests.measure.subjects import compute_without_cache
from tests.nn.backbones.test_language_model import WORDS, text

IMAGE = ImageSpec(
    channels=1, size=8, mean=(0.5,), std=(0.3,), task=Classification(classes=("a", "b")), truth=3
)
EXPERTS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2]])
KINDS = torch.tensor([[1, 1], [2, 2], [2, 0], [3, 1]])


THREE = Mlp(number=3)


def subject(router, seed: int = 0, image: ImageSpec = IMAGE, experts: Mlp = THREE) -> MeasuredModel:
    """A fresh model, and 40 images of noise with four patches of drawn kinds."""
    task = image.task
    torch.manual_seed(seed)
    moe = MoESettings(router=router, experts=experts, blocks="all")
    pooling = "mean" if task.cells > 1 else "class"
    model = Vit(patch=4, width=16, depth=2, heads=2, pooling=pooling).build(image, moe).eval()
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    kinds = random.integers(1, 4, (40, 1, 2, 2), dtype=np.uint8).repeat(4, 2).repeat(4, 3)
    labels = np.arange(40 * task.cells) % task.outputs
    labels = labels.reshape(task.storage_format(40)[0])
    split = Split(np.concatenate([pixels, kinds], axis=1), labels)
    card = {"name": "noise", "task": task.model_dump()}
    return MeasuredModel(model, Prepared(card, split, split, split))


def text_subject(router) -> MeasuredModel:
    """A fresh language model, and 40 blocks of drawn words and kinds, each read with one before."""
    torch.manual_seed(0)
    spec = text(4, 1).model_copy(update={"truth": 3})
    moe = MoESettings(router=router, experts=Mlp(number=3), blocks="all")
    model = LanguageModel(width=8, depth=2, heads=2, span=4).build(spec, moe).eval()
    random = np.random.default_rng(0)
    words, kinds = random.integers(WORDS, size=(40, 2, 4)), random.integers(1, 4, (40, 2, 4))
    split = Split(np.concatenate([words, kinds], axis=1).astype(np.int32), words[:, 1])
    card = {"name": "words", "task": spec.task.model_dump()}
    return MeasuredModel(model, Prepared(card, split, split, split))


def test_by_hand():
    # Expert 0 saw kind 1 twice and 2 once, expert 1 kind 2 twice (an unknown token is left out). Of
    # seven tokens 2, 2 and 1 are of their expert's most frequent kind. In a second table both
    # experts saw the first kind most: 3 + 3 of 10; by kind it would be 3 + 2.
    assert expert_purity(np.array([[3, 2], [3, 2]])) == 0.6
    layer = truth_layer(EXPERTS, KINDS, 3, 3)
    assert layer.counts == ((2, 1, 0), (0, 2, 0), (1, 0, 1))
    by_image = purity_by_image(expert_truth_tables(EXPERTS.numpy(), KINDS.numpy(), 3, 3))
    assert by_image.mean() == pytest.approx(5 / 7)
    assert layer.values["purity"].value == pytest.approx(5 / 7)
    assert layer.values["matched_to_truth"].value == pytest.approx(5 / 7)
    known = KINDS.numpy() > 0
    pair = KINDS.numpy()[known], EXPERTS.numpy()[known]
    assert layer.values["mutual_information"].value == pytest.approx(mutual_info_score(*pair))
    adjusted = layer.values["adjusted_mutual_information"].value
    assert adjusted == pytest.approx(adjusted_mutual_info_score(*pair))
    with pytest.raises(UserError, match="found 1 images .*; allowed: 4 and more"):
        truth_layer(EXPERTS[:1], KINDS[:1], 3, 3)
    # experts are listed by their match
    experts, kinds = 2 - torch.tensor([[0, 1, 2, 2]]), torch.tensor([[1, 2, 3, 3]])
    layer = truth_layer(experts.repeat(5, 1), kinds.repeat(5, 1), 4, 3)
    assert layer.counts == ((5, 0, 0), (0, 5, 0), (0, 0, 10), (0, 0, 0))
    assert layer.values["matched_to_truth"].value == 1


def test_purity_by_epoch():
    """Kinds 1 1 2 2 0. First by chance (layers: 2 + 0 and 1 + 1 of 4), then one layer is pure."""
    kinds = np.array([[1, 1, 2, 2, 0]])
    first = [[[0, 0, 0, 0, 1], [0, 1, 0, 1, 0]], [[1, 1, 0, 0, 0], [0, 1, 0, 1, 1]]]
    epochs = [np.array([epoch], np.int16) for epoch in first]
    assert purity_by_epoch(epochs, kinds, 2, 2) == [0.5, 0.75]
    unrouted = [np.array([[[-1, 0, 1, 1, 1]]], np.int16)]
    assert purity_by_epoch(unrouted, kinds, 2, 2) == [1.0]
    (nothing,) = purity_by_epoch([np.full((1, 1, 5), -1, np.int16)], kinds, 2, 2)
    assert math.isnan(nothing), "a router may let no token through"
    settling = to_jsonable(RoutingOverTraining(purity=(0.5, nothing)))
    assert RoutingOverTraining.model_validate(settling).purity == (0.5, None)


def test_a_training_keeps_the_purity_of_its_epochs(tmp_path):
    """Of the same images, untrained: what the measurement finds."""
    measured = subject(NoisyTopK(k=1))
    watch = EpochWatch(tmp_path, measured.model, measured.data, (), epochs=2, seed=0)
    watch.look(1)
    watch.look(2)
    purity = Truth().collect_result(measured, compute_without_cache).find("purity").value
    settling = watch.collect_routing()
    assert settling.purity == pytest.approx([purity] * 2) and settling.saturation == (1, 1)


@pytest.mark.parametrize("made", [subject, text_subject])
def test_told_reaches_a_purity_of_one_and_a_shuffled_truth_chance(made):
    result = Truth().collect_result(made(Told()), compute_without_cache)
    for name in ("purity", "adjusted_mutual_information", "matched_to_truth"):
        assert list(result.curve(name, "layer").values()) == pytest.approx([1, 1])
    assert result.find("mutual_information_p", layer=1).value == pytest.approx(1 / 201)
    assert max(result.curve("purity_chance", "layer").values()) < 0.6
    noise, attack = (result.curve("changed_purity", kind) for kind in ("noise", "attack"))
    is_image = made is subject  # words have no pixels
    assert list(noise) == ([0, *SIGMAS] if is_image else [])
    assert list(attack) == ([0, 2, 4, 8] if is_image else [])
    assert set(noise.values()) <= {1}, "what is seen changes, the truth not"
    drawn = torch.from_numpy(np.random.default_rng(2).permutation(40))
    kinds = torch.from_numpy(np.random.default_rng(3).integers(1, 4, (40, 4)))
    shuffled = truth_layer(kinds - 1, kinds[drawn], 3, 3).values
    chance = shuffled["purity_chance"].value
    assert shuffled["purity"].value == pytest.approx(chance, abs=0.06)
    assert shuffled["mutual_information_p"].value > 0.05


def test_the_null_covers(monkeypatch):
    """Of unrelated experts and kinds p is uniform: at most a few of 60 are below 0.05."""
    monkeypatch.setattr(truth, "RESAMPLES", 2)
    random = np.random.default_rng(4)
    pairs = torch.from_numpy(random.integers(3, size=(60, 2, 20, 4)))
    layers = [truth_layer(experts, kinds + 1, 3, 3) for experts, kinds in pairs]
    found = [layer.values["mutual_information_p"].value for layer in layers]
    assert np.mean(np.array(found) < 0.05) < 0.15 and np.mean(found) == pytest.approx(0.5, abs=0.12)


def test_purity_of_changed_images():
    """Clean it is the layers' mean, which noise and attack change; by hand for one noise."""
    measured = subject(NoisyTopK(k=1))
    result = Truth().collect_result(measured, compute_without_cache)
    clean = result.find("changed_purity", noise=0.0)
    assert clean.value == pytest.approx(result.find("purity").value)
    assert clean.low <= clean.value <= clean.high
    changed = result.curve("changed_purity", "noise")
    images = measured.data.test.images
    directions = standard_normal_noise(np.arange(40), (2, 8, 8), 0)
    pixels = add_noise(images, directions, 0.2)
    pixels[:, 1] = torch.from_numpy(images[:, 1]) / 255
    kinds = images[:, 1, ::4, ::4].reshape(40, 4)
    purities = [
        sum(
            max((kinds[chosen == expert] == kind).sum() for kind in (1, 2, 3))
            for expert in range(3)
        )
        / 160
        for record in measured.model(pixels).routing
        for chosen in [record.probs.argmax(-1)[:, 1:].numpy()]
    ]
    assert changed[0.2] == pytest.approx(np.mean(purities))
    assert len(set(changed.values())) > 1


def test_it_is_measured_of_routers_on_data_whose_truth_is_known():
    assert Truth.applies(subject(NoisyTopK(k=1))) is None
    dense = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE)
    assert "no routers" in Truth.applies(subject(Told())._replace(model=dense))
    unknown = Vit(patch=4, width=16, depth=2, heads=2).build(IMAGE.model_copy(update={"truth": 0}))
    assert "no truth of tokens" in Truth.applies(subject(Told())._replace(model=unknown))
