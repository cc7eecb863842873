"""Runs below .runs/ whose params.yaml is derived: of a folder of pictures, and of a sweep.

A sweep writes one method per point of its grid, so one pipeline runs and compares all of them.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError, write_whole
from moecore.core.source_layout import RUNS
from moecore.pipeline import dvc, own_data
from moecore.pipeline.project import LOCK, hold_project
from moecore.pipeline.study_runs import write_dvc_files
from moecore.study.document import load_yaml_document, parse_yaml_document
from moecore.study.layers import list_folder_stages
from moecore.study.params_file import apply_assignments
from moecore.study.study import read_study

HERE = Path()
METHODS = "methods"
EXAMPLE = "-S 'methods.vmoe.router.k=[1,2,4]'"
OTHER_LETTERS = re.compile("[^a-z0-9]+")


class Axis(NamedTuple):
    """One ``-S methods.METHOD.KEY=[…]``: the key below the method, and its values."""

    key: str
    values: list[Any]

    def name(self, number: int) -> str:
        """Return what a value adds to a method's name: such as k2."""
        value = self.values[number]
        if isinstance(value, dict | list):
            value = value.get("kind", number) if isinstance(value, dict) else number
        letters = OTHER_LETTERS.sub("_", json.dumps(value).lower().replace("-", "m")).strip("_")
        joint = "" if letters[:1].isdigit() else "_"
        return f"{self.key.rpartition('.')[2]}{joint}{letters}"


def write_derived_run(data: Path | None, sets: Sequence[str], is_sweep: bool) -> Path:
    """Write the folder of a run, and return it.

    data: a folder of pictures; None: the run is of the params.yaml here. sets: values as for
    ``-S``; with ``is_sweep``, lists below ``methods.`` are the axes of a grid. Raises UserError.
    """
    path = HERE / "params.yaml"
    name = "sweep"
    if data is not None:
        path = own_data.TEMPLATE
        text = own_data.derive_params_text(data)
        name = f"data.{OTHER_LETTERS.sub('_', data.resolve().name.lower())}"
        stages = own_data.STAGES
    else:
        load_yaml_document(path)  # says where there is no project
        text = path.read_text(encoding="utf-8")
        stages = list_folder_stages(HERE)
    grid: dict[str, list[str]] = {}
    if is_sweep:
        text, grid, suffix = _expand_sweep(text, str(path), sets)
        name += f".{suffix}"
    elif sets:
        text = apply_assignments(text, sets)
    folder = HERE / RUNS / name
    with hold_project(folder / LOCK):
        write_whole(folder / "params.yaml", text)
        write_dvc_files(folder, stages)
        # A project and its runs share a cache
        config = dvc.RUN_CONFIG if (HERE / ".dvc").is_dir() else dvc.CONFIG
        write_whole(folder / ".dvc/config", config + dvc.WITHOUT_GIT)
    _refuse_equal_methods(folder / "params.yaml", [*chain.from_iterable(grid.values())])
    return folder


def _expand_sweep(
    text: str, path: str, sets: Sequence[str]
) -> tuple[str, dict[str, list[str]], str]:
    """Return a params.yaml with the methods of a grid; method → their names; the sweep's name."""
    values, swept = _split_assignments(parse_yaml_document(text, path).data, sets)
    text = apply_assignments(text, values)
    document = parse_yaml_document(text, path)
    present = document.data.get(METHODS, {})
    assignments = []
    grid: dict[str, list[str]] = {}
    for method, axes in swept.items():
        settings = document.get([METHODS, method])
        for point in product(*(range(len(axis.values)) for axis in axes)):
            chosen = list(zip(axes, point, strict=True))
            name = "_".join([method, *(axis.name(number) for axis, number in chosen)])
            if name in present or name in grid.get(method, ()):
                problem = f"two methods that would be called {name}"
                raise UserError.at(
                    f"{METHODS}.{method}", found=problem, allowed="values with other names"
                )
            grid.setdefault(method, []).append(name)
            assignments.append(f"{METHODS}.{name}={json.dumps(settings)}")
            for axis, number in chosen:
                value = json.dumps(axis.values[number])
                assignments.append(f"{METHODS}.{name}.{axis.key}={value}")
    names = list(dict.fromkeys([*document.data["run"][METHODS], *swept]))
    names = [point for name in names for point in grid.get(name, [name])]
    assignments.append(f"run.{METHODS}={json.dumps(names)}")
    keys = [axis.key.rpartition(".")[2] for axes in swept.values() for axis in axes]
    return apply_assignments(text, assignments), grid, "_".join([*swept, *keys])


def _split_assignments(data: Any, sets: Sequence[str]) -> tuple[list[str], dict[str, list[Axis]]]:
    """Return the assignments of single values, and method → axes; data: of the params.yaml."""
    values = []
    swept: dict[str, list[Axis]] = {}
    for assignment in sets:
        name, _, text = assignment.partition("=")
        value = parse_yaml_document(text, f"-S {assignment}").data if text.strip() else None
        section, method, key = [*name.strip().split(".", 2), "", ""][:3]
        if not isinstance(value, list) or isinstance(_value_at(data, (section, method)), list):
            values.append(assignment)  # run.seeds and run.methods are lists
        elif section != METHODS or not key:
            allowed = f"lists for keys below {METHODS}.NAME, such as {EXAMPLE}"
            raise UserError.at(f"-S {name}", found=f"{len(value)} values", allowed=allowed)
        elif len(value) < 2 or key in [axis.key for axis in swept.get(method, ())]:
            problem = "the key twice, or fewer than two values"
            raise UserError.at(f"-S {name}", found=problem, allowed="one list of two or more")
        else:
            swept.setdefault(method, []).append(Axis(key, value))
    if not swept:
        raise UserError.at("--sweep", found="no list to sweep over", allowed=f"such as {EXAMPLE}")
    return values, swept


def _value_at(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _refuse_equal_methods(path: Path, grid: Sequence[str]) -> None:
    """Raise UserError if a method of the grid has the settings of another method that is run."""
    study = read_study(load_yaml_document(path))
    for name, other in product(grid, study.run.methods):
        if name != other and study.methods[name] == study.methods[other]:
            problem = f"the same settings as {other} has"
            raise UserError.at(f"{METHODS}.{name}", found=problem, allowed="values that differ")
