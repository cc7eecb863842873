# People's files, with one to three places changed by values that hurt; ``make soak`` tries more.

import copy
import os
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecore.core.files import UserError, write_atomic
from moecore.core.source_layout import ROOT, SHIPPED
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.predict import meta_device_context
from moecore.pipeline.dvc_yaml import build_stage_entries, study_dvc_yaml_texts
from moecore.report.tables.metrics_by_method import unanswerable_claims
from moecore.study import check, model_rules, params_writer, questions
from moecore.study.params_layers import compose_layers, load_overlay_layer, load_root_layer
from moecore.study.study import Study
from moecore.study.yaml_document import load_yaml_document, parse_yaml_document
from moecore.training.job import Objective, TrainingJob, training_batch
from moecore.training.loop import train_step
from moecore.training.method import initialise_guide
from moecore.training.settings import build_optimizer
from tests.project import PARAMS, write_question


def text_of(question: questions.QuestionFile, *presets: str) -> str:
    place = question.root / "pipelines"
    origin = params_writer.ParamsOrigin("own/asked.yaml", "params.yaml", "schema", place)
    return params_writer.params_text(question.round(None).compose(presets), origin, presets)


@pytest.mark.parametrize("name", questions.list_question_names(ROOT))
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
    assert params_writer.write_and_diff_params(path, text_of(question))
    data = load_yaml_document(path).data
    assert data["model"] == root["model"] | {"width": 48}
    assert data["methods"] == root["methods"] and data["cost"] == root["cost"]
    assert data["data"] == {"pretrain": root["data"]["pretrain"]}
    assert "robustness" not in data and "finetune" not in data and "teacher" not in data
    assert not params_writer.write_and_diff_params(path, path.read_text(encoding="utf-8"))


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
    composed = questions.QuestionFile(SHIPPED, name).round(1).compose()
    (tmp_path / "overlay.yaml").write_text(params_writer.overlay_text(composed), encoding="utf-8")
    base = load_root_layer(SHIPPED)
    again = compose_layers([base, load_overlay_layer(tmp_path, base)], SHIPPED)
    text = str(composed.document.data).replace("../../data/", "data/")
    assert str(again.document.data) == text and again.stages == composed.stages


def test_changes():
    before, after = {"a": {"x": 1, "y": None}, "b": [1]}, {"a": {"x": 1, "y": 2, "z": "text"}}
    changes = list(params_writer.list_changes(before, after))
    assert changes == ["a.y: null → 2", 'a.z: (absent) → "text"', "b: [1] → (absent)"]
    # Of lists of mappings, the entries that differ
    before = {"claims": [{"says": "one"}, {"says": "two"}]}
    after = {"claims": [{"says": "two"}, {"says": "three"}]}
    changes = list(params_writer.list_changes(before, after))
    assert changes == ['claims: {"says": "one"} → (absent)', 'claims: (absent) → {"says": "three"}']


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
    assert params_writer.apply_assignments(TEXT, [assignment]) == TEXT.replace(before, after)


def test_a_file_is_written_as_it_stands_and_the_last_of_several_assignments_holds(tmp_path):
    text = write_question(tmp_path, "ours/quick").read_text(encoding="utf-8")
    assert params_writer.apply_assignments(text, []) == text
    words = ["pretrain.epochs=4", "pretrain={epochs: 5}", "pretrain.epochs=6"]
    text = params_writer.apply_assignments(TEXT, words)
    before = parse_yaml_document(TEXT).data
    assert parse_yaml_document(text).data == before | {"pretrain": {"epochs": 6}}
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
        params_writer.apply_assignments(TEXT, [assignment])
    assert f"-S {assignment}" in str(error.value) and word in str(error.value)


def test_a_long_assignment_is_shortened():
    with pytest.raises(UserError, match="more than 64 levels") as error:
        params_writer.apply_assignments(TEXT, [f"pretrain.epochs={'[' * 5000}"])
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["", "- 1\n", "x\n"])
def test_a_file_that_holds_no_keys_is_said(text):
    with pytest.raises(UserError, match="found 'a' in the file; allowed: "):
        params_writer.apply_assignments(text, ["a=1"])


def test_the_file_is_checked_and_left_as_it_was_where_it_is_not_in_order(tmp_path):
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    path: Path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    with pytest.raises(UserError) as error:
        params_writer.write_assignments(path, ["run.seeds=[0, 1]", "pretrain.epochs=none"])
    assert "pretrain.epochs" in str(error.value) and "left as it was" in str(error.value)
    assert path.read_text(encoding="utf-8") == PARAMS
    changes = params_writer.write_assignments(path, ["run.seeds=[0, 1]"])
    assert changes == ["run.seeds: [0] → [0, 1]"]
    assert load_yaml_document(path).data["run"]["seeds"] == [0, 1]


STUDIES = ("", "ermoe/image_text", "moge/swin", "moge/language", "ermoe/brain_age", "ours/sizes")
STUDIES += ("moge/fashion_150_epochs", "ours/ablations")
HURTS: tuple[Any, ...] = (
    *(None, True, False, "", "abc", "x" * 300, "\0", "é", "null", "1e3", "../../etc/passwd"),
    *(-1, 0, 1, 2, 3, 5, 7, 64, 1000, 4096, 10**12, 10**30, -(10**30), 2**63),
    *(0.5, 0.999, 1.5, 1e-30, 1e308, float("inf"), float("-inf"), float("nan")),
    *([], [0], [-1], [99], [1, 2, 3], ["a"], [None], [[[]]], [1e9], "last_2", "all"),
    *({}, {"kind": "nope"}, {"kind": None}, {"kind": ["a"]}, {"a": {"b": 1}}),
)
MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOAK = "MOECORE_SOAK" in os.environ
LARGE = 2_000_000  # parameters: a model that has more is built without weights only


