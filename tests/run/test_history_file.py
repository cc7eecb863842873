"""The lines of a history: what is kept, what counts as time, a file that is read as it grows."""

import pytest

from moecore.run.history_file import NAME, Growing, before, encode, flatten, scalars, seconds


@pytest.fixture
def history(tmp_path):
    return Growing(tmp_path)


def write(history: Growing, *lines: dict) -> None:
    history.path.write_text("".join(map(encode, lines)))


def append(history: Growing, text: str) -> None:
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
    assert history.read() is not old
    assert [line["t"] for line in history.read()] == [1, 2, 4, 5]


def test_a_history_that_goes_is_forgotten(history):
    write(history, {"t": 1})
    assert history.read()
    history.path.unlink()
    assert history.read() == []


def test_nothing_is_read_after_a_torn_line(history):
    history.path.write_text('{"t": 1}\n{"t": \n{"t": 3}\n')
    assert history.read() == [{"t": 1}]
    assert history.path.name == NAME


def test_a_resumed_run_keeps_what_was_logged_before_its_first_step():
    lines = [{"uid": "a"}, {"step": 10}, {"tags": {}}, {"step": 20}]
    assert before(lines, 20) == lines[:3]
    assert before(lines, 30) == lines


def test_the_time_between_kill_and_resume_does_not_count():
    # 0 to 2, then again 10 to 13
    assert seconds([{"t": 0}, {"t": 2}, {"t": 10, "resumed": True}, {"t": 13}]) == 5.0
    assert seconds([]) == 0.0


def test_flatten():
    assert flatten({"a": {"b": [1, 2]}, "c": [{"d": None}]}) == {"a.b": [1, 2], "c.0.d": None}


def test_the_scalars_of_a_result_are_its_numbers_outside_of_lists():
    found = {"a": 1, "b": {"c": [1.0], "d": 0.5}, "e": {"f": "text"}, "g": None, "h": True}
    assert scalars(found) == {"a": 1, "b": {"d": 0.5}, "h": True}
