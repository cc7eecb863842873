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


@pytest.mark.parametrize(
    ("name", "stages", "replace"),
    [
        ("artifacts", [("code",), ("calibrate", "pretrain", "vmoe", "0")], link_to_kernel),
        ("artifacts", [("prepare", "pretrain")], link_to_itself),
        (".state", [("prepare", "pretrain")], Path.touch),
        (".state", [("teacher", "0")], link_to_kernel),
        ("reports", [("compare",)], link_to_itself),
        ("reports", [("compare",)], Path.touch),
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
