"""What is written: params.yaml from the layers of a question, and values from the command line."""

import shutil
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT, SHIPPED
from moecore.study import params_file
from moecore.study.document import load_yaml_document, parse_yaml_document
from moecore.study.layers import compose_layers, load_overlay_layer, load_root_layer
from moecore.study.questions import QuestionFile, list_question_names
from tests.project import PARAMS, write_question


def text_of(question: QuestionFile, *presets: str) -> str:
    origin = params_file.ParamsOrigin(
        "own/asked.yaml", "params.yaml", "schema", question.root / "pipelines"
    )
    return params_file.params_text(question.round(None).compose(presets), origin, presets)


@pytest.mark.parametrize("name", list_question_names(ROOT))
def test_questions_are_short(name):
    """Beside the methods, what is asked of them, and the presets."""
    section = ""
    others = 0
    for line in (ROOT / f"pipelines/{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace() and line[0] not in "#-":
            section = line.partition(":")[0]
        others += section not in ("methods", "claims", "questions", "rounds", "presets")
    assert others <= 60


def test_a_question_of_five_lines_is_a_study(ask, place):
    question = ask(
        "question: does a second seed change the picture?\n"
        "run: {methods: [dense, vmoe], seeds: [0, 1], phases: [pretrain], thorough: [pretrain]}\n"
        "stages: [prepare, teacher_router, pretrain, measure, compare]\n"
        "model: {width: 48}\n"
        "pretrain: {epochs: 1}\n"
    )
    path = place / "params.yaml"
    root = parse_yaml_document(PARAMS).data
    assert params_file.write_params(path, text_of(question))
    data = load_yaml_document(path).data
    assert data["model"] == root["model"] | {"width": 48}
    assert data["methods"] == root["methods"] and data["cost"] == root["cost"]
    assert data["data"] == {"pretrain": root["data"]["pretrain"]}
    assert "robustness" not in data and "finetune" not in data and "teacher" not in data
    assert not params_file.write_params(path, path.read_text(encoding="utf-8"))


def test_what_is_written_says_where_it_comes_from(ask):
    question = ask(
        "world: one\nmethods: [vmoe]\npresets: {wide: {model: {width: 48}}}\n",
        one="whole: [cost]\ncost: {batch: 4}\npretrain: {epochs: 1}\n",
    )
    text = text_of(question, "wide")
    assert "# params.yaml + own/asked.yaml\nrun:\n" in text and "# worlds/one.yaml\ncost: {" in text
    assert "# params.yaml + worlds/one.yaml\npretrain:\n" in text
    assert "# params.yaml + own/asked.yaml\nmodel: {" in text
    assert "# With the presets wide.\n" in text
    assert parse_yaml_document(text).data == question.round(1).compose(["wide"]).document.data


@pytest.mark.parametrize("name", ["ours/quick", "tgr/table_3", "moge/paper_scale", "ours/sizes"])
def test_an_overlay_comes_to_the_same(tmp_path, name):
    composed = QuestionFile(SHIPPED, name).round(1).compose()
    (tmp_path / "overlay.yaml").write_text(params_file.overlay_text(composed), encoding="utf-8")
    base = load_root_layer(SHIPPED)
    again = compose_layers([base, load_overlay_layer(tmp_path, base)], SHIPPED)
    text = str(composed.document.data).replace("../../data/", "data/")
    assert str(again.document.data) == text and again.stages == composed.stages


def test_changes():
    before, after = {"a": {"x": 1, "y": None}, "b": [1]}, {"a": {"x": 1, "y": 2, "z": "text"}}
    assert list(params_file.list_changes(before, after)) == [
        "a.y: null → 2",
        'a.z: (absent) → "text"',
        "b: [1] → (absent)",
    ]
    # Of lists of mappings, the entries that differ
    before = {"claims": [{"says": "one"}, {"says": "two"}]}
    after = {"claims": [{"says": "two"}, {"says": "three"}]}
    assert list(params_file.list_changes(before, after)) == [
        'claims: {"says": "one"} → (absent)',
        'claims: (absent) → {"says": "three"}',
    ]


TEXT = """\
# the head
run: {methods: [a, b], seeds: [0]}  # names
pretrain:
  epochs: 2   # short
  views: {shift: 1}
  'clip': null
parts:
  - {kind: one, weight: 1.0e-3}
  - &two {kind: two, weight: 2}
again: {<<: *two, kind: 'three'}
"""


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("pretrain.epochs=3", "epochs: 2   # short", "epochs: 3   # short"),
        ("run.methods=[a]", "[a, b], seeds: [0]}  #", "[a], seeds: [0]}     #"),
        ("parts.0.weight=0.5", "{kind: one, weight: 1.0e-3}", "{kind: one, weight: 0.5}"),
        ("pretrain.views.flip=true", "{shift: 1}", "{shift: 1, flip: true}"),
        ("pretrain.batch=8", "'clip': null", "'clip': null\n  batch: 8"),
        ("again.weight=3", "kind: 'three'}", "kind: 'three', weight: 3}"),
        ("new={x: 1}", "kind: 'three'}\n", "kind: 'three'}\nnew: {x: 1}\n"),
    ],
)
def test_one_value_changes_and_all_else_stays(assignment, before, after):
    assert TEXT.count(before) == 1
    assert params_file.apply_assignments(TEXT, [assignment]) == TEXT.replace(before, after)


