"""Every dvc.yaml says exactly what its stages read: the params of their models and the files that their imports reach."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
from pathlib import Path

import pytest

from moecore.params import keys
from moecore.sources import FAMILIES, ROOT, closure
from moecore.yaml12 import load

PIPELINES = [ROOT / "dvc.yaml", *sorted((ROOT / "pipelines").glob("*/dvc.yaml"))]


def stages_of(pipeline: Path) -> list:
    stages = load(str(pipeline)).data["stages"]
    return [pytest.param(pipeline, stage.get("do", stage), id=f"{pipeline.parent.name}:{name}") for name, stage in stages.items()]


STAGES = [param for pipeline in PIPELINES for param in stages_of(pipeline)]
WITH_MODULE = [param for param in STAGES if "-m stages." in param.values[1]["cmd"]]


def module_and_words(stage: dict) -> tuple[str, list[str]]:
    words = shlex.split(re.sub(r"\$\{([^}]*)\}", lambda match: "${" + match[1].replace(" ", "") + "}", stage["cmd"]))
    at = words.index("-m") + 1
    return words[at].removeprefix("stages."), words[at + 1 :]


def argument_names(name: str) -> list[str]:
    """The arguments of the function that the script hands to ``run_stage``."""
    tree = ast.parse((ROOT / "stages" / f"{name}.py").read_text(encoding="utf-8"))
    called = [node.args[0].id for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_stage"]
    return list(inspect.signature(getattr(importlib.import_module(f"stages.{name}"), called[0])).parameters)


def read_calls(name: str) -> dict[str, str]:
    """What fills the templates: ``read(Params, data=name)`` says that ``{data}`` is the argument ``name``."""
    tree = ast.parse((ROOT / "stages" / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "read"]
    return {word.arg: word.value.id for call in calls for word in call.keywords if word.arg and isinstance(word.value, ast.Name)}


def params_of(name: str) -> type | None:
    return getattr(importlib.import_module(f"stages.{name}"), "Params", None)


def paths(stage: dict, key: str) -> list[str]:
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in stage.get(key, [])]


@pytest.mark.parametrize(("pipeline", "stage"), WITH_MODULE)
def test_params_are_what_the_stage_reads(pipeline, stage):
    name, words = module_and_words(stage)
    if name == "code":
        expected = {"methods": {".".join(words)}, "section": {words[1]}, "stage": set()}[words[0]]
    elif (model := params_of(name)) is None:
        expected = set()
    else:
        filled = dict(zip(argument_names(name), words, strict=True))
        fills = {slot: filled[argument] for slot, argument in read_calls(name).items()}
        expected = {re.sub(r"\{(\w+)\}", lambda match: fills[match[1]], template) for template in keys(model).values()}
    declared = {key for entry in stage.get("params", []) for key in ([entry] if isinstance(entry, str) else next(iter(entry.values())))}
    assert declared == expected


@pytest.mark.parametrize(("pipeline", "stage"), WITH_MODULE)
def test_a_stage_depends_on_the_hashes_of_what_its_imports_reach(pipeline, stage):
    name, words = module_and_words(stage)
    deps = {os.path.relpath(pipeline.parent / stage.get("wdir", ".") / path, ROOT) for path in paths(stage, "deps") if "${" not in path}
    home = os.path.relpath(pipeline.parent, ROOT)
    if name != "code":
        assert os.path.normpath(f"{home}/artifacts/code/stages/{name}.json") in deps
        assert not [path for path in deps if path.endswith(".py")], "the hashes stand for the source files"
        return
    folders = tuple(f"{path}/" for path in deps)
    reached = {file.as_posix() for file in closure(Path("stages/code.py"))} | ({"stages/", "moecore/"} if words[0] == "stage" else {"moecore/"})
    assert {path for path in reached if path not in deps and not path.startswith(folders)} == set(), "hashed or imported, but not in deps"


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda path: path.parent.name)
def test_the_code_of_exactly_the_stages_there_are_is_hashed(pipeline):
    stages = load(str(pipeline)).data["stages"]
    scripts = {module_and_words(param.values[1])[0] for param in stages_of(pipeline) if "-m stages." in param.values[1]["cmd"]}
    hashed = stages["code_of_stage"]["foreach"]
    assert set(hashed) == scripts - {"code"} and len(hashed) == len(set(hashed))


@pytest.mark.parametrize(("pipeline", "stage"), WITH_MODULE)
def test_a_stage_that_reads_parts_depends_on_their_code(pipeline, stage):
    name, _ = module_and_words(stage)
    if name == "code" or (model := params_of(name)) is None:
        return
    hashed = [path.partition("artifacts/code/")[2] for path in paths(stage, "deps") if "artifacts/code/" in path]
    for field, key in keys(model).items():
        annotation = model.model_fields[field].annotation
        if not any(re.search(rf"moecore\.{family}\.", text) for family in FAMILIES for text in _modules(annotation)):
            continue
        section = key.split(".")[0].split("{")[0]
        assert any(path.startswith(section) for path in hashed), f"{key} names parts, so deps need artifacts/code/{section}…"


def _modules(annotation: object, seen: frozenset = frozenset()) -> set[str]:
    """The modules of the parts (classes with a ``kind``) inside a type."""
    import typing

    found: set[str] = set()
    for inner in typing.get_args(annotation):
        found |= _modules(inner, seen)
    if isinstance(annotation, type) and hasattr(annotation, "model_fields") and annotation not in seen:
        if "kind" in annotation.model_fields:
            found.add(annotation.__module__ + ".")
        for field in annotation.model_fields.values():
            found |= _modules(field.annotation, seen | {annotation})
    return found


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda path: path.parent.name)
def test_no_file_is_out_of_two_stages(pipeline):
    written = [path for param in stages_of(pipeline) for kind in ("outs", "metrics", "plots") for path in paths(param.values[1], kind)]
    assert len(written) == len(set(written))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda path: path.parent.name)
def test_make_deps_has_nothing_to_do(pipeline):
    spec = importlib.util.spec_from_file_location("dvc_deps", ROOT / "tools/dvc_deps.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert pipeline.read_text(encoding="utf-8") == tool.current(pipeline), "run `make deps`"


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda path: path.parent.name)
def test_every_params_file_is_in_order(pipeline):
    from moecore.study import check

    check(pipeline.with_name("params.yaml"))
