"""dvc.yaml says exactly what its stages read: their params, their data and the code behind them."""

import ast
import copy
import importlib
import inspect
import re
import shlex
import typing
from collections.abc import Iterator

import pytest

from moecore.core.source_layout import FAMILIES, ROOT
from moecore.pipeline import dvc
from moecore.pipeline.code_hashes import hash_settings
from moecore.study import stages as stage_table
from moecore.study.document import Document, load_yaml_document, parse_yaml_document
from moecore.study.settings import params_keys_by_field
from tests import project
from tests.project import compose_shipped

NO_PART = ("code", "numbers")  # the hashes of the code, and a copy of a file
STAGES = dvc.stage_definitions([*stage_table.STAGES])
STAGES = {name: stage.get("do", stage) for name, stage in STAGES.items() if name not in NO_PART}


def test_the_main_dvc_yaml_is_the_table_of_stages_with_a_command_per_line(monkeypatch):
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    assert text == dvc.main_dvc_yaml_text(), "run `moecore study write`"
    assert parse_yaml_document(text).data == {"stages": dvc.stage_definitions()}
    assert len(text.splitlines()) <= 170
    before = dvc.main_dvc_yaml_text().splitlines()
    row = stage_table.STAGES["pretrain"]._replace(words="{method} {seed} again")
    monkeypatch.setitem(stage_table.STAGES, "pretrain", row)
    after = dvc.main_dvc_yaml_text().splitlines()
    changed = [pair for pair in zip(before, after, strict=True) if len(set(pair)) == 2]
    assert len(changed) == 1 and changed[0][1].endswith("${item.seed} again")


def test_what_is_written_is_read_also_where_a_kind_of_stage_has_its_file():
    definitions = dvc.stage_definitions([*stage_table.STAGES])
    [whole] = dvc.study_dvc_yaml_texts(definitions, {}).values()
    assert parse_yaml_document(whole).data == {"stages": definitions}
    texts = dvc.study_dvc_yaml_texts(definitions, {"methods": range(100), "seeds": range(100)})
    step = parse_yaml_document(texts["steps/prune/dvc.yaml"]).data
    assert step["vars"] == ["../../params.yaml"]
    assert step["stages"] == {"prune": {"wdir": "../..", **definitions["prune"]}}


@pytest.mark.parametrize("stage", stage_table.ROWS, ids=lambda row: row.name)
def test_a_command_tells_its_stage(stage):
    entry = dvc.stage_definitions([*stage_table.STAGES])[stage.name]
    words = entry.get("do", entry)["cmd"].split()[1:]
    if words[0] == "-m":
        assert stage_table.stage_of_command(words) == stage.name


def script_and_words(stage: dict) -> tuple[str, list[str]]:
    """``python -m moecore.stages.pretrain ${item.method}`` → pretrain, [${item.method}]."""
    words = shlex.split(stage["cmd"])
    return words[2].removeprefix("moecore.stages."), words[3:]


def tree_of(script: str) -> ast.Module:
    return ast.parse((ROOT / "stages" / f"{script}.py").read_text(encoding="utf-8"))


def calls_of(script: str, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree_of(script)) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", "") == name]


def argument_names(script: str) -> list[str]:
    """The arguments of the function that the script hands to ``run_stage``."""
    (called,) = (call.args[0].id for call in calls_of(script, "run_stage"))
    module = importlib.import_module(f"moecore.stages.{script}")
    return list(inspect.signature(getattr(module, called)).parameters)


def read_calls(script: str) -> dict[str, str]:
    """What fills the templates: `read_params(Params, data=name)` says that `{data}` is `name`."""
    words = [word for call in calls_of(script, "read_params") for word in call.keywords]
    return {w.arg: w.value.id for w in words if w.arg and isinstance(w.value, ast.Name)}


def keys_of(stage: dict) -> dict[str, str]:
    """Field of the script's Params → key of params.yaml, as dvc.yaml writes it."""
    script, words = script_and_words(stage)
    if script == "measure":
        # any measurement may look at region experts, which the method names; routing does not
        names = {"method": "methods.${item.method}"} if words[0] == "${item.what}" else {}
        return {words[0]: words[0]} | names
    if script == "calculate":
        return {words[0]: words[0]}
    if script == "robustness":  # as `measure` does it
        return {script: script}
    if (params := params_of(stage)) is None:
        return {}
    filled = dict(zip(argument_names(script), words, strict=True))
    fills = {slot: filled[argument] for slot, argument in read_calls(script).items()}
    keys, fill = params_keys_by_field(params), lambda match: fills[match[1]]
    return {field: re.sub(r"\{(\w+)\}", fill, template) for field, template in keys.items()}


