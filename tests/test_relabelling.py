"""Other numbers for the same experts change no measurement but IMED, for which it matters who is whose neighbour."""

import numpy as np
import pytest
import torch

from moecore.augmentations import PRESETS, measured, two_views
from moecore.evaluation.imed import mean_imed
from moecore.evaluation.predict import predictions
from moecore.sweeps import Sweeps, sweep
from stages.routing import measure
from tests.routed import KINDS, METHODS, relabelled, tiny

ORDER = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
LEARNED = [name for name in KINDS if METHODS[name].router.kind != "hash"]  # a hash has no labels that could be changed
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8)
LABELS = torch.arange(10) % 2


def numbers(values: dict) -> dict:
    """All numbers of nested dicts and lists, by path; each list ``load`` sorted."""
    if isinstance(values, dict):
        return {f"{key}/{path}": number for key, value in values.items() for path, number in numbers(sorted(value) if key == "load" else value).items()}
    if isinstance(values, (list, tuple)):
        return {f"{place}/{path}": number for place, value in enumerate(values) for path, number in numbers(value).items()}
    return {"": values}


def everything(model) -> dict:
    router = model.moe.router
    _, records = predictions(model, IMAGES, 10)
    found = {"layers": [measure(record, getattr(router, "threshold", None), getattr(router, "k", None)) for record in records]}
    found["views"] = measured(model, two_views(IMAGES, PRESETS["affine"], 0), 20)
    return found | sweep(model, IMAGES, LABELS, Sweeps(k=(1, 3), threshold=(0.2, 0.6)), 10)


@pytest.mark.parametrize("name", LEARNED)
def test_no_metric_changes(name):
    ours, theirs = tiny(name), relabelled(name, ORDER)
    (logits, first), (others, second) = predictions(ours, IMAGES, 10), predictions(theirs, IMAGES, 10)
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=1e-4)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.chosen[..., ORDER], b.chosen) and (METHODS[name].router.kind == "soft_slots" or not torch.equal(a.chosen, b.chosen))
    before, after = numbers(everything(ours)), numbers(everything(theirs))
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
        before, after = (tuple(record.probs for record in predictions(model, images, 10)[1]) for images in (IMAGES, moved))
        distances.append(float(mean_imed(before, after)[0].mean()))
    assert abs(distances[0] - distances[1]) > 1e-3
