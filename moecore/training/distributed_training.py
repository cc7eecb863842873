"""Train over several ranks, with replicated or sharded parameters (data, expert parallelism).

The ranks form a mesh (replicate, shard). Shard 1: every rank holds all parameters, gradients are
averaged (data parallelism). Replicate 1: parameters are sharded over all ranks (FSDP2). With
``expert_parallel`` tokens are sent to the ranks that hold their experts. The job's own model,
complete on every rank, is updated between steps, and is validated and saved as with one rank.
Its state is saved as named tensors: this rank's part, full or sharded.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moecore.core.files import UserError
from moecore.core.ranks import rank_and_size
from moecore.nn.backbones.language_model import LanguageBlock
from moecore.nn.kernels.expert_parallel import ShardedExperts
from moecore.nn.layers.block import Block
from moecore.nn.layers.moe import MoEFeedForward
from moecore.training.job import TrainingJob
from moecore.training.settings import Training


def is_sharded_tensor(value: Tensor) -> bool:
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and mesh.size(mesh.ndim - 1) > 1


def local_shard(values: Tensor) -> Tensor:
    return getattr(values, "to_local", lambda: values)()


def to_full_tensor(values: Tensor) -> Tensor:
    """Gather a sharded tensor's full value on every rank; return other tensors unchanged."""
    return getattr(values, "full_tensor", lambda: values)()


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Shard rank 0's full tensor like ``target``; return it as it is if ``target`` is unsharded."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    return distribute_tensor(value.to(target.device), mesh, getattr(target, "placements", None))


def flatten_training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights as ``model.<name>`` and optimizer state as ``optimizer.<number>.<field>``."""
    state = optimizer.state_dict()["state"]
    return {f"model.{name}": value for name, value in model.state_dict().items()} | {
        f"optimizer.{index}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
    }


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of the optimizer, in the order of its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state = optimizer.state_dict()
    parameters = optimizer_parameters(optimizer)
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".")
            if field == "step":
                value = value.reshape(())
            elif not is_sharded_tensor(value):
                value = shard_like(value, parameters[int(index)].detach())
            state["state"].setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(state)


def read_sharded_checkpoint(folder: Path, target_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Read a sharded checkpoint; return name → tensor, sharded like ``target_of(name)``."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensors = {}
    reader = HuggingFaceStorageReader(str(folder))
    for name, value in reader.read_metadata().state_dict_metadata.items():
        target = at_least_1d(target_of(name))
        assert isinstance(value, TensorStorageMetadata)  # the files hold nothing else
        if value.size == target.shape:
            tensors[name] = torch.zeros_like(target)
        else:
            tensors[name] = torch.zeros(value.size, dtype=value.properties.dtype)
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    return tensors


def at_least_1d(value: Tensor) -> Tensor:
    """Return the tensor with at least one axis, which reading slices of a file requires."""
    return value if value.ndim else value.reshape(1)


MAX_SHARDS_KEPT_GATHERED = 8  # more are gathered again for the backward pass


class ShardedReplica:
    """One rank's copy of the job's model, with parameters sharded over ranks."""

    def __init__(self, job: TrainingJob, settings: Training, device: str) -> None:
        """Shard a copy of ``job.model``, which is equal on all ranks."""
        from torch.distributed.fsdp import fully_shard

        self.full_model = job.model
        check_batch_divides_over_ranks(job.model, settings.batch)
        check_expert_parallel(job.model, settings)
        size = rank_and_size().size
        if size % settings.shard:
            divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
            raise UserError(f"shard is {settings.shard}, with {size} ranks; allowed: {divisors}")
        mesh = init_device_mesh(
            torch.device(device).type,
            (size // settings.shard, settings.shard),
            mesh_dim_names=("replicate", "shard"),
        )
        model = copy.deepcopy(job.model)
        expert_parameters = shard_experts(model, mesh) if settings.expert_parallel > 1 else set()
        for module in model.modules():
            if isinstance(module, Block | LanguageBlock):
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=settings.shard > MAX_SHARDS_KEPT_GATHERED,
                    ignored_params=expert_parameters,
                )
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=expert_parameters)
        random_parts: list[Any] = [part for part in model.modules() if hasattr(part, "batch_views")]
        for module in random_parts:  # each draws numbers for the batch of all ranks
            module.batch_views = job.views
        self.job = job._replace(model=model)

    def gather(self) -> None:
        """Copy the gathered shards into the full model, on every rank."""
        state = self.job.model.state_dict()
        self.full_model.load_state_dict({key: to_full_tensor(part) for key, part in state.items()})

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy the first rank's full model into the shards of all ranks."""
        state = self.full_model.state_dict()
        for name, value in self.job.model.state_dict().items():
            value.copy_(shard_like(state[name], value))

    def reduce_and_clip(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        """Average unsharded gradients over ranks, and clip the norm of all to ``clip``, if any."""
        sharded: dict[Tensor, Tensor] = {}
        unsharded: dict[Tensor, Tensor] = {}
        for parameter in optimizer_parameters(optimizer):
            if hasattr(parameter, "device_mesh") and parameter.grad is not None:
                sharded[parameter] = parameter.grad
            elif parameter.grad is not None:
                unsharded[parameter] = parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad.div_(rank_and_size().size)
        if clip is not None:
            groups = [group for group in (sharded, unsharded) if group]
            parts = [list(group.values()) for group in groups]
            norms = [to_full_tensor(get_total_norm(part, foreach=True)) for part in parts]
            total = torch.linalg.vector_norm(torch.stack(norms))
            for group in groups:
                clip_grads_with_norm_(list(group), clip, total, foreach=True)


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Distribute complete experts over the ranks of ``mesh``; return their parameters."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sharded = set()
    for layer in model.modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        experts = layer.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
            setattr(experts, name, nn.Parameter(spread, parameter.requires_grad))
        sharded |= set(experts.parameters())
        layer.sharded_experts = ShardedExperts(experts, mesh)
    return sharded


def check_expert_parallel(model: nn.Module, settings: Training) -> None:
    number = settings.expert_parallel
    if number == 1:
        return
    prefix = f"expert_parallel is {number}, and"
    if number != settings.shard:
        raise UserError(f"{prefix} shard is {settings.shard}; allowed: 1, or both the same")
    for layer in model.modules():
        experts = len(next(layer.experts.parameters())) if isinstance(layer, MoEFeedForward) else 0
        if experts % number:
            raise UserError(f"{prefix} a layer has {experts} experts; allowed: a divisor of these")
        if getattr(getattr(layer, "router", None), "merges_experts", False):
            raise UserError(f"{prefix} the router merges all experts; allowed: 1, or another")
        if dropout := getattr(getattr(layer, "experts", None), "dropout", 0):
            raise UserError(f"{prefix} experts.dropout {dropout}; allowed: 1, or no dropout")


def check_batch_divides_over_ranks(model: nn.Module, batch: int) -> None:
    rank_and_size().rows(batch)
    size = rank_and_size().size
    for module in model.modules():
        group = getattr(module, "images_coupled_in_training", 1)
        if (batch // size) % group:
            raise UserError(
                f"group_size is {group}, and each of {size} ranks has {batch // size} images; "
                f"allowed: a divisor of these, or a batch that {group} divides"
            )
