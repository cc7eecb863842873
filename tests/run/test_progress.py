"""What a stage tells of its progress in a log."""

import pytest

from moecore.run import progress
from moecore.run.progress import clock


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
