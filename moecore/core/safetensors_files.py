"""Named tensors in a safetensors file, written whole or not at all, with a checksum."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moecore.core.files import MENDABLE, UserError, file_errno, whole_file

CONTENT = "sha256"  # in the metadata, of files written before: of the tensors alone
WHOLE = "sha256_of_all"  # of the tensors and of all else in the metadata
MAX_HEADER = 2**22  # bytes of names and metadata: of 40,000 tensors; our largest have 11,000 bytes


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors (copied to CPU) atomically, with a checksum of their content.

    Raises UserError where they cannot be written, such as on a full disk.
    """
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = dict(metadata or {})
    about[WHOLE] = tensors_checksum(ready, about)
    with whole_file(path) as temporary:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask says; safetensors' own file is 0600
            save_file(ready, temporary, metadata=about)
            temporary.chmod(mode)
        except SafetensorError as error:
            if file_errno(error) in MENDABLE:
                raise  # explained by ``whole_file``
            untouched = "what was there before is untouched"
            raise UserError(f"{path}: could not be written ({error}); {untouched}") from error


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on CPU, and the metadata.

    Raises UserError where the file is missing or damaged: a bit that differs is seen where
    ``write_tensors`` wrote the file.
    """
    try:
        check_header_size(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: no readable weights ({error}); delete it and run its stage again"
        ) from error
    whole, before = metadata.pop(WHOLE, None), metadata.pop(CONTENT, None)
    differs = before is not None and tensors_checksum(tensors) != before
    if whole is not None:
        differs = tensors_checksum(tensors, metadata) != whole
    if differs:
        raise UserError(
            f"{path}: damaged, its content is not what was written; delete it and run its stage "
            "again"
        )
    return tensors, metadata


def check_header_size(path: str | Path) -> None:
    """Raise SafetensorError where a file's header is larger than that of any model.

    A million names take 800 MB and 40 s to read.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER:
        raise SafetensorError(f"its header has {size:,} bytes; allowed: up to {MAX_HEADER:,}")


def tensors_checksum(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """The sha256 of names, kinds, shapes, bytes and ``metadata``; contiguous tensors on the CPU."""
    digest = hashlib.sha256()
    if metadata is not None:
        digest.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
