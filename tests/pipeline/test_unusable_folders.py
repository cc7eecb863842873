"""Folders of a project that nobody may write, that are links to themselves, or files: one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project import Project

KERNEL = Path("/sys/kernel")  # of Linux: nobody may write there, root neither


def link_to_kernel(folder: Path) -> None:
    if not KERNEL.is_dir():
        pytest.skip(f"{KERNEL} is not here")
    folder.symlink_to(KERNEL)


def link_to_itself(folder: Path) -> None:
    folder.symlink_to(folder)


@pytest.mark.parametrize("replace", [link_to_kernel, link_to_itself, Path.touch])
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("artifacts", [("code",), ("prepare", "pretrain"), ("calibrate", "pretrain", "vmoe", "0")]),
        (".state", [("prepare", "pretrain"), ("teacher", "0")]),
        ("reports", [("compare",)]),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    copied: Project, name: str, stages: list, replace: Callable[[Path], None]
):
    (copied.folder / name).rename(copied.folder / "aside")
    replace(copied.folder / name)
    for words in stages:
        done = copied.attempt_stage(*words)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"{' '.join(words)}: {name}"), done.stderr
