"""The GPU computes what the CPU computes; skipped where there is no GPU."""

from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch

from moecore.attacks import apgd, pgd
from moecore.attacks.base import Ball
from moecore.attacks.gradient import ModelGradient, frozen_parameters
from moecore.data.loader import LoadedSplit
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import ChosenKernels, grouped_linear
from moecore.nn.layers.block import softmax_attention
from moecore.pipeline import parallel
from moecore.training import loop, monitor, runtime, settings
from moecore.training.job import BatchPrefetcher, TrainingJob, training_batch
from moecore.training.meter import Meter
from moecore.training.method import Method
from tests.methods import METHODS, REPRESENTATIVE
from tests.training.small import COMPETITION, CPU, SETTINGS, made, task

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = CPU._replace(device="cuda")
MLP = {"kind": "mlp", "number": 4}
NOISY = {"kind": "noisy_top_k", "k": 2}
BALANCED = {  # routers and experts that no method of params.yaml has, balanced without a loss
    "loss_free": {"router": NOISY | {"score": "sigmoid", "balance": {"kind": "loss_free"}}},
    "quantile": {"router": NOISY | {"balance": {"kind": "quantile"}}},
    "sinkhorn": {"router": NOISY | {"balance": {"kind": "sinkhorn"}}},
    "groups": {"router": NOISY | {"groups": {"number": 2, "kept": 1}}},
    "cosine": {"router": {"kind": "cosine", "k": 2}},
    "top_p": {"router": {"kind": "top_p"}, "regularizers": [{"kind": "entropy"}]},
    "relu": {"router": {"kind": "relu", "k": 2}, "regularizers": [{"kind": "adaptive_l1"}]},
    "dynamic": {"router": {"kind": "dynamic"}, "regularizers": [{"kind": "diversity_simplicity"}]},
    "competition": {"router": COMPETITION},
    "merged": {"router": {"kind": "merged"}},
    "depth": {"router": {"kind": "depth", "share": 0.5}},
    "zero_computation": {
        "router": NOISY | {"residual": True},
        "experts": MLP | {"zero_computation": {}},
    },
    "shared_swiglu": {"router": NOISY, "experts": MLP | {"shared": 1, "activation": "swiglu"}},
}
NAMES = (*REPRESENTATIVE, *BALANCED)


def method_of(name: str) -> Method:
    if name in BALANCED:
        return Method.model_validate({"experts": MLP} | BALANCED[name])
    return METHODS[name]


@pytest.mark.parametrize("name", NAMES)
def test_prediction_routing_and_gradient_agree_in_fp32(name):
    torch.set_float32_matmul_precision("highest")
    found = []
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for device in ("cpu", "cuda"):
        model = made(method_of(name)).complete_model.to(device).eval()
        output = model(images.to(device))
        output.prediction.square().sum().backward()
        gradients = (parameter.grad for parameter in model.parameters())
        values = [output.prediction, *(record.probs for record in output.routing), *gradients]
        found.append([value.detach().cpu() for value in values if value is not None])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@contextmanager
def no_waits():
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_cuda(method: Method) -> TrainingJob:
    given = made(method)
    guide = given.guide and given.guide.cuda()
    splits = {
        name: split._replace(images=split.images.cuda(), labels=split.labels.cuda())
        for name, split in (("train", given.train), ("validation", given.validation))
    }
    return given._replace(model=given.model.cuda(), guide=guide, **splits)


