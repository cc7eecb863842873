"""The dvc.yaml of a question: stages of the root's dvc.yaml and of pipelines/stages.yaml, by name.

The folder in which a question runs is a DVC project of its own, so the root's DVC does not read it,
and it does not read the others. All share the root's cache.

After every stage DVC reads and writes the whole dvc.lock beside its dvc.yaml. So a large study has
a dvc.yaml per kind of stage: ``steps/<kind>/dvc.yaml``.
"""

import copy
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from moecore.core.files import UserError
from moecore.core.source_layout import CODE as CODES
from moecore.core.source_layout import SHIPPED, list_project_dvc_files
from moecore.study.document import load_yaml_document

HEAD = "# Written by `moecore study write` from the root's dvc.yaml and pipelines/stages.yaml.\n"
RUN_CONFIG = """\
[cache]
    dir = ../../../.dvc/cache
[core]
    analytics = false
    check_update = false
    autostage = false
"""
WITHOUT_GIT = "    no_scm = true\n"  # a line of the section [core], which is the last
CODE_STAGE = "code"
LAST_STAGES = ("compare", "numbers")
LARGE_STUDY = 500  # stages
MORE_STAGES = SHIPPED / "pipelines/stages.yaml"


def study_dvc_yaml_texts(
    stages: Mapping[str, Any], run: Mapping[str, Any], head: str = HEAD
) -> dict[str, str]:
    """Return path → text of a study's dvc.yaml, or of several where it has many stages.

    run: the section of its params.yaml. head: the comment with which they begin.
    """
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


def count_stages(stages: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    """Return how many stages DVC makes of these, with the lists of ``run``."""
    total = 0
    for stage in stages.values():
        lists = [
            text.strip("${}").removeprefix("run.") for text in stage.get("matrix", {}).values()
        ]
        total += math.prod(len(run.get(name) or ()) for name in lists)
    return total


def list_our_stages(folder: Path) -> list[str]:
    """Return the stages of the dvc.yaml files of a project that this version defines."""
    defined = {**_read_yaml(SHIPPED / "dvc.yaml")["stages"], **_read_yaml(MORE_STAGES)["stages"]}
    names: list[str] = []
    for file in list_project_dvc_files(folder):
        data = load_yaml_document(file).data
        names += (isinstance(data, dict) and data.get("stages")) or ()
    return [name for name in names if name in defined]


def stage_definitions(stages: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the stages of a study. Raises UserError for a stage that is defined nowhere."""
    main = _read_yaml(SHIPPED / "dvc.yaml")["stages"]
    more = _read_yaml(MORE_STAGES)
    defined = {**more["stages"], **main}
    names = list(main if stages is None else stages)
    if unknown := [name for name in names if name not in defined]:
        raise UserError(f"stages: found {unknown[0]!r}; allowed: {', '.join(defined)}")
    chosen = {
        name: copy.deepcopy(defined[name]) for name in (*names, *LAST_STAGES) if name != CODE_STAGE
    }
    for name in chosen:
        for fed, path in more["feeds"].get(name, {}).items():
            if fed in chosen:
                chosen[fed]["deps"].append(path)
    for stage in chosen.values():
        stage.get("do", stage)["deps"] = _without_unwritten(_paths(stage, "deps"), chosen.values())
    return {CODE_STAGE: main[CODE_STAGE], **chosen}


def _without_unwritten(deps: Iterable[str], stages: Iterable[Mapping[str, Any]]) -> list[str]:
    """``deps`` without artifacts that no stage writes, such as the teacher where there is none."""
    heads = {_artifact_folder(path) for stage in stages for path in _paths(stage, "outs")} | {
        str(CODES)
    }
    existing = [
        path for path in deps if _artifact_folder(path) in heads or "$" in _artifact_folder(path)
    ]
    return [path for path in deps if path in existing or not path.startswith("artifacts/")]


def _artifact_folder(path: str) -> str:
    return "/".join(path.split("/")[:2])


def _paths(stage: Mapping[str, Any], key: str) -> list[str]:
    """Deps or outs by their paths, also where an entry has options: ``{path: {cache: false}}``."""
    entries = stage.get("do", stage).get(key, ())
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def _read_yaml(path: Path) -> Any:
    with open(path, encoding="utf-8") as file:
        return YAML(typ="safe", pure=True).load(file)


def _dump_yaml(value: Any) -> str:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False
    writer.width = 1000
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()
