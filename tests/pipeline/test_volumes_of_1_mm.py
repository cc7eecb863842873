"""Volumes of 1 mm on paper: models are built without memory, and fit where the page says so."""

import re

import pytest
from pydantic import TypeAdapter

from moecore.nn.backbones.base_model import Backbone
from moecore.nn.meta_device import meta_device_context
from moecore.pipeline.multi_gpu_estimate import GpuPeaks, count_model, estimate_step
from moecore.training.method import Method
from tests.project import ROOT, compose_shipped
from tests.volumes import VOLUMES

PAGE = (ROOT / "docs/brain_preprocessing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["sfcn", "ermoe"])
def test_a_step_fits_a_gpu(name):
    study = compose_shipped("ermoe/brain_age", ("one_mm",)).document.data
    method = Method.model_validate(study["methods"][name])
    backbone = method.merge_model_settings(TypeAdapter(Backbone).validate_python(study["model"]))
    image = VOLUMES.model_copy(update={"size": tuple(study["data"]["pretrain"]["size"])})
    with meta_device_context():
        cost = count_model(backbone.build(image, method.moe))
    step = estimate_step(cost, study["pretrain"]["batch"], 1, 1, GpuPeaks())
    row = re.search(rf"^\| `{name}`.*$", PAGE, re.MULTILINE)[0].split("|")
    assert row[2].strip() == f"{cost.parameters:,}"
    assert row[5].strip() == f"{step.memory / 1e9:.1f} GB" and step.memory < 40e9