@cache
def composed_study(name: str) -> tuple[dict, dict[str, str]]:
    """The params.yaml of a question of ours, or the root's, as data, and its dvc.yaml files."""
    if not name:
        data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        return data, {"dvc.yaml": (ROOT / "dvc.yaml").read_text(encoding="utf-8")}
    composed = questions.QuestionFile(ROOT, name).round(1).compose()
    stages = build_stage_entries(composed.stages)
    data = composed.document.data
    return data, study_dvc_yaml_texts(stages, data["run"])


def keys_in(value: Any, above: tuple = ()) -> Iterator[tuple]:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*above, key)
        if isinstance(one, dict | list):
            yield from keys_in(one, (*above, key))


def at(value: Any, keys: tuple) -> Any:
    for key in keys:
        value = value[key]
    return value


def change(data: dict, draw: random.Random) -> None:
    """One edit: another value, another place's, a key that is gone or new, or a scaled number."""
    places = list(keys_in(data))
    if not places:
        return
    *above, key = draw.choice(places)
    holder = at(data, tuple(above))
    old, what = holder[key], draw.random()
    if what < 0.15:
        del holder[key]
    elif what < 0.25 and isinstance(holder, dict):
        holder[draw.choice(("kind", "extra", "k", "number", "weight", ""))] = draw.choice(HURTS)
    elif what < 0.4:
        holder[key] = copy.deepcopy(at(data, draw.choice(places)))
    elif what < 0.6 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = draw.choice((old * 2, old * 1000, -old, old + 1, old / 3, old - 1))
    else:
        holder[key] = copy.deepcopy(draw.choice(HURTS))


def written(folder: Path, data: dict, stages: dict[str, str]) -> Path:
    for name, text in stages.items():
        write_atomic(folder / name, text)
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


@pytest.mark.parametrize("study", STUDIES)
@settings(MANY, max_examples=40 if SOAK else 10)
@given(draw=st.randoms(use_true_random=False), edits=st.integers(1, 3))
def test_no_edit_of_a_file_gives_a_traceback(tmp_path_factory, study, draw, edits):
    """In order, or lines that begin with the file and are no longer than a screen."""
    data, stages = copy.deepcopy(composed_study(study))
    for _ in range(edits):
        change(data, draw)
    path = written(tmp_path_factory.mktemp("edited"), data, stages)
    try:
        check.check_study(path, also=unanswerable_claims)
    except UserError as error:
        lines = str(error).split("\n")
        assert all(line.startswith(f"{path}") for line in lines), lines
        assert max(map(len, lines)) < 2000


@pytest.fixture(scope="module")
def every_method() -> dict:
    data = yaml.safe_load(PARAMS)
    for name, method in composed_study("ours/all_methods")[0]["methods"].items():
        data["methods"][name] = {key: one for key, one in method.items() if key != "model"}
        if isinstance(method.get("blocks"), list):
            del data["methods"][name]["blocks"]
    data["run"]["methods"] = list(data["methods"])
    data["calibrate"] = {"calibrator": {"kind": "temperature"}}
    return data


@settings(MANY, max_examples=150 if SOAK else 40)
@given(draw=st.randoms(use_true_random=False))
def test_what_is_accepted_passes_a_step(tmp_path_factory, every_method, draw):
    data = copy.deepcopy(every_method)
    chosen = [draw.choice(data["run"]["methods"]) for _ in range(2)]
    data["run"]["methods"] = list(dict.fromkeys(chosen))
    part = {key: data[key] for key in ("model", "pretrain", "teacher_router")}
    part["methods"] = {name: data["methods"][name] for name in data["run"]["methods"]}
    for key in list(part):
        del data[key]
    change(part, draw)
    data |= part
    path = written(tmp_path_factory.mktemp("edited"), data, composed_study("")[1])
    try:
        study = check.check_study(path).study
    except UserError:
        return
    for name in study.run.methods:
        step(study, name)


def step(study: Study, name: str) -> None:
    method, training = study.methods[name], study.pretrain
    image = model_rules.planned_image_spec(model_rules.load_data_previews(study)["pretrain"])
    backbone = method.merge_model_settings(study.model)
    with meta_device_context():
        small = backbone.build(image, method.moe)
    if sum(weight.numel() for weight in small.parameters()) > LARGE:
        return
    torch.manual_seed(0)
    model = backbone.build(image, method.moe)
    guide = None
    if method.guided:
        guide = initialise_guide(study.teacher.model.build(image), method, backbone.stages)
    pixels = np.random.default_rng(0).integers(0, 256, (8, image.channels, *image.shape))
    split = Split(pixels.astype(np.uint8), np.arange(8) % image.task.outputs)
    data = load_split_where_it_fits(split, "cpu")
    objective = Objective(method.losses, training.label_smoothing, method.distillation)
    job = TrainingJob(model, data, data, objective, guide, method.views)
    few = training.model_copy(update={"batch": 8})
    batch = training_batch(job, few, 0, 0)
    terms, *_ = train_step(job, few, build_optimizer(model, few), batch, 1e-4, torch.float32, 0.5)
    assert all(torch.isfinite(value).all() for value in terms.values()), terms
