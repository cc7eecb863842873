"""Other numbers for the same experts change no measurement but IMED, for which it matters who is
whose neighbour.

The map of experts is as square as their number allows.
"""

import numpy as np
import pytest
import torch

from moecore.measure.routing_metrics.augmentations import PRESETS, two_views
from moecore.measure.routing_metrics.imed import mean_imed
from moecore.measure.routing_metrics.layer_use import OnMap, layer_use
from moecore.measure.routing_metrics.matching import augmented_row
from moecore.measure.routing_metrics.sweeps import Sample, Sweeps, sweep
from moecore.nn.experts.base import map_shape
from moecore.nn.predict import predictions
from moecore.tasks.classification import Classification
from tests.routed import KINDS, METHODS, relabelled, tiny

ORDER = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
# a hash has no labels that could be changed
LEARNED = [name for name in KINDS if METHODS[name].router.kind != "hash"]
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8)
LABELS = torch.arange(10) % 2


def numbers(values: dict) -> dict:
    """All numbers of nested dicts and lists, by path; each list ``load`` sorted."""
    if isinstance(values, dict):
        return {
            f"{key}/{path}": number
            for key, value in values.items()
            for path, number in numbers(sorted(value) if key == "load" else value).items()
        }
    if isinstance(values, (list, tuple)):
        return {
            f"{place}/{path}": number
            for place, value in enumerate(values)
            for path, number in numbers(value).items()
        }
    return {"": values}


def everything(model) -> dict:
    router = model.moe.router
    _, records = predictions(model, IMAGES, 10)
    threshold, k = getattr(router, "threshold", None), getattr(router, "k", None)
    sample = Sample(IMAGES, LABELS, Classification(classes=("a", "b")))
    # Where experts lie on the map is what relabelling changes.
    uses = [layer_use(record, threshold, k) for record in records]
    found = {"layers": [use.model_dump(exclude=set(OnMap.model_fields)) for use in uses]}
    views = augmented_row("affine", model, two_views(IMAGES, PRESETS["affine"], 0), 20)
    swept = sweep(model, sample, Sweeps(k=(1, 3), threshold=(0.2, 0.6)), 10)
    return found | {"views": views.model_dump()} | swept.model_dump()


@pytest.mark.parametrize("name", LEARNED)
def test_no_metric_changes(name):
    ours = tiny(name)
    theirs = relabelled(name, ORDER)
    logits, first = predictions(ours, IMAGES, 10)
    others, second = predictions(theirs, IMAGES, 10)
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=1e-4)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.chosen[..., ORDER], b.chosen) and (
            METHODS[name].router.kind == "soft_slots" or not torch.equal(a.chosen, b.chosen)
        )
    before = numbers(everything(ours))
    after = numbers(everything(theirs))
    assert before.keys() == after.keys() and len(before) > 60
    words = {path for path, value in before.items() if isinstance(value, str) or value is None}
    assert all(before[path] == after[path] for path in words)
    assert {path: value for path, value in after.items() if path not in words} == pytest.approx(
        {path: value for path, value in before.items() if path not in words}, abs=2e-4
    )


def test_imed_does():
    moved = two_views(IMAGES, PRESETS["affine"], 0).images[:10]
    distances = []
    for model in (tiny("vmoe"), relabelled("vmoe", ORDER)):
        before, after = (
            tuple(record.probs for record in predictions(model, images, 10)[1])
            for images in (IMAGES, moved)
        )
        distances.append(float(mean_imed(before, after)[0].mean()))
    assert abs(distances[0] - distances[1]) > 1e-3


@pytest.mark.parametrize(
    ("experts", "shape"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (7, (1, 7)),
        (8, (2, 4)),
        (12, (3, 4)),
        (16, (4, 4)),
        (32, (4, 8)),
        (128, (8, 16)),
        (400, (20, 20)),
    ],
)
def test_shapes(experts, shape):
    assert map_shape(experts) == shape
