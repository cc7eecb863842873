"""What is written: a study's params.yaml from its overlay, and values from the command line."""

import shutil
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.study.reading.document import load_yaml_document, parse_yaml_document
from moecore.study.writing.assignments import apply_assignments, write_assignments
from moecore.study.writing.write_params import list_changes, params_text, write_params
from tests.project import PARAMS, check_params
from tests.study.test_reading import values

OVERLAYS = sorted((ROOT / "pipelines").glob("*/overlay.yaml"))


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.parent.name)
def test_written_files_are_fresh(path):
    written = (path.parent / "params.yaml").read_text(encoding="utf-8")
    assert written == params_text(path.parent, ROOT), "run `moecore study write`"
    assert load_yaml_document(path.parent / "params.yaml").data == values(path.parent)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.parent.name)
def test_overlays_are_short(path):
    """Beside the list of methods and what is asked of them, which a study of ablations has many."""
    lines = path.read_text(encoding="utf-8").splitlines()
    section = ""
    others = 0
    for line in lines:
        if line and not line[0].isspace() and line[0] not in "#-":
            section = line.partition(":")[0]
        others += section not in ("methods", "claims", "questions")
    assert others <= 60


def test_new_dialects_begin_with_the_models_of_dialects():
    folders = [ROOT / "pipelines" / name for name in ("dialects", "dialects_new")]
    dialects, new = (load_yaml_document(str(folder / "params.yaml")).data for folder in folders)
    for section in ("model", "teacher", "teacher_router", "pretrain"):
        assert new[section] == dialects[section]
    assert new["data"]["pretrain"] == dialects["data"]["pretrain"]
    assert new["methods"].items() <= dialects["methods"].items()
    assert new["run"]["seeds"] == dialects["run"]["seeds"]


def test_an_overlay_of_five_lines_is_a_study(study):
    folder = study(
        "# Does a second seed change the picture?\n"
        "run: {methods: [dense, vmoe], seeds: [0, 1], phases: [pretrain], thorough: [pretrain]}\n"
        "stages: [prepare, teacher_router, pretrain, measure, compare]\n"
        "model: {width: 48}\n"
        "pretrain: {epochs: 1}\n"
    )
    assert list(write_params(folder, folder.parents[1]))
    root = parse_yaml_document(PARAMS).data
    data = load_yaml_document(folder / "params.yaml").data
    assert data["model"] == root["model"] | {"width": 48}
    assert data["methods"] == root["methods"] and data["cost"] == root["cost"]
    assert data["data"] == {"pretrain": root["data"]["pretrain"]}
    assert "robustness" not in data and "finetune" not in data and "teacher" not in data
    assert check_params(folder / "params.yaml").pretrain.epochs == 1
    assert not list(write_params(folder, folder.parents[1]))


@pytest.mark.parametrize(
    ("overlay", "place_and_key", "word"),
    [
        ("modle: {}\n", "1:1: modle", "did you mean 'model'?"),
        ("- 1\n", "1:1", "found no mapping; allowed: sections of params.yaml (packages, run"),
        ("stages: [pretrian]\n", "1:10: stages[0]", "found 'pretrian', did you mean 'pr"),
        ("whole: model\n", "1:1: whole", "found no list; allowed: a list of packages, run"),
        ("run: {}\nmodel: {width: wide}\n", "2:9: model.width", "found 'wide' (str)"),
        ("run: {methods: [vmeo]}\n", "1:17: run.methods[0]", "found 'vmeo', did you mean"),
        ("pretrain: null\n", "1:1: pretrain", "missing; the stage pretrain reads it"),
    ],
)
def test_wrong_overlays_name_their_line_and_write_nothing(study, overlay, place_and_key, word):
    folder = study(overlay)
    with pytest.raises(UserError) as caught:
        list(write_params(folder, folder.parents[1]))
    assert f"overlay.yaml:{place_and_key}: " in str(caught.value) and word in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["overlay.yaml"]


def test_a_fault_in_a_preset_or_in_the_root_is_found_where_it_stands(study):
    folder = study("run: {methods: [vmoe]}\n", wrong="\n\nmodel: {width: wide}\n")
    with pytest.raises(UserError, match=r"presets.yaml:4:11: model.width: found 'wide'"):
        params_text(folder, folder.parents[1], ["wrong"])
    root = folder.parents[1] / "params.yaml"
    root.write_text(root.read_text().replace("batch: 64", "batch: none", 1), encoding="utf-8")
    with pytest.raises(UserError, match=r"/params.yaml:\d+:\d+: teacher"):
        params_text(folder, folder.parents[1])


def test_what_is_written_says_where_it_comes_from(study):
    folder = study("run: {methods: [vmoe]}\n", one="model: {width: 48}\n")
    text = params_text(folder, folder.parents[1], ["one"])
    assert "# ../../params.yaml + overlay.yaml\nrun:\n" in text
    assert "# ../../params.yaml + presets.yaml\nmodel: {" in text
    assert "# ../../params.yaml\npretrain:\n" in text and "# With the presets one.\n" in text
    assert parse_yaml_document(text).data == values(folder, "one")


def test_changes():
    before, after = {"a": {"x": 1, "y": None}, "b": [1]}, {"a": {"x": 1, "y": 2, "z": "text"}}
    assert list(list_changes(before, after)) == [
        "a.y: null → 2",
        'a.z: (absent) → "text"',
        "b: [1] → (absent)",
    ]


def test_of_lists_of_mappings_the_entries_that_differ_are_listed():
    before = {"claims": [{"says": "one"}, {"says": "two"}]}
    after = {"claims": [{"says": "two"}, {"says": "three"}]}
    assert list(list_changes(before, after)) == [
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
    assert apply_assignments(TEXT, [assignment]) == TEXT.replace(before, after)


def test_a_file_of_ours_is_written_as_it_stands():
    text = (ROOT / "pipelines/quick/params.yaml").read_text(encoding="utf-8")
    assert apply_assignments(text, []) == text


def test_the_last_of_several_assignments_holds():
    text = apply_assignments(
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
        apply_assignments(TEXT, [assignment])
    assert f"-S {assignment}" in str(error.value) and word in str(error.value)


def test_a_long_assignment_is_shortened():
    with pytest.raises(UserError, match="more than 64 levels") as error:
        apply_assignments(TEXT, [f"pretrain.epochs={'[' * 5000}"])
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["", "- 1\n", "x\n"])
def test_a_file_that_holds_no_keys_is_said(text):
    with pytest.raises(UserError, match="found 'a' in the file; allowed: "):
        apply_assignments(text, ["a=1"])


def test_the_file_is_checked_and_left_as_it_was_where_it_is_not_in_order(tmp_path):
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    path: Path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    with pytest.raises(UserError) as error:
        write_assignments(path, ["run.seeds=[0, 1]", "pretrain.epochs=none"])
    assert "pretrain.epochs" in str(error.value) and "left as it was" in str(error.value)
    assert path.read_text(encoding="utf-8") == PARAMS
    assert write_assignments(path, ["run.seeds=[0, 1]"]) == ["run.seeds: [0] → [0, 1]"]
    assert load_yaml_document(path).data["run"]["seeds"] == [0, 1]
