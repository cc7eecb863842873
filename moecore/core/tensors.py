"""Named tensors in a safetensors file, written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moecore.core.files import UserError, whole_file


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors (copied to CPU) atomically.

    Raises UserError where they cannot be written, such as on a full disk.
    """
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with whole_file(path) as temporary:
        try:
            save_file(ready, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise UserError(
                f"{path}: could not be written ({error}); what was there before is untouched. "
                "Free some space and start again"
            ) from error


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on CPU, and the metadata.

    Raises UserError where the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(
            f"{path}: no readable weights ({error}); delete it and run its stage again"
        ) from error
