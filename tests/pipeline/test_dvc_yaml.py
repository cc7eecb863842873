"""dvc.yaml says exactly what its stages read: their params, their data and the code behind them."""

import ast
import importlib
import inspect
import re
import shlex
import typing
from pathlib import Path

import pytest

from moecore.core.sources import FAMILIES, ROOT
from moecore.pipeline.dvc_file import CONFIG, study_dvc
from moecore.study.document import load
from moecore.study.overlay import resolve
from moecore.study.params import keys

MAIN = load(str(ROOT / "dvc.yaml")).data["stages"]
MORE = load(str(ROOT / "pipelines/stages.yaml")).data["stages"]
NO_PART = ("code", "numbers")  # the hashes of the code, and a copy of a file
STAGES = {
    name: stage.get("do", stage) for name, stage in (MAIN | MORE).items() if name not in NO_PART
}
STUDIES = sorted(path.parent for path in (ROOT / "pipelines").glob("*/dvc.yaml"))


def script_and_words(stage: dict) -> tuple[str, list[str]]:
    """``python -m stages.pretrain ${item.method}`` → pretrain, [${item.method}]."""
    words = shlex.split(stage["cmd"])
    return words[2].removeprefix("stages."), words[3:]


def tree_of(script: str) -> ast.Module:
    return ast.parse((ROOT / "stages" / f"{script}.py").read_text(encoding="utf-8"))


def argument_names(script: str) -> list[str]:
    """The arguments of the function that the script hands to ``run_stage``."""
    (called,) = (
        node.args[0].id
        for node in ast.walk(tree_of(script))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_stage"
    )
    module = importlib.import_module(f"stages.{script}")
    return list(inspect.signature(getattr(module, called)).parameters)


def read_calls(script: str) -> dict[str, str]:
    """What fills the templates: ``read(Params, data=name)`` says that ``{data}`` is ``name``."""
    calls = (
        node
        for node in ast.walk(tree_of(script))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "read"
    )
    return {
        word.arg: word.value.id
        for call in calls
        for word in call.keywords
        if word.arg and isinstance(word.value, ast.Name)
    }


def keys_of(stage: dict) -> dict[str, str]:
    """Field of the script's Params → key of params.yaml, as dvc.yaml writes it."""
    script, words = script_and_words(stage)
    if script == "measure":
        return {words[0]: words[0]}
    if (params := params_of(stage)) is None:
        return {}
    filled = dict(zip(argument_names(script), words, strict=True))
    fills = {slot: filled[argument] for slot, argument in read_calls(script).items()}
    return {
        field: re.sub(r"\{(\w+)\}", lambda match: fills[match[1]], template)
        for field, template in keys(params).items()
    }


def params_of(stage: dict) -> type | None:
    """What the script reads of params.yaml; ``finetune`` has other settings for attacked images."""
    script, words = script_and_words(stage)
    name = "AdversarialParams" if words[:1] == ["adversarial"] else "Params"
    return getattr(importlib.import_module(f"stages.{script}"), name, None)


@pytest.mark.parametrize("name", STAGES)
def test_params_are_what_the_stage_reads(name):
    assert set(STAGES[name].get("params", [])) == set(keys_of(STAGES[name]).values())


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_its_script_and_on_no_source_file(name):
    script, _ = script_and_words(STAGES[name])
    deps = STAGES[name]["deps"]
    assert f"artifacts/code/stages/{script}.json" in deps
    assert not [path for path in deps if path.startswith(("moecore", "stages"))]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_reads_parts_depends_on_their_code(name):
    deps = STAGES[name]["deps"]
    if script_and_words(STAGES[name])[0] == "measure":
        what = script_and_words(STAGES[name])[1][0]
        assert f"artifacts/code/measure/{what}.json" in deps
        return
    for field, key in keys_of(STAGES[name]).items():
        modules = parts_in(params_of(STAGES[name]).model_fields[field].annotation)
        if not any(
            f"moecore.{family.replace('/', '.')}." in text
            for family in FAMILIES
            for text in modules
        ):
            continue
        top = key.split(".")[0]
        exact = {"data": f"sections/{key}", "methods": key.replace(".", "/", 1)}
        files = {"model": "methods/${item.method}"} | exact
        assert f"artifacts/code/{files.get(top, f'sections/{top}')}.json" in deps


def parts_in(annotation: object, seen: frozenset = frozenset()) -> set[str]:
    """The modules of the parts (classes with a ``kind``) inside a type."""
    found: set[str] = set()
    for inner in typing.get_args(annotation):
        found |= parts_in(inner, seen)
    if hasattr(annotation, "model_fields") and annotation not in seen:
        if "kind" in annotation.model_fields:
            found.add(f"{annotation.__module__}.")
        for field in annotation.model_fields.values():
            found |= parts_in(field.annotation, seen | {annotation})
    return found


@pytest.mark.parametrize(
    "name", [name for name, stage in STAGES.items() if "${item.method}" in stage["cmd"]]
)
def test_what_is_done_with_a_model_depends_on_the_code_of_its_parts(name):
    assert "artifacts/code/methods/${item.method}.json" in STAGES[name]["deps"]


def test_no_file_is_out_of_two_stages():
    written = [
        entry if isinstance(entry, str) else next(iter(entry))
        for stage in STAGES.values()
        for kind in ("outs", "metrics", "plots")
        for entry in stage.get(kind, [])
    ]
    assert len(written) == len(set(written))


def test_nothing_depends_on_histories():
    deps = [path for stage in STAGES.values() for path in stage["deps"]]
    assert not [path for path in deps if path.startswith("artifacts/history")]


def test_the_code_of_every_room_that_decides_a_result_is_hashed():
    from moecore.pipeline.closures import DECIDING

    assert set(MAIN["code"]["deps"]) == {
        "params.yaml",
        "stages",
        *(f"moecore/{room}" for room in (*DECIDING, "report")),
    }


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_the_dvc_yaml_of_a_study_is_written_from_the_roots(study):
    text = (study / "dvc.yaml").read_text(encoding="utf-8")
    assert text == study_dvc(resolve(study, ROOT).stages)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_a_study_is_a_dvc_project_of_its_own(study):
    config = (study / ".dvc/config").read_text(encoding="utf-8")
    assert config == CONFIG.format(cache="../../../.dvc/cache")


def test_a_stage_without_what_it_would_read_of_another_one():
    text = study_dvc(["prepare", "teacher_router", "pretrain"])
    assert "artifacts/teacher/" not in text and "artifacts/teacher_router/" in text
    assert "always_changed: true" in text and "  compare:" in text


def test_what_a_stage_feeds_to_another_one():
    out = "- artifacts/out_of_fold/${item.phase}/${item.method}/${item.seed}\n"
    assert out in study_dvc(["pretrain", "out_of_fold", "calibrate"])
    assert out not in study_dvc(["pretrain", "calibrate"])


@pytest.mark.parametrize("path", [ROOT, *STUDIES], ids=lambda path: path.name)
def test_every_params_file_is_in_order(path: Path):
    from moecore.study.whole import check

    check(path / "params.yaml")
