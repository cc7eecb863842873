"""The state of a training as named tensors: what each rank holds of it, whole or sharded."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def is_sharded_tensor(value: Tensor) -> bool:
    """Return whether no rank holds all of it."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and mesh.size(mesh.ndim - 1) > 1


def local_shard(values: Tensor) -> Tensor:
    """Return what this rank holds of a parameter that is sharded; all of one that is not."""
    return getattr(values, "to_local", lambda: values)()


def to_full_tensor(values: Tensor) -> Tensor:
    """A sharded tensor's whole value, on every rank; the tensor itself where it is not sharded."""
    return getattr(values, "full_tensor", lambda: values)()


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, the first rank's, as ``target`` holds it: sharded, or whole."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # half a second, only where it is needed

    placements = getattr(target, "placements", None)
    return distribute_tensor(value.to(target.device), mesh, placements)


def collect_rank_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as ``model.<name>`` and the optimizer's state as ``optimizer.<number>.<field>``."""
    state = optimizer.state_dict()["state"]
    return {f"model.{name}": value for name, value in model.state_dict().items()} | {
        f"optimizer.{index}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
    }


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that it changes, in the order of its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take up the optimizer's state of ``collect_rank_state``."""
    whole = optimizer.state_dict()
    parameters = optimizer_parameters(optimizer)
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".")
            of = parameters[int(index)].detach()
            if field == "step":
                value = value.reshape(())
            elif not is_sharded_tensor(value):
                value = shard_like(value, of)
            whole["state"].setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(whole)


def read_distributed_checkpoint(folder: Path, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return what all ranks wrote into a folder of torch.distributed.checkpoint, as this process
    holds it: sharded anew, or whole. of: the tensor here that a name's values are for.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensors = {}
    about = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, value in about.items():
        own = at_least_1d(of(name))
        assert isinstance(value, TensorStorageMetadata)  # the files hold nothing else
        if value.size == own.shape:
            tensors[name] = torch.zeros_like(own)
        else:
            tensors[name] = torch.zeros(value.size, dtype=value.properties.dtype)
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    return tensors


def short_error(error: BaseException) -> str:
    """Return what is wrong, in a line, and not the tracebacks of all ranks."""
    failures = getattr(error, "failures", {})
    each = {rank: str(failure) for rank, (failure, _) in failures.items()}
    return "; ".join(f"rank {rank}: {each[rank]}" for rank in sorted(each)) or str(error)


def at_least_1d(value: Tensor) -> Tensor:
    """Scalars with an axis: slices of a file have one."""
    return value if value.ndim else value.reshape(1)
