"""Whatever is in params.yaml, the check answers in words; what it accepts can be trained."""

# People's files, with one to three places changed by values that hurt; ``make soak`` tries more.

import copy
import os
import random
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

from moecore.core.files import UserError, write_whole
from moecore.core.source_layout import ROOT
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.predict import meta_device_context
from moecore.pipeline.dvc import stage_definitions, study_dvc_yaml_texts
from moecore.report.tables.metrics_by_method import unfit_metric_problems
from moecore.study.check import check_study
from moecore.study.model_rules import image_spec, load_previews
from moecore.study.questions import QuestionFile
from moecore.study.study import Study
from moecore.training.guide import build_guide
from moecore.training.job import Objective, TrainingJob, training_batch
from moecore.training.loop import train_step
from moecore.training.settings import build_optimizer
from tests.project import PARAMS

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
    composed = QuestionFile(ROOT, name).round(1).compose()
    stages = stage_definitions(composed.stages)
    data = composed.document.data
    return data, study_dvc_yaml_texts(stages, data["run"])


def keys_in(value: Any, above: tuple = ()) -> Iterator[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
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
        write_whole(folder / name, text)
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
        check_study(path, also=unfit_metric_problems)
    except UserError as error:
        lines = str(error).split("\n")
        assert all(line.startswith(f"{path}") for line in lines), lines
        assert max(map(len, lines)) < 2000


@pytest.fixture(scope="module")
def every_method() -> dict:
    """A small study of every method."""
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
        study = check_study(path).study
    except UserError:
        return
    for name in study.run.methods:
        step(study, name)


def step(study: Study, name: str) -> None:
    """One update of a method on eight random images."""
    method, training = study.methods[name], study.pretrain
    assert study.model is not None and training is not None
    image = image_spec(load_previews(study)["pretrain"])
    backbone = method.merge_model_settings(study.model)
    with meta_device_context():
        small = backbone.build(image, method.moe)
    if sum(weight.numel() for weight in small.parameters()) > LARGE:
        return
    torch.manual_seed(0)
    model = backbone.build(image, method.moe)
    guide = None
    if method.guided:
        guide = build_guide(study.teacher.model.build(image), method, backbone.stages)
    pixels = np.random.default_rng(0).integers(0, 256, (8, image.channels, *image.shape))
    split = Split(pixels.astype(np.uint8), np.arange(8) % image.task.outputs)
    data = load_split_where_it_fits(split, "cpu")
    objective = Objective(method.losses, training.label_smoothing, method.distillation)
    job = TrainingJob(model, data, data, objective, guide, method.views)
    few = training.model_copy(update={"batch": 8})
    batch = training_batch(job, few, 0, 0)
    terms, *_ = train_step(job, few, build_optimizer(model, few), batch, 1e-4, torch.float32, 0.5)
    assert all(torch.isfinite(value).all() for value in terms.values()), terms
