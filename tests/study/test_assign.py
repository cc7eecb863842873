"""``-S key=value``: the value is written where the key stands, and nothing else changes."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.study.assign import assign, assigned
from moecore.study.document import parse
from tests.project import PARAMS, ROOT

TEXT = """\
# the head
run: {methods: [a, b], seeds: [0]}  # names
pretrain:
  epochs: 2   # short
  views: {shift: 1}
parts:
  - {kind: one, weight: 1}
  - &two {kind: two, weight: 2}
again: *two
"""


def of(text: str, *assignments: str) -> str:
    for assignment in assignments:
        text = assigned(parse(text), text, assignment)
    return text


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("pretrain.epochs=3", "epochs: 2   # short", "epochs: 3   # short"),
        ("run.methods=[a]", "{methods: [a, b], seeds", "{methods: [a], seeds"),
        ("parts.0.weight=0.5", "{kind: one, weight: 1}", "{kind: one, weight: 0.5}"),
        ("pretrain.views.flip=true", "{shift: 1}", "{flip: true, shift: 1}"),
        ("pretrain.batch=8", "  epochs: 2", "  batch: 8\n  epochs: 2"),
        ("new={x: 1}", "run: {methods", "new: {x: 1}\nrun: {methods"),
    ],
)
def test_one_value_changes_and_all_else_stays(assignment, before, after):
    assert TEXT.count(before) == 1
    assert of(TEXT, assignment) == TEXT.replace(before, after)


def test_a_block_is_replaced_whole():
    assert parse(of(TEXT, "pretrain={epochs: 1}")).data["pretrain"] == {"epochs": 1}
    assert "# the head" in of(TEXT, "pretrain={epochs: 1}")


@given(st.integers() | st.booleans() | st.lists(st.integers(), max_size=3), st.integers(1, 4))
def test_the_last_of_several_assignments_holds(value, times):
    text = of(TEXT, *(f"pretrain.epochs={n}" for n in range(times)), f"pretrain.epochs={value}")
    expected = parse(TEXT).data
    expected["pretrain"]["epochs"] = value
    assert parse(text).data == expected


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("epochs", "expected key=value, such as pretrain.epochs=3"),
        ("pretrain.epochs=", "expected key=value"),
        (
            "pretrain.epoch.x=1",
            "found 'epoch' in pretrain, did you mean 'epochs'?; allowed: epochs",
        ),
        ("parts.2.weight=1", "found '2' in parts; allowed: 0, 1"),
        ("pretrain.epochs.x=1", "found 'x' in pretrain.epochs; allowed: nothing"),
        ("pretrain.epochs=[1", "not valid YAML"),
        ("again=1", "again: shares its value with other keys"),
        ("again.weight=3", "again.weight: shares its value with other keys; edit the file itself"),
    ],
)
def test_what_cannot_be_written_is_said(assignment, said):
    with pytest.raises(UserError) as error:
        of(TEXT, assignment)
    assert said in str(error.value)


def test_the_file_is_checked_and_left_as_it_was_where_it_is_not_in_order(tmp_path):
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    path = tmp_path / "params.yaml"
    before = PARAMS
    path.write_text(before, encoding="utf-8")
    with pytest.raises(UserError) as error:
        assign(path, ["run.seeds=[0, 1]", "pretrain.epochs=none"])
    assert "pretrain.epochs" in str(error.value) and "left as it was" in str(error.value)
    assert path.read_text(encoding="utf-8") == before
    assert assign(path, ["run.seeds=[0, 1]"]) == ["run.seeds: [0] → [0, 1]"]
    assert path.read_text(encoding="utf-8") == before.replace("seeds: [0]\n", "seeds: [0, 1]\n")
