"""One line for the system's errors and strange files; systems unlike Linux; counted collectives."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import FileStore

from moecore.core import ranks
from moecore.core.files import (
    UnusableFile,
    UserError,
    available_cores,
    explain_file_errors,
    read_json,
    set_parent_death_signal,
    whole_file,
)
from moecore.core.safetensors_files import read_tensors
from moecore.core.source_layout import ROOT
from moecore.data.thread_map import map_in_threads, thread_count
from moecore.lens.traces import open_tensors
from moecore.nn.backbones.base_model import ImageSpec
from moecore.tasks.classification import Classification
from moecore.training.teachers.timm import Timm


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


def test_a_system_without_affinities_and_prctl_uses_all_cores(monkeypatch, tmp_path):
    assert available_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("MOECORE_THREADS", raising=False)
    assert available_cores() == thread_count() == os.cpu_count()
    assert list(map_in_threads(str, range(5))) == ["0", "1", "2", "3", "4"]
    set_parent_death_signal()
    with pytest.raises(UnusableFile, match="file too large"), whole_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")


def test_an_error_names_its_place_what_was_found_and_what_is_allowed():
    error = UnusableFile.at("train.steps", found=-1, allowed="at least 1")
    assert str(error) == "train.steps: found -1; allowed: at least 1"
    assert type(error) is UnusableFile


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


HANGING = """
import os, sys, time, torch
from torch import distributed
from moecore.core import ranks
from moecore.core.ranks import join_ranks, leave_ranks

ranks.INTERVAL, ranks.QUESTION_AFTER, ranks.ANSWERS_AFTER = 0.05, 0.2, 1.0
join_ranks()
distributed.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    sys.stdin.read()
distributed.all_reduce(torch.ones(1))
leave_ranks()
"""


@pytest.mark.parametrize(
    ("rank", "begun", "answers", "said"),
    [
        (0, 5, [5, 3, 5], "rank 0 of 3: has waited 60 s for rank 1 (process 101 on here), which"),
        (2, 5, [5, 3, 5], ""),  # rank 0 says it
        (1, 5, [3, 5, 5], "rank 1 of 3: has waited 60 s for rank 0 (process 100 on here), which"),
        (0, 5, [5, None, 5], "rank 0 of 3: has waited 60 s for rank 1, which has not come or"),
        (2, 5, [4, None, 5], "for rank 0 (process 100 on here), which runs and for rank 1, which"),
        (0, 5, [5, 5, 5], ""),  # all compute
        (1, 3, [5, 3, 5], ""),  # the others wait for this one
    ],
)
def test_ranks_that_have_begun_fewer_collectives_are_late(
    tmp_path, capsys, rank, begun, answers, said
):
    watch = ranks.RankWatch(FileStore(str(tmp_path / "meeting"), 3), rank, 3)
    for number, answer in enumerate(answers):
        if answer is not None:
            watch.store.set(f"watch/0/{number}", f"{answer} {100 + number} here")
    watch._print_late_ranks(begun, 0)
    assert said in (printed := capsys.readouterr().err)
    assert printed.count("\n") == bool(said)


def test_a_hanging_rank_is_named_while_the_others_wait():
    words = ["-m", "moecore.run.local_ranks", "2", "-c", HANGING]
    process = subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()  # rank 1 hangs until it is read
    assert re.match(
        r"rank 0 of 2: has waited 1 s for rank 1 \(process \d+ on .*\), which runs", line
    )
    listening = [
        connection.laddr.ip
        for child in psutil.Process(process.pid).children(recursive=True)
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}, "as docs/cluster.md says"
    _, rest = process.communicate()
    assert process.returncode == 0 and not rest


def test_a_meeting_that_takes_long_is_said(monkeypatch, capsys):
    def rendezvous(*_, **__):
        for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
            timer.join()
        yield ("the store",)

    monkeypatch.setattr(ranks, "ANSWERS_AFTER", 0.0)
    monkeypatch.setattr(ranks.distributed, "rendezvous", rendezvous)
    for name, value in ((ranks.MEETING, "there:1234"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert ranks._find_store(ranks.PATIENCE) == "the store"
    assert capsys.readouterr().err == "rank 1 of 2: has waited 0 s for the others at there:1234\n"
