"""Volumes of 1 mm on paper: models are built without memory, and fit where the page says so."""

import re

import pytest
import torch
from pydantic import TypeAdapter

from moecore.nn.backbones.base_model import Backbone, BackboneModel, parameter_counts
from moecore.nn.meta_device import meta_device_context
from moecore.training.meter import LiveBytes
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
        model = backbone.build(image, method.moe).train()
        kept = kept_bytes(model, 2) - kept_bytes(model, 1)  # for the backward pass, per volume
    parameters = parameter_counts(model)["parameters"]
    memory = 16 * parameters + study["pretrain"]["batch"] * kept  # fp32 weights, gradients, Adam's
    row = re.search(rf"^\| `{name}`.*$", PAGE, re.MULTILINE)[0].split("|")
    assert row[2].strip() == f"{parameters:,}"
    assert row[4].strip() == f"{kept / 1e9:.2f} GB"
    assert row[5].strip() == f"{memory / 1e9:.1f} GB" and memory < 40e9


def kept_bytes(model: BackboneModel, number: int) -> int:
    """Bytes that a forward pass of ``number`` volumes holds at its end."""
    image = model.image
    volumes = torch.empty(number, image.stored_channels, *image.shape, device="meta")
    with LiveBytes() as live:
        output = model(volumes)
        held_bytes = live.now
    del output
    return held_bytes
