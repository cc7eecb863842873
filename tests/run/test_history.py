"""The record of a run: lines, times, written as it goes, published, continued after a kill."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.core import config, files, source_layout
from moecore.run import history_file, run_record
from moecore.run.history_file import HISTORY_FILE, HistoryReader, encode_line, read_lines
from moecore.run.run_record import record_run


class Params(config.Config):
    epochs: int = 3
    parts: tuple[dict, ...] = ({"kind": "load", "weight": 0.1},)


OUT = Path("artifacts/history/pretrain/vmoe/0")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recorded(**kwargs):
    return record_run("pretrain", Params(), method="vmoe", seed=0, **kwargs)


def logged(lines: list[dict]) -> list[tuple[int, dict]]:
    return [(step, values) for step, _, values in history_file.logged_points(lines)]


def test_a_finished_run(monkeypatch):
    monkeypatch.setenv("DVC_STAGE", "pretrain@vmoe-0")
    with recorded() as run:
        run.log_tag("device", "cpu")
        run.log(1, {"loss": 2.0})
        run.log(2, {"loss": float("nan"), "accuracy": 0.5})
        run.write_table("rows", [{"a": 1}])
        assert not OUT.exists()
    lines = read_lines(OUT)
    assert lines[0]["params"] == {"epochs": 3, "parts.0.kind": "load", "parts.0.weight": 0.1}
    assert lines[0]["dvc_stage"] == "pretrain@vmoe-0"
    points = [(1, {"loss": 2.0}), (2, {"loss": float("nan"), "accuracy": 0.5})]
    assert str(logged(lines)) == str(points)
    assert lines[-1]["status"] == "FINISHED" and lines[-1]["seconds"] >= 0
    assert {file.name for file in OUT.rglob("*.*")} == {"history.jsonl", "rows.json"}
    assert not list(Path(".state").rglob("history.jsonl"))


class Scores(config.Config):
    accuracy: float
    auroc: float | None
    load: tuple[float, ...] = ()


def test_a_typed_result_is_measured_and_its_numbers_are_kept():
    with recorded() as run:
        run.write_result(Scores(accuracy=0.5, auroc=float("nan"), load=(0.1, 0.9)))
    text = Path("artifacts/measured/pretrain/vmoe/0.json").read_text()
    assert json.loads(text).keys() == {"accuracy", "auroc", "load", "content_sha256"}
    found = files.read_json("artifacts/measured/pretrain/vmoe/0.json")
    assert found == {"accuracy": 0.5, "auroc": None, "load": [0.1, 0.9]}
    [summary] = [line["summary"] for line in read_lines(OUT) if "summary" in line]
    assert summary == {"accuracy": 0.5}


def test_an_error_is_recorded_and_raised():
    with pytest.raises(files.UserError, match="not finite"), recorded() as run:
        run.log(1, {"loss": 1.0})
        raise files.UserError("the loss is not finite")
    last = read_lines(OUT)[-1]
    assert last.keys() == {"t", "clock", "seconds", "status", "error"}
    assert (last["status"], last["error"]) == ("FAILED", "UserError: the loss is not finite")


def test_a_resumed_run_logs_no_step_twice():
    work = Path(".state/key")
    with pytest.raises(KeyboardInterrupt), recorded(work=work) as first:
        for step in (10, 20, 30, 40):
            first.log(step, {"loss": float(step)})
        raise KeyboardInterrupt
    assert read_lines(OUT)[-1]["status"] == "KILLED"
    with recorded(work=work) as second:  # the checkpoint was at step 20
        assert second.uid == first.uid
        second.log(30, {"loss": -30.0})
        second.log(40, {"loss": -40.0})
    lines = read_lines(OUT)
    losses = {10: 10.0, 20: 20.0, 30: -30.0, 40: -40.0}
    assert logged(lines) == [(step, {"loss": loss}) for step, loss in losses.items()]
    assert [line["status"] for line in lines if "status" in line] == ["FINISHED"]
    assert sum("resumed" in line for line in lines) == 1
    shutil.rmtree(work)  # by its owner, with the checkpoint
    with recorded(work=work) as third:
        assert third.uid != first.uid


def test_a_step_cannot_be_logged_twice():
    with pytest.raises(ValueError, match="step 1 of loss is not after step 1"), recorded() as run:
        run.log(1, {"loss": 1.0})
        run.log(1, {"loss": 1.0})


STAGE = """
import sys, time
from moecore.run.run_record import record_run
from moecore.run import stage_entry
from moecore.core.files import UserError, read_json

