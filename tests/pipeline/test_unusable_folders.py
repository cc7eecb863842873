"""Folders of a project that nobody may write, that are links to themselves, or files: one line."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moecore.core.files import FullDisk, UnusableFile, explain_file_errors, whole_file
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


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "x/y: could not be written, read-only file system; make it writable"),
        (errno.EACCES, "x/y: permission denied; let this user"),
        (errno.EPERM, "x/y: operation not permitted; let this user"),
        (errno.ELOOP, "x/y: too many levels of symbolic links; move it away"),
        (errno.ENOTDIR, "x/y: not a directory; move it away"),
        (errno.EISDIR, "x/y: is a directory; move it away"),
    ],
)
def test_what_a_user_can_mend_is_said(number: int, said: str):
    with pytest.raises(UnusableFile, match=f"^{said}") as error, explain_file_errors():
        raise OSError(number, os.strerror(number), "x/y")
    assert not isinstance(error.value, FullDisk)
    with pytest.raises(UnusableFile, match=f"^{said}"), explain_file_errors(Path("x/y")):
        raise RuntimeError(f"of another library (os error {number})")
    with pytest.raises(RuntimeError), explain_file_errors():  # which file is not known
        raise RuntimeError(f"of another library (os error {number})")


def test_a_loop_of_links_is_said_and_a_missing_file_is_not(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    said = f"^{tmp_path / 'a'}: too many levels of symbolic links"
    with pytest.raises(UnusableFile, match=said), explain_file_errors():
        (tmp_path / "a").resolve(strict=True)
    with pytest.raises(FileNotFoundError), explain_file_errors():
        open(tmp_path / "nothing")


def test_the_file_is_named_as_it_is_called_at_last(tmp_path, monkeypatch):
    """Where nothing may be written, nothing may be removed either."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    name = f"{tmp_path / 'out'}: could not be written, read-only file system"
    with pytest.raises(UnusableFile, match=f"^{name}"), whole_file(tmp_path / "out") as temporary:
        refuse(temporary)
