"""Errors of the system and files from elsewhere: one line that names the file. What Linux has, and
what is done on a system that lacks it.
"""

import errno
import os
import sys
from pathlib import Path

import pytest

from moecore.core.files import (
    UnusableFile,
    UserError,
    explain_file_errors,
    read_json,
    whole_file,
)
from moecore.core.operating_system import available_cores, set_parent_death_signal
from moecore.data.thread_map import map_in_threads, thread_count


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ELOOP, errno.EISDIR])
def test_what_a_user_can_mend_is_said_in_the_systems_words(number: int):
    said = f"^x/y: {os.strerror(number).lower()}$"
    with pytest.raises(UnusableFile, match=said), explain_file_errors():
        raise OSError(number, os.strerror(number), "x/y")
    with pytest.raises(UnusableFile, match=said), explain_file_errors(Path("x/y")):
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
    name = f"{tmp_path / 'out'}: read-only file system"
    with pytest.raises(UnusableFile, match=f"^{name}"), whole_file(tmp_path / "out") as temporary:
        refuse(temporary)


def test_endless_brackets_are_no_json(tmp_path):
    """Of 981 to 999 Python reads some that it cannot write again, as the checksum wants them."""
    for number in (*range(970, 1000), 5_000):
        text = f'{{"content_sha256": "x", "a": {"[" * number}{"]" * number}}}'
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(UserError, match=r"deep\.json: (not valid JSON|damaged)"):
            read_json(tmp_path / "deep.json")


@pytest.fixture
def bare_system(monkeypatch) -> None:
    """A system without affinities and prctl."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("MOECORE_THREADS", raising=False)


def test_linux_tells_its_cores():
    assert available_cores() == len(os.sched_getaffinity(0))


def test_a_bare_system_uses_all_cores(bare_system, tmp_path):
    assert available_cores() == thread_count() == os.cpu_count()
    assert list(map_in_threads(str, range(5))) == ["0", "1", "2", "3", "4"]
    set_parent_death_signal()
    with pytest.raises(UnusableFile, match="file too large"), whole_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")


def test_an_error_names_its_place_what_was_found_and_what_is_allowed():
    error = UnusableFile.at("train.steps", found=-1, allowed="at least 1")
    assert str(error) == "train.steps: found -1; allowed: at least 1"
    assert type(error) is UnusableFile
