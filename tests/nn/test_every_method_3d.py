"""Every method of the papers on volumes: trained on ages, saved, loaded, measured; parts do not
know the dimension.
"""

import pytest
import torch

from moecore.core.sources import ROOT
from moecore.data.loader import to_device
from moecore.data.prepared import Split
from moecore.data.views.views import Affine, ViewSettings
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.predict import predictions
from moecore.study.document import load
from moecore.training.artifacts import load_model, save_model
from moecore.training.guide import build_guide, standing_alone
from moecore.training.job import Job
from moecore.training.loop import fit
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.settings import Training
from tests.training.small import CPU
from tests.volumes import VOLUMES, ball

METHODS = {
    name: Method.model_validate(entry)
    for name, entry in load(str(ROOT / "pipelines/all_methods/params.yaml")).data["methods"].items()
}
VIEWS = ViewSettings(flip=True, affine=Affine(degrees=10, translate=0.05, scale=(0.9, 1.1)))
SETTINGS = Training(epochs=1, batch=8, learning_rate=1e-3, log_every=1, views=VIEWS)
MODEL = Vit3d(patch=4, width=32, depth=4, heads=2, mlp_ratio=2, stem="pooled", pool=2)


def split(count: int, seed: int) -> Split:
    import numpy as np

    ages = np.linspace(20, 90, count, dtype=np.float32)
    return Split(np.stack([ball(age, seed + i)[0] for i, age in enumerate(ages)]), ages)


TRAIN = split(16, 0)
VALIDATION = split(6, 100)


def trained(method: Method):
    torch.manual_seed(0)
    if method.guided:
        guide = build_guide(MODEL.build(VOLUMES), method, 4)
    else:
        guide = None
    model = MODEL.build(VOLUMES, method.moe)
    task = Job(
        model,
        to_device(TRAIN, "cpu"),
        to_device(VALIDATION, "cpu"),
        Objective(method.losses),
        guide,
        method.views,
    )
    values = [metrics.values for metrics in fit(task, SETTINGS, 0, CPU)]
    return standing_alone(model, guide), values


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_on_volumes_and_predicts_years(tmp_path, name):
    model, values = trained(METHODS[name])
    assert all(torch.isfinite(torch.tensor(list(found.values()))).all() for found in values)
    assert (
        set(values[-1]) >= {"train_mae", "validation_mae", "validation_loss", "task"}
        and "train_accuracy" not in values[-1]
    )
    assert 0 < values[-1]["validation_mae"] < 60
    save_model(tmp_path, model)
    expected, records = predictions(model, VALIDATION.images, batch=6)
    ages, again = predictions(load_model(tmp_path), VALIDATION.images, batch=4)
    assert ages.shape == (6, 1)
    torch.testing.assert_close(ages, expected, atol=1e-4, rtol=1e-4)
    assert len(records) == (2 if METHODS[name].moe else 0)
    for record, other in zip(records, again, strict=True):
        assert record.probs.shape == (6, 65, 8) and torch.equal(record.chosen, other.chosen)


@pytest.mark.parametrize("name", ["prc", "prc_js"])
def test_pairs_of_cubes_carry_a_loss(name):
    """Through 4×4 affines: with small moves most cubes have a partner, so the loss of pairs is not
    0.
    """
    _, values = trained(METHODS[name])
    kind = METHODS[name].regularizers[0].kind
    assert values[0][kind] > 0
