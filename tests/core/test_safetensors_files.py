"""Files of safetensors from elsewhere: a header of endless names is refused before it is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecore.core.files import UserError
from moecore.core.safetensors_files import read_tensors
from moecore.lens.traces import open_tensors
from moecore.nn.backbones.base_model import ImageSpec
from moecore.tasks.classification import Classification
from moecore.training.teachers.timm import Timm


def write_empty_tensors(path: Path, number: int) -> None:
    """Write a valid file: its tensors have no values, so that it is all header."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"weight{index}": entry for index in range(number)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def open_trace(path: Path) -> None:
    with open_tensors(path) as file:
        file.keys()


def build_teacher(path: Path) -> None:
    classes = Classification(classes=("dark", "light"))
    image = ImageSpec(channels=3, size=224, task=classes, mean=(0.5,) * 3, std=(0.3,) * 3)
    Timm(name="deit_tiny_patch16_224.fb_in1k", checkpoint=str(path)).build(image)


@pytest.mark.parametrize("read", [read_tensors, open_trace, build_teacher])
def test_a_header_of_too_many_names_is_refused(tmp_path, read: Callable[[Path], Any]):
    path = tmp_path / "names.safetensors"
    write_empty_tensors(path, 60_000)  # 4.3 MB
    with pytest.raises(UserError, match=r"names\.safetensors.*its header has 4,\d{3},\d{3} bytes"):
        read(path)


def test_many_names_are_read(tmp_path):
    path = tmp_path / "names.safetensors"
    write_empty_tensors(path, 1_000)
    assert len(read_tensors(path)[0]) == 1_000
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"names\.safetensors: no readable"):
        read_tensors(path)
