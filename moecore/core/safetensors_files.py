"""Write and read named tensors as safetensors files, atomically and with a checksum."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moecore.core.files import USER_FIXABLE_ERRNOS, UserError, atomic_file, file_errno

TENSORS_SHA256 = "sha256"  # metadata key in older files: checksum of the tensors alone
FULL_SHA256 = "sha256_of_all"  # metadata key: checksum of the tensors and all other metadata
MAX_HEADER = 2**22  # bytes of names and metadata, for 40,000 tensors; our largest: 11,000 bytes


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors from any device atomically, with a checksum; UserError on failure."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = dict(metadata or {})
    about[FULL_SHA256] = tensors_checksum(contiguous, about)
    with atomic_file(path) as temporary:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # from the umask; safetensors writes with mode 0600
            save_file(contiguous, temporary, metadata=about)
            temporary.chmod(mode)
        except SafetensorError as error:
            if file_errno(error) in USER_FIXABLE_ERRNOS:
                raise  # explained by ``atomic_file``
            untouched = "what was there before is untouched"
            raise UserError(f"{path}: could not be written ({error}); {untouched}") from error


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's CPU tensors and metadata; UserError if the file is missing or damaged."""
    again = "delete it and run its stage again"
    try:
        check_header_size(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no readable weights ({error}); {again}") from error
    checksum, tensors_only = (metadata.pop(FULL_SHA256, None), metadata.pop(TENSORS_SHA256, None))
    differs = tensors_only is not None and tensors_checksum(tensors) != tensors_only
    if checksum is not None:
        differs = tensors_checksum(tensors, metadata) != checksum
    if differs:
        raise UserError(f"{path}: damaged, its content is not what was written; {again}")
    return tensors, metadata


def check_header_size(path: str | Path) -> None:
    # A million names take 800 MB and 40 s to read.
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER:
        raise SafetensorError(f"its header has {size:,} bytes; allowed: up to {MAX_HEADER:,}")


def tensors_checksum(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Return the sha256 of ``metadata`` and of tensors: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    if metadata is not None:
        digest.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
