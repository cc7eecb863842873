"""Methods that differ through the same calls: train, save, load, predict. Predictions: any batch
size, bytes or pixels; modes and random state stay as they were.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore.core.config import replace_and_validate
from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.data.views.views import AffineRanges, ViewSettings
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.backbones.swin import Swin, SwinSettings
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
from tests.training.small import CPU, IMAGE, SETTINGS, images
from tests.volumes import VOLUMES, ball

SHIFTED = SETTINGS.model_copy(update={"epochs": 1, "views": type(SETTINGS.views)(shift=1)})
TURNED = ViewSettings(flip=True, affine=AffineRanges(degrees=10, translate=0.05, scale=(0.9, 1.1)))
ON_VOLUMES = Training(epochs=1, batch=8, learning_rate=1e-3, log_every=1, views=TURNED)


def balls(count: int, seed: int) -> Split:
    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


def swin(kind: str, **changes) -> SwinSettings:
    small = Swin(patch=1, width=16, depths=(2, 2), heads=(2, 4), window=4)
    return replace_and_validate("model", small, {"kind": kind, **changes}, Backbone)


SWINS = ("swin", "swin_moe", "swin_v2")
BACKBONES = {kind: (swin(kind), swin(kind, depths=(1, 2), width=8)) for kind in SWINS} | {
    "vit": (Vit(patch=4, width=16, depth=4, heads=2), Vit(patch=4, width=32, depth=2, heads=2)),
    "vit3d": (Vit3d(patch=4, width=32, depth=4, heads=2, mlp_ratio=2, stem="pooled", pool=2),) * 2,
}
CASES = [("vit", name) for name in ("dense", "hash_moe", *REPRESENTATIVE)]
CASES += [("vit3d", name) for name in REPRESENTATIVE]
CASES += list(zip(SWINS * 2, REPRESENTATIVE, strict=True))


def trained(kind: str, method: Method):
    config, teacher = BACKBONES[kind]
    image, settings, splits = IMAGE, SHIFTED, (images(50), images(20, 1))
    if kind == "vit3d":
        image, settings, splits = VOLUMES, ON_VOLUMES, (balls(16, 0), balls(6, 100))
    torch.manual_seed(0)
    guide = build_guide(teacher.build(image), method, config.stages) if method.guided else None
    model = config.build(image, method.moe)
    loaded = (load_split_where_it_fits(split, "cpu") for split in splits)
    objective = Objective(method.losses, distillation=method.distillation)
    job = TrainingJob(model, *loaded, objective, guide, method.views)
    values = [metrics.values for metrics in iterate_training(job, settings, 0, CPU)]
    return attach_required_guide(model, guide), values


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_method_trains_is_saved_and_predicts_the_same_in_any_batch(tmp_path, kind, name):
    model, values = trained(kind, METHODS[name])
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in values)
    if kind == "vit3d":
        assert {"train_mae", "validation_mae", "validation_loss", "task"} <= set(values[-1])
        assert "train_accuracy" not in values[-1] and 0 < values[-1]["validation_mae"] < 60
    save_model(tmp_path, model)
    shape = (7, 1, *model.image.shape)
    pixels = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    expected, records = predict_in_batches(model, pixels, batch=7)
    layouts = model.layouts
    shapes = [(7, layout.special + math.prod(layout.grid), 8) for layout in layouts]
    assert [record.probs.shape for record in records] == shapes
    assert len(records) == (2 if METHODS[name].moe else 0)
    if kind in SWINS:
        assert layouts == (TokenLayout(0, (8, 8), (8, 8)), TokenLayout(0, (4, 4), (8, 8)))
    for batch in (1, 3, 7):
        logits, again = predict_in_batches(load_model(tmp_path), pixels, batch=batch)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(again, records, strict=True):
            assert torch.equal(ours.chosen, theirs.chosen)
    # Attacks need the gradient: no part may cut the graph between pixels and loss.
    pixels = pixels[:3].requires_grad_()
    model.eval()(pixels).prediction.logsumexp(-1).sum().backward()
    assert pixels.grad.abs().sum() > 0


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
        records = tuple(self._record(gate(tokens)) for gate in self.gates)
        return ModelOutput(self.head(tokens.flatten(1)), records)

    def _record(self, logits: Tensor) -> RoutingRecord:
        probs = logits.softmax(-1)
        chosen = probs == probs.amax(-1, keepdim=True)
        return RoutingRecord(logits, probs, chosen.float(), chosen, probs * chosen)


IMAGES = np.random.default_rng(0).integers(0, 256, (11, 1, 4, 4), dtype=np.uint8)


def test_leaves_modes_and_random_state_as_they_were():
    model = Small(noisy=True).train()
    model.frozen.eval()
    state = torch.get_rng_state()
    logits, _ = predict_in_batches(model, IMAGES, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.dropout.training and not model.frozen.training
    assert not logits.requires_grad and torch.equal(logits, predict_in_batches(model, IMAGES, 4)[0])


def test_is_fp32_under_autocast_of_bytes_and_pixels_and_keeps_no_records_when_told():
    pixels = torch.from_numpy(IMAGES).float() / 255
    with torch.autocast("cpu", torch.bfloat16):
        logits, records = predict_in_batches(Small(), pixels, 4, routing=False)
    assert logits.dtype == torch.float32 and records == ()
    assert torch.equal(logits, predict_in_batches(Small(), IMAGES, 4)[0])
