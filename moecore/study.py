"""The whole of params.yaml: everything that the stages of a dvc.yaml read, and ``run:``, which says what is computed.

The model is assembled from the ``Params`` of the stages themselves, so this check cannot disagree with what they read.

``python -m moecore.study check [params.yaml]`` · ``python -m moecore.study schema [params.yaml]``
"""

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import create_model

from moecore.checks import cross_checks
from moecore.config import Config
from moecore.files import StageError, write_json
from moecore.params import keys, validate_whole
from moecore.selection import Phase, Selection
from moecore.sources import ROOT
from moecore.yaml12 import load

NAMED = {"data": Phase}  # sections whose entries have fixed names; those of the others (methods) are free


def check(path: str | Path = "params.yaml") -> Config:
    """Validate the whole file for the stages of the dvc.yaml beside it; raises StageError with one line per problem."""
    document = load(str(path))
    model = study_model(stage_params(Path(path)))
    study, problems = None, []
    try:
        study = validate_whole(model, document)
    except StageError as error:
        problems = str(error).split("\n")
    problems += [line for line in cross_checks(document, study) if line not in problems]
    if problems:
        raise StageError("\n".join(sorted(problems, key=_line)))
    return study


def study_model(stages: Mapping[str, type[Config]]) -> type[Config]:
    """One model whose fields are the top-level keys that these stages' Params name."""
    tree: dict[str, Any] = {"run": (Selection, ...)}
    for stage, params in stages.items():
        hints = get_type_hints(params, include_extras=True)
        for name, key in keys(params).items():
            field = params.model_fields[name]
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
            _graft(tree, key.split("."), (hints[name], default), f"stages.{stage}: {key}")
    return _model("Study", tree)


def stage_params(path: Path) -> dict[str, type[Config]]:
    """Stage → its Params, for the stages that the dvc.yaml beside ``path`` runs (all stages where there is none)."""
    pipeline = path.with_name("dvc.yaml")
    if pipeline.exists():
        names = dict.fromkeys(re.findall(r"-m stages\.(\w+)", pipeline.read_text(encoding="utf-8")))
    else:
        names = dict.fromkeys(file.stem for file in sorted((ROOT / "stages").glob("[a-z]*.py")))
    modules = {name: importlib.import_module(f"stages.{name}") for name in names}  # by name: floor 5 is above this one
    return {name: module.Params for name, module in modules.items() if hasattr(module, "Params")}


def schema(path: str | Path = "params.yaml") -> dict[str, Any]:
    """The JSON schema of the file at ``path``, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | study_model(stage_params(Path(path))).model_json_schema()


def _graft(tree: dict[str, Any], words: list[str], leaf: tuple[Any, Any], what: str) -> None:
    word, *rest = words
    if not rest:
        old = tree.setdefault(word, leaf)
        if isinstance(old, dict) and set(old) <= set(getattr(_bare(leaf[0]), "model_fields", ())):  # an earlier stage reads parts of this section
            old = tree[word] = leaf
        if isinstance(old, dict) or _bare(old[0]) != _bare(leaf[0]):
            raise TypeError(f"{what} has another type than in an earlier stage")
        return
    branch = tree.setdefault(word, {})
    if isinstance(branch, dict):
        _graft(branch, rest, leaf, what)


def _bare(hint: Any) -> Any:
    """A field's type without its Key."""
    return hint.__origin__ if hasattr(hint, "__metadata__") and any(type(note).__name__ == "Key" for note in hint.__metadata__) else hint


def _model(name: str, tree: dict[str, Any]) -> type[Config]:
    fields: dict[str, Any] = {}
    for word, node in tree.items():
        if not isinstance(node, dict):
            fields[word] = (_bare(node[0]), node[1])
        elif free := [key for key in node if key.startswith("{")]:
            fields[word] = (dict[NAMED.get(word, str), _bare(node[free[0]][0])], ...)
        else:
            fields[word] = (_model(word.title(), node), ...)
    return create_model(name, __base__=Config, **fields)


def _line(problem: str) -> tuple[int, int]:
    place = re.match(r".*?:(\d+):(\d+): ", problem)
    return (int(place[1]), int(place[2])) if place else (0, 0)


def main(words: list[str]) -> Iterator[str]:
    """The lines to print."""
    command, path = (words[0] if words else ""), (words[1] if len(words) > 1 else "params.yaml")
    if command == "check":
        study = check(path)
        yield f"{path}: in order ({', '.join(study.run.methods)}; seeds {', '.join(map(str, study.run.seeds))})"
    elif command == "schema":
        target = Path(path).with_name("params.schema.json")
        write_json(target, schema(path))
        yield f"{target}: written"
    else:
        raise StageError("usage: python -m moecore.study check|schema [params.yaml]")


if __name__ == "__main__":
    try:
        for line in main(sys.argv[1:]):
            print(line)
    except StageError as error:
        sys.exit(str(error))