def test_a_file_of_ours_is_written_as_it_stands(tmp_path):
    text = write_question(tmp_path, "ours/quick").read_text(encoding="utf-8")
    assert params_file.apply_assignments(text, []) == text


def test_the_last_of_several_assignments_holds():
    text = params_file.apply_assignments(
        TEXT, ["pretrain.epochs=4", "pretrain={epochs: 5}", "pretrain.epochs=6"]
    )
    assert parse_yaml_document(text).data == parse_yaml_document(TEXT).data | {
        "pretrain": {"epochs": 6}
    }
    assert "# the head" in text


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("epochs", "expected key=value, such as pretrain.epochs=3"),
        ("pretrain.epochs=", "expected key=value"),
        ("pretrain.epoch.x=1", "found 'epoch' in pretrain, did you mean 'epochs'?; allowed: epo"),
        ("parts.2.weight=1", "found '2' in parts; allowed: 0, 1"),
        ("parts.2=1", "found '2' in parts; allowed: 0, 1"),
        ("pretrain.epochs.x=1", "found 'x' in pretrain.epochs; allowed: nothing"),
        ("pretrain.epochs=[1", "not valid YAML"),
        ("pretrain.epochs=%YAML 1.1", "found %YAML 1.1"),
    ],
)
def test_what_cannot_be_written_is_said(assignment, word):
    with pytest.raises(UserError) as error:
        params_file.apply_assignments(TEXT, [assignment])
    assert f"-S {assignment}" in str(error.value) and word in str(error.value)


def test_a_long_assignment_is_shortened():
    with pytest.raises(UserError, match="more than 64 levels") as error:
        params_file.apply_assignments(TEXT, [f"pretrain.epochs={'[' * 5000}"])
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["", "- 1\n", "x\n"])
def test_a_file_that_holds_no_keys_is_said(text):
    with pytest.raises(UserError, match="found 'a' in the file; allowed: "):
        params_file.apply_assignments(text, ["a=1"])


def test_the_file_is_checked_and_left_as_it_was_where_it_is_not_in_order(tmp_path):
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    path: Path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    with pytest.raises(UserError) as error:
        params_file.write_assignments(path, ["run.seeds=[0, 1]", "pretrain.epochs=none"])
    assert "pretrain.epochs" in str(error.value) and "left as it was" in str(error.value)
    assert path.read_text(encoding="utf-8") == PARAMS
    assert params_file.write_assignments(path, ["run.seeds=[0, 1]"]) == ["run.seeds: [0] → [0, 1]"]
    assert load_yaml_document(path).data["run"]["seeds"] == [0, 1]
