"""Every method of params.yaml through the same calls: train, save, load, predict, measure."""

import pytest
import torch

from moecore.core.sources import ROOT
from moecore.nn.backbones.vit import Vit
from moecore.nn.predict import predictions
from moecore.study.document import load
from moecore.training.artifacts import load_model, save_model
from moecore.training.guide import build_guide, standing_alone
from moecore.training.loop import fit
from moecore.training.method import Method
from tests.training.small import CPU, IMAGE, SETTINGS, task

METHODS = {
    name: Method.model_validate(entry)
    for name, entry in load(str(ROOT / "params.yaml")).data["methods"].items()
}
SHIFTED = SETTINGS.model_copy(update={"epochs": 1, "views": type(SETTINGS.views)(shift=1)})
ASKED_FOR = {
    "dense",
    "vmoe",
    "vmoe_z",
    "prc",
    "prc_js",
    "ermoe",
    "ermoe_plain_weights",
    "ermoe_learned_logits",
    "ermoe_no_orthogonality",
    "tgr",
    "tgr_joint",
    "tgr_first_half",
    "tgr_distillation_only",
    "teacher_routed",
    "stable_moe",
    "hash_moe",
    "expert_choice",
    "soft_moe",
    "moge",
    "moge_average",
    "prc_moge",
    "tgr_prc",
}


def trained(method: Method):
    torch.manual_seed(0)
    if method.guided:
        guide = build_guide(Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE), method, 4)
    else:
        guide = None
    made = task(method, guide=guide)
    values = [metrics.values for metrics in fit(made, SHIFTED, 0, CPU)]
    return standing_alone(made.model, made.guide), values


def test_params_yaml_has_every_method_of_the_papers():
    assert ASKED_FOR <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_is_saved_and_predicts_the_same_in_any_batch(tmp_path, name):
    model, values = trained(METHODS[name])
    assert all(torch.isfinite(torch.tensor(list(found.values()))).all() for found in values)
    save_model(tmp_path, model)
    images = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loaded = load_model(tmp_path)
    expected, records = predictions(model, images, batch=7)
    for batch in (1, 3, 7):
        logits, again = predictions(loaded, images, batch=batch)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(again, records, strict=True):
            assert torch.equal(ours.chosen, theirs.chosen)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.moe])
def test_its_records_mean_what_they_say(name):
    model, _ = trained(METHODS[name])
    _, records = predictions(
        model, torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)), batch=5
    )
    assert len(records) == 2
    for record in records:
        assert (
            record.probs.shape == (5, 5, 8)
            and record.chosen.dtype == torch.bool
            and record.combine.dtype == torch.float32
        )
        torch.testing.assert_close(record.probs.sum(dim=-1), torch.ones(5, 5))
        assert (record.probs >= 0).all() and (record.load >= 0).all() and (record.load <= 1).all()
        assert (
            not (record.combine != 0)[~record.chosen].any() and torch.isfinite(record.logits).all()
        )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.moe])
def test_the_image_reaches_the_prediction_with_a_gradient(name):
    """Attacks need it: no part may cut the graph between pixels and loss."""
    model, _ = trained(METHODS[name])
    images = torch.rand(3, 1, 8, 8, requires_grad=True)
    model.eval()(images).prediction.logsumexp(-1).sum().backward()
    assert images.grad.abs().sum() > 0
