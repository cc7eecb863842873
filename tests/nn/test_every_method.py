"""Methods that differ through the same calls: train, save, load, predict. Predictions: any batch
size, bytes or pixels; modes and random state stay as they were.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.data.views.views import AffineRanges, ViewSettings
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.predict import predict_in_batches
from moecore.training.artifacts import load_model, save_model
from moecore.training.guide import attach_required_guide, build_guide
from moecore.training.job import Objective, TrainingJob
from moecore.training.loop import iterate_training
from moecore.training.method import Method
from moecore.training.settings import Training
from tests.methods import METHODS, REPRESENTATIVE
from tests.training.small import CPU, IMAGE, SETTINGS, task
from tests.volumes import VOLUMES, ball

SHIFTED = SETTINGS.model_copy(update={"epochs": 1, "views": type(SETTINGS.views)(shift=1)})


def trained(method: Method):
    torch.manual_seed(0)
    if method.guided:
        guide = build_guide(Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE), method, (4,))
    else:
        guide = None
    made = task(method, guide=guide)
    values = [metrics.values for metrics in iterate_training(made, SHIFTED, 0, CPU)]
    return attach_required_guide(made.model, made.guide), values


@pytest.mark.parametrize("name", ["dense", "hash_moe", *REPRESENTATIVE])
def test_it_trains_is_saved_and_predicts_the_same_in_any_batch(tmp_path, name):
    model, values = trained(METHODS[name])
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in values)
    save_model(tmp_path, model)
    images = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loaded = load_model(tmp_path)
    expected, records = predict_in_batches(model, images, batch=7)
    assert len(records) == (2 if METHODS[name].moe else 0)
    for batch in (1, 3, 7):
        logits, again = predict_in_batches(loaded, images, batch=batch)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(again, records, strict=True):
            assert torch.equal(ours.chosen, theirs.chosen)
    # Attacks need the gradient: no part may cut the graph between pixels and loss.
    pixels = images[:3].requires_grad_()
    model.eval()(pixels).prediction.logsumexp(-1).sum().backward()
    assert pixels.grad.abs().sum() > 0


ON_VOLUMES = METHODS
VIEWS = ViewSettings(flip=True, affine=AffineRanges(degrees=10, translate=0.05, scale=(0.9, 1.1)))
SETTINGS = Training(epochs=1, batch=8, learning_rate=1e-3, log_every=1, views=VIEWS)
MODEL = Vit3d(patch=4, width=32, depth=4, heads=2, mlp_ratio=2, stem="pooled", pool=2)


def split(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


VOLUME_TRAIN = split(16, 0)
VOLUME_VALIDATION = split(6, 100)


def trained_on_volumes(method: Method):
    torch.manual_seed(0)
    if method.guided:
        guide = build_guide(MODEL.build(VOLUMES), method, (4,))
    else:
        guide = None
    model = MODEL.build(VOLUMES, method.moe)
    task = TrainingJob(
        model,
        load_split_where_it_fits(VOLUME_TRAIN, "cpu"),
        load_split_where_it_fits(VOLUME_VALIDATION, "cpu"),
        Objective(method.losses),
        guide,
        method.views,
    )
    values = [metrics.values for metrics in iterate_training(task, SETTINGS, 0, CPU)]
    return attach_required_guide(model, guide), values


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_it_trains_on_volumes_and_predicts_years(tmp_path, name):
    model, values = trained_on_volumes(ON_VOLUMES[name])
    assert all(torch.isfinite(torch.tensor(list(found.values()))).all() for found in values)
    assert (
        set(values[-1]) >= {"train_mae", "validation_mae", "validation_loss", "task"}
        and "train_accuracy" not in values[-1]
    )
    assert 0 < values[-1]["validation_mae"] < 60
    save_model(tmp_path, model)
    expected, records = predict_in_batches(model, VOLUME_VALIDATION.images, batch=6)
    ages, again = predict_in_batches(load_model(tmp_path), VOLUME_VALIDATION.images, batch=4)
    assert ages.shape == (6, 1)
    torch.testing.assert_close(ages, expected, atol=1e-4, rtol=1e-4)
    assert len(records) == (2 if ON_VOLUMES[name].moe else 0)
    for record, other in zip(records, again, strict=True):
        assert record.probs.shape == (6, 65, 8) and torch.equal(record.chosen, other.chosen)


class Small(nn.Module):
    """Two routed layers over four tokens; dropout and noise in training mode only."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 3)
        self.gates = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.noisy = noisy

    def forward(self, images: Tensor) -> ModelOutput:
        assert images.dtype == torch.float32 and images.max() <= 1
        tokens = self.dropout(images.flatten(1)).reshape(len(images), 4, 4)
        if self.noisy:
            torch.rand(3)
        return ModelOutput(
            self.head(tokens.flatten(1)), tuple(self._record(gate(tokens)) for gate in self.gates)
        )

    def _record(self, logits: Tensor) -> RoutingRecord:
        probs = logits.softmax(-1)
        chosen = probs == probs.amax(-1, keepdim=True)
        return RoutingRecord(logits, probs, chosen.float(), chosen, probs * chosen)


IMAGES = np.random.default_rng(0).integers(0, 256, (11, 1, 4, 4), dtype=np.uint8)


def test_bytes_and_pixels_in_zero_to_one_are_the_same():
    assert torch.equal(
        predict_in_batches(Small(), IMAGES, 4)[0],
        predict_in_batches(Small(), torch.from_numpy(IMAGES).float() / 255, 4)[0],
    )


def test_leaves_modes_and_random_state_as_they_were():
    model = Small(noisy=True).train()
    state = None
    model.frozen.eval()
    state = torch.get_rng_state()
    logits, _ = predict_in_batches(model, IMAGES, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.dropout.training and not model.frozen.training
    assert not logits.requires_grad and torch.equal(logits, predict_in_batches(model, IMAGES, 4)[0])


def test_is_fp32_under_autocast_and_keeps_no_records_when_told():
    with torch.autocast("cpu", torch.bfloat16):
        logits, records = predict_in_batches(Small(), IMAGES, 4, routing=False)
    assert (
        logits.dtype == torch.float32
        and records == ()
        and torch.equal(logits, predict_in_batches(Small(), IMAGES, 4)[0])
    )
