"""The state of a training as named tensors: this rank's part, full or sharded."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def is_sharded_tensor(value: Tensor) -> bool:
    """Return whether the tensor is spread over several ranks."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and mesh.size(mesh.ndim - 1) > 1


def local_shard(values: Tensor) -> Tensor:
    """Return this rank's part of a sharded parameter, or the parameter itself."""
    return getattr(values, "to_local", lambda: values)()


def to_full_tensor(values: Tensor) -> Tensor:
    """Return a sharded tensor's full value, on every rank, or the tensor itself."""
    return getattr(values, "full_tensor", lambda: values)()


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Return a full tensor sharded as ``target`` is, with the first rank's values, or unchanged."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import: half a second

    placements = getattr(target, "placements", None)
    return distribute_tensor(value.to(target.device), mesh, placements)


def collect_rank_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights as ``model.<name>``, optimizer state as ``optimizer.<number>.<field>``."""
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
    """Restore the optimizer's state from the tensors that ``collect_rank_state`` returned."""
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


def read_distributed_checkpoint(
    folder: Path, target_of: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return name → tensor of a sharded checkpoint's folder, sharded as ``target_of(name)`` is."""
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
    """Return the tensor with at least one axis, as slices of a file need."""
    return value if value.ndim else value.reshape(1)