SHIFTED = SETTINGS.model_copy(update={"views": type(SETTINGS.views)(shift=1)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name, dtype):
    given = on_cuda(method_of(name))
    optimizer = settings.build_optimizer(given.model, SHIFTED)
    meter = Meter(torch.device("cuda"), monitor=monitor.MonitorSettings(every=1))
    for step in range(3):
        batch = training_batch(given, SHIFTED, 0, step)
        # the first steps may load libraries
        with no_waits() if step == 2 else nullcontext():
            said = loop.train_step(given, SHIFTED, optimizer, batch, 1e-3, dtype, 0.5)
            meter.add(step, len(batch.images), *said)
    assert len(meter.average_over_ranks("")[1]) == len(said[-1].routing)


@pytest.mark.parametrize(
    "name, dtype, error",
    [
        *((name, torch.float32, 1e-3) for name in (*NAMES, "vmoe", "teacher_routed")),
        *((name, torch.bfloat16, 0.05) for name in ("vmoe", "shared_swiglu")),
    ],
)
def test_a_compiled_step_never_waits_and_learns_the_same(name, dtype, error):
    given = on_cuda(method_of(name))
    optimizer = settings.build_optimizer(given.model, SHIFTED)
    torch.compiler.reset()  # a process compiles one model, not as many as are tested here
    blocks = runtime.CompiledBlocks([given.model, given.guide], "required", 9)
    start = deepcopy(given.model.state_dict())  # with what balances without a loss have learned
    batch = training_batch(given, SHIFTED, 0, 0)
    arguments = (given, SHIFTED, optimizer, batch, 0.0, dtype, 0.5)
    found = []
    for _ in range(3):  # as it is, compiling, compiled
        torch.manual_seed(0)
        given.model.load_state_dict(start)
        with blocks.using_compiled_blocks():
            loop.train_step(*arguments)
        gradients = [parameter.grad for parameter in given.model.parameters()]
        found.append([gradient for gradient in gradients if gradient is not None])
    for ours, theirs in zip(found[2], found[0], strict=True):
        assert (ours - theirs).norm() <= error * theirs.norm() + 1e-5
    with no_waits(), blocks.using_compiled_blocks():
        loop.train_step(*arguments)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_and_attacks_in_fp32_never_wait_inside(name):
    given = on_cuda(method_of(name))
    model = given.complete_model.cuda().eval()
    images = torch.rand(6, 1, 8, 8, device="cuda")
    labels = torch.arange(6, device="cuda") % 2
    at = ModelGradient(model, lambda output: given.task.attack_loss(output.prediction, labels))

    def attacked() -> None:
        with torch.no_grad():
            model(images)
        with frozen_parameters(model):
            pgd.Pgd(steps=3).perturb_images(at, Ball(images, 0.03), None)
            apgd.apgd_ascent(at, Ball(images, 0.03), images, 4)

    attacked()  # may load libraries
    with no_waits():
        attacked()
    at.check_finite()


@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("width, outputs", [(256, 128), (100, 36)])  # grouped_mm takes the first
def test_grouped_products_are_exact_and_their_gradients_too(dtype, error, width, outputs):
    torch.set_float32_matmul_precision("highest")
    sizes = torch.tensor([700, 0, 90, 1300])
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias, towards = (
        torch.randn(shape, generator=draw).to(dtype)
        for shape in ((2090, width), (4, width, outputs), (4, outputs), (2090, outputs))
    )
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        leaves = [each.to(device, kind).requires_grad_() for each in (rows, weight, bias)]
        values = grouped_linear(*leaves, sizes.cumsum(0).int().to(device))
        found.append((values, *torch.autograd.grad(values, leaves, towards.to(values))))
    for ours, exact in zip(*found, strict=True):
        assert (ours.cpu().double() - exact).norm() <= error * exact.norm()


def test_more_experts_than_grouped_mm_takes():
    """As SMEAR has: an expert of its own for each image."""
    rows, weight = torch.randn(2048, 16).bfloat16(), torch.randn(1024, 16, 8).bfloat16()
    ends = torch.arange(2, 2049, 2, dtype=torch.int32)
    found = grouped_linear(rows.cuda(), weight.cuda(), None, ends.cuda()).cpu()
    exact = (rows.double().unflatten(0, (1024, 2)) @ weight.double()).flatten(0, 1)
    assert (found.double() - exact).norm() <= 8e-3 * exact.norm()


@pytest.mark.parametrize("number", [8, 256, 400, 2**15])
def test_the_plan_is_the_one_of_the_cpu_without_padding(number):
    experts = torch.randint(0, number, (4, 300, 2))
    weights = torch.rand(4, 300, 2)
    plan = SparsePlan.build(experts.cuda(), weights.cuda(), None, number)
    order = experts.flatten().sort(stable=True).indices
    assert torch.equal(plan.order.cpu(), order) and torch.equal(plan.tokens.cpu(), order // 2)
    assert torch.equal(plan.rows.cpu(), order.argsort())
    ends = torch.bincount(experts.flatten(), minlength=number).cumsum(0).int()
    assert torch.equal(plan.offsets.cpu(), ends)


def test_batches_made_on_a_stream_of_their_own_are_the_same():
    job = task()
    labels = job.train.labels.cuda()
    for images in (job.train.images.cuda(), job.train.images.numpy()):
        held = job._replace(train=LoadedSplit(images, labels))
        make = partial(training_batch, held, SETTINGS, 3)
        ahead = BatchPrefetcher(make, range(20))
        for step in range(20):
            ours = ahead(step)
            torch.rand(2000, 2000, device="cuda").inverse()  # something to overlap with
            theirs = training_batch(job, SETTINGS, 3, step)
            assert torch.equal(ours.images.cpu(), theirs.images)
            assert torch.equal(ours.labels.cpu(), theirs.labels)


@pytest.mark.parametrize("changes", [{}, {"graph": "required"}], ids=["eager", "graph"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_training_on_the_gpu_learns(kernels, changes, monkeypatch):
    if kernels == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv(runtime.KERNELS_ENV, kernels)
    monkeypatch.setattr(ChosenKernels, "compute", None)  # and as it was after the test
    assert runtime.choose_and_set_kernels("cuda") == kernels
    asked = CUDA._replace(kernels=kernels, **changes)
    found = list(loop.iterate_training(on_cuda(METHODS["vmoe"]), SETTINGS, 0, asked))
    assert found[-1].values["validation_accuracy"] == 1.0


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("name", ["vmoe", "shared_swiglu"])
def test_experts_in_triton_compute_what_torch_does(name, dtype, error, monkeypatch):
    pytest.importorskip("triton")
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(ChosenKernels, "compute", None)
    model, images = made(method_of(name)).model.cuda().eval(), torch.rand(6, 1, 8, 8).cuda()
    found = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv(runtime.KERNELS_ENV, kernels)
        runtime.choose_and_set_kernels("cuda")
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            output = model(images).prediction
        leaves = list(model.parameters())
        gradients = torch.autograd.grad(output.sum(), leaves, allow_unused=True)  # noise's are
        found.append([output, *(gradient for gradient in gradients if gradient is not None)])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).norm() <= error * exact.norm() + 1e-6


def test_two_trainings_share_a_card():
    free = parallel.read_gpu_name_and_memory()[1]
    assert parallel.choose_jobs(2, 1, free, {}) == 2 and parallel.read_job_rates("none") == {}
    runs = [
        loop.iterate_training(on_cuda(METHODS["vmoe"]), SETTINGS, seed, CUDA) for seed in (0, 1)
    ]
    for points in zip(*runs, strict=True):  # in turn
        assert all(point.values["loss"] < 10 for point in points)


@pytest.mark.parametrize("length", [1, 16, 77])
def test_fused_causal_attention_is_the_plain_one(length):
    query, key, value = torch.randn(3, 2, 4, length, 16)
    plain = softmax_attention(query, key, value, causal=True)
    fused = softmax_attention(query.cuda(), key.cuda(), value.cuda(), causal=True).cpu()
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
