"""What a training would need and take on more GPUs, on paper: nothing is trained.

Models are built on torch's meta device. Memory: 16 bytes per parameter (fp32 weights, gradients and
Adam's two moments) over ``shard`` ranks, the whole copy of the weights that every rank keeps for
validation, and what a forward pass in fp32 keeps for the backward pass. Traffic: the gradients'
ring (2 (W − 1)/W · 4 bytes per parameter); with experts apart theirs goes around the ranks that
hold the same ones only, and the rows of tokens travel to the experts and back, in bf16, forward and
backward. Time: a lower limit, 3 forward passes of FLOPs at the given peak, the optimizer's 28 bytes
per parameter at the memory's bandwidth, the part of the gradients' traffic that the backward pass
does not hide, and that of the rows. A teacher is not counted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from moecore.core.files import UserError
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.nn.backbones.base_model import BackboneModel, parameter_counts
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.meta_device import meta_device_context
from moecore.report.tables.number_format import NumberFormat
from moecore.study.data_rules import load_previews
from moecore.study.model_rules import image_spec
from moecore.study.study import Study
from moecore.training.meter import LiveBytes

GPU_COUNTS = (1, 8, 64)
GPUS_PER_MACHINE = 8  # GPUs that share fast links


class GpuPeaks(NamedTuple):
    """Peaks of one GPU; the defaults are an H100's data sheet, half of its dense bf16 peak."""

    flops: float = 495e12  # per second
    memory: float = 3.35e12  # bytes per second
    links: float = 450e9  # bytes per second between the GPUs of a machine
    network: float = 50e9  # bytes per second of each GPU between machines


class ModelCost(NamedTuple):
    """One method's model, counted."""

    parameters: int
    active: int
    flops: float  # forward, an image
    kept: float  # bytes that a forward pass of one image keeps
    experts: int = 0  # parameters of experts
    sent: float = 0.0  # numbers that one image's tokens bring to experts, over all layers


class RankStepCost(NamedTuple):
    """One rank's part of a step."""

    ranks: int
    images: int
    memory: float  # bytes
    traffic: float  # bytes
    seconds: float


def count_model(model: BackboneModel, views: int = 1) -> ModelCost:
    """A model on the meta device, with so many views of each image."""
    image = model.image
    one, two = (torch.empty(n, image.stored_channels, *image.shape, device="meta") for n in (1, 2))
    counts = parameter_counts(model)
    kept = _kept_bytes(model, two) - _kept_bytes(model, one)
    flops = whole_and_routing_flops(model, one).whole
    size = counts["parameters"], counts["active_parameters"]
    layers = [layer for layer in model.modules() if isinstance(layer, MoEFeedForward)]
    experts = sum(one.numel() for layer in layers for one in layer.experts.parameters())
    sent = _routed_numbers(model, layers, one)
    return ModelCost(*size, views * flops, views * kept, experts, views * sent)


def _routed_numbers(
    model: BackboneModel, layers: Sequence[MoEFeedForward], image: torch.Tensor
) -> int:
    """Numbers in the rows that the experts of all layers get of an image."""
    sizes = []
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _, given: sizes.append(given[0].values.numel())
        )
        for layer in layers
    ]
    model(image)
    for hook in hooks:
        hook.remove()
    return sum(sizes)


def _kept_bytes(model: BackboneModel, images: torch.Tensor) -> int:
    """Bytes that a forward pass in training holds at its end."""
    model.train()
    with LiveBytes() as live:
        output = model(images)
        held_bytes = live.now
    del output
    return held_bytes


def estimate_step(
    model: ModelCost, batch: int, ranks: int, shard: int, peaks: GpuPeaks, expert_parallel: int = 1
) -> RankStepCost:
    """A step of ``batch`` images on so many ranks."""
    images = batch // ranks
    shard = min(shard, ranks)
    expert_ranks = min(expert_parallel, ranks)
    whole_weights = 4 * model.parameters if ranks > 1 else 0
    memory = 16 * model.parameters / shard + whole_weights + images * model.kept
    gradients = _ring_bytes(model.parameters - model.experts, ranks)
    gradients += _ring_bytes(model.experts / expert_ranks, ranks // expert_ranks)
    rows = 4 * 2 * images * model.sent * (expert_ranks - 1) / expert_ranks
    forward = images * model.flops / peaks.flops
    speed = peaks.links if ranks <= GPUS_PER_MACHINE else peaks.network
    open_traffic = max(0.0, gradients / speed - 2 * forward)
    open_traffic += rows / (peaks.links if expert_ranks <= GPUS_PER_MACHINE else peaks.network)
    optimizer = 28 * model.parameters / shard / peaks.memory
    seconds = 3 * forward + optimizer + open_traffic
    return RankStepCost(ranks, images, memory, gradients + rows, seconds)


def _ring_bytes(parameters: float, ranks: int) -> float:
    """Bytes that a rank sends to sum fp32 gradients over so many."""
    return 2 * (ranks - 1) / ranks * 4 * parameters


def multi_gpu_estimate_table(study: Study, peaks: GpuPeaks) -> Iterator[str]:
    """Lines of a Markdown table, a method each. Raises UserError where a model cannot be built."""
    if study.model is None or study.pretrain is None:
        raise UserError("plan --scale: found no model or no pretrain; both are needed")
    preview = load_previews(study)["pretrain"]
    names = "method", "parameters", "active", "ranks", "images a rank", "memory", "traffic"
    yield f"| {' | '.join(names)} | step, limit |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name in study.run.methods:
        method = study.methods[name]
        with meta_device_context():
            model = method.merge_model_settings(study.model).build(image_spec(preview), method.moe)
            model_counts = count_model(model, method.views)
        for ranks in GPU_COUNTS:
            batch = study.pretrain.batch
            if batch % ranks:
                yield f"| {name} | | | {ranks} | batch {batch} does not divide | | | |"
                continue
            settings = study.pretrain
            one = estimate_step(
                model_counts, batch, ranks, settings.shard, peaks, settings.expert_parallel
            )
            numbers = (
                f"{model_counts.parameters:,}",
                f"{model_counts.active:,}",
                ranks,
                one.images,
            )
            amounts = map(NumberFormat("bytes").value, (one.memory, one.traffic))
            cells = [name, *map(str, numbers), *amounts, f"{1000 * one.seconds:.3g} ms"]
            yield f"| {' | '.join(cells)} |"
