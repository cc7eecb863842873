"""Parts that survive a kill: made once, the same bits again, a torn line dropped, other damage
named.

What a stage tells of its progress in a log.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.run import progress
from moecore.run.kept import Kept
from moecore.run.progress import clock


def never():
    raise AssertionError("made again")


def test_a_part_is_made_once(tmp_path):
    kept = Kept(tmp_path)
    assert kept.part("a", lambda: {"value": 0.1}) == {"value": 0.1}
    assert kept.part("a", never) == {"value": 0.1}
    assert Kept(tmp_path).part("a", never) == {"value": 0.1}


def test_the_first_time_gives_what_later_times_give(tmp_path):
    first = Kept(tmp_path).part("a", lambda: {"pair": (1, 2), 3: None})
    assert first == {"pair": [1, 2], "3": None} == Kept(tmp_path).part("a", never)


@given(value=st.floats(allow_nan=False))
def test_floats_keep_their_bits(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("kept")
    assert (
        repr(Kept(folder).part("a", lambda: value))
        == repr(value)
        == repr(Kept(folder).part("a", never))
    )


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_off_by_a_kill_is_made_again(tmp_path, cut):
    kept = Kept(tmp_path)
    kept.part("a", lambda: [1.5])
    kept.part("b", lambda: [2.5])
    kept.path.write_bytes(kept.path.read_bytes()[:-cut])
    again = Kept(tmp_path)
    assert again.part("a", never) == [1.5]
    assert again.part("b", lambda: [3.5]) == [3.5]
    assert [json.loads(line)["key"] for line in kept.path.read_text().splitlines()] == ["a", "b"]


def test_an_error_keeps_nothing(tmp_path):
    with pytest.raises(AssertionError, match="made again"):
        Kept(tmp_path).part("a", never)
    assert Kept(tmp_path).part("a", lambda: 1) == 1


def test_damage_is_named(tmp_path):
    kept = Kept(tmp_path)
    kept.part("a", lambda: 1)
    kept.path.write_text("nonsense\n" + kept.path.read_text())
    with pytest.raises(UserError, match=r"kept.jsonl:1: not a kept part"):
        Kept(tmp_path)


@pytest.fixture
def now(monkeypatch):
    """A clock that tells what is set."""
    time = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: time["now"])
    return time


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(now, capsys):
    with progress.progress("pretrain", 100) as bar:
        bar.update(10)
        now["now"] = 5.0
        bar.update(20, loss=0.5)
        now["now"] = 20.0
        bar.update(30, validation_loss=0.25)
        now["now"] = 21.0
        bar.update(100)
    # 20 steps in 20 s after the first ones: 70 s for the other 70; 90 steps in 21 s at the end
    assert capsys.readouterr().err.splitlines() == [
        "pretrain: 30/100 (30%), 1:10 left, validation loss 0.25",
        "pretrain: 100/100 (100%), 0:00 left",
    ]


def test_nothing_done_says_nothing(now, capsys):
    with progress.progress("pretrain", 0):
        pass
    assert capsys.readouterr().err == ""


def test_clock():
    assert clock(123) == "2:03"
    assert clock(3723.4) == "1:02:03"
