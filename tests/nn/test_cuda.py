"""The GPU computes what the CPU computes; skipped where there is no GPU."""

from functools import partial

import pytest
import torch

from moecore.core.sources import ROOT
from moecore.data.loader import OnDevice, OnDisk
from moecore.nn.backbones.vit import Vit
from moecore.study.document import load
from moecore.training.guide import build_guide, standing_alone
from moecore.training.job import Ahead, Job, training_batch
from moecore.training.loop import fit, train_step
from moecore.training.method import Method
from moecore.training.optimizer import build_optimizer
from tests.training.small import CPU, IMAGE, SETTINGS, task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
METHODS = {
    name: Method.model_validate(entry)
    for name, entry in load(str(ROOT / "params.yaml")).data["methods"].items()
}
CUDA = CPU._replace(device="cuda")


def made(method: Method) -> Job:
    torch.manual_seed(0)
    if method.guided:
        guide = build_guide(Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE), method, 4)
    else:
        guide = None
    return task(method, guide=guide)


@pytest.mark.parametrize("name", METHODS)
def test_prediction_routing_and_gradient_agree_in_fp32(name):
    torch.set_float32_matmul_precision("highest")
    found = []
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for device in ("cpu", "cuda"):
        given = made(METHODS[name])
        model = standing_alone(given.model, given.guide).to(device).eval()
        output = model(images.to(device))
        output.prediction.square().sum().backward()
        gradients = [
            parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append(
            (
                output.prediction.detach().cpu(),
                [record.probs.detach().cpu() for record in output.routing],
                gradients,
            )
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["vmoe", "prc", "ermoe", "tgr", "moge"])
def test_a_step_in_bf16_never_waits_for_the_device(name):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(
            "grouped products in bf16 need compute capability 9.0; older devices loop over experts"
        )
    given = made(METHODS[name])
    split = given.train._replace(images=given.train.images.cuda(), labels=given.train.labels.cuda())
    given = given._replace(
        model=given.model.cuda(), guide=given.guide and given.guide.cuda(), train=split
    )
    settings = SETTINGS.model_copy(update={"views": type(SETTINGS.views)(shift=1)})
    optimizer = build_optimizer(given.model, settings)
    for step in range(3):
        batch = training_batch(given, settings, 0, step)
        if step == 2:  # the first steps may load libraries
            torch.cuda.set_sync_debug_mode("error")
        try:
            train_step(given, settings, optimizer, batch, 1e-3, torch.bfloat16, 0.5)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_batches_made_on_a_stream_of_their_own_are_the_same():
    job = task()
    labels = job.train.labels.cuda()
    for train in (OnDevice(job.train.images.cuda(), labels), OnDisk(numpy_of(job), labels)):
        held = job._replace(train=train)
        make = partial(training_batch, held, SETTINGS, 3)
        ahead = Ahead(make, range(20))
        for step in range(20):
            ours = ahead(step)
            torch.rand(2000, 2000, device="cuda").inverse()  # something to overlap with
            theirs = training_batch(job, SETTINGS, 3, step)
            assert torch.equal(ours.images.cpu(), theirs.images)
            assert torch.equal(ours.labels.cpu(), theirs.labels)


def numpy_of(job: Job):
    """Its images as they lie on disk."""
    return job.train.images.numpy()


def test_training_on_the_gpu_learns():
    found = list(fit(made(METHODS["vmoe"]), SETTINGS, 0, CUDA))
    assert found[-1].values["validation_accuracy"] == 1.0