def toy(method: str, seed: int) -> None:
    with record_run("toy", None, method=method, seed=seed) as run:
        run.log(1, {"loss": 1.0})
        print("ready", flush=True)
        if method == "wrong":
            raise UserError("params.yaml:1: no")
        time.sleep(60 if method == "long" else 0)

for words in [sys.argv[1:]] if sys.argv[1:] else (["wrong", "0"], ["a"], ["a", "b"]):
    try:
        stage_entry.run_stage(toy, words)
    except SystemExit as end:
        if sys.argv[1:]:
            raise
        print(end.code, file=sys.stderr)
"""


def start(*words: str, wrapper: tuple[str, ...] = ()) -> subprocess.Popen:
    Path("toy.py").write_text(STAGE)
    env = os.environ | {"PYTHONPATH": str(source_layout.ROOT)}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [*wrapper, sys.executable, "toy.py", *words]
    return subprocess.Popen(command, env=env, text=True, **pipes)


def test_run_stage_says_in_a_line_what_is_wrong():
    """A UserError, a word too few, and a word that is no seed."""
    _, error = start().communicate(timeout=60)
    lines = error.splitlines()
    assert lines[:2] == ["toy wrong 0: params.yaml:1: no", "1"]
    assert "toy METHOD SEED (1 given)" in error and "SEED: found 'b'" in error
    assert lines.count("2") == 2


def test_terminate_is_recorded_as_killed():
    process = start("long", "0")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=60) == 143
    assert read_lines("artifacts/history/toy/long/0")[-1]["status"] == "KILLED"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux only")
def test_the_stage_ends_when_its_parent_is_killed():
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    parent = start("long", "0", wrapper=(sys.executable, "-c", code))
    assert parent.stdout.readline() == "ready\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    history = Path("artifacts/history/toy/long/0")
    deadline = time.monotonic() + 20
    while not history.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read_lines(history)[-1]["status"] == "KILLED"


@pytest.fixture
def history(tmp_path):
    return HistoryReader(tmp_path)


def write(history: HistoryReader, *lines: dict) -> None:
    history.path.write_text("".join(map(encode_line, lines)))


def append(history: HistoryReader, text: str) -> None:
    with open(history.path, "a") as handle:
        handle.write(text)


def test_a_growing_history_is_read_piece_by_piece(history):
    assert history.read() == []
    write(history, {"t": 1})
    first = history.read()
    append(history, '{"t": 2}\n{"t"')
    assert history.read() is first and first == [{"t": 1}, {"t": 2}]
    append(history, ": 3}")
    assert len(history.read()) == 2  # the line has not ended: more digits may come
    append(history, "\n")
    assert history.read() is first and first[2:] == [{"t": 3}]


def test_a_history_cut_at_a_checkpoint_is_read_anew(history):
    write(history, {"t": 1}, {"t": 2, "step": 10}, {"t": 3, "step": 20})
    old = history.read()
    write(history, {"t": 1}, {"t": 2, "step": 10}, {"t": 4, "resumed": True}, {"t": 5})
    assert history.read() is not old and [line["t"] for line in history.read()] == [1, 2, 4, 5]


def test_a_resumed_run_keeps_its_points_and_counts_no_time_between():
    lines = [{"uid": "a"}, {"step": 10}, {"tags": {}}, {"step": 20}]
    assert history_file.lines_before_step(lines, 20) == lines[:3]
    assert history_file.lines_before_step(lines, 30) == lines
    lines = [{"t": 0}, {"t": 2}, {"t": 10, "resumed": True}, {"t": 13}]
    assert history_file.spent_seconds(lines) == 5.0 and history_file.spent_seconds([]) == 0.0


def test_a_clock_that_is_set_back_changes_no_duration(monkeypatch):
    """Two processes, of 4 and 3 seconds, each of which sees the wall clock lose an hour."""
    wall, clock = [10_000.0], [100.0]
    monkeypatch.setattr(time, "time", lambda: wall[-1])
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    work = Path(".state/key")
    with pytest.raises(KeyboardInterrupt), recorded(work=work) as first:
        wall.append(6_400.0)
        clock.append(104.0)
        first.log(1, {"loss": 1.0})
        first.end = lambda *_: None  # as where it is killed
        raise KeyboardInterrupt
    clock.append(7.0)  # of another machine
    with recorded(work=work) as second:
        wall.append(2_800.0)
        clock.append(10.0)
        second.log(2, {"loss": 2.0})
    assert read_lines(OUT)[-1]["seconds"] == 7.0


def test_params_are_flat_and_the_scalars_of_a_result_are_its_numbers_outside_of_lists():
    nested = {"a": {"b": [1, 2]}, "c": [{"d": None}]}
    assert history_file.flatten_keys(nested) == {"a.b": [1, 2], "c.0.d": None}
    found = {"a": 1, "b": {"c": [1.0], "d": 0.5}, "e": {"f": "text"}, "g": None, "h": True}
    assert history_file.keep_numbers(found) == {"a": 1, "b": {"d": 0.5}, "h": True}


def never():
    raise AssertionError("made again")


def test_a_part_is_made_once_and_the_first_time_gives_what_later_times_give(tmp_path):
    first = files.ResumableParts(tmp_path).part("a", lambda: {"pair": (1, 2), 3: None})
    assert first == {"pair": [1, 2], "3": None} == files.ResumableParts(tmp_path).part("a", never)


@given(value=st.floats(allow_nan=False))
def test_floats_keep_their_bits(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("kept")
    parts = [files.ResumableParts(folder).part("a", make) for make in (lambda: value, never)]
    assert [repr(value)] * 2 == list(map(repr, parts))


def test_a_line_cut_off_by_a_kill_is_made_again(tmp_path):
    kept = files.ResumableParts(tmp_path)
    kept.part("a", lambda: [1.5])
    kept.part("b", lambda: [2.5])
    kept.path.write_bytes(kept.path.read_bytes()[:-5])
    again = files.ResumableParts(tmp_path)
    assert again.part("a", never) == [1.5] and again.part("b", lambda: [3.5]) == [3.5]
    assert [json.loads(line)["key"] for line in kept.path.read_text().splitlines()] == ["a", "b"]


@pytest.fixture
def now(monkeypatch):
    time = {"now": 0.0}
    monkeypatch.setattr(run_record.time, "monotonic", lambda: time["now"])
    return time


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(now, capsys):
    with run_record.printing_progress("pretrain", 100) as bar:
        bar.update(10)
        now["now"] = 5.0
        bar.update(20, loss=0.5)
        now["now"] = 20.0
        bar.update(30, validation_loss=0.25)
        now["now"] = 21.0
        bar.update(100)
    # 20 steps in 20 s after the first ones: 70 s for the other 70; 90 steps in 21 s at the end
    first = "pretrain: 30/100 (30%), 1:10 left, validation loss 0.25"
    assert capsys.readouterr().err.splitlines() == [first, "pretrain: 100/100 (100%), 0:00 left"]
    shown = [run_record.format_duration(seconds) for seconds in (123, 3723.4)]
    assert shown == ["2:03", "1:02:03"]


@pytest.mark.parametrize(
    ("spoil", "kept", "said"),
    [
        (lambda lines: [*lines[:3], '{"t": 1, "st\n', *lines[3:]], [10, 20, 40], "3 of 6 lines"),
        (None, [40], "is gone"),
    ],
)
def test_a_torn_or_deleted_history_beside_a_checkpoint(spoil, kept, said, capsys):
    """The header, three points and the end were written; the training goes on at step 40."""
    work = Path(".state/key")
    with pytest.raises(KeyboardInterrupt), recorded(work=work) as first:
        for step in (10, 20, 30):
            first.log(step, {"loss": float(step)})
        raise KeyboardInterrupt
    (work / "checkpoint.safetensors").write_text("it is there")
    path = work / "history/history.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if spoil is None:
        path.unlink()
    else:
        path.write_text("".join(spoil(lines)), encoding="utf-8")
    with recorded(work=work) as run:
        run.log(40, {"loss": 40.0})
    told = capsys.readouterr().err
    assert f"{path}: " in told and said in told and "goes on from its checkpoint" in told
    assert [step for step, _ in logged(read_lines(OUT))] == kept


@pytest.mark.parametrize(
    "line",
    [
        *(b"null", b'{"t": "x"}', b'{"t": NaN}', b'{"t": 1e400}'),
        *(b'{"t": 1, "step": 1, "values": [1]}', b'{"t": 1, "step": 1, "values": {"loss": {}}}'),
        *(b'{"t": 1, "step": 1, "values": {"loss": "x"}}', b'{"t": 1, "step": "1", "values": {}}'),
        *(b'{"t": 1, "values": {}}', b'{"t": 1, "step": 1, "routing": {"layers": 1}}'),
        *(b'{"t": 1, "summary": [1]}', b'{"t": 1, "status": "FINISHED"}', b'{"t": 1, "uid": "a"}'),
        *(b'{"t": 1, "pid": 1}', b"[" * 100_000),
    ],
)
def test_a_line_that_is_of_no_history_ends_what_is_trusted(tmp_path, line):
    whole = [encode_line({"t": 1.0, "step": step}).encode() for step in range(3)]
    (tmp_path / HISTORY_FILE).write_bytes(whole[0] + line + b"\n" + whole[1])
    assert [one["step"] for one in read_lines(tmp_path)] == [0]


def test_a_line_that_finds_no_room_is_said_and_what_was_there_is_read(limited):
    path = Path(HISTORY_FILE)
    files.append_line(path, encode_line({"t": 1, "step": 1}))
    with limited(len(path.read_bytes()) + 10), pytest.raises(files.FileAccessError) as error:
        files.append_line(path, encode_line({"t": 2, "text": "x" * 100}))
    assert str(error.value).startswith(f"{HISTORY_FILE}: file too large")
    assert [line["t"] for line in read_lines(Path())] == [1]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full(*_, **words) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_history_that_finds_no_room_to_be_published_leaves_the_earlier_one(monkeypatch, capsys):
    with recorded() as run:
        run.log(1, {"loss": 1.0})
    before = files_below(OUT)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(files.FileAccessError) as error, recorded() as run:
            run.log(1, {"loss": 2.0})
        said = f"{OUT}/{HISTORY_FILE}: no space left on device"
        assert str(error.value).startswith(said)
        assert not capsys.readouterr().err, "of one full disk, one line tells"
        with pytest.raises(ZeroDivisionError), recorded() as run:
            run.log(1, {"loss": 1 / 0})
        assert capsys.readouterr().err.startswith(said), "what went wrong first is raised"
    assert files_below(OUT) == before and not list(Path().rglob("*.part"))
    with recorded() as run:
        run.log(1, {"loss": 2.0})
    assert '"status": "FINISHED"' in (OUT / HISTORY_FILE).read_text() and files_below(OUT) != before