def params_of(stage: dict) -> type | None:
    """What the script reads of params.yaml; ``finetune`` has other settings for attacked images."""
    script, words = script_and_words(stage)
    name = "AdversarialFinetuneParams" if words[:1] == ["adversarial"] else "Params"
    return getattr(importlib.import_module(f"moecore.stages.{script}"), name, None)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_params_that_it_reads_on_its_script_and_on_their_parts(name):
    keys = set(STAGES[name].get("params", []))
    assert keys == set(keys_of(STAGES[name]).values())
    script, _ = script_and_words(STAGES[name])
    deps = STAGES[name]["deps"]
    settings = {path for path in deps if path.startswith("artifacts/code/settings/")}
    if "params.yaml" not in deps:
        assert settings == {f"artifacts/code/settings/{key}.json" for key in keys}
    assert f"artifacts/code/stages/{script}.json" in deps
    assert not [path for path in deps if path.startswith(("moecore", "artifacts/hist"))]
    if "${item.method}" in STAGES[name]["cmd"]:
        assert "artifacts/code/methods/${item.method}.json" in deps
    if script in ("measure", "calculate", "robustness", "transferred"):
        what = (
            script_and_words(STAGES[name])[1][0]
            if script in ("measure", "calculate")
            else "robustness"
        )
        assert f"artifacts/code/measure/{what}.json" in deps
        return
    for field, key in keys_of(STAGES[name]).items():
        modules = parts_in(params_of(STAGES[name]).model_fields[field].annotation)
        parts = [f"moecore.{family.replace('/', '.')}." for family in FAMILIES]
        if not any(part in text for part in parts for text in modules):
            continue
        top = key.split(".")[0]
        exact = {"data": f"sections/{key}", "methods": key.replace(".", "/", 1)}
        files = {"model": "methods/${item.method}"} | exact
        assert f"artifacts/code/{files.get(top, f'sections/{top}')}.json" in deps


def paths_dvc_leaves_out(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of settings that are not in the key of DVC's run cache."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key in ("size", "nfiles"):
            yield (*path, key)
        elif isinstance(inner, (dict, list)):
            yield from paths_dvc_leaves_out(inner, (*path, key))


@pytest.mark.parametrize("study", [None, "ours/ablations", "ours/sizes"])
def test_settings_that_dvcs_run_cache_leaves_out_have_a_hash_that_stages_depend_on(study):
    document = compose_shipped(study).document if study else load_yaml_document(project.SHIPPED)
    before = hash_settings(document)
    paths = list(paths_dvc_leaves_out(document.data))
    assert paths
    for path in paths:
        key = ".".join(path[: 1 + (path[0] in ("data", "methods", "paper_models"))])
        if key not in before:
            assert path[1] not in document.data["run"]["methods"], "a method that no stage trains"
            continue
        edited = Document(document.path, copy.deepcopy(document.data))
        holder = edited.data
        for word in path[:-1]:
            holder = holder[word]
        holder[path[-1]] = "another"
        after = hash_settings(edited)
        assert {name for name in before if before[name] != after[name]} == {key}, path


def test_equal_settings_have_equal_hashes():
    run = {"methods": []}
    one = Document("params.yaml", {"run": run, "model": {"width": 8, "rate": 1e-3}})
    other = Document("params.yaml", {"run": run, "model": {"rate": 0.001, "width": 8.0}})
    assert hash_settings(one) == hash_settings(other)


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
    ("name", "number"), [("ours/ablations", 1), ("ours/routers", 1), ("moge/swin", 2)]
)
def test_no_lock_file_of_a_study_has_hundreds_of_stages_but_of_one_kind(name, number):
    """After every stage DVC reads and writes the lock file that has it: 1 s per 100 stages."""
    composed = compose_shipped(name, number=number)
    run = composed.document.data["run"]
    texts = dvc.study_dvc_yaml_texts(dvc.stage_definitions(composed.stages), run)
    for file, text in texts.items():
        stages = parse_yaml_document(text).data["stages"]
        assert len(stages) == 1 or dvc.count_stages(stages, run) <= dvc.LARGE_STUDY, file
    assert (len(texts) > 1) == (name == "ours/ablations")
