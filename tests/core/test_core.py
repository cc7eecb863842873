import errno
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import FileStore

from moecore import UserError, parts
from moecore.core import config, ranks, safetensors_files, source_layout
from moecore.core.files import (
    FileAccessError,
    atomic_file,
    available_cores,
    explain_file_errors,
    read_json,
    set_parent_death_signal,
)
from moecore.data.thread_map import map_in_threads, thread_count
from moecore.lens.traces import opening_tensor_file
from moecore.parts import Classification, ImageSpec
from moecore.study.study import Study, read_study
from moecore.study.yaml_document import parse_yaml_document
from moecore.training.method import Method
from moecore.training.teachers.timm import Timm
from tests.my_lab import COSINE, forget_package, write_my_lab


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ELOOP, errno.EISDIR])
def test_what_a_user_can_mend_is_said_in_the_systems_words(number: int):
    said = f"^x/y: {os.strerror(number).lower()}$"
    with pytest.raises(FileAccessError, match=said), explain_file_errors():
        raise OSError(number, os.strerror(number), "x/y")
    with pytest.raises(FileAccessError, match=said), explain_file_errors(Path("x/y")):
        raise RuntimeError(f"of another library (os error {number})")
    with pytest.raises(RuntimeError), explain_file_errors():  # which file is not known
        raise RuntimeError(f"of another library (os error {number})")


def test_a_loop_of_links_is_said_and_a_missing_file_is_not(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    said = f"^{tmp_path / 'a'}: too many levels of symbolic links"
    with pytest.raises(FileAccessError, match=said), explain_file_errors():
        (tmp_path / "a").resolve(strict=True)
    with pytest.raises(FileNotFoundError), explain_file_errors():
        open(tmp_path / "nothing")


def test_the_file_is_named_as_it_is_called_at_last(tmp_path, monkeypatch):
    """Where nothing may be written, nothing may be removed either."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    name = f"{tmp_path / 'out'}: read-only file system"
    with (
        pytest.raises(FileAccessError, match=f"^{name}"),
        atomic_file(tmp_path / "out") as temporary,
    ):
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
    with pytest.raises(FileAccessError, match="file too large"), atomic_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")


def test_an_error_names_its_place_what_was_found_and_what_is_allowed():
    error = FileAccessError.at("train.steps", found=-1, allowed="at least 1")
    assert str(error) == "train.steps: found -1; allowed: at least 1"
    assert type(error) is FileAccessError


def write_empty_tensors(path: Path, number: int) -> None:
    """Write a valid file: its tensors have no values, so that it is all header."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"weight{index}": entry for index in range(number)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def open_trace(path: Path) -> None:
    with opening_tensor_file(path) as file:
        file.keys()


def build_teacher(path: Path) -> None:
    classes = Classification(classes=("dark", "light"))
    image = ImageSpec(channels=3, size=224, task=classes, mean=(0.5,) * 3, std=(0.3,) * 3)
    Timm(name="deit_tiny_patch16_224.fb_in1k", checkpoint=str(path)).build(image)


@pytest.mark.parametrize("read", [safetensors_files.read_tensors, open_trace, build_teacher])
def test_a_header_of_too_many_names_is_refused(tmp_path, read: Callable[[Path], Any]):
    path = tmp_path / "names.safetensors"
    write_empty_tensors(path, 60_000)  # 4.3 MB
    with pytest.raises(UserError, match=r"names\.safetensors.*its header has 4,\d{3},\d{3} bytes"):
        read(path)


def test_many_names_are_read(tmp_path):
    path = tmp_path / "names.safetensors"
    write_empty_tensors(path, 1_000)
    assert len(safetensors_files.read_tensors(path)[0]) == 1_000
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"names\.safetensors: no readable"):
        safetensors_files.read_tensors(path)


