"""Named tensors in a safetensors file, written whole or not at all; arrays as short text; what
a rank holds of a sharded tensor.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moecore.core.files import UserError, full_disk_number, whole_file

CONTENT = "sha256"  # in the metadata, of files written before: of the tensors alone
WHOLE = "sha256_of_all"  # of the tensors and of all else in the metadata


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors (copied to CPU) atomically, with a checksum of their content.

    Raises UserError where they cannot be written, such as on a full disk.
    """
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = dict(metadata or {})
    about[WHOLE] = content(ready, about)
    with whole_file(path) as temporary:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask says; safetensors' own file is 0600
            save_file(ready, temporary, metadata=about)
            temporary.chmod(mode)
        except SafetensorError as error:
            if full_disk_number(error):
                raise  # explained by ``whole_file``
            untouched = "what was there before is untouched"
            raise UserError(f"{path}: could not be written ({error}); {untouched}") from error


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on CPU, and the metadata.

    Raises UserError where the file is missing or damaged: a bit that differs is seen where
    ``write_tensors`` wrote the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: no readable weights ({error}); delete it and run its stage again"
        ) from error
    whole, before = metadata.pop(WHOLE, None), metadata.pop(CONTENT, None)
    differs = before is not None and content(found) != before
    if whole is not None:
        differs = content(found, metadata) != whole
    if differs:
        raise UserError(
            f"{path}: damaged, its content is not what was written; delete it and run its stage "
            "again"
        )
    return found, metadata


def read_sharded(folder: Path, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What all ranks wrote into a folder of torch.distributed.checkpoint, as this process holds it:
    sharded anew, or whole. of: the tensor here that a name's values are for.

    Raises UserError where a file is damaged.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        found = {}
        about = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        for name, value in about.items():
            own = with_axis(of(name))
            assert isinstance(value, TensorStorageMetadata)  # the files hold nothing else
            if value.size == own.shape:
                found[name] = torch.zeros_like(own)
            else:
                found[name] = torch.zeros(value.size, dtype=value.properties.dtype)
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    except (Exception, CheckpointException) as error:
        again = "delete it and start the stage again"
        raise UserError(f"{folder}: no readable checkpoint ({in_short(error)}); {again}") from error
    return found


def in_short(error: BaseException) -> str:
    """What is wrong, in a line: torch's own error of a checkpoint holds the tracebacks of all
    ranks.
    """
    failures = getattr(error, "failures", {})
    each = {rank: str(failure) for rank, (failure, _) in failures.items()}
    return "; ".join(f"rank {rank}: {each[rank]}" for rank in sorted(each)) or str(error)


def with_axis(value: Tensor) -> Tensor:
    """Scalars with an axis: slices of a file have one."""
    return value if value.ndim else value.reshape(1)


def content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """The sha256 of names, kinds, shapes and bytes, and of the ``metadata`` where there are some;
    tensors are contiguous and on the CPU.
    """
    found = hashlib.sha256()
    if metadata is not None:
        found.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def packed(*arrays: np.ndarray) -> str:
    """Base64 of the zlib-compressed bytes of the arrays, one after another, little endian."""
    data = b"".join(_bytes(array) for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> bytes:
    """The bytes of ``packed``."""
    return zlib.decompress(base64.b64decode(text))


def packed_values(values: np.ndarray) -> str:
    """``mean:largest:…``, one number each (N,): the mean, exact, and the deviations from it.

    The deviations are float16 shares of the largest one, so they keep three digits. Raises
    ValueError unless there are numbers and all are finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"packed values: shape {values.shape}; (N ≥ 1,) finite numbers are needed")
    mean = float(values.mean())
    apart = values - mean
    largest = float(np.abs(apart).max()) or 1.0
    return f"{mean!r}:{largest!r}:{packed((apart / largest).astype(np.float16))}"


def unpacked_values(text: str) -> np.ndarray:
    """The numbers (N,) fp64 of ``packed_values``; their mean is exact, but for the last digits."""
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(unpacked(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


def is_spread(value: Tensor) -> bool:
    """Whether no rank holds all of it."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and mesh.size(mesh.ndim - 1) > 1


def own_part(values: Tensor) -> Tensor:
    """What this rank holds of a parameter that is sharded; all of one that is not."""
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


def whole_of(values: Tensor) -> Tensor:
    """A sharded tensor's whole value, on every rank; the tensor itself where it is not sharded."""
    full = getattr(values, "full_tensor", None)
    return values if full is None else full()


def like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, the first rank's, as ``target`` holds it: sharded, or whole."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # half a second, only where it is needed

    placements = getattr(target, "placements", None)
    return distribute_tensor(value.to(target.device), mesh, placements)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as ``model.<name>`` and the optimizer's state as ``optimizer.<number>.<field>``."""
    state = optimizer.state_dict()["state"]
    return {f"model.{name}": value for name, value in model.state_dict().items()} | {
        f"optimizer.{index}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
    }


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that it changes, in the order of its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take up the optimizer's state of ``state_of``."""
    whole = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".")
            of = parameters[int(index)].detach()
            if field == "step":
                value = value.reshape(())
            elif not is_spread(value):
                value = like(value, of)
            whole["state"].setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(whole)


def misfit(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> str:
    """Why the tensors are not what ``state_of`` made of such a model; "" where they are."""
    wanted = {f"model.{name}": value for name, value in model.state_dict().items()}
    parameters = parameters_of(optimizer)
    for name, value in tensors.items():
        if name in wanted:
            of = wanted[name]
        else:
            numbered = re.fullmatch(r"optimizer\.(\d{1,9})\.([^.]+)", name)
            if numbered is None or int(numbered[1]) >= len(parameters):
                return f"{name} is not of this model"
            of = torch.zeros(()) if numbered[2] == "step" else parameters[int(numbered[1])]
        found, shape = (tuple(with_axis(one).shape) for one in (value, of))
        if found != shape:
            return f"{name} has shape {found}, the model's {shape}"
    lacking = next((name for name in wanted if name not in tensors), None)
    return "" if lacking is None else f"{lacking} is missing"
