"""Writes dvc.yaml, for the main run and for questions, from the table of stages.

The folder in which a question runs is a separate DVC project with the root's cache, so DVC reads
one project at a time. After every stage DVC rewrites the whole dvc.lock next to the dvc.yaml, so a
large study has one dvc.yaml per kind of stage: ``steps/<kind>/dvc.yaml``.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from moecore.core.files import UserError
from moecore.core.source_layout import HASHES_DIR, STAGES_PREFIX
from moecore.study.stages import (
    CODE_STAGE,
    DVC_MATRICES,
    LAST_STAGES,
    STAGE_ROWS,
    STAGES,
    Stage,
    hash_file_name,
)

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
CONFIG = """\
[core]
    analytics = false
    check_update = false
    autostage = false
"""
RUN_CONFIG = f"[cache]\n    dir = ../../../.dvc/cache\n{CONFIG}"
WITHOUT_GIT = "    no_scm = true\n"  # for the section [core], which is last
LARGE_STUDY = 500  # stages
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}


def study_dvc_yaml_texts(
    stages: Mapping[str, Any], run: Mapping[str, Any], head: str = HEAD
) -> dict[str, str]:
    """Return path → text of a study's dvc.yaml, or of several files if it is large."""
    if count_expanded_stages(stages, run) <= LARGE_STUDY:
        return {"dvc.yaml": head + _dump_yaml({"stages": dict(stages)})}
    per_method = [name for name, stage in stages.items() if "method" in stage.get("matrix", {})]
    rest = {name: stage for name, stage in stages.items() if name not in per_method}
    texts = {"dvc.yaml": head + _dump_yaml({"stages": rest})}
    for name in per_method:
        stage = {name: {"wdir": "../..", **stages[name]}}
        text = _dump_yaml({"vars": ["../../params.yaml"], "stages": stage})
        texts[f"steps/{name}/dvc.yaml"] = head + text
    return texts


def main_dvc_yaml_text() -> str:
    text = _dump_yaml({"stages": build_stage_entries()})
    return MAIN_HEAD + re.sub(r"(?m)^(  \w+:)$", r"\n\1", text).replace("\n\n", "\n", 1)


def count_expanded_stages(stages: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    """Return how many stages DVC will have after expanding each matrix by the lists in ``run``."""
    total = 0
    for stage in stages.values():
        lists = [key.strip("${}").removeprefix("run.") for key in stage.get("matrix", {}).values()]
        total += math.prod(len(run.get(name) or ()) for name in lists)
    return total


def build_stage_entries(names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return name → entry in dvc.yaml, by default for the usual stages."""
    names = [stage.name for stage in STAGE_ROWS if stage.usual] if names is None else names
    if unknown := [name for name in names if name not in STAGES]:
        raise UserError(f"stages: found {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    chosen = dict.fromkeys((CODE_STAGE, *names, *LAST_STAGES))
    entries = {name: build_dvc_entry(STAGES[name]) for name in chosen}
    outs = [out for entry in entries.values() for out in entry.get("do", entry)["outs"]]
    # An out may have options: {path: {cache: false}}
    paths = [str(HASHES_DIR), *(out if isinstance(out, str) else next(iter(out)) for out in outs)]
    written = {_top_two_folders(path) for path in paths}
    for entry in entries.values():
        entry = entry.get("do", entry)
        if "deps" in entry:  # without artifacts that no stage writes, such as a missing teacher
            entry["deps"] = [
                path
                for path in entry["deps"]
                if (folder := _top_two_folders(path)) in written
                or "$" in folder
                or not path.startswith("artifacts/")
            ]
    return entries


def build_dvc_entry(stage: Stage) -> dict[str, Any]:
    item = [f"{{{name}}}" for name in stage.item_names]
    command = [f"python -m {STAGES_PREFIX}{stage.module}", stage.words or " ".join(item)]
    settings = [f"code/settings/{key}.json" for key in stage.reads]
    deps = [*(f"code/{hash_file_name(path)}" for path in stage.hash_files), *stage.after, *settings]
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
    names = {name: template.format(name) for name in stage.item_names}  # ${item.seed} for {seed}
    for key, value in entry.items():
        is_list = isinstance(value, list)
        entry[key] = [text.format(**names) for text in value] if is_list else value.format(**names)
    entry |= dict(stage.entry)
    if stage.each == "data":
        return {"foreach": DVC_MATRICES["data"]["key"], "do": {"desc": stage.says, **entry}}
    matrix = {"matrix": dict(DVC_MATRICES[stage.each])} if item else {}
    return {"desc": stage.says, **matrix, **entry}


def _top_two_folders(path: str) -> str:
    return "/".join(path.split("/")[:2])


def _dump_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Return a mapping as YAML, with innermost lists and mappings on one line."""
    text = ""
    for key, inner in value.items():
        values = inner.values() if isinstance(inner, Mapping) else ()
        if any(isinstance(item, Mapping | list) for item in values):
            text += f"{indent}{key}:\n{_dump_yaml(inner, f'{indent}  ')}"
        else:
            line = inner if isinstance(inner, str) else _dump_yaml_on_one_line(inner)
            text += (
                fill(f"{indent}{key}: {line}", 100, subsequent_indent=f"{indent}  ", **WHOLE_WORDS)
                + "\n"
            )
    return text


def _dump_yaml_on_one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_dump_yaml_on_one_line(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_dump_yaml_on_one_line, value))}]"
    if isinstance(value, str) and "$" not in value:
        return value
    return json.dumps(value)
