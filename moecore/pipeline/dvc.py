"""The dvc.yaml of the main run and of questions, from the table of stages in moecore/study.

The folder in which a question runs is a separate DVC project with the root's cache, so DVC reads
one project at a time. After every stage DVC rewrites the whole dvc.lock next to the dvc.yaml, so a
large study has one dvc.yaml per kind of stage: ``steps/<kind>/dvc.yaml``.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from moecore.core.files import UserError
from moecore.core.source_layout import CODE, STAGE_MODULES, list_project_dvc_files
from moecore.study.document import load_yaml_document
from moecore.study.stages import CODE_STAGE, EACH, LAST_STAGES, ROWS, STAGES, Stage, hash_file

HEAD = "# Written by `moecore study write` from moecore/study/stages.py.\n"
MAIN_HEAD = """\
# params.yaml → prepared data → teacher → its routers → every method pretrained, fine-tuned,
# calibrated, attacked, measured → one report. `moecore plan` says what would run, and why.
# DVC does not follow imports. The stage `code`, which always runs, hashes the source that decides
# results, wherever moecore is installed; the others depend on these hashes: a new file marks
# nothing stale, an edited one exactly what uses it. It hashes the settings too, as DVC's run cache
# overlooks those called `size`: each key under `params` has its file in artifacts/code/settings.
# Written by `moecore study write` from moecore/study/stages.py.
"""
RUN_CONFIG = """\
[cache]
    dir = ../../../.dvc/cache
[core]
    analytics = false
    check_update = false
    autostage = false
"""
WITHOUT_GIT = "    no_scm = true\n"  # for the section [core], which is last
LARGE_STUDY = 500  # stages
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}


def study_dvc_yaml_texts(
    stages: Mapping[str, Any], run: Mapping[str, Any], head: str = HEAD
) -> dict[str, str]:
    """Return path → text of a study's dvc.yaml, several if it has many stages; run: section."""
    if count_stages(stages, run) <= LARGE_STUDY:
        return {"dvc.yaml": head + _dump_yaml({"stages": dict(stages)})}
    per_method = [name for name, stage in stages.items() if "method" in stage.get("matrix", {})]
    rest = {name: stage for name, stage in stages.items() if name not in per_method}
    texts = {"dvc.yaml": head + _dump_yaml({"stages": rest})}
    for name in per_method:
        stage = {name: {"wdir": "../..", **stages[name]}}
        texts[f"steps/{name}/dvc.yaml"] = head + _dump_yaml(
            {"vars": ["../../params.yaml"], "stages": stage}
        )
    return texts


def main_dvc_yaml_text() -> str:
    """Return the text of the main run's dvc.yaml: the usual stages, separated by blank lines."""
    text = _dump_yaml({"stages": stage_definitions()})
    return MAIN_HEAD + re.sub(r"(?m)^(  \w+:)$", r"\n\1", text).replace("\n\n", "\n", 1)


def count_stages(stages: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    """Return the number of stages after DVC expands each matrix with the lists of ``run``."""
    total = 0
    for stage in stages.values():
        lists = [
            text.strip("${}").removeprefix("run.") for text in stage.get("matrix", {}).values()
        ]
        total += math.prod(len(run.get(name) or ()) for name in lists)
    return total


def list_our_stages(folder: Path) -> list[str]:
    """Return the stages in a project's dvc.yaml files that this version defines."""
    names: list[str] = []
    for file in list_project_dvc_files(folder):
        data = load_yaml_document(file).data
        names += (isinstance(data, dict) and data.get("stages")) or ()
    return [name for name in names if name in STAGES]


def stage_definitions(names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return stages' entries in dvc.yaml, by default of the usual stages; UserError if unknown."""
    names = [stage.name for stage in ROWS if stage.usual] if names is None else names
    if unknown := [name for name in names if name not in STAGES]:
        raise UserError(f"stages: found {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    chosen = dict.fromkeys((CODE_STAGE, *names, *LAST_STAGES))
    entries = {name: dvc_entry(STAGES[name]) for name in chosen}
    for entry in entries.values():
        entry = entry.get("do", entry)
        if "deps" in entry:
            entry["deps"] = _without_unwritten(entry["deps"], entries.values())
    return entries


def dvc_entry(stage: Stage) -> dict[str, Any]:
    """Return the entry of a stage in dvc.yaml, with all possible dependencies."""
    item = [f"{{{name}}}" for name in stage.item]
    command = [f"python -m {STAGE_MODULES}{stage.module}", stage.words or " ".join(item)]
    settings = [f"code/settings/{key}.json" for key in stage.reads]
    deps = [*(f"code/{hash_file(path)}" for path in stage.hashes), *stage.after, *settings]
    outs = [f"measured/{stage.item_path}.json", f"history/{stage.item_path}"]
    if stage.folder or stage.each in ("seed", "model"):
        outs.insert(0, stage.item_path)
    entry = {
        "cmd": " ".join(command).strip(),
        "deps": [f"artifacts/{path}" for path in deps],
        "params": list(stage.reads),
        "outs": [f"artifacts/{path}" for path in outs],
    }
    if not stage.reads:
        del entry["deps"], entry["params"]
    template = "${{{}}}" if stage.each == "data" else "${{item.{}}}"
    names = {name: template.format(name) for name in stage.item}
    entry = {key: _fill(value, names) for key, value in entry.items()} | dict(stage.entry)
    if stage.each == "data":
        return {"foreach": EACH["data"]["key"], "do": {"desc": stage.says, **entry}}
    matrix = {"matrix": dict(EACH[stage.each])} if item else {}
    return {"desc": stage.says, **matrix, **entry}


def _fill(value: str | list[str], names: Mapping[str, str]) -> str | list[str]:
    """Replace our names in texts by DVC's names: ${item.seed} for {seed}."""
    if isinstance(value, list):
        return [text.format(**names) for text in value]
    return value.format(**names)


def _without_unwritten(deps: Iterable[str], stages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return ``deps`` without artifacts that no stage writes, such as a missing teacher."""
    written = {_artifact_folder(path) for stage in stages for path in _out_paths(stage)}
    written.add(str(CODE))
    folders = {path: _artifact_folder(path) for path in deps}
    return [
        path
        for path, folder in folders.items()
        if folder in written or "$" in folder or not path.startswith("artifacts/")
    ]


def _artifact_folder(path: str) -> str:
    return "/".join(path.split("/")[:2])


def _out_paths(stage: Mapping[str, Any]) -> list[str]:
    """Return the paths of outs, which may have options: ``{path: {cache: false}}``."""
    outs = stage.get("do", stage)["outs"]
    return [out if isinstance(out, str) else next(iter(out)) for out in outs]


def _dump_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Return a mapping as YAML; only values that contain mappings or lists take several lines."""
    text = ""
    for key, inner in value.items():
        values = inner.values() if isinstance(inner, Mapping) else ()
        if any(isinstance(item, Mapping | list) for item in values):
            text += f"{indent}{key}:\n{_dump_yaml(inner, f'{indent}  ')}"
        else:
            shown = inner if isinstance(inner, str) else _flow_style(inner)
            text += fill(
                f"{indent}{key}: {shown}", 100, subsequent_indent=f"{indent}  ", **WHOLE_WORDS
            )
            text += "\n"
    return text


def _flow_style(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow_style(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow_style, value))}]"
    return value if isinstance(value, str) and "$" not in value else json.dumps(value)