HANGING = """
import os, sys, time, torch
from torch import distributed
from moecore.core import ranks
from moecore.core.ranks import join_ranks, leave_ranks

ranks.WATCH_INTERVAL, ranks.ASK_RANKS_AFTER, ranks.ANSWERS_AFTER = 0.05, 0.2, 1.0
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
def test_ranks_that_began_fewer_collectives_are_late(tmp_path, capsys, rank, begun, answers, said):
    watch = ranks.LateRankReporter(FileStore(str(tmp_path / "meeting"), 3), rank, 3)
    for number, answer in enumerate(answers):
        if answer is not None:
            watch.store.set(f"watch/0/{number}", f"{answer} {100 + number} here")
    watch._print_late_ranks(begun, 0)
    assert said in (printed := capsys.readouterr().err) and printed.count("\n") == bool(said)


def test_a_hanging_rank_is_named_while_the_others_wait():
    words = ["-m", "moecore.run.local_ranks", "2", "-c", HANGING]
    environment = os.environ | {"PYTHONPATH": str(source_layout.ROOT), "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, *words], env=environment, text=True, **pipes)
    line = process.stderr.readline()  # rank 1 hangs until it is read
    said = r"rank 0 of 2: has waited 1 s for rank 1 \(process \d+ on .*\), which runs"
    assert re.match(said, line)
    children = psutil.Process(process.pid).children(recursive=True)
    opened = [each for child in children for each in child.net_connections("inet")]
    listening = [each.laddr.ip for each in opened if each.status == psutil.CONN_LISTEN]
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
    for name, value in ((ranks.MEETING_ENV, "there:1234"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert ranks._connect_to_store(ranks.PATIENCE) == "the store"
    assert capsys.readouterr().err == "rank 1 of 2: has waited 0 s for the others at there:1234\n"


BASES = (
    *(parts.Attack, parts.Backbone, parts.Calibrator, parts.Experts, parts.Regularizer),
    *(parts.Router, parts.Source, parts.Task, parts.Teacher),
)
PARAMS = """\
packages: [my_lab]
run: {methods: [mine], seeds: [0]}
methods:
  mine:
    router: {kind: my_lab.cosine, k: 1}
    experts: {kind: mlp}
    regularizers: [{kind: my_lab.calm, weight: 0.5}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where Python finds packages; what was imported from there is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    forget_package()


def read(text: str = PARAMS) -> Study:
    return read_study(parse_yaml_document(text))


def refusal(text: str = PARAMS) -> str:
    """The one line that says what is wrong with the router."""
    with pytest.raises(UserError) as raised:
        read(text)
    [line] = [line for line in str(raised.value).split("\n") if "router" in line]
    return line


def test_every_family_is_a_folder_whose_parts_are_files():
    folders = {Path(inspect.getfile(base)).parent for base in BASES}
    assert folders == {
        source_layout.ROOT / "moecore" / family for family in source_layout.FAMILY_FOLDERS
    }
    assert "noisy_top_k" in config.builtin_kinds(parts.Router)
    assert "capacity" not in config.builtin_kinds(parts.Router)
    for base in BASES:
        classes = config.part_classes_by_kind(base).values()
        assert not any(inspect.isabstract(part) for part in classes), base


def test_a_part_from_outside_is_read_written_and_used(folder):
    write_my_lab(folder)
    method = read().methods["mine"]
    assert type(method.router).__name__ == "Cosine" and method.regularizers[0].weight == 0.5
    written = method.model_dump(mode="json")
    assert written["router"] == {"kind": "my_lab.cosine", "k": 1, "temperature": 0.1}
    assert Method.model_validate(written) == method
    tokens, (record,) = method.moe.build(8)(torch.randn(2, 3, 8))
    assert tokens.shape == (2, 3, 8) and record.chosen.sum() == 6


def test_its_own_settings_are_checked_in_their_place_and_are_in_the_schema(folder):
    write_my_lab(folder)
    line = refusal(PARAMS.replace("k: 1}", "k: 0}"))
    assert line.startswith("params.yaml:5:35: methods.mine.router.k: found 0")
    line = refusal(PARAMS.replace("k: 1}", "tempreature: 1}"))
    assert "did you mean 'temperature'?; allowed: kind, k, temperature" in line
    read()
    schema = Study.model_json_schema()
    assert "my_lab__cosine__Cosine" in schema["$defs"]
    assert "#/$defs/Calm" in str(schema["$defs"]["Method"]["properties"]["regularizers"])
    source_layout.allow_packages((), ())
    assert "my_lab__cosine__Cosine" not in Study.model_json_schema()["$defs"]


def test_a_faulty_module_that_nobody_names_is_in_nobodys_way_but_the_schemas(folder):
    write_my_lab(folder, later="class Later:\n    x = 1 / 0\n")
    assert "did you mean" in refusal(PARAMS.replace("k: 1}", "tempreature: 1}"))
    with pytest.raises(ValueError, match=r"my_lab.later cannot be imported: .*later.py:2\)$"):
        Study.model_json_schema()


FAULTS = [
    ({"cosine": "x = ("}, "SyntaxError: '(' was never closed", "my_lab/cosine.py:1)"),
    ({"cosine": "import my_lab.other"}, "No module named 'my_lab.other'", "my_lab/cosine.py:1)"),
    ({"directions": "\n1 / 0"}, "ZeroDivisionError: division by zero", "my_lab/directions.py:2)"),
    ({"cosine": "raise SystemExit(3)"}, "SystemExit: 3", "my_lab/cosine.py:1)"),
    ({"directions": "raise OSError('a\\nb')"}, "OSError: a b", "my_lab/directions.py:1)"),
    ({"cosine": "import torch\ntorch.nn.Linear(1, 'x')"}, "TypeError", "my_lab/cosine.py:2)"),
    ({"cosine/__init__": COSINE}, "my_lab has a file and a folder", "allowed: one"),
    ({"cosine": "x = 1"}, "my_lab/cosine.py", "has no class Cosine"),
    ({"cosine": f"{COSINE}\n\nclass Cosine(Router):\n    pass\n"}, "several classes Cosine", ""),
    ({"cosine": COSINE.replace('"my_lab.cosine"', '"hash"')}, "has the kind 'hash'", "allowed"),
    ({"cosine": COSINE.replace("Cosine(Router)", "Cosine")}, "Cosine of ", "is no Router"),
    ({"cosine": COSINE.replace("def build(", "def make(")}, "lacks what every Router has", "build"),
]


@pytest.mark.parametrize(("files", "words", "others"), FAULTS)
def test_a_faulty_part_is_named_in_a_line(folder, files, words, others):
    write_my_lab(folder, **files)
    line = refusal()
    assert line.startswith("params.yaml:5:5: methods.mine.router: ")
    assert words in line and others in line


def test_a_part_lacks_no_constant_of_its_family(folder):
    lacking = 'class Soft(Calibrator):\n    kind: Literal["my_lab.soft"] = "my_lab.soft"\n'
    imports = "from typing import Literal\nfrom moecore.parts import Calibrator\n"
    write_my_lab(folder, soft=imports + lacking)
    said = pytest.raises(ValueError, match="has: fit, fitted, predicts, tasks$")
    with source_layout.allowing_packages(["my_lab"]), said:
        config.find_class(parts.Calibrator, "my_lab.soft")


def test_nothing_is_imported_that_is_not_listed(folder):
    write_my_lab(folder, __init__="raise AssertionError")
    line = refusal(PARAMS.replace("packages: [my_lab]\n", ""))
    assert "my_lab.cosine is of a package that is not listed; write packages: [my_lab]" in line
    assert "my_lab" not in sys.modules
    for kind in ("../cosine", "os.path", "my_lab", "base", "calm"):
        line = refusal(PARAMS.replace("kind: my_lab.cosine", f"kind: {kind}"))
        assert f"found kind: {kind}" in line or "not listed" in line


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("[nowhere]", "packages[0]: found nowhere, which is not installed; allowed: "),
        ("[my_lab, moecore]", "packages[1]: found moecore, whose parts have short kinds"),
        ("[os]", "packages[0]: found os; allowed: the name of an installed package"),
        ("[my_lab.cosine]", "packages[0]: found my_lab.cosine; allowed: "),
        ("my_lab", "packages: found 'my_lab' (str); allowed: "),
        ("[my_lab, my_lab]", "packages: found my_lab twice; allowed: "),
    ],
)
def test_what_no_package_is(folder, listed, words):
    write_my_lab(folder)
    with pytest.raises(UserError) as raised:
        read(PARAMS.replace("[my_lab]", listed))
    assert [line for line in str(raised.value).split("\n") if words in line], raised.value


def test_a_package_may_lie_beside_params_yaml_or_in_its_src(tmp_path, folder):
    write_my_lab(tmp_path / "project/src")
    (tmp_path / "project/params.yaml").write_text(PARAMS, encoding="utf-8")
    text = parse_yaml_document(PARAMS, str(tmp_path / "project/params.yaml"))
    assert read_study(text).methods["mine"].router is not None
